from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.sft import peers as sft_peers
from benchmarks.sft import run as sft
from benchmarks.sft.cases import CASES, blocks_of, cases, group_by_workers
from benchmarks.sft.contenders import batch
from benchmarks.sft.workers import StepWorker
from tests.benchmarks.quick import quick_run

FIELDS = {"case", "contender", "n", "p50_us", "p90_us", "p99_us", "min_us", "first_us", "cpu_s", "step_us", "work_us"}
WAYS = ["rpc", "compiled", "ray:compiled", "loop"]


def test_cases_and_who_takes_part() -> None:
    assert sorted(CASES) == [
        *("noop-2-worker-fed", "noop-4-worker-fed", "noop-8-driver-fed", "noop-8-worker-fed"),
        *("peers", "step20ms-2-driver-fed", "step20ms-2-worker-fed", "train-1", "train-2"),
    ]
    for case in CASES.values():
        if case.work == "peers":
            continue
        assert list(case.contenders) == [*WAYS, *(["plain"] if case.work == "train" else [])]
        assert case.name.endswith(f"-{case.workers}" if case.work == "train" else f"-{case.workers}-{case.feed}-fed")
    with pytest.raises(ValueError, match="unknown cases train-3; the cases are noop-8-worker-fed"):
        cases("train-3")


def test_cases_with_the_same_workers_share_them() -> None:
    together = [[case.name for case in several] for several in group_by_workers(cases(None))]
    assert ["noop-8-worker-fed", "noop-8-driver-fed"] in together
    assert ["noop-2-worker-fed", "step20ms-2-worker-fed", "step20ms-2-driver-fed"] in together
    assert ["train-2"] in together


def test_quick_blocks_are_short() -> None:
    for case in CASES.values():
        quick, full = blocks_of(case, quick=True), blocks_of(case, quick=False)
        assert quick.rounds * quick.steps < 10 < full.rounds * full.steps


def test_a_batch_of_one_worker_has_64_kb() -> None:
    assert sum(tensor.numel() * tensor.element_size() for tensor in batch().values()) == 64 * 1024


def test_step_worker_keeps_the_time_of_each_step() -> None:
    threads = torch.get_num_threads()
    try:
        worker = StepWorker()
        worker.repeat(max(1, worker.calibrate(0.001)))
        assert worker.step(3)["step"] == worker.feed(batch(), 3)["step"] == 3
        times, tokens = worker.steps(4, 2)
        assert times == sorted(times)
        assert (len(times), tokens) == (3, 2048.0)
        assert len(worker.take_times()) == 4
        assert worker.take_times() == []
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_table_compares_with_the_loop_and_with_plain() -> None:
    zeros = dict.fromkeys(("p90_us", "min_us", "first_us", "cpu_s"), 1.0)
    record = {"n": 4, "p99_us": 2.0, "work_us": 20_000.0, **zeros}
    step, train = "step20ms-2-worker-fed", "train-2"
    text = sft.table(
        [
            {**record, "case": step, "contender": "compiled", "p50_us": 1.0, "step_us": 20_200.0},
            {**record, "case": step, "contender": "loop", "p50_us": 1.0, "step_us": 20_000.0},
            {**record, "case": train, "contender": "compiled", "p50_us": 1.0, "step_us": 9.0, "tokens_per_s": 950.0},
            {**record, "case": train, "contender": "plain", "p50_us": 1.0, "step_us": 9.0, "tokens_per_s": 1000.0},
        ]
    )
    assert f"{step} compiled: 20.20 ms a step, 20.00 ms of it work; +1.0% against the loop" in text
    assert f"{train} compiled: 950 tokens/s, 0.950 of plain" in text


def test_an_unknown_case_is_answered_with_those_there_are() -> None:
    with pytest.raises(SystemExit, match="benchmarks: unknown cases noop; the cases are noop-8-worker-fed"):
        main(["sft", "--only", "noop"])


@pytest.mark.slow
@pytest.mark.processes
def test_a_quick_run_writes_what_it_should(tmp_path: Path) -> None:
    only = "step20ms-2-driver-fed,train-1"
    report, printed = quick_run("sft", only, tmp_path / "deep" / "sft.json")
    assert report["quick"] is True
    records = report["records"]
    for name in only.split(","):
        found = [record["contender"] for record in records if record["case"] == name]
        assert sorted(found) == sorted(CASES[name].contenders)
    for record in records:
        assert set(record) == (FIELDS | {"tokens_per_s"} if CASES[record["case"]].trains else FIELDS)
        # Without a driver nothing is left of a step that does not compute.
        assert 0 <= record["min_us"] <= record["p50_us"] <= record["p90_us"] <= record["p99_us"]
        assert record["n"] > 0
        assert record["step_us"] >= record["p50_us"] * 0.5
    assert "against the loop" in printed
    assert "of plain" in printed


def test_table_of_peers_compares_rounds_and_losses() -> None:
    def record(name: str, rate: float, loss: float, number: int) -> dict[str, object]:
        measured = {"tokens_per_s": rate, "losses": [2.0, loss], "peak_mb": 100.0}
        return {"case": "peers-packed", "contender": name, "round": number, **measured}

    records = [record("raylane", 300.0, 1.5, 0), record("trl", 100.0, 1.25, 0)]
    records += [record("trl", 200.0, 1.25, 1), record("raylane", 400.0, 1.5, 1)]
    lines = sft.table(records).splitlines()
    assert lines[0] == "peers-packed raylane: 350 tokens/s (300 to 400), 100 MB"
    assert lines[1].endswith("raylane is 2.00 to 3.00 times as fast, losses differ by 2.5e-01")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.matrix if i else []) for i, name in enumerate(sft_peers.LAYOUTS)],
)
def test_losses_equal_those_of_the_hugging_face_trainer(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setattr(sft_peers, "NEEDS", {name: sft_peers.NEEDS[name] for name in ("raylane", "transformers")})
    ours, theirs = sft_peers.run(quick=True, layouts=[layout])
    assert len(ours["losses"]) == len(theirs["losses"]) == sft_peers.QUICK_STEPS
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
    assert min(ours["tokens_per_s"], theirs["tokens_per_s"], ours["peak_mb"], theirs["peak_mb"]) > 0
