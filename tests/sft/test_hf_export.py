"""The Hugging Face folder that all ranks write: plan of its files, headers, data types, and failures of one rank."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.sft import tiny_run

from raylane.sft.data.prepare import prepare
from raylane.training.checkpoint import export as export_module
from raylane.training.checkpoint.export import FileTensor, plan_files, rounds
from raylane.training.config.load import dump

SHAPES = {"a": (4, 2), "b": (8,), "c": (3, 3), "d": ()}


def stored_as(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32):
    """Return the tensors of weights that files hold under their own names."""
    return {name: {name: FileTensor(shape, dtype)} for name, shape in shapes.items()}


def test_files_are_filled_in_order_and_writers_take_turns():
    files = plan_files([stored_as(SHAPES), stored_as(SHAPES)], bytes_per_file=64)
    assert [(file.writer, list(file.tensors)) for file in files] == [(0, ["a", "b"]), (1, ["c", "d"])]
    assert [file.name for file in files] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    single = plan_files([stored_as(SHAPES)], bytes_per_file=1)
    assert [list(file.tensors) for file in single] == [["a"], ["b"], ["c"], ["d"]]


def test_tensors_of_one_weight_stay_in_one_file():
    """They are gathered together, by the ranks that hold the weight."""
    experts = {f"experts.{number}": FileTensor((8,), torch.bfloat16) for number in range(4)}
    files = plan_files([{**stored_as({"a": (4,)}), "experts": experts}], bytes_per_file=32)
    assert [list(file.tensors) for file in files] == [["a"], list(experts)]
    assert [list(file.weights) for file in files] == [["a"], ["experts"]]


def test_weights_of_another_stage_get_files_of_their_own():
    first, second = stored_as({"a": (2,), "b": (2,)}), stored_as({"b": (2,), "c": (2,)})
    files = plan_files([first, first, second, second])
    assert [(file.holders, list(file.tensors)) for file in files] == [
        ((0, 1), ["a"]),
        ((0, 1, 2, 3), ["b"]),
        ((2, 3), ["c"]),
    ]
    assert all(file.writer in file.holders for file in files)
    for together in rounds([*files, *files]):
        assert len({file.writer for file in together}) == len(together), "a rank writes one file at a time"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_header_is_read_by_safetensors(tmp_path, dtype):
    planned = stored_as(SHAPES, dtype)
    planned["d"] = {"d": FileTensor((), torch.float32)}  # a buffer
    (file,) = plan_files([planned])
    weights = {name: torch.randn(shape).to(file.tensors[name].dtype) for name, shape in SHAPES.items()}
    head = file.header()
    assert len(head) % 8 == 0
    body = b"".join(bytes(weight.reshape(-1).view(torch.uint8).numpy()) for weight in weights.values())
    (tmp_path / "one.safetensors").write_bytes(head + body)
    with safe_open(tmp_path / "one.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert all(torch.equal(opened.get_tensor(name), weight) for name, weight in weights.items())


def export(worker, config, prepared, folder: str, bytes_per_file: int):
    """Build the model and export it; return the error, None if there is none."""
    worker.setup(config, prepared, 8)
    plan = export_module.plan_files
    export_module.plan_files = functools.partial(plan, bytes_per_file=bytes_per_file)
    try:
        worker.save_hf(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        export_module.plan_files = plan
    return None


def stored(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(one.numel() * one.element_size() for one in found.values())
    return found


LAYOUTS = {
    "fsdp": {"policy.dtensor_cfg.shard_parameters": "always"},
    "whole": {"policy.dtensor_cfg.shard_parameters": "never"},
    "stages": {
        "policy.dtensor_cfg.pipeline_parallel_size": 2,
        "policy.hf_config_overrides.tie_word_embeddings": False,
    },
    "tensors": {"policy.dtensor_cfg.tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("export")
    tiny_run.write_data(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        # Each layout with one dtype, by turns.
        pytest.param(layout, dtype, marks=[] if (number + offset) % 2 == 0 else pytest.mark.matrix)
        for number, layout in enumerate(LAYOUTS)
        for offset, dtype in enumerate(("float32", "bfloat16"))
    ],
)
def test_export_of_any_layout_is_the_model(ranks, folder, tmp_path, layout, dtype):
    changes = {"cluster.num_workers": 2, "checkpointing.hf_dtype": dtype, **LAYOUTS[layout]}
    config = tiny_run.config_of(folder, changes)
    prepared = prepare(config)
    assert ranks.run(export, config, prepared, str(tmp_path / "hf"), 20_000) == [None, None]
    wanted = dict(tiny_run.reference_model(config, prepared).named_parameters())
    found = stored(tmp_path / "hf")
    assert set(wanted) <= set(found)
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight.to(getattr(torch, dtype))), name
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2, "both ranks had files to write"
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == dtype
    assert dump(config)["checkpointing"]["hf_dtype"] == dtype


@pytest.mark.slow
def test_failure_of_one_writer_is_raised_on_all_ranks(ranks, folder, tmp_path):
    config = tiny_run.config_of(folder, {"cluster.num_workers": 2, **LAYOUTS["fsdp"]})
    # The name of the file that rank 1 writes is taken by a folder.
    count = len(plan_files([stored_as(shapes_of(config))], 20_000))
    (tmp_path / f"hf/model-00002-of-{count:05d}.safetensors").mkdir(parents=True)
    first, second = ranks.run(export, config, prepare(config), str(tmp_path / "hf"), 20_000)
    assert first == second
    assert first.startswith("CheckpointError: the model could not be written to")
    assert "Is a directory" in first
    assert not (tmp_path / "hf/config.json").exists()


def shapes_of(config) -> dict[str, tuple[int, ...]]:
    model = tiny_run.reference_model(config, prepare(config))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
