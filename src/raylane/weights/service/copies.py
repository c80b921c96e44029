"""Copies of versions to the hosts of readers: runs the transfers that `spread` chooses. A part of the catalogue."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import ray

from raylane.errors import WeightsError, WeightsTimeoutError
from raylane.weights.chunks.patches import SlotVersion
from raylane.weights.chunks.spread import Spread, Transfer
from raylane.weights.service.keeper import SILENCE_S, Fetch, Turn
from raylane.weights.state.ledger import Ledger, Version, VersionState

_log = logging.getLogger(__name__)

ASK_S = 5.0
"""Seconds after which a keeper that still works on a call is asked for another answer, and again."""
PAUSE_S = 0.5
"""Seconds between two attempts: on a busy machine Ray calls a living actor unavailable for a moment."""
FURTHER_S = 600.0
"""Seconds in which a version must have come to a further host."""


async def answered(keeper: Any, host: str, call: Awaitable[Any]) -> Any:
    """Await a call of a keeper for as long as the keeper answers others. WeightsTimeoutError if it does not."""
    task = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({task}, timeout=ASK_S))[0]:
            await asyncio.wait_for(keeper.readers.remote(), SILENCE_S)
    except TimeoutError:
        raise WeightsTimeoutError(
            f"the keeper of node {host} has not answered for {SILENCE_S:.0f} s: its process is stopped, or the node is "
            "cut off or overloaded. Look at the node"
        ) from None
    finally:
        task.cancel()  # does nothing to one that has ended
    return task.result()


async def copy_further(copy: Callable[..., Awaitable[Any]], name: str, version: Version) -> None:
    """Bring parts of a version to further hosts, as many as its generation says, by `copy` of the catalogue."""

    async def bring(host: str, parts: list[str]) -> None:
        wanted = {part: list(range(version.spread(part).chunks)) for part in parts}
        try:
            await copy(name, version.number, host, wanted, FURTHER_S)
        except (WeightsError, ray.exceptions.RayError) as error:
            text = "version %d of %r was not copied to node %s, so it is lost if another host dies: %s"
            _log.warning(text, version.number, name, host, error)

    await asyncio.gather(*(bring(*each) for each in version.generation.further_parts().items()))


class Copies:
    """Transfers between keepers for the versions of one name."""

    def __init__(
        self, keeper: Callable[[str], Any], turn: Callable[[], Turn], changed: Callable[[], Awaitable[None]]
    ) -> None:
        """Use `keeper(host)`, call it with the next `turn()`, and await `changed()` after each transfer."""
        self._keeper = keeper
        self._turn = turn
        self._changed = changed
        self._tasks: set[asyncio.Task[None]] = set()
        """Transfers under way; an event loop keeps no tasks."""
        self._links: dict[str, float] = {}
        """Speed of the link of each host in bytes/s, as its keeper has measured it."""
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
                    keeper = self._keeper(host)
                    call = keeper.begin_copy.remote(self._turn(), path, version.number, timeout_s)
                    await answered(keeper, host, call)
                    spread.holders[host] = set()
                    spread.held.add(host)
            spread.want(host, chunks, _chunks_of_base(version, part, host))
            return True
        finally:
            spread.preparing -= 1
            self.go_on(version, spread)

    def make_patches(self, version: Version) -> None:
        """Let the keepers of the trainer's hosts make patches, where readers of other hosts can use them."""
        base, generation = version.base, version.generation
        if base is None:
            return
        for part in base.spreads:
            hosts = base.readers_of(part)
            links = [self._links[host] for host in hosts if host in self._links]
            slots = [_slot_version(each, part, part) for each in (version, base)]
            slowest = min(links, default=None)
            if hosts and None not in slots and generation.delta.most_patch_bytes(1 << 20, slowest) > 0:
                self._keeper(part).make_patches.remote(*slots, generation.runs(part), generation.delta, slowest)

    def give_back(self, ledger: Ledger) -> None:
        """Let the keepers free the memory of slots that are not needed since versions were released."""
        newest = ledger.newest()
        for generation in ledger.generations:
            for (host, _), paths in generation.slots.items():
                for slot in ledger.surplus(generation, len(paths)):
                    self._keeper(host).empty.remote(paths[slot], 0 if newest is None else newest.number)

    async def find_digest(self, version: Version) -> None:
        """Note the digest of a version once, unless it is not committed, on devices, or gone before it was read."""
        if version.digest is not None or version.generation.stored.on_device:
            return
        digests = []
        for part in version.generation.stored.parts:
            holders = version.holders(part) if version.state is VersionState.COMMITTED else []
            if not holders:
                return
            path = _path(version, part, holders[0])
            digests.append(self._keeper(holders[0]).digest.remote(path, version.number))
        with contextlib.suppress(ray.exceptions.RayActorError):
            found = await asyncio.gather(*digests)
            if all(found):
                version.digest = hashlib.sha256("".join(found).encode()).hexdigest()

    async def _hold(self, version: Version, part: str, holder: str) -> bool:
        """Let a keeper keep its copy from being overwritten. Return False if it has none any more."""
        path = _path(version, part, holder)
        if path is None:
            return False
        keeper = self._keeper(holder)
        try:
            return bool(await answered(keeper, holder, keeper.hold.remote(self._turn(), path, version.number)))
        except ray.exceptions.RayActorError:
            return False
        except WeightsTimeoutError:
            if holder == part:  # nobody else needs to have it
                raise
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
                    self._keeper(host).release.remote(self._turn(), path)
            spread.held.clear()

    async def _transfer(self, version: Version, spread: Spread, transfer: Transfer) -> None:
        part, host, holder = spread.source, transfer.host, transfer.holder
        target, source = (_slot_version(version, part, each) for each in (host, holder))
        failure = None
        if target is None or source is None:
            failure = "its keeper has died"
        else:
            # The receiving host needs these chunks of the base too, for what has changed in them.
            base = None
            if version.base is not None and _chunks_of_base(version, part, host).issuperset(transfer.chunks):
                base = _slot_version(version.base, part, host)
            try:
                place = spread.place(transfer.chunks)
                fetch = Fetch(target, self._keeper(holder), source, *place, base, version.generation.delta)
                keeper = self._keeper(host)
                fetched = await answered(keeper, host, keeper.fetch.remote(fetch))
            except WeightsTimeoutError as error:  # the receiving keeper: not held up for it any longer
                failure = str(error)
                spread.give_up(host, failure)
            except ray.exceptions.RayError as error:  # of either keeper, or of the network
                failure = f"node {holder}: {getattr(error, 'cause', None) or error}"
                await asyncio.sleep(PAUSE_S)
            else:
                version.copied_bytes[fetched.kind] += fetched.nbytes
                version.mismatches += fetched.mismatch
                if fetched.link_bytes_per_s is not None:
                    self._links[host] = fetched.link_bytes_per_s
        spread.end(transfer, failure)
        self.go_on(version, spread)
        await self._changed()


def _chunks_of_base(version: Version, part: str, host: str) -> set[int]:
    """Return the chunks that a host has of the base of a version."""
    spread = None if version.base is None else version.base.spreads.get(part)
    return set() if spread is None else spread.holders.get(host, set())


def _slot_version(version: Version, part: str, host: str) -> SlotVersion | None:
    """Return the slot of a host for a part of a version; None if its keeper has died."""
    path = _path(version, part, host)
    return None if path is None else SlotVersion(path, version.number)


def _path(version: Version, part: str, host: str) -> str | None:
    """Return the slot of a host for a part of a version; None if its keeper has died."""
    paths = version.generation.slots.get((host, part))
    return None if paths is None else paths[version.slot]
