"""Contenders of the benchmark `rl`: queues between producers and consumers, and loops of reinforcement learning.

Both halves of the asynchronous loop alone share one deployment; every other contender has processes of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.util.queue

from benchmarks import measure
from benchmarks.rl import actors as rl_actors
from benchmarks.rl.actors import ListActorWay, QueueUser, RaylaneWay, RayQueueWay, limit_of
from benchmarks.rl.cases import (
    ASYNC,
    CONSUMERS,
    ENGINE,
    MAPPED,
    PLAIN,
    PRODUCERS,
    RAY_ACTOR,
    RAY_AHEAD,
    RAY_QUEUE,
    RAYLANE,
    SYNC,
    TRAINER,
    Blocks,
    Case,
    samples_of,
)
from raylane import weights
from raylane.rl.config import GrpoRunConfig
from raylane.rl.engines import RolloutProcess, Rollouts
from raylane.rl.policy import GrpoPolicy
from raylane.rl.prompts import PromptSet, load_tokenizer, vocabulary_of
from raylane.rl.queue.handle import TrajectoryQueue
from raylane.rl.rollout import PromptBatch
from raylane.rl.trainer import GrpoTrainer
from raylane.training.config.load import make_config
from raylane.training.report.metrics import MetricsLog
from raylane.training.run.stopping import StopRequest

MAX_STEPS = 1_000_000
"""Steps of a loop, more than are measured: the last one would end its engines."""
CALLS_AHEAD = 2
"""Number of calls that the engine alone has, as in raylane's loop."""


def process_ids(actors: Sequence[Any]) -> list[int]:
    """Return the IDs of the processes of actors."""
    ids: list[int] = ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in actors])
    return ids


def start_queues(case: Case, stack: contextlib.ExitStack) -> list[QueueContender]:
    """Start queues, producers and consumers; `stack` ends them."""
    start = ray.remote(num_cpus=0)
    limit = limit_of(case)
    # The same limits for all, so that no contender buys its speed with memory.
    queue = TrajectoryQueue(max_items=limit, max_bytes=rl_actors.LIMIT_BYTES)
    store = ray.util.queue.Queue(limit, actor_options={"num_cpus": 0})
    holder = start(rl_actors.ListActor).remote(limit)
    ways = {
        RAYLANE: RaylaneWay(queue, copy=True),
        MAPPED: RaylaneWay(queue, copy=False),
        RAY_QUEUE: RayQueueWay(store),
        RAY_ACTOR: ListActorWay(holder, 1),
        RAY_AHEAD: ListActorWay(holder, rl_actors.AHEAD),
    }
    users = [start(QueueUser).remote(ways, case) for _ in range(PRODUCERS + CONSUMERS)]
    for actor in (*users, queue._actor, store.actor, holder):
        stack.callback(ray.kill, actor)
    contenders = [QueueContender(label, case, users) for label in case.contenders]
    for contender in contenders:
        contender.warm()  # every process has imported all that it needs, and has joined the queue
    hosts = ray.get(queue._actor.hosts.remote()).values()
    services = {RAYLANE: [queue._actor, *hosts], MAPPED: [queue._actor, *hosts], RAY_QUEUE: [store.actor]}
    for contender in contenders:
        contender.pids = process_ids([*users, *services.get(contender.name, [holder])])
    return contenders


class QueueContender:
    """One way to use a queue. Producers and consumers are those of all contenders, so all of them are warm."""

    pids: Sequence[int]

    def __init__(self, label: str, case: Case, users: Sequence[Any]) -> None:
        self.name, self._case = label, case
        self._producers, self._consumers = users[:PRODUCERS], users[PRODUCERS:]

    def move(self, count: int) -> None:
        """Move so many samples from the producers to the consumers. RuntimeError if one is missing or came twice."""
        produced, consumed = count // PRODUCERS, count // CONSUMERS
        # Consumers first: they wait, and no contender gains by samples that are put before anyone takes them.
        sums = [consumer.consume.remote(self.name, consumed) for consumer in self._consumers]
        ray.get([producer.produce.remote(self.name, produced) for producer in self._producers])
        total, expected = sum(ray.get(sums)), PRODUCERS * produced * (produced - 1) // 2
        if total != expected:
            raise RuntimeError(f"{self.name}: the numbers of {count} samples add up to {total}, not {expected}")

    def warm(self) -> None:
        """Move a few samples after the processes were stopped."""
        self.move(PRODUCERS * CONSUMERS)

    def block(self, blocks: Blocks) -> measure.Tally:
        """Return the microseconds of one sample, measured over a round."""
        count = samples_of(self._case, self.name, blocks)
        return measure.Tally([measure.timed(lambda: self.move(count)) / count], count)

    def extra(self, tally: measure.Tally) -> dict[str, Any]:
        """Return further fields of the record."""
        mean_us = sum(tally.samples_us) / len(tally.samples_us)
        return {"samples_per_s": round(1e6 / mean_us, 1), "bytes_per_s": round(self._case.nbytes * 1e6 / mean_us)}


