"""Semaphores in shared memory, and the memfd segments that hold them. Independent of what the semaphores count.

These are POSIX semaphores of the C library (`sem_init` with pshared=1, sem_overview(7)). A post synchronises memory
with the wait that it ends, on every architecture (IEEE Std 1003.1, 4.12 Memory Synchronization). The semaphores leave
no name in /dev/shm and disappear with the last mapping of their memory. Used by the channels of `graph`.
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
import sys
import time
import weakref
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

_mmap = _bind(_slow, "mmap", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_mmap.restype = ctypes.c_void_p  # type: ignore[attr-defined]
_munmap = _bind(_slow, "munmap", ctypes.c_void_p, ctypes.c_size_t)
_madvise = _bind(_slow, "madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value

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


def map_file(fd: int, nbytes: int, *, private: bool = False) -> Any:
    """Map the first bytes of a file as a ctypes array, which is unmapped when it is garbage-collected.

    The mapping is shared with other processes, or with `private` copied on write.
    """
    # Not Python's mmap, which keeps a descriptor for each mapping: users may keep many arrays, each of which keeps a
    # mapping, and `ulimit -n` is often 1024.
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    address = _mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mapping {nbytes} bytes: {os.strerror(code)}")
    memory = (ctypes.c_char * nbytes).from_address(address)
    # Not at exit: tensors over this memory may still be used by other exit handlers, and the system unmaps it anyway.
    weakref.finalize(memory, _munmap, address, nbytes).atexit = False
    return memory


_NAME = "raylane"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PATH = re.compile(r"(/proc/[0-9]{1,10}/fd/[0-9]{1,10})#([0-9a-f]{1,16})")
_KEY = struct.Struct("<Q")
_KEY_AT = 4088


class Segment:
    """A memfd that this process maps. Its maker passes `path` to other processes, which map it with `open`.

        maker   make() ── path: /proc/PID/fd/FD#key ──> other   open(path), compare the key in bytes 4088 to 4096
                close_fd()                                      (mappings stay valid)

    The maker keeps `fd` until `close_fd`, so that others can open `path`. The memory exists until the last mapping in
    any process is gone; a mapping ends when the last object made from `memory` is garbage-collected. Read slices from
    `memory` or `view`, but write only to `view`: ctypes writes a slice item by item.

    The kernel reuses descriptor numbers. The random key in `path` and in the segment lets a process that opens the path
    too late notice that the number belongs to another file.
    """

    __slots__ = ("address", "fd", "memory", "nbytes", "path", "view")

    def __init__(self, fd: int, nbytes: int, *, private: bool = False) -> None:
        """Map `fd`, copied on write with `private`. The descriptor stays the caller's, also if this fails."""
        self.fd: int | None = None
        self.nbytes = nbytes
        self.memory = map_file(fd, nbytes, private=private)
        self.address = ctypes.addressof(self.memory)
        self.view = memoryview(self.memory).cast("B")
        self.path = ""
        """Path that other processes open; empty in a process that opened the segment itself."""

    @classmethod
    def make(cls, nbytes: int) -> Segment:
        """Return a new segment of `nbytes` (at least 4096), zero but for its key; pages take memory when touched.

        OSError if the system has no descriptor, mapping or address space for it.
        """
        if nbytes > sys.maxsize:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # a fixed size: no peer can truncate mapped memory
            segment = cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        segment.fd = fd
        key = secrets.randbits(64) | 1  # never 0, the key of memory that nobody has written to
        _KEY.pack_into(segment.view, _KEY_AT, key)
        segment.path = f"/proc/{os.getpid()}/fd/{fd}#{key:x}"
        return segment

    @classmethod
    def open(cls, path: str, *, private: bool = False, keep_fd: bool = False) -> Segment:
        """Map a segment that another process made. With `private`, writes stay in this mapping (copy on write).

        With `keep_fd`, `fd` is a descriptor of this process's own until `close_fd`.

        FileNotFoundError if the segment is gone, PermissionError if it belongs to another user, OSError if the path has
        not the form that `make` gives it.
        """
        match = _PATH.fullmatch(path)
        if match is None:
            raise OSError(errno.EINVAL, f"could not open a segment: {path!r:.200} is no path of a segment")
        file, key = match.groups()
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        segment = None
        try:
            nbytes = os.fstat(fd).st_size
            # Map only files of a sealed size: access to memory that another process truncated raises SIGBUS.
            if (
                nbytes >= _KEY_AT + _KEY.size
                and os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME}")
                and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            ):
                segment = cls(fd, nbytes, private=private)
                if _KEY.unpack_from(segment.view, _KEY_AT)[0] == int(key, 16):
                    segment.fd = fd if keep_fd else None
                    return segment
        finally:
            if segment is None or segment.fd is None:
                os.close(fd)  # a mapping needs no descriptor
        raise FileNotFoundError(f"could not open a segment: {file} is another file by now; its maker has closed it")

    def close_fd(self) -> None:
        """Close the descriptor when no other process needs to open `path` any more. The memory stays mapped."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def discard(self, offset: int = 0) -> None:
        """Return the pages from `offset` on to the system. Every process that maps the segment reads zeros there now.

        `offset` is a multiple of 4096.
        """
        # Where MADV_REMOVE is not supported, the pages are freed with the last mapping.
        _madvise(self.address + offset, self.nbytes - offset, mmap.MADV_REMOVE)

    def taken_bytes(self) -> int:
        """Return the bytes of memory that the pages take so far; 0 after `close_fd`."""
        return 0 if self.fd is None else os.fstat(self.fd).st_blocks * 512

    def forget_writes(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Drop what this process wrote to a private mapping: it shows the content of the shared memory again.

        In `nbytes` (None: all) from `offset` on, which are multiples of 4096.
        """
        _madvise(self.address + offset, self.nbytes - offset if nbytes is None else nbytes, mmap.MADV_DONTNEED)

    def __del__(self, close: Any = os.close) -> None:  # at the end of the process `os` may be gone
        fd, self.fd = self.fd, None
        if fd is not None:
            close(fd)
