"""Readers of one value on another host: one copy crosses the network, whatever happens to the readers and the source.

The hosts are Ray nodes with networks, processes and shared memory of their own, joined by a slow cable.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.faults import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.processes]
OWN_SHM = "mount -t tmpfs raylane /dev/shm; "
LIMIT_S = 170


def test_readers_on_another_host_share_one_transfer() -> None:
    why = networks.refused()
    if why is not None:
        pytest.skip(f"namespaces cannot be made here: {why}")
    root = Path(__file__).parents[2]
    paths = f"{root}/src:{root}"
    with networks.network(2) as net:
        head, one = net.addresses
        weather = networks.Weather(net)
        driver = net.start(
            0,
            f"{OWN_SHM}{networks.ray_node(head, None, 'head')}; cd {root}; "
            f"PYTHONPATH={paths} exec {sys.executable} -m tests.faults.relay_network_driver {head}",
        )
        start = networks.ray_node(one, head, "one")
        net.start(
            1,
            f"{OWN_SHM}cd {root}; export PYTHONPATH={paths}; until {start} >/dev/null 2>&1; do sleep 0.2; done; cat",
        )
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
