"""A queue whose producers and consumers are on other hosts than the driver, with networks and memory of their own."""

from __future__ import annotations

import pytest
from tests import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.ray]


@pytest.mark.claim("GRPO", "items of the queue pass between hosts, and losses are reported")
def test_payloads_pass_between_hosts_and_losses_are_told(hosts: networks.Hosts) -> None:
    text, _ = hosts.drive("tests.rl.queue_network_driver")
    print(text)  # figures, shown with -s
    for act in ("straight", "handed on", "told", "done"):
        assert f"said: {act}" in text, text
