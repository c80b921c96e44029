"""States of the repair of one graph, as a table of states and events, and the decisions that follow from it. Pure.

A graph that was compiled with `on_death="repair"` has one `RepairPlan` in the driver:

    INTACT    --death-->      SETTLING   no execution is admitted from here on; those in flight end
    SETTLING  --settled-->    AWAITING   no execution is in flight; Ray restarts the dead actors
    AWAITING  --restarted-->  OPENING    every dead actor has a new process; its channels are opened
    OPENING   --opened-->     INTACT     the next execution is admitted
    AWAITING, OPENING  --lost-->  HALTED     an actor does not come back: `execute` raises the reason
    all but INTACT  --replace-->  SETTLING   the user has named another actor
    any       --death-->      SETTLING   of any actor, a restarted one included
    any       --end-->        ENDED      the graph has ended

Steps that take time (waits, calls of actors) run without a lock, so an event may come too late. Each death, replacement
and end begins a new *round*, and the end of a step counts only in the round in which the step began.
"""

from __future__ import annotations

import enum

from raylane.core.state_table import StateTable, unchanged
from raylane.errors import GraphError


class RepairState(enum.Enum):
    """State of the repair of one graph."""

    INTACT = "intact"
    SETTLING = "settling"
    AWAITING = "awaiting"
    OPENING = "opening"
    HALTED = "halted"
    ENDED = "ended"


class RepairEvent(enum.Enum):
    """Event that may change the state of the repair."""

    DEATH = "death"
    SETTLED = "settled"
    RESTARTED = "restarted"
    OPENED = "opened"
    LOST = "lost"
    REPLACE = "replace"
    END = "end"


WORKING = (RepairState.SETTLING, RepairState.AWAITING, RepairState.OPENING)
"""States with a step that the repair thread has to run."""

TRANSITIONS = StateTable(
    {
        (RepairState.SETTLING, RepairEvent.SETTLED): RepairState.AWAITING,
        (RepairState.AWAITING, RepairEvent.RESTARTED): RepairState.OPENING,
        (RepairState.OPENING, RepairEvent.OPENED): RepairState.INTACT,
        (RepairState.AWAITING, RepairEvent.LOST): RepairState.HALTED,
        (RepairState.OPENING, RepairEvent.LOST): RepairState.HALTED,
        **{(state, RepairEvent.REPLACE): RepairState.SETTLING for state in (*WORKING, RepairState.HALTED)},
        **{
            (state, RepairEvent.DEATH): RepairState.SETTLING
            for state in (RepairState.INTACT, *WORKING, RepairState.HALTED)
        },
        **{(state, RepairEvent.END): RepairState.ENDED for state in RepairState},
        **unchanged(RepairState.ENDED, RepairEvent),
    }
)


class RepairPlan:
    """State of the repair and the dead members. Not thread-safe: the owner holds its lock."""

    def __init__(self) -> None:
        self.state = RepairState.INTACT
        self.round = 0
        """Number of deaths, replacements and ends so far."""
        self.dead: dict[int, int] = {}
        """Round of the last death or replacement, by member whose channels are not open."""
        self.reason: GraphError | None = None
        """Reason why the repair has halted."""

    def died(self, member: int) -> None:
        """Note the death of a member's process."""
        self._begin(RepairEvent.DEATH, member)

    def replaced(self, member: int) -> None:
        """Note that another actor takes the place of a dead member. KeyError if the member is not dead."""
        if member not in self.dead:
            raise KeyError(member)
        self._begin(RepairEvent.REPLACE, member)

    def end(self) -> None:
        """Note the end of the graph."""
        self._begin(RepairEvent.END, None)

    def _begin(self, event: RepairEvent, member: int | None) -> None:
        self.round += 1
        self.state = TRANSITIONS[self.state, event]
        self.reason = None
        if member is not None:
            self.dead[member] = self.round

    def finish_step(self, event: RepairEvent, began: int, reason: GraphError | None = None) -> bool:
        """Apply the end of a step that began in round `began`. Return False if a later round has overtaken it."""
        if began != self.round:
            return False
        self.state = TRANSITIONS[self.state, event]
        self.reason = reason
        return True

    def opened(self, member: int, since: int) -> None:
        """Note that the channels of a member are open, whose death was noted in round `since`.

        Does nothing if the member has died again or was replaced meanwhile. Counts also where another death has
        overtaken the step: then this member is one of those that wait for the other.
        """
        if self.dead.get(member) != since or self.state is RepairState.ENDED:
            return
        del self.dead[member]
        if not self.dead and self.state is RepairState.OPENING:
            self.state = TRANSITIONS[self.state, RepairEvent.OPENED]

    @property
    def admits(self) -> bool:
        """True if executions may start."""
        return self.state is RepairState.INTACT
