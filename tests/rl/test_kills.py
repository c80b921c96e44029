"""Kills at random times of everything that a GRPO run can survive; RAYLANE_KILLS is their number."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.rl import tiny
from tests.rl.test_run import config_in, train_records

from raylane.rl import trainer
from raylane.rl.trainer import GrpoTrainer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults, pytest.mark.usefixtures("cluster")]

KILLS = int(os.environ.get("RAYLANE_KILLS", "4"))
VICTIMS = ("engine", "rank", "queue host", "queue")


def pid_of(actor: Any) -> int:
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30)
    return pid


def kill(running: GrpoTrainer, victim: str) -> None:
    """Kill a process of a kind; nothing if it is being started at present."""
    rollouts = running.rollouts
    if victim == "engine":
        actors = list(rollouts._actors)
    elif victim == "rank":
        actors = list(running.policy.group._actors)
    elif victim == "queue":
        actors = [rollouts.queue._actor]
    else:
        actors = list(ray.get(rollouts.queue._actor.hosts.remote(), timeout=30).values())
    os.kill(pid_of(random.choice(actors)), signal.SIGKILL)


@pytest.mark.timeout(120 + 30 * KILLS)
def test_random_kills_lose_and_double_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_model(tmp_path)
    config = config_in(
        tmp_path / "run",
        tmp_path,
        grpo__max_num_steps=100_000,  # the run is stopped after the last kill
        grpo__mode="async",
        grpo__max_lag=2,
        grpo__max_restarts=KILLS,
        grpo__val_at_start=False,
        rollout__engines=2,
        rollout__max_restarts=KILLS,
        cluster__num_workers=2,
        checkpointing__save_period=10,
        checkpointing__save_hf=False,
        checkpointing__keep_latest_k=2,
    )
    chance, killed, ended = random.Random(7), [], threading.Event()
    started: list[GrpoTrainer] = []
    fit, step = GrpoTrainer.fit, GrpoTrainer.step
    taken: list[tuple[int, list[Any]]] = []

    def noted_fit(self: GrpoTrainer) -> None:
        started.append(self)
        fit(self)

    def noted_step(self: GrpoTrainer) -> None:
        train = self.policy.train_groups

        def noted(number: int, tickets: Any) -> Any:
            metrics = train(number, tickets)
            taken.append((len(started), [ticket.group for group in tickets for ticket in group]))
            return metrics

        self.policy.train_groups = noted  # type: ignore[method-assign]
        try:
            step(self)
        finally:
            self.policy.train_groups = train  # type: ignore[method-assign]

    def kill_at_random() -> None:
        while not started:
            time.sleep(0.1)
        # `started[-1]`: after the death of the queue everything is started again.
        while len(killed) < KILLS and not ended.wait(chance.uniform(0.5, 4)):
            victim = chance.choice(VICTIMS)
            try:
                kill(started[-1], victim)
                killed.append(victim)
            except (ray.exceptions.RayError, ProcessLookupError, IndexError):
                continue  # it is being started
        last = len(taken)
        while len(taken) < last + 5 and not ended.wait(0.1):  # the run has recovered from the last kill too
            pass
        started[-1]._stop.ask()

    monkeypatch.setattr(GrpoTrainer, "fit", noted_fit)
    monkeypatch.setattr(GrpoTrainer, "step", noted_step)
    killer = threading.Thread(target=kill_at_random)
    killer.start()
    try:
        result = trainer.run(config)
    finally:
        ended.set()
        killer.join()
    print({victim: killed.count(victim) for victim in VICTIMS}, "of", KILLS)
    assert len(killed) == KILLS
    records = train_records(config)
    assert [record["step"] for record in records] == list(range(1, result.steps + 1))
    for record in records:
        assert record["train:lag"] <= 2
        assert record["train:sampled_tokens"] > 0
    # Within an epoch, that is between two restarts, each prompt is trained on once.
    keys = [(start, key) for start, groups in taken for key in groups]
    assert len(keys) == len(set(keys))
