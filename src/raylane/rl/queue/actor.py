"""The actor of a queue: keeps the book, waits on behalf of its callers, and learns of deaths.

All decisions are those of `book`; this actor adds deadlines, and the actors of the hosts. Payloads never come here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylane.errors import QueueClosedError, QueueLostError, QueueTimeoutError
from raylane.rl.queue.book import (
    AnnouncedItem,
    BlockKey,
    BlockPlace,
    FreeBlocks,
    ItemTicket,
    QueueBook,
    QueueOptions,
    QueueStats,
)
from raylane.rl.queue.host import QueueHost


class Commit(NamedTuple):
    """Items of one block that a producer announces."""

    block: int
    place: BlockPlace
    entries: Sequence[AnnouncedItem]
    is_full: bool
    """True if nothing more comes into the block."""


PAUSE_S = 0.5
"""Seconds between two attempts to reach an actor that Ray calls unavailable."""


async def _answer(call: Callable[[], Awaitable[Any]]) -> Any:
    """Await a call of a host's actor; repeat it while Ray calls the actor unavailable, which may still live."""
    while True:
        try:
            return await call()
        except ray.exceptions.ActorUnavailableError:
            await asyncio.sleep(PAUSE_S)


class QueueActor:
    """Actor with the book of one queue. Its methods are coroutines of one event loop, so they need no lock."""

    def __init__(self, options: QueueOptions) -> None:
        self._book = QueueBook(options)
        self._changed = asyncio.Condition()
        self._hosts: dict[str, Any] = {}
        """Actor of each host, by Ray's id of its node."""
        self._host_of: dict[int, str] = {}
        """Host of each member."""
        self._ended: set[int] = set()
        """Members that have left or died, also those whose `join` has yet to arrive."""
        self._stranded: set[int] = set()
        """Members whose host's actor has died; they have to join again."""
        self._last_wait = 0
        self._waits: dict[str | int, int] = {}
        """Number of the wait for the end of each host's actor and of each member, while it is under way."""
        self._tasks: set[Any] = set()
        """Tasks under way; an event loop keeps no tasks."""
        self._closed = False

    async def join(self, member: int, host: str, pid: int, ticks: int) -> Any:
        """Take a process in, as producer and consumer, until it leaves or ends; return the actor of its host.

        The process chooses its number, so that it can leave without the answer to this call.
        """
        if member in self._ended:
            raise QueueClosedError("this process has left the queue: joining it took too long. Call again")
        actor = self._host(host)
        self._host_of[member] = host
        self._book.add_producer(member, host)
        self._start(self._watch_member(member, actor, self._new_wait(member), pid, ticks))
        return actor

    async def leave(self, member: int) -> None:
        """Forget a member; what it has taken and not acknowledged goes to others."""
        if member in self._ended:
            return
        # Remembered: calls of this member may arrive later, as Ray keeps no order.
        self._ended.add(member)
        if member not in self._host_of:
            return
        self._book.remove_consumer(member)
        self._book.remove_producer(member)
        # Ray lets an actor that nobody has a handle of wait five seconds for calls that it has made, before it ends.
        self._end_wait(member, self._host_of[member])
        if self._host_of.keys() <= self._ended:
            for host in self._hosts:
                self._end_wait(host, host)
        await self._notify()

    async def commit(self, member: int, commits: Sequence[Commit]) -> FreeBlocks:
        """Accept items as soon as there is room; return the blocks that the producer may use again.

        QueueClosedError if the queue is closed, also while this waits.
        """
        for commit in commits:
            key, entries = BlockKey(member, commit.block), commit.entries
            while True:
                room = await self._room(key, commit.place, entries)
                self._check(member)
                if self._closed or member in self._ended:
                    raise QueueClosedError("the queue is closed: the item is not in it")
                accepted, entries = entries[:room], entries[room:]
                self._book.add(key, commit.place, accepted, is_full=commit.is_full and not entries)
                await self._notify()
                if not entries:
                    break
        return self._book.take_free(member)

    async def _room(self, key: BlockKey, place: BlockPlace, entries: Sequence[AnnouncedItem]) -> int:
        """Wait until one of these items can be accepted, or the queue is closed; return how many can."""
        room = 0

        def enough() -> bool:
            nonlocal room
            room = self._book.room(entries)
            has_no_caller = key.producer in self._stranded or key.producer in self._ended
            return self._closed or has_no_caller or not entries or room > 0

        await self._until(enough)
        return room

    async def take(
        self, member: int, request: int, count: int, at_least: int, timeout_s: float | None
    ) -> list[list[ItemTicket]]:
        """Wait for `at_least` groups; hand out up to `count`. Fewer only after the end of a queue that was closed.

        Returns none to a caller that has withdrawn the request, or that has ended.
        """
        ready, book = self._book.ready, self._book

        def enough() -> bool:
            ends = self._closed and (ready() > 0 or book.is_drained())
            has_no_caller = member in self._ended or book.is_withdrawn(member, request)
            return ready() >= at_least or member in self._stranded or has_no_caller or ends

        try:
            async with asyncio.timeout(timeout_s):
                await self._until(enough)
        except TimeoutError:
            book.end_request(member, request)
            raise QueueTimeoutError(
                f"after {timeout_s:.1f} s {ready()} of {at_least} groups are there, and {book.state_of_producers()}. "
                "Raise the timeout if that is expected"
            ) from None
        self._check(member)
        # A consumer that died while it waited must not get anything: nobody would take it back.
        return [] if member in self._ended else book.take(member, count, request)

    async def withdraw(self, member: int, request: int) -> None:
        """Take back a call of `take` whose answer its caller has not received."""
        if member not in self._ended:
            self._book.withdraw(member, request)
            await self._notify()

    async def acknowledge(self, member: int, numbers: Sequence[int]) -> None:
        """Note that a consumer needs items no more."""
        self._book.acknowledge(member, numbers)
        await self._notify()

    async def give_back(self, member: int, numbers: Sequence[int]) -> None:
        """Note that a consumer will not use items."""
        self._book.give_back(member, numbers)
        await self._notify()

    async def lose(self, numbers: Sequence[int]) -> None:
        """Note that items cannot be read."""
        self._book.lose(numbers)
        await self._notify()

    async def set_version(self, version: int) -> None:
        """Note the newest version of the weights."""
        self._book.set_version(version)
        await self._notify()

    async def hosts(self) -> dict[str, Any]:
        """Return the actors of all hosts."""
        return dict(self._hosts)

    async def close(self) -> None:
        """Accept nothing more; consumers get what is there."""
        # Producers that wait for room are woken by `_notify`, and get the error.
        self._closed = True
        self._book.break_groups()
        await self._notify()

    async def stats(self) -> QueueStats:
        """Return the figures of the queue."""
        return self._book.stats()

    # Parts of the above

    def _check(self, member: int) -> None:
        if member in self._stranded:
            raise QueueLostError(
                "the actor that held the queue's memory on this host has died: what was put here and not taken is "
                "lost. Put it again"
            )

    def _host(self, host: str) -> Any:
        """Return the actor of a host, which the first call starts."""
        if host not in self._hosts:
            there = NodeAffinitySchedulingStrategy(host, soft=False)
            self._hosts[host] = (
                ray.remote(QueueHost).options(num_cpus=0, max_concurrency=10_000, scheduling_strategy=there).remote()
            )
        # Also again, after a time in which the queue had no members.
        if host not in self._waits:
            self._start(self._watch_host(host, self._hosts[host], self._new_wait(host)))
        return self._hosts[host]

    async def _watch_member(self, member: int, host: Any, wait: int, pid: int, ticks: int) -> None:
        # No limit, as below: the wait ends with the process, with its membership, or with the actor that it asks.
        with contextlib.suppress(ray.exceptions.RayActorError):
            await _answer(lambda: host.wait_for_end.remote(wait, pid, ticks))
            self._waits.pop(member, None)
            await self.leave(member)

    async def _watch_host(self, host: str, actor: Any, wait: int) -> None:
        with contextlib.suppress(ray.exceptions.RayActorError):
            await _answer(lambda: actor.wait.remote(wait))
            return  # the queue has no members
        if self._hosts.get(host) is not actor:
            return  # an earlier watch has seen it
        # The memory of its members is gone, and nobody watches them any more: they must join again.
        del self._hosts[host]
        self._waits.pop(host, None)
        self._stranded |= {member for member, its_host in self._host_of.items() if its_host == host} - self._ended
        self._book.lose_host(host)
        for member in self._stranded:
            # What it had taken of other hosts goes to others: if it lives, it joins anew.
            self._book.remove_consumer(member)
        await self._notify()

    def _new_wait(self, key: str | int) -> int:
        self._last_wait += 1
        self._waits[key] = self._last_wait
        return self._last_wait

    def _end_wait(self, key: str | int, host: str) -> None:
        wait = self._waits.pop(key, None)
        if wait is not None and host in self._hosts:
            self._hosts[host].end_wait.remote(wait)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        # Here, because each change of the book ends with this call.
        by_host: dict[str, list[str]] = {}
        for place in self._book.abandoned():
            by_host.setdefault(place.host, []).append(place.path)
        for host, paths in by_host.items():
            if host in self._hosts:
                self._hosts[host].forget.remote(paths)
        async with self._changed:
            self._changed.notify_all()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
