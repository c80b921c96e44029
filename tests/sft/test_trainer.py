"""Whole runs on a real Ray: a run that is stopped, killed and resumed gives the losses of one that never was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import yaml

from raylane.errors import WorkerLostError
from raylane.sft.run import trainer
from raylane.training.checkpoint import folders
from raylane.training.config.load import dump
from raylane.training.report.metrics import read_metrics
from raylane.training.report.page import escape, read_facts
from sft import tiny_run

STEPS = 60
WORKERS = {"cluster.num_workers": 2, "sft.max_num_steps": STEPS, "checkpointing.save_period": 5}


def config_in(folder, name, changes=None):
    places = {"checkpointing.checkpoint_dir": str(folder / name / "saved"), "logger.log_dir": str(folder / name)}
    return tiny_run.config_of(folder, {**WORKERS, **places, **(changes or {})})


def losses(config):
    lines = read_metrics(f"{config.logger.log_dir}/metrics.jsonl")
    return {int(line["step"]): line["train:loss"] for line in lines if "train:loss" in line}


@pytest.fixture(scope="module")
def uninterrupted(ray_session, folder):
    """(result, step -> loss) of a run that nothing happened to."""
    config = config_in(folder, "whole", {"sft.val_at_start": True, "sft.val_at_end": True, "sft.val_period": 20})
    result = trainer.run(config)
    return result, losses(config)


@pytest.mark.tour
def test_run_learns_and_writes_model_report_and_sample(uninterrupted, folder):
    from transformers import AutoModelForCausalLM

    result, by_step = uninterrupted
    assert (result.steps, result.stopped) == (STEPS, False)
    assert sorted(by_step) == list(range(1, STEPS + 1))
    assert by_step[STEPS] < by_step[1] - 1
    assert result.val_loss < 4
    assert AutoModelForCausalLM.from_pretrained(result.hf_dir).config.model_type == "qwen3"
    assert result.report == folder / "whole/report.html"
    assert "finished" in result.report.read_text()
    assert "say" in result.sample.prompt
    assert isinstance(result.sample.answer, str)
    validated = [line["step"] for line in read_metrics(folder / "whole/metrics.jsonl") if "val:loss" in line]
    assert validated == [0, 20, 40, 60]
    best = folders.read(result.checkpoint)
    assert set(best.metrics) == {"train:loss", "val:loss", "train:tokens_seen"}
    assert not (result.checkpoint.parent / "step_5/hf").exists(), "only the last one holds the model for users"


def start_command(folder, config):
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(dump(config)))
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-c", "import sys; from raylane.cli import main; sys.exit(main())", "sft", str(path)]
    with (folder / "command.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def signal_after(folder, config, steps, number):
    """Run the command, send it a signal as soon as the log holds so many steps; returns its exit status."""
    process = start_command(folder, config)
    path, deadline = f"{config.logger.log_dir}/metrics.jsonl", time.monotonic() + 120
    while True:
        if os.path.exists(path) and max([0, *losses(config)]) >= steps:
            break
        assert process.poll() is None, (folder / "command.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)  # there is no event for a line in a file
    process.send_signal(number)
    return process.wait(60)


def reported_status(config):
    """Return the status of the run, after checking that its report shows it."""
    status = read_facts(config.logger.log_dir)["status"]
    assert escape(status) in (Path(config.logger.log_dir) / "report.html").read_text()
    return status


@pytest.mark.claim("fine-tuning", "an interrupted run has the losses of an unbroken one, also within an epoch")
@pytest.mark.faults
@pytest.mark.slow
def test_interrupted_run_has_the_losses_of_an_unbroken_one(uninterrupted, folder, monkeypatch):
    """One run, ended three ways, each time taken up by the next: starting workers is what costs time here."""
    config = config_in(folder, "ended", {"sft.max_restarts": 0})
    read = trainer.Trainer._read_oldest

    def kill_after_step_13(self):
        read(self)
        if self.done == 13:
            asked = self.policy.group.call("process_id", ranks=[1])
            os.kill(asked.results()[0], signal.SIGKILL)

    monkeypatch.setattr(trainer.Trainer, "_read_oldest", kill_after_step_13)
    told = r"rank 1 died.*The run has ended\. Run the same command again: it resumes from .*/step_10, after step 10"
    with pytest.raises(WorkerLostError, match=told):
        trainer.run(config)
    monkeypatch.undo()
    assert reported_status(config).startswith("ended by WorkerLostError: ")
    assert folders.find(config.checkpointing).step == 10

    lost_at = max(losses(config))
    assert signal_after(folder, config, lost_at + 2, signal.SIGTERM) == 0
    stopped_at = folders.find(config.checkpointing).step
    assert reported_status(config) == "ended on SIGTERM"
    assert lost_at + 2 <= stopped_at < STEPS, "saved where it was, not only at the next period"

    assert signal_after(folder, config, stopped_at + 7, signal.SIGKILL) == -signal.SIGKILL
    assert max(losses(config)) < STEPS

    result = trainer.run(config)
    assert (result.steps, result.stopped) == (STEPS, False)
    assert losses(config) == uninterrupted[1], "bit for bit"


@pytest.mark.slow
@pytest.mark.faults
def test_interrupted_run_says_what_the_same_command_will_do(ray_session, folder):
    config = config_in(folder, "interrupted", {"checkpointing.save_period": 0})
    assert signal_after(folder, config, 3, signal.SIGINT) == 130
    said = (folder / "command.log").read_text()
    assert "raylane sft: stopping, the workers end ..." in said
    assert "raylane sft: interrupted. No checkpoint was saved, so the same command starts a new run" in said
    assert "Traceback" not in said
    assert reported_status(config).startswith("ended by KeyboardInterrupt")
