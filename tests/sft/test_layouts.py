"""The covering set of layouts: what continuous integration trains stands for the full matrix."""

from __future__ import annotations

from itertools import combinations

from sft.layouts import COVERING, LAYOUTS, MATRIX, QUICK, axes_of, covering_set, features, features_of

AXES = {"dp", "fsdp", "replicas", "tp", "sp", "cp", "pp"}


def test_covering_set_has_every_axis_with_and_without_packing() -> None:
    for packing in (True, False):
        assert set().union(*(axes_of(layout) for layout, packed in COVERING if packed is packing)) == AXES


def test_covering_set_has_every_pair_of_axes_of_the_matrix() -> None:
    def pairs(cases: list[tuple[str, bool]]) -> set[tuple[str, str]]:
        return {pair for layout, _ in cases for pair in combinations(sorted(axes_of(layout)), 2)}

    assert pairs(COVERING) == pairs(MATRIX)
    assert {("cp", "dp"), ("cp", "pp"), ("cp", "tp"), ("dp", "pp"), ("dp", "tp"), ("pp", "tp")} <= pairs(MATRIX)


def test_covering_set_has_every_schedule_on_few_workers() -> None:
    schedules = {
        LAYOUTS[layout][1].get("pipeline_schedule", "1f1b") for layout, _ in COVERING if "pp" in axes_of(layout)
    }
    assert schedules == {"1f1b", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble"}
    assert max(LAYOUTS[layout][0] for layout, _ in COVERING) == 4


def test_covering_set_is_smaller_than_half_of_the_matrix() -> None:
    assert features(COVERING) == features(MATRIX)
    assert len(set(COVERING)) == len(COVERING) <= len(MATRIX) / 3
    assert COVERING[: len(QUICK)] == QUICK


def test_covering_set_of_one_case_is_that_case() -> None:
    assert covering_set([("dp2", True)], [], features_of, lambda case: 2) == [("dp2", True)]
