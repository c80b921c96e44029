"""Adapters of a `PeftModel`, and torch modules of other names, as engines that take versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

from raylane import weights
from raylane.errors import WeightsLayoutError

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
PEFT_NAMES = weights.Mapping().rename(r"\.(lora_[AB])\.", r".\1.default.")


@pytest.fixture(autouse=True)
def dropped() -> Iterator[None]:
    yield
    weights.drop("policy-lora")


def new_model() -> Any:
    """Return a small model with adapters that have no effect yet."""
    torch.manual_seed(0)
    options = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = AutoConfig.for_model("llama", **options, num_attention_heads=4, initializer_range=0.3, eos_token_id=None)
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    return get_peft_model(AutoModelForCausalLM.from_config(config), adapters).eval()


def train(model: Any) -> None:
    """Change the adapters at random."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.3)


def answer(model: Any) -> Any:
    prompt = torch.tensor([[1, 2, 3]])
    return model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)


@pytest.mark.claim("weights", "a PEFT model takes versions of adapters")
def test_a_peft_model_takes_versions_of_adapters() -> None:
    trained, reader = new_model(), new_model()
    publisher = weights.Publisher("policy-lora", get_peft_model_state_dict(trained))
    attachment = weights.attach(reader, "policy-lora", mapping=PEFT_NAMES, subset=True, initial="allow")
    base = {name: each.clone() for name, each in reader.state_dict().items() if "lora_" not in name}
    answers = [answer(reader)]
    for version in (1, 2):
        train(trained)
        publisher.publish(version)
        update = attachment.update()
        assert (update.version, update.changed) == (version, True)
        answers.append(tokens := answer(reader))
        assert torch.equal(tokens, answer(trained))
        assert tokens.weight_versions == [(version, 0, 8)]
    assert not torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[1], answers[2])
    assert all(torch.equal(reader.state_dict()[name], each) for name, each in base.items())
    with reader.disable_adapter():
        assert torch.equal(answer(reader), answers[0])
    attachment.close()


def test_a_subscriber_takes_adapters_by_name() -> None:
    trained, reader = new_model(), new_model()
    train(trained)
    weights.Publisher("policy-lora", get_peft_model_state_dict(trained)).publish(0)
    weights.Subscriber("policy-lora", reader, subset=True, mapping=PEFT_NAMES).update()
    assert torch.equal(answer(reader), answer(trained))


def test_a_peft_model_without_subset_is_refused() -> None:
    weights.Publisher("policy-lora", get_peft_model_state_dict(new_model())).publish(0)
    with pytest.raises(WeightsLayoutError, match=r"the loader writes nothing into .* Pass subset=True"):
        weights.attach(new_model(), "policy-lora", mapping=PEFT_NAMES)


def test_a_module_with_a_mapping_takes_other_names() -> None:
    published, reader = torch.nn.Linear(2, 2), torch.nn.Module()
    reader.inner = torch.nn.Linear(2, 2)
    weights.Publisher("policy-lora", published).publish(0)
    attachment = weights.attach(reader, "policy-lora", mapping=weights.Mapping().prefix("inner."))
    attachment.update()
    assert torch.equal(reader.inner.weight, published.weight)
    attachment.close()


def test_options_of_other_engines_are_refused() -> None:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"lora cannot be used for Linear: .* Pass a mapping and subset=True"):
        weights.attach(module, "policy-lora", lora={})
    with pytest.raises(ValueError, match="keep cannot be used for Linear without lora"):
        weights.attach(module, "policy-lora", keep=2)
