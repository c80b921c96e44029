"""Executions of one graph that are under way, shared by the submitter and the collector of the driver."""

from __future__ import annotations

import collections
from typing import Any

from raylane.graph.driver.result import GraphResult
from raylane.graph.worker.executor import KEPT_RECORDS


class Executions:
    """State of the executions of one graph.

    The submitter adds executions and the collector ends them; each counter is written by one of the two only.
    """

    __slots__ = ("completed", "early_failures", "pending", "records", "submitted")

    def __init__(self) -> None:
        self.submitted = 0
        """Number of executions started. Written under the submit lock."""
        self.completed = 0
        """Number of executions of which every message was read. Written under the collect lock."""
        self.pending: collections.deque[GraphResult] = collections.deque()
        """Results of executions under way, oldest first.

        A failed execution stays until all its messages were read: until then its slots in the rings are in use.
        """
        self.early_failures: collections.deque[tuple[int, Any]] = collections.deque()
        """(execution, pickled error) of failures reported ahead of the messages of the execution. From any thread."""
        self.records: collections.deque[tuple[int, float, float]] = collections.deque(maxlen=KEPT_RECORDS)
        """(execution, submitted, completed), in seconds of time.perf_counter()."""

    @property
    def inflight(self) -> int:
        """Number of executions under way."""
        return self.submitted - self.completed
