"""Loss curve of a run: an HTML page with an SVG drawing, and a PNG if matplotlib is installed.

Reads metrics.jsonl, so the curve can be drawn during a run and long after it. The page is self-contained: no scripts,
fonts or style sheets from elsewhere. Called by the trainer at the end.
"""

from __future__ import annotations

import html
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from raylane.errors import DataError
from raylane.sft.metrics import METRICS_FILE, read_metrics

__all__ = ["loss_curve", "svg", "ticks"]

Points = Sequence[tuple[float, float]]
COLOURS = {"train:loss": "#3b6fb6", "val:loss": "#c0392b"}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 440, 60, 20, 40, 46


def loss_curve(run_dir: str | Path) -> Path:
    """Draw train:loss and val:loss of the metrics.jsonl in `run_dir`; return the path of the drawing.

    loss.html is always written. The result is loss.png if matplotlib is installed, otherwise loss.html. DataError if
    there is no loss to draw.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir / METRICS_FILE)
    points = {
        name: [(record["step"], record[name]) for record in records if math.isfinite(record.get(name, math.nan))]
        for name in COLOURS
    }
    series = {name: values for name, values in points.items() if values}
    if not series:
        raise DataError(f"cannot draw a loss curve: {run_dir / METRICS_FILE} holds no train:loss and no val:loss")
    page = run_dir / "loss.html"
    page.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Loss</title></head>\n'
        f'<body style="max-width:{WIDTH}px;margin:2em auto">\n{svg(series)}\n</body></html>\n',
        encoding="utf-8",
    )
    if importlib.util.find_spec("matplotlib") is None:
        return page
    return _png(series, run_dir / "loss.png")


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return about `count` round numbers that span [low, high]: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def svg(series: dict[str, list[tuple[float, float]]]) -> str:
    """Return the drawing: steps to the right, loss upwards, one line per series, dots on a series of few points."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    # A single point has no extent; widen the ranges so that the divisions below are defined.
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    margin = 0.05 * (max(ys) - min(ys)) or 0.5
    y_low, y_high = min(ys) - margin, max(ys) + margin

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">']
    for y in ticks(y_low, y_high):
        _, down = at(x_low, y)
        parts.append(f'<path d="M{LEFT} {down:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{down + 4:.1f}" text-anchor="end" font-size="12">{y:g}</text>')
    for x in ticks(x_low, x_high, 8):
        across, _ = at(x, y_low)
        parts.append(
            f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" font-size="12">{x:g}</text>'
        )
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle" font-size="13">step</text>')
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    parts.append(
        f'<text x="14" y="{middle:g}" text-anchor="middle" font-size="13" transform="rotate(-90 14 {middle:g})">'
        "loss (nats per token)</text>"
    )
    for number, (name, points) in enumerate(series.items()):
        parts += _line(name, [at(x, y) for x, y in points], number, points[-1][1])
    return "\n".join([*parts, "</svg>"])


def _line(name: str, places: Points, number: int, last: float) -> list[str]:
    colour = COLOURS.get(name, "#555")
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    parts = [f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>']
    if len(places) <= 60:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
    label = html.escape(f"{name} (last {last:.4f})")
    parts.append(f'<text x="{LEFT + 10 + 240 * number}" y="22" font-size="13" fill="{colour}">{label}</text>')
    return parts


def _png(series: dict[str, list[tuple[float, float]]], path: Path) -> Path:
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    picture = Figure(figsize=(8.6, 4.4), layout="constrained")
    axes = picture.subplots()
    for name, points in series.items():
        marker = "o" if len(points) <= 60 else None
        axes.plot(*zip(*points, strict=True), label=name, color=COLOURS.get(name), marker=marker, markersize=3)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    picture.savefig(path, dpi=120)
    return path
