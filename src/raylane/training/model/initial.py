"""Random initial weights, made one module at a time, so that no process holds a whole model.

The values of a module depend on the seed of the run and the name of the module alone: every layout of workers, and
every process that makes the same model, gets the same weights. Called by `build`, after the model was divided.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from raylane.errors import ConfigError
from raylane.training.model import lora


def fill_random(causal_lm: Any, seed: int) -> None:
    """Fill the parameters of a divided model with initial weights; each worker keeps its part of every module.

    Adapters are left to `lora.initialise`. The peak of memory is the largest parameter, whole, beside the model.
    """
    mine = {id(parameter) for parameter in lora.base_parameters(causal_lm).values()}
    filled = set[int]()
    for name, module in causal_lm.named_modules():
        parameters = {
            key: parameter
            for key, parameter in module.named_parameters(recurse=False)
            # The head of a tied model is the embedding, which comes first.
            if id(parameter) in mine and id(parameter) not in filled
        }
        if parameters:
            values = random_weights(
                causal_lm, module, name, {key: parameter.shape for key, parameter in parameters.items()}, seed
            )
            for key, parameter in parameters.items():
                # Popped, so that the whole value of one parameter is gone before the next one is divided.
                lora.fill(parameter, values.pop(key))
            filled |= {id(parameter) for parameter in parameters.values()}


def random_weights(
    causal_lm: Any, module: nn.Module, name: str, shapes: dict[str, torch.Size], seed: int
) -> dict[str, Tensor]:
    """Return whole initial values, float32 on the CPU, of a module's own parameters of these shapes.

    transformers' own rule for this model fills them (`_init_weights`), in a stand-in for the module: a copy that has
    whole parameters, and shares everything else with it.
    """
    stand_in = copy.copy(module)
    # Keys without a parameter of their own stay, as None: the rules look at `bias` of every linear layer.
    stand_in._parameters = dict.fromkeys(module._parameters)
    stand_in._parameters |= {key: nn.Parameter(torch.full(shape, torch.nan)) for key, shape in shapes.items()}
    # An adapted layer has the values that it would have without its adapter.
    name = name.removesuffix(".base")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(lora.seed_of(seed, name))
        causal_lm._init_weights(stand_in)
    values = {key: parameter.detach() for key, parameter in stand_in._parameters.items() if parameter is not None}
    if unset := [key for key, value in values.items() if bool(value.isnan().any())]:
        raise ConfigError(
            f"transformers' rule for {type(causal_lm).__name__} gives {name}.{unset[0]} no random values; start from a "
            "folder with weights (policy.model_name)"
        )
    return values
