"""Picture of a plan: the SVG that `g.draw("graph.svg")` writes. Pure; `text` makes the text.

Each member has a lane, the driver's on top. A lane holds the member's calls from left to right, in the order in which
it runs them. A call stands to the right of all calls that it waits for. Edges run at right angles and never behind a
box:

    lane A   +------+  trunk                                        An edge leaves its box into the gap behind the
             | call |----+                                          column and runs up or down its own trunk there:
             +------+    |                                          straight into boxes of the next column; to other
    ---------------------|----------------------------------        boxes along a corridor at the top of their lane
    lane B   corridor    +---------------------+                    and down a riser in the gap before their column.
             +------+    |    +------+   riser |    +------+
             | ...  |    +--->| call |         +--->| call |
"""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from raylane.graph.inspect.text import Channels, arguments_text, expression_text, summary
from raylane.graph.plan.ir import DRIVER, INPUT, Edge, Plan
from raylane.graph.plan.schedule import reading_task

COLOURS = ("#1f5fa8", "#b3450f", "#1c7a3f", "#8a2f8a", "#a0201f", "#0f7480", "#6a5a00", "#4b4b4b")
FONT = "font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\""
MARGIN, HEAD = 16, 44
LANE_PADDING, TRACK, PORT = 12, 9, 15
"""Distances in pixels: lane border to content, two parallel lines, two ports of a box."""
LETTER, SMALL_LETTER = 7.4, 5.9
"""Maximum average widths of a letter in pixels, at font sizes of 12 and 10 pixels."""
BOX_WIDTHS = (84, 210)

ENTRY, EXIT = -1, -2
"""Numbers of the driver's two boxes (inputs and results), beside those of the tasks."""


@dataclass
class _Box:
    member: int
    column: int
    title: str
    detail: str
    dashed: bool = False
    ins: list[Edge] = field(default_factory=list)
    """Edges that end at this box, from top to bottom."""
    outs: list[Edge] = field(default_factory=list)
    """Edges that begin at this box, from top to bottom."""
    x: float = 0
    y: float = 0
    width: float = 0

    @property
    def height(self) -> float:
        return max(38, PORT * max(len(self.ins), len(self.outs)) + 8)

    def entry(self, edge: Edge) -> float:
        """Return the y coordinate at which an edge ends.

        Edges are spread evenly over the side, a little higher than those that leave, so that an edge that leaves a box
        does not overlap one that enters the next box.
        """
        return self.y + self.height * (self.ins.index(edge) + 0.5) / len(self.ins) - 3

    def exit(self, edge: Edge) -> float:
        """Return the y coordinate at which an edge begins."""
        return self.y + self.height * (self.outs.index(edge) + 0.5) / len(self.outs) + 3


def draw(plan: Plan, channels: Channels | None = None, *, max_inflight: int | None = None) -> str:
    """Return an SVG document of the graph, without scripts, style sheets or external fonts.

    Edges are labelled with their number and channel kinds. Text that does not fit is in the titles that viewers show
    under the mouse pointer.
    """
    ways = {edge.index: list((channels or {}).get(edge.index, ())) for edge in plan.edges}
    # Columns, then tracks, then coordinates: each step needs only those before it.
    boxes = _boxes(plan)
    page = _Page(plan, boxes, ways)
    lines = [line for edge in plan.edges for line in page.edge(edge)]
    width, height = round(page.width), round(page.height)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" {FONT} fill="#222">',
            f"<title>{_escaped(summary(plan, max_inflight))}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            _text(MARGIN, 27, summary(plan, max_inflight), 14),
            *page.lanes(),
            *lines,
            *(page.box(box) for box in boxes.values()),
            "</svg>\n",
        ]
    )


# Layout


def _boxes(plan: Plan) -> dict[int, _Box]:
    # The column of a task is the length of the longest path to it. Column 0 is the driver's.
    before = [{s for value in task.reads if (s := plan.values[value].source) != INPUT} for task in plan.tasks]
    for tasks in plan.order:
        for earlier, later in itertools.pairwise(tasks):
            before[later].add(earlier)
    columns = [1] * len(before)
    for _ in before:  # the longest possible path; a plan with cycles ends here too
        columns = [1 + max((columns[task] for task in earlier_tasks), default=0) for earlier_tasks in before]
    boxes = {}
    if plan.edges_from(DRIVER):
        boxes[ENTRY] = _Box(DRIVER, 0, "execute", "")
    for task in plan.tasks:
        place = plan.order[task.member].index(task.index) + 1
        method = plan.labels[task.index].removeprefix(f"{plan.members[task.member]}.")
        detail = f"({arguments_text(plan, task)})"
        boxes[task.index] = _Box(task.member, columns[task.index], f"{place}. {method}", detail, task.leaf)
    if plan.edges_to(DRIVER):
        last = max(columns, default=0) + 1
        boxes[EXIT] = _Box(DRIVER, last, "result", expression_text(plan, plan.output))
    for edge in sorted(plan.edges, key=lambda edge: (edge.writer, edge.index)):
        boxes[_begin(plan, edge)].outs.append(edge)
        for end in _ends(plan, edge):
            boxes[end].ins.append(edge)
    for box in boxes.values():
        box.outs.sort(key=lambda edge: (edge.readers[0], edge.index))
    return boxes


