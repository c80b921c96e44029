"""`TrajectoryQueue`: the handle on a queue, for producers and consumers in any process of a Ray job.

    producer                       actor                     consumer
    write into shared memory
    announce  ──tickets──────────> room? book ──tickets────> map or copy the bytes, straight from the memory
                                        <──acknowledged────  use them
    write over it  <──free blocks──

Tickets are announced by a thread, one call at a time; items that are put meanwhile go with the next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import ray

from raylane.core.deadline import Deadline
from raylane.core.finalizing import finalize_here
from raylane.core.place import here
from raylane.core.semaphore import Segment
from raylane.errors import QueueError, QueueLostError, QueueTimeoutError
from raylane.rl.queue.actor import Commit, QueueActor
from raylane.rl.queue.blocks import BlockWriter, block_bytes, read_item
from raylane.rl.queue.book import AnnouncedItem, BlockPlace, FreeBlocks, ItemTicket, QueueOptions, QueueStats, Versions
from raylane.rl.queue.host import ItemRange
from raylane.transport.link.endpoint import endpoint

WINDOW_BYTES = 16 << 20
"""Bytes that may be written before they are announced; a larger item is announced alone."""
LARGE_BYTES = 1 << 16
"""Size from which the copy of an item lies in memory of the transport's pool."""
MOST_SEGMENTS = 128
"""Number of segments that a consumer keeps mapped."""
MARGIN_S = 5.0
"""Seconds that a caller waits beyond the deadline for the actor's own error, which says more."""


class Batch:
    """Groups of items that a consumer has taken.

    `acknowledge` gives their memory back; a batch that is neither acknowledged nor given back stays with this process
    until it ends.

    Attributes:
        groups: Values of each group, in the order in which they were put.
        tickets: Tickets of the same groups: which weights made which tokens.
    """

    def __init__(self, queue: TrajectoryQueue, tickets: list[list[ItemTicket]], groups: list[list[Any]]) -> None:
        self._queue = queue
        self.tickets = tickets
        self.groups = groups

    @property
    def items(self) -> list[Any]:
        """Values of all groups."""
        return [value for group in self.groups for value in group]

    def acknowledge(self) -> None:
        """Note that the items are done with. Does not wait; a second call does nothing."""
        self._queue.acknowledge(self.tickets)

    def give_back(self) -> None:
        """Let other consumers have the items. Does not wait."""
        self._queue.give_back(self.tickets)


