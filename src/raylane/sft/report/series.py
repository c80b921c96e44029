"""Metrics of a run as series of a bounded number of points, for plots and tables. Pure; used by `page`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["MAX_POINTS", "TIMES", "Records", "Series", "thin"]

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
