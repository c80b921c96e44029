"""Operations on every message of a compiled graph, in Python: the twin of `_native.c`. `native` chooses one of them.

Both follow the same layouts, so that processes with and without the native module work together:

    page of a doorbell (4096 bytes)      0     semaphore: one post for each message
                                         48    1 while the process sleeps in an event loop: writers write its eventfd
                                         64    256 flags, one byte each: 1 if a ring with this flag has a message
    slot of a ring                       0     sequence u64 | body bytes u32 | kind u8 | flags u8 | buffers u16
                                         16    body (with buffers: sizes u64 each, buffers, body)

A writer fills the slot, posts the semaphore `full` of every reader, and then for each reader sets its flag and posts
its doorbell. Semaphores order memory; flags do not, so that on some processors a post may be seen before its flag.
A reader that consumes a post and finds no flag therefore polls all its rings.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import struct
import time
from collections.abc import Callable
from typing import Any, Protocol

from raylane.core import semaphore
from raylane.core.semaphore import post, try_wait

PAGE_BYTES = 4096
FLAGS_AT, FLAGS = 64, 256
_SLEEPS_AT = 48
HEADER = struct.Struct("<QIBBH")
"""Header of a slot: sequence number, bytes of the body, kind, flags, number of buffers."""
_SIZE = struct.Struct("<Q")
"""Size of a buffer."""
WAKE = 4
"""Flag of a message: its execution is awaited in asyncio."""
_SCRIPT = b"\x8c\x08__main__"
"""Name of the module `__main__` as a pickle of protocol 4 and later has it."""
TEXT = 6
"""Kind of a message whose body is a string in UTF-8."""
LOGGED = 32
"""Number of waits between two looks of the policy."""


class Policy(Protocol):
    """Decision how long to yield before sleeping (implemented by `waiting.Patience`)."""

    budget_ns: int
    """First budget."""
    slow_ns: int
    """Length of a yield above which the policy looks at once."""

    def review(self, waits: list[tuple[int, int]], now_ns: int) -> tuple[int, int]:
        """Return (budget, time from which to yield again) after these waits: (length, longest yield), all in ns."""


def _memory(buffer: Any, nbytes: int = 0) -> tuple[memoryview, int]:
    """Return writable memory as bytes, and its address. ValueError if it is smaller than `nbytes`."""
    view = memoryview(buffer).cast("B")
    if view.nbytes < nbytes:
        raise ValueError(f"memory of {view.nbytes} bytes is too small: {nbytes} are needed")
    return view, ctypes.addressof(ctypes.c_char.from_buffer(view))


def _semaphore_at(view: memoryview, address: int, at: int) -> int:
    if not 0 <= at <= view.nbytes - 32 or at % 8:
        raise ValueError(f"no semaphore fits at offset {at} of {view.nbytes} bytes")
    return address + at


def _check_slots(view: memoryview, at: int, slots: int, slot_bytes: int) -> None:
    if at < 0 or slots <= 0 or slot_bytes < HEADER.size or at + slots * slot_bytes > view.nbytes:
        raise ValueError(f"{slots} slots of {slot_bytes} bytes at offset {at} do not fit into {view.nbytes} bytes")


class Doorbell:
    """Reading end of a doorbell. One thread at a time waits."""

    __slots__ = ("_address", "_budget_ns", "_log", "_page", "_policy", "_resume_ns", "_slow_ns", "consumed", "read")

    def __init__(self, page: Any, policy: Policy) -> None:
        self._page, address = _memory(page, PAGE_BYTES)
        self._address = _semaphore_at(self._page, address, 0)
        self._policy = policy
        self._budget_ns, self._slow_ns = policy.budget_ns, policy.slow_ns
        self._resume_ns = 0
        self._log: list[tuple[int, int]] = []
        self.consumed = 0
        """Posts consumed. Lower than `read` when messages were found by polling."""
        self.read = 0
        """Messages read from the rings of this doorbell."""
        # Without a memory barrier a mark that changes cannot be ordered against messages: writers always wake us.
        self._page[_SLEEPS_AT] = 1

    def wait(self, timeout_s: float) -> bool:
        """Wait for one post and consume it. Return False after `timeout_s` (at most one second) or on a signal."""
        return self._wait(timeout_s)

    def glance(self) -> bool:
        """Wait for one post like `wait`, but return False where `wait` would sleep."""
        return self._wait(None)

    def _wait(self, timeout_s: float | None) -> bool:
        address = self._address
        # The message is often there already; this path needs no clock.
        if not try_wait(address):
            self.consumed += 1
            return True
        clock = time.monotonic_ns
        start = last = clock()
        worst, got, end = 0, False, start + self._budget_ns
        # The policy has paused yielding until `_resume_ns` after a loss.
        yields = self._budget_ns > 0 and start >= self._resume_ns
        while yields and not got:
            os.sched_yield()
            got = not try_wait(address)
            now = clock()
            worst = max(worst, now - last)
            if now - last > self._slow_ns or now >= end:
                break
            last = now
        if not got:
            if timeout_s is not None:
                got = semaphore.block(address, timeout_s)
            elif not yields:
                return False
        self.consumed += got
        now = clock()
        self._log.append((now - start, worst))
        if worst > self._slow_ns or len(self._log) >= LOGGED:
            log, self._log = self._log, []
            # Without memory the policy misses these waits. The wait itself has succeeded, and its post is consumed.
            with contextlib.suppress(MemoryError):
                self._budget_ns, self._resume_ns = self._policy.review(log, now)
        return got

    def absorb(self) -> bool:
        """Consume posts of messages that were read before their posts. Return True if there were any.

        After True the rings must be polled again: the consumed post may belong to a message that nobody has seen yet.
        """
        rang = False
        while self.consumed < self.read and not try_wait(self._address):
            self.consumed += 1
            rang = True
        return rang

    def flagged(self) -> int:
        """Clear one flag that is set and return its number; -1 if none is set. Poll the rings of that flag next."""
        at = bytes(self._page[FLAGS_AT : FLAGS_AT + FLAGS]).find(1)
        # Cleared before the rings are polled: a message that comes in between sets it again.
        if at >= 0:
            self._page[FLAGS_AT + at] = 0
        return at

    def sleeping(self, value: bool) -> None:
        """Mark that this process sleeps in an event loop, so that writers write its eventfd; or that it does not."""


class SlotReader:
    """Reading end of the slots of one ring."""

    __slots__ = ("_doorbell", "_full", "_slot_bytes", "_slots", "_slots_at", "_view", "sequence")

    def __init__(
        self, memory: Any, full_at: int, slots_at: int, slots: int, slot_bytes: int, doorbell: Doorbell
    ) -> None:
        self._view, address = _memory(memory)
        _check_slots(self._view, slots_at, slots, slot_bytes)
        self._full = _semaphore_at(self._view, address, full_at)
        self._slots_at, self._slots, self._slot_bytes = slots_at, slots, slot_bytes
        self._doorbell = doorbell
        self.sequence = 0
        """Number of the next message."""

    def poll(self) -> tuple[int, int, bytes | None] | None:
        """Read the next message like `take`, or return None if there is none."""
        return None if try_wait(self._full) else self.take()

    def take(self) -> tuple[int, int, bytes | None]:
        """Return (kind, flags, body) of the next message, after a successful wait for it.

        The body is None if the message has buffers, then call `parts`, or is of the kind TEXT, then call `text`.
        AssertionError if a ring was overrun.
        """
        # The semaphore that the caller has waited for makes the bytes of this slot visible.
        at = self._slots_at + self.sequence % self._slots * self._slot_bytes
        sequence, size, kind, flags, count = HEADER.unpack_from(self._view, at)
        # A mismatch is a defect of raylane: an execution was admitted before this slot was free.
        if sequence != self.sequence:
            raise AssertionError(f"message {sequence} in the place of message {self.sequence}: a ring was overrun")
        self.sequence = sequence + 1  # before anything can fail: the message is consumed in any case
        self._doorbell.read += 1
        if count or kind == TEXT:
            return kind, flags, None
        if size > self._slot_bytes - HEADER.size:
            raise AssertionError(f"a message of {size} bytes does not fit into a slot")
        at += HEADER.size
        return kind, flags, bytes(self._view[at : at + size])

    def text(self) -> str:
        """Return the string of the message that was taken last. AssertionError if its size does not fit."""
        return str(self.parts()[0], "utf-8", "surrogatepass")  # as pickle does

    def parts(self) -> tuple[bytes, list[bytearray]]:
        """Return (body, buffers) of the message that was taken last. AssertionError if its sizes do not fit."""
        if not self.sequence:
            raise ValueError("no message was taken")
        at = self._slots_at + (self.sequence - 1) % self._slots * self._slot_bytes
        end = at + self._slot_bytes
        _, body_bytes, _, _, count = HEADER.unpack_from(self._view, at)
        at += HEADER.size
        if at + count * _SIZE.size > end:
            raise AssertionError(f"{count} buffers do not fit into a slot")
        sizes = [_SIZE.unpack_from(self._view, at + index * _SIZE.size)[0] for index in range(count)]
        at += count * _SIZE.size
        parts = []
        for size in [*sizes, body_bytes]:
            if at + size > end:
                raise AssertionError(f"a part of {size} bytes does not fit into a slot")
            # Copied out of the slot, which will be written again; bytearrays, so that arrays in them are writable.
            parts.append(bytearray(self._view[at : at + size]))
            at += size
        return bytes(parts.pop()), parts


class SlotWriter:
    """Writing end of the slots of one ring. `readers` holds (offset of `full`, page of the doorbell, flag) of each."""

    __slots__ = ("_bells", "_fulls", "_slot_bytes", "_slots", "_slots_at", "_view", "bytes", "wake_fd")

    def __init__(
        self, memory: Any, slots_at: int, slots: int, slot_bytes: int, readers: tuple[tuple[int, Any, int], ...]
    ) -> None:
        self._view, address = _memory(memory)
        _check_slots(self._view, slots_at, slots, slot_bytes)
        self._slots_at, self._slots, self._slot_bytes = slots_at, slots, slot_bytes
        pages = [_memory(page, PAGE_BYTES) for _, page, _ in readers]
        for *_, flag in readers:
            if not 0 <= flag < FLAGS:
                raise ValueError(f"flag {flag} is not below {FLAGS}")
        self._fulls = [_semaphore_at(self._view, address, at) for at, _, _ in readers]
        self._bells = [
            (page, FLAGS_AT + flag, _semaphore_at(page, at, 0))
            for (page, at), (_, _, flag) in zip(pages, readers, strict=True)
        ]
        self.wake_fd = -1
        """Eventfd of the reader's event loop, or -1."""
        self.bytes = 0
        """Bytes written."""

    def write(self, sequence: int, kind: int, flags: int, body: Any) -> None:
        """Write message `sequence` without buffers, and notify the readers. ValueError if it does not fit.

        The body is bytes, or a string in ASCII.
        """
        body = body.encode("ascii") if isinstance(body, str) else body
        size = len(body)
        if size > self._slot_bytes - HEADER.size:
            raise ValueError(f"{size} bytes do not fit into a slot of {self._slot_bytes}")
        at = self._slots_at + sequence % self._slots * self._slot_bytes
        # No barrier is needed between these writes: the posts below publish all of them together.
        HEADER.pack_into(self._view, at, sequence, size, kind, flags, 0)
        at += HEADER.size
        self._view[at : at + size] = body
        self.bytes += size
        self._notify(flags)

    def write_parts(self, sequence: int, kind: int, flags: int, body: Any, buffers: Any) -> None:
        """Write message `sequence` with C-contiguous buffers, and notify the readers. ValueError if it does not fit."""
        parts = [memoryview(part).cast("B") for part in [*buffers, body]]
        sizes = [part.nbytes for part in parts]
        if HEADER.size + len(buffers) * _SIZE.size + sum(sizes) > self._slot_bytes:
            raise ValueError(f"{sum(sizes)} bytes do not fit into a slot of {self._slot_bytes}")
        at = self._slots_at + sequence % self._slots * self._slot_bytes
        HEADER.pack_into(self._view, at, sequence, sizes[-1], kind, flags, len(buffers))
        at += HEADER.size
        for size in sizes[:-1]:
            _SIZE.pack_into(self._view, at, size)
            at += _SIZE.size
        for part, size in zip(parts, sizes, strict=True):
            self._view[at : at + size] = part
            at += size
        self.bytes += sum(sizes)
        self._notify(flags)

    def _notify(self, flags: int) -> None:
        """Tell the readers of a message that is in its slot."""
        # All `full` semaphores before the first doorbell: a reader that wakes must find its message.
        for full in self._fulls:
            post(full)
        for page, at, bell in self._bells:
            page[at] = 1
            post(bell)
        # Last, and only for executions that asyncio awaits: the system call costs 1 us.
        if flags & WAKE and self.wake_fd >= 0:
            os.eventfd_write(self.wake_fd, 1)


