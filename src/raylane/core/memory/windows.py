"""Windows: memory at a fixed address that shows one file after the other, so that objects over it need not be moved.

    StagedFile   mapped elsewhere, its pages looked up ──┐  show: one call of the kernel, for any number of objects
    Window       [ file of the version before ] <────────┘  what was there before is unmapped

Both begin at a multiple of 2 MiB, so that the kernel moves its tables of pages, and not each of their entries.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

from raylane.core.memory.segment import MAP_FAILED, libc_error, libc_madvise, libc_mmap, libc_mremap, libc_munmap

_ALIGNED_BYTES = 1 << 21
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_MADV_POPULATE_READ = 22
"""Looks up all pages of a mapping at once. Since Linux 5.14; where it is missing, each first access does."""


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _reserve(nbytes: int) -> int:
    """Return the address of so many bytes (whole pages) of address space without memory. OSError if there is none."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    begin = libc_mmap(None, nbytes + _ALIGNED_BYTES, 0, flags, -1, 0)
    if begin == MAP_FAILED:
        raise libc_error(f"reserving {nbytes} bytes of address space")
    address = -(-begin // _ALIGNED_BYTES) * _ALIGNED_BYTES
    if address > begin:
        libc_munmap(begin, address - begin)
    libc_munmap(address + nbytes, begin + _ALIGNED_BYTES - address)
    return int(address)


class StagedFile:
    """A file that is mapped and copied on write, at an address of its own until a window shows it."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """Map the first bytes of a file, and look up their pages. OSError if there is no address space."""
        self.nbytes = _whole_pages(nbytes)
        self.address = _reserve(self.nbytes)
        self.unmap = weakref.finalize(self, libc_munmap, self.address, self.nbytes)
        """Ends the mapping, unless a window has it."""
        self.unmap.atexit = False
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
        if libc_mmap(self.address, self.nbytes, protection, flags, fd, 0) == MAP_FAILED:
            raise libc_error(f"mapping {nbytes} bytes")
        libc_madvise(self.address, self.nbytes, _MADV_POPULATE_READ)


class Window:
    """Memory that shows one file after the other.

    Attributes:
        memory: ctypes array over the memory, which exists as long as this array. Not readable before the first `show`.
    """

    def __init__(self, nbytes: int) -> None:
        """Reserve the address space for files of this size. OSError if there is none."""
        self.nbytes = _whole_pages(nbytes)
        address = _reserve(self.nbytes)
        self.memory: Any = (ctypes.c_char * nbytes).from_address(address)
        # Not at exit: other exit handlers may still use tensors over this memory.
        weakref.finalize(self.memory, libc_munmap, address, self.nbytes).atexit = False

    def show(self, staged: StagedFile) -> None:
        """Let the window show a file instead of the one before; what was written to that one's mapping is lost.

        Other threads that read meanwhile see the bytes of either file. OSError if the kernel has no memory for it.
        """
        address, flags = ctypes.addressof(self.memory), _MREMAP_MAYMOVE | _MREMAP_FIXED
        if libc_mremap(staged.address, staged.nbytes, self.nbytes, flags, address) == MAP_FAILED:
            raise libc_error(f"moving the mapping of {staged.nbytes} bytes")
        staged.unmap.detach()
