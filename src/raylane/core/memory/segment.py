"""Segments: memfds of a fixed size, which other processes open by a path with a key. They leave no name in /dev/shm."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import struct
import sys
import weakref
from typing import Any

_library = ctypes.CDLL(None, use_errno=True)
libc_mmap, libc_munmap, libc_madvise, libc_mremap = _library.mmap, _library.munmap, _library.madvise, _library.mremap
libc_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc_mmap.restype = ctypes.c_void_p
libc_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc_mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
libc_mremap.restype = ctypes.c_void_p
MAP_FAILED = ctypes.c_void_p(-1).value


def libc_error(attempt: str) -> OSError:
    """Return the error of the last call of the C library, which is what `attempt` names."""
    code = ctypes.get_errno()
    return OSError(code, f"{attempt}: {os.strerror(code)}")


def map_file(fd: int, nbytes: int, *, private: bool = False) -> Any:
    """Map the first bytes of a file as a ctypes array, which is unmapped when it is garbage-collected.

    The mapping is shared with other processes, or with `private` copied on write.
    """
    # Not Python's mmap, which keeps a descriptor for each mapping: users may keep many arrays, each of which keeps a
    # mapping, and `ulimit -n` is often 1024.
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    address = libc_mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == MAP_FAILED:
        raise libc_error(f"mapping {nbytes} bytes")
    memory = (ctypes.c_char * nbytes).from_address(address)
    # Not at exit: tensors over this memory may still be used by other exit handlers, and the system unmaps it anyway.
    weakref.finalize(memory, libc_munmap, address, nbytes).atexit = False
    return memory


_NAME = "raylane"
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_PATH = re.compile(r"(/proc/[0-9]{1,10}/fd/[0-9]{1,10})#([0-9a-f]{1,16})")
_KEY = struct.Struct("<Q")
_KEY_AT = 4088
HEAD_BYTES = 4096
"""Bytes at the begin of a segment that end with its key; data follow them."""


def make_memfd(nbytes: int) -> int:
    """Return the descriptor of a new memfd of `nbytes` zeros, whose size nobody can change.

    OSError if the system has no descriptor for it, or files cannot be as large.
    """
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        # Access to mapped memory that a peer has truncated would end this process with SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def refuse_seals(fd: int, *, writes: bool = False) -> None:
    """Permit no further seals on a memfd of this process; with `writes`, permit no further writes either."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | (fcntl.F_SEAL_WRITE if writes else 0))


def has_fixed_size(fd: int) -> bool:
    """Return True if an open file is a memfd whose size nobody can change. OSError if it is no memfd."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _FIXED_SIZE == _FIXED_SIZE


def open_other(path: str, *, write: bool = False) -> int:
    """Return a descriptor of its own for the file at /proc/PID/fd/FD of another process.

    The number FD may belong to another file by now: the caller checks what was opened.
    """
    # O_NONBLOCK: that file may be a pipe, whose open would wait for a writer.
    return os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)


class Segment:
    """A memfd that this process maps. Its maker passes `path` to other processes, which map it with `open`.

        maker   make() ── path: /proc/PID/fd/FD#key ──> other   open(path), compare the key in bytes 4088 to 4096
                close_fd()                                      (mappings stay valid)

    The maker keeps `fd` until `close_fd`, so that others can open `path`. The memory exists until the last mapping in
    any process is gone; a mapping ends when the last object made from `memory` is garbage-collected. Read slices from
    `memory` or `view`, but write only to `view`: ctypes writes a slice item by item.

    The kernel reuses descriptor numbers. The random key in `path` and in the segment lets a process that opens the path
    too late notice that the number belongs to another file.
    """

    __slots__ = ("address", "fd", "memory", "nbytes", "path", "view")

    def __init__(self, fd: int, nbytes: int, *, private: bool = False) -> None:
        """Map `fd`, copied on write with `private`. The descriptor stays the caller's, also if this fails."""
        self.fd: int | None = None
        self.nbytes = nbytes
        self.memory = map_file(fd, nbytes, private=private)
        self.address = ctypes.addressof(self.memory)
        self.view = memoryview(self.memory).cast("B")
        self.path = ""
        """Path that other processes open; empty in a process that opened the segment itself."""

    @classmethod
    def make(cls, nbytes: int) -> Segment:
        """Return a new segment of `nbytes` (at least 4096), zero but for its key; pages take memory when touched.

        OSError if the system has no descriptor, mapping or address space for it.
        """
        if nbytes > sys.maxsize:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        fd = make_memfd(nbytes)
        try:
            refuse_seals(fd)
            segment = cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        segment.fd = fd
        key = secrets.randbits(64) | 1  # never 0, the key of memory that nobody has written to
        _KEY.pack_into(segment.view, _KEY_AT, key)
        segment.path = f"/proc/{os.getpid()}/fd/{fd}#{key:x}"
        return segment

    @classmethod
    def open(cls, path: str, *, private: bool = False, keep_fd: bool = False) -> Segment:
        """Map a segment that another process made. With `private`, writes stay in this mapping (copy on write).

        With `keep_fd`, `fd` is a descriptor of this process's own until `close_fd`.

        FileNotFoundError if the segment is gone, PermissionError if it belongs to another user, OSError if the path has
        not the form that `make` gives it.
        """
        match = _PATH.fullmatch(path)
        if match is None:
            raise OSError(errno.EINVAL, f"could not open a segment: {path!r:.200} is no path of a segment")
        file, key = match.groups()
        fd = open_other(file, write=True)
        segment = None
        try:
            nbytes = os.fstat(fd).st_size
            if (
                nbytes >= _KEY_AT + _KEY.size
                and os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_NAME}")
                and has_fixed_size(fd)
            ):
                segment = cls(fd, nbytes, private=private)
                if _KEY.unpack_from(segment.view, _KEY_AT)[0] == int(key, 16):
                    segment.fd = fd if keep_fd else None
                    return segment
        finally:
            if segment is None or segment.fd is None:
                os.close(fd)  # a mapping needs no descriptor
        raise FileNotFoundError(f"could not open a segment: {file} is another file by now; its maker has closed it")

    def close_fd(self) -> None:
        """Close the descriptor when no other process needs to open `path` any more. The memory stays mapped."""
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def discard(self, offset: int = 0) -> None:
        """Return the pages from `offset` on to the system. Every process that maps the segment reads zeros there now.

        `offset` is a multiple of 4096.
        """
        # Where MADV_REMOVE is not supported, the pages are freed with the last mapping.
        libc_madvise(self.address + offset, self.nbytes - offset, mmap.MADV_REMOVE)

    def taken_bytes(self) -> int:
        """Return the bytes of memory that the pages take so far; 0 after `close_fd`."""
        return 0 if self.fd is None else os.fstat(self.fd).st_blocks * 512

    def forget_writes(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Drop what this process wrote to a private mapping: it shows the content of the shared memory again.

        In `nbytes` (None: all) from `offset` on, which are multiples of 4096.
        """
        libc_madvise(self.address + offset, self.nbytes - offset if nbytes is None else nbytes, mmap.MADV_DONTNEED)

    def __del__(self, close: Any = os.close) -> None:  # at the end of the process `os` may be gone
        fd, self.fd = self.fd, None
        if fd is not None:
            close(fd)
