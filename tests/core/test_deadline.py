from __future__ import annotations

import sys
import time

import pytest

from raylane.core.deadline import Deadline


def test_no_limit() -> None:
    deadline = Deadline(None)
    assert deadline.left_s() is None


def test_zero_has_expired_and_never_goes_below() -> None:
    deadline = Deadline(0)
    assert deadline.left_s() == 0


def test_rounds_of_a_wait_say_its_state(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    waits = []
    for wait_s in Deadline(70).rounds(lambda: "rank 1 is not ready"):
        waits.append(wait_s)
        now += wait_s
    assert waits == [30, 30, 10]
    assert [line.split(" (")[0] for line in caplog.messages] == [
        "rank 1 is not ready after 30 s of at most 70 s",
        "rank 1 is not ready after 60 s of at most 70 s",
    ]
    assert next(Deadline(None).rounds(str)) == 30
    assert list(Deadline(0).rounds(str)) == [0]


@pytest.mark.parametrize("bad", [-1, float("nan")])
def test_bad_timeouts_are_named(bad: float) -> None:
    with pytest.raises(ValueError, match=str(bad)):
        Deadline(bad)


@pytest.mark.parametrize("long_s", [sys.maxsize, 1e10, 1e300, float("inf")])
def test_timeout_too_long_for_system_waits_is_no_limit(long_s: float) -> None:
    assert Deadline(long_s).left_s() is None


@pytest.mark.parametrize("timeout", ["3", [1], float("nan"), -1])
def test_timeout_that_is_no_number_is_refused(timeout: object) -> None:
    with pytest.raises(ValueError, match="timeout must be a number of seconds >= 0, or None for no limit, got"):
        Deadline(timeout)  # type: ignore[arg-type]
