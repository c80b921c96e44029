"""Deltas: what has changed between two versions of a chunk, as a patch of bytes, and when a patch pays. Pure.

A patch has a section for each run of elements of one size (see `runs_of`) in which something has changed:

    first byte of the run, size of an element, number of entries      16 bytes
    values of the entries                                             as they are in the newer version
    gaps                                                              2 bytes each: from the entry before, in elements
    zeros up to a multiple of 8 bytes

Elements are compared and replaced as unsigned integers of their size, so NaNs and -0.0 are kept bit for bit. Values are
absolute, not differences: an entry for an element that has not changed does no harm, and bridges a gap that two bytes
cannot hold. A changed bfloat16 takes four bytes. Called by `patches`, `ledger` and `copies`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from raylane.weights.layout.boxes import StoredLayout

# Catalogues import this module and need no NumPy: functions that use it load it.
if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MODES = ("auto", "never", "always")
"""Values of the option `delta`."""
RESTORE_S_PER_BYTE = 0.9e-9
"""Seconds for each byte of a chunk that is restored: a copy, the entries, a SHA-256 (2026-11-24: 0.7 ms/MB)."""
MOST_SHARE = 0.5
"""Largest patch that `auto` accepts, as a share of the chunk: keepers hold patches in memory beside the slots."""
MOST_GAP = 0xFFFF
_SECTION = struct.Struct("<QII")
_ALIGNMENT = 8


class MalformedPatch(Exception):
    """The bytes are no patch for a chunk of this size."""


class DeltaOptions(NamedTuple):
    """Options of a publisher."""

    mode: str = "auto"
    anchor_every: int = 50
    """Versions whose number is a multiple of this are copied whole."""

    def check(self) -> None:
        """Raise ValueError for values that are not accepted."""
        if self.mode not in MODES:
            raise ValueError(f"delta must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.anchor_every < 1:
            raise ValueError(f"anchor_every must be at least 1 (1: all versions whole), got {self.anchor_every}")

    def allow(self, number: int) -> bool:
        """Return True if a version of this number may be copied as a delta."""
        return self.mode != "never" and number % self.anchor_every != 0

    def most_patch_bytes(self, dense_bytes: int, link_bytes_per_s: float | None) -> int:
        """Return the size up to which a patch is copied instead of a chunk; below 0 if none is.

        `link_bytes_per_s` is the measured speed of the link, None if nothing was copied through it yet: then `auto`
        copies whole chunks, which measures it.
        """
        if self.mode == "always":
            return dense_bytes
        if self.mode == "never" or link_bytes_per_s is None:
            return -1
        # The patch has to arrive and be applied before the whole chunk would have arrived.
        saved_bytes = dense_bytes * RESTORE_S_PER_BYTE * link_bytes_per_s
        return math.floor(min(dense_bytes - saved_bytes, dense_bytes * MOST_SHARE))


class Run(NamedTuple):
    """Adjacent bytes of a part with elements of one size."""

    stop: int
    """First byte after it; the first run begins at 0."""
    itemsize: int
    """1, 2, 4 or 8 bytes."""


def runs_of(stored: StoredLayout, part: int) -> tuple[Run, ...]:
    """Return the runs of a part, in order. Room between two boxes belongs to the run before it."""
    # Complex numbers are compared in halves.
    boxes = sorted(
        (box.offset, math.gcd(tensor.itemsize, 8))
        for tensor in stored.tensors.values()
        for box in tensor.boxes
        if box.part == part
    )
    runs: list[Run] = []
    stops = [offset for offset, _ in boxes[1:]] + [stored.nbytes[part]]
    for (_, itemsize), stop in zip(boxes, stops, strict=False):
        if runs and runs[-1].itemsize == itemsize:
            runs[-1] = Run(stop, itemsize)
        else:
            runs.append(Run(stop, itemsize))
    return tuple(runs)


def runs_between(runs: Sequence[Run], first: int, last: int) -> list[Run]:
    """Return the runs of the bytes from `first` up to `last` of a part, counted from `first`."""
    cut = []
    for run in runs:
        if run.stop > first:
            cut.append(Run(min(run.stop, last) - first, run.itemsize))
            if run.stop >= last:
                break
    return cut


def diff(new: Array, old: Array, runs: Sequence[Run], most_bytes: int) -> Array | None:
    """Return the patch that makes `new` of `old`, as bytes; None if it would have more than `most_bytes`.

    Both are arrays of bytes of the same length, which is the stop of the last run; runs begin at multiples of their
    itemsize.
    """
    import numpy as np

    sections: list[bytes] = []
    total, start = 0, 0
    for stop, itemsize in runs:
        # The bytes after the last whole element are room between boxes: nothing is written there.
        whole = slice(start, stop - (stop - start) % itemsize)
        values = new[whole].view(f"u{itemsize}")
        unequal = values != old[whole].view(f"u{itemsize}")
        count = np.count_nonzero(unequal)  # first: it costs little, and a dense change ends here
        if total + count * (itemsize + 2) > most_bytes:
            return None
        if count:
            section = _section(start, itemsize, values, np.flatnonzero(unequal))
            sections += section
            total += sum(map(len, section))
            if total > most_bytes:
                return None
        start = stop
    return np.frombuffer(bytearray().join(sections), dtype=np.uint8)


def _section(start: int, itemsize: int, new: Array, changed: Array) -> list[bytes]:
    import numpy as np

    gaps = np.diff(changed, prepend=0)
    long = gaps > MOST_GAP
    if long.any():
        # An entry at the end of every MOST_GAP elements of a long gap.
        bridges = [
            np.arange(at - gap + MOST_GAP, at, MOST_GAP) for at, gap in zip(changed[long], gaps[long], strict=True)
        ]
        changed = np.sort(np.concatenate([changed, *bridges]))
        gaps = np.diff(changed, prepend=0)
    body = [_SECTION.pack(start, itemsize, len(changed)), new[changed].tobytes(), gaps.astype("<u2").tobytes()]
    return [*body, bytes(-sum(map(len, body)) % _ALIGNMENT)]


def apply(patch: Array, into: Array) -> None:
    """Write the entries of a patch into a chunk; both are arrays of bytes.

    MalformedPatch if the patch does not fit; the chunk may be written in part then, and nothing beside it.
    """
    import numpy as np

    at = 0
    while at < len(patch):
        if len(patch) - at < _SECTION.size:
            raise MalformedPatch(f"{len(patch) - at} bytes at {at} are too few for a section")
        start, itemsize, count = _SECTION.unpack(patch[at : at + _SECTION.size].tobytes())
        values_at = at + _SECTION.size
        gaps_at = values_at + count * itemsize
        end = gaps_at + count * 2
        if itemsize not in (1, 2, 4, 8) or start % itemsize or start > len(into) or not count or end > len(patch):
            raise MalformedPatch(f"section at {at}: {count} entries of {itemsize} bytes from {start} on do not fit")
        room = (len(into) - start) // itemsize
        places = np.cumsum(patch[gaps_at:end].view("<u2"), dtype=np.int64)
        if places[-1] >= room:  # the last entry has the largest place, because gaps are not negative
            raise MalformedPatch(f"section at {at}: element {places[-1]} lies beyond the chunk, which has {room}")
        elements = into[start : start + room * itemsize].view(f"u{itemsize}")
        elements[places] = patch[values_at:gaps_at].view(f"u{itemsize}")
        at = end + -(end - at) % _ALIGNMENT


class LinkSpeed:
    """Speed of the link of one host, measured from whole chunks. Chunks that arrive side by side share it."""

    NEWEST_SHARE = 0.3
    """Share of the newest measurement in the mean."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        """None before the first whole chunk."""
        self._before: float | None = None
        """Speed before the transfers that are under way, or were last."""
        self._active = 0
        self._began_s = 0.0
        self._nbytes = 0

    def begin(self, now_s: float) -> None:
        """Note that a transfer begins."""
        if not self._active:
            self._began_s, self._nbytes, self._before = now_s, 0, self.bytes_per_s
        self._active += 1

    def end(self, now_s: float, nbytes: int) -> None:
        """Note that a transfer has brought this many bytes; 0 if it has failed."""
        self._active -= 1
        self._nbytes += nbytes
        if nbytes and now_s > self._began_s:
            measured = self._nbytes / (now_s - self._began_s)
            old = measured if self._before is None else self._before
            self.bytes_per_s = old + self.NEWEST_SHARE * (measured - old)
