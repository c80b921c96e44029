"""Interface of `_native.c`: operations on every message of a compiled graph. `native` documents the layouts."""

from collections.abc import Callable
from typing import Any, Protocol

class Policy(Protocol):
    """Decision how long to yield before sleeping (implemented by `waiting.Patience`)."""

    budget_ns: int
    """First budget."""
    slow_ns: int
    """Length of a yield above which the policy looks at once."""
    def review(self, waits: list[tuple[int, int]], now_ns: int) -> tuple[int, int]:
        """Return (budget, time from which to yield again) after these waits: (length, longest yield), all in ns."""

class Doorbell:
    """Reading end of a doorbell. One thread at a time waits."""

    consumed: int
    """Posts consumed. Lower than `read` when messages were found by polling."""
    read: int
    """Messages read from the rings of this doorbell."""
    def __init__(self, page: Any, policy: Policy) -> None: ...
    def wait(self, timeout_s: float) -> bool:
        """Wait for one post and consume it. Return False after `timeout_s` (at most one second) or on a signal."""
    def glance(self) -> bool:
        """Wait for one post like `wait`, but return False where `wait` would sleep."""
    def absorb(self) -> bool:
        """Consume posts of messages that were read before their posts. Return True if there were any.

        After True the rings must be polled again: the consumed post may belong to a message that nobody has seen yet.
        """
    def flagged(self) -> int:
        """Clear one flag that is set and return its number; -1 if none is set. Poll the rings of that flag next."""
    def sleeping(self, value: bool) -> None:
        """Mark that this process sleeps in an event loop, so that writers write its eventfd; or that it does not."""

class SlotReader:
    """Reading end of the slots of one ring. ValueError if they do not lie in the memory."""

    @property
    def sequence(self) -> int:
        """Number of the next message."""
    def __init__(
        self, memory: Any, full_at: int, slots_at: int, slots: int, slot_bytes: int, doorbell: Doorbell
    ) -> None: ...
    def poll(self) -> tuple[int, int, bytes | None] | None:
        """Read the next message like `take`, or return None if there is none."""
    def take(self) -> tuple[int, int, bytes | None]:
        """Return (kind, flags, body) of the next message, after a successful wait for it.

        The body is None if the message has buffers, then call `parts`, or is of the kind TEXT, then call `text`.
        AssertionError if a ring was overrun.
        """
    def text(self) -> str:
        """Return the string of the message that was taken last. AssertionError if its size does not fit."""
    def parts(self) -> tuple[bytes, list[bytearray]]:
        """Return (body, buffers) of the message that was taken last. AssertionError if its sizes do not fit."""

class SlotWriter:
    """Writing end of the slots of one ring. `readers` holds (offset of `full`, page of the doorbell, flag) of each."""

    bytes: int
    """Bytes written."""
    wake_fd: int
    """Eventfd of the reader's event loop, or -1."""
    def __init__(
        self, memory: Any, slots_at: int, slots: int, slot_bytes: int, readers: tuple[tuple[int, Any, int], ...]
    ) -> None: ...
    def write(self, sequence: int, kind: int, flags: int, body: Any) -> None:
        """Write message `sequence` without buffers, and notify the readers. ValueError if it does not fit.

        The body is bytes, or a string in ASCII.
        """
    def write_parts(self, sequence: int, kind: int, flags: int, body: Any, buffers: Any) -> None:
        """Write message `sequence` with C-contiguous buffers, and notify the readers. ValueError if it does not fit."""

class SmallPickler:
    """Pickles values with a pickler that is kept: `dump` appends the pickle to `output`, `forget` clears its memo."""

    def __init__(
        self,
        dump: Callable[[Any], object],
        forget: Callable[[], object],
        output: list[Any],
        buffers: list[Any],
        limit: int,
    ) -> None: ...
    def encode(self, value: Any) -> bytes | None:
        """Return the pickle, or None if it is large, in several parts, has buffers or names `__main__`.

        After None the parts are still in `output` and `buffers`. Raises what pickling raises.
        """

class Recorder:
    """Times of the tasks of one graph in one actor: totals of each task, and records of the last `kept` ones.

    All in seconds of time.perf_counter().
    """

    def __init__(self, tasks: int, kept: int) -> None: ...
    def started(self) -> None:
        """Note that a call begins."""
    def returned(self) -> None:
        """Note that the call has returned."""
    def sent(self, task: int, execution: int) -> None:
        """Note that the results were sent."""
    def records(self) -> list[tuple[int, int, float, float, float, float]]:
        """Return (task, execution, idle since, started, returned, sent) of the last tasks, oldest first."""
    def totals(self, task: int) -> tuple[int, float, float, float]:
        """Return (count, seconds waiting, computing, sending) of a task."""

def run_delay_ns() -> int:
    """Return the time that the calling thread has spent runnable without a CPU, or 0 if that is not known."""

def copy(target: Any, source: Any, threads: int) -> None:
    """Copy contiguous bytes with `threads` threads (at most 16), without the GIL. ValueError if the sizes differ."""

def copy_many(rows: Any, threads: int) -> None:
    """Copy bytes between addresses of this process with threads, without the GIL.

    `rows` is a contiguous array of uint64, [copies, 3]: address of the target, address of the source, bytes. The caller
    keeps all of this memory alive. ValueError if the array has another size.
    """
