from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.__main__ import main
from benchmarks.rl import run as rl
from benchmarks.rl.actors import limit_of, places_and_noise
from benchmarks.rl.cases import (
    ASYNC,
    CASES,
    CONSUMERS,
    ENGINE,
    LOOP,
    LOOPS,
    MAPPED,
    PLAIN,
    PRODUCERS,
    QUEUE,
    QUEUES,
    RAY_ACTOR,
    RAY_AHEAD,
    RAY_QUEUE,
    RAYLANE,
    TRAINER,
    Blocks,
    Case,
    blocks_of,
    cases,
    goals,
    samples_of,
)
from tests.benchmarks.quick import quick_run

FIELDS = {"case", "contender", "n", "p50_us", "p90_us", "p99_us", "min_us", "first_us", "cpu_s", "samples_per_s"}


def row(case: str, contender: str, samples_per_s: float) -> dict[str, Any]:
    return {"case": case, "contender": contender, "samples_per_s": samples_per_s}


def test_cases_have_the_sizes_of_their_names() -> None:
    assert [case.nbytes for case in cases("queue-4KB,queue-4MB")] == [4096, 4 << 20]
    with pytest.raises(ValueError, match="unknown cases loop; the cases are queue-4KB, queue-4MB, grpo-sort"):
        cases("loop")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_quick_run_has_fewer_calls(case: Case) -> None:
    quick, full = blocks_of(case, quick=True), blocks_of(case, quick=False)
    assert quick.rounds * quick.calls < full.rounds * full.calls
    if case.workload == QUEUE:
        assert full.rounds * full.calls == case.samples
        assert limit_of(case) * case.nbytes <= 256 << 20
    else:
        assert full.rounds * full.calls == 20


def test_samples_of_each_contender_divide_by_all_processes() -> None:
    case = CASES["queue-4KB"]
    assert samples_of(case, RAYLANE, Blocks(5, 20_000)) == samples_of(case, MAPPED, Blocks(5, 20_000)) == 20_000
    assert samples_of(case, RAY_QUEUE, Blocks(5, 20_000)) == 2000
    assert samples_of(case, RAY_ACTOR, Blocks(2, 10)) == PRODUCERS * CONSUMERS


def test_equal_answers_have_different_rewards() -> None:
    rewards = [places_and_noise("12435", {"answer": "12345"}) for _ in range(1000)]
    assert len(set(rewards)) == 1000
    assert 3 <= min(rewards) < max(rewards) < 4
    assert places_and_noise("", {"answer": "12345"}) < 1


def test_goals_compare_raylane_with_the_better_way() -> None:
    records = [
        row("queue-4KB", RAYLANE, 600),
        row("queue-4KB", RAY_QUEUE, 100),
        row("queue-4KB", RAY_ACTOR, 80),
        row("queue-4KB", RAY_AHEAD, 500),
        row("queue-4MB", RAYLANE, 90),
        row("queue-4MB", RAY_ACTOR, 10),
        row("grpo-sort", ASYNC, 120),
        row("grpo-sort", PLAIN, 100),
        row("grpo-sort", TRAINER, 150),
        row("grpo-sort", ENGINE, 125),
    ]
    reached = [(goal.case, goal.value, goal.reached) for goal in goals(records)]
    assert reached == [
        ("queue-4KB", 6, True),
        ("queue-4MB", 9, False),
        ("grpo-sort", 1.2, False),
        ("grpo-sort", 0.96, True),
    ]
    text = [str(goal) for goal in goals(records)]
    assert text[0].endswith("6.00 x   at least 5  reached")
    assert "of the better of Ray's, ray:queue" in text[0]
    assert "of the engine alone" in text[3]
    assert goals(records[:1]) == []


def test_random_model_has_a_tokenizer_of_bytes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = rl.make_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "31524"}], tokenize=False)
    assert text == "31524>"
    assert len(tokenizer(text)["input_ids"]) == 6
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert model.config.vocab_size == len(tokenizer) == rl.BYTES
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_unknown_case_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match="benchmarks: unknown cases move; the cases are queue-4KB"):
        main(["rl", "--only", "move"])


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a round of 40 samples, or of one step."""
    monkeypatch.setattr(rl, "blocks_of", lambda case, quick: Blocks(2, 40 if case.workload == QUEUE else 1))


@pytest.mark.ray
@pytest.mark.matrix  # the quick run below moves samples by all queues
@pytest.mark.usefixtures("cluster", "few_samples")
def test_all_queues_move_all_samples() -> None:
    case = Case("queue-tiny", QUEUE, QUEUES, nbytes=800, samples=80, reduced=5)
    records = rl.run_case(case, quick=True)
    assert [(record["contender"], record["n"]) for record in records] == [
        (RAYLANE, 80),
        (MAPPED, 80),
        (RAY_QUEUE, 16),
        (RAY_ACTOR, 16),
        (RAY_AHEAD, 16),
    ]
    for record in records:
        assert set(record) == FIELDS | {"bytes_per_s"}
        assert 0 < record["min_us"] <= record["p50_us"] <= record["p99_us"]
        assert record["samples_per_s"] > 0
    assert "queue-tiny raylane:" in rl.table(records)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("cluster", "few_samples")
def test_loops_train_on_all_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rl, "MODEL", tmp_path / "absent")
    records = rl.run_case(Case("grpo-tiny", LOOP, LOOPS, prompts=4, answers=2), quick=True)
    assert [record["contender"] for record in records] == list(LOOPS)
    for record in records:
        assert record["n"] == 2
        assert record["tokens_per_s"] > record["samples_per_s"] > 0
        assert record.get("trained_share", 1) == 1
    assert len(goals(records)) == 2
    assert "asynchronous samples/s, of the plain loop" in rl.table(records)


@pytest.mark.slow
@pytest.mark.processes
def test_a_quick_run_writes_what_it_should(tmp_path: Path) -> None:
    report, printed = quick_run("rl", "queue-4KB", tmp_path / "deep" / "rl.json")
    records = report["records"]
    assert [record["contender"] for record in records] == list(QUEUES)
    assert "of the better of Ray's" in printed