class TrajectoryQueue:
    """Bounded queue between many producers and consumers. Thread-safe; pass it to actors and tasks as an argument.

    Values are anything that can be pickled; tensors and arrays in them lie in shared memory of their host and go from
    there straight to the consumer. Refs and actor handles are refused (GraphValueError). The queue ends with its last
    handle, or with the Ray job. All waits raise QueueTimeoutError after `timeout` seconds, and QueueLostError if the
    queue's actor has died.
    """

    def __init__(
        self,
        *,
        max_items: int = 4096,
        max_bytes: int = 1 << 30,
        group_size: int = 1,
        order: str = "fifo",
        max_lag: int | None = None,
        delivery: str = "at_least_once",
    ) -> None:
        """Make a queue. ValueError for a value that is not accepted; QueueError without a connection to Ray.

        Args:
            max_items: Largest number of items that have been put and not acknowledged; `put` waits beyond it.
            max_bytes: The same for their shared memory, in bytes, on all hosts together. Producers keep free memory for
                their next items, each one its share of this, and for half a second what it has used beyond it.
            group_size: Number of items with the same `group` that are handed out together, as the samples of a prompt.
            order: `fifo`, or `newest`: items of the newest weights first.
            max_lag: Drop items, and count them, whose oldest weights are more versions behind than this.
            delivery: `at_least_once`: items that a dead consumer had not acknowledged go to another one;
                `at_most_once`: they are lost. A dead producer loses nothing that `flush` has returned for.
        """
        options = QueueOptions(max_items, max_bytes, group_size, order, max_lag, delivery)
        options.check()
        if not ray.is_initialized():
            raise QueueError("this process is not connected to Ray. Call ray.init() first")
        actor = ray.remote(QueueActor).options(num_cpus=0, max_concurrency=10_000).remote(options)
        self._open(actor, options)

    def _open(self, actor: Any, options: QueueOptions) -> None:
        self._actor, self.options = actor, options
        self._lock = threading.Lock()  # held while this process joins
        self._member: _QueueMember | None = None
        """Membership of this process; the first call joins."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _handle, (self._actor, self.options)

    # Producers

    def put(self, value: Any, *, group: Hashable = None, versions: Versions = (), timeout: float | None = None) -> None:
        """Write a value into shared memory of this host. Waits while the queue is full.

        Returns before the queue has accepted it; `flush` waits for that.

        Args:
            value: The item. It may be changed as soon as this returns.
            group: Group of the item, for a queue with a `group_size`.
            versions: Versions of the weights that made it, each with the number of tokens that it made.
            timeout: Seconds; None means RAYLANE_TIMEOUT_S (60 s).

        Raises:
            QueueClosedError: The queue is closed.
            GraphValueError: The value cannot be pickled.
        """
        self.put_many([value], group=group, versions=[versions], timeout=timeout)

    def put_many(
        self,
        values: Iterable[Any],
        *,
        group: Hashable = None,
        versions: Sequence[Versions] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Put several values, as `put` does; `versions` has one entry for each.

        The values of an iterator are put one by one, as they come: consumers have the first before the last is made.
        """
        if group is None and self.options.group_size > 1:
            raise ValueError(f"a queue of group_size={self.options.group_size} needs the group of each item, got None")
        if isinstance(values, Iterator) and versions is None:
            for value in values:
                self.put(value, group=group, timeout=timeout)
            return
        values = list(values)
        if versions is not None and len(versions) != len(values):
            raise ValueError(f"versions must have one entry for each of {len(values)} values, got {len(versions)}")
        spans = versions or [()] * len(values)
        with self._joining_again():
            self._joined().sender.put(values, group, [tuple(span) for span in spans], Deadline.of_call(timeout))

    def flush(self, *, timeout: float | None = None) -> None:
        """Wait until the queue has accepted all that this process has put. Raises the errors of `put`."""
        member = self._member
        if member is not None:
            with self._joining_again():
                member.sender.flush(Deadline.of_call(timeout))

    # Consumers

    def take(
        self, count: int, *, at_least: int | None = None, copy: bool = True, timeout: float | None = None
    ) -> Batch:
        """Wait for items, and return them.

        Args:
            count: Number of groups (of items, without groups).
            at_least: Return fewer of them as soon as there are so many; None means `count`.
            copy: False lets tensors lie in the shared memory: they may be read until the batch is acknowledged, and
                must not be written to.
            timeout: Seconds; None means RAYLANE_TIMEOUT_S (60 s).

        Returns fewer, also none, at the end of a queue that was closed.

        Raises:
            QueueLostError: The host with one of the items has died. These are lost, the others are given back.
        """
        tickets = self.take_tickets(count, at_least=at_least, timeout=timeout)
        return Batch(self, tickets, self.open(tickets, copy=copy))

    def take_tickets(
        self, count: int, *, at_least: int | None = None, timeout: float | None = None
    ) -> list[list[ItemTicket]]:
        """Take items as `take` does, without their payloads: for other processes, which pass them to `open`.

        The items stay taken by this process.
        """
        # Checked here: an error in the actor would come with a traceback of another process.
        least = count if at_least is None else at_least
        if not 1 <= least <= count:
            raise ValueError(f"at_least must be from 1 to count={count}, got {least}")
        member, deadline = self._joined(), Deadline.of_call(timeout)
        with self._joining_again():
            arguments = member.number, count, least, deadline.left_s()
            tickets: list[list[ItemTicket]] = self._call("take", *arguments, deadline=deadline)
        return tickets

    def open(self, tickets: Sequence[Sequence[ItemTicket]], *, copy: bool = True) -> list[list[Any]]:
        """Return the values of tickets, in any process. QueueLostError and `copy` as `take`."""
        member = self._joined()
        try:
            return member.reader.read(tickets, copy=copy)
        except _Unreadable as error:
            self._call("lose", error.numbers, deadline=Deadline.of_call(None))
            self.give_back(tickets)
            raise QueueLostError(f"{len(error.numbers)} items on node {error.host} are lost: {error.cause}") from error

    async def batches(self, count: int, *, at_least: int | None = None, copy: bool = True) -> AsyncIterator[Batch]:
        """Yield batches of `count` groups until the queue is closed and empty; waits without a limit.

        Each batch is acknowledged when the next one is asked for, and given back if the loop is left by an error. The
        last one may be smaller. At the end of a queue with groups, those that are not complete are dropped.
        """
        await asyncio.to_thread(self._joined)  # so that nothing below waits in the event loop
        while True:
            batch = await asyncio.to_thread(self._take_forever, count, at_least, copy)
            if not batch.tickets:
                return
            try:
                yield batch
            # Also the GeneratorExit of a loop that was left by `break` or by an error.
            except BaseException:
                batch.give_back()
                raise
            batch.acknowledge()

    def _take_forever(self, count: int, at_least: int | None, copy: bool) -> Batch:
        while True:
            try:
                return self.take(count, at_least=at_least, copy=copy)
            except QueueTimeoutError:
                continue

    def acknowledge(self, tickets: Sequence[Sequence[ItemTicket]]) -> None:
        """Give the memory of items back that this process has taken. Does not wait."""
        self._tell("acknowledge", tickets)

    def give_back(self, tickets: Sequence[Sequence[ItemTicket]]) -> None:
        """Let other consumers have items that this process has taken. Does not wait."""
        self._tell("give_back", tickets)

    # Both

    def set_version(self, version: int) -> None:
        """Note the newest version of the weights, from which `max_lag` counts. Does not wait."""
        self._actor.set_version.remote(version)

    def close(self, *, timeout: float | None = None) -> None:
        """Accept what this process has put, and nothing more; consumers get what is there. Waits for the queue."""
        self.flush(timeout=timeout)
        self._call("close", deadline=Deadline.of_call(timeout))

    def stats(self, *, timeout: float | None = None) -> QueueStats:
        """Return the figures of the queue."""
        stats: QueueStats = self._call("stats", deadline=Deadline.of_call(timeout))
        return stats

    # Parts of the above

    @contextlib.contextmanager
    def _joining_again(self) -> Iterator[None]:
        """After a QueueLostError in a `with` block, let the next call join again: this host may have another actor."""
        try:
            yield
        except QueueLostError:
            with self._lock:
                member, self._member = self._member, None
            if member is not None:
                member.leave()
            raise

    def _joined(self) -> _QueueMember:
        with self._lock:
            if self._member is None:
                place, node = here(), ray.get_runtime_context().get_node_id()
                arguments = node, place.pid, place.start_ticks
                number, host = self._call("join", *arguments, deadline=Deadline.of_call(None))
                self._member = _QueueMember(self._actor, number, host, node, self.options.max_bytes)
                self._member.leave = finalize_here(self, self._member.sender.end)
            return self._member

    def _tell(self, method: str, tickets: Sequence[Sequence[ItemTicket]]) -> None:
        # Ray may run these calls in any order, which is no harm: each names its items.
        numbers = [ticket.number for group in tickets for ticket in group]
        if numbers:
            getattr(self._actor, method).remote(self._joined().number, numbers)

    def _call(self, method: str, *args: Any, deadline: Deadline) -> Any:
        return call(self._actor, method, *args, deadline=deadline)


