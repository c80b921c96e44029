"""Weights that readers on other hosts take: one copy leaves the trainer's host, and holders may die.

The hosts are Ray nodes with networks, processes and shared memory of their own; the trainer's cable has 200 Mbit/s.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.faults import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.processes]
OWN_SHM = "mount -t tmpfs raylane /dev/shm; "
LIMIT_S = 200


def test_readers_on_three_hosts_share_one_copy() -> None:
    why = networks.refused()
    if why is not None:
        pytest.skip(f"namespaces cannot be made here: {why}")
    root = Path(__file__).parents[2]
    paths = f"{root}/src:{root}"
    with networks.network(4) as net:
        head = net.addresses[0]
        weather = networks.Weather(net)
        driver = net.start(
            0,
            f"{OWN_SHM}{networks.ray_node(head, None, 'head')}; cd {root}; "
            f"PYTHONPATH={paths} exec {sys.executable} -m tests.faults.weights_network_driver {head}",
        )
        for index, resource in ((1, "one"), (2, "two"), (3, "three")):
            start = f"until {networks.ray_node(net.addresses[index], head, resource)} >/dev/null 2>&1"
            net.start(index, f"{OWN_SHM}cd {root}; export PYTHONPATH={paths}; {start}; do sleep 0.2; done; cat")
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
