"""Interface of `_native.c`: operations on every message of a compiled graph. `native` documents the layouts."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

BUSY: Final[object]
"""Result of `Section.run` where another thread runs the section."""
SLOT_HEADER_BYTES: Final[int]
DESCRIPTOR_BYTES: Final[int]
"""Bytes of a slot that are kept free, beside its header, where a message has buffers."""
FLAGS: Final[int]
"""Number of flags in the page of a doorbell."""
PAGE_BYTES: Final[int]
"""Size of the page of a doorbell."""
WAKE: Final[int]
"""Flag of a message: its execution is awaited in asyncio."""
LOGGED: Final[int]
"""Number of waits between two looks of the policy."""
VALUE: Final[int]
"""Kind of a message whose body is a pickle."""
NOTHING: Final[int]
"""Kind of a message that stands for None."""
BYTES: Final[int]
"""Kind of a message whose body is the value itself."""
TEXT: Final[int]
"""Kind of a message whose body is a string in UTF-8."""

class DamagedRing(AssertionError):
    """What a slot of a ring holds is not the next message: the ring was overrun, or memory was overwritten."""

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

    read_bytes: int
    """Bytes of the usual messages that `read` has read."""
    sequence: int
    """Number of the next message."""
    def __init__(
        self,
        memory: Any,
        full_at: int,
        slots_at: int,
        slots: int,
        slot_bytes: int,
        doorbell: Doorbell,
        loads: Callable[[bytes], Any],
    ) -> None: ...
    def read(self, values: list[Any] | None, index: int, before: Callable[[], object] | None, /) -> Any:
        """Read the next message: None if there is none, its flags if it is a usual one, else as `take` returns it.

        Usual are VALUE, BYTES and TEXT without buffers, and NOTHING. Their value is put into `values` at `index`, where
        NOTHING changes nothing; `values` of None drops it. Calls `before` first. Raises DamagedRing, or the errors
        of `before` and of unpickling; then the message is read.
        """
    def poll(self) -> tuple[int, int, bytes | None] | None:
        """Read the next message like `take`, or return None if there is none."""
    def take(self) -> tuple[int, int, bytes | None]:
        """Return (kind, flags, body) of the next message, after a successful wait for it.

        The body is None if the message has buffers, then call `parts`. DamagedRing if there is another.
        """
    def parts(self) -> tuple[bytes, list[bytearray]]:
        """Return (body, buffers) of the message that was taken last. AssertionError if its sizes do not fit."""

class SlotWriter:
    """Writing end of the slots of one ring. `readers` holds (offset of `full`, page of the doorbell, flag) of each.

    Buffers of a message are copied into its slot if they have at most `most_copied` bytes together.
    """

    bytes: int
    """Bytes written."""
    wake_fd: int
    """Eventfd of the reader's event loop, or -1."""
    def __init__(
        self,
        memory: Any,
        slots_at: int,
        slots: int,
        slot_bytes: int,
        most_copied: int,
        readers: tuple[tuple[int, Any, int], ...],
    ) -> None: ...
    def write(self, sequence: int, message: tuple[Any, ...], flags: int = 0, /) -> None:
        """Write the message (kind, body, list of buffers, ...) into slot `sequence`, and notify the readers.

        Calls `write_elsewhere` with the same arguments if it does not fit.
        """
    def replace_page(self, index: int, page: Any, /) -> None:
        """Notify reader `index` from now on through the doorbell on this page. IndexError if there is no such reader.

        For the thread that uses this writer.
        """
    def write_elsewhere(self, sequence: int, message: Any, flags: int, /) -> None:
        """Write a message that does not fit into its slot. ValueError, unless a subclass does it."""
    def write_parts(self, sequence: int, kind: int, flags: int, body: Any, buffers: Any) -> None:
        """Write message `sequence` with C-contiguous buffers, and notify the readers. ValueError if it does not fit."""

class Encoder:
    """Encoder of values into messages. Used by one thread at a time.

    A message is a tuple (kind, body, buffers, held) of the class `message`; that of None is `none`. Subclasses do what
    is not usual: `renew` and the two methods after it.
    """

    def __init__(self, message: type[tuple[Any, ...]], none: Any, modules: dict[str, Any], most_kept: int) -> None: ...
    def prepare(
        self,
        dump: Callable[[Any], object],
        forget: Callable[[], object],
        output: list[Any],
        buffers: list[Any],
        awaited: tuple[str, ...],
        /,
    ) -> None:
        """Use a pickler whose `dump` appends to `output` and `buffers` and whose `forget` clears its memo.

        Once one of the `awaited` names is in `modules`, the next value calls `renew`.
        """
    def small(self, value: Any, /) -> Any:
        """Return the message of a usual value: None, large bytes or ASCII text as they are, or a pickle.

        Return None, with the parts of the pickle in `output` and `buffers`, if it has several parts, buffers or at
        least `most_kept` bytes, or if it names `__main__`. Raises what pickling raises.
        """
    def encode(self, value: Any, /) -> Any:
        """Return the message of a value: that of `small`, or of `rest`, or after an error that of `unusual`."""
    def renew(self) -> None:
        """Make another pickler and `prepare` for it."""
    def rest(self, value: Any, /) -> Any:
        """Return the message of a value for which `small` has returned None."""
    def unusual(self, value: Any, error: BaseException, /) -> Any:
        """Return the message of a value for which `small` or `rest` has raised `error`, or raise another error."""

