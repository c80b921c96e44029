"""One-sided reads of another process's memory, by process_vm_readv(2). Linux only; independent of tensors.

The kernel checks PTRACE_MODE_ATTACH_REALCREDS: both processes need the same user, and where Yama's ptrace_scope is 1
the target must have called prctl(PR_SET_PTRACER) (man 2 process_vm_readv, man 2 prctl,
Documentation/admin-guide/LSM/Yama.rst).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import os
import struct
import threading
import time
from collections.abc import Iterable, Sequence

from raylane.core import settings
from raylane.core.deadline import Deadline
from raylane.core.process.copying import MAX_THREADS, ThreadChoice

IOV_MAX = 1024
MAX_BYTES_PER_CALL = 64 << 20
"""Limit of one system call, far below the kernel's 0x7ffff000 bytes, so that a deadline is noticed within 40 ms."""
THREADED_FROM_BYTES = 16 << 20
"""Size from which a read may use several threads: 64 MiB took 7.7 ms with one thread and 5.6 ms with two."""
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_choice = ThreadChoice(min(MAX_THREADS, len(os.sched_getaffinity(0))))
"""Number of threads for large reads: by the speed of the last ones, so one thread where no core is idle."""
_libc = ctypes.CDLL(None, use_errno=True)
# Declared once: without argument types ctypes passes 32-bit integers and truncates addresses.
for _name in ("process_vm_readv", "process_vm_writev"):
    _call = getattr(_libc, _name, None)
    if _call is not None:
        _call.restype = ctypes.c_ssize_t
        _call.argtypes = [
            ctypes.c_int,
            ctypes.POINTER(_IoVec),
            ctypes.c_ulong,
            ctypes.POINTER(_IoVec),
            ctypes.c_ulong,
            ctypes.c_ulong,
        ]

Range = tuple[int, int, int]
"""Range to copy: (address in the other process, address in this process, size in bytes)."""


def allow_readers() -> None:
    """Allow every process of this user to read this process where Yama would forbid it.

    No effect without Yama, or with `RAYLANE_PTRACER=none` in the environment; readers then use other transports.
    ValueError for a value of RAYLANE_PTRACER other than any or none.
    """
    if settings.PTRACER.read() == "none":
        return
    # The result is ignored: without Yama in the kernel the call fails with EINVAL and is not needed.
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def _vector(parts: Sequence[tuple[int, int]]) -> ctypes.Array[_IoVec]:
    return (_IoVec * len(parts))(*(_IoVec(base, length) for base, length in parts))


def _move(call: ctypes._NamedFuncPointer, pid: int, ranges: Sequence[Range]) -> None:
    theirs = _vector([(there, n) for there, _, n in ranges])
    mine = _vector([(local, n) for _, local, n in ranges])
    _check_moved(call(pid, mine, len(ranges), theirs, len(ranges), 0), sum(n for _, _, n in ranges))


def _check_moved(moved: int, expected: int) -> None:
    """Raise the OSError that a system call reported, or EFAULT if it moved fewer bytes than expected."""
    if moved < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if moved != expected:
        # The kernel stops without an error code at the first page it cannot read: the memory was unmapped.
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))


def split(ranges: Sequence[Range], most: int = MAX_BYTES_PER_CALL) -> list[list[Range]]:
    """Split ranges, in order, into lists of at most IOV_MAX ranges and `most` bytes each."""
    calls: list[list[Range]] = [[]]
    room = most
    for remote, local, nbytes in ranges:
        done = 0
        while done < nbytes:
            if room == 0 or len(calls[-1]) == IOV_MAX:
                calls.append([])
                room = most
            part = min(nbytes - done, room)
            calls[-1].append((remote + done, local + done, part))
            done += part
            room -= part
    return calls


