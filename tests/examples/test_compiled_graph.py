"""The example of the compiled-graph page prints what the page shows."""

from __future__ import annotations

import pytest
from tests.examples.programs import ROOT, output_of

pytestmark = [pytest.mark.processes, pytest.mark.ray, pytest.mark.tour]


@pytest.mark.slow
def test_the_example_runs_and_the_page_shows_its_output() -> None:
    printed = output_of("compiled_graph.py")
    page = (ROOT / "docs/howto/graphs.md").read_text()
    shown = printed[printed.index("graph of 3 actors") :].strip()
    for line in shown.splitlines():
        assert line in page
