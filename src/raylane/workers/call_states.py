"""Ways in which a worker group sends its calls, as a table of states and events. Pure.

    UNTRIED   --compile-->      COMPILED    the first graph was compiled; later failures change nothing here
    UNTRIED   --fall_back-->    PLAIN       graphs cannot be used and are not required: plain Ray calls from now on
    COMPILED  --graph_ended-->  UNSETTLED   some workers may still be in a call of a graph that has ended
    UNSETTLED --settle-->       COMPILED    no worker is in such a call any more
    any       --restart-->      as before, but COMPILED for UNSETTLED: all processes of the workers have ended

A group without graphs is PLAIN from the beginning.
"""

from __future__ import annotations

import enum

from raylane.core.state_table import StateTable


class Calling(enum.Enum):
    """Way in which a group sends its calls."""

    PLAIN = "plain"
    UNTRIED = "untried"
    COMPILED = "compiled"
    UNSETTLED = "unsettled"


class CallingEvent(enum.Enum):
    """Event that may change the way of calling."""

    COMPILE = "compile"
    FALL_BACK = "fall_back"
    GRAPH_ENDED = "graph_ended"
    SETTLE = "settle"
    RESTART = "restart"


CALLING_TRANSITIONS = StateTable(
    {
        (Calling.UNTRIED, CallingEvent.COMPILE): Calling.COMPILED,
        (Calling.UNTRIED, CallingEvent.FALL_BACK): Calling.PLAIN,
        (Calling.COMPILED, CallingEvent.COMPILE): Calling.COMPILED,
        (Calling.COMPILED, CallingEvent.GRAPH_ENDED): Calling.UNSETTLED,
        # Workers that are not in an ended call get graphs of their own meanwhile.
        (Calling.UNSETTLED, CallingEvent.COMPILE): Calling.UNSETTLED,
        (Calling.UNSETTLED, CallingEvent.GRAPH_ENDED): Calling.UNSETTLED,
        (Calling.UNSETTLED, CallingEvent.SETTLE): Calling.COMPILED,
        **{(state, CallingEvent.RESTART): state for state in (Calling.PLAIN, Calling.UNTRIED, Calling.COMPILED)},
        (Calling.UNSETTLED, CallingEvent.RESTART): Calling.COMPILED,
    }
)
