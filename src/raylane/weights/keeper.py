"""The keeper: one Ray actor on each host that publishes or reads. It owns the slots, copies parts, watches readers.

It decides nothing. Slots live in a process of their own so that a version outlives the trainer that wrote it.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from raylane import _ray
from raylane.core import vm
from raylane.core.deadline import Deadline
from raylane.core.environment import bytes_in
from raylane.core.semaphore import Segment
from raylane.errors import WeightsError, WeightsLostError
from raylane.weights.leases import WatchedReaders
from raylane.weights.readers import ReaderKey
from raylane.weights.slots import OpenSlot, StaleSlot, make_slot, words_of


class PartKind(NamedTuple):
    """Part of a layout, for which a host has slots."""

    host: str
    """Host whose ranks write it."""
    ranks: int
    """Number of these ranks."""
    nbytes: int


JOB_CHECK_S = 5.0
"""Seconds between two looks whether the job has ended."""


def when_job_ends(job: str, end: Callable[[], None]) -> None:
    """Call `end` on a thread when a job (hexadecimal id) has ended."""

    def wait() -> None:
        while not _ray.job_has_ended(job):
            time.sleep(JOB_CHECK_S)
        end()

    threading.Thread(target=wait, name="raylane-weights-job", daemon=True).start()


class Keeper:
    """Actor with the slots of one host."""

    def __init__(self, job: str | None) -> None:
        """Belong to a job, as the catalogue does: if that is killed first, nobody else ends this actor."""
        if job is not None:
            when_job_ends(job, _ray.exit_this_actor)
        vm.allow_readers()  # other processes of this user open the slots through /proc
        self._slots: dict[tuple[str, PartKind], list[Segment]] = {}
        """Slots by name of the weights and kind of part."""
        self._open: dict[str, OpenSlot] = {}
        """Slots that are copied from or to, by path: opened a second time, for locks of their own."""
        self._fetches: set[asyncio.Future[Any]] = set()
        """Copies under way."""
        self._readers = WatchedReaders()
        self._catalogue = ""
        """Incarnation of the catalogue that holds slots here."""

    async def wait(self) -> None:
        """Never return: the caller learns of the end of this actor."""
        await asyncio.get_running_loop().create_future()

    async def renew(self, readers: list[ReaderKey], wait_s: float) -> list[ReaderKey]:
        """Watch the processes of readers of this host; return those that have ended, as `WatchedReaders.renew` does."""
        return await self._readers.renew(readers, wait_s)

    async def readers(self) -> list[ReaderKey]:
        """Return the readers that are watched."""
        return self._readers.keys()

    async def make(self, catalogue: str, name: str, kind: PartKind, count: int) -> tuple[list[str], int]:
        """Return the paths of `count` slots, which the first call makes, and the largest number of a version in them.

        Pages take memory when they are written. Slots that an earlier catalogue held are released.
        """
        if catalogue != self._catalogue:
            self._catalogue = catalogue
            for fetch in self._fetches:  # nothing may write to slots for an earlier catalogue any more
                fetch.cancel()
            await asyncio.gather(*self._fetches, return_exceptions=True)
            for slot in self._open.values():
                slot.release()
        slots = self._slots.setdefault((name, kind), [])
        while len(slots) < count:
            self._check_budget(name, kind)
            slots.append(make_slot(kind.ranks, kind.nbytes))
        numbers = [number for slot in slots for number in words_of(slot, kind.ranks)]
        return [slot.path for slot in slots[:count]], max(numbers)

    def _check_budget(self, name: str, kind: PartKind) -> None:
        """Raise WeightsError if a further slot would exceed RAYLANE_BUDGET_BYTES."""
        budget = bytes_in("RAYLANE_BUDGET_BYTES")
        held = sum(other.nbytes * len(slots) for (_, other), slots in self._slots.items())
        if budget is not None and held + kind.nbytes > budget:
            raise WeightsError(
                f"a version of {name!r} takes {kind.nbytes:,} bytes of shared memory, and this node keeps {held:,} of "
                f"RAYLANE_BUDGET_BYTES={budget:,}. Drop names, publish with a smaller keep, or raise the budget"
            )

    async def memory(self) -> dict[str, int]:
        """Return the bytes of shared memory that the slots of each name take now."""
        taken: Counter[str] = Counter()
        for (name, _), slots in self._slots.items():
            taken[name] += sum(slot.taken_bytes() for slot in slots)
        return dict(taken)

    async def digest(self, path: str, number: int) -> str | None:
        """Return the SHA-256 of a part of a version, in hexadecimal; None if the version is gone."""
        return await asyncio.to_thread(self._digest, path, number)

    def _digest(self, path: str, number: int) -> str | None:
        try:
            slot = self._reopen(path)  # for a lock of its own
        except WeightsLostError:
            return None
        try:
            slot.hold(number)
            return hashlib.sha256(slot.view()).hexdigest()
        except StaleSlot:
            return None
        finally:
            slot.close()

    async def drop(self, name: str, spared: Sequence[PartKind] = ()) -> None:
        """Give up the slots of a name, except those of parts of these kinds. Readers keep what they map."""
        for at in [at for at in self._slots if at[0] == name and at[1] not in spared]:
            for segment in self._slots.pop(at):
                segment.close_fd()
                slot = self._open.pop(segment.path, None)
                if slot is not None:
                    slot.close()

    # Copies

    async def begin_copy(self, path: str, number: int, timeout_s: float | None) -> None:
        """Make a slot ready for the copy of a version, and hold it. Waits for readers of what it holds."""
        await asyncio.to_thread(self._slot(path).begin_copy, number, Deadline(timeout_s))

    async def hold(self, path: str, number: int) -> bool:
        """Keep a version from being overwritten until `release`. Return False if it is no longer in the slot."""
        try:
            self._slot(path).hold(number)
        except (StaleSlot, WeightsLostError):
            return False
        return True

    async def release(self, path: str) -> None:
        """Permit a slot to be overwritten."""
        if path in self._open:
            self._open[path].release()

    async def fetch(self, path: str, holder: Any, holder_path: str, offset: int, nbytes: int) -> None:
        """Copy bytes of a slot of another keeper into a slot of this one, over raylane's transports.

        Raises the errors of `raylane.get`, and those of Ray if the other keeper dies.
        """
        # Loaded here: only hosts that copy need the transports, and torch.
        from raylane.transport.api import get_async

        target = self._slot(path).memory()[offset : offset + nbytes]
        (ref,) = await holder.serve.remote(holder_path, offset, nbytes)
        task = asyncio.ensure_future(get_async(ref, into=target))
        self._fetches.add(task)
        try:
            await task
        finally:
            self._fetches.discard(task)

    async def serve(self, path: str, offset: int, nbytes: int) -> list[Any]:
        """Return a ref of bytes of a slot, which is held."""
        from raylane.transport.api import put

        memory = self._slot(path).memory()[offset : offset + nbytes]
        return [put(memory, on_mutation="allow")]  # other chunks of the same memory are written meanwhile

    def _slot(self, path: str) -> OpenSlot:
        if path not in self._open:
            self._open[path] = self._reopen(path)
        return self._open[path]

    def _reopen(self, path: str) -> OpenSlot:
        ranks = [at[1].ranks for at, slots in self._slots.items() if path in [slot.path for slot in slots]]
        if not ranks:
            raise WeightsLostError(f"this host has given up the slot {path}. Update again")
        return OpenSlot(path, ranks[0], private=False)
