"""The worker-group example says what its how-to page says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import ray
from tests.examples.programs import output_of

pytestmark = pytest.mark.tour
ROOT = Path(__file__).parents[2]


def test_the_example_prints_what_the_page_shows(ray_session):
    spec = importlib.util.spec_from_file_location("worker_group_example", ROOT / "examples/worker_group.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    # Run as a script it would be __main__, whose classes Ray ships by value; loaded like this it must be told to.
    sys.modules[spec.name] = example
    ray.cloudpickle.register_pickle_by_value(example)
    said = example.main()
    page = (ROOT / "docs/howto/worker-groups.md").read_text()
    assert "\n".join(said) in page


@pytest.mark.slow
@pytest.mark.claim("worker groups", "a dead rank ends the collectives of the others, and is replaced alone")
def test_the_killed_worker_prints_what_the_page_shows(ray_session):
    shown = (ROOT / "docs/howto/failures.md").read_text().split("```")[3].split("\n")[1:-1]
    assert len(shown) == 3
    # Ray adds its own lines, also without an end of line before them.
    output = output_of("killed_worker.py")
    places = [output.find(line) for line in shown]
    assert places == sorted(places)
    assert places[0] >= 0, output
