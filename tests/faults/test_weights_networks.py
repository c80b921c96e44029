"""Weights that readers on other hosts take: one copy leaves the trainer's host, and holders may die.

The hosts are Ray nodes with networks, processes and shared memory of their own; the trainer's cable has 200 Mbit/s.
"""

from __future__ import annotations

import pytest
from tests.faults import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.processes]
LIMIT_S = 200


def test_readers_on_three_hosts_share_one_copy() -> None:
    why = networks.refused()
    if why is not None:
        pytest.skip(f"namespaces cannot be made here: {why}")
    with networks.network(4) as net:
        weather = networks.Weather(net)
        driver = networks.start_cluster(net, "weights_network_driver", "one", "two", "three")
        text = weather.until_done(driver, LIMIT_S)
    print(text, weather.skipped)  # figures, shown with -s
    if "slow" in weather.skipped:
        pytest.skip(f"links cannot be made slow here: {weather.skipped}")
    for act in (
        "one copy leaves the trainer",
        "needed chunks only",
        "fast trainer",
        "holder killed",
        "source killed",
        "cable cut",
        "done",
    ):
        assert f"said: {act}" in text, text
