"""The example of the page about weights prints what the page shows."""

from __future__ import annotations

import pytest
from tests.examples.programs import ROOT, output_of

pytestmark = [pytest.mark.processes, pytest.mark.ray, pytest.mark.tour]


@pytest.mark.slow
def test_the_example_prints_what_the_page_shows() -> None:
    versions = [line for line in output_of("weights.py").splitlines() if line.startswith("version ")]
    assert len(versions) == 3
    assert "\n".join(versions) in (ROOT / "docs/howto/weights.md").read_text()


@pytest.mark.slow
@pytest.mark.claim("weights", "a fleet switches to a version as one, and goes back to the one before")
def test_the_example_of_a_fleet_prints_what_the_page_shows() -> None:
    printed = output_of("weights_fleet.py")
    assert len(printed.splitlines()) == 4
    assert printed in (ROOT / "docs/howto/weights.md").read_text()
