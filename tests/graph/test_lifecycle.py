"""Lifecycle of a graph, and doorbell accounting. Pure."""

from __future__ import annotations

import itertools
import threading

from raylane.core.signals.semaphore import post, value
from raylane.errors import GraphClosedError
from raylane.graph.channels.ring import ProcessDoorbell
from raylane.graph.lifecycle import (
    EXECUTOR_TRANSITIONS,
    TRANSITIONS,
    Event,
    ExecutorEvent,
    ExecutorState,
    Lifecycle,
    State,
)


def test_lifecycle_has_a_transition_for_every_state_and_event() -> None:
    assert set(TRANSITIONS) == set(itertools.product(State, Event))


def test_lifecycle_never_returns_to_running() -> None:
    assert State.RUNNING not in TRANSITIONS.values()


def test_lifecycle_closed_and_forked_are_final() -> None:
    for event in Event:
        assert TRANSITIONS[State.FORKED, event] is State.FORKED
        assert TRANSITIONS[State.CLOSED, event] in (State.CLOSED, State.FORKED)


def test_executor_table_refuses_a_second_block_and_resume() -> None:
    refused = set(itertools.product(ExecutorState, ExecutorEvent)) - set(EXECUTOR_TRANSITIONS)
    assert refused == {
        (ExecutorState.READY, ExecutorEvent.RESUME),
        (ExecutorState.BLOCKED, ExecutorEvent.BLOCK),
    }


def test_executor_stopped_stays_stopped() -> None:
    assert {EXECUTOR_TRANSITIONS[ExecutorState.STOPPED, event] for event in ExecutorEvent} == {ExecutorState.STOPPED}


def test_lifecycle_keeps_the_first_error() -> None:
    lifecycle, first = Lifecycle(), GraphClosedError("first")
    assert lifecycle.advance(Event.FAIL, first)
    assert not lifecycle.advance(Event.FAIL, GraphClosedError("second"))
    assert lifecycle.error is first


def test_lifecycle_failed_graph_keeps_its_links_until_closed() -> None:
    lifecycle = Lifecycle()
    lifecycle.advance(Event.FAIL, GraphClosedError("failed"))
    assert (lifecycle.running, lifecycle.disconnecting) == (False, False)
    lifecycle.advance(Event.CLOSE)
    assert lifecycle.disconnecting


def test_lifecycle_second_close_changes_nothing() -> None:
    lifecycle = Lifecycle()
    assert lifecycle.advance(Event.CLOSE)
    assert not lifecycle.advance(Event.CLOSE)


def test_lifecycle_fork_replaces_a_held_lock() -> None:
    lifecycle = Lifecycle()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lifecycle._lock:
            held.set()
            release.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    lifecycle.fork(GraphClosedError("forked"))
    assert not lifecycle.advance(Event.CLOSE)
    release.set()
    thread.join()
    assert lifecycle.state is State.FORKED


def test_doorbell_absorbs_posts_of_messages_read_before() -> None:
    doorbell = ProcessDoorbell()
    for _ in range(3):
        post(doorbell.address)
    doorbell.read = 2
    assert doorbell.absorb()
    assert (doorbell.consumed, value(doorbell.address)) == (2, 1)
    assert not doorbell.absorb()
    assert doorbell.wait(1)
    assert doorbell.consumed == 3
    assert not doorbell.wait(0.01)
