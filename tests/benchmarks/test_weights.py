from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.weights import actors as weights_actors
from benchmarks.weights import run as weights
from benchmarks.weights.actors import BucketReceiver, BucketSender, NumpySender, Reader, StoreReceiver, StoreSender
from benchmarks.weights.cases import (
    BLOCKED,
    COPIED,
    DIGESTS,
    MAPPED,
    MEMCPY,
    MOVED,
    MOVERS,
    RANKS,
    RAYLANE,
    STORE,
    Case,
    Region,
    cases,
    goals,
    grouped,
    rounds_of,
)
from benchmarks.weights.contenders import unavailable
from tests.benchmarks.quick import quick_run

FIELDS = {"case", "contender", "n", "p50_us", "p90_us", "p99_us", "min_us", "first_us", "cpu_s", "peak_bytes"}


def tiny(workload: str, contenders: Sequence[str] = (RAYLANE, MEMCPY), readers: int = 1, parts: int = 1) -> Case:
    return Case(f"{workload}-tiny", workload, 6, 8, tuple(contenders), readers, parts)


@pytest.fixture(autouse=True)
def folders_are_removed() -> Iterator[None]:
    """Fail if a benchmark leaves its folder. Without raylane in its name: tests beside this one look for such names."""
    before = set(Path("/dev/shm").glob("weights-bench-*"))
    yield
    assert not set(Path("/dev/shm").glob("weights-bench-*")) - before


def test_cases_have_the_sizes_that_they_name() -> None:
    for case in cases(large=True, only=None):
        nbytes = 1e9 if case.name.endswith("1GB") else 1e8
        assert 0.99 * nbytes < case.nbytes <= nbytes
        assert case.tensors == (10_000 if case.name.endswith("10000") else 300)
        assert RAYLANE in case.contenders
    assert [case.name for case in cases(large=False, only="move-4-100MB")] == ["move-4-100MB"]
    with pytest.raises(ValueError, match="unknown cases move-1-1GB; the cases are publish-100MB"):
        cases(large=False, only="move-1-1GB")


def test_groups_keep_large_cases_apart() -> None:
    names = [[case.name for case in group] for group in grouped(cases(large=True, only=None))]
    assert ["publish-100MB", "publish-100MB-10000"] in names
    assert ["publish-1GB"] in names
    assert ["move-2-100MB"] in names
    for group in grouped(cases(large=True, only=None)):
        assert rounds_of(group, quick=True) < rounds_of(group, quick=False)


def test_common_region_of_two() -> None:
    assert Region(0, 4, 8, 4).common(Region(4, 0, 4, 8)) == Region(4, 4, 4, 4)
    assert Region(0, 0, 4, 8).common(Region(4, 0, 4, 8)).rows == 0
    assert Region(4, 4, 4, 4).within(Region(4, 0, 4, 8)) == (slice(0, 4), slice(4, 8))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    "way", [(StoreSender, StoreReceiver), (NumpySender, StoreReceiver), (BucketSender, BucketReceiver)]
)
@pytest.mark.parametrize("bucket_bytes", [300, 1 << 20])
def test_readers_get_what_ranks_send(
    parts: int, way: tuple[Any, Any], bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_actors, "BUCKET_BYTES", bucket_bytes)
    case = tiny(MOVED, readers=2, parts=parts)
    senders = [way[0](case, rank, weights_actors.shards_of(case, rank), "") for rank in range(RANKS)]
    for number in range(2):
        reader = Reader(way[1], case, number, "")
        reader.receive(*(sender.send(number % parts) for sender in senders))
        reader.check(0)
        with pytest.raises(RuntimeError, match=f"reader of part {number % parts}: layers.0.weight differs"):
            reader.check(1)


def test_parts_of_fused_parameters_share_memory() -> None:
    parameters = weights_actors.parameters_of(tiny(MOVED, readers=2, parts=2), 1)
    storages = [parameters[f"layers.{i}.weight"].untyped_storage().data_ptr() for i in range(6)]
    assert storages[0] == storages[1] == storages[2] != storages[4] == storages[5]
    assert parameters["layers.3.weight"].shape == (8, 4)
    assert parameters["layers.0.weight"].shape == (4, 8)


