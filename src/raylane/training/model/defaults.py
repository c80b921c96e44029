"""torch's defaults inside raylane's own computations, whatever the calling program has set.

A program may have set a default device or data type, or may call from inside `torch.device(...)`, `no_grad` or
`inference_mode`. Tensors that are made without a device or a data type would then be others. Called by `worker`,
`sample` and `export`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def own_defaults() -> Iterator[None]:
    """Use CPU tensors, float32 and recorded gradients in a `with` block; restore the caller's settings at its end.

    The default data type belongs to the whole process, so other threads see it too until the end of the block.
    """
    with ExitStack() as stack:
        # Only where something differs: a device context costs time in every operation of torch.
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            stack.enter_context(torch.enable_grad())
        if torch.get_default_device() != torch.device("cpu"):
            stack.enter_context(torch.device("cpu"))
        if (dtype := torch.get_default_dtype()) != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        yield


def with_own_defaults(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs inside `own_defaults`."""

    @functools.wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        with own_defaults():
            return function(*args, **kwargs)

    return inner


def with_own_defaults_in_methods(cls: type[R]) -> type[R]:
    """Make all public methods of a class run inside `own_defaults`; a decorator."""
    for name, method in list(vars(cls).items()):
        if callable(method) and not name.startswith("_"):
            setattr(cls, name, with_own_defaults(method))
    return cls
