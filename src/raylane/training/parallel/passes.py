"""Order of the work of a pipeline whose stages exchange tensors over the edges of a compiled graph.

    1f1b, 2 workers, 3 micro-batches     worker 0   F0 F1 B0 F2 B1 B2
                                         worker 1   F0 B0 F1 B1 F2 B2

Pure functions without torch. `passes_of_step` is called by `policy`; `step.EdgeStep` runs the passes in the workers.
Sources of the schedules: gpipe arXiv 1811.06965, 1f1b and its interleaved form arXiv 2104.04473.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from raylane.training.parallel.mesh import ParallelDims
from raylane.workers.dispatch import Pass


class Work(NamedTuple):
    """Forward or backward pass of one micro-batch through one stage."""

    forward: bool
    stage: int
    micro_batch: int


def worker_order(schedule: str, worker: int, workers: int, per_worker: int, micro_batches: int) -> list[Work]:
    """Return the work of one worker, in order. Interleaved: `micro_batches` must be a multiple of `workers`."""
    total = micro_batches * per_worker
    forward = [_nth(i, True, worker, workers, per_worker) for i in range(total)]
    backward = [_nth(i, False, worker, workers, per_worker) for i in range(total)]
    if schedule == "gpipe":
        return forward + backward
    # Forward passes before the first backward pass: the last worker begins at once, an earlier one has to wait until
    # the first micro-batch has gone through all later workers and back.
    ahead = workers - worker - 1
    if per_worker > 1:
        ahead = 2 * ahead + (per_worker - 1) * workers
    ahead = min(ahead, total)
    order = forward[:ahead]
    for i in range(total):
        order += [*forward[ahead + i : ahead + i + 1], backward[i]]
    return order


def _nth(i: int, forward: bool, worker: int, workers: int, per_worker: int) -> Work:
    """Return the i-th forward or backward pass of a worker."""
    if per_worker == 1:
        return Work(forward, worker, i)
    # `workers` micro-batches go through one stage of the worker, then through its next one, and so on.
    group, place = divmod(i, workers * per_worker)
    turn, micro_batch = divmod(place, workers)
    local_stage = turn if forward else per_worker - 1 - turn
    return Work(forward, worker + local_stage * workers, group * workers + micro_batch)


@functools.cache
def passes_of_step(schedule: str, dims: ParallelDims, per_worker: int, micro_batches: int) -> tuple[Pass, ...]:
    """Return the passes of one step on all workers: forward and backward passes, and the end of the step on each."""
    stages = dims.pp * per_worker
    passes: list[Pass] = []
    # Workers with equal places on all other axes form a pipeline of their own.
    for pipeline in dims.groups("pp"):
        waiting = [worker_order(schedule, worker, dims.pp, per_worker, micro_batches) for worker in range(dims.pp)]
        at: dict[Work, int] = {}  # position of every pass in `found`
        while any(waiting):
            before = len(at)
            for worker, order in enumerate(waiting):
                # As far as this worker gets with what the others have computed up to here.
                while order and (needs := _source(order[0], stages)) in (None, *at):
                    work = order.pop(0)
                    method = "forward_pass" if work.forward else "backward_pass"
                    args = (work.stage // dims.pp, work.micro_batch)
                    at[work] = len(passes)
                    passes.append(Pass(pipeline[worker], method, args, None if needs is None else at[needs]))
            assert len(at) > before, f"{schedule} waits for itself: {waiting}"
    return (*passes, *(Pass(rank, "end_step", ()) for rank in range(dims.world)))


def _source(work: Work, stages: int) -> Work | None:
    """Return the pass of another stage whose result a pass needs; None if there is none."""
    stage = work.stage - 1 if work.forward else work.stage + 1
    return work._replace(stage=stage) if 0 <= stage < stages else None
