"""A graph over three Ray nodes, each in network and pid namespaces of its own: nothing is pretended here."""

from __future__ import annotations

import re

import pytest
from tests import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.ray]


@pytest.mark.claim("graphs", "a graph extends over hosts; a link that is cut for too long ends it and names both ends")
def test_graph_over_three_nodes_survives_a_pulled_cable(hosts: networks.Hosts) -> None:
    """With TLS, graphs cross hosts in `test_transports_between_three_nodes`."""
    text, _ = hosts.drive("tests.graph.network_driver")
    assert "said: done" in text, text
    assert "said: went on" in text, text
    # The host that is cut off is named by the connection to it or, on a busy machine, by the one from it.
    assert re.search(r"said: lost, .* the connection from (.* to )?Worker#2 .*broke: .*recompile", text), text
    assert "relayed by" in text
    print(text)  # figures, shown with -s
