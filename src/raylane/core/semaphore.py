"""Semaphores in memory that processes share, waited for without busy looping. Knows nothing of what they count.

POSIX semaphores of the C library (`sem_init` with pshared=1, sem_overview(7)): a post happens before the wait that it
ends, on every architecture (IEEE Std 1003.1, 4.12 Memory Synchronization), they leave no name in /dev/shm, and they
vanish with the last mapping of their memory. `post` and `try_wait` are bound with PyDLL, which keeps the interpreter's
lock (0.2 us for a pair instead of 0.35); only the wait that blocks lets go of it. Used by the channels of `graph`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import struct
import time
import weakref
from collections.abc import Callable
from typing import Any

SEMAPHORE_BYTES = 64
"""Room for one semaphore: sem_t is 32 bytes on 64-bit Linux, and one cache line each keeps writers apart."""
_SLICE_S = 1.0
"""Nobody tells a waiter that the other side died: it looks up at least this often."""

_quick = ctypes.PyDLL(None)
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
"""post(address) -> 0: one more. Never waits; safe in a finalizer."""
try_wait = _bind(_quick, "sem_trywait", ctypes.c_void_p)
"""try_wait(address) -> 0 if one was taken, -1 if there was none. Never waits."""

_mmap = _bind(_slow, "mmap", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p  # type: ignore[attr-defined]
_munmap = _bind(_slow, "munmap", ctypes.c_void_p, ctypes.c_size_t)
_madvise = _bind(_slow, "madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value

if hasattr(_slow, "sem_clockwait"):  # glibc 2.30 and newer
    _clockwait = _bind(_slow, "sem_clockwait", ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)

    def _wait_until(address: int, at: float) -> int:
        """`at` is on the monotonic clock."""
        return _clockwait(address, time.CLOCK_MONOTONIC, ctypes.byref(_timespec(at)))

else:  # other C libraries know the wall clock only; a slice of one second bounds what a step of that clock can do
    _timedwait = _bind(_slow, "sem_timedwait", ctypes.c_void_p, ctypes.c_void_p)

    def _wait_until(address: int, at: float) -> int:
        return _timedwait(address, ctypes.byref(_timespec(time.time() + at - time.monotonic())))


def _timespec(at: float) -> _TimeSpec:
    seconds = int(at)
    return _TimeSpec(seconds, int((at - seconds) * 1e9))


def init(address: int, value: int = 0) -> None:
    """Make a semaphore there, shared by all processes that map the memory."""
    if _init(address, 1, value):
        raise OSError("sem_init failed: this C library has no process-shared semaphores")


def value(address: int) -> int:
    """How many could be taken now. For tests and messages; it may be old when it arrives."""
    found = ctypes.c_int()
    _value(address, ctypes.byref(found))
    return found.value


def block(address: int, timeout_s: float = _SLICE_S) -> bool:
    """Take one, sleeping for at most `timeout_s` (never more than a second); False when there was none. Returns early,
    with False, on a signal, so that its Python handler runs. Other threads of this process go on meanwhile."""
    return _wait_until(address, time.monotonic() + min(timeout_s, _SLICE_S)) == 0


def map_file(fd: int, nbytes: int, *, private: bool = False) -> Any:
    """Map the first bytes of a file as a ctypes array, which unmaps them when it is garbage; shared with other
    processes, or `private` and copied on write. Not Python's mmap: that keeps a descriptor for each mapping, and arrays
    that are kept are mappings (`ulimit -n` is 1024 in many places)."""
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    address = _mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {nbytes} bytes: {os.strerror(code)}")
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, _munmap, address, nbytes).atexit = False
    return memory


_NAME = "raylane"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PATH = re.compile(r"(/proc/[0-9]{1,10}/fd/[0-9]{1,10})#([0-9a-f]{1,16})")
_KEY = struct.Struct("<Q")
_KEY_AT = 4088


def _is_segment(fd: int) -> bool:
    """Return True for memory that `Segment.make` has made: a memfd of that name whose size is sealed."""
    if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME}"):
        return False
    seals: int = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    return seals & _SEALS == _SEALS


class Segment:
    """A memfd that is mapped here. The process that makes it lends it to others as a path; they map it with `open`.

    `fd` is kept until `close_fd`, so that others can open it through `path`; memory lives until the last mapping in any
    process is gone. The mapping ends when the last object made from `memory` is garbage. Read slices from `memory` or
    `view`, write them to `view` only: ctypes writes a slice item by item.

    Descriptors are used again, so `path` carries a random key as well, which the segment holds in bytes 4088 to 4096:
    whoever opens a path too late is told so, and does not map what has taken its number.
    """

    __slots__ = ("address", "fd", "memory", "nbytes", "path", "view")

    def __init__(self, fd: int, nbytes: int) -> None:
        """Maps `fd`, which stays the caller's if that fails."""
        self.fd: int | None = None
        self.nbytes = nbytes
        self.memory = map_file(fd, nbytes)
        self.address = ctypes.addressof(self.memory)
        self.view = memoryview(self.memory).cast("B")
        self.path = ""
        """What others open; empty for who has opened it itself."""

    @classmethod
    def make(cls, nbytes: int) -> Segment:
        """A new one of at least 4096 bytes, all zero but for its key. Its pages cost memory once they are touched."""
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            segment = cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        segment.fd = fd
        key = secrets.randbits(64) | 1  # never that of memory nobody has written to
        _KEY.pack_into(segment.view, _KEY_AT, key)
        segment.path = f"/proc/{os.getpid()}/fd/{fd}#{key:x}"
        return segment

    @classmethod
    def open(cls, path: str) -> Segment:
        """Map what another process made. FileNotFoundError if it is gone, PermissionError if it is somebody else's,
        OSError if the path is none that `make` gives."""
        match = _PATH.fullmatch(path)
        if match is None:
            raise OSError(errno.EINVAL, f"{path!r:.200} is no path of a segment")
        file, key = match.groups()
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            nbytes = os.fstat(fd).st_size
            # Only what cannot shrink is mapped: memory that another process takes away ends this one with SIGBUS.
            if nbytes >= _KEY_AT + _KEY.size and _is_segment(fd):
                segment = cls(fd, nbytes)
                if _KEY.unpack_from(segment.view, _KEY_AT)[0] == int(key, 16):
                    return segment
        finally:
            os.close(fd)  # a mapping needs none
        raise FileNotFoundError(f"{file} is another file by now: its maker has let go of it")

    def close_fd(self) -> None:
        """Nobody else has to open it any more. The memory stays mapped."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def discard(self) -> None:
        """Give its pages back to the system, whoever else still has them mapped: there all of it is zero from now on,
        and what is written again costs memory again."""
        _madvise(self.address, self.nbytes, mmap.MADV_REMOVE)  # where it cannot, pages go with the last mapping

    def __del__(self) -> None:
        self.close_fd()
