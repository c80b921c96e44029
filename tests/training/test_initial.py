"""Random initial weights made one module at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from raylane.errors import ConfigError
from raylane.training.config.policy import LoraConfig
from raylane.training.model import lora
from raylane.training.model.initial import fill_random, random_weights
from sft import reference_loop

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "pad_token_id": 7,
}  # fmt: skip


def empty(model_type: str, **changes: Any) -> Any:
    """Return a model whose weights are not set."""
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    return model


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_follow_the_rule_of_the_model(model_type: str, tied: bool) -> None:
    model = empty(model_type, tie_word_embeddings=tied)
    fill_random(model, 5)
    found = dict(model.named_parameters())
    wanted = dict(reference_loop.new_model(model.config, 5).named_parameters())
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name
    # The distribution, by what transformers gives to a whole model.
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    for name, parameter in whole.named_parameters():
        values, made = parameter.detach(), found[name].detach()
        assert abs(float(values.std() - made.std())) < 2e-3, name
        assert abs(float(values.mean() - made.mean())) < 2e-3, name
    assert not found["model.embed_tokens.weight"][7].any(), "the row of padding is zero"


def test_weights_without_a_rule_are_refused() -> None:
    """They would be whatever was in that memory."""
    model = empty("llama")
    layer = model.model.layers[0].mlp
    layer.gate = nn.Module()
    layer.gate.weight = nn.Parameter(torch.empty(3))
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.gate\.weight no random values; start from a folder"):
        fill_random(model, 1)


def test_random_weights_differ_by_seed_and_module() -> None:
    model = empty("llama")
    first, second = model.model.layers[0].mlp.up_proj, model.model.layers[1].mlp.up_proj
    shapes = {"weight": first.weight.shape}
    one = random_weights(model, first, "layers.0", shapes, 1)["weight"]
    assert torch.equal(one, random_weights(model, first, "layers.0", shapes, 1)["weight"])
    assert not torch.equal(one, random_weights(model, second, "layers.1", shapes, 1)["weight"])
    assert not torch.equal(one, random_weights(model, first, "layers.0", shapes, 2)["weight"])


def test_random_weights_leave_the_random_state_alone() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    fill_random(empty("llama"), 1)
    assert torch.equal(torch.rand(4), wanted)


def test_adapted_layers_have_the_weights_of_plain_ones() -> None:
    plain, adapted = empty("llama"), empty("llama")
    lora.adapt(adapted, LoraConfig(enabled=True, dim=2))
    fill_random(plain, 1)
    fill_random(adapted, 1)
    wanted = dict(plain.named_parameters())
    found = lora.base_parameters(adapted)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], values) for name, values in wanted.items())
