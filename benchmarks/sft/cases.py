"""Cases of the benchmark `sft` as values: workers, feed, work of a step, contenders, and number of steps.

Pure: nothing is started here; `sft` runs the cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from benchmarks import measure
from benchmarks.goals import Ratio, faster

RPC, COMPILED, RAY, LOOP, PLAIN = "rpc", "compiled", "ray:compiled", "loop", "plain"
_ALL_WAYS = (RPC, COMPILED, RAY, LOOP)


@dataclass(frozen=True)
class Case:
    """One measurement: `workers` workers make one step after the other."""

    name: str
    workers: int
    feed: Literal["worker", "driver"] = "worker"
    """worker: the driver sends a step number; driver: it sends a batch of 64 KB to each worker."""
    work: Literal["noop", "step20ms", "train", "peers"] = "noop"
    """Work of a step: none, matrix products of about 20 ms on one thread, or a training step of a small model; "peers":
    whole runs, against other trainers (`sft_peers`)."""
    in_flight: int = 1
    """Number of steps that the driver has sent and not yet read.

    With 1, a sample is the overhead of a step: the time from sending it to reading its metrics, less the longest work
    of a worker in it. Otherwise steps overlap with their orders, as in a training run, and a sample is the time from
    one result to the next.
    """
    contenders: tuple[str, ...] = _ALL_WAYS

    @property
    def trains(self) -> bool:
        """True if a step is one of training."""
        return self.work == "train"


@dataclass(frozen=True)
class Blocks:
    """Measurement blocks of a case: each contender runs `rounds` blocks of `steps` steps, each after a warm-up."""

    rounds: int
    steps: int
    warm_steps: int


_TRAIN = (*_ALL_WAYS, PLAIN)
# In this order the cases with the same workers follow each other, and the most important ones come first.
_ALL = [
    Case("noop-8-worker-fed", 8),
    Case("noop-8-driver-fed", 8, "driver"),
    Case("noop-2-worker-fed", 2),
    Case("step20ms-2-worker-fed", 2, work="step20ms", in_flight=2),
    Case("step20ms-2-driver-fed", 2, "driver", work="step20ms", in_flight=2),
    Case("noop-4-worker-fed", 4),
    Case("train-1", 1, work="train", in_flight=2, contenders=_TRAIN),
    Case("train-2", 2, work="train", in_flight=2, contenders=_TRAIN),
    Case("peers", 1, work="peers", contenders=()),
]
CASES = {case.name: case for case in _ALL}

_STEP, _RATE = ("step_us", "step_us"), ("tokens_per_s", "tokens_per_s")
GOALS = [
    faster("noop-8-worker-fed", "overhead, less than that of rpc", RPC, COMPILED, 15),
    faster("noop-8-driver-fed", "overhead, less than that of rpc", RPC, COMPILED, 12),
    *(
        Ratio(f"noop-{workers}-worker-fed", "50 us for each worker", (COMPILED,), "", workers / 20)
        for workers in (2, 4, 8)
    ),
    *(
        Ratio(f"step20ms-2-{feed}-fed", "a step, of the loop", (COMPILED,), LOOP, 1.02, figures=_STEP)
        for feed in ("worker", "driver")
    ),
    Ratio("train-1", "tokens per second, of plain torch", (COMPILED,), PLAIN, 0.97, at_least=True, figures=_RATE),
    Ratio("train-2", "tokens per second, of plain torch", (COMPILED,), PLAIN, 0.9, at_least=True, figures=_RATE),
]


def cases(only: str | None) -> list[Case]:
    """Return the cases to run. ValueError names unknown cases and the known ones."""
    return measure.choose(CASES, only)


def group_by_workers(cases: Iterable[Case]) -> list[list[Case]]:
    """Return the cases grouped by the workers that they need: one set of processes serves all cases of a group."""
    groups: dict[tuple[int, str], list[Case]] = {}
    for case in cases:
        # `repeat` turns the worker of a no-op into that of a 20 ms step, so both share their processes.
        groups.setdefault((case.workers, case.work if case.trains else ""), []).append(case)
    return list(groups.values())


def blocks_of(case: Case, *, quick: bool) -> Blocks:
    """Return the blocks of a case. `quick` is a test that the case runs; its results are not meaningful."""
    if quick:
        return Blocks(2, 4, 1)
    # Short blocks: the speed of a shared machine changes within seconds, and each round compares all contenders.
    if case.trains:  # about 160 ms a step
        return Blocks(8, 6, 1)
    return Blocks(8, 25, 3) if case.work == "step20ms" else Blocks(8, 100, 20)
