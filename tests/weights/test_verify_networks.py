"""Verification of weights on a host other than the trainer's: a bit that changes on the way is found."""

from __future__ import annotations

import pytest
from tests import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.ray]


@pytest.mark.claim("weights", "bits that differ from those published are found, and their tensors named")
def test_readers_on_another_host_verify_what_came(hosts: networks.Hosts) -> None:
    text, _ = hosts.drive("tests.weights.verify_network_driver")
    for act in ("verified on another host", "change in transit found", "done"):
        assert f"said: {act}" in text, text
