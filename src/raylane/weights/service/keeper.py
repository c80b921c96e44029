"""The keeper: one Ray actor on each host that publishes or reads. It owns the slots, copies parts, watches readers.

It decides nothing. Slots live in a process of their own so that a version outlives the trainer that wrote it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from raylane import _ray
from raylane.core import settings
from raylane.core.deadline import Deadline
from raylane.core.memory.segment import Segment
from raylane.core.process import vm
from raylane.core.process.place import start_ticks
from raylane.errors import WeightsError, WeightsLostError, WeightsTimeoutError
from raylane.weights.chunks.delta import DeltaOptions, LinkSpeed, Run
from raylane.weights.chunks.patches import (
    MOST_WAIT_S,
    DeltaRequest,
    OpenVersion,
    Patches,
    Proof,
    SlotVersion,
    message,
    on_thread,
    restore,
)
from raylane.weights.memory.slots import OpenSlot, StaleSlot, make_slot, mark_dropped, words_of
from raylane.weights.service.reader_watch import WatchedReaders
from raylane.weights.state.readers import ReaderKey
from raylane.weights.state.starts import PublisherKey

SILENCE_S = 20.0
"""Seconds without an answer after which a keeper counts as stopped, or its host as cut off."""


class PartKind(NamedTuple):
    """Part of a layout, for which a host has slots."""

    name: str
    ranks: int
    """Number of the ranks that write it."""
    nbytes: int
    """Its size in shared memory; 0 if it lies on a device."""
    boxes: str
    """Digest of the boxes that each rank writes: a rank that is late may write only where its successor does."""


class Incarnation(NamedTuple):
    """Identity of the process of a catalogue; one that was started later has a larger one."""

    began_ns: int
    token: str


class Turn(NamedTuple):
    """Place of a call among those of all catalogues: Ray runs calls of an asynchronous actor in any order."""

    catalogue: Incarnation
    number: int


class TransferResult(NamedTuple):
    """Result of a transfer."""

    kind: str
    """`dense` or `delta`."""
    nbytes: int
    """Bytes that were copied between the hosts."""
    mismatch: bool
    """True if patches did not make what they were to make."""
    link_bytes_per_s: float | None
    """Speed of the link as the keeper has measured it so far."""


class Fetch(NamedTuple):
    """Bytes of a version that a keeper is to bring into a slot of its own."""

    slot: SlotVersion
    holder: Any
    """Keeper that has them."""
    source: SlotVersion
    """Slot of the holder."""
    offset: int
    nbytes: int
    base: SlotVersion | None
    """Another version that the receiving keeper has, from which patches may make them."""
    options: DeltaOptions


class Served(NamedTuple):
    """Answer to a request for chunks."""

    refs: list[Any]
    """One ref, of whole chunks or of patches."""
    proofs: list[Proof]
    """Proofs of the patches; empty for whole chunks."""


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
        self._made_at: dict[tuple[str, PartKind], Turn] = {}
        """Last calls of `make` for these slots."""
        self._held_at: dict[str, Turn] = {}
        """Last calls that have held a slot, by path."""
        self._open: dict[str, OpenSlot] = {}
        """Slots that are copied from or to, by path: opened a second time, for locks of their own."""
        self._fetches: dict[asyncio.Future[Any], str] = {}
        """Copies under way, with the slot that each writes."""
        self._readers = WatchedReaders()
        self._patches = Patches()
        self._link = LinkSpeed()
        self._catalogue = Incarnation(0, "")
        """Last catalogue that has held slots here."""

    async def wait(self) -> None:
        """Never return: the caller learns of the end of this actor."""
        await asyncio.get_running_loop().create_future()

    async def renew(self, readers: list[ReaderKey], wait_s: float) -> list[ReaderKey]:
        """Watch the processes of readers of this host; return those that have ended, as `WatchedReaders.renew` does."""
        return await self._readers.renew(readers, wait_s)

    async def readers(self) -> list[ReaderKey]:
        """Return the readers that are watched."""
        return self._readers.keys()

    async def ended(self, publishers: list[PublisherKey]) -> list[str]:
        """Return the tokens of those publishers of this host whose processes have ended."""
        return [each.token for each in publishers if start_ticks(each.pid) != each.start_ticks]

    async def make(self, turn: Turn, name: str, kind: PartKind, count: int) -> tuple[list[str], int]:
        """Return the paths of `count` slots, which the first call makes, and the largest number of a version in them.

        Pages take memory when they are written. Slots that an earlier catalogue held are released.
        """
        if turn.catalogue > self._catalogue:
            self._catalogue = turn.catalogue
            await self._end_fetches(self._fetches)  # nothing may write to slots for an earlier catalogue any more
            for slot in self._open.values():
                slot.release()
        self._made_at[name, kind] = turn
        slots = self._slots.setdefault((name, kind), [])
        while len(slots) < count:
            self._check_budget(name, kind)
            try:
                slots.append(make_slot(kind.ranks, kind.nbytes))
            except OSError as error:
                raise WeightsError(
                    f"a slot of {kind.nbytes:,} bytes for {name!r} cannot be made on this node: {error}. Publish with "
                    "a smaller keep, drop names, or raise the limits of memory and descriptors (ulimit -n)"
                ) from error
        numbers = [number for slot in slots for number in words_of(slot, kind.ranks)]
        return [slot.path for slot in slots[:count]], max(numbers)

    def _check_budget(self, name: str, kind: PartKind) -> None:
        """Raise WeightsError if a further slot would exceed RAYLANE_BUDGET_BYTES."""
        budget = settings.BUDGET_BYTES.read()
        held = sum(other.nbytes * len(slots) for (_, other), slots in self._slots.items())
        if budget is not None and held + kind.nbytes > budget:
            raise WeightsError(
                f"a version of {name!r} takes {kind.nbytes:,} bytes of shared memory, and this node keeps {held:,} of "
                f"RAYLANE_BUDGET_BYTES={budget:,} (slots of released versions count until their name is dropped). Drop "
                "names, publish with a smaller keep, or raise the budget"
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

    async def drop(self, turn: Turn, name: str, spared: Sequence[PartKind] | None = None) -> None:
        """Give up the slots of a name (None: it was dropped), except those of these kinds. Readers keep what they map.

        Slots that a later call of `make` has asked for stay.
        """
        for at in [at for at in self._slots if at[0] == name and at[1] not in (spared or ())]:
            if self._made_at[at] > turn:
                continue
            del self._made_at[at]
            for segment in self._slots.pop(at):
                if spared is None:
                    mark_dropped(segment)
                segment.close_fd()
                self._held_at.pop(segment.path, None)
                self._patches.forget([segment.path], newest=True)
                slot = self._open.pop(segment.path, None)
                if slot is not None:
                    slot.close()

    async def empty(self, path: str, newest: int) -> None:
        """Free the memory of a slot, unless somebody uses it, or it has a later version than `newest` by now."""
        await asyncio.to_thread(self._empty, path, newest)

    def _empty(self, path: str, newest: int) -> None:
        with contextlib.suppress(WeightsLostError, OSError):  # it was given up
            slot = self._reopen(path)  # for a lock of its own
            try:
                slot.empty(newest)
            finally:
                slot.close()

    # Copies

    async def begin_copy(self, turn: Turn, path: str, number: int, timeout_s: float | None) -> None:
        """Make a slot ready for the copy of a version, and hold it. Waits for readers of what it holds."""
        self._held_at[path] = turn
        # Of an earlier version: the catalogue has given it up, because this keeper did not answer for a while.
        await self._end_fetches([fetch for fetch, target in self._fetches.items() if target == path])
        self._patches.forget(self._beside(path), newest=False)
        await asyncio.to_thread(self._slot(path).begin_copy, number, Deadline(timeout_s))

    async def hold(self, turn: Turn, path: str, number: int) -> bool:
        """Keep a version from being overwritten until `release`. Return False if it is no longer in the slot."""
        self._held_at[path] = turn
        try:
            self._slot(path).hold(number)
        except (StaleSlot, WeightsLostError):
            return False
        return True

    async def release(self, turn: Turn, path: str) -> None:
        """Permit a slot to be overwritten, unless a later call holds it."""
        if path in self._open and not self._held_at.get(path, turn) > turn:
            self._open[path].release()

    async def fetch(self, fetch: Fetch) -> TransferResult:
        """Bring bytes of a version from a slot of another keeper into a slot of this one, over raylane's transports.

        As patches of the base, if there is one and the options and the link permit it, else whole.
        Waits for patches that the other keeper is making, at most as long as a whole transfer would take.

        Raises the errors of `raylane.get`, and those of Ray if the other keeper dies.
        """
        if not self._open_version(fetch.slot).is_there():
            raise WeightsLostError(f"version {fetch.slot.number} was given up while it was copied. Update again")
        task = asyncio.ensure_future(self._fetch(fetch))
        self._fetches[task] = fetch.slot.path
        try:
            return await task
        finally:
            self._fetches.pop(task, None)

    @staticmethod
    async def _end_fetches(fetches: Collection[asyncio.Future[Any]]) -> None:
        """Cancel copies, and wait until they write nothing any more."""
        ending = list(fetches)
        for fetch in ending:
            fetch.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _fetch(self, fetch: Fetch) -> TransferResult:
        # Loaded here: only hosts that copy need the transports, and torch.
        from raylane.transport.api import get_async

        slot, holder, source, offset, nbytes, base, options = fetch
        copied, mismatch = 0, False
        request = None if base is None else self._request(base, nbytes, options)
        (ref,), proofs = await self._served(holder, source, offset, nbytes, request)
        if base is not None and proofs:
            patches = (await get_async(ref)).numpy()
            copied = len(patches)
            if await self._restore(slot, base, offset, nbytes, patches, proofs):
                return TransferResult("delta", copied, False, self._link.bytes_per_s)
            mismatch = self._open_version(base).is_there()  # else it was replaced meanwhile
            (ref,), _ = await self._served(holder, source, offset, nbytes, None)
        target = self._slot(slot.path).memory()[offset : offset + nbytes]
        arrived = 0
        self._link.begin(time.monotonic())
        try:
            await get_async(ref, into=target)
            arrived = nbytes
        finally:
            self._link.end(time.monotonic(), arrived)
        return TransferResult("dense", copied + nbytes, mismatch, self._link.bytes_per_s)

    @staticmethod
    async def _served(
        holder: Any, source: SlotVersion, offset: int, nbytes: int, request: DeltaRequest | None
    ) -> Served:
        """Ask another keeper for bytes. WeightsTimeoutError if it does not answer."""
        limit_s = SILENCE_S + (0.0 if request is None else request.wait_s)
        try:
            return await asyncio.wait_for(holder.serve.remote(source, offset, nbytes, request), limit_s)
        except TimeoutError:
            raise WeightsTimeoutError(f"the keeper that has the bytes did not answer for {limit_s:.0f} s") from None

    def _request(self, base: SlotVersion, nbytes: int, options: DeltaOptions) -> DeltaRequest | None:
        """Return the request for patches instead of so many bytes; None if none would be accepted."""
        link = self._link.bytes_per_s
        most_bytes = options.most_patch_bytes(nbytes, link)
        if most_bytes < 0 or not self._open_version(base).is_there():
            return None
        return DeltaRequest(base.number, most_bytes, MOST_WAIT_S if link is None else nbytes / link)

    async def _restore(
        self, slot: SlotVersion, base: SlotVersion, offset: int, nbytes: int, patches: Any, proofs: list[Proof]
    ) -> bool:
        """Write bytes of a version with patches of another one; keep the patches. Return False if that failed."""
        target = self._open_version(slot).bytes(offset, offset + nbytes)
        source = self._open_version(base).bytes(offset, offset + nbytes)
        restored = await on_thread(lambda: restore(target, source, patches, proofs))
        if restored is not None:
            self._patches.keep(slot, base.number, offset, restored)
        return restored is not None

    async def serve(self, slot: SlotVersion, offset: int, nbytes: int, request: DeltaRequest | None) -> Served:
        """Return a ref of bytes of a slot, which is held; or of patches, if they are requested and there are any."""
        from raylane.transport.api import put

        patches = None if request is None else await self._patches.find(slot, request, offset, nbytes)
        if patches:
            import torch

            data, proofs = message(patches)
            return Served([put(torch.from_numpy(data))], proofs)
        memory = self._slot(slot.path).memory()[offset : offset + nbytes]
        # Other chunks of the same memory are written meanwhile.
        return Served([put(memory, on_mutation="allow")], [])

    async def make_patches(
        self, new: SlotVersion, old: SlotVersion, runs: Sequence[Run], options: DeltaOptions, link: float | None
    ) -> None:
        """Make patches between two versions of a part of this host, and keep them until the version after the next.

        Runs on a thread beside the trainer's next step, and ends early if the trainer needs one of the slots. `link` is
        the speed of the slowest link in bytes/s, for which patches have to pay.
        """
        self._patches.forget(self._beside(new.path), newest=False)
        await self._patches.make(new.path, self._open_version(new), self._open_version(old), runs, options, link)

    def _open_version(self, version: SlotVersion) -> OpenVersion:
        return OpenVersion(self._slot(version.path), version.number)

    def _beside(self, path: str) -> list[str]:
        """Return the paths of all slots of the same part."""
        parts = ([slot.path for slot in slots] for slots in self._slots.values())
        return next((paths for paths in parts if path in paths), [])

    def _slot(self, path: str) -> OpenSlot:
        if path not in self._open:
            self._open[path] = self._reopen(path)
        return self._open[path]

    def _reopen(self, path: str) -> OpenSlot:
        ranks = [at[1].ranks for at, slots in self._slots.items() if path in [slot.path for slot in slots]]
        if not ranks:
            raise WeightsLostError(f"this host has given up the slot {path}. Update again")
        return OpenSlot(path, ranks[0])
