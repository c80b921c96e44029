"""A queue whose producers and consumers are on other hosts than the driver, with networks and memory of their own."""

from __future__ import annotations

import pytest
from tests.faults import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.processes]


def test_payloads_pass_between_hosts_and_losses_are_told() -> None:
    why = networks.refused()
    if why is not None:
        pytest.skip(f"namespaces cannot be made here: {why}")
    with networks.network(3) as net:
        driver = networks.start_cluster(net, "queue_network_driver", "one", "two")
        text = networks.Weather(net).until_done(driver, 120)
    print(text)  # figures, shown with -s
    for act in ("straight", "handed on", "told", "done"):
        assert f"said: {act}" in text, text
