"""`TrajectoryQueue`: the handle on a queue, for producers and consumers in any process of a Ray job.

    producer                       actor                     consumer
    write into shared memory
    announce  ──tickets──────────> room? book ──tickets────> map or copy the bytes, straight from the memory
                                        <──acknowledged────  use them
    write over it  <──free blocks──

Tickets are announced by a thread, one call at a time; items that are put meanwhile go with the next call.

A call whose answer does not come in time, or whose caller is cancelled, is taken back (`take`, `join`): nothing is
leased to a caller that does not wait any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import ray

from raylane.core.deadline import Deadline
from raylane.core.process.finalizing import finalize_here
from raylane.core.process.place import here
from raylane.errors import QueueClosedError, QueueError, QueueLostError, QueueTimeoutError
from raylane.rl.queue.actor import Commit, QueueActor
from raylane.rl.queue.blocks import BlockWriter, block_bytes
from raylane.rl.queue.book import (
    AnnouncedItem,
    BlockPlace,
    FreeBlocks,
    ItemTicket,
    QueueOptions,
    QueueStats,
    Versions,
    check_count,
    plain_group,
    plain_versions,
)
from raylane.rl.queue.calls import call, call_async, limit_s
from raylane.rl.queue.reader import ItemReader, UnreadableError

_log = logging.getLogger(__name__)

WINDOW_BYTES = 16 << 20
"""Bytes that may be written before they are announced; a larger item is announced alone."""


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
        self._is_open = True
        """False after the batch was acknowledged or given back; this process may have taken its items again since."""
        self.tickets = tickets
        self.groups = groups

    @property
    def items(self) -> list[Any]:
        """Values of all groups."""
        return [value for group in self.groups for value in group]

    def acknowledge(self) -> None:
        """Note that the items are done with. Does not wait; a second call does nothing."""
        if self._end():
            self._queue.acknowledge(self.tickets)

    def give_back(self) -> None:
        """Let other consumers have the items, unless they were acknowledged. Does not wait."""
        if self._end():
            self._queue.give_back(self.tickets)

    def _end(self) -> bool:
        was_open, self._is_open = self._is_open, False
        return was_open


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
        self._leased: set[int] = set()
        """Numbers of the items that were taken by this handle, and neither acknowledged nor given back."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _handle, (self._actor, self.options)

    # Producers

    def put(self, value: Any, *, group: Hashable = None, versions: Versions = (), timeout: float | None = None) -> None:
        """Write a value into shared memory of this host. Waits while the queue is full.

        Returns before the queue has accepted it; `flush` waits for that.

        Args:
            value: The item. It may be changed as soon as this returns.
            group: Group of the item, for a queue with a `group_size`: a text, bytes, an integer, or a tuple of these.
            versions: Versions of the weights that made it, each with the number of tokens that it made: [(7, 120)].
            timeout: Seconds; None means RAYLANE_TIMEOUT_S (60 s).

        Raises:
            QueueClosedError: The queue is closed.
            GraphValueError: The value cannot be pickled.
            ValueError: `group` or `versions` are of another kind; nothing was put.
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
        # Checked here: in the actor an error would concern the items of later calls too.
        decides = self.options.max_lag is not None or self.options.order == "newest"
        spans = [plain_versions(span, decides=decides) for span in versions or [()] * len(values)]
        group, deadline = plain_group(group), Deadline.of_call(timeout)
        with self._joining_again():
            self._joined(deadline).sender.put(values, group, spans, deadline)

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
        with self._giving_back(tickets):
            return Batch(self, tickets, self._read(tickets, copy=copy))

    def take_tickets(
        self, count: int, *, at_least: int | None = None, timeout: float | None = None
    ) -> list[list[ItemTicket]]:
        """Take items as `take` does, without their payloads: for other processes, which pass them to `open`.

        The items stay taken by this process.
        """
        count, least, deadline = *_checked_counts(count, at_least, self.options), Deadline.of_call(timeout)
        member = self._joined(deadline)
        with self._joining_again():
            return self._lease(call(self._actor, "take", *member.request(count, least, deadline), deadline=deadline))

    def open(self, tickets: Sequence[Sequence[ItemTicket]], *, copy: bool = True) -> list[list[Any]]:
        """Return the values of tickets, in any process. QueueLostError and `copy` as `take`."""
        try:
            return self._read(tickets, copy=copy)
        except QueueLostError:
            self._tell("give_back", self._leased.intersection(_numbers(tickets)))
            raise

    def _read(self, tickets: Sequence[Sequence[ItemTicket]], *, copy: bool) -> list[list[Any]]:
        member = self._joined()
        try:
            return member.reader.read(tickets, copy=copy)
        except UnreadableError as error:
            call(self._actor, "lose", error.numbers, deadline=Deadline.of_call(None))
            raise QueueLostError(f"{len(error.numbers)} items on node {error.host} are lost: {error.cause}") from error

    async def batches(
        self, count: int, *, at_least: int | None = None, copy: bool = True, timeout: float | None = None
    ) -> AsyncIterator[Batch]:
        """Yield batches of `count` groups until the queue is closed and empty.

        Each batch is acknowledged when the next one is asked for, and given back if the loop is left by an error. The
        last one may be smaller. At the end of a queue with groups, those that are not complete are dropped. A wait for
        a batch can be cancelled, and loses nothing.

        Args:
            count: Number of groups, as in `take`.
            at_least: As in `take`.
            copy: As in `take`.
            timeout: Seconds to wait for a batch before QueueTimeoutError; None means no limit. A wait without a limit
                logs a warning after each RAYLANE_TIMEOUT_S, with what is there and who still produces.
        """
        count, least = _checked_counts(count, at_least, self.options)
        member = await self._joined_async()
        while True:
            tickets = await self._take_async(member, count, least, timeout)
            if not tickets:
                return
            with self._giving_back(tickets):
                # On a thread: items of other hosts take time to come.
                batch = Batch(self, tickets, await asyncio.to_thread(self._read, tickets, copy=copy))
            try:
                yield batch
            # Also the GeneratorExit of a loop that was left by `break` or by an error.
            except BaseException:
                batch.give_back()
                raise
            batch.acknowledge()

    async def _take_async(
        self, member: _QueueMember, count: int, least: int, timeout: float | None
    ) -> list[list[ItemTicket]]:
        """Wait for tickets, without a limit if `timeout` is None."""
        while True:
            deadline = Deadline.of_call(timeout)
            try:
                with self._joining_again():
                    request = member.request(count, least, deadline)
                    return self._lease(await call_async(self._actor, "take", *request, deadline=deadline))
            except QueueTimeoutError as error:
                if timeout is not None:
                    raise
                _log.warning("still waiting for items of a queue: %s", error)

    def acknowledge(self, tickets: Sequence[Sequence[ItemTicket]]) -> None:
        """Give the memory of items back that this handle has taken. Does not wait.

        QueueError for items that it has not taken, or has ended already.
        """
        self._end_leases("acknowledge", tickets)

    def give_back(self, tickets: Sequence[Sequence[ItemTicket]]) -> None:
        """Let other consumers have items that this handle has taken. Does not wait. QueueError as `acknowledge`."""
        self._end_leases("give_back", tickets)

    # Both

    def set_version(self, version: int) -> None:
        """Note the newest version of the weights, from which `max_lag` counts. Does not wait."""
        self._actor.set_version.remote(check_count("version", version, 0))

    def close(self, *, timeout: float | None = None) -> None:
        """Accept what this process has put, and nothing more; consumers get what is there. Waits for the queue."""
        deadline = Deadline.of_call(timeout)
        self.flush(timeout=timeout)
        call(self._actor, "close", deadline=deadline)

    def stats(self, *, timeout: float | None = None) -> QueueStats:
        """Return the figures of the queue."""
        stats: QueueStats = call(self._actor, "stats", deadline=Deadline.of_call(timeout))
        return stats

    # Parts of the above

    @contextlib.contextmanager
    def _joining_again(self) -> Iterator[None]:
        """After the loss of a membership in a `with` block, let the next call join again.

        This host may have another actor, and what could not be announced must not fail later calls.
        """
        try:
            yield
        except QueueError as error:
            if not isinstance(error, QueueClosedError | QueueTimeoutError):
                with self._lock:
                    member = self._member
                    ends = member is not None and member.pid == os.getpid()  # not that of a forked child's parent
                    self._member = None if ends else member
                if ends and member is not None:
                    member.leave()
            raise

    @contextlib.contextmanager
    def _giving_back(self, tickets: Sequence[Sequence[ItemTicket]]) -> Iterator[None]:
        """Give items back if a block does not hand them to the caller: also after Ctrl-C or a cancellation."""
        try:
            yield
        except BaseException:
            self._tell("give_back", self._leased.intersection(_numbers(tickets)))
            raise

    def _present_member(self) -> _QueueMember | None:
        """Return the membership if there is one. QueueError in a forked child, which shares its parent's memory."""
        member = self._member
        if member is not None and member.pid != os.getpid():
            raise QueueError(
                f"this process was forked from process {member.pid}, which uses the queue. Pass the queue to an actor "
                "or a task instead, or start the process with the method spawn"
            )
        return member

    def _joined(self, deadline: Deadline | None = None) -> _QueueMember:
        """Return the membership of this process, which the first call begins."""
        if (member := self._present_member()) is not None:
            return member
        number, node, place = _new_member()
        host = call(self._actor, "join", number, node, *place, deadline=deadline or Deadline.of_call(None))
        return self._set_member(number, host, node)

    async def _joined_async(self) -> _QueueMember:
        """Return the membership of this process, as `_joined`."""
        if (member := self._present_member()) is not None:
            return member
        number, node, place = _new_member()
        host = await call_async(self._actor, "join", number, node, *place, deadline=Deadline.of_call(None))
        return self._set_member(number, host, node)

    def _set_member(self, number: int, host: Any, node: str) -> _QueueMember:
        with self._lock:
            if self._member is not None:  # another thread was first
                self._actor.leave.remote(number)
                return self._member
            self._member = _QueueMember(self._actor, number, host, node, self.options.max_bytes)
            self._member.leave = finalize_here(self, self._member.sender.end)
            return self._member

    def _lease(self, tickets: list[list[ItemTicket]]) -> list[list[ItemTicket]]:
        self._leased.update(_numbers(tickets))
        return tickets

    def _end_leases(self, method: str, tickets: Sequence[Sequence[ItemTicket]]) -> None:
        numbers = _numbers(tickets)
        if others := sorted(numbers - self._leased):
            # The actor would ignore them, and their memory would stay taken.
            raise QueueError(
                f"{method} has no effect on the items {others[:5]}: this handle has not taken them, or has ended them "
                "already. Call it once, in the process that took them"
            )
        self._tell(method, numbers)

    def _tell(self, method: str, numbers: set[int]) -> None:
        self._leased -= numbers
        # Ray may run these calls in any order, which is no harm: each names its items. A membership that has ended
        # took its leases along.
        if numbers and (member := self._member) is not None:
            getattr(self._actor, method).remote(member.number, sorted(numbers))


