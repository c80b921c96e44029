"""Weights that readers on other hosts take: one copy leaves the trainer's host, and holders may die.

The hosts are Ray nodes with networks, processes and shared memory of their own; the trainer's cable has 200 Mbit/s.
"""

from __future__ import annotations

import pytest
from tests import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.ray]


@pytest.mark.claim("weights", "hosts share one copy out of the trainer, and a dead holder is replaced")
def test_readers_on_three_hosts_share_one_copy(hosts: networks.Hosts) -> None:
    text, skipped = hosts.drive("tests.weights.spread_network_driver")
    print(text, skipped)  # figures, shown with -s
    if "slow" in skipped:
        pytest.skip(f"links cannot be made slow here: {skipped}")
    for act in (
        "one copy leaves the trainer",
        "needed chunks only",
        "fast trainer",
        "holder killed",
        "source killed",
        "both hosts have all",
        "cable cut",
        "done",
    ):
        assert f"said: {act}" in text, text
