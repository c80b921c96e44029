"""Pictures of plans: what each line of the Mermaid text says."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from graph.graphs import make_plan, random_plan
from raylane.graph.inspect import drawing
from raylane.graph.inspect.drawing import draw
from raylane.graph.plan.ir import DRIVER, INPUT, Plan

LABEL = r'"[^"]*"'
LINE = re.compile(
    rf"%% graph of .*|flowchart LR|  subgraph m\d+\[{LABEL}\]|    t\d+\[{LABEL}\]|  end"
    rf"|  (?:execute|result)\(\({LABEL}\)\)|  (?:t\d+|execute) --{LABEL}--> (?:t\d+|result)"
    r"|  t\d+ ~~~ t\d+|  style t\d+ stroke-dasharray: 4"
)
PLANS = [
    make_plan([1], [[INPUT]]),
    make_plan([1, 2, 3, 1], [[INPUT], [0], [0, INPUT], [1, 2]]),
    make_plan([1, 1], [[1], [INPUT]], order={1: [0, 1]}, exact_order=True),  # it would block itself
    *(random_plan(random.Random(seed), bad_orders=0, tasks=12) for seed in range(12)),
]


@pytest.mark.parametrize("plan", PLANS)
def test_everything_is_in_the_picture_once(plan: Plan) -> None:
    lines = draw(plan, max_inflight=2).splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    assert sum(line.startswith("    t") for line in lines) == len(plan.tasks)
    assert sum(line.startswith("  subgraph") for line in lines) == len(plan.members) - 1
    for edge in plan.edges:
        arrows = [line for line in lines if f'--"e{edge.index}"-->' in line]
        assert len(arrows) == len(edge.readers)
        source = plan.values[edge.value].source
        assert {line.split()[0] for line in arrows} == {"execute" if source == INPUT else f"t{source}"}
        ends = {line.split()[-1] for line in arrows}
        members = {DRIVER if end == "result" else plan.tasks[int(end[1:])].member for end in ends}
        assert members == set(edge.readers)


def test_text_cannot_leave_its_quotes() -> None:
    names = ["<script>alert(1)</script>", 'a"]\n  end\n&c\x00\ud800']
    plan = make_plan([1, 2], [[INPUT], [0]], names=names, labels=["<b>.f", "`g\x08#quot;"])
    picture = draw(plan, {0: [("<ring>", "</g>"), ("link", "")]})
    assert [line for line in picture.splitlines() if not LINE.fullmatch(line)] == []
    assert "<" not in picture
    assert '["a#34;]?  end?#38;c??"]' in picture
    assert '--"e0 #60;ring#62;+link"-->' in picture
    picture.encode()


def test_long_calls_are_cut_and_dropped_results_dashed() -> None:
    plan = make_plan([1], [[INPUT]], names=["Actor"], labels=["Actor." + "long" * 40])
    leaf = replace(plan, tasks=(replace(plan.tasks[0], leaf=True),))
    assert max(map(len, draw(plan).splitlines())) < 100
    assert "dasharray" not in draw(plan)
    assert "  style t0 stroke-dasharray: 4" in draw(leaf).splitlines()


def test_ending_of_the_file_decides_about_the_fence(tmp_path: Path) -> None:
    drawing.write(tmp_path / "graph.md", PLANS[0])
    drawing.write(str(tmp_path / "graph.mmd"), PLANS[0])
    assert (tmp_path / "graph.md").read_text() == f"```mermaid\n{draw(PLANS[0])}```\n"
    assert (tmp_path / "graph.mmd").read_text() == draw(PLANS[0])
    with pytest.raises(ValueError, match=r"'graph.svg' ends in neither .md nor .mmd.*name the file 'graph.md'"):
        drawing.write(tmp_path / "graph.svg", PLANS[0])
