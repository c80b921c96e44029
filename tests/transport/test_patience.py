"""Decisions of a reader that waits for the reader which fetches a value for its host. Pure."""

from __future__ import annotations

import pytest

from raylane.transport.backends.tcp.relay_wait import SILENT_S, RelayWait


def test_silence_ends_the_wait() -> None:
    patience = RelayWait(100.0, 60.0, 1000)
    assert patience.left_s(100.0) == SILENT_S
    assert patience.left_s(104.0) == pytest.approx(1.0)
    assert patience.left_s(105.0) == 0
    patience.heard(104.0, 10)
    assert patience.left_s(105.0) == pytest.approx(4.0)
    assert patience.left_s(109.0) == 0


def test_silence_leaves_time_for_a_read_from_the_source() -> None:
    patience = RelayWait(100.0, 2.0, 1000)
    assert patience.left_s(100.0) == 0.5
    assert patience.left_s(100.5) == 0
    assert RelayWait(100.0, 0.0, 1000).left_s(100.0) == 0


def test_word_without_progress_is_silence() -> None:
    patience = RelayWait(100.0, 60.0, 1000)
    patience.heard(101.0, 500)
    for now in (103.0, 105.0):
        patience.heard(now, 500)
    assert patience.left_s(105.0) == pytest.approx(1.0)
    assert patience.left_s(106.0) == 0


def test_progress_keeps_a_wait_without_deadline_alive() -> None:
    patience = RelayWait(100.0, None, 1000)
    for second in range(101, 1000):
        patience.heard(float(second), second - 100)
        assert patience.left_s(float(second)) == SILENT_S


@pytest.mark.parametrize(("speed", "waits"), [(30, True), (5, False)])
def test_speed_decides_whether_the_copy_comes_in_time(speed: int, waits: bool) -> None:
    patience = RelayWait(100.0, 60.0, 1000)
    for second in range(1, 4):
        patience.heard(100.0 + second, speed * second)
    assert (patience.left_s(103.0) > 0) is waits


def test_start_of_a_late_reader_does_not_count_as_speed() -> None:
    patience = RelayWait(100.0, 10.0, 1000)
    patience.heard(100.0, 900)  # was done before this reader came
    patience.heard(102.0, 905)
    assert patience.left_s(102.0) == 0, "90 bytes at 2.5 bytes a second take longer than 8 s"


def test_deadline_limits_the_wait() -> None:
    patience = RelayWait(100.0, 10.0, 1000)
    patience.heard(109.0, 999)
    assert patience.left_s(109.0) == pytest.approx(1.0)
    assert patience.left_s(110.0) == 0
