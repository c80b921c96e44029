"""The waiting policy on recorded waits of real graphs (`traces/record.py`).

Recorded on 2026-11-22 on a virtual machine with two cores (AMD EPYC, Linux 6.18, Python 3.11.7), with the policy of
that day. A replay gives the recorded waits to a new `Patience` and looks at its decisions. The waits themselves do not
change: in a pause of the recorded policy nothing was yielded, so nothing could be lost there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from raylane.core.signals.patience import MAX_LOSS_NS, PENALTY, SLOW_NS, US, Patience, S

TRACES = Path(__file__).parent / "traces"
START_NS = 10 * S
"""Time of the first review on the clock of the replay."""


class Decision(NamedTuple):
    """Decision of the policy after one review."""

    now_ns: int
    waits: int
    """Number of waits that were reviewed."""
    yielding: bool
    """True if the policy allowed these waits to yield, by the decision before this one."""
    lost_ns: int
    """Longest slow yield among them; 0 for none."""
    pause_ns: int
    """Length of the pause from now on."""


def replay(case: str, role: str) -> list[Decision]:
    """Give one trace to a new policy. Return its decisions."""
    trace = json.loads((TRACES / f"{case}.json").read_text())[role]
    delay_ns = trace["start_delay_us"] * US
    patience = Patience(run_delay=lambda: delay_ns)
    decisions = []
    budget_ns, resume_ns = patience.budget_ns, 0
    for now_us, delay_us, groups in trace["reviews"]:
        now_ns, delay_ns = START_NS + now_us * US, delay_us * US
        waits = [(length * US, worst * US) for number, length, worst in groups for _ in range(number)]
        yielding = budget_ns > 0 and now_ns >= resume_ns
        budget_ns, resume_ns = patience.review(waits, now_ns)
        worst_ns = max(worst for _, worst in waits)
        lost_ns = worst_ns if worst_ns > SLOW_NS else 0
        decisions.append(Decision(now_ns, len(waits), yielding, lost_ns, max(0, resume_ns - now_ns)))
    return decisions


def yielding_share(decisions: list[Decision]) -> float:
    return sum(each.waits for each in decisions if each.yielding) / sum(each.waits for each in decisions)


COMPUTING = [f"{graph}-{beside}" for graph in ("echo", "chain", "gaps") for beside in ("busy1", "busy2", "bursty")]


@pytest.mark.parametrize(
    ("case", "role"),
    [
        ("echo-idle", "driver"),
        ("echo-idle", "actor"),
        ("chain-idle", "driver"),
        ("chain-idle", "actor"),
        ("gaps-idle", "driver"),
    ],
)
def test_idle_machine_keeps_yielding(case: str, role: str) -> None:
    """At least nine of ten waits may yield. One trace has a slow yield, to a daemon of Ray."""
    assert yielding_share(replay(case, role)) >= 0.9


@pytest.mark.parametrize("beside", ["idle", "busy1", "busy2", "bursty"])
def test_waits_longer_than_any_budget_sleep_at_once(beside: str) -> None:
    """An actor that gets a message every millisecond learns from its first review that yielding is in vain."""
    decisions = replay(f"gaps-{beside}", "actor")
    assert not any(each.yielding for each in decisions[1:])


@pytest.mark.parametrize("role", ["driver", "actor"])
@pytest.mark.parametrize("case", COMPUTING)
def test_each_loss_to_a_neighbour_pauses_yielding(case: str, role: str) -> None:
    """The first review is left out: it may cover the start of the process, before run delays were compared."""
    for each in replay(case, role)[1:]:
        assert each.pause_ns >= PENALTY * min(each.lost_ns, MAX_LOSS_NS)


@pytest.mark.parametrize("role", ["driver", "actor"])
@pytest.mark.parametrize("case", COMPUTING)
def test_losses_to_neighbours_are_a_small_share_of_the_time(case: str, role: str) -> None:
    """At most a twentieth of the recorded time was lost in slow yields, although yielding begins again each time."""
    decisions = replay(case, role)
    lost_ns = sum(each.lost_ns for each in decisions)
    assert lost_ns <= (decisions[-1].now_ns - decisions[0].now_ns) / 20


@pytest.mark.parametrize(
    ("case", "role"), [("chain-busy2", "driver"), ("chain-busy2", "actor"), ("gaps-busy2", "driver")]
)
def test_two_computing_neighbours_soon_end_most_yielding(case: str, role: str) -> None:
    """On two cores a yield beside two computing processes usually loses, so pauses grow: few losses in a second."""
    decisions = replay(case, role)
    assert yielding_share(decisions) <= 0.5
    losses = [each for each in decisions if each.lost_ns]
    assert len(losses) <= 8
    assert max(each.pause_ns for each in losses) > 5 * losses[1].pause_ns


@pytest.mark.parametrize(
    ("case", "role"), [("chain-bursty", "driver"), ("chain-bursty", "actor"), ("gaps-bursty", "driver")]
)
def test_bursty_neighbour_does_not_end_yielding(case: str, role: str) -> None:
    """A process that computes for 20 ms of each 100: pauses stay short enough that nearly half of the waits yield."""
    decisions = replay(case, role)
    assert any(each.lost_ns for each in decisions)
    assert yielding_share(decisions) >= 0.45
    assert max(each.pause_ns for each in decisions) < S / 2


@pytest.mark.parametrize(
    ("case", "role"), [("chain-busy1", "driver"), ("chain-busy1", "actor"), ("echo-busy1", "driver")]
)
def test_yielding_begins_again_after_a_pause(case: str, role: str) -> None:
    """One computing process leaves a core free, so yields may succeed again: they are tried after each short pause."""
    decisions = replay(case, role)
    first = next(number for number, each in enumerate(decisions) if each.lost_ns)
    assert any(each.yielding for each in decisions[first + 1 :])
