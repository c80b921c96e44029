"""Table of the ways in which a worker group sends its calls. Pure."""

from __future__ import annotations

import pytest

from raylane.workers.call_states import CALLING_TRANSITIONS, Calling, CallingEvent


def after(*events: CallingEvent, begin: Calling = Calling.UNTRIED) -> Calling:
    for event in events:
        begin = CALLING_TRANSITIONS[begin, event]
    return begin


def test_fall_back_is_for_groups_without_a_compiled_graph() -> None:
    assert after(CallingEvent.FALL_BACK) is Calling.PLAIN
    with pytest.raises(KeyError):
        after(CallingEvent.COMPILE, CallingEvent.FALL_BACK)


def test_plain_calls_stay_plain() -> None:
    leads_to = {CALLING_TRANSITIONS.get((Calling.PLAIN, event), Calling.PLAIN) for event in CallingEvent}
    assert leads_to == {Calling.PLAIN}


def test_ended_graph_unsettles_until_answer_or_restart() -> None:
    ended = after(CallingEvent.COMPILE, CallingEvent.GRAPH_ENDED)
    assert ended is Calling.UNSETTLED
    assert after(CallingEvent.COMPILE, begin=ended) is Calling.UNSETTLED
    assert after(CallingEvent.SETTLE, begin=ended) is Calling.COMPILED
    assert after(CallingEvent.RESTART, begin=ended) is Calling.COMPILED


def test_every_state_survives_a_restart() -> None:
    assert {state for state, event in CALLING_TRANSITIONS if event is CallingEvent.RESTART} == set(Calling)
