"""Readers of one value on another host: one copy crosses the network, whatever happens to the readers and the source.

The hosts are Ray nodes with networks, processes and shared memory of their own, joined by a slow cable.
"""

from __future__ import annotations

import pytest
from tests.faults import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.processes]
LIMIT_S = 170


def test_readers_on_another_host_share_one_transfer() -> None:
    why = networks.refused()
    if why is not None:
        pytest.skip(f"namespaces cannot be made here: {why}")
    with networks.network(2) as net:
        weather = networks.Weather(net)
        driver = networks.start_cluster(net, "relay_network_driver", "one")
        text = weather.until_done(driver, LIMIT_S)
    print(text, weather.skipped)  # figures, shown with -s
    if "throttle" in weather.skipped:
        pytest.skip(f"links cannot be made slow here: {weather.skipped}")
    for act in (
        "one copy crosses",
        "targets share",
        "relay killed",
        "relay stopped",
        "source changed",
        "source killed",
        "done",
    ):
        assert f"said: {act}" in text, text