def _numbers(tickets: Sequence[Sequence[ItemTicket]]) -> set[int]:
    return {ticket.number for group in tickets for ticket in group}


def _handle(actor: Any, options: QueueOptions) -> TrajectoryQueue:
    queue = TrajectoryQueue.__new__(TrajectoryQueue)
    queue._open(actor, options)
    return queue


def _checked_counts(count: Any, at_least: Any, options: QueueOptions) -> tuple[int, int]:
    # Checked here: an error in the actor would come with a traceback of another process.
    count = check_count("count", count, 1)
    least = count if at_least is None else check_count("at_least", at_least, 1)
    if least > count:
        raise ValueError(f"at_least must be from 1 to count={count}, got {least}")
    if least > options.max_items:  # each group needs room for its first item
        raise ValueError(
            f"{least} groups are never there at once: the queue has max_items={options.max_items}. Take fewer, accept "
            "fewer with at_least, or make the queue with a larger max_items"
        )
    return count, least


def _new_member() -> tuple[int, str, tuple[int, int]]:
    """Return a number for a new membership of this process, its node, and its pid with the time of its start."""
    # Chosen here, so that the process can leave without the answer to `join`.
    place = here()
    return secrets.randbits(62), ray.get_runtime_context().get_node_id(), (place.pid, place.start_ticks)


