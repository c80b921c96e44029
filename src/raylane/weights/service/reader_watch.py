"""Leases of readers, renewed by the keeper of their host: the keeper's watch over processes, and the catalogue's calls.

    catalogue                                         keeper of a host
    renew(its readers there, RENEW_S)  ──────────>    watches their processes
                                       <──────────    at the first end, or after RENEW_S: those that have ended

One call for each host is always under way. Its answer renews the leases of the readers that are not in it. A keeper
that has died is replaced, and the next call tells the new one whom to watch. A catalogue that was started again asks
the keepers for their readers first. States and times are those of `readers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import ray

from raylane.core.process.watcher import Watch, watcher
from raylane.weights.state.readers import LeaseEvent, ReaderKey

RENEW_S = 5.0
"""Seconds for which a keeper waits for the end of a process before it answers."""
ANSWER_S = 5.0
"""Seconds in which a keeper must answer after that."""
PAUSE_S = 0.5
"""Seconds between two attempts to reach a keeper."""


class CatalogueEnded(Exception):
    """This catalogue ends, because the last name was dropped; its callers start another one."""


class WatchedReaders:
    """Readers whose processes a keeper watches. Belongs to the event loop of the keeper."""

    def __init__(self) -> None:
        self._watches: dict[ReaderKey, Watch | None] = {}
        """Watches of the living, and None for those whose process has ended."""
        self._changed = asyncio.Condition()
        self._calls = 0
        """Number of calls of `renew`."""

    def keys(self) -> list[ReaderKey]:
        """Return the readers whose processes live, for a catalogue that was started again."""
        return [key for key, watch in self._watches.items() if watch is not None]

    async def renew(self, keys: list[ReaderKey], wait_s: float) -> list[ReaderKey]:
        """Watch the processes of these readers, and no others. Return those that have ended.

        Waits until there is one, at most `wait_s` seconds, or until the next call, which replaces this one.
        """
        self._calls += 1
        call = self._calls
        self._watch(keys)
        async with self._changed:
            self._changed.notify_all()
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(lambda: self._calls != call or self._ended(keys))
            except TimeoutError:
                pass
        return self._ended(keys)

    def _ended(self, keys: Iterable[ReaderKey]) -> list[ReaderKey]:
        return [key for key in keys if self._watches.get(key, ...) is None]

    def _watch(self, keys: list[ReaderKey]) -> None:
        for key in self._watches.keys() - set(keys):
            watch = self._watches.pop(key)
            if watch is not None:
                watch.forget()
        loop = asyncio.get_running_loop()
        for key in keys:
            if key not in self._watches:
                self._watches[key] = self._begin(key, loop)

    def _begin(self, key: ReaderKey, loop: asyncio.AbstractEventLoop) -> Watch | None:
        def note_end() -> None:
            loop.call_soon_threadsafe(lambda: loop.create_task(self._note_end(key)))

        return watcher.watch_identified(key.pid, key.start_ticks, note_end)

    async def _note_end(self, key: ReaderKey) -> None:
        async with self._changed:
            if key in self._watches:
                self._watches[key] = None
                self._changed.notify_all()


class Leases:
    """Renewal of the leases of all readers of a catalogue, one task for each host. Belongs to its event loop."""

    def __init__(
        self,
        keeper: Callable[[str], Any],
        host_lives: Callable[[str], Awaitable[bool]],
        keys: Callable[[str], list[ReaderKey]],
        join: Callable[[ReaderKey], object],
        advance: Callable[[Iterable[ReaderKey], LeaseEvent], Awaitable[None]],
    ) -> None:
        """Renew the leases of the readers `keys(host)`, and tell `advance` what has happened to them.

        Readers that joined an earlier catalogue `join` again.
        """
        self._keeper, self._host_lives = keeper, host_lives
        self._keys, self._join, self._advance = keys, join, advance
        self._renewals: dict[str, asyncio.Task[None]] = {}
        """Renewal of each host with readers."""
        self._recoveries: dict[str, asyncio.Task[None]] = {}
        """Question to each keeper for the readers of an earlier catalogue, which is asked once."""
        self._changed: dict[str, asyncio.Event] = {}
        """Set when the readers of a host are not those of the call under way."""

    def change(self, host: str) -> None:
        """Note that a reader of a host has joined or left."""
        self._changed.setdefault(host, asyncio.Event()).set()
        renewal = self._renewals.get(host)
        if renewal is None or renewal.done():
            self._renewals[host] = asyncio.ensure_future(self._renew_all(host))

    def recover(self, host: str) -> asyncio.Task[None]:
        """Return the task that asks the keeper of a host for the readers of an earlier catalogue."""
        if host not in self._recoveries:
            self._recoveries[host] = asyncio.ensure_future(self._recover(host))
        return self._recoveries[host]

    async def _recover(self, host: str) -> None:
        try:
            keys = await self._keeper(host).readers.remote()
        except (ray.exceptions.RayError, CatalogueEnded):  # of a keeper that has died: it had no slots either
            return
        for key in keys:
            self._join(key)

    async def _renew_all(self, host: str) -> None:
        await self.recover(host)  # first: `renew` makes the keeper forget all other readers
        while self._changed[host].is_set() or self._keys(host):
            try:
                await self._renew(host)
            except ray.exceptions.RayError:  # the keeper has died, or cannot be reached at present
                await self._miss(host)
                await asyncio.sleep(PAUSE_S)
            except CatalogueEnded:
                return

    async def _renew(self, host: str) -> None:
        """Renew the leases of a host once. Raises the errors of Ray."""
        changed = self._changed[host]
        changed.clear()
        keys = self._keys(host)
        answer = asyncio.ensure_future(self._answer(host, keys))
        answer.add_done_callback(_forget_error)
        change = asyncio.ensure_future(changed.wait())
        try:
            while not answer.done() and not change.done():
                done, _ = await asyncio.wait(
                    {answer, change}, timeout=RENEW_S + ANSWER_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    await self._miss(host)  # and wait on: the keeper would not answer a second call either
            if answer.done():
                ended = answer.result()
                await self._advance(ended, LeaseEvent.PROCESS_ENDED)
                await self._advance([key for key in keys if key not in ended], LeaseEvent.RENEWED)
        finally:
            change.cancel()

    async def _answer(self, host: str, keys: list[ReaderKey]) -> list[ReaderKey]:
        """Return the readers whose processes have ended."""
        ended: list[ReaderKey] = await self._keeper(host).renew.remote(keys, RENEW_S if keys else 0)
        return ended

    async def _miss(self, host: str) -> None:
        """Note that the keeper of a host has not answered."""
        event = LeaseEvent.MISSED if await self._host_lives(host) else LeaseEvent.HOST_ENDED
        await self._advance(self._keys(host), event)


def _forget_error(call: asyncio.Task[Any]) -> None:
    """Take the error of a call that nobody waits for any more: asyncio would log it."""
    if not call.cancelled():
        call.exception()


async def host_lives(host: str) -> bool:
    """Return False if Ray has declared a node dead, or does not know it."""
    nodes = await asyncio.to_thread(ray.nodes)
    return any(node["NodeID"] == host and node["Alive"] for node in nodes)
