"""Environment variables for libraries that read them once, at a certain call."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

_lock = threading.Lock()

WORKER_NICENESS = "RAY_worker_niceness"
"""Variable that Ray reads when it starts on a host: the niceness of its worker processes there, 15 by default (2.60).

Beside two other computing processes on two cores, a call takes ten times as long at 15 as at 0.
"""
AT_NORMAL_PRIORITY = {WORKER_NICENESS: "0"}
"""For `variables` around `ray.init`, with `keep=True`."""
NICENESS_REMEDY = f"set {WORKER_NICENESS}=0 before `ray start`, or before ray.init() without a cluster"


def use_tls() -> bool:
    """Return True if Ray is told to use TLS in this process (the same test as Ray's own)."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


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
