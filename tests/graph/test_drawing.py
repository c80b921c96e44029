from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from graph.graphs import make_plan, random_plan
from raylane.graph.inspect.drawing import draw
from raylane.graph.plan.ir import INPUT, Plan

SVG = "{http://www.w3.org/2000/svg}"
Segment = tuple[float, float, float, float]


def elements(picture: str, name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture).iter(SVG + name))


def titles(picture: str) -> list[str]:
    return [element.text or "" for element in elements(picture, "title")]


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in elements(picture, "text")]


def boxes(picture: str) -> list[Segment]:
    """Left, top, right and bottom of the boxes of calls."""
    found = []
    for rect in elements(picture, "rect"):
        if rect.get("rx"):
            x, y, width, height = (float(rect.get(key) or "nan") for key in ("x", "y", "width", "height"))
            found.append((x, y, x + width, y + height))
    return found


def lines(picture: str) -> list[list[Segment]]:
    """The segments of every line, each with its smaller end first."""
    found = []
    for path in elements(picture, "path"):
        if path.get("fill") != "none":
            continue
        steps = re.findall(r"([MHV])([\d.]+)(?: ([\d.]+))?", path.get("d") or "")
        assert "".join(way for way, _, _ in steps)[:2] == "MH"
        x, y = float(steps[0][1]), float(steps[0][2])
        segments = []
        for way, at, _ in steps[1:]:
            to = (float(at), y) if way == "H" else (x, float(at))
            segments.append((min(x, to[0]), min(y, to[1]), max(x, to[0]), max(y, to[1])))
            x, y = to
        found.append(segments)
    return found


def large_plan(seed: int) -> Plan:
    """40 calls on 6 actors."""
    rng = random.Random(seed)
    uses = [[s for s in range(max(0, t - 8), t) if rng.random() < 0.2] or [INPUT] for t in range(40)]
    return make_plan([t % 6 + 1 if t < 6 else rng.randint(1, 6) for t in range(40)], uses)


PLANS = [
    make_plan([1], [[INPUT]]),
    make_plan([1, 2, 3, 1], [[INPUT], [0], [0, INPUT], [1, 2]]),
    *(random_plan(random.Random(seed), bad_orders=0, tasks=12) for seed in range(12)),
    *(large_plan(seed) for seed in range(3)),
]


@pytest.mark.parametrize("plan", PLANS)
def test_everything_is_in_the_picture_once(plan: Plan) -> None:
    picture = draw(plan, max_inflight=2)
    driver_boxes = 1 + bool(plan.edges_from(0))
    assert len(boxes(picture)) == len(plan.tasks) + driver_boxes
    assert len(lines(picture)) == sum(len(edge.readers) for edge in plan.edges)
    shown = texts(picture)
    for edge in plan.edges:
        assert shown.count(f"e{edge.index}") == len(edge.readers)
    for member in plan.members:
        assert shown.count(member) == 1


@pytest.mark.parametrize("plan", PLANS)
def test_no_line_runs_through_a_box_and_nothing_leaves_the_page(plan: Plan) -> None:
    picture = draw(plan)
    root = ElementTree.fromstring(picture)
    width, height = float(root.get("width") or 0), float(root.get("height") or 0)
    for left, top, right, bottom in boxes(picture):
        assert (left > 0, top > 0, right < width, bottom < height) == (True,) * 4
        for x1, y1, x2, y2 in itertools.chain(*lines(picture)):
            assert not (x1 < right - 0.2 and x2 > left + 0.2 and y1 < bottom and y2 > top)
    for x1, y1, x2, y2 in itertools.chain(*lines(picture)):
        assert (x1 > 0, y1 > 0, x2 < width, y2 < height) == (True,) * 4


@pytest.mark.parametrize("plan", PLANS)
def test_boxes_do_not_overlap(plan: Plan) -> None:
    for a, b in itertools.combinations(boxes(draw(plan)), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


@pytest.mark.parametrize("plan", PLANS)
def test_draw_edges_do_not_overlap_vertically(plan: Plan) -> None:
    picture = draw(plan)
    of_edge = [edge.index for edge in plan.edges for _ in edge.readers]
    upright = [
        (edge, segment)
        for edge, segments in zip(of_edge, lines(picture), strict=True)
        for segment in segments
        if segment[0] == segment[2] and segment[1] != segment[3]
    ]
    for (edge_a, a), (edge_b, b) in itertools.combinations(upright, 2):
        if edge_a != edge_b and a[0] == b[0]:
            assert a[3] < b[1] or b[3] < a[1]


@pytest.mark.parametrize("plan", PLANS)
def test_lines_go_from_left_to_right(plan: Plan) -> None:
    for path in elements(draw(plan), "path"):
        if path.get("fill") == "none":
            across = [float(x) for x in re.findall(r"[MH]([\d.]+)", path.get("d") or "")]
            assert across == sorted(across)


def test_text_is_escaped_and_what_xml_lacks_is_replaced() -> None:
    names = ["<script>alert(1)</script>", 'a"b&c\x00\ud800']
    plan = make_plan([1, 2], [[INPUT], [0]], names=names, labels=["<b>.f", "g\x08"])
    picture = draw(plan, {0: [("<ring>", "</g>")]})
    assert elements(picture, "script") == []
    assert "<script" not in picture
    assert names[0] in titles(picture)
    assert 'a"b&c??' in titles(picture)
    assert "e0 <ring>" in texts(picture)
    picture.encode()


def test_it_needs_nothing_from_elsewhere() -> None:
    picture = draw(large_plan(0))
    assert "href" not in picture
    assert "url(" not in picture
    assert picture.count("http") == 1  # the namespace


def test_draw_moves_text_that_does_not_fit_to_the_title() -> None:
    method = "a_method_with_quite_a_long_name_" * 3
    plan = make_plan([1], [[INPUT]], names=["Actor"], labels=[f"Actor.{method}"])
    picture = draw(plan, {0: [("ring", "32 KiB"), ("link", "")]}, max_inflight=3)
    assert any(text.startswith("1. a_method") and text.endswith("...") for text in texts(picture))
    assert f"1. {method}(input)" in titles(picture)
    assert "e0: input, driver to Actor\nring: 32 KiB\nlink" in titles(picture)
    assert "e0 ring+link" in texts(picture)
    assert texts(picture)[0] == "graph of 1 actor, 1 call, 2 edges; at most 3 executions in flight"


def test_a_leaf_is_dashed() -> None:
    plan = make_plan([1], [[INPUT]])
    leaf = replace(plan, tasks=(replace(plan.tasks[0], leaf=True),))
    assert "dasharray" not in draw(plan)
    assert "dasharray" in draw(leaf)
    assert any("its result is dropped" in title for title in titles(draw(leaf)))


def test_a_plan_that_blocks_itself_is_drawn_too() -> None:
    plan = make_plan([1, 1], [[1], [INPUT]], order={1: [0, 1]}, exact_order=True)
    assert len(boxes(draw(plan))) == 4
