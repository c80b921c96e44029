"""Slots: shared memory in which the ranks of one host write a version, and from which readers of the host read it.

A slot is a memfd of the host's keeper. Who may write and who reads is settled by locks on the file, which the kernel
drops when a process dies, so a dead reader holds nothing:

    0      page of the segment: at its end the key, at its begin 1 when the name was dropped
    4096   one word for each rank of the host: the number of the version that it has written, or 0 while it writes
    ...    the boxes of the host's part, as `layout.boxes.store` has placed them

    rank                                        reader
    lock its own word for writing,              lock the whole file for reading,
      which waits for readers                     which fails while a rank writes
    word = 0, write its boxes, word = number    compare all words with the number it came for
    unlock                                      read, or map and keep the lock; unlock

So whoever holds the lock reads the version that it came for, whole, and nobody writes to it. Locks belong to the open
file, which a forked child shares: only the process that has opened a slot changes them.
"""

from __future__ import annotations

import os
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from raylane.core.deadline import Deadline
from raylane.core.memory.file_locks import READ, UNLOCK, WRITE, is_free, lock
from raylane.core.memory.segment import Segment
from raylane.core.memory.windows import StagedFile, Window
from raylane.errors import WeightsLostError, WeightsTimeoutError

# Only for annotations: keepers import this module, and need no torch.
if TYPE_CHECKING:
    import torch

PAGE_BYTES = 4096
_WORD = struct.Struct("<Q")
POLL_S = 0.002
"""Seconds between two attempts to lock a slot: the kernel has no event for the end of a lock."""


class SlotPlace(NamedTuple):
    """Slot that a rank writes."""

    path: str
    ranks: int
    """Number of the ranks that write it."""
    number: int
    """Number of this rank among them."""


class StaleSlot(Exception):
    """The slot holds another version by now, or is being written."""


