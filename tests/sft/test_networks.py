"""Training on two Ray nodes in namespaces of their own: a short cut of the cable does no harm, a long one is mended."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.ray]


def test_training_over_two_nodes_survives_a_pulled_cable(hosts: networks.Hosts, tmp_path: Path) -> None:
    text, _ = hosts.drive("tests.sft.network_driver", str(tmp_path))
    assert "said: done" in text, text
    assert "said: pulled for a while" in text, text
    assert text.count("Starting the workers again from") == 1, text
