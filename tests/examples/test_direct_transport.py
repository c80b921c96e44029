"""The examples print what they should."""

from __future__ import annotations

import pytest
from tests.examples.programs import output_of

pytestmark = [pytest.mark.processes, pytest.mark.ray, pytest.mark.tour]


@pytest.mark.slow
def test_the_example_runs() -> None:
    lines = [
        line
        for line in output_of("direct_transport.py").splitlines()
        if ": " in line and not line.startswith(("\x1b", "("))
    ]
    shown = {line.split(":")[0].strip(): line.split(":")[1].strip() for line in lines}
    assert shown["summed by the consumer"][:6] == shown["summed by the driver"][:6] == shown["through Ray's store"][:6]
    assert shown["one of them"] == "(1000, 1000)"
    assert float(shown["put by an actor"]) == 2_000_000


@pytest.mark.slow
def test_the_example_of_outer_actors_reads_directly() -> None:
    assert output_of("outer_actors.py").splitlines()[-4:] == [
        "from an outer actor:   1000000.0",
        "given to a replica:    1000000.0",
        "returned by a replica: 2000000.0",
        "read directly:         2",
    ]
