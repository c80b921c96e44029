"""Patches of a keeper: those that it has made or received, and the chunks that it restores with them.

    keeper of the trainer's host                     keeper of a reader's host
    diff of the slots of versions 7 and 8            slot of version 7 ──copy──> slot of version 8
    patch and SHA-256 of every chunk  ──patches──>   apply the patch, compare the SHA-256, keep the patch for others

A diff holds no lock, so that a trainer never waits for one: it reads both slots, and looks afterwards whether they were
written meanwhile. Then its patches are not used. Called by `keeper`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from raylane.weights.chunks.delta import DeltaOptions, MalformedPatch, Run, apply, diff, runs_between
from raylane.weights.layout.boxes import chunk_bytes
from raylane.weights.memory.slots import OpenSlot

if TYPE_CHECKING:
    from raylane.weights.chunks.delta import Array

MOST_WAIT_S = 30.0
"""Seconds for which a patch that is being made is waited for at most."""
_T = TypeVar("_T")


class SlotVersion(NamedTuple):
    """A version of a part in a slot of a keeper."""

    path: str
    number: int


class OpenVersion(NamedTuple):
    """The same in a slot that is mapped."""

    slot: OpenSlot
    number: int

    def bytes(self, first: int, last: int) -> Array:
        """Return bytes of the part, without a copy."""
        import numpy as np

        return np.frombuffer(self.slot.view()[first:last], dtype=np.uint8)

    def is_there(self) -> bool:
        """Return True if what was read before is this version."""
        return self.slot.still_has(self.number)


class DeltaRequest(NamedTuple):
    """Patches that a keeper accepts instead of whole chunks."""

    base: int
    """Number of the version to which the patches are applied."""
    most_bytes: int
    """Size up to which they are accepted."""
    wait_s: float
    """Seconds for which patches that are being made are waited for."""


class PatchOfChunk(NamedTuple):
    """A patch, and the proof of what it makes."""

    nbytes: int
    """Size of the whole chunk."""
    digest: bytes
    """SHA-256 of the whole chunk with the patch applied."""
    patch: Array


class Proof(NamedTuple):
    """Size of a patch within a message of several, and that of its chunk with its digest."""

    patch_bytes: int
    nbytes: int
    digest: bytes


class _PatchedVersion:
    """Patches of one version of a part. Used on one event loop."""

    def __init__(self, number: int, base: int, *, complete: bool) -> None:
        self.number = number
        self.base = base
        self.complete = complete
        """True if no diff adds further patches."""
        self.chunks: dict[int, PatchOfChunk | None] = {}
        """Patch by first byte of the chunk in the part; None for a chunk that has none."""
        self._changed = asyncio.Event()
        """Set, and replaced, at every change."""

    def add(self, offset: int, chunk: PatchOfChunk | None) -> None:
        """Note the patch of a chunk, or that it has none."""
        self.chunks[offset] = chunk
        self._notify()

    def end(self) -> None:
        """Note that no patches are added any more."""
        self.complete = True
        self._notify()

    def _notify(self) -> None:
        # A new event instead of clearing the old one: those that wait wake up, and later ones wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    async def between(self, offset: int, nbytes: int) -> list[PatchOfChunk] | None:
        """Return the patches of adjacent chunks as soon as they are known; None if one of the chunks has none."""
        patches = []
        at = offset
        while at < offset + nbytes:
            while at not in self.chunks and not self.complete:
                await self._changed.wait()
            chunk = self.chunks.get(at)
            # One chunk without a patch decides: the whole range will be copied.
            if chunk is None:
                return None
            patches.append(chunk)
            at += chunk.nbytes
        return patches if at == offset + nbytes else None


class Patches:
    """All patches of a keeper, by path of the slot of the newer version."""

    def __init__(self) -> None:
        self._versions: dict[str, _PatchedVersion] = {}
        self._differ = ThreadPoolExecutor(1, "raylane-diff")
        """One thread, beside the trainer's next step; it starts with the first diff."""

    def forget(self, paths: Sequence[str], *, newest: bool) -> None:
        """Forget the patches of these slots, except, unless `newest` is set, those of the newest version."""
        held = [path for path in paths if path in self._versions]
        spared = None if newest or not held else max(held, key=lambda path: self._versions[path].number)
        for path in held:
            if path != spared:
                del self._versions[path]

    async def make(
        self,
        path: str,
        new: OpenVersion,
        old: OpenVersion,
        runs: Sequence[Run],
        options: DeltaOptions,
        link: float | None,
    ) -> None:
        """Make the patches of all chunks of a part on a thread. Returns when they are made, or cannot be any more.

        `path` is the slot of the newer version; `link` is the speed in bytes/s for which the patches have to pay.
        """
        version = self._versions[path] = _PatchedVersion(new.number, old.number, complete=False)
        loop = asyncio.get_running_loop()
        part_bytes = runs[-1].stop
        step = chunk_bytes(part_bytes)

        def make_all() -> None:
            for first in range(0, part_bytes, step):
                last = min(first + step, part_bytes)
                most_bytes = options.most_patch_bytes(last - first, link)
                newer = new.bytes(first, last)
                patch = diff(newer, old.bytes(first, last), runs_between(runs, first, last), most_bytes)
                chunk = None
                if patch is not None:
                    chunk = PatchOfChunk(last - first, hashlib.sha256(newer.data).digest(), patch)
                # After the diff: what was read before this is of these versions, whole.
                if not (new.is_there() and old.is_there()):
                    return  # the trainer writes the next version
                loop.call_soon_threadsafe(version.add, first, chunk)

        try:
            await loop.run_in_executor(self._differ, make_all)
        finally:
            # Also after an error: those that wait for patches copy whole chunks then.
            version.end()

    async def find(
        self, slot: SlotVersion, request: DeltaRequest, offset: int, nbytes: int
    ) -> list[PatchOfChunk] | None:
        """Return the patches for a range of a version; None if it has to be copied whole. Waits as requested."""
        version = self._versions.get(slot.path)
        # The slot may hold a newer version by now, and the reader may have another base than the last diff.
        if version is None or version.number != slot.number or version.base != request.base:
            return None
        try:
            async with asyncio.timeout(min(request.wait_s, MOST_WAIT_S)):
                patches = await version.between(offset, nbytes)
        except TimeoutError:
            return None
        if patches is None or sum(len(each.patch) for each in patches) > request.most_bytes:
            return None
        return patches

    def keep(self, slot: SlotVersion, base: int, offset: int, patches: Sequence[PatchOfChunk]) -> None:
        """Keep patches that were received and proved, for other hosts."""
        version = self._versions.get(slot.path)
        if version is None or (version.number, version.base) != (slot.number, base):
            version = self._versions[slot.path] = _PatchedVersion(slot.number, base, complete=True)
        for each in patches:
            version.chunks[offset] = each
            offset += each.nbytes


