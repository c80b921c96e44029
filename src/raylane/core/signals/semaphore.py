"""Semaphores in shared memory, wherever it lies (`core.memory`). Independent of what the semaphores count.

These are POSIX semaphores of the C library (`sem_init` with pshared=1, sem_overview(7)). A post synchronises memory
with the wait that it ends, on every architecture (IEEE Std 1003.1, 4.12 Memory Synchronization). The semaphores leave
no name in /dev/shm and disappear with the last mapping of their memory. Used by the channels of `graph`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

SEMAPHORE_BYTES = 64
"""Space for one semaphore: sem_t has 32 bytes on 64-bit Linux, and a cache line each avoids false sharing."""
_SLICE_S = 1.0
"""Longest single wait in seconds: a dead peer posts nothing, so a waiter must return regularly to check the peer."""

# PyDLL keeps the GIL during a call. `post` and `try_wait` never block; a pair costs 0.2 us this way instead of 0.35.
_quick = ctypes.PyDLL(None)
# CDLL releases the GIL; needed for calls that block.
_slow = ctypes.CDLL(None, use_errno=True)


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _bind(library: Any, name: str, *types: Any) -> Callable[..., int]:
    function = getattr(library, name)
    function.argtypes = types
    function.restype = ctypes.c_int
    bound: Callable[..., int] = function
    return bound


_init = _bind(_quick, "sem_init", ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
_value = _bind(_quick, "sem_getvalue", ctypes.c_void_p, ctypes.c_void_p)
post = _bind(_quick, "sem_post", ctypes.c_void_p)
"""Function post(address) -> 0 that adds one to a semaphore. Never waits; safe in a finalizer."""
try_wait = _bind(_quick, "sem_trywait", ctypes.c_void_p)
"""Function try_wait(address) -> 0 if it took one from a semaphore, -1 if the count was zero. Never waits."""

if hasattr(_slow, "sem_clockwait"):  # glibc 2.30 and newer
    _clockwait = _bind(_slow, "sem_clockwait", ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)

    def _wait_until(address: int, at: float) -> int:
        """Wait until `at` on the monotonic clock."""
        return _clockwait(address, time.CLOCK_MONOTONIC, ctypes.byref(_timespec(at)))

else:  # other C libraries have only the wall clock; waits of at most a second limit the effect of a clock step
    _timedwait = _bind(_slow, "sem_timedwait", ctypes.c_void_p, ctypes.c_void_p)

    def _wait_until(address: int, at: float) -> int:
        return _timedwait(address, ctypes.byref(_timespec(time.time() + at - time.monotonic())))


def _timespec(at: float) -> _TimeSpec:
    seconds = int(at)
    return _TimeSpec(seconds, int((at - seconds) * 1e9))


def init(address: int, value: int = 0) -> None:
    """Create a semaphore at an address; all processes that map the memory share it."""
    if _init(address, 1, value):
        raise OSError("sem_init failed: this C library has no process-shared semaphores. Use glibc or musl")


def value(address: int) -> int:
    """Return the present count of a semaphore, for tests and messages; another process may change it at any time."""
    count = ctypes.c_int()
    _value(address, ctypes.byref(count))
    return count.value


def block(address: int, timeout_s: float = _SLICE_S) -> bool:
    """Take one from a semaphore; sleep for at most `timeout_s` (and at most a second). Returns False if there was none.

    Returns False early on a signal, so that the signal's Python handler can run. Releases the GIL while it sleeps.
    """
    return _wait_until(address, time.monotonic() + min(timeout_s, _SLICE_S)) == 0
