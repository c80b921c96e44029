"""Four workers on two axes: cut a batch along one, copy it along the other, and get one result per shard.

Run it with `python examples/worker_group.py`; it needs no GPU.
"""

from __future__ import annotations

import os

import ray
import torch
import torch.distributed as dist

from raylane import BatchDict, NamedSharding, WorkerGroup, WorkerOptions


class Summer:
    """A plain class: it knows nothing of Ray and can be used, and tested, without it."""

    def __init__(self, scale: int) -> None:
        self.scale = scale
        dist.init_process_group("gloo")  # joins the group's own store: MASTER_ADDR and MASTER_PORT are set

    def total(self, data: BatchDict, note: str) -> str:
        mine = data["ids"].sum() * self.scale
        everyone = mine.clone()
        dist.all_reduce(everyone)
        return f"rank {os.environ['RANK']}: {note} {data['ids'].tolist()} -> {int(mine)} of {int(everyone)}"

    def leave(self) -> None:
        dist.barrier()
        dist.destroy_process_group()


def main() -> list[str]:
    """What the two workers that return said."""
    axes = NamedSharding.of(data=2, copy=2)  # ranks 0..3; the last axis varies fastest
    options = WorkerOptions(num_cpus=0.5, env_vars={"OMP_NUM_THREADS": "1"})
    batch = BatchDict({"ids": torch.arange(8)})
    with WorkerGroup(Summer, axes, init_kwargs={"scale": 10}, options=options) as group:
        future = group.run_all_workers_sharded_data(  # sends, and does not wait
            "total",
            in_sharded_axes=["data"],  # each data coordinate gets its own entry of the list
            replicate_on_axes=["copy"],  # both copies get the same one
            output_is_replicated=["copy"],  # and only copy 0 sends its result back
            common_kwargs={"note": "rows"},
            data=batch.shard(2),
        )
        said: list[str] = group.get_all_worker_results(future, timeout_s=60)
        group.shutdown(cleanup_method="leave")
    return said


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False)
    print(*main(), sep="\n")
