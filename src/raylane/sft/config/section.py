"""Types and base class of all sections of the configuration. Used by `schema` and `policy`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _no_boolean(value: Any) -> Any:
    # pydantic would accept true as the integer 1.
    if isinstance(value, bool):
        raise ValueError(f"must be an integer, got {str(value).lower()}")
    return value


PositiveInt = Annotated[int, BeforeValidator(_no_boolean), Field(gt=0)]
NaturalInt = Annotated[int, BeforeValidator(_no_boolean), Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NaturalFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """Base class of every configuration section: frozen, and an undeclared key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _no_null_characters(self) -> Section:
        for name in type(self).model_fields:
            value = getattr(self, name)
            texts = value if isinstance(value, tuple) else (value,)
            if any(isinstance(text, str) and "\0" in text for text in texts):
                raise ValueError(f"{name} holds a null character, which is not allowed in a path or text; remove it")
        return self
