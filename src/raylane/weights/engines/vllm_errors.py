"""Errors of requests: raylane's, and vLLM's too, so that `AsyncLLM` passes them on, and vLLM's server answers 400.

In processes without vLLM they arrive as raylane's.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError

from raylane.errors import WeightsInvalidError, WeightsLostError


class AdapterLostError(WeightsLostError, VLLMValidationError):  # type: ignore[misc]
    """A request names a version of adapters that the engine has not. The engine goes on."""

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightsLostError(self.message, **self.fields).__reduce__()


class EngineEmptyError(WeightsInvalidError, VLLMValidationError):  # type: ignore[misc]
    """A request came before the engine has a version, or after it has lost its weights. The engine goes on."""

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightsInvalidError(self.message, **self.fields).__reduce__()
