"""Picture of a plan as Mermaid text, which GitHub, documentation sites and editors show. Pure; `text` makes the text.

    flowchart LR
      subgraph m1["Worker#1"]      a box for each actor, with its calls in their order
        t0["1. echo(input)"]
      end
      execute --"e0 ring"--> t0    an arrow for each reader of an edge

Syntax: https://mermaid.js.org/syntax/flowchart.html, read in November 2026.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from raylane.graph.inspect.text import Channels, arguments_text, expression_text, method_label, summary
from raylane.graph.plan.ir import DRIVER, INPUT, Plan
from raylane.graph.plan.schedule import reading_task

ENDINGS = (".md", ".mmd")
LONGEST = 80
"""Most letters of a box; the rest is cut off."""
_ESCAPED = '"#&<>`\\'
"""Letters that mean something within quotes of Mermaid, or in the HTML that it makes of them."""


def write(path: str | Path, plan: Plan, channels: Channels | None = None, *, max_inflight: int | None = None) -> None:
    """Write a plan as Mermaid text: in a fence for a file that ends in .md, bare for one in .mmd.

    ValueError for any other ending.
    """
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise ValueError(
            f"draw: {path.name!r} ends in neither .md nor .mmd. raylane writes Mermaid text, which GitHub and editors "
            f"show: name the file {path.with_suffix('.md').name!r}"
        )
    picture = draw(plan, channels, max_inflight=max_inflight)
    path.write_text(f"```mermaid\n{picture}```\n" if path.suffix == ".md" else picture)


def draw(plan: Plan, channels: Channels | None = None, *, max_inflight: int | None = None) -> str:
    """Return a flowchart: members with their calls in order, and edges with their numbers and channel kinds.

    A call whose result is dropped is dashed.
    """
    lines = [f"%% {summary(plan, max_inflight)}", "flowchart LR"]
    for member in range(1, len(plan.members)):
        boxes = [
            f"    t{index}{_box(f'{place}. {method_label(plan, task)}({arguments_text(plan, task)})')}"
            for place, index in enumerate(plan.order[member], 1)
            for task in [plan.tasks[index]]
        ]
        lines += [f"  subgraph m{member}{_box(plan.members[member])}", *boxes, "  end"]
    lines += [f"  execute(({_quoted('execute')}))"] if plan.edges_from(DRIVER) else []
    lines += [f"  result(({_quoted(f'result: {expression_text(plan, plan.output)}')}))"]
    for edge in plan.edges:
        source = plan.values[edge.value].source
        begin = "execute" if source == INPUT else f"t{source}"
        label = _quoted(f"e{edge.index} {'+'.join(kind for kind, _ in (channels or {}).get(edge.index, ()))}".strip())
        ends = ["result" if r == DRIVER else f"t{reading_task(plan, edge.index, r)}" for r in edge.readers]
        lines += [f"  {begin} --{label}--> {end}" for end in ends]
    # Without an arrow: calls of an actor that exchange nothing still follow each other.
    lines += [f"  t{a} ~~~ t{b}" for tasks in plan.order for a, b in itertools.pairwise(tasks)]
    lines += [f"  style t{task.index} stroke-dasharray: 4" for task in plan.tasks if task.leaf]
    return "\n".join(lines) + "\n"


def _box(text: str) -> str:
    return f"[{_quoted(text)}]"


def _quoted(text: str) -> str:
    """Return text in quotes: letters that Mermaid or HTML would read as their numbers, those without a form as ?."""
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
    return '"' + "".join(f"#{ord(c)};" if c in _ESCAPED else c if c.isprintable() else "?" for c in text) + '"'