def _handle(actor: Any, options: QueueOptions) -> TrajectoryQueue:
    queue = TrajectoryQueue.__new__(TrajectoryQueue)
    queue._open(actor, options)
    return queue


def call(actor: Any, method: str, *args: Any, deadline: Deadline) -> Any:
    """Return the answer of a method of a queue's actor, or raise its error."""
    remaining_s = deadline.left_s()
    try:
        ref = getattr(actor, method).remote(*args)
        return ray.get(ref, timeout=None if remaining_s is None else remaining_s + MARGIN_S)
    except ray.exceptions.GetTimeoutError as error:
        raise QueueTimeoutError(f"the queue did not answer within {deadline.timeout_s} s. Raise the timeout") from error
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, QueueError) else error) from None
    except ray.exceptions.RayActorError as error:
        raise QueueLostError(f"the actor of the queue has ended: {error}. Make a new queue") from error


class _QueueMember:
    """This process as a member of a queue."""

    def __init__(self, actor: Any, number: int, host: Any, node: str, max_bytes: int) -> None:
        self.number = number
        self.leave: Callable[[], Any] = lambda: None
        """Ends the membership; also called when the last handle of this process is gone."""
        self.reader = _ItemReader(actor, node)
        self.sender = _ItemSender(actor, number, host, node, max_bytes)


