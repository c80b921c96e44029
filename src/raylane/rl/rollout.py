"""Rollout actor: samples answers to prompts with the newest weights, scores them, and puts them into the queue.

A plain class; the loop runs it in a Ray actor. Its engine is transformers' model with `generation.generate`, which
takes weights by name from `raylane.weights`.

G = samples of each prompt, R = tokens of the longest answer.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from raylane import weights
from raylane.core.deadline import Deadline
from raylane.errors import WeightsLostError
from raylane.rl.generation import Answers, generate
from raylane.rl.queue.handle import TrajectoryQueue
from raylane.rl.rewards import Reward, score

_RETRY_S = 0.2
"""Seconds between two tries to take weights that were lost."""


class Prompt(NamedTuple):
    """A prompt of a run."""

    number: int
    """Place in the order of the run, from 0."""
    tokens: list[int]
    row: Mapping[str, Any]
    """Line of the data file."""


@dataclass(frozen=True)
class SamplingOptions:
    """Way of sampling."""

    samples: int
    new_tokens: int
    end_ids: tuple[int, ...]
    pad_id: int
    temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class PromptBatch:
    """Prompts for one call of a rollout actor."""

    epoch: int
    """Number of the times that the trainer went back to a checkpoint: groups of an earlier epoch are not used."""
    prompts: Sequence[Prompt]
    at_least: int
    """Oldest step whose weights may be used; the actor waits for them."""


@dataclass(frozen=True)
class RolloutReport:
    """Figures of one call, for the log and the timeline."""

    engine: int
    step: int
    """Optimizer steps in the weights that were used."""
    began_s: float
    """Time of the system clock, in seconds, when sampling began, after the update of the weights."""
    ended_s: float
    update_s: float
    """Seconds that the update of the weights took, without the wait for the trainer."""
    tokens: int
    """Sampled tokens."""
    rewards: tuple[float, ...]
    """Mean of each reward."""
    memory_bytes: int
    """Most memory that the actor's process has had."""


class EngineWeights(NamedTuple):
    """Weights that an engine has taken."""

    version: int
    """Number of their version."""
    step: int
    """Optimizer steps in them."""
    seconds: float
    """Seconds in which the engine could not sample because of the update; 0 if it had them already."""


class Engine(Protocol):
    """Engine of a rollout actor."""

    def update(self, version: int, timeout_s: float) -> EngineWeights:
        """Wait for a version of the weights with this number or more, and take the newest."""

    def sample(self, prompts: Sequence[Sequence[int]], options: SamplingOptions, seed: int) -> Answers:
        """Return one answer to each prompt."""


class TransformersEngine:
    """transformers' model in this process."""

    def __init__(self, model: Any, name: str) -> None:
        """Read the weights `name`. The model is on the device that samples."""
        self._model = model.eval()
        self._subscriber = weights.Subscriber(name, model)

    def update(self, version: int, timeout_s: float) -> EngineWeights:
        """Wait for a version of the weights with this number or more, and take the newest."""
        newest = self._subscriber.wait_for(version, timeout=timeout_s)
        return EngineWeights(newest.version, newest.step, newest.seconds if newest.changed else 0.0)

    def sample(self, prompts: Sequence[Sequence[int]], options: SamplingOptions, seed: int) -> Answers:
        """Return one answer to each prompt."""
        generator = torch.Generator(device=next(self._model.parameters()).device).manual_seed(seed)
        return generate(
            self._model,
            prompts,
            options.new_tokens,
            options.end_ids,
            options.pad_id,
            temperature=options.temperature,
            generator=generator,
        )


