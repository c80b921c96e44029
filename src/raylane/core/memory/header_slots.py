"""Header slots: words that state whether a value is still published, and how often it was read. Used by the store."""

from __future__ import annotations

import ctypes
import mmap
import secrets
import struct

_header_pages: list[mmap.mmap] = []
"""Header pages of all stores that this process ever had; they are never unmapped.

A reader may come after the Ray session of a store has ended. The reader must then find a cleared nonce, and its mark
must not hit memory that has another use by then.
"""


def next_count(count: int) -> int:
    """Return a 32-bit count plus one; the largest count stays, because 0 means "never read"."""
    return min(count + 1, 0xFFFFFFFF)


class HeaderSlots:
    """Words that other processes read to find out whether a value is still published.

    One slot, 16 bytes, little-endian, in memory that is never unmapped:

        0   nonce         8 bytes   random per use; 0 = no value. A reader compares it with its ticket's.
        8   creator_read  4 bytes   number of times that the producing process itself has received the value
        12  remote_read   4 bytes   the same for other processes (written by these; two at once may count as one)

    Order: the store clears the nonce *before* it releases the value's memory, and a reader reads the nonce *last*. A
    nonce that still matches proves that everything read before was the value. Freed memory shows no other sign: small
    blocks are still readable, with wrong data. Not thread-safe: the store that owns the slots holds a lock.
    """

    SIZE = 16
    _PER_PAGE = mmap.PAGESIZE // SIZE

    def __init__(self) -> None:
        self._pages: list[tuple[mmap.mmap, int]] = []
        self._free: list[int] = []

    def open(self) -> tuple[int, int, int]:
        """Take a slot for a new value. Returns (slot, address of the slot, new nonce)."""
        if not self._free:
            page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            anchor = ctypes.c_char.from_buffer(page)
            first = len(self._pages) * self._PER_PAGE
            self._pages.append((page, ctypes.addressof(anchor)))
            _header_pages.append(page)
            # Descending, so that `pop` hands out the slots in ascending order.
            self._free.extend(range(first + self._PER_PAGE - 1, first - 1, -1))
        slot = self._free.pop()
        nonce = secrets.randbits(63) | 1  # never 0, which means "no value"
        page, base = self._pages[slot // self._PER_PAGE]
        offset = slot % self._PER_PAGE * self.SIZE
        # Late readers of an earlier value in this slot look for their own nonce, so the write need not be atomic.
        struct.pack_into("<QII", page, offset, nonce, 0, 0)
        return slot, base + offset, nonce

    def close(self, slot: int) -> None:
        """Clear a slot and make it available for another value."""
        page, _ = self._pages[slot // self._PER_PAGE]
        struct.pack_into("<QII", page, slot % self._PER_PAGE * self.SIZE, 0, 0, 0)
        self._free.append(slot)

    def read(self, slot: int) -> tuple[int, bool, bool]:
        """Return (nonce, read by its creator, read by another process) of a slot."""
        page, _ = self._pages[slot // self._PER_PAGE]
        nonce, creator, remote = struct.unpack_from("<QII", page, slot % self._PER_PAGE * self.SIZE)
        return nonce, bool(creator), bool(remote)

    def mark(self, slot: int, *, creator: bool) -> None:
        """Count a read of the value, by its creator or by another process."""
        page, _ = self._pages[slot // self._PER_PAGE]
        # Write this one word only: the other word belongs to readers in other processes, which write it unlocked.
        offset = slot % self._PER_PAGE * self.SIZE + (8 if creator else 12)
        struct.pack_into("<I", page, offset, next_count(struct.unpack_from("<I", page, offset)[0]))

    def reads(self, slot: int) -> int:
        """Return how often the value of a slot was read, by any process."""
        page, _ = self._pages[slot // self._PER_PAGE]
        creator, remote = struct.unpack_from("<II", page, slot % self._PER_PAGE * self.SIZE + 8)
        return int(creator + remote)
