"""Counters of transfers in `ray.util.metrics`, from where Ray's dashboard and Prometheus get them.

Reads and publications only add to counters of this process. A thread passes what is new to Ray every few seconds
(`RAYLANE_METRICS_S`); it runs while anything is held or has changed.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ray.util import metrics

BOUNDARIES_S = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]
MOST_DURATIONS = 1000
"""Limit of the durations that reach the histogram in one interval; the newest are kept."""
COUNTERS = {
    "transfers": "Values read from other processes",
    "transfer_bytes": "Bytes of values read from other processes",
    "transfer_errors": "Reads of values that failed",
}
GAUGES = {
    "entry_bytes": ("raylane_held_bytes", "Bytes of published values"),
    "entries": ("raylane_held_values", "Published values"),
    "pool_idle_bytes": ("raylane_pool_idle_bytes", "Idle receive memory"),
    "pool_used_bytes": ("raylane_pool_used_bytes", "Receive memory in use"),
}


@functools.cache
def ray_metric(kind: str, name: str, text: str) -> Any:
    """Return Ray's metric of this name. One for each process: Ray would warn of a second one."""
    # Ray's classes differ in their arguments: only a histogram has boundaries.
    if kind == "Histogram":
        return metrics.Histogram(name, text, BOUNDARIES_S, ("transport",))
    return getattr(metrics, kind)(name, text, ("transport",) if kind == "Counter" else ())


class TransferMetrics:
    """Counters of one process, and the thread that passes them to Ray. Thread-safe."""

    def __init__(self, interval_s: float, stats: Callable[[], Mapping[str, Any]]) -> None:
        """`stats` returns the present values of the GAUGES."""
        self._interval_s = interval_s
        self._stats = stats
        self._lock = threading.Lock()  # guards everything below
        self._new: dict[tuple[str, str], float] = collections.defaultdict(float)
        """Numbers that Ray does not know yet, by counter and transport."""
        self._durations: collections.deque[tuple[str, float]] = collections.deque(maxlen=MOST_DURATIONS)
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def transferred(self, transport: str, nbytes: int, seconds: float) -> None:
        """Count one read."""
        with self._lock:
            self._new["transfers", transport] += 1
            self._new["transfer_bytes", transport] += nbytes
            self._durations.append((transport, seconds))
        self.touch()

    def failed(self, transport: str) -> None:
        """Count one failed read."""
        with self._lock:
            self._new["transfer_errors", transport] += 1
        self.touch()

    def touch(self) -> None:
        """Start the thread unless it runs."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="raylane-metrics", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(self._interval_s):
            gauges = self.push()
            with self._lock:
                # Held memory can be freed at any time, and its gauges must follow; so the thread stays for it.
                if not any(gauges.values()) and not self._new:
                    self._thread = None
                    return

    def push(self) -> dict[str, float]:
        """Pass everything new to Ray. Returns the values of the gauges."""
        # Swap under the lock and pass on outside of it: a call of Ray's metrics takes about 5 us, and readers count.
        with self._lock:
            new, self._new = self._new, collections.defaultdict(float)
            durations, self._durations = self._durations, collections.deque(maxlen=MOST_DURATIONS)
        for (name, transport), value in new.items():
            ray_metric("Counter", f"raylane_{name}", COUNTERS[name]).inc(value, {"transport": transport})
        for transport, seconds in durations:
            histogram = ray_metric("Histogram", "raylane_transfer_seconds", "Duration of a read")
            histogram.observe(seconds, {"transport": transport})
        stats = self._stats()
        gauges = {key: float(stats[key]) for key in GAUGES}
        for key, value in gauges.items():
            ray_metric("Gauge", *GAUGES[key]).set(value)
        return gauges

    def close(self) -> None:
        """End the thread; waits a few seconds at most."""
        self._closed.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout=5)
