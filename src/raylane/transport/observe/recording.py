"""Record of the publications and reads of a process, for its trace and for Ray's metrics."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from raylane import _ray
from raylane.core import settings
from raylane.core.process.place import Place
from raylane.errors import TransportError
from raylane.transport.observe.metrics import TransferMetrics
from raylane.transport.observe.tracing import trace_of_environment

# Graphs load this module, and must not load torch for it, which `ticket` does.
if TYPE_CHECKING:
    from raylane.transport.value.ticket import Ticket


class TransferRecorder:
    """The trace and the metrics of one endpoint. Times are those of time.perf_counter_ns. Thread-safe."""

    def __init__(self, place: Place, stats: Callable[[], Mapping[str, Any]]) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        """Counters of `raylane.stats`, by name."""
        self.trace = trace_of_environment(place, _ray.describe_self())
        """Trace of transfers, or None if none is written."""
        seconds = settings.METRICS_S.read()
        self._metrics = None if seconds is None else TransferMetrics(seconds, stats)

    def published(self, origin: str, nbytes: int, began_ns: int) -> None:
        """Record a publication, which includes the wait for room in the budget."""
        if self.trace is not None:
            self.trace.add("publish", began_ns, origin=origin, bytes=nbytes)
        if self._metrics is not None:
            # The gauges of held memory are the same for all publications, so nothing is counted here.
            self._metrics.touch()

    def waited(self, began_ns: int, refs: int) -> None:
        """Record a wait for the calls that produce values."""
        if self.trace is not None:
            self.trace.add("wait for calls", began_ns, refs=refs)

    def read(self, transport: str, ticket: Ticket, began_ns: int, nbytes: int) -> None:
        """Record a read from another process."""
        if self.trace is not None:
            self.trace.add(f"fetch {transport}", began_ns, bytes=nbytes, source=str(ticket.origin()))
        if self._metrics is not None:
            self._metrics.transferred(transport, nbytes, (time.perf_counter_ns() - began_ns) / 1e9)

    def read_failed(self, transport: str, ticket: Ticket, began_ns: int, error: TransportError) -> None:
        """Record a failed read, also in the counters of `stats`."""
        self.counts[f"{transport}_errors"] += 1
        if self.trace is not None:
            what = type(error).__name__
            self.trace.add(f"fetch {transport}", began_ns, error=what, source=str(ticket.origin()))
        if self._metrics is not None:
            self._metrics.failed(transport)

    def moved_weights(self, what: str, name: str, version: int, began_ns: int, nbytes: int) -> None:
        """Record that this process has published or taken a version: `what` is `publish weights` or `take weights`."""
        if self.trace is not None:
            self.trace.add(what, began_ns, bytes=nbytes, weights=name, version=version)
        if self._metrics is not None:
            self._metrics.transferred(what, nbytes, (time.perf_counter_ns() - began_ns) / 1e9)

    def close(self) -> None:
        """End the thread of the metrics and close the file of the trace."""
        for part in (self._metrics, self.trace):
            if part is not None:
                part.close()
