"""A graph over three Ray nodes, each in network and pid namespaces of its own: nothing is pretended here."""

from __future__ import annotations

import re
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.faults import networks
from tests.transport import certificates

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_graph_over_three_nodes_survives_a_pulled_cable(secured: bool, tmp_path: Path) -> None:
    why = networks.refused()
    if why is not None:
        pytest.skip(f"namespaces cannot be made here: {why}")
    root = Path(__file__).parents[2]
    paths = f"{root}/src:{root}"
    with networks.network(3) as net:
        head, one, two = net.addresses
        if secured:
            authority = certificates.make_authority(tmp_path / "authority")
            net.environment |= certificates.make_certificate(authority, tmp_path / "node", *net.addresses)
        driver = net.start(
            0,
            f"{networks.ray_node(head, None, 'head')}; "
            f"cd {root}; PYTHONPATH={paths} exec {sys.executable} -m tests.faults.network_driver {head}",
        )
        for index, (address, name) in enumerate([(one, "one"), (two, "two")], 1):
            # The head may take its time: a node is started again until it has found it.
            start = networks.ray_node(address, head, name)
            net.start(
                index,
                f"cd {root}; export PYTHONPATH={paths}; until {start} >/dev/null 2>&1; do sleep 0.2; done; cat",
            )
        heard: list[str] = []
        timer = threading.Timer(150, driver.kill)
        timer.start()
        assert driver.stdout is not None
        for line in driver.stdout:
            heard.append(line.rstrip())
            if "said: running" in line:
                time.sleep(0.3)
                net.plug(2, connected=False)
                time.sleep(0.7)
                net.plug(2, connected=True)
            if "said: unplug" in line:
                net.plug(2, connected=False)
                assert driver.stdin is not None
                driver.stdin.write("unplugged\n")
                driver.stdin.flush()
            if "said: done" in line:
                break
        timer.cancel()
    text = "\n".join(heard)
    assert "said: done" in text, text
    assert "said: went on" in text, text
    assert re.search(r"said: lost, .* the connection from .* to Worker#.* broke: .*recompile", text), text
    assert "relayed by" in text
    print(text)  # figures, shown with -s
