"""Trace of this process's transfers, written to a folder while `RAYLANE_TRACE` names one.

Each event is appended to the process's own file at once. So nothing is kept in memory, and the events of a process that
is killed are there, as Ray kills actors without an exit handler. `raylane trace merge` puts the files together.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from raylane.core import settings
from raylane.core.process.place import Place

log = logging.getLogger("raylane.transport")

MOST_EVENTS = 500_000
"""Limit of the events of one process, about 100 MB."""
FILES = "transfers-*.json"


class TransferTrace:
    """Writer of the events of one process. Thread-safe."""

    def __init__(self, folder: str, place: Place, label: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # With the start time, because pids recur; with the random boot id, because host names do.
        name = f"transfers-{place.hostname}-{place.boot_id[:8]}-{place.pid}-{place.start_ticks}.json"
        self._file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._lock = threading.Lock()  # guards _file
        self._pid = place.pid
        # The time of day, because only that is comparable between hosts; measured once, so that it cannot jump.
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self._numbers = itertools.count()
        process = {"name": "process_name", "ph": "M", "pid": place.pid, "args": {"name": label}}
        self._write(f"[\n{json.dumps(process)},\n")  # viewers accept a list that is not closed

    def add(self, name: str, began_ns: int, **args: Any) -> None:
        """Write one slice of this thread, from `began_ns` (of time.perf_counter_ns) until now."""
        number = next(self._numbers)
        if number >= MOST_EVENTS:
            if number == MOST_EVENTS:
                log.warning("the trace of transfers ends: this process has written %d events", MOST_EVENTS)
            return
        event = {
            "name": name,
            "cat": "raylane",
            "ph": "X",
            "ts": (began_ns + self._offset_ns) / 1000,
            "dur": (time.perf_counter_ns() - began_ns) / 1000,
            "pid": self._pid,
            "tid": threading.get_native_id(),
            "args": args,
        }
        # One write for the whole line, so that a process that is killed leaves at most one torn line.
        self._write(json.dumps(event) + ",\n")

    def _write(self, text: str) -> None:
        with self._lock:
            if self._file < 0:
                return
            try:
                os.write(self._file, text.encode())
            except OSError as error:  # a full disk must not fail a transfer
                log.warning("the trace of transfers ends: %s", error)
                self._close()

    def _close(self) -> None:
        os.close(self._file)
        self._file = -1

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            if self._file >= 0:
                self._close()


def trace_of_environment(place: Place, label: str) -> TransferTrace | None:
    """Return a trace in the folder that `RAYLANE_TRACE` names, or None without one. OSError if it is not writable."""
    folder = settings.TRACE.read()
    return TransferTrace(folder, place, label) if folder else None