class _Unreadable(Exception):
    """Items whose memory is gone."""

    def __init__(self, numbers: list[int], host: str, cause: Exception | str) -> None:
        super().__init__(numbers, host, cause)
        self.numbers, self.host, self.cause = numbers, host, cause


class _ItemReader:
    """Reads items from the memory of this host, or from the actors of others."""

    def __init__(self, actor: Any, node: str) -> None:
        self._actor, self._node = actor, node
        self._lock = threading.Lock()  # guards the segments
        self._segments: dict[str, Segment] = {}
        """Segments by path, the last used one at the end."""
        self._hosts: dict[str, Any] = {}

    def read(self, tickets: Sequence[Sequence[ItemTicket]], *, copy: bool) -> list[list[Any]]:
        """Return the values of tickets."""
        far: dict[str, list[ItemTicket]] = {}
        for group in tickets:
            for ticket in group:
                if ticket.host != self._node:
                    far.setdefault(ticket.host, []).append(ticket)
        # One call for all items of a host.
        values: dict[int, Any] = {}
        for host, some in far.items():
            values |= self._fetch(host, some)
        return [
            [values[ticket.number] if ticket.host != self._node else self._here(ticket, copy) for ticket in group]
            for group in tickets
        ]

    def _here(self, ticket: ItemTicket, copy: bool) -> Any:
        # A segment that is mapped already can be read even if its host's actor has died.
        try:
            segment = self._segment(ticket.path)
        except FileNotFoundError as error:
            raise _Unreadable([ticket.number], ticket.host, error) from error
        view = segment.view[ticket.offset : ticket.offset + ticket.nbytes]
        return read_item(_copied(view) if copy else view)

    def _segment(self, path: str) -> Segment:
        with self._lock:
            segment = self._segments.pop(path, None)
            if segment is None:
                # Values that still use the oldest one keep its mapping.
                if len(self._segments) == MOST_SEGMENTS:
                    del self._segments[next(iter(self._segments))]
                segment = Segment.open(path)
            self._segments[path] = segment
            return segment

    def _fetch(self, host: str, tickets: list[ItemTicket]) -> dict[int, Any]:
        """Return the values of tickets of another host by number."""
        from raylane.transport.api import get

        numbers = [ticket.number for ticket in tickets]
        try:
            if host not in self._hosts:
                self._hosts = call(self._actor, "hosts", deadline=Deadline.of_call(None))
            ranges = [ItemRange(ticket.path, ticket.offset, ticket.nbytes) for ticket in tickets]
            (ref,) = ray.get(self._hosts[host].read.remote(ranges))
            tensors = get(ref)
        except KeyError as error:
            raise _Unreadable(numbers, host, "the actor that held the memory has died") from error
        except ray.exceptions.RayError as error:
            raise _Unreadable(numbers, host, error) from error
        return {number: read_item(memoryview(tensor.numpy())) for number, tensor in zip(numbers, tensors, strict=True)}


def _copied(view: memoryview) -> memoryview:
    if view.nbytes < LARGE_BYTES:
        return memoryview(bytearray(view))
    # From the pool, whose pages are warm after the first batches: fresh ones would cost more than the copy.
    copied = memoryview(endpoint().pool.take(view.nbytes)).cast("B")
    copied[:] = view
    return copied