def message(patches: Sequence[PatchOfChunk]) -> tuple[Array, list[Proof]]:
    """Return patches of adjacent chunks as one array, and their proofs."""
    import numpy as np

    data = patches[0].patch if len(patches) == 1 else np.concatenate([each.patch for each in patches])
    return data, [Proof(len(each.patch), each.nbytes, each.digest) for each in patches]


def restore(target: Array, base: Array, data: Array, proofs: Sequence[Proof]) -> list[PatchOfChunk] | None:
    """Write chunks of a version: those of the base, with a message of patches applied. All are arrays of bytes.

    Returns the patches; None if they do not fit, or do not make what they are to make. Then the target is undefined.
    """
    import numpy as np

    patches = []
    at = patch_at = 0
    for patch_bytes, nbytes, digest in proofs:
        chunk, patch = target[at : at + nbytes], data[patch_at : patch_at + patch_bytes]
        # Not in place over the base: a reader may still use that version.
        np.copyto(chunk, base[at : at + nbytes])
        try:
            apply(patch, chunk)
        except MalformedPatch:
            return None
        # The digest is that of the trainer's host, so a wrong base or patch cannot go on to further hosts.
        if hashlib.sha256(chunk.data).digest() != digest:
            return None
        patches.append(PatchOfChunk(nbytes, digest, patch))
        at, patch_at = at + nbytes, patch_at + patch_bytes
    return patches if at == len(target) and patch_at == len(data) else None


async def on_thread(call: Callable[[], _T]) -> _T:
    """Return what a call returns on a thread. If this is cancelled, it ends when the call has ended."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        result: _T = await asyncio.shield(future)
        return result
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