def _begin(plan: Plan, edge: Edge) -> int:
    source = plan.values[edge.value].source
    return ENTRY if source == INPUT else source


def _ends(plan: Plan, edge: Edge) -> list[int]:
    return [EXIT if reader == DRIVER else reading_task(plan, edge.index, reader) for reader in edge.readers]


class _Page:
    """Coordinates of all parts, in pixels."""

    def __init__(self, plan: Plan, boxes: dict[int, _Box], ways: dict[int, list[tuple[str, str]]]) -> None:
        self.plan = plan
        self.boxes = boxes
        self.ways = ways
        self.upright: dict[tuple[int, int], int] = {}
        """Track of each edge's trunk or riser, by (gap, edge). Gap c lies behind column c."""
        self.corridors: dict[tuple[int, int], int] = {}
        """Track of each edge's corridor at the top of a lane, by (member, edge)."""
        self._find_tracks()
        self.names = min(170.0, max(LETTER * len(name) for name in plan.members) + 2 * LANE_PADDING)
        self.width = self._place_columns() + LANE_PADDING + MARGIN
        self.tops = [0.0] * (len(plan.members) + 1)
        self.height = self._place_lanes() + MARGIN

    def _find_tracks(self) -> None:
        taken: dict[int, list[int]] = {}
        edges = sorted(self.plan.edges, key=lambda edge: self._source(edge).column)
        for edge in edges:  # trunks come before risers
            self._upright(self._source(edge).column, edge)
        for edge in edges:
            begin = self._source(edge).column
            far: dict[int, int] = {}
            for end in self._targets(edge):
                if end.column > begin + 1:
                    self._upright(end.column - 1, edge)
                    far[end.member] = max(far.get(end.member, 0), end.column)
            for member, column in far.items():
                until = taken.setdefault(member, [])  # last used column of each track of this lane
                free = next((track for track, last in enumerate(until) if last <= begin), len(until))
                until[free : free + 1] = [column]
                self.corridors[member, edge.index] = free

    def _upright(self, gap: int, edge: Edge) -> None:
        self.upright.setdefault((gap, edge.index), sum(1 for at, _ in self.upright if at == gap))

    def _place_columns(self) -> float:
        """Set x and width of all boxes. Return the x coordinate at which the last column ends."""
        self.first_track: dict[int, float] = {}
        x = MARGIN + self.names
        for column in range(1 + max(box.column for box in self.boxes.values())):
            boxes = [box for box in self.boxes.values() if box.column == column]
            widths = [max(LETTER * len(box.title), SMALL_LETTER * len(box.detail)) + 20 for box in boxes]
            width = min(max(*widths, BOX_WIDTHS[0]), BOX_WIDTHS[1]) if boxes else 0
            for box in boxes:
                box.x, box.width = x, width
            self.first_track[column] = x + width + 12
            tracks = sum(1 for gap, _ in self.upright if gap == column)
            arriving = [edge for box in self.boxes.values() if box.column == column + 1 for edge in box.ins]
            labels = max((SMALL_LETTER * len(self._label(edge)) for edge in arriving), default=0)
            x += width + 28 + TRACK * tracks + labels
        return max(box.x + box.width for box in self.boxes.values())

    def _place_lanes(self) -> float:
        """Set y of all lanes and boxes. Return the y coordinate at which the last lane ends."""
        y = float(HEAD)
        for member in range(len(self.plan.members)):
            self.tops[member] = y
            tracks = len({track for (lane, _), track in self.corridors.items() if lane == member})
            top = y + LANE_PADDING + TRACK * tracks
            boxes = [box for box in self.boxes.values() if box.member == member]
            for box in boxes:
                box.y = top
            y = top + max((box.height for box in boxes), default=0) + LANE_PADDING
        self.tops[-1] = y
        return y

    def _source(self, edge: Edge) -> _Box:
        return self.boxes[_begin(self.plan, edge)]

    def _targets(self, edge: Edge) -> list[_Box]:
        return [self.boxes[end] for end in _ends(self.plan, edge)]

    def _track_x(self, gap: int, edge: Edge) -> float:
        return self.first_track[gap] + TRACK * self.upright[gap, edge.index]

    def _label(self, edge: Edge) -> str:
        return _cut(
            " ".join([f"e{edge.index}", "+".join(dict.fromkeys(kind for kind, _ in self.ways[edge.index]))]), 24
        )

    # SVG elements

    def lanes(self) -> Iterable[str]:
        """Yield the elements of all lanes."""
        for member, name in enumerate(self.plan.members):
            top, bottom = self.tops[member], self.tops[member + 1]
            fill = "#f4f6f9" if member % 2 == 0 else "#fbfbf8"
            yield (
                f'<rect x="{MARGIN}" y="{top:.1f}" width="{self.width - 2 * MARGIN:.1f}" height="{bottom - top:.1f}" '
                f'fill="{fill}" stroke="#d5d9df"/>'
            )
            shown = _cut(name, int((self.names - LANE_PADDING) / LETTER))
            middle = (top + bottom) / 2 + 4
            yield f"<g><title>{_escaped(name)}</title>{_text(MARGIN + LANE_PADDING, middle, shown, 12, bold=True)}</g>"

    def edge(self, edge: Edge) -> Iterable[str]:
        """Yield the elements of an edge."""
        source = self._source(edge)
        colour = COLOURS[edge.index % len(COLOURS)]
        start = source.exit(edge)
        trunk = f"M{source.x + source.width:.1f} {start:.1f}H{self._track_x(source.column, edge):.1f}"
        readers = ", ".join(self.plan.members[reader] for reader in edge.readers)
        first = f"e{edge.index}: {self.plan.source_label(edge.value)}, {self.plan.members[edge.writer]} to {readers}"
        title = "\n".join([first, *(f"{kind}: {note}" if note else kind for kind, note in self.ways[edge.index])])
        yield f"<g><title>{_escaped(title)}</title>"
        for target in self._targets(edge):
            x, y = target.x, target.entry(edge)
            way = trunk
            if target.column > source.column + 1:
                corridor = self.tops[target.member] + LANE_PADDING + TRACK * self.corridors[target.member, edge.index]
                way += f"V{corridor:.1f}H{self._track_x(target.column - 1, edge):.1f}"
            yield f'<path d="{way}V{y:.1f}H{x - 6:.1f}" fill="none" stroke="{colour}" stroke-width="1.4"/>'
            yield f'<path d="M{x:.1f} {y:.1f}l-8 -3.5v7z" fill="{colour}"/>'
            yield _text(x - 11, y - 3, self._label(edge), 10, fill=colour, anchor="end")
        yield "</g>"

    def box(self, box: _Box) -> str:
        """Return the element of a box."""
        fill, stroke = ("#e9ecf1", "#8b95a5") if box.member == DRIVER else ("#e3eefb", "#5d8fc9")
        dash = ' stroke-dasharray="4 3"' if box.dashed else ""
        middle = box.y + box.height / 2
        lines = [_text(box.x + 9, middle - 2 if box.detail else middle + 4, _fitting(box.title, box, LETTER), 12)]
        if box.detail:
            lines.append(_text(box.x + 9, middle + 12, _fitting(box.detail, box, SMALL_LETTER), 10, fill="#555"))
        leaf = "\nno output needs it: its errors are reported, its result is dropped" if box.dashed else ""
        return (
            f"<g><title>{_escaped(f'{box.title}{box.detail}{leaf}')}</title>"
            f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height:.1f}" rx="4" '
            f'fill="{fill}" stroke="{stroke}"{dash}/>{"".join(lines)}</g>'
        )


def _fitting(text: str, box: _Box, letter: float) -> str:
    return _cut(text, int((box.width - 16) / letter))


def _cut(text: str, length: int) -> str:
    text = text.strip()
    return text if len(text) <= length else text[: max(1, length - 3)] + "..."


def _text(
    x: float, y: float, text: str, size: int, *, fill: str = "#222", anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>'
        f"{_escaped(text)}</text>"
    )


def _escaped(text: str) -> str:
    """Return text for an XML document. Characters that XML 1.0 (section 2.2) excludes become a question mark."""
    return html.escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text))
