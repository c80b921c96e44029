"""Lifecycle of one graph in one process, as a table of states and events.

The driver has one `Lifecycle` for each graph, and so has every actor of the graph. Everything that must stop waiting
when the graph ends (lease pools, links to peers) reads the same object. The table itself is pure.

    RUNNING  --fail-->        FAILED      driver: an actor died or a link was lost; pending results fail
    RUNNING  --leave-->       LEAVING     actor: the driver asked for it, or a defect ended the graph here
    RUNNING  --owner_gone-->  ORPHANED    actor: the driver has ended or dropped the graph
    LEAVING  --owner_gone-->  ORPHANED
    any      --close-->       CLOSED      every connection is closed, or is being closed (FORKED stays FORKED)
    any      --fork-->        FORKED      this process is a forked child; the graph belongs to the parent

The tasks of an actor in one graph (`worker.executor`) have a state of their own:

    READY    --block-->       BLOCKED     a message of the last task waits for memory of its reader
    BLOCKED  --resume-->      READY       all messages are sent; the next task may run
    any      --stop-->        STOPPED     the actor ends, or the graph: no method is called any more
"""

from __future__ import annotations

import enum
import threading

from raylane.core.state_table import StateTable
from raylane.errors import GraphError


class State(enum.Enum):
    """State of a graph in one process."""

    RUNNING = "running"
    FAILED = "failed"
    LEAVING = "leaving"
    ORPHANED = "orphaned"
    CLOSED = "closed"
    FORKED = "forked"


class Event(enum.Enum):
    """Event that may change the state of a graph."""

    FAIL = "fail"
    LEAVE = "leave"
    OWNER_GONE = "owner_gone"
    CLOSE = "close"
    FORK = "fork"


_ENDING = {Event.FAIL, Event.LEAVE, Event.OWNER_GONE}

TRANSITIONS = StateTable(
    {
        (State.RUNNING, Event.FAIL): State.FAILED,
        (State.RUNNING, Event.LEAVE): State.LEAVING,
        (State.RUNNING, Event.OWNER_GONE): State.ORPHANED,
        # The first reason to end counts, except that nobody is left to report to once the owner is gone.
        **{(State.FAILED, event): State.FAILED for event in _ENDING},
        (State.LEAVING, Event.FAIL): State.LEAVING,
        (State.LEAVING, Event.LEAVE): State.LEAVING,
        (State.LEAVING, Event.OWNER_GONE): State.ORPHANED,
        **{(State.ORPHANED, event): State.ORPHANED for event in _ENDING},
        **{(State.CLOSED, event): State.CLOSED for event in (*_ENDING, Event.CLOSE)},
        **{
            (state, Event.CLOSE): State.CLOSED for state in (State.RUNNING, State.FAILED, State.LEAVING, State.ORPHANED)
        },
        **{(state, Event.FORK): State.FORKED for state in State},
        # A forked child shares memory with its parent: nothing that happens later may touch it.
        **{(State.FORKED, event): State.FORKED for event in (*_ENDING, Event.CLOSE)},
    }
)


class ExecutorState(enum.IntEnum):
    """State of the tasks of one actor in a graph. Integers, because each step looks up what its state does."""

    READY = 0
    BLOCKED = 1
    STOPPED = 2


class ExecutorEvent(enum.Enum):
    """Event that may change the state of an executor."""

    BLOCK = "block"
    RESUME = "resume"
    STOP = "stop"


EXECUTOR_TRANSITIONS = StateTable(
    {
        (ExecutorState.READY, ExecutorEvent.BLOCK): ExecutorState.BLOCKED,
        (ExecutorState.BLOCKED, ExecutorEvent.RESUME): ExecutorState.READY,
        **{(state, ExecutorEvent.STOP): ExecutorState.STOPPED for state in ExecutorState},
        # A method that is running when the graph ends still sends its result.
        **{(ExecutorState.STOPPED, event): ExecutorState.STOPPED for event in ExecutorEvent},
    }
)


class Lifecycle:
    """Current state of one graph in one process. Thread-safe; `advance` may run in a finalizer."""

    __slots__ = ("_lock", "error", "state")

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards changes of state and error; reentrant, because finalizers call advance
        self.state = State.RUNNING
        self.error: GraphError | None = None
        """Reason for the end, set by the first event that has one; replaced in a forked child."""

    def advance(self, event: Event, error: GraphError | None = None) -> bool:
        """Apply an event. Return True if the state has changed. The first `error` is kept as the reason."""
        with self._lock:
            if self.error is None:
                self.error = error
            while True:
                before = self.state
                after = TRANSITIONS[before, event]
                if self.state is before:  # else a finalizer has advanced the state within this very call
                    self.state = after
                    break
        return after is not before

    def fork(self, error: GraphError) -> None:
        """Enter FORKED in a forked child. The lock is new, because a thread of the parent may hold the old one."""
        self._lock = threading.RLock()
        self.error = error
        self.state = TRANSITIONS[self.state, Event.FORK]

    @property
    def running(self) -> bool:
        """True until the graph ends for any reason. No wait for memory continues afterwards."""
        return self.state is State.RUNNING

    @property
    def disconnecting(self) -> bool:
        """True when links may break. A failed graph keeps its links until it is closed."""
        return self.state in (State.ORPHANED, State.CLOSED, State.FORKED)

    def __repr__(self) -> str:
        return f"Lifecycle({self.state.value})"
