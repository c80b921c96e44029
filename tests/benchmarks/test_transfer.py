from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.transfer import run as transfer
from benchmarks.transfer.cases import cases, grouped
from tests.benchmarks.quick import quick_run

FIELDS = {"case", "contender", "n", "p50_us", "p90_us", "p99_us", "min_us", "first_us", "cpu_s"}


def test_cases() -> None:
    names = [case.name for case in cases(large=False, only=None)]
    assert names[:4] == ["4B", "4B-new", "4KB", "4KB-new"]
    assert {
        "100MB-new",
        "100MB-mapped",
        "get-into-64MiB-shared",
        "fanout-8-64MiB",
        "small-10000x4KB",
        "submit-starting",
    } <= set(names)
    assert [case.name for case in cases(large=True, only="1GB,tcp-1GB")] == ["1GB", "tcp-1GB"]
    on_gpus = cases(large=True, only=None, cuda=True)
    assert all(case.cuda for case in on_gpus)
    assert {"4KB-cuda", "1MB-cuda-new", "1GB-cuda"} <= {case.name for case in on_gpus}
    with pytest.raises(ValueError, match="unknown cases 2GB; the cases are 4B"):
        cases(large=False, only="2GB")


def test_groups_share_actors_only_where_they_can() -> None:
    groups = grouped(cases(large=True, only=None))
    for group in groups:
        assert len({(case.workload, case.starting, case.contenders) for case in group}) == 1
    assert sorted(case.name for group in groups for case in group) == sorted(
        case.name for case in cases(large=True, only=None)
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_cuda_cases_need_a_gpu() -> None:
    with pytest.raises(SystemExit, match="--cuda needs a GPU that torch can use"):
        transfer.run(cases(large=False, only="4KB-cuda", cuda=True), quick=True)


@pytest.mark.processes  # matplotlib asks another program for its fonts on the first run of a machine
def test_picture_has_a_line_for_each_contender(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record = {"contender": "raylane:auto", "p50_us": 10.0}
    transfer.draw([record | {"case": "4B"}, record | {"case": "1MB"}, record | {"case": "1MB-new"}], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="cases of tensor sizes, such as 4B"):
        transfer.draw([record | {"case": "submit"}], tmp_path / "b.png")


@pytest.mark.slow
@pytest.mark.processes
def test_a_quick_run_writes_what_it_should(tmp_path: Path) -> None:
    report, printed = quick_run("transfer", "4B,get-into-64MiB", tmp_path / "deep" / "bench.json")
    assert report["machine"]["cores"] > 0
    assert report["versions"]["ray"]
    contenders = {record["contender"] for record in report["records"]}
    assert contenders >= {"raylane:auto", "raylane:tcp", "ray:object_store", "ray:rdt-gloo"}
    for record in report["records"]:
        assert set(record) == FIELDS
        assert 0 < record["min_us"] <= record["p50_us"] <= record["p90_us"] <= record["p99_us"]
    assert {record["case"] for record in report["records"]} == {"4B", "get-into-64MiB"}
    assert "x faster" in printed