def _hold(host: Any, path: str) -> str:
    """Let the actor of this host hold a segment of this process; return its path there."""
    try:
        return str(ray.get(host.hold.remote(path)))
    except ray.exceptions.RayActorError as error:
        raise QueueLostError(f"the actor of the queue on this host has ended: {error}. Put again") from error


class _ItemSender:
    """Writes items of this process, and announces them on a thread."""

    def __init__(self, actor: Any, member: int, host: Any, node: str, max_bytes: int) -> None:
        self._actor, self._member, self._node = actor, member, node
        self._writer = BlockWriter(
            block_bytes(max_bytes),
            max_bytes,
            # Not a method: in a cycle with this object, the handle of the queue would stay until garbage is collected.
            functools.partial(_hold, host),
            lambda paths: host.forget.remote(paths),
        )
        self._changed = threading.Condition()  # guards all below
        self._pending: dict[int, list[AnnouncedItem]] = {}
        """Items that were not announced, by block."""
        self._pending_bytes = 0
        self._announced = True
        """False while the thread announces items."""
        self._error: tuple[type[QueueError], str] | None = None
        """Error of the thread; without its traceback, which would keep the frames of callers alive."""
        self._ended = False
        self._thread: threading.Thread | None = None

    def put(self, values: list[Any], group: Hashable, versions: list[Versions], deadline: Deadline) -> None:
        """Write values as soon as there is room for them."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._announce_all, name="raylane-queue", daemon=True)
                self._thread.start()
            for value, span in zip(values, versions, strict=True):
                self._wait(lambda: self._pending_bytes < WINDOW_BYTES, deadline, "the queue is full")
                # Under the lock: the thread frees blocks that this call may write to.
                item = self._writer.write(value)
                self._pending.setdefault(item.block, []).append(AnnouncedItem(item.offset, item.nbytes, group, span))
                self._pending_bytes += item.nbytes
                # Each time: the next value may have to wait until this one is announced.
                self._changed.notify_all()

    def flush(self, deadline: Deadline) -> None:
        """Wait until all was accepted."""
        with self._changed:
            self._wait(lambda: not self._pending and self._announced, deadline, "the queue is full")

    def end(self) -> None:
        """Announce what is left, and leave the queue. Does not wait."""
        with self._changed:
            self._ended = True
            if self._thread is None:
                self._leave()
            self._changed.notify_all()

    def _leave(self) -> None:
        # A call after the end of the session would start another Ray.
        if ray.is_initialized():
            with contextlib.suppress(Exception):  # Ray's, of no type of its own, if the session ends now
                self._actor.leave.remote(self._member)

    def _wait(self, condition: Any, deadline: Deadline, state: str) -> None:
        done = self._changed.wait_for(lambda: self._error is not None or condition(), deadline.left_s())
        if self._error is not None:
            kind, text = self._error
            raise kind(text)
        if not done:
            raise QueueTimeoutError(f"after {deadline.timeout_s} s {state}. Take from it, or raise the timeout")

    def _announce_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._ended)
                if not self._pending:
                    # The last handle of this process is gone, and all that it has put is announced.
                    self._leave()
                    return
                commits = self._take_pending()
                self._announced = False
            free = FreeBlocks([], self._writer.limit)
            try:
                free = call(self._actor, "commit", self._member, commits, deadline=Deadline(None))
            except Exception as error:
                kind = type(error) if isinstance(error, QueueError) else QueueError
                with self._changed:
                    self._error = kind, str(error)
            with self._changed:
                self._announced = True
                self._writer.release(*free)
                self._changed.notify_all()
                if self._error is not None:
                    return

    def _take_pending(self) -> list[Commit]:
        # Blocks that became full after their last item was announced are told of too, else they would never be free.
        full = set(self._writer.take_full())
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        blocks = self._writer.blocks
        return [
            Commit(
                number,
                BlockPlace(self._node, blocks[number].path, blocks[number].segment.nbytes),
                pending.get(number, ()),
                number in full,
            )
            for number in dict.fromkeys((*pending, *full))
        ]
