"""Errors of requests: raylane's, and vLLM's too, so that `AsyncLLM` passes them on, and vLLM's server answers 400.

In processes without vLLM they arrive as raylane's.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError

from raylane.errors import WeightsInvalidError, WeightsLostError, WeightsSwitchError


class _RequestError(VLLMValidationError):  # type: ignore[misc]
    """An error of a request, beside a class of raylane's. The engine goes on."""

    def __reduce__(self) -> tuple[Any, ...]:
        kind = type(self).__bases__[0]
        reduced: tuple[Any, ...] = kind(self.message, **self.fields).__reduce__()
        return reduced


class AdapterLostError(WeightsLostError, _RequestError):
    """A request names a version of adapters that the engine has not."""

    __reduce__ = _RequestError.__reduce__


class EngineEmptyError(WeightsInvalidError, _RequestError):
    """A request came before the engine has a version, or after it has lost its weights."""

    __reduce__ = _RequestError.__reduce__


class EngineSilentError(WeightsSwitchError, _RequestError):
    """A request came while the fleet of the engine does not answer."""

    __reduce__ = _RequestError.__reduce__
