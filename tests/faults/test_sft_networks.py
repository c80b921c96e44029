"""Training on two Ray nodes in namespaces of their own: a short cut of the cable does no harm, a long one is mended."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
from tests.faults import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def test_training_over_two_nodes_survives_a_pulled_cable(tmp_path: Path) -> None:
    why = networks.refused()
    if why is not None:
        pytest.skip(f"namespaces cannot be made here: {why}")
    root = Path(__file__).parents[2]
    paths = f"{root}/src:{root}"
    with networks.network(2) as net:
        head, one = net.addresses
        driver = net.start(
            0,
            f"export RAYLANE_TIMEOUT_S=3; {networks.ray_node(head, None, 'head')}; "
            f"cd {root}; PYTHONPATH={paths} exec {sys.executable} -m tests.faults.sft_network_driver {head} {tmp_path}",
        )
        start = networks.ray_node(one, head, "one")
        net.start(
            1,
            f"cd {root}; export RAYLANE_TIMEOUT_S=3 PYTHONPATH={paths}; "
            f"until {start} >/dev/null 2>&1; do sleep 0.2; done; cat",
        )
        heard: list[str] = []
        timer = threading.Timer(280, driver.kill)
        timer.start()
        assert driver.stdout is not None
        for line in driver.stdout:
            heard.append(line.rstrip())
            if "said: step 6" in line:
                net.plug(1, connected=False)
                time.sleep(0.7)
                net.plug(1, connected=True)
            if "said: step 14" in line and not any("Starting all workers again" in said for said in heard):
                net.plug(1, connected=False)
            if "Starting all workers again" in line:
                net.plug(1, connected=True)
            if "said: done" in line:
                break
        timer.cancel()
    text = "\n".join(heard)
    assert "said: done" in text, text
    assert text.count("Starting all workers again from") == 1, text