class LoopContender:
    """One loop, or half of one: `step` runs a step, and returns the tokens sampled and trained on."""

    def __init__(
        self, label: str, case: Case, pids: Sequence[int], step: Callable[[], tuple[float, float]], trains: bool = True
    ) -> None:
        self.name, self.pids = label, pids
        self._case, self._step, self._trains = case, step, trains
        self._tokens: list[tuple[float, float]] = []
        """Tokens sampled and trained on in each measured step."""

    def warm(self) -> None:
        """Run a step after the processes were stopped. RuntimeError if rows were left out of it."""
        sampled, trained = self._step()
        if self._trains and trained < 0.99 * sampled:
            raise RuntimeError(
                f"{self.name} trained on {trained:.0f} of {sampled:.0f} sampled tokens: rows with the advantage 0 are "
                "left out, so contenders do not have equal work. Use rewards that differ between answers"
            )

    def block(self, blocks: Blocks) -> measure.Tally:
        """Return the microseconds of each step of a round."""
        tokens = []
        samples = [measure.timed(lambda: tokens.append(self._step())) for _ in range(blocks.calls)]
        self._tokens += tokens
        return measure.Tally(samples, len(samples))

    def extra(self, tally: measure.Tally) -> dict[str, Any]:
        """Return further fields of the record."""
        seconds = sum(tally.samples_us) / 1e6
        sampled, trained = (sum(counts) for counts in zip(*self._tokens, strict=True))
        answers = len(self._tokens) * self._case.prompts * self._case.answers
        shares = {"trained_share": round(trained / sampled, 4)} if self._trains else {}
        return {"samples_per_s": round(answers / seconds, 1), "tokens_per_s": round(sampled / seconds, 1), **shares}


def config_of(case: Case, label: str, model: Path, folder: Path) -> GrpoRunConfig:
    """Return the configuration of a loop: that of examples/grpo_sort.yaml, with the sizes of the case."""
    rows = case.prompts * case.answers
    name = f"rl-bench-{os.getpid()}-{label.replace(':', '-').replace(' ', '-')}"
    return make_config(
        {
            "grpo": {
                "max_num_steps": MAX_STEPS,
                "prompts_per_step": case.prompts,
                "samples_per_prompt": case.answers,
                "mode": "async" if label == ASYNC else "sync",
                "max_lag": 1,
                "rewards": f"{rl_actors.__name__}:places_and_noise",
                "seed": 0,
            },
            "rollout": {"max_new_tokens": 6},
            "policy": {
                "model_name": str(model),
                "max_total_sequence_length": 16,
                "train_global_batch_size": rows,
                "train_micro_batch_size": min(256, rows),
                "precision": "float32",
                "max_grad_norm": 1.0,
                "optimizer": {"name": "adamw", "kwargs": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.0}},
                "sequence_packing": {"enabled": False},
                "publish_weights": {"name": name},
            },
            "data": {"train": str(folder / "train.jsonl")},
            "checkpointing": {"enabled": False},
            "logger": {"log_dir": str(folder / name)},
        },
        GrpoRunConfig,
    )


class LoopParts:
    """Parts that loops are made of: configuration, prompts, queue and policy."""

    def __init__(self, case: Case, label: str, model: Path, folder: Path) -> None:
        self.case, self.label = case, label
        self.config = config_of(case, label, model, folder)
        tokenizer = load_tokenizer(self.config)
        self.vocabulary = vocabulary_of(tokenizer, str(model))
        self.prompts = PromptSet.read(self.config.data.train, self.config, tokenizer)

    def policy(self, queue: TrajectoryQueue, stack: contextlib.ExitStack) -> GrpoPolicy:
        """Start the trainer's worker; `stack` ends it and what it has published."""
        stack.callback(ray.kill, queue._actor)
        stack.callback(weights.drop, self.config.policy.publish_weights.name or "")
        return stack.enter_context(GrpoPolicy(self.config, self.vocabulary, MAX_STEPS, queue))


# The actors of published weights serve all loops of raylane. They are in the list of each of them, so they run whenever
# one of these loops runs, and their CPU time counts for it.
def services_of(queue: TrajectoryQueue) -> list[int]:
    """Return the processes of a queue, and those that hold published weights, which all loops of raylane share."""
    named = ray.util.list_named_actors(all_namespaces=True)
    shared = [ray.get_actor(**entry) for entry in named if entry["namespace"].startswith("raylane")]
    return process_ids([queue._actor, *ray.get(queue._actor.hosts.remote()).values(), *shared])