class Section:
    """Section of code that one thread at a time runs. A KeyboardInterrupt in it leaves no lock behind.

    Python may raise that error between any two of its own instructions, also between the call that takes a lock and
    the `try` that would release it. Here C takes and releases the lock, and no signal handler runs in between.
    """

    @property
    def locked(self) -> bool:
        """True while a thread runs this section."""
    def run(self, timeout_s: float, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Return what `function(*arguments)` returns, called while no other thread runs this section.

        Waits for another thread at most `timeout_s` seconds (0: not at all), then returns BUSY.
        """
    def runs_here(self) -> bool:
        """Return True if the calling thread runs this section, further down its stack."""
    def reset(self) -> None:
        """Make the section free. Only for a forked child, in which the thread that ran it does not exist."""

class Result:
    """Result of one execution of a graph: attributes and steps that every execution needs."""

    number: int
    """Number of this execution, from 0."""
    submitted_s: float
    """Time of the creation of this object, in seconds of time.perf_counter()."""
    leaf_errors: Sequence[BaseException]
    _source: Any
    """What completes this result; None once it is done: a result that is kept must not keep the graph and its actors.
    """
    _values: list[Any] | None
    """Values read so far; None once every message was read."""
    _messages_left: int
    """Number of messages that have not been read."""
    _wakes_asyncio: bool
    """True if the messages of this execution wake the asyncio loop."""
    _waiting: Any
    _done: bool
    _value: Any
    _error: BaseException | None
    def __init__(
        self, source: Any, number: int, messages_left: int, values: list[Any], wakes_asyncio: bool, /
    ) -> None: ...
    def complete(self, value: Any, error: BaseException | None, /) -> None:
        """Set the value or the error, and call `wake` if coroutines wait. For the source only."""
    def _is_done(self) -> bool:
        """Return True if the result has a value or an error. Reads no messages."""

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

class Executions:
    """Executions of one graph that are under way: results in the order of their numbers, in a sequence `pending`."""

    submitted: int
    """Number of executions started."""
    completed: int
    """Number of executions of which every message was read."""
    pending: Any
    def __init__(self, pending: Any, recorder: Recorder) -> None: ...
    def find(self, number: int, /) -> Any:
        """Return the result of execution `number`; None if it has ended or has not begun."""
    def end_oldest(self) -> Any:
        """Remove the oldest result and return it. IndexError if there is none.

        The recorder notes its end, as (0, number, submitted three times, now).
        """
    def settle(self, result: Any, output: int, /) -> bool | None:
        """Note that a message of the oldest executions was read. Return True if that completed its result.

        After the last message the result gets the value at index `output`, and its execution ends. None if `output` is
        negative or the result is done: then nothing is noted yet.
        """

def run_delay_ns() -> int:
    """Return the time that the calling thread has spent runnable without a CPU, or 0 if that is not known."""

def copy(target: Any, source: Any, threads: int) -> None:
    """Copy contiguous bytes with `threads` threads (at most 16), without the GIL. ValueError if the sizes differ."""

def copy_many(rows: Any, threads: int) -> None:
    """Copy bytes between addresses of this process with threads, without the GIL.

    `rows` is a contiguous array of uint64, [copies, 3]: address of the target, address of the source, bytes. The caller
    keeps all of this memory alive. ValueError if the array has another size.
    """

def add_digests(rows: Any, sums: Any, threads: int) -> None:
    """Add the digests of regions of memory to sums modulo 2**64, with threads (at most 16), without the GIL.

    `rows` is a contiguous array of uint64, [regions, 13]: address of the first word, bytes of a word (1, 2 or 4),
    number of the sum, position of the first word in its whole tensor; then for three dimensions the numbers of words,
    their distances in memory in bytes, and their distances in the whole tensor in words. The caller keeps all of this
    memory alive. `sums` is a contiguous, writable array of uint64. ValueError if a row does not fit.
    """
