"""Metrics of a run as series of a bounded number of points, and plots of them as SVG.

Only `draw` needs matplotlib, and imports it when it is called. Called by `page`.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_BLUE, _RED = "#3b6fb6", "#c0392b"
_SHADES = ("#d9a441", "#c0392b", "#3b6fb6")
_FEW = 60
"""Number of points up to which each point gets a dot."""
_SINGLE = {
    "train:lr": ("Learning rate", "learning rate"),
    "train:grad_norm": ("Gradient norm", "norm before clipping"),
    "train:tokens_per_s": ("Speed", "tokens/s"),
}


MAX_POINTS = 500
"""Number of points above which a series is thinned: more cannot be told apart in a plot."""
TIMES = {"train:data_time_s": "reading rows", "train:dispatch_time_s": "waiting", "train:compute_time_s": "computing"}
"""Metric -> its name in the report; the three add up to train:step_time_s."""

Records = Sequence[dict[str, float]]
"""Lines of metrics.jsonl, as `metrics.read_metrics` returns them."""


@dataclass(frozen=True)
class Series:
    """One metric over the steps, thinned: each point stands for the steps since the point before."""

    steps: list[float]
    """Last step of each group of steps."""
    mean: list[float]
    low: list[float]
    high: list[float]
    is_thinned: bool


def thin(records: Records, name: str, max_points: int = MAX_POINTS) -> Series | None:
    """Return a metric with at most `max_points` points, None if no record has a finite value of it."""
    points = [(record["step"], record[name]) for record in records if math.isfinite(record.get(name, math.nan))]
    if not points:
        return None
    count = min(max_points, len(points))
    # Integer division spreads the remainder, so groups differ by one step at most.
    edges = [number * len(points) // count for number in range(count + 1)]
    groups = [points[start:end] for start, end in pairwise(edges)]
    values = [[value for _, value in group] for group in groups]
    return Series(
        steps=[group[-1][0] for group in groups],
        mean=[statistics.fmean(group) for group in values],
        low=[min(group) for group in values],
        high=[max(group) for group in values],
        is_thinned=len(points) > count,
    )


def draw(series: Mapping[str, Series | None]) -> list[tuple[str, bytes]]:
    """Return (title, SVG) of each plot that has data. Text is drawn as shapes, so no font is needed to see it."""
    drawn = []
    losses = [
        (series.get(name), label, colour)
        for name, label, colour in (("train:loss", "training", _BLUE), ("val:loss", "held out", _RED))
    ]
    if any(line is not None for line, _, _ in losses):
        figure, axes = _axes("Loss", "loss (nats per token)")
        for line, label, colour in losses:
            if line is not None:
                _line(axes, line, colour, label)
        axes.legend()
        drawn.append(("Loss", _svg(figure)))
    for name, (title, label) in _SINGLE.items():
        line = series.get(name)
        if line is not None:  # metrics of other versions may lack it
            figure, axes = _axes(title, label)
            _line(axes, line, _BLUE, None)
            drawn.append((title, _svg(figure)))
    times = [series.get(name) for name in TIMES]
    parts = [line for line in times if line is not None]
    # Stacking needs the same steps in all parts; a record has all three times or none.
    if len(parts) == len(TIMES) and all(line.steps == parts[0].steps for line in parts):
        figure, axes = _axes("Time of a step", "seconds")
        axes.stackplot(parts[0].steps, *(line.mean for line in parts), labels=list(TIMES.values()), colors=_SHADES)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))  # beside the plot: the areas fill all of it
        drawn.append(("Time of a step", _svg(figure)))
    return drawn


def _axes(title: str, label: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    return figure, axes


def _line(axes: Any, series: Series, colour: str, label: str | None) -> None:
    marker = "o" if len(series.steps) <= _FEW else None
    axes.plot(series.steps, series.mean, color=colour, label=label, marker=marker, markersize=3, linewidth=1.2)
    # Means hide spikes; the band shows the range within each group of steps.
    if series.is_thinned:
        axes.fill_between(series.steps, series.low, series.high, color=colour, alpha=0.2, linewidth=0)


def _svg(figure: Any) -> bytes:
    buffer = io.BytesIO()
    # Without these entries the file would name its creator and the time of drawing.
    figure.savefig(buffer, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    return buffer.getvalue()