class SmallPickler:
    """Pickles values with a pickler that is kept: `dump` appends the pickle to `output`, `forget` clears its memo."""

    __slots__ = ("_buffers", "_dump", "_forget", "_limit", "_output")

    def __init__(
        self,
        dump: Callable[[Any], object],
        forget: Callable[[], object],
        output: list[Any],
        buffers: list[Any],
        limit: int,
    ) -> None:
        self._dump, self._forget, self._output, self._buffers, self._limit = dump, forget, output, buffers, limit

    def encode(self, value: Any) -> bytes | None:
        """Return the pickle, or None if it is large, in several parts, has buffers or names `__main__`.

        After None the parts are still in `output` and `buffers`. Raises what pickling raises.
        """
        self._dump(value)
        self._forget()  # now, not before the next value: the memo keeps references to the value
        output = self._output
        if len(output) != 1 or self._buffers:
            return None
        body: bytes = output[0]
        if type(body) is not bytes or len(body) >= self._limit or _SCRIPT in body:
            return None
        del output[0]
        return body


class Recorder:
    """Times of the tasks of one graph in one actor: totals of each task, and records of the last `kept` ones.

    All in seconds of time.perf_counter().
    """

    __slots__ = ("_idle_since", "_records", "_returned", "_started", "_totals")

    def __init__(self, tasks: int, capacity: int) -> None:
        self._records: collections.deque[tuple[int, int, float, float, float, float]] = collections.deque(
            maxlen=capacity
        )
        self._totals: list[list[float]] = [[0, 0.0, 0.0, 0.0] for _ in range(tasks)]
        self._started = self._returned = 0.0
        self._idle_since = time.perf_counter()

    def started(self) -> None:
        """Note that a call begins."""
        self._started = time.perf_counter()

    def returned(self) -> None:
        """Note that the call has returned."""
        self._returned = time.perf_counter()

    def sent(self, task: int, execution: int) -> None:
        """Note that the results were sent."""
        sent = time.perf_counter()
        idle_since, started, returned = self._idle_since, self._started, self._returned
        self._idle_since = sent
        self._records.append((task, execution, idle_since, started, returned, sent))
        total = self._totals[task]
        total[0] += 1
        total[1] += started - idle_since
        total[2] += returned - started
        total[3] += sent - returned

    def records(self) -> list[tuple[int, int, float, float, float, float]]:
        """Return (task, execution, idle since, started, returned, sent) of the last tasks, oldest first."""
        return list(self._records)

    def totals(self, task: int) -> tuple[int, float, float, float]:
        """Return (count, seconds waiting, computing, sending) of a task."""
        count, *seconds = self._totals[task]
        return int(count), *seconds  # type: ignore[return-value]


