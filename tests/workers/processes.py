"""Signals to worker processes in tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def stop(pid: int, within_s: float = 30.0) -> None:
    """Stop a process, and wait until all of its threads have stopped: the signal alone takes effect later."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + within_s
    while True:
        states = [
            (task / "stat").read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").iterdir()
        ]
        if set(states) == {"T"}:
            return
        assert time.monotonic() < deadline, states
        time.sleep(0.001)
