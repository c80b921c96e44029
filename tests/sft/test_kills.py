"""Kills of ranks of `raylane sft` at any moment: the losses are those of runs that lost nobody, to the bit."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest
import ray

from raylane.sft.run import trainer
from raylane.training.report.metrics import read_metrics, read_notes
from sft import tiny_run

KILLS = int(os.environ.get("RAYLANE_KILLS", "2"))
"""Number of kills: hundreds of them are for `make faults`, not for continuous integration."""
KILLS_OF_RUN = 4
STEPS = 24
LATEST_KILL_S = 1.0
"""Seconds after the result of a step was read: later than that, often, the run has recovered or has gone on."""
AXIS = "policy.dtensor_cfg."
LAYOUTS = {
    "fsdp2": {"cluster.num_workers": 2, AXIS + "shard_parameters": "always"},
    "tp": {"cluster.num_workers": 2, AXIS + "tensor_parallel_size": 2},
    "pp": {"cluster.num_workers": 2, AXIS + "pipeline_parallel_size": 2},
    "dp": {"cluster.num_workers": 2},
    "hsdp": {"cluster.num_workers": 4, AXIS + "dp_replicate_size": 2, AXIS + "shard_parameters": "always"},
}


def config_in(folder, name, layout, changes=None):
    places = {"checkpointing.checkpoint_dir": str(folder / name / "saved"), "logger.log_dir": str(folder / name)}
    return tiny_run.config_of(folder, {"sft.max_num_steps": STEPS, **LAYOUTS[layout], **places, **(changes or {})})


def losses_of(config):
    trainer.run(config)
    lines = read_metrics(f"{config.logger.log_dir}/metrics.jsonl")
    return [(int(line["step"]), line["train:loss"]) for line in lines if "train:loss" in line]


class Killer:
    """Kills random ranks of a run, each some time after the result of a random step was read."""

    def __init__(self, draw, kills):
        self._draw, self._steps = draw, sorted(draw.sample(range(STEPS - 1), kills))
        self._threads, self._ended = [], threading.Event()
        self.killed = 0

    def step_was_read(self, group, step):
        if self._steps and step >= self._steps[0]:
            self._steps.pop(0)
            delay_s, rank = self._draw.uniform(0, LATEST_KILL_S), self._draw.randrange(group.size)
            self._threads.append(threading.Thread(target=self._kill, args=(group, rank, delay_s)))
            self._threads[-1].start()
        if step == STEPS - 1:
            self.join()

    def _kill(self, group, rank, delay_s):
        self._ended.wait(delay_s)
        while True:
            try:
                pid = ray.get(group._actors[rank].__ray_call__.remote(lambda _: os.getpid()), timeout=30)
                os.kill(pid, signal.SIGKILL)
                self.killed += 1
                return
            except (ray.exceptions.RayError, ProcessLookupError, IndexError):  # it is being started
                if self._ended.wait(0.05):
                    return

    def join(self):
        self._ended.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(120 + 30 * KILLS)
def test_kills_at_any_moment_leave_the_losses_as_they_were(cluster, folder, monkeypatch):
    draw, unbroken, left, run, notes = random.Random(KILLS), {}, KILLS, 0, []
    killers = []
    read = trainer.Trainer._read_oldest

    def read_and_tell(self):
        step = self._in_flight[0][0]
        read(self)
        killers[-1].step_was_read(self.policy.group, step)

    while left > 0:
        layout = tuple(LAYOUTS)[run % len(LAYOUTS)]
        if layout not in unbroken:
            unbroken[layout] = losses_of(config_in(folder, f"unbroken {layout}", layout))
        changes = {"sft.snapshot_every": draw.choice([1, 3, 5]), "sft.max_restarts": KILLS_OF_RUN + 1}
        changes["cluster.spare_workers"] = draw.choice([0, 1])
        changes["checkpointing.save_period"] = draw.choice([0, 7])
        config = config_in(folder, f"run {run}", layout, changes)
        killers.append(Killer(draw, min(left, KILLS_OF_RUN)))
        with monkeypatch.context() as patch:
            patch.setattr(trainer.Trainer, "_read_oldest", read_and_tell)
            try:
                found = losses_of(config)
            finally:
                killers[-1].join()
        assert found == unbroken[layout], f"{layout} {changes}: bit for bit, and each step once"
        notes += [text for _, text in read_notes(f"{config.logger.log_dir}/metrics.jsonl")]
        left, run = left - killers[-1].killed, run + 1
    assert sum(killer.killed for killer in killers) == KILLS
    assert all("died" in note or "has ended" in note for note in notes), notes
    in_memory = sum(" in memory" in note for note in notes)
    print(f"{KILLS} kills in {run} runs; {len(notes)} times a run went back, {in_memory} of them in memory")
