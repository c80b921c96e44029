"""Runs that lose a worker: the workers start again from the last checkpoint, and the losses are those of no failure."""

from __future__ import annotations

import os
import re
import signal

import pytest
from tests.process_tools import stop

from raylane.errors import WorkerCallError
from raylane.sft.run import trainer
from raylane.sft.run.policy import SftPolicy
from raylane.training.report.metrics import read_metrics, read_notes
from sft import tiny_run

STEPS = 16


def config_in(folder, name, changes=None):
    places = {"checkpointing.checkpoint_dir": str(folder / name / "saved"), "logger.log_dir": str(folder / name)}
    sizes = {"cluster.num_workers": 2, "sft.max_num_steps": STEPS, "checkpointing.save_period": 5}
    return tiny_run.config_of(folder, {**sizes, **places, **(changes or {})})


def losses(config):
    lines = read_metrics(f"{config.logger.log_dir}/metrics.jsonl")
    return [(int(line["step"]), line["train:loss"]) for line in lines if "train:loss" in line]


def kill_at(monkeypatch, steps, rank=1):
    """Kill a worker each time when the result of one of these steps is about to be read."""
    read, left = trainer.Trainer._read_oldest, list(steps)

    def kill_then_read(self):
        if left and self._in_flight[0][0] == left[0]:
            left.pop(0)
            pid = self.policy.group.call("process_id", ranks=[rank]).results(60)[0]
            # A step is under way when the worker dies: the signal stops it first.
            stop(pid)
            self._in_flight.append((self.done, self._send()))
            os.kill(pid, signal.SIGKILL)
        read(self)

    monkeypatch.setattr(trainer.Trainer, "_read_oldest", kill_then_read)


@pytest.fixture(scope="module")
def unbroken(ray_session, folder):
    config = config_in(folder, "unbroken", {"policy.compiled_graph.mode": "off"})
    trainer.run(config)
    return losses(config)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["required", "off"])
def test_killed_worker_leaves_the_loss_curve_as_it_was(unbroken, folder, monkeypatch, mode):
    config = config_in(folder, mode, {"policy.compiled_graph.mode": mode})
    kill_at(monkeypatch, [2, 8], rank=1)
    result = trainer.run(config)
    assert result.steps == STEPS
    assert losses(config) == unbroken, "bit for bit, and each step once"
    first, second = [text for _, text in read_notes(f"{config.logger.log_dir}/metrics.jsonl")]
    assert "rank 1 died" in first
    assert first.endswith("Starting the workers again from the first step, as no checkpoint was saved (1 of 2)")
    assert "step_5 (1 of 2)" in second, "the checkpoint at step 5 began a new count"


@pytest.mark.claim("fine-tuning", "a run that loses workers goes on from memory with the losses of an unbroken one")
@pytest.mark.faults
@pytest.mark.slow
def test_killed_worker_costs_the_steps_since_the_snapshot(unbroken, folder, monkeypatch):
    """Each rank in turn; only its process is new, and no checkpoint is read."""
    config = config_in(folder, "snapshots", {"sft.snapshot_every": 3, "checkpointing.save_period": 0})
    kill_at(monkeypatch, [4, 7, 13], rank=0)
    pids = []
    recover = SftPolicy.recover

    def recover_and_note(self):
        new = recover(self)
        pids.append((new, self.group.call("process_id").results(60)))
        return new

    monkeypatch.setattr(SftPolicy, "recover", recover_and_note)
    result = trainer.run(config)
    assert result.steps == STEPS
    assert losses(config) == unbroken, "bit for bit, and each step once"
    notes = [text for _, text in read_notes(f"{config.logger.log_dir}/metrics.jsonl")]
    told = re.compile(
        r"rank 0 died .* The process of rank 0 was started again, .* from step (\d+) in memory: [0-5] recorded"
    )
    assert all(told.search(text) for text in notes), notes
    steps = [int(told.search(text)[1]) for text in notes]
    assert len(steps) == 3
    assert steps == sorted(step for step in steps if step % 3 == 0 and step > 0)
    assert [new for new, _ in pids] == [(0,)] * 3
    assert len({found[0] for _, found in pids}) == 3
    assert len({found[1] for _, found in pids}) == 1, "the other process stays"


@pytest.mark.slow
def test_compiled_run_has_the_losses_of_plain_calls(unbroken, folder):
    """With batches from the driver; those read by workers are in the test above."""
    config = config_in(folder, "driver", {"policy.compiled_graph.mode": "required", "sft.feed": "driver"})
    trainer.run(config)
    assert losses(config) == unbroken, "bit for bit"


def test_step_over_its_limit_names_the_setting(ray_session, folder):
    changes = {"cluster.num_workers": 1, "sft.step_timeout_s": 60}
    config = config_in(folder, "late", changes)
    with SftPolicy(config, tiny_run.prepared_in(folder), 4) as policy:
        pid = policy.group.call("process_id", ranks=[0]).results(60)[0]
        policy._config = config_in(folder, "late", {**changes, "sft.step_timeout_s": 0.5})
        stop(pid)
        future = policy.train_step_nowait(0)
        with pytest.raises(WorkerCallError, match=r"sft.step_timeout_s=0.5 seconds on ranks \[0\]. Raise sft.step"):
            policy.result(future)
        os.kill(pid, signal.SIGCONT)
        policy._config = config
        assert policy.result(future)["loss"] > 0, "nothing was lost"


def test_graphs_that_cannot_be_used_are_noted_in_the_metrics(ray_session, folder):
    changes = {"cluster.num_workers": 1, "sft.max_num_steps": 1, "policy.compiled_graph.inflight": 1 << 40}
    config = config_in(folder, "fallback", changes)
    trainer.run(config)
    (note,) = read_notes(f"{config.logger.log_dir}/metrics.jsonl")
    assert "plain Ray calls instead of compiled graphs: GraphPlanError: cannot create the channels" in note[1]
