"""The thread-local settings that code of a method may depend on: read on one thread, made so on another.

An actor's `__init__` often switches gradients off or sets a default device. A lane runs methods on a thread of its
own, where those settings would be the defaults: so it takes over those of the actor's own thread, as they are when a
graph is compiled. torch is looked at only if the process has imported it.
"""

from __future__ import annotations

import importlib
import sys
import threading
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ThreadContext:
    """Settings of one thread. Empty when torch is not imported."""

    grad: bool = True
    inference: bool = False
    device: str = "cpu"
    cuda_device: int | None = None
    num_threads: int | None = None
    autocast: tuple[tuple[str, bool, Any], ...] = ()
    """(device type, enabled, dtype) for each."""
    errstate: dict[str, Any] | None = None
    """NumPy's reactions to floating-point errors."""
    errcall: Any = None
    """Whom NumPy calls where the reaction is "call"."""


_entered = threading.local()
"""`modes`: what this thread has entered and not left, in order; dropping one would leave it."""
_AUTOCAST_DEVICES = ("cpu", "cuda")


def loaded(name: str) -> Any:
    """Return a module if this process has imported it, else None. Wait while another thread is importing it: until then
    most of its names are missing."""
    module = sys.modules.get(name)
    if module is not None and getattr(module.__spec__, "_initializing", False):
        return importlib.import_module(name)  # waits for the lock of that module
    return module


def read() -> ThreadContext:
    """The calling thread's."""
    numpy = loaded("numpy")
    errstate, errcall = (None, None) if numpy is None else (numpy.geterr(), numpy.geterrcall())
    torch = loaded("torch")
    if torch is None:
        return ThreadContext(errstate=errstate, errcall=errcall)
    return ThreadContext(
        grad=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        device=str(torch.get_default_device()),
        cuda_device=torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        num_threads=torch.get_num_threads(),
        autocast=tuple(
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
        ),
        errstate=errstate,
        errcall=errcall,
    )


def adopt(context: ThreadContext) -> None:
    """Make the calling thread's settings these, for good."""
    numpy = loaded("numpy")
    if numpy is not None and context.errstate is not None:
        numpy.seterr(**context.errstate)
        numpy.seterrcall(context.errcall)
    torch = loaded("torch")
    if torch is None or context.num_threads is None:
        return
    if context.inference != torch.is_inference_mode_enabled():
        _toggle_inference(torch, context.inference)
    torch.set_grad_enabled(context.grad)
    if context.device != str(torch.get_default_device()):
        torch.set_default_device(context.device)
    if context.cuda_device is not None:
        torch.cuda.set_device(context.cuda_device)
    if context.num_threads != torch.get_num_threads():
        torch.set_num_threads(context.num_threads)
    for device, enabled, dtype in context.autocast:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _toggle_inference(torch: Any, wanted: bool) -> None:
    """Leave the mode that was entered last, which restores the opposite; where there is none, enter one."""
    modes = _entered.__dict__.setdefault("modes", [])
    if modes:
        modes.pop().__exit__(None, None, None)
    if torch.is_inference_mode_enabled() != wanted:
        mode = torch.inference_mode(wanted)
        mode.__enter__()
        modes.append(mode)
