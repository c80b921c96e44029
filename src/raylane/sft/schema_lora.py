"""Schema of the section `policy.dtensor_cfg.lora_cfg`: low-rank adapters instead of training all weights.

A part of the tree in `schema.py`, whose rules hold here too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from raylane.sft.schema_types import Fraction, PositiveFloat, PositiveInt, Section

__all__ = ["LoraConfig"]


def _one_or_many(value: Any) -> Any:
    return () if value is None else (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


class LoraConfig(Section):
    """LoRA: the weights stay frozen, and a product of two small matrices is trained beside each chosen projection."""

    enabled: bool = Field(default=False, description="Train adapters only. false trains all weights.")
    dim: PositiveInt = Field(default=8, description="Rank r of the adapters: the inner size of the two matrices.")
    alpha: PositiveFloat = Field(
        default=32, description="Scale of the adapters: their product is multiplied by alpha / dim."
    )
    dropout: Fraction = Field(default=0.0, description="Probability of dropout in the adapters while training.")
    dropout_position: Literal["pre", "post"] = Field(
        default="pre",
        description="Place of the dropout. pre: on the input of the adapter, as in PEFT; post: on its output, which is "
        "NeMo-RL's default.",
    )
    lora_A_init: Literal["kaiming", "xavier"] = Field(
        default="kaiming",
        description="Initial values of the first matrix. kaiming: uniform, as in PEFT; xavier: normal, which is "
        "NeMo-RL's default. The second matrix starts at zero, so that the model starts unchanged.",
    )
    match_all_linear: bool = Field(
        default=True,
        description="Adapt every linear layer except the output head, less exclude_modules; only used if "
        "target_modules is empty.",
    )
    target_modules: Names = Field(
        default=(),
        description="Names of the linear layers to adapt: the last part of a name (q_proj) or a whole name, with * for "
        "any text (*.mlp.*). Empty: match_all_linear decides.",
    )
    exclude_modules: Names = Field(
        default=(), description="Names of linear layers to leave as they are, written as in target_modules."
    )
    adapter_path: str | None = Field(
        default=None,
        description="Path of a folder in PEFT's format (adapter_config.json, adapter_model.safetensors) with the "
        "adapters to start from; null starts from new ones. Not in NeMo-RL.",
    )

    @model_validator(mode="after")
    def _something_to_train(self) -> LoraConfig:
        if self.enabled and not self.match_all_linear and not self.target_modules:
            raise ValueError(
                "match_all_linear is false and target_modules is empty, so nothing would be trained; name linear "
                "layers in target_modules, e.g. [q_proj, v_proj], or set match_all_linear=true"
            )
        return self