def row(case: str, contender: str, p50_us: float, **more: float) -> dict[str, Any]:
    return {"case": case, "contender": contender, "p50_us": p50_us, **more}


def test_goals_compare_raylane_with_the_others() -> None:
    records = [
        row("publish-100MB", RAYLANE, 30.0),
        row("publish-100MB", MEMCPY, 10.0),
        row("publish-100MB", DIGESTS, 45.0),
        row("publish-100MB-10000", RAYLANE, 45.0),
        row("publish-100MB-10000", MEMCPY, 30.0),
        row("copy-100MB", RAYLANE, 30.0, planning_share=0.05),
        row("copy-100MB", MEMCPY, 30.0),
        row("map-4-100MB", RAYLANE, 6000.0, gained_share=0.0),
        row("move-1-100MB", RAYLANE, 10.0),
        row("move-1-100MB", STORE, 99.0),
        row("move-1-100MB", "gloo:broadcast", 50.0),
    ]
    reached = [(goal.case, goal.value, goal.reached) for goal in goals(records)]
    assert reached == [
        ("publish-100MB", 3.0, False),
        ("publish-100MB", 1.5, True),
        ("publish-100MB-10000", 1.5, True),
        ("publish-100MB-10000", 1.5, True),
        ("copy-100MB", 1.0, True),
        ("copy-100MB", 5.0, False),
        ("map-4-100MB", 6.0, False),
        ("map-4-100MB", 0.0, True),
        ("move-1-100MB", 5.0, True),
        ("move-1-100MB", 9.9, False),
    ]
    text = [str(goal) for goal in goals(records)]
    assert text[0].endswith("3.00 x    at most 1.5  missed  (memcpy: 10.0 us)")
    assert "faster than the best other, gloo:broadcast" in text[-2]


def test_torchstore_is_left_out_with_a_reason() -> None:
    assert unavailable(RAYLANE) is None
    assert "libcuda" in (unavailable("torchstore") or "")


def test_unknown_case_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match="benchmarks: unknown cases move; the cases are publish-100MB"):
        main(["weights", "--only", "move"])


@pytest.mark.ray
def test_pauses_of_trainer_and_readers_are_measured(cluster: None) -> None:
    contenders = RAYLANE, DIGESTS, MEMCPY
    records = weights.run_group([tiny(BLOCKED, contenders), tiny(COPIED, contenders)], quick=True)
    records += weights.run_group([tiny(MAPPED, [RAYLANE], readers=2, parts=2)], quick=True)
    assert [(record["case"], record["contender"]) for record in records] == [
        *((f"{workload}-tiny", contender) for workload in (BLOCKED, COPIED) for contender in contenders),
        ("map-tiny", RAYLANE),
    ]
    for record in records:
        assert record["n"] == (6 if record["case"] == "map-tiny" else 3)
        assert 0 < record["min_us"] <= record["p50_us"] <= record["p99_us"]
        assert set(record["peak_bytes"]) >= {"rank 0", "rank 1", "reader 0", "service 0", "service 1"}
    assert 0 <= records[3]["planning_share"] < 1
    assert len(records[6]["gained_bytes"]) == 2
    assert len(goals(records)) == 7
    assert "goals\npublish-tiny" in weights.table(records)


@pytest.mark.slow
@pytest.mark.ray
def test_all_contenders_move_weights_of_other_layouts(cluster: None) -> None:
    records = weights.run_group([tiny(MOVED, MOVERS, readers=2, parts=2)], quick=True)
    names = {record["contender"] for record in records}
    assert names == {name for name in MOVERS if unavailable(name) is None}
    assert len(names) >= 5


@pytest.mark.slow
@pytest.mark.processes
def test_a_quick_run_writes_what_it_should(tmp_path: Path) -> None:
    report, printed = quick_run("weights", "copy-100MB", tmp_path / "deep" / "weights.json")
    records = report["records"]
    assert [record["case"] for record in records] == ["copy-100MB"] * 3
    for record in records:
        assert set(record) - {"planning_share"} == FIELDS
    assert "of a memcpy of the reader's bytes" in printed


def test_matrices_of_two_steps_differ_everywhere() -> None:
    case = tiny(MOVED)
    assert bool((weights_actors.matrix(case, 1, 2) - weights_actors.matrix(case, 1, 1) == torch.ones(8, 8)).all())
