"""A worker is killed in the middle of training, and the losses go on. Run `python examples/killed_worker.py`."""

import os
import signal

import ray
import torch
import torch.distributed as dist

from raylane import CompiledWorkerGroup, WorkerOptions
from raylane.errors import WorkerLostError


class Trainer:
    def __init__(self):
        self.weight, self.losses = torch.zeros(8), []
        dist.init_process_group("gloo")

    def on_regroup(self, rank, world):  # in workers that live: a new process group, and all else is still there
        dist.init_process_group("gloo")

    def state(self):
        return len(self.losses), os.getpid()

    def copy_from(self, source):
        state = [self.weight, self.losses]
        dist.broadcast_object_list(state, source)
        self.weight, self.losses = state

    def step(self):
        seed = 1000 * len(self.losses) + dist.get_rank()
        rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))
        error = rows @ (self.weight - torch.arange(8.0))
        both = torch.cat([rows.T @ error / 64, error.square().mean()[None]])
        dist.all_reduce(both)
        self.weight -= 0.1 * both[:8] / dist.get_world_size()
        self.losses.append(round(float(both[8]) / dist.get_world_size(), 1))
        return self.losses


ray.init(ignore_reinit_error=True, log_to_driver=False)
with CompiledWorkerGroup(Trainer, 3, options=WorkerOptions(num_cpus=0.5)) as group:
    losses, victim = [], 1
    while len(losses) < 12:
        try:
            if len(losses) == 6 and victim is not None:
                _, pid = group.call("state").results()[victim]
                victim = os.kill(pid, signal.SIGKILL)  # None: only once
            losses = group.call("step").results()[0]
        except WorkerLostError as error:
            print(str(error).split(",")[0])
            print("started again:", group.recover())
            # Some may have ended the step in which the other one died: all copy from one that is furthest.
            steps = [done for done, _ in group.call("state").results()]
            group.call("copy_from", steps.index(max(steps))).results()
    print("losses:", *losses)
