"""The worker-group example says what its how-to page says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import ray

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
