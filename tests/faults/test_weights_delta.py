"""Weights that a reader on another host takes as deltas, through a cable of 1 Gbit/s."""

from __future__ import annotations

import pytest
from tests.faults import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.processes]
LIMIT_S = 200


def test_reader_on_another_host_gets_changed_elements() -> None:
    why = networks.refused()
    if why is not None:
        pytest.skip(f"namespaces cannot be made here: {why}")
    with networks.network(2) as net:
        weather = networks.Weather(net)
        driver = networks.start_cluster(net, "weights_delta_driver", "one")
        text = weather.until_done(driver, LIMIT_S)
    print(text, weather.skipped)  # figures, shown with -s
    if {"gigabit", "slow"} & weather.skipped.keys():
        pytest.skip(f"links cannot be shaped here: {weather.skipped}")
    for act in ("small share", "missed version", "keeper of head killed", "keeper of one killed", "done"):
        assert f"said: {act}" in text, text
