"""Readers of one value on another host: one copy crosses the network, whatever happens to the readers and the source.

The hosts are Ray nodes with networks, processes and shared memory of their own, joined by a slow cable.
"""

from __future__ import annotations

import pytest
from tests import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.ray]


@pytest.mark.claim("transport", "simultaneous readers on another host share one transfer by `tcp`")
def test_readers_on_another_host_share_one_transfer(hosts: networks.Hosts) -> None:
    text, skipped = hosts.drive("tests.transport.relay_network_driver")
    print(text, skipped)  # figures, shown with -s
    if "throttle" in skipped:
        pytest.skip(f"links cannot be made slow here: {skipped}")
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
