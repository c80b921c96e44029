"""Copies of versions to the hosts of readers: runs the transfers that `spread` chooses. A part of the catalogue."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import ray

from raylane.weights.ledger import Version
from raylane.weights.spread import Spread, Transfer

PAUSE_S = 0.5
"""Seconds between two attempts: on a busy machine Ray calls a living actor unavailable for a moment."""


class Copies:
    """Transfers between keepers for the versions of one name."""

    def __init__(self, keeper: Callable[[str], Any], changed: Callable[[], Awaitable[None]]) -> None:
        """Use `keeper(host)`, and await `changed()` after each transfer."""
        self._keeper = keeper
        self._changed = changed
        self._tasks: set[asyncio.Task[None]] = set()
        """Transfers under way; an event loop keeps no tasks."""
        self._preparing: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks by host and part, held while a slot is made ready."""

    async def prepare(
        self, version: Version, part: str, host: str, chunks: Iterable[int], timeout_s: float | None
    ) -> bool:
        """Begin to copy chunks of a part to a host, whose slots are made. Return False if the version is gone.

        Waits until no reader of the host uses what the copy replaces. WeightsTimeoutError after the timeout.
        """
        spread = version.spread(part)
        spread.preparing += 1  # so that nothing is released meanwhile
        try:
            async with self._preparing[host, part]:
                for holder in spread.holders.keys() - spread.held:
                    if await self._hold(version, part, holder):
                        spread.held.add(holder)
                    else:
                        spread.holders.pop(holder, None)  # what it has may be overwritten at any time
                if not spread.holders:
                    return False
                if host not in spread.holders:
                    path = _path(version, part, host)
                    await self._keeper(host).begin_copy.remote(path, version.number, timeout_s)
                    spread.holders[host] = set()
                    spread.held.add(host)
            spread.want(host, chunks)
            return True
        finally:
            spread.preparing -= 1
            self.go_on(version, spread)

    async def _hold(self, version: Version, part: str, holder: str) -> bool:
        """Let a keeper keep its copy from being overwritten. Return False if it has none any more."""
        path = _path(version, part, holder)
        try:
            return path is not None and bool(await self._keeper(holder).hold.remote(path, version.number))
        except ray.exceptions.RayActorError:
            return False

    def go_on(self, version: Version, spread: Spread) -> None:
        """Start the transfers that can begin; let the slots be overwritten after the last one."""
        for transfer in spread.assign():
            task = asyncio.ensure_future(self._transfer(version, spread, transfer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if spread.is_finished():
            for host in spread.held:
                path = _path(version, spread.source, host)
                if path is not None:
                    self._keeper(host).release.remote(path)
            spread.held.clear()

    async def _transfer(self, version: Version, spread: Spread, transfer: Transfer) -> None:
        offset, nbytes = spread.place(transfer.chunks)
        paths = [_path(version, spread.source, host) for host in (transfer.host, transfer.holder)]
        failure = None
        if None in paths:
            failure = "its keeper has died"
        else:
            target, source = paths
            holder = self._keeper(transfer.holder)
            try:
                await self._keeper(transfer.host).fetch.remote(target, holder, source, offset, nbytes)
            except ray.exceptions.RayError as error:  # of either keeper, or of the network
                failure = f"node {transfer.holder}: {getattr(error, 'cause', None) or error}"
                await asyncio.sleep(PAUSE_S)
        spread.end(transfer, failure)
        self.go_on(version, spread)
        await self._changed()


def _path(version: Version, part: str, host: str) -> str | None:
    """Return the slot of a host for a part of a version; None if its keeper has died."""
    paths = version.generation.slots.get((host, part))
    return None if paths is None else paths[version.slot]
