"""Kills at random times of everything that a GRPO run can survive; RAYLANE_KILLS is their number.

Each group of answers is computed again before it is trained on, with transformers and the weights that the trainer
published for the group's step.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tests.rl import tiny
from tests.rl.test_run import config_in, train_records
from transformers import AutoModelForCausalLM

from raylane import weights
from raylane.errors import WeightsError
from raylane.rl import trainer
from raylane.rl.config import GrpoRunConfig
from raylane.rl.trainer import GrpoTrainer
from raylane.weights.service.actors import NAMESPACE, actor_names

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.faults, pytest.mark.usefixtures("cluster")]

KILLS = int(os.environ.get("RAYLANE_KILLS", "6"))
VICTIMS = ("engine", "rank", "queue host", "queue", "keeper", "catalogue")


def pid_of(actor: Any) -> int:
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30)
    return pid


def actors_of(running: GrpoTrainer, victim: str) -> list[Any]:
    rollouts = running.rollouts
    if victim == "engine":
        return list(rollouts._actors)
    if victim == "rank":
        return list(running.policy.group._actors)
    if victim == "queue":
        return [rollouts.queue._actor]
    if victim == "queue host":
        return list(ray.get(rollouts.queue._actor.hosts.remote(), timeout=30).values())
    return [ray.get_actor(name, namespace=NAMESPACE) for name in actor_names(victim)]


def victims(chance: random.Random) -> Iterator[str]:
    """Yield all kinds equally often, in a random order."""
    while True:
        yield from chance.sample(VICTIMS, len(VICTIMS))


class Recomputation:
    """Weights of each step, and a model to compute log-probabilities again."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._of_step: dict[int, dict[str, torch.Tensor]] = {}
        self._readers: list[tuple[Any, weights.Subscriber]] = []
        self.answers = 0

    def note_weights(self, running: GrpoTrainer, step: int) -> None:
        """Keep the weights that are published; nobody publishes meanwhile."""
        # After the death of the queue there are other weights under the same name.
        if not self._readers or self._readers[-1][0] is not running:
            self._readers.append((running, weights.Subscriber("policy", self._model)))
            self._of_step.clear()
        update = None
        while update is None:
            try:
                update = self._readers[-1][1].update(timeout=2)
            except WeightsError:  # a victim
                running.rollouts._look_for_weights()
        assert update.step == step
        self._of_step[step] = {name: value.clone() for name, value in self._model.state_dict().items()}

    @torch.no_grad()
    def check(self, group: dict[str, Any]) -> None:
        """Compare the log-probabilities of answers with those of the weights that made them."""
        self._model.load_state_dict(self._of_step[group["step"]])
        start = len(group["prompt"]) - 1
        for tokens, logprobs, length in zip(group["tokens"], group["logprobs"], group["lengths"].tolist(), strict=True):
            ids = torch.cat([group["prompt"], tokens[:length]])
            every = self._model(ids[None, :-1]).logits[0, start:].log_softmax(-1)
            torch.testing.assert_close(
                every.gather(1, tokens[:length, None]).squeeze(1), logprobs[:length], atol=2e-5, rtol=0
            )
            self.answers += 1

    def close(self) -> None:
        for _, reader in self._readers:
            reader.close()


def endless_config(folder: Path) -> GrpoRunConfig:
    return config_in(
        folder / "run",
        folder,
        grpo__max_num_steps=100_000,  # the run is stopped after the last kill
        grpo__mode="async",
        grpo__max_lag=2,
        grpo__max_restarts=KILLS,
        grpo__snapshot_every=2,
        grpo__val_at_start=False,
        rollout__engines=2,
        rollout__max_restarts=KILLS,
        cluster__num_workers=2,
        checkpointing__save_period=10,
        checkpointing__save_hf=False,
        checkpointing__keep_latest_k=2,
    )


@pytest.mark.claim("GRPO", "random kills lose no step and count none twice")
@pytest.mark.timeout(180 + 40 * KILLS)
def test_random_kills_lose_and_double_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_model(tmp_path)
    config = endless_config(tmp_path)
    chance, killed, ended = random.Random(7), [], threading.Event()
    started: list[GrpoTrainer] = []
    recomputed = Recomputation(tmp_path / "model")
    fit, step = GrpoTrainer.fit, GrpoTrainer.step
    taken: list[tuple[int, list[Any]]] = []

    def noted_fit(self: GrpoTrainer) -> None:
        started.append(self)
        fit(self)

    def noted_step(self: GrpoTrainer) -> None:
        train = self.policy.train_groups

        def noted(number: int, tickets: Any) -> Any:
            recomputed.note_weights(self, number)
            for (group,) in self.rollouts.queue.open(tickets):
                recomputed.check(group)
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
        for victim in itertools.islice(victims(chance), KILLS):
            while not ended.wait(chance.uniform(0.5, 4)):
                try:
                    os.kill(pid_of(chance.choice(actors_of(started[-1], victim))), signal.SIGKILL)
                    killed.append(victim)
                    break
                except (ray.exceptions.RayError, ProcessLookupError, IndexError, ValueError):
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
        recomputed.close()
    print({victim: killed.count(victim) for victim in VICTIMS}, "of", KILLS)
    assert len(killed) == KILLS
    assert recomputed.answers >= 16 * result.steps
    records = train_records(config)
    assert [record["step"] for record in records] == list(range(1, result.steps + 1))
    for record in records:
        assert record["train:lag"] <= 2
        assert record["train:sampled_tokens"] > 0
    # Within an epoch, that is between two restarts, each prompt is trained on once.
    keys = [(start, key) for start, groups in taken for key in groups]
    assert len(keys) == len(set(keys))
