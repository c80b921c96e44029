"""Locks on ranges of a file that belong to an open file, not to a process (open file description locks, fcntl(2)).

The kernel drops the locks with the last descriptor of the open file, so also when the process dies.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

READ, WRITE, UNLOCK = fcntl.F_RDLCK, fcntl.F_WRLCK, fcntl.F_UNLCK


def lock(fd: int, kind: int, start: int = 0, length: int = 0) -> bool:
    """Set or release a lock on a range of a file; False if somebody holds a lock that excludes it. Does not wait.

    A length of 0 reaches to the end of the file.
    """
    try:
        # struct flock: type, whence, start, length, pid (must be 0), padding.
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_free(fd: int, kind: int, start: int = 0, length: int = 0) -> bool:
    """Return True if nobody else holds a lock that excludes this one. Takes none, does not wait. Range as in `lock`."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0))
    kind_held: int = struct.unpack_from("h", answer)[0]
    return kind_held == UNLOCK
