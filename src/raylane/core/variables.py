"""Environment variables for libraries that read them once, at a certain call."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

_lock = threading.Lock()


@contextlib.contextmanager
def variables(values: Mapping[str, str], *, keep: bool = False) -> Iterator[None]:
    """Set environment variables while the block runs; with `keep`, those that are set already stay as they are.

    One thread at a time: another one waits.
    """
    with _lock:
        before = {name: os.environ.get(name) for name in values}
        changed = {name: value for name, value in values.items() if not (keep and before[name] is not None)}
        os.environ.update(changed)
        try:
            yield
        finally:
            for name in changed:
                if (value := before[name]) is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