def start_loop(parts: LoopParts, stack: contextlib.ExitStack) -> list[LoopContender]:
    """Start raylane's loop, as `raylane grpo` runs it."""
    queue = TrajectoryQueue(max_items=1 << 20)
    policy = parts.policy(queue, stack)
    log = stack.enter_context(
        MetricsLog(parts.config.logger, parts.config.logger.log_dir, io.StringIO())  # its progress lines are not shown
    )
    trainer = GrpoTrainer(parts.config, log, StopRequest(), [])
    trainer.policy = policy
    trainer.rollouts = Rollouts(
        parts.config, parts.vocabulary, parts.prompts, queue, trainer.note, trainer.publish_again
    )
    stack.callback(trainer.rollouts.close)
    trainer.resume_from(None, anew=True)
    path = log.path

    def step() -> tuple[float, float]:
        trainer.step()
        return tokens_of(path)

    step()  # the queue has its actors, the trainer has published
    # The loop is ahead by one batch at the end of a round as at its beginning, because `warm` runs a step before it.
    pids = [*process_ids(policy.group._actors), *process_ids(trainer.rollouts._actors), *services_of(queue)]
    return [LoopContender(parts.label, parts.case, pids, step)]


def tokens_of(path: Path) -> tuple[float, float]:
    """Return the tokens sampled and trained on in the last step of a metrics file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        metrics = json.loads(file.readlines()[-1])
    return metrics["train:sampled_tokens"], metrics["train:supervised_tokens"]


def start_halves(parts: LoopParts, stack: contextlib.ExitStack) -> list[LoopContender]:
    """Start trainer and engine apart: the trainer always has the same groups, the engine the same weights."""
    case, queue = parts.case, TrajectoryQueue(max_items=1 << 20)
    policy = parts.policy(queue, stack)
    policy.publish_weights()
    start = ray.remote(num_cpus=parts.config.rollout.cpus)(RolloutProcess).remote
    engine = start(parts.config, parts.vocabulary, 0, queue, os.getcwd())
    stack.callback(ray.kill, engine)
    calls: list[Any] = []

    def send() -> None:
        first = sent[0] * case.prompts
        sent[0] += 1
        prompts = [parts.prompts.prompt(first + i) for i in range(case.prompts)]
        calls.append(engine.make.remote(PromptBatch(0, prompts, 0)))

    sent = [0]
    send()
    # Never acknowledged, so their memory stays as it is.
    tickets_to_train = queue.take_tickets(case.prompts)
    ray.get(calls.pop())

    def train() -> tuple[float, float]:
        metrics = policy.train_groups(policy.next_step, tickets_to_train)
        return metrics["sampled_tokens"], metrics["supervised_tokens"]

    def sample() -> tuple[float, float]:
        while len(calls) < CALLS_AHEAD:
            send()
        tickets = queue.take_tickets(case.prompts)
        queue.acknowledge(tickets)
        return ray.get(calls.pop(0)).tokens, 0

    train()
    pids = [*process_ids([*policy.group._actors, engine]), *services_of(queue)]
    return [LoopContender(TRAINER, case, pids, train), LoopContender(ENGINE, case, pids, sample, trains=False)]


def start_plain(parts: LoopParts, stack: contextlib.ExitStack) -> list[LoopContender]:
    """Start the loop that is written on Ray alone: weights and groups go through the object store."""
    config, prompts, number = parts.config, parts.prompts, parts.case.prompts
    arguments = config, parts.vocabulary
    trainer = ray.remote(num_cpus=config.cluster.cpus_per_worker)(rl_actors.PlainGrpoTrainer).remote(*arguments)
    engine = ray.remote(num_cpus=config.rollout.cpus)(rl_actors.PlainGrpoEngine).remote(*arguments)
    for actor in (trainer, engine):
        stack.callback(ray.kill, actor)
    steps = [0]

    def step() -> tuple[float, float]:
        first = steps[0] * number
        steps[0] += 1
        chosen = [prompts.prompt(first + i) for i in range(number)]
        # The weights go from actor to actor by their ref; the groups come to the driver, as in most such loops.
        groups = ray.get(engine.sample.remote(trainer.weights.remote(), chosen))
        tokens: tuple[float, float] = ray.get(trainer.train.remote(groups))
        return tokens

    step()
    return [LoopContender(PLAIN, parts.case, process_ids([trainer, engine]), step)]


STARTS = {SYNC: start_loop, ASYNC: start_loop, PLAIN: start_plain, TRAINER: start_halves, ENGINE: start_halves}
"""Function that starts a contender of a loop; both halves have the same one."""