def data_offset(ranks: int) -> int:
    """Return the offset of the part in a slot of so many ranks."""
    return PAGE_BYTES + -(-ranks * _WORD.size // PAGE_BYTES) * PAGE_BYTES


def make_slot(ranks: int, nbytes: int) -> Segment:
    """Return a new slot for a part that so many ranks write. OSError if there is no memory or descriptor for it."""
    return Segment.make(data_offset(ranks) + max(nbytes, 1))


def _word_at(rank: int) -> int:
    """Return the offset of the word of a rank, counted within the host."""
    return PAGE_BYTES + rank * _WORD.size


def words_of(segment: Segment, ranks: int) -> tuple[int, ...]:
    """Return the number of the version that each rank has written to a slot; 0 for a rank that writes."""
    return tuple(_WORD.unpack_from(segment.view, _word_at(i))[0] for i in range(ranks))


def mark_dropped(segment: Segment) -> None:
    """Note in a slot that its name was dropped, for readers that have prefetched what is in it."""
    _WORD.pack_into(segment.view, 0, 1)


class OpenSlot:
    """A slot of another process, mapped in this one. Not thread-safe."""

    def __init__(self, path: str, ranks: int) -> None:
        """Map a slot. OSError (FileNotFoundError if it is gone) as `Segment.open`."""
        self._segment = Segment.open(path, keep_fd=True)
        self._ranks = ranks
        self._pid = os.getpid()

    @property
    def _fd(self) -> int:
        assert self._segment.fd is not None, "the slot was closed"
        return self._segment.fd

    def memory(self, window: Window | None = None) -> torch.Tensor:
        """Return the part as bytes, or those in a window that shows it. Tensors over them keep memory, not the lock."""
        import torch

        memory = self._segment.memory if window is None else window.memory
        return torch.frombuffer(memory, dtype=torch.uint8, offset=data_offset(self._ranks))

    def numbers(self) -> tuple[int, ...]:
        """Return the number of the version that each rank has written; 0 for a rank that writes."""
        return words_of(self._segment, self._ranks)

    def is_dropped(self) -> bool:
        """Return True if the name of the version in the slot was dropped."""
        return bool(_WORD.unpack_from(self._segment.view, 0)[0])

    def view(self) -> memoryview:
        """Return the part as bytes without torch."""
        return self._segment.view[data_offset(self._ranks) :]

    def begin_writing(self, rank: int, deadline: Deadline, waiting: str, number: int | None = None) -> int:
        """Lock the boxes of a rank (counted within the host) when no reader holds the slot any more.

        Return the number of the version that the rank has written there; 0 if there is none, or its pages were freed.

        WeightsTimeoutError begins with `waiting`. WeightsLostError if the slot has a later version than this number: a
        rank whose trainer was replaced must not write to what its successor has published.
        """
        at = _word_at(rank)
        while not lock(self._fd, WRITE, at, _WORD.size):
            if deadline.left_s() == 0:
                raise WeightsTimeoutError(
                    f"{waiting}: after {deadline.timeout_s} s a reader still holds the version that this one would "
                    "replace. Update or close the readers that map it, or publish with a larger keep"
                )
            time.sleep(POLL_S)
        if number is not None and max(self.numbers()) > number:
            lock(self._fd, UNLOCK, at, _WORD.size)
            raise WeightsLostError(
                f"{waiting}: version {number} was given up, a later one is in its place. Publish again"
            )
        before: int = _WORD.unpack_from(self._segment.view, at)[0]
        _WORD.pack_into(self._segment.view, at, 0)
        return before

    def end_writing(self, rank: int, number: int) -> None:
        """Unlock the boxes of a rank; with a number of 0 they are of no version."""
        at = _word_at(rank)
        _WORD.pack_into(self._segment.view, at, number)
        lock(self._fd, UNLOCK, at, _WORD.size)

    def begin_copy(self, number: int, deadline: Deadline) -> None:
        """Lock the whole slot for the copy of a version, and keep everybody else from writing until `release`.

        WeightsTimeoutError if a reader still holds the version that the copy replaces.
        """
        for rank in range(self._ranks):
            self.begin_writing(rank, deadline, f"version {number} cannot be copied to this host")
        for rank in range(self._ranks):
            _WORD.pack_into(self._segment.view, _word_at(rank), number)
        lock(self._fd, READ)

    def empty(self, newest: int) -> None:
        """Free the pages of the part, unless somebody holds or writes it, or it has a later version than `newest`."""
        if not lock(self._fd, WRITE, PAGE_BYTES, self._ranks * _WORD.size):
            return
        numbers = self.numbers()
        if 0 < max(numbers) <= newest:
            for rank in range(self._ranks):
                _WORD.pack_into(self._segment.view, _word_at(rank), 0)
            self._segment.discard(data_offset(self._ranks))
        self.release()

    def hold(self, number: int) -> None:
        """Keep everybody from writing until `release`. StaleSlot if the slot does not hold this version whole."""
        # Looked at before, too, as a release would end what this process holds of another version.
        if set(self.numbers()) != {number} or not lock(self._fd, READ):
            raise StaleSlot
        if set(self.numbers()) != {number}:
            self.release()
            raise StaleSlot

    def still_has(self, number: int) -> bool:
        """Return True if what was read from the slot before this call is this version whole; takes no lock.

        A writer locks its word first and then changes it, and numbers never come back. The kernel orders its lock and
        this test, so a writer that is not noticed here has begun after what was read.
        """
        fd = self._segment.fd
        return fd is not None and is_free(fd, READ) and set(self.numbers()) == {number}

    def is_surplus(self) -> bool:
        """Return True if memory of this process can be freed, as it has no version; never in shared memory."""
        return False

    def is_replaced(self) -> bool:
        """Return True if the memory that was mapped is not that of the slot any more; never in shared memory."""
        return False

    def check_present(self, number: int) -> None:
        """Raise WeightsLostError if a version that this slot holds is gone; a lock keeps what is in shared memory."""

    def stage(self) -> StagedFile:
        """Return the slot as a file that a window can show; writes to it stay in this process."""
        return StagedFile(self._fd, self._segment.nbytes)

    def window(self) -> Window:
        """Return a window for slots of this size."""
        return Window(self._segment.nbytes)

    def release(self) -> None:
        """Permit the ranks to write again. Does nothing in a forked child, whose parent holds the slot."""
        if os.getpid() == self._pid:
            lock(self._fd, UNLOCK)

    def close(self) -> None:
        """Release all locks and close the descriptor. Tensors over the memory stay valid. A child closes only."""
        if self._segment.fd is not None and os.getpid() == self._pid:
            lock(self._fd, UNLOCK)  # the file stays open, with its locks, as long as it is mapped
        self._segment.close_fd()
