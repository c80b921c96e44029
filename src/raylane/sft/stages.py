"""Division of a model into pipeline stages: which worker holds which layers, and in which order a stage works.

    4 stages on 2 workers   stage 0, layers 0-1, worker 0      stage 1, layers 2-3, worker 1
                            stage 2, layers 4-5, worker 0      stage 3, layers 6-7, worker 1

Pure functions without torch. Called by `layout`, `build` and `edges`; `stage_modules` carries the division out.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["INTERLEAVED", "Action", "actions", "layer_ranges", "own_stages", "stages_per_worker"]

INTERLEAVED = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Schedules with several stages on each worker."""


class Action(NamedTuple):
    """One piece of work of a stage: the forward or the backward pass of one micro-batch."""

    forward: bool
    micro_batch: int


def stages_per_worker(schedule: str, wanted: int | None) -> int:
    """Return the number of stages that each worker holds."""
    return wanted or (2 if schedule in INTERLEAVED else 1)


def own_stages(worker: int, workers: int, per_worker: int) -> list[int]:
    """Return the numbers of the stages of a worker: every `workers`-th one."""
    return [worker + i * workers for i in range(per_worker)]


def layer_ranges(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage; the first stages get one more layer if the numbers do not divide."""
    share, more = divmod(layers, stages)
    ends = [share * (i + 1) + min(i + 1, more) for i in range(stages)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def actions(schedule: str, stage: int, stages: int, micro_batches: int) -> list[Action]:
    """Return the work of one stage in order, for the schedules `gpipe` and `1f1b` (arXiv 1811.06965, 2104.04473)."""
    ahead = micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)
    order = [Action(True, i) for i in range(ahead)]
    for i in range(micro_batches):
        order.append(Action(False, i))
        if ahead + i < micro_batches:
            order.append(Action(True, ahead + i))
    return order
