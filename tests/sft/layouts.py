"""Layouts of parallel training that tests compare with one process, and the choice of those that every change runs.

The full matrix is every layout with and without packing. Continuous integration runs a covering set: each axis, each
pair of axes, each axis with and without packing, and each pipeline schedule stand in at least one case of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any, TypeVar

import pytest

TP, CP, PP = "tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"
EP = "expert_parallel_size"
REPLICAS, SCHEDULE = "dp_replicate_size", "pipeline_schedule"
FSDP = {"shard_parameters": "always"}
SP = {"sequence_parallel": True}

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    # Number of workers, settings
    "dp2": (2, {}),
    "fsdp2": (2, FSDP),
    "tp2": (2, {TP: 2}),
    "tp2-sp": (2, {TP: 2, **SP}),
    "cp2": (2, {CP: 2}),
    "pp2": (2, {PP: 2}),
    "pp2-gpipe": (2, {PP: 2, SCHEDULE: "gpipe"}),
    "pp2-interleaved": (2, {PP: 2, SCHEDULE: "interleaved_1f1b"}),
    "pp2-zero-bubble": (2, {PP: 2, SCHEDULE: "interleaved_zero_bubble"}),
    "dp4": (4, {}),
    "fsdp4": (4, FSDP),
    "hsdp2x2": (4, {REPLICAS: 2, **FSDP}),
    "cp4": (4, {CP: 4}),
    "dp2-tp2": (4, {TP: 2, **SP}),
    "dp2-cp2": (4, {CP: 2}),
    "dp2-pp2": (4, {PP: 2}),
    "tp2-cp2": (4, {TP: 2, CP: 2, **SP}),
    "tp2-pp2": (4, {TP: 2, PP: 2, **SP}),
    "cp2-pp2": (4, {CP: 2, PP: 2}),
    "pp2-dp2-cp2-tp2": (16, {PP: 2, CP: 2, TP: 2, **SP}),
}

C = TypeVar("C")
Case = tuple[str, bool]
"""Name of a layout, and True if conversations are packed into rows."""

MATRIX: list[Case] = [(name, packing) for name in LAYOUTS for packing in (True, False)]
QUICK: list[Case] = [("tp2-pp2", True), ("dp2-cp2", True), ("hsdp2x2", True)]
"""Cases of four workers that together use every axis; `make test` runs these."""


def in_matrix(*cases: Any) -> list[Any]:
    """Return parameters of a test, tuples for several, that only `make test-matrix` runs."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.matrix) for case in cases]


def axes_of(layout: str) -> set[str]:
    """Return the ways in which a layout divides the work."""
    world, settings = LAYOUTS[layout]
    sizes = {"tp": settings.get(TP, 1), "cp": settings.get(CP, 1), "pp": settings.get(PP, 1)}
    axes = {axis for axis, size in sizes.items() if size > 1}
    if world > sizes["tp"] * sizes["cp"] * sizes["pp"]:
        axes.add("dp")
    if "shard_parameters" in settings:
        axes.add("fsdp")
    if REPLICAS in settings:
        axes.add("replicas")
    if settings.get("sequence_parallel"):
        axes.add("sp")
    return axes


def features_of(case: Case) -> set[tuple[str, ...]]:
    """Return what a case covers: axes, pairs of axes, axes with its packing, and its pipeline schedule."""
    layout, packing = case
    axes = sorted(axes_of(layout))
    features: set[tuple[str, ...]] = {(axis,) for axis in axes} | set(combinations(axes, 2))
    features |= {(axis, "packed" if packing else "unpacked") for axis in axes}
    if "pp" in axes:
        features.add(("schedule", LAYOUTS[layout][1].get(SCHEDULE, "1f1b")))
    if "tp" in axes and "sp" not in axes:
        features.add(("tp without sp",))
    return features


def features(cases: Iterable[Case]) -> set[tuple[str, ...]]:
    """Return everything that these cases cover together."""
    return {feature for case in cases for feature in features_of(case)}


def covering_set(
    cases: list[C], first: list[C], features_of: Callable[[C], set[Any]], workers_of: Callable[[C], int]
) -> list[C]:
    """Return `first` and, again and again, the case with most features that are still missing."""
    chosen = list(first)
    missing = {feature for case in cases for feature in features_of(case)}
    missing -= {feature for case in chosen for feature in features_of(case)}
    while missing:
        useful = [case for case in cases if missing & features_of(case)]
        # Sixteen workers take minutes on two cores, and four longer than two: only for what nothing else covers.
        best = max(
            useful, key=lambda case: (workers_of(case) <= 4, len(missing & features_of(case)), -workers_of(case))
        )
        chosen.append(best)
        missing -= features_of(best)
    return chosen


COVERING = covering_set(MATRIX, QUICK, features_of, lambda case: LAYOUTS[case[0]][0])
