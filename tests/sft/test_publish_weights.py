"""Weights that a run publishes while it trains: on every layout, readers get the model of the exported folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raylane import weights
from raylane.errors import WeightsTimeoutError
from raylane.sft.run import trainer
from raylane.training.checkpoint import folders
from raylane.training.report.metrics import read_metrics
from sft import tiny_run
from sft.layouts import LAYOUTS, SCHEDULE
from sft.worker_run import WorkerRun

NAME = "policy.publish_weights.name"
LORA = {"policy.dtensor_cfg.lora_cfg": {"enabled": True, "dim": 3, "alpha": 6}, "policy.optimizer.kwargs.lr": 5e-2}
UNTIED = {"policy.hf_config_overrides.tie_word_embeddings": False}
HALF = {"policy.publish_weights.dtype": "bfloat16", "checkpointing.hf_dtype": "bfloat16"}
QUICK = {"tp2-pp2-lora", "dp2-cp2", "hsdp2x2"}
"""Cases of four workers that together use every axis; `make test` runs these."""
SLOW = {"tp2", "tp2-cp2", "pp2-interleaved", "dp2-pp2", "hsdp2x2-lora"}
"""Cases that `make test-all` runs too."""
FURTHER = {"dp2-cp2": UNTIED, "hsdp2x2": HALF}
"""Further settings of layouts without LoRA."""


def layouts_of(workers: int) -> Iterator[Any]:
    """Yield the layouts of so many workers, each without and with LoRA, and the mark of each case."""
    for layout in [layout for layout, (world, _) in LAYOUTS.items() if world == workers]:
        for case, further in ((layout, FURTHER.get(layout, {})), (f"{layout}-lora", LORA)):
            mark = [] if case in QUICK else [pytest.mark.slow] if case in SLOW else [pytest.mark.matrix]
            yield pytest.param(layout, further, marks=mark, id=case)


@pytest.fixture(scope="module")
def two(ray_session: None, folder: Path) -> Iterator[WorkerRun]:
    run = WorkerRun(folder, 2)
    yield run
    assert run.policy.shutdown()


@pytest.fixture(scope="module")
def four(ray_session: None, folder: Path) -> Iterator[WorkerRun]:
    run = WorkerRun(folder, 4)
    yield run
    assert run.policy.shutdown()


@pytest.fixture
def published(cluster: None) -> Iterator[str]:
    """Return the name of the weights, which is dropped afterwards: that ends the actors behind it."""
    yield "policy"
    weights.drop("policy")


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_readers_get(name: str, hf: Path, step: int) -> None:
    """Assert that a plain Hugging Face model and a dict of tensors read the version of a step, bit for bit."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stored = exported(hf)
    tensors = {key: torch.zeros_like(tensor) for key, tensor in stored.items()}
    config = AutoConfig.from_pretrained(hf)
    model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    for reader in (tensors, model):
        subscriber = weights.Subscriber(name, reader)
        assert subscriber.update(timeout=30).step == step
        subscriber.close()
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
    state = model.state_dict()
    assert set(state) == {*stored, *tied}
    for key, tensor in stored.items():
        assert torch.equal(tensors[key], tensor), key
    for key, tensor in state.items():
        assert torch.equal(tensor, stored[tied.get(key, key)]), key


def check_layout(run: WorkerRun, name: str, hf: Path, layout: str, further: dict[str, Any]) -> None:
    """Train two steps and compare what readers get with the exported folder."""
    dimensions = {f"policy.dtensor_cfg.{key}": value for key, value in LAYOUTS[layout][1].items()}
    layers = 4 if SCHEDULE in LAYOUTS[layout][1] else 2  # some schedules have two stages on each worker
    run.start({"policy.hf_config_overrides.num_hidden_layers": layers, **dimensions, **further, NAME: name})
    run.losses(range(2))
    run.policy.save_hf(hf)
    assert_readers_get(name, hf, 2)
    assert [version.step for version in weights.versions(name)] == [1, 2]


@pytest.mark.claim("weights", "a fine-tuning run of several workers publishes its weights")
@pytest.mark.parametrize(("layout", "further"), list(layouts_of(4)))
def test_readers_get_the_model_of_four_workers(
    four: WorkerRun, published: str, tmp_path: Path, layout: str, further: dict[str, Any]
) -> None:
    check_layout(four, published, tmp_path / "hf", layout, further)


@pytest.mark.parametrize(("layout", "further"), list(layouts_of(2)))
def test_readers_get_the_model_of_two_workers(
    two: WorkerRun, published: str, tmp_path: Path, layout: str, further: dict[str, Any]
) -> None:
    check_layout(two, published, tmp_path / "hf", layout, further)


@pytest.mark.slow
def test_weights_are_published_again_after_a_load(two: WorkerRun, published: str) -> None:
    two.start({NAME: published, "policy.publish_weights.every": 2})
    saved = two.policy.save({})
    two.policy.publish_weights()
    model = tiny_run.reference_model(two.config, two.prepared)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    subscriber = weights.Subscriber(published, model)
    two.losses(range(2))
    two.policy.publish_weights()  # step 2 has published them
    assert subscriber.update(timeout=30).step == 2
    assert subscriber.version == 2
    assert not all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert two.policy.load(saved.path) == 0
    two.policy.publish_weights()
    assert subscriber.update(timeout=30).step == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    subscriber.close()


def config_of_run(folder: Path, place: Path, changes: dict[str, Any]) -> Any:
    places = {"checkpointing.checkpoint_dir": str(place / "saved"), "logger.log_dir": str(place / "logs")}
    return tiny_run.config_of(folder, {**places, "checkpointing.save_period": 2, **changes})


def test_reader_that_holds_a_version_ends_the_run(
    published: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the keys; the same run goes on with two workers, and its versions outlive it."""
    reader = tiny_run.reference_model(config := config_of_run(folder, tmp_path, {}), tiny_run.prepared_in(folder))
    subscriber = weights.Subscriber(published, reader, apply="map")
    read = trainer.Trainer._read_oldest

    def map_after_the_first_step(loop: trainer.Trainer) -> None:
        read(loop)
        if subscriber.version == 0:
            subscriber.update(timeout=30)

    monkeypatch.setattr(trainer.Trainer, "_read_oldest", map_after_the_first_step)
    with pytest.raises(WeightsTimeoutError, match=r"rank 0 cannot publish step [34] .*publish_weights\.keep"):
        trainer.run(config_of_run(folder, tmp_path, {NAME: published, "policy.publish_weights.timeout_s": 2}))
    monkeypatch.undo()
    saved = folders.find(config.checkpointing)
    assert saved is not None
    assert saved.step == 2
    subscriber.close()

    changes = {"cluster.num_workers": 2, "sft.max_num_steps": 5, "policy.publish_weights.every": 2}
    result = trainer.run(config_of_run(folder, tmp_path, {**changes, NAME: published}))
    assert (result.steps, result.stopped) == (5, False)
    # Step 5 is no multiple of 2, but the last one.
    assert [version.step for version in weights.versions(published)] == [4, 5]
    assert_readers_get(published, Path(str(result.hf_dir)), 5)
    lines = read_metrics(tmp_path / "logs/metrics.jsonl")
    assert [line["step"] for line in lines if line.get("train:publish_time_s", 0.0) > 0.0] == [1, 2, 4]
