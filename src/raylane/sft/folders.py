"""The folders that a run writes to: made, tried out and held for this run alone, before anything is started.

Two runs in one folder would remove each other's unfinished checkpoints and write into each other's figures, and each
would look healthy. The lock is the kernel's (flock on a file `.lock`): it ends with the process, however that ends, so
there is never a stale one. Called by `trainer.run`.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from raylane.errors import ConfigError

__all__ = ["LOCK_FILE", "held"]

LOCK_FILE = ".lock"

_log = logging.getLogger(__name__)


@contextmanager
def held(folders: Mapping[str, str]) -> Iterator[None]:
    """Make the folders (key of the configuration -> path) and hold them until the `with` block ends.

    Does not wait. ConfigError names key and folder when one cannot be written to, or is held by another run. Where the
    file system has no locks, a warning says that nothing is held.
    """
    with ExitStack() as stack:
        taken: set[Path] = set()
        for key, folder in folders.items():
            path = Path(folder).resolve()
            if path not in taken:  # two keys may name one folder, and this process would lock itself out
                taken.add(path)
                stack.enter_context(_lock(key, path))
        yield


@contextmanager
def _lock(key: str, folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{key}={folder} cannot be written to: {error.strerror or error}", key=key) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                _log.warning("%s=%s cannot be locked (%s); start no second run in it", key, folder, error)
            else:
                file.seek(0)
                raise ConfigError(
                    f"{key}={folder} is in use by another run ({file.read().strip() or 'which has just started'}); "
                    "wait for it or stop it, or choose another folder",
                    key=key,
                ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
