"""Control channels of the driver without actors: which reports count, and how long an order waits for another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raylane.errors import GraphActorDiedError, GraphTimeoutError
from raylane.graph.driver.control import ControlChannels
from raylane.graph.lifecycle import Lifecycle
from raylane.graph.values.message import Encoder
from raylane.graph.worker.program import EXITED


@pytest.fixture
def control() -> ControlChannels:
    """Return the channels of a graph with one actor, which answers nothing."""
    control = ControlChannels(["A"], ["id"], Lifecycle(), repairs=True)
    sent: Any = SimpleNamespace(write=lambda *message: pytest.fail(f"sent {message}"))
    exited: Any = SimpleNamespace(receive=lambda: Encoder().encode((EXITED, None)))
    control.add(sent, exited)
    return control


def test_control_ignores_the_late_exit_of_a_dead_actor(control: ControlChannels) -> None:
    exits: list[int] = []
    control.on_exit = exits.append
    control.dead.add(1)
    control._read(1)
    assert not exits
    control.dead.clear()
    control._read(1)
    assert exits == [1]


def test_control_sends_no_order_to_a_dead_actor(control: ControlChannels) -> None:
    control.dead.add(1)
    with pytest.raises(GraphActorDiedError, match="A ended during this execution"):
        control.ask(1, "stats")
    assert control.ask_each({1: "stats"}, lambda: False) is None
    control.tell(1, "stats", lambda: False)
    control.close(0)


def test_control_limits_the_wait_for_another_order(control: ControlChannels) -> None:
    with control._asking:
        with pytest.raises(GraphTimeoutError, match=r"did not answer an earlier order within 0\.01 s"):
            control.ask(1, "stats", timeout_s=0.01)
        assert control.ask_each({1: "stats"}, lambda: True) is None
        control.tell(1, "stats", lambda: True)
