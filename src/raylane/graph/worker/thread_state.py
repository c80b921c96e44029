"""Thread-local settings of torch and NumPy: captured on one thread, applied on another.

An actor's `__init__` often switches gradients off or sets a default device. The graph loop runs methods on a thread of
its own, where those settings would be the defaults: so it applies the settings that the actor's own thread has when a
graph is compiled. torch is used only if the process has imported it.
"""

from __future__ import annotations

import importlib
import sys
import threading
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ThreadState:
    """Settings of one thread. Those of torch are its defaults if torch was not imported when they were captured."""

    grad: bool = True
    inference: bool = False
    device: str = "cpu"
    cuda_device: int | None = None
    num_threads: int | None = None
    autocast: tuple[tuple[str, bool, Any], ...] = ()
    """(device type, enabled, dtype) for each device type."""
    errstate: dict[str, Any] | None = None
    """NumPy's handling of floating-point errors."""
    errcall: Any = None
    """Function that NumPy calls where the handling is "call"."""


_entered = threading.local()
"""`modes`: inference modes that this thread has entered and not left. A mode that is garbage would be left."""
_AUTOCAST_DEVICES = ("cpu", "cuda")


def loaded(name: str) -> Any:
    """Return a module if this process has imported it, else None.

    Waits while another thread is importing the module: until then most of its names are missing.
    """
    module = sys.modules.get(name)
    if module is not None and getattr(module.__spec__, "_initializing", False):
        return importlib.import_module(name)  # waits for the import lock of that module
    return module


def capture() -> ThreadState:
    """Return the settings of the calling thread."""
    numpy = loaded("numpy")
    errstate, errcall = (None, None) if numpy is None else (numpy.geterr(), numpy.geterrcall())
    torch = loaded("torch")
    if torch is None:
        return ThreadState(errstate=errstate, errcall=errcall)
    return ThreadState(
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


def apply(state: ThreadState) -> None:
    """Give the calling thread these settings permanently."""
    numpy = loaded("numpy")
    if numpy is not None and state.errstate is not None:
        numpy.seterr(**state.errstate)
        numpy.seterrcall(state.errcall)
    torch = loaded("torch")
    if torch is None:
        return
    if state.inference != torch.is_inference_mode_enabled():
        # torch has no function that sets the mode: it is a context manager, and leaving it restores the opposite. So
        # leave the mode that was entered last, or enter one if there is none.
        modes = _entered.__dict__.setdefault("modes", [])
        if modes:
            modes.pop().__exit__(None, None, None)
        if torch.is_inference_mode_enabled() != state.inference:
            mode = torch.inference_mode(state.inference)
            mode.__enter__()
            modes.append(mode)
    torch.set_grad_enabled(state.grad)
    if state.device != str(torch.get_default_device()):
        torch.set_default_device(state.device)
    if state.cuda_device is not None:
        torch.cuda.set_device(state.cuda_device)
    if state.num_threads not in (None, torch.get_num_threads()):
        torch.set_num_threads(state.num_threads)
    for device, enabled, dtype in state.autocast:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