class _QueueMember:
    """This process as a member of a queue."""

    def __init__(self, actor: Any, number: int, host: Any, node: str, max_bytes: int) -> None:
        self.number = number
        self.pid = os.getpid()
        self.leave: Callable[[], Any] = lambda: None
        """Ends the membership; also called when the last handle of this process is gone."""
        self.reader = ItemReader(actor, node)
        self.sender = _ItemSender(actor, number, host, node, max_bytes)
        self._requests = itertools.count(1)

    def request(self, count: int, at_least: int, deadline: Deadline) -> tuple[int, int, int, int, float | None]:
        """Return the arguments of a new call of `take`, which can be withdrawn by the first two."""
        return self.number, next(self._requests), count, at_least, deadline.left_s()


def _hold(host: Any, path: str, deadline: Deadline) -> str:
    """Let the actor of this host hold a segment of this process; return its path there."""
    try:
        return str(ray.get(host.hold.remote(path), timeout=limit_s(deadline)))
    except ray.exceptions.GetTimeoutError as error:
        raise QueueTimeoutError(
            f"the actor of the queue on this host did not answer within {deadline.timeout_s} s. Put again"
        ) from error
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
                item = self._writer.write(value, deadline)
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
            if self._thread is None or not self._thread.is_alive():  # it ends with its first error
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
                self._changed.wait_for(lambda: self._pending or self._ended)  # no limit: `end` ends it
                if not self._pending:
                    # The last handle of this process is gone, and all that it has put is announced.
                    self._leave()
                    return
                commits = self._take_pending()
                self._announced = False
            free = FreeBlocks([], self._writer.limit)
            try:
                # No limit: it waits for room, and callers of `put` and `flush` have deadlines of their own.
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
