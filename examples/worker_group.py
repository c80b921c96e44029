"""Worker group: four workers on two axes. A batch is split along one axis and replicated along the other.

Run with `python examples/worker_group.py`; no GPU is needed.
"""

from __future__ import annotations

import os

import ray
import torch
import torch.distributed as dist

from raylane import BatchDict, NamedSharding, WorkerGroup, WorkerOptions


class Summer:
    """Worker class without any Ray code, so that it can also be used and tested alone."""

    def __init__(self, scale: int) -> None:
        self.scale = scale
        dist.init_process_group("gloo")  # the worker group has set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE

    def total(self, data: BatchDict, note: str) -> str:
        mine = data["ids"].sum() * self.scale
        everyone = mine.clone()
        dist.all_reduce(everyone)
        return f"rank {os.environ['RANK']}: {note} {data['ids'].tolist()} -> {int(mine)} of {int(everyone)}"

    def leave(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


def main() -> list[str]:
    """Return the results of the two workers that send one."""
    axes = NamedSharding.of(data=2, copy=2)  # ranks 0 to 3; the last axis varies fastest
    options = WorkerOptions(num_cpus=0.5, env_vars={"OMP_NUM_THREADS": "1"})
    batch = BatchDict({"ids": torch.arange(8)})
    with WorkerGroup(Summer, axes, init_kwargs={"scale": 10}, options=options) as group:
        future = group.call(  # returns at once
            "total",
            shard=["data"],  # each data coordinate gets another entry of the list `data`
            replicate=["copy"],  # both copies get the same entry
            one_result=["copy"],  # only copy 0 sends its result back
            common={"note": "rows"},
            data=batch.shard(2),
        )
        results: list[str] = future.results(timeout=60)
        group.shutdown(cleanup_method="leave")
    return results


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False)
    print(*main(), sep="\n")
