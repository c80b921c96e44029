"""Weights that a reader on another host takes as deltas, through a cable of 1 Gbit/s."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.faults import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.processes]
OWN_SHM = "mount -t tmpfs raylane /dev/shm; "
LIMIT_S = 200


def test_reader_on_another_host_gets_changed_elements() -> None:
    why = networks.refused()
    if why is not None:
        pytest.skip(f"namespaces cannot be made here: {why}")
    root = Path(__file__).parents[2]
    paths = f"{root}/src:{root}"
    with networks.network(2) as net:
        head = net.addresses[0]
        weather = networks.Weather(net)
        driver = net.start(
            0,
            f"{OWN_SHM}{networks.ray_node(head, None, 'head')}; cd {root}; "
            f"PYTHONPATH={paths} exec {sys.executable} -m tests.faults.weights_delta_driver {head}",
        )
        start = f"until {networks.ray_node(net.addresses[1], head, 'one')} >/dev/null 2>&1"
        net.start(1, f"{OWN_SHM}cd {root}; export PYTHONPATH={paths}; {start}; do sleep 0.2; done; cat")
        text = weather.until_done(driver, LIMIT_S)
    print(text, weather.skipped)  # figures, shown with -s
    if {"gigabit", "slow"} & weather.skipped.keys():
        pytest.skip(f"links cannot be shaped here: {weather.skipped}")
    for act in ("small share", "missed version", "keeper of head killed", "keeper of one killed", "done"):
        assert f"said: {act}" in text, text
