"""Mappings: loaders of published model types, rules, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.weights.small_models import SMALL
from tests.weights.stored_layouts import apply_record, stored_whole
from transformers import AutoConfig, AutoModelForCausalLM

from raylane.errors import WeightsLayoutError
from raylane.weights import Mapping

Tensors = Iterable[tuple[str, torch.Tensor]]
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gemma2": {"head_dim": 8},
    "phi3": {"pad_token_id": 0},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "head_dim": 8, **EXPERTS},
    "olmoe": {"num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **EXPERTS,
        **LATENT,
    },
}


def model_of(kind: str) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind.partition("-")[0], **SMALL | CONFIGS[kind]))


def distinct(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    first: dict[int, str] = {}
    tensors = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in tensors.items() if first.setdefault(id(tensor), name) == name}


@pytest.mark.claim("weights", "Hugging Face folders become models with other names and shapes, experts included")
@pytest.mark.parametrize("kind", CONFIGS)
def test_hugging_face_folders_become_models(kind: str, tmp_path: Path) -> None:
    trained, reader = model_of(kind), model_of(kind)
    trained.save_pretrained(tmp_path)
    folder = load_file(tmp_path / "model.safetensors")

    def load(tensors: Tensors) -> Any:
        return type(reader).from_pretrained(None, config=reader.config, state_dict=dict(tensors))

    targets = distinct(reader)
    record = Mapping.record(load).recorded(stored_whole(folder), targets, subset=False)
    apply_record(record, folder, targets)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(reader.state_dict()[name], tensor), name
    with_experts = kind in ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3")
    assert (len(folder) > len(targets)) == with_experts  # experts are stacked, and gate and up fused


def published() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.q.weight": (8, 4), "a.k.weight": (4, 4), "a.v.weight": (4, 4), "a.gu.weight": (6, 4), "a.o": (4, 6)}
    return {f"model.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def mapped(mapping: Mapping, targets: dict[str, torch.Tensor], *, subset: bool = False) -> dict[str, torch.Tensor]:
    tensors = published()
    apply_record(mapping.recorded(stored_whole(tensors), targets, subset=subset), tensors, targets)
    return targets


@pytest.mark.claim("weights", "other names and shapes are read by the reader's own loader or by rules")
def test_rules_rename_fuse_split_and_transpose() -> None:
    mapping = (
        Mapping()
        .rename(r"^model\.", "")
        .fuse(["q", "k", "v"], "qkv")
        .split("gu", ["gate", "up"], sizes=[2, 4])
        .transpose("o")
        .prefix("engine.")
    )
    targets = {
        "engine.a.qkv.weight": torch.zeros(16, 4, dtype=torch.bfloat16),
        "engine.a.gate.weight": torch.zeros(2, 4),
        "engine.a.up.weight": torch.zeros(4, 4),
        "engine.a.o": torch.zeros(6, 4),
    }
    got, tensors = mapped(mapping, targets), published()
    fused = torch.cat([tensors[f"model.a.{part}.weight"] for part in "qkv"])
    assert torch.equal(got["engine.a.qkv.weight"], fused.bfloat16())  # converted without a rule
    gate, up = tensors["model.a.gu.weight"].split([2, 4])
    assert torch.equal(got["engine.a.gate.weight"], gate)
    assert torch.equal(got["engine.a.up.weight"], up)
    assert torch.equal(got["engine.a.o"], tensors["model.a.o"].t())
    assert repr(mapping).startswith("Mapping().rename('^model\\\\.', '').fuse(['q', 'k', 'v'], 'qkv', dim=0)")


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (Mapping(), "makes 5 tensors that the reader does not have: 'model.a.q.weight'"),
        (Mapping().fuse(["q", "w"], "qw"), r"'model.a.qw.weight' cannot be fused: of \['q', 'w'\], \['w'\]"),
        (Mapping().split("gu", ["g", "u"], sizes=[1, 2]), "has 6 rows in dimension 0, which cannot be split"),
        (Mapping().rename(r"a\.[qkv]\.", "a."), "gives several tensors the name 'model.a.weight'"),
    ],
)
def test_rules_that_do_not_fit_say_why(mapping: Mapping, message: str) -> None:
    with pytest.raises(WeightsLayoutError, match=message):
        mapped(mapping, {"x": torch.zeros(2, 2)})


def test_another_shape_is_refused() -> None:
    with pytest.raises(WeightsLayoutError, match=r"gives 'x' the shape \(4, 6\), and the reader has \(2, 2\)"):
        mapped(Mapping().rename(r".*\.o$", "x"), {"x": torch.zeros(2, 2)}, subset=True)


def test_further_names_of_tied_tensors_are_used_where_needed() -> None:
    tensors, same = {"embed": torch.ones(2, 2)}, {"head": "embed"}
    targets = {"x.embed": torch.zeros(2, 2), "x.head": torch.zeros(2, 2)}
    for wanted in (targets, {"x.embed": torch.zeros(2, 2)}):  # untied, and tied
        record = Mapping().prefix("x.").recorded(stored_whole(tensors, same), wanted, subset=False)
        apply_record(record, tensors, wanted)
        assert all(bool((tensor == 1).all()) for tensor in wanted.values())


def test_a_recorded_loader_takes_no_rules() -> None:
    with pytest.raises(ValueError, match="a recorded loader takes no rules"):
        Mapping.record(print).prefix("x.")


# What recording refuses


def loaded(load: Callable[[str, torch.Tensor, torch.Tensor], Any], *, subset: bool = False) -> torch.Tensor:
    """Return a parameter of 8 rows, 4 columns after a mapped loader has treated each published tensor."""
    parameter = torch.nn.Parameter(torch.full((8, 4), -1.0))

    def load_all(tensors: Tensors) -> None:
        for name, tensor in tensors:
            load(name, tensor, parameter.data)

    return mapped(Mapping.record(load_all), {"w": parameter}, subset=subset)["w"].detach()


def only_q(load: Callable[[torch.Tensor, torch.Tensor], Any]) -> torch.Tensor:
    return loaded(lambda name, tensor, into: load(tensor, into) if name == "model.a.q.weight" else None)


def test_padding_that_a_loader_fills_is_kept() -> None:
    def pad(tensor: torch.Tensor, into: torch.Tensor) -> None:
        into[:6].copy_(tensor[2:])
        into[6:].fill_(7)

    expected = torch.cat([published()["model.a.q.weight"][2:], torch.full((2, 4), 7.0)])
    assert torch.equal(only_q(pad), expected)


def test_copies_and_reordered_halves_are_followed() -> None:
    def rotate(tensor: torch.Tensor, into: torch.Tensor) -> None:
        halves = tensor.view(2, 2, 2, 4).transpose(1, 2).reshape(8, 4)  # as rotary embeddings are reordered
        into.copy_(torch.cat([halves.clone()[4:], halves[:4]]))

    halves = published()["model.a.q.weight"].view(2, 2, 2, 4).transpose(1, 2).reshape(8, 4)
    assert torch.equal(only_q(rotate), torch.cat([halves[4:], halves[:4]]))


def test_elements_that_are_repeated_are_followed() -> None:
    expected = published()["model.a.q.weight"].view(-1)[:16].expand(2, 16).reshape(8, 4)
    assert torch.equal(only_q(lambda tensor, into: into.view(2, 16).copy_(tensor.view(-1)[:16])), expected)


@pytest.mark.claim("weights", "a loader that computes is refused with the operation and the line")
@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            lambda tensor, into: into.copy_(tensor * 2),
            r"aten.mul.Tensor cannot be recorded, on 'model.a.q.weight', at ",
        ),
        (lambda tensor, into: into.add_(tensor), r"aten.add_.Tensor cannot be recorded"),
        (lambda tensor, into: into.copy_(tensor[torch.tensor([1] * 8)]), "aten.index.Tensor cannot be recorded"),
        (lambda tensor, into: tensor.sum().item(), "aten.sum.default cannot be recorded"),
        (lambda tensor, into: torch.zeros(8, 4).copy_(tensor), "into a tensor that is none of the reader's"),
        (lambda tensor, into: into[:4].copy_(tensor[:4]), "writes 16 of the 32 elements of 'w' from"),
        (lambda tensor, into: into.copy_(tensor.bfloat16()), "converted float32 -> bfloat16 -> float32"),
        (lambda tensor, into: None, "writes nothing into 1 tensors of the reader: 'w'"),
    ],
)
def test_operations_that_change_values_are_refused(load: Any, message: str) -> None:
    with pytest.raises(WeightsLayoutError, match=message) as refused:
        only_q(load)
    if "cannot be recorded" in message:
        assert f"{Path(__file__).name}:" in str(refused.value)


def test_elements_that_are_written_twice_are_refused() -> None:
    def twice(name: str, tensor: torch.Tensor, into: torch.Tensor) -> None:
        if tensor.shape == (4, 4):
            into[2:6].copy_(tensor)

    with pytest.raises(WeightsLayoutError, match="writes 32 of the 32 elements of 'w', some twice"):
        loaded(twice)


def test_a_refusal_that_a_loader_swallows_is_raised() -> None:
    def careless(tensor: torch.Tensor, into: torch.Tensor) -> None:
        try:
            into.copy_(tensor.abs())
        except WeightsLayoutError:
            into.copy_(tensor)

    with pytest.raises(WeightsLayoutError, match=r"aten\.abs\.default cannot be recorded"):
        only_q(careless)


def test_tensors_of_a_dict_that_nothing_fills_are_named() -> None:
    mapping = Mapping().rename(r"^model\.a\.(?=[qk])", "")
    targets = {"q.weight": torch.zeros(8, 4), "k.weight": torch.zeros(4, 4), "b": torch.zeros(2)}
    tensors = {name: tensor for name, tensor in published().items() if name[8] in "qk"}
    with pytest.raises(WeightsLayoutError, match="writes nothing into 1 tensors of the reader: 'b'"):
        mapping.recorded(stored_whole(tensors), targets, subset=False)
    apply_record(mapping.recorded(stored_whole(tensors), targets, subset=True), tensors, targets)
    assert torch.equal(targets["q.weight"], tensors["model.a.q.weight"])


def test_buffers_are_filled_where_they_are_published() -> None:
    trained, reader = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    everything = {name: tensor.clone() for name, tensor in trained.state_dict().items()}

    def load(tensors: Tensors) -> None:
        for name, tensor in tensors:
            if not name.startswith("running"):
                reader.state_dict()[name].copy_(tensor)

    targets = reader.state_dict(keep_vars=True)
    with pytest.raises(WeightsLayoutError, match="writes nothing into 2 tensors of the reader: 'running_mean', "):
        Mapping.record(load).recorded(stored_whole(everything), targets, subset=False)
    weights_alone = {name: tensor for name, tensor in everything.items() if name in ("weight", "bias")}
    assert set(Mapping.record(load).recorded(stored_whole(weights_alone), targets, subset=False).regions) == {
        "weight",
        "bias",
    }


def test_tensors_of_a_subset_may_stay_as_they_are() -> None:
    assert bool((loaded(lambda *_: None, subset=True) == -1).all())
