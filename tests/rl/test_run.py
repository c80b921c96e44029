"""Runs of GRPO with a tiny model on a real Ray: modes, resume, and deaths."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.rl import tiny

from raylane.errors import ConfigError, DataError, RaylaneError
from raylane.rl import trainer
from raylane.rl.config import GrpoRunConfig
from raylane.rl.engines import Rollouts
from raylane.rl.trainer import GrpoTrainer
from raylane.training.report.metrics import read_metrics, read_notes, read_samples
from raylane.weights.service.actors import NAMESPACE, actor_names

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo-model")
    tiny.write_model(folder)
    return folder


def config_in(folder: Path, model: Path, **changes: Any) -> GrpoRunConfig:
    data = {name: str(model / "data" / f"{name}.jsonl") for name in ("train", "validation")}
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    own = {f"data.{name}": path for name, path in data.items()}
    return tiny.config_of(folder, {**own, "policy.model_name": str(model / "model"), **dotted})


def train_records(config: GrpoRunConfig) -> list[dict[str, float]]:
    records = read_metrics(Path(config.logger.log_dir) / "metrics.jsonl")
    return [record for record in records if "train:loss" in record]


def losses(config: GrpoRunConfig) -> list[float]:
    return [record["train:loss"] for record in train_records(config)]


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[GrpoTrainer], None]) -> None:
    """Do something once, after a step, while the engines go on."""
    record, done = GrpoTrainer._record, []

    def then(self: GrpoTrainer, metrics: dict[str, float], ended_s: float) -> None:
        record(self, metrics, ended_s)
        if self.done == step and not done:
            done.append(step)
            action(self)

    monkeypatch.setattr(GrpoTrainer, "_record", then)


@pytest.mark.claim("GRPO", "a synchronous run resumes exactly")
def test_synchronous_run_resumes_exactly(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Another base of the rotary frequencies: engines must compute with the trainer's overrides.
    overrides = {"policy__hf_config_overrides": {"rope_theta": 10.0}}
    whole = config_in(tmp_path / "whole", model, **overrides)
    result = trainer.run(whole)
    assert (result.steps, result.stopped) == (4, False)
    assert result.first is not None
    assert result.first != result.last
    records = train_records(whole)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        assert record["train:lag"] == 0
        # The weights that sampled are those that are trained, so their log-probabilities are equal.
        assert abs(record["train:sampling_kl"]) < 1e-6
        assert record["train:clipped"] == 0
        assert 0 < record["train:entropy"] < math.log(260)
        assert record["train:length"] <= 6
        assert all(record[f"train:{one}_memory_bytes"] > 1 << 26 for one in ("trainer", "driver", "engine"))
    assert len(read_samples(Path(whole.logger.log_dir) / "metrics.jsonl")) == 2 * 2
    trace = json.loads((Path(whole.logger.log_dir) / "timeline.json").read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names >= {"trainer", "engine 0", "driver"}

    parts = config_in(tmp_path / "parts", model, **overrides)
    after_step(monkeypatch, 2, lambda one: one._stop.ask())
    assert trainer.run(parts).steps == 2
    monkeypatch.undo()
    assert trainer.run(parts).steps == 4
    assert losses(parts) == pytest.approx(losses(whole), abs=1e-6)
    monkeypatch.setattr(trainer.ray_session, "connect", None)
    again = trainer.run(parts)  # finished, so no Ray is asked for
    assert (again.steps, again.checkpoint, again.first) == (
        4,
        Path(parts.checkpointing.checkpoint_dir) / "step_4",
        None,
    )


@pytest.mark.claim("GRPO", "an asynchronous run survives the death of an engine, which is replaced")
def test_asynchronous_run_survives_a_dead_engine(tmp_path: Path, model: Path) -> None:
    rewards = ["tests.rl.tiny:closeness", {"function": "tests.rl.tiny:brevity", "weight": 0.1}]
    options = {"grpo__mode": "async", "grpo__max_lag": 2, "rollout__engines": 2, "rollout__kill_after_step": 1}
    config = config_in(tmp_path, model, grpo__rewards=rewards, **options)
    result = trainer.run(config)
    assert result.steps == 4
    assert max(record["train:lag"] for record in train_records(config)) <= 2
    assert any("train:reward_brevity" in record for record in train_records(config))
    (note,) = [text for _, text in read_notes(Path(config.logger.log_dir) / "metrics.jsonl")]
    assert note.startswith("rollout actor 0 died and is replaced; ")


@pytest.mark.claim("GRPO", "a dead rank sends the run back to its last checkpoint, or to a snapshot in memory")
@pytest.mark.parametrize(
    ("period", "told"),
    [("checkpointing__save_period", "Starting the workers again from"), ("grpo__snapshot_every", "in memory: ")],
)
def test_dead_rank_goes_back_to_the_last_checkpoint(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, period: str, told: str
) -> None:
    config = config_in(tmp_path, model, **{period: 1}, cluster__num_workers=2, grpo__mode="one_step")

    def kill(one: GrpoTrainer) -> None:
        group = one.policy.group
        pids = group.call("process_id").results()
        os.kill(pids[1], signal.SIGKILL)

    after_step(monkeypatch, 2, kill)
    assert trainer.run(config).steps == 4
    assert [record["step"] for record in train_records(config)] == [1, 2, 3, 4]
    (note,) = [text for _, text in read_notes(Path(config.logger.log_dir) / "metrics.jsonl")]
    assert told in note


def test_lost_weights_are_published_again(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path, model, grpo__val_at_start=False, grpo__val_at_end=False)
    stepped = Rollouts.stepped

    def kill_first(self: Rollouts, steps: int) -> None:
        """Kill the keeper after a step has published, before an engine is told to read."""
        if steps == 2:
            (name,) = actor_names("keeper")
            keeper = ray.get_actor(name, namespace=NAMESPACE)
            ray.kill(keeper)
            with pytest.raises(ray.exceptions.RayActorError):
                ray.get(keeper.__ray_ready__.remote(), timeout=60)
        stepped(self, steps)

    monkeypatch.setattr(Rollouts, "stepped", kill_first)
    assert trainer.run(config).steps == 4
    assert [record["step"] for record in train_records(config)] == [1, 2, 3, 4]
    notes = [text for _, text in read_notes(Path(config.logger.log_dir) / "metrics.jsonl")]
    assert notes == ["the weights after step 2 were lost and are published again"]


@pytest.mark.parametrize("key", ["grpo__val_at_start", "grpo__mode"])
def test_reward_that_waits_ends_the_run(tmp_path: Path, model: Path, key: str) -> None:
    changes = {"grpo__val_at_start": False, key: {"grpo__val_at_start": True, "grpo__mode": "async"}[key]}
    rewards = {"grpo__rewards": "tests.rl.test_run:endless", "grpo__step_timeout_s": 10}
    config = config_in(tmp_path, model, **changes, **rewards)
    state = "validation has answers of 0 of 1 rollout actors" if changes["grpo__val_at_start"] else "step 1 has 0 of 4"
    with pytest.raises(RaylaneError, match=f"{state}.* after grpo.step_timeout_s=10 s: .* tests.rl.test_run:endless"):
        trainer.run(config)


def endless(answer: str, row: Any) -> float:
    """Wait for ever in an engine; the driver's own call, on the first prompt, returns."""
    if ray.is_initialized() and ray.get_runtime_context().get_actor_id():
        threading.Event().wait()
    return 0.0


def test_run_that_needs_more_cpus_than_there_are_is_refused(tmp_path: Path, model: Path) -> None:
    config = config_in(tmp_path, model, rollout__engines=20)
    text = r"the run needs 21 CPUs at the same time \(cluster.num_workers=1 x 1 and rollout.engines=20 x 1\), and the "
    with pytest.raises(ConfigError, match=f"{text}cluster has 8"):
        trainer.run(config)


def test_reward_that_fails_ends_the_run(tmp_path: Path, model: Path) -> None:
    config = config_in(tmp_path, model, grpo__rewards="tests.rl.test_run:failing", grpo__val_at_start=False)
    with pytest.raises(DataError, match=r"the reward tests.rl.test_run:failing failed .*: SystemExit: no key"):
        trainer.run(config)


def failing(answer: str, row: Any) -> float:
    """Fail in an engine."""
    if ray.is_initialized() and ray.get_runtime_context().get_actor_id():
        sys.exit("no key")
    return 0.0