def run_delay_ns() -> int:
    """Return the time that the calling thread has spent runnable without a CPU, or 0 if that is not known: here always.

    The native twin reads /proc/thread-self/schedstat. In Python, Ctrl-C between two calls would leave the file open.
    """
    return 0


def copy(target: Any, source: Any, threads: int) -> None:
    """Copy contiguous bytes. The native twin uses `threads` threads (at most 16) and releases the GIL meanwhile.

    ValueError if the sizes differ.
    """
    into, view = memoryview(target).cast("B"), memoryview(source).cast("B")
    if into.nbytes != view.nbytes:
        raise ValueError(f"cannot copy {view.nbytes} bytes into {into.nbytes}")
    into[:] = view


def copy_many(rows: Any, threads: int) -> None:
    """Copy bytes between addresses of this process. The native twin uses threads and releases the GIL, as `copy`.

    `rows` is a contiguous array of uint64, [copies, 3]: address of the target, address of the source, bytes. The caller
    keeps all of this memory alive. ValueError if the array has another size.
    """
    view = memoryview(rows).cast("B")
    if view.nbytes % 24:
        raise ValueError(f"a list of copies has three 64-bit numbers for each, got {view.nbytes} bytes")
    numbers = view.cast("Q").tolist()
    for target, source, nbytes in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        ctypes.memmove(target, source, nbytes)
