"""Cases and goals of the benchmark `rl`. Pure; imports neither Ray nor torch.

queue      producers ──samples──> queue ──> consumers
loop       prompts ──> engine ──groups──> trainer ──weights──> engine
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks import measure
from benchmarks.goals import Goal

RAYLANE, MAPPED = "raylane", "raylane:mapped"
"""raylane's queue: samples are copied out of the shared memory, or lie in it until they are acknowledged."""
RAY_QUEUE, RAY_ACTOR, RAY_AHEAD = "ray:queue", "ray:actor", "ray:actor-ahead"
"""`ray.util.queue.Queue`; an actor with a list, called for one sample at a time; the same, with calls in flight."""
SYNC, ASYNC, PLAIN = "raylane:sync", "raylane:async", "ray:plain"
TRAINER, ENGINE = "trainer alone", "engine alone"
QUEUE, LOOP = "queue", "loop"
"""Workloads."""
QUEUES = (RAYLANE, MAPPED, RAY_QUEUE, RAY_ACTOR, RAY_AHEAD)
LOOPS = (SYNC, ASYNC, PLAIN, TRAINER, ENGINE)
PRODUCERS, CONSUMERS = 4, 2
QUEUE_FACTORS = {"queue-4KB": 5, "queue-4MB": 10}
"""Goal of raylane's queue: times the samples per second of the better one of RAY_QUEUE and RAY_ACTOR."""
LOOP_FACTOR = 1.3
"""Goal of the asynchronous loop: times the samples per second of the plain one."""
HALF_FACTOR = 0.9
"""Goal of the asynchronous loop: part of the samples per second of the slower half alone."""


@dataclass(frozen=True)
class Case:
    """One workload with its sizes and contenders."""

    name: str
    workload: str
    contenders: tuple[str, ...]
    nbytes: int = 0
    """Size of a sample of a queue, in bytes."""
    samples: int = 0
    """Number of samples of a queue in a full run, all rounds together."""
    reduced: int = 1
    """Divisor of `samples` for Ray's contenders, which are slower; times are those of one sample."""
    prompts: int = 64
    """Prompts of a step of a loop."""
    answers: int = 8
    """Answers to each prompt."""


class Blocks(NamedTuple):
    """Measurement blocks of a case."""

    rounds: int
    calls: int
    """Samples of a queue, or steps of a loop, in each round."""


CASES = {
    case.name: case
    for case in (
        Case("queue-4KB", QUEUE, QUEUES, nbytes=4096, samples=100_000, reduced=10),
        Case("queue-4MB", QUEUE, QUEUES, nbytes=4 << 20, samples=1000, reduced=5),
        Case("grpo-sort", LOOP, LOOPS),
    )
}


def cases(only: str | None) -> list[Case]:
    """Return the cases to run. ValueError names unknown cases and the known ones."""
    return measure.choose(CASES, only)


def blocks_of(case: Case, *, quick: bool) -> Blocks:
    """Return the blocks of raylane's contenders. `quick` is a test that the case runs."""
    if case.workload == LOOP:
        return Blocks(2, 1) if quick else Blocks(5, 4)
    return Blocks(2, case.samples // 100) if quick else Blocks(5, case.samples // 5)


def samples_of(case: Case, contender: str, blocks: Blocks) -> int:
    """Return the number of samples that a contender of a queue gets in each round: each process has equally many."""
    # Ray's ways take so long for each sample that as many of them would take minutes.
    count = blocks.calls if contender in (RAYLANE, MAPPED) else blocks.calls // case.reduced
    processes = PRODUCERS * CONSUMERS
    return max(1, count // processes) * processes


def rate(row: Mapping[str, Any]) -> float:
    """Return the samples per second of a record."""
    return float(row["samples_per_s"])


def goals(records: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Return the goals for which there are records."""
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in records:
        rows.setdefault(row["case"], {})[row["contender"]] = row
    return [goal for case, by_name in rows.items() for goal in (*queue_goals(case, by_name), *loop_goals(by_name))]


def queue_goals(case: str, rows: Mapping[str, Mapping[str, Any]]) -> list[Goal]:
    """Return the goal of a case of queues, from its records by contender."""
    # RAY_AHEAD is in the table only: the goal is against the calls that programs make, one sample at a time.
    others = [name for name in (RAY_QUEUE, RAY_ACTOR) if name in rows]
    if RAYLANE not in rows or not others or case not in QUEUE_FACTORS:
        return []
    best = max(others, key=lambda name: rate(rows[name]))
    factor = rate(rows[RAYLANE]) / rate(rows[best])
    return [Goal(case, f"samples/s, of the better of Ray's, {best}", factor, QUEUE_FACTORS[case], "x", True)]


def loop_goals(rows: Mapping[str, Mapping[str, Any]]) -> list[Goal]:
    """Return the goals of a case of loops, from its records by contender."""
    # Half of a loop cannot be faster alone than the loop with both halves at the same time, but for noise.
    reached = []
    if ASYNC in rows and PLAIN in rows:
        case, factor = rows[ASYNC]["case"], rate(rows[ASYNC]) / rate(rows[PLAIN])
        reached.append(Goal(case, "asynchronous samples/s, of the plain loop", factor, LOOP_FACTOR, "x", True))
    if ASYNC in rows and TRAINER in rows and ENGINE in rows:
        case, slower = rows[ASYNC]["case"], min((TRAINER, ENGINE), key=lambda name: rate(rows[name]))
        factor = rate(rows[ASYNC]) / rate(rows[slower])
        reached.append(Goal(case, f"asynchronous samples/s, of the {slower}", factor, HALF_FACTOR, "x", True))
    return reached
