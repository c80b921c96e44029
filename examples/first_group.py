"""First steps, part 4: two workers, each with one half of a batch.

Run with `python examples/first_group.py`; no GPU is needed.
"""

import ray
import torch

from raylane import BatchDict, NamedSharding, WorkerGroup, WorkerOptions


class Summer:  # an ordinary class: no decorator, no Ray
    def __init__(self, scale):
        self.scale = scale

    def total(self, data):
        return float(data["rows"].sum()) * self.scale


ray.init(ignore_reinit_error=True)  # starts Ray, unless it runs already
axes = NamedSharding.of(data=2)  # one axis named "data", with two ranks
batch = BatchDict({"rows": torch.arange(8)})

with WorkerGroup(Summer, axes, init_kwargs={"scale": 10}, options=WorkerOptions(num_cpus=1)) as group:
    future = group.call("total", shard=["data"], data=batch.shard(2))
    print(future.results(timeout=60))
