"""Schema of the section `policy.optimizer`: AdamW, Muon, and parameters with settings of their own.

A part of the tree in `schema.py`, whose rules hold here too.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from raylane.sft import overrides
from raylane.sft.schema_types import Fraction, NaturalFloat, PositiveFloat, PositiveInt, Section

__all__ = ["AdamWKwargs", "MuonConfig", "OptimizerConfig", "OptimizerGroup"]

# Arguments of torch.optim.AdamW besides the four declared ones (torch 2.13, torch/optim/adamw.py). They are checked
# here because torch would refuse an unknown argument only later, inside a worker.
ADAMW_EXTRAS = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")


class AdamWKwargs(Section):
    """Arguments of torch.optim.AdamW; more of its arguments can be added (`+policy.optimizer.kwargs.fused=true`)."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    lr: PositiveFloat = Field(default=5e-5, description="Peak learning rate.")
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.999), description="Decay rates of the running averages of the gradient and of its square."
    )
    eps: PositiveFloat = Field(
        default=1e-8, description="Term added to the denominator of the update for numerical stability."
    )
    weight_decay: NaturalFloat = Field(default=0.01, description="Decoupled weight decay coefficient.")

    @model_validator(mode="after")
    def _known_to_adamw(self) -> AdamWKwargs:
        for key in self.model_extra or {}:
            if key not in ADAMW_EXTRAS:
                known = (*type(self).model_fields, *ADAMW_EXTRAS)
                raise ValueError(f"{key!r} is not an argument of torch.optim.AdamW; {overrides.suggest(key, known)}")
        return self


class MuonConfig(Section):
    """Muon: orthogonal updates for the matrices of the decoder layers. Used if policy.optimizer.name is muon."""

    lr_scale: PositiveFloat = Field(
        default=1.0, description="Learning rate of Muon as a multiple of the scheduled one, which AdamW uses."
    )
    momentum: Fraction = Field(default=0.95, description="Decay rate of the running average of the gradient.")
    nesterov: bool = Field(default=True, description="Add the current gradient to the average once more (Nesterov).")
    ns_steps: Annotated[PositiveInt, Field(lt=100)] = Field(
        default=5, description="Number of Newton-Schulz iterations that make the update orthogonal."
    )
    ns_precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Data type of these iterations. bfloat16 is faster on GPUs, as in torch.optim.Muon; its rounding "
        "makes losses depend on the number of workers.",
    )
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = Field(
        default="match_rms_adamw",
        description="Size of the updates of a matrix [a, b]. match_rms_adamw: 0.2 sqrt(max(a, b)), so that a learning "
        "rate and weight decay of AdamW fit; original: sqrt(max(1, a / b)), for learning rates of about 0.02.",
    )


class OptimizerGroup(Section):
    """Parameters with a learning rate or weight decay of their own."""

    pattern: str = Field(
        min_length=1,
        description="Regular expression that is searched for in the name of a parameter, e.g. embed_tokens.",
    )
    lr_scale: NaturalFloat = Field(default=1.0, description="Factor of the learning rate.")
    weight_decay: NaturalFloat | None = Field(default=None, description="Weight decay; null leaves it as it is.")

    @field_validator("pattern")
    @classmethod
    def _regular_expression(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from error
        return value


class OptimizerConfig(Section):
    """The optimizer and its arguments."""

    name: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="Name of the optimizer. adamw is AdamW with decoupled weight decay; NeMo-RL writes "
        "torch.optim.AdamW, which is accepted too. muon is Muon for the matrices of the decoder layers and AdamW for "
        "embeddings, output head, norms and biases.",
    )
    weight_decay_on: Literal["matrices", "all"] = Field(
        default="matrices",
        description="Parameters that weight decay applies to. matrices: all except norms and biases, which is "
        "common practice for language models; all: every parameter, as in plain torch.optim.AdamW and "
        "NeMo-RL.",
    )
    kwargs: AdamWKwargs = Field(default_factory=AdamWKwargs, description="Keyword arguments of AdamW.")
    muon: MuonConfig = Field(default_factory=MuonConfig, description="Settings of Muon. Not in NeMo-RL.")
    groups: tuple[OptimizerGroup, ...] = Field(
        default=(),
        description="Parameters with a learning rate or weight decay of their own: a list of {pattern, lr_scale, "
        "weight_decay}. pattern is a regular expression that is searched for in the names of parameters; the first "
        "entry that matches a parameter counts; lr_scale (default 1) is a factor of the learning rate; weight_decay "
        "(default null) replaces the weight decay. A pattern that no parameter needs is an error. Not in NeMo-RL.",
    )
