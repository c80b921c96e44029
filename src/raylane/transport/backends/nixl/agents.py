"""The agents of this process: one whose memory others read, and one that reads; each created on first use.

Two, because the reading one is replaced now and then. UCX (1.20, in nixl 1.5.1) never closes the TCP connections of a
peer whose metadata were dropped, which happens whenever a source registers recycled memory; only the end of the agent
does, at both ends (https://github.com/ai-dynamo/nixl/issues/2025). A source cannot replace its agent: readers know it.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator

from raylane.transport.backends.base import ProcessPart
from raylane.transport.backends.nixl.agent import Agent

MOST_FORGOTTEN = 64
"""Number of dropped connections after which the reading agent is replaced. A new one costs half a second."""


class Agents(ProcessPart):
    """Thread-safe. Creation raises TransportUnavailableError if NIXL does not work in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards everything below; held while an agent is created
        self._offering: Agent | None = None
        self._reading: Agent | None = None
        self._readers: collections.Counter[Agent] = collections.Counter()
        """Number of transfers that use each reading agent: the present one, and those that were replaced."""
        self._past: collections.Counter[str] = collections.Counter()
        """Counters of the agents that were replaced."""

    def offering(self) -> Agent:
        """Return the agent whose memory others read."""
        with self._lock:
            if self._offering is None:
                self._offering = Agent()
            return self._offering

    def prepare_reading(self) -> None:
        """Create the agent that reads."""
        with self._lock:
            self._current()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Agent]:
        """Use the agent that reads; it does not end meanwhile, even if it is replaced."""
        with self._lock:
            if self._reading is not None and self._reading.forgotten >= MOST_FORGOTTEN:
                old, self._reading = self._reading, Agent()
                self._past.update(old.counts)
                # NIXL may still write to the memory of reads that were given up.
                self._reading.quarantine.extend(old.quarantine)
                if not self._readers[old]:
                    old.close()
            agent = self._current()
            self._readers[agent] += 1
        try:
            yield agent
        finally:
            with self._lock:
                self._readers[agent] -= 1
                if not self._readers[agent]:
                    del self._readers[agent]
                    if agent is not self._reading:  # replaced, or closed by `close` before
                        agent.close()

    def _current(self) -> Agent:
        if self._reading is None:
            self._reading = Agent()
        return self._reading

    def stats(self) -> dict[str, int]:
        """Return the counters of all agents; empty if there were none."""
        totals = collections.Counter(self._past)
        for agent in (self._offering, self._reading):
            if agent is not None:
                totals.update(agent.stats())
        return dict(totals)

    def close(self) -> None:
        """End the agents; a transfer that still runs keeps its own until it ends."""
        with self._lock:
            agents, self._offering, self._reading = (self._offering, self._reading), None, None
        for agent in agents:
            if agent is not None:
                agent.close()
