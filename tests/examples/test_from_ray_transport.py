"""The example of Ray's direct transport runs with raylane and prints what the page shows."""

from __future__ import annotations

import re
import runpy

import pytest
from tests.examples.programs import ROOT

pytestmark = pytest.mark.tour
PAGE = (ROOT / "docs/howto/from-ray-direct-transport.md").read_text()


def test_example_of_rays_transport_prints_what_the_page_shows(
    cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(ROOT / "examples/from_ray_transport.py"), run_name="__main__")
    shown = re.search(r"<!-- output of examples/from_ray_transport.py -->\n```\n(.*?)```", PAGE, re.DOTALL)
    assert shown
    # Ray prints warnings of its own into the output.
    printed = [line for line in capsys.readouterr().out.splitlines() if "(raylet)" not in line]
    assert printed == shown[1].splitlines()