@dataclass(repr=False)
class RolloutActor:
    """Engine, rewards and queue of one rollout actor. One call at a time."""

    number: int
    engine: Engine
    tokenizer: Any
    rewards: list[Reward]
    options: SamplingOptions
    queue: TrajectoryQueue
    timeout_s: float = 600.0

    def __repr__(self) -> str:
        # Ray begins each line of an actor's output with it.
        return f"Engine {self.number}"

    def make(self, batch: PromptBatch) -> RolloutReport:
        """Sample and score answers to prompts, and put a group for each prompt into the queue; return its figures."""
        used = self._update(batch.at_least)
        began, samples = time.time(), self.options.samples
        repeated = [prompt.tokens for prompt in batch.prompts for _ in range(samples)]
        first = batch.prompts[0].number
        # By the first prompt and not by the actor or the call: a batch that is made again gives the same answers.
        answers = self.engine.sample(repeated, self.options, seed_of(self.options.seed, batch.epoch, first))
        sums = np.zeros(len(self.rewards))
        lengths = answers.lengths.tolist()
        texts = self._texts(answers)
        groups = []
        for i, prompt in enumerate(batch.prompts):
            at = slice(i * samples, (i + 1) * samples)
            scores = [score(self.rewards, text, prompt.row) for text in texts[at]]
            sums += np.sum([each for _, each in scores], axis=0)
            longest = max(lengths[at])
            group = {
                "prompt": torch.tensor(prompt.tokens),
                "tokens": answers.tokens[at, :longest].cpu(),
                "logprobs": answers.logprobs[at, :longest].cpu(),
                "lengths": answers.lengths[at].cpu(),
                "rewards": torch.tensor([total for total, _ in scores], dtype=torch.float64),
                "step": used.step,
            }
            groups.append((group, (batch.epoch, prompt.number), sum(lengths[at])))
        ended = time.time()
        for group, key, tokens in groups:
            self.queue.put(group, group=key, versions=((used.step, tokens),), timeout=self.timeout_s)
        # Before the answer: the driver counts this batch as made, and would not notice what is lost with this process.
        self.queue.flush(timeout=self.timeout_s)
        # Plain numbers: reports go through Ray's control messages.
        means = tuple((sums / len(repeated)).tolist())
        memory = process_memory_bytes()
        return RolloutReport(self.number, used.step, began, ended, used.seconds, sum(lengths), means, memory)

    def answer(self, prompts: Sequence[Prompt], at_least: int, temperature: float) -> list[tuple[str, float]]:
        """Return text and reward of one answer to each prompt, with weights of so many steps or more."""
        self._update(at_least)
        # One answer each: a validation measures the model, not the best of several tries.
        options = replace(self.options, samples=1, temperature=temperature)
        answers = self.engine.sample([prompt.tokens for prompt in prompts], options, seed_of(options.seed, 0, 0))
        texts = self._texts(answers)
        return [(text, score(self.rewards, text, prompt.row)[0]) for text, prompt in zip(texts, prompts, strict=True)]

    def _update(self, at_least: int) -> EngineWeights:
        """Let the engine take the newest weights; wait until they are those after so many steps or more."""
        deadline, version = Deadline(self.timeout_s), 1
        while True:
            try:
                # The newest weights, also where older ones would do: fresher answers are worth more.
                taken = self.engine.update(version, self.timeout_s)
            except WeightsLostError:
                # The driver lets the trainer publish them again (`Rollouts`).
                if deadline.left_s() == 0:
                    raise
                version = 1
                time.sleep(_RETRY_S)
                continue
            if taken.step >= at_least:
                return taken
            version = taken.version + 1

    def _texts(self, answers: Answers) -> list[str]:
        """Return the answers as text, without their end tokens."""
        # Special tokens within an answer stay in its text: a reward should see that they are there.
        rows = [
            tokens[:length] for tokens, length in zip(answers.tokens.tolist(), answers.lengths.tolist(), strict=True)
        ]
        ends = set(self.options.end_ids)
        trimmed = [row[:-1] if row and row[-1] in ends else row for row in rows]
        texts: list[str] = self.tokenizer.batch_decode(trimmed)
        return texts


def process_memory_bytes() -> int:
    """Return the most memory that this process has had: of its GPU if it uses one, else resident in the host's."""
    of_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return of_gpu or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def seed_of(seed: int, epoch: int, number: int) -> int:
    """Return a seed that is distinct for every batch of a run, and equal on every machine."""
    return (seed * 1_000_003 + epoch * 7_919 + number * 65_537 + 1) % 2**63
