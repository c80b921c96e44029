"""Plots of a run's report, drawn with matplotlib as SVG. Imported by `page` only if matplotlib is installed."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from raylane.sft.report.series import TIMES, Series

__all__ = ["draw"]

_BLUE, _RED = "#3b6fb6", "#c0392b"
_SHADES = ("#d9a441", "#c0392b", "#3b6fb6")
_FEW = 60
"""Number of points up to which each point gets a dot."""
_SINGLE = {
    "train:lr": ("Learning rate", "learning rate"),
    "train:grad_norm": ("Gradient norm", "norm before clipping"),
    "train:tokens_per_s": ("Speed", "tokens/s"),
}


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