def read(pid: int, ranges: Sequence[Range], deadline: Deadline | None = None) -> None:
    """Copy ranges of process `pid` into this process, in the given order.

    Raises OSError with ESRCH (no such process), EPERM (not allowed) or EFAULT (the memory is no longer mapped there; a
    part may have been copied). TimeoutError if the deadline has passed, checked every MAX_BYTES_PER_CALL bytes.
    """
    total = sum(nbytes for _, _, nbytes in ranges)
    if total < THREADED_FROM_BYTES:
        _read_calls(pid, collections.deque(split(ranges)), deadline)
        return
    threads = _choice.threads()
    calls = collections.deque(split(ranges, min(MAX_BYTES_PER_CALL, -(-total // threads))))
    began = time.perf_counter()
    helpers: list[_ProcessReader] = []
    try:
        with contextlib.suppress(RuntimeError):  # the system starts no more threads: this one reads everything
            for _ in range(threads - 1):
                helper = _ProcessReader(pid, calls, deadline)
                helper.start()
                helpers.append(helper)
        _read_calls(pid, calls, deadline)
    finally:
        calls.clear()  # after an error; else it is empty
        _join(helpers)
    for helper in helpers:
        if helper.error is not None:
            raise helper.error
    _choice.copied(threads, total, time.perf_counter() - began)


def _join(helpers: Sequence[_ProcessReader]) -> None:
    """Wait for the helpers, also after an error or Ctrl-C: nothing may be written here after `read` has returned."""
    try:
        for helper in helpers:
            helper.join()
    except KeyboardInterrupt:
        _join(helpers)
        raise


def _read_calls(pid: int, calls: collections.deque[list[Range]], deadline: Deadline | None) -> None:
    """Make calls from a queue until it is empty; several threads may share the queue."""
    while True:
        try:
            call = calls.popleft()
        except IndexError:
            return
        # A running call cannot be interrupted, so check between calls; `split` keeps each of them short.
        if deadline is not None and deadline.left_s() == 0:
            raise TimeoutError
        _move(_libc.process_vm_readv, pid, call)


class _ProcessReader(threading.Thread):
    """A thread that helps with one read."""

    def __init__(self, pid: int, calls: collections.deque[list[Range]], deadline: Deadline | None) -> None:
        super().__init__(name="raylane-read", daemon=True)
        self._work = pid, calls, deadline
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            _read_calls(*self._work)
        except (OSError, TimeoutError) as error:
            self.error = error


_RANGE = struct.Struct("<QQ")


def pack_ranges(ranges: Iterable[tuple[int, int]]) -> bytes:
    """Return ranges of one process (address, size in bytes) packed for `gather`: an array of struct iovec."""
    return b"".join(_RANGE.pack(*range_) for range_ in ranges)


def gather(pid: int, ranges: bytes) -> bytes:
    """Return the concatenated content of packed ranges of process `pid`. Raises OSError as `read` does."""
    # The packed form is used as the system call's vector, so a read costs no Python loop over the ranges.
    theirs = (_IoVec * (len(ranges) // _RANGE.size)).from_buffer_copy(ranges)
    sizes = struct.unpack(f"<{2 * len(theirs)}Q", ranges)[1::2]
    gathered = ctypes.create_string_buffer(sum(sizes))
    at = 0
    # The kernel accepts at most IOV_MAX ranges of the other process in a call, but one local buffer for all of them.
    for first in range(0, len(theirs), IOV_MAX):
        count = min(IOV_MAX, len(theirs) - first)
        nbytes = sum(sizes[first : first + count])
        part = ctypes.cast(ctypes.byref(theirs, first * _RANGE.size), ctypes.POINTER(_IoVec))
        mine = _vector([(ctypes.addressof(gathered) + at, nbytes)])
        _check_moved(_libc.process_vm_readv(pid, mine, 1, part, count, 0), nbytes)
        at += nbytes
    return gathered.raw


def write(pid: int, remote: int, local: int, nbytes: int) -> None:
    """Copy `nbytes` from `local` in this process to `remote` in process `pid`. Raises OSError as `read` does."""
    _move(_libc.process_vm_writev, pid, [(remote, local, nbytes)])
