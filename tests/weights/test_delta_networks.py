"""Weights that a reader on another host takes as deltas, through a cable of 1 Gbit/s."""

from __future__ import annotations

import pytest
from tests import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.ray]


@pytest.mark.claim("weights", "between hosts a delta carries only the elements that have changed, bit for bit")
@pytest.mark.claim("weights", "whole versions go where a delta does not pay, after a missed one, and on one host")
def test_reader_on_another_host_gets_changed_elements(hosts: networks.Hosts) -> None:
    text, skipped = hosts.drive("tests.weights.delta_network_driver")
    print(text, skipped)  # figures, shown with -s
    if {"gigabit", "slow"} & skipped.keys():
        pytest.skip(f"links cannot be shaped here: {skipped}")
    for act in ("small share", "missed version", "keeper of head killed", "keeper of one killed", "done"):
        assert f"said: {act}" in text, text
