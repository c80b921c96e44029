"""Actors of the benchmark `rl`: producers and consumers of queues, and the trainer and engine of the plain loop.

Each way to use a queue is a class with `put` and `take`, which run in these actors. A sample is a dict with an int64
tensor and an int.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import ray
import torch

from benchmarks.rl.cases import Case
from raylane.rl.config import GrpoRunConfig
from raylane.rl.generation import generate
from raylane.rl.loss import GrpoLoss, GrpoOptions
from raylane.rl.prompts import load_tokenizer
from raylane.rl.queue.handle import TrajectoryQueue
from raylane.rl.rollout import Prompt
from raylane.rl.rows import RowOptions, answer_rows, batch_of
from raylane.training.labels import IGNORED
from raylane.training.vocabulary import Vocabulary

AHEAD = 32
"""Number of calls that a process has in flight."""
LIMIT_BYTES = 256 << 20
"""Size of the samples that may be in a queue, in bytes."""
LIMIT_ITEMS = 4096
"""Number of samples that may be in a queue."""
Sample = dict[str, Any]


def limit_of(case: Case) -> int:
    """Return the number of samples that may be in a queue of any contender."""
    return min(LIMIT_ITEMS, LIMIT_BYTES // case.nbytes)


class ListActor:
    """Actor that holds samples in its memory, as one writes it without a queue at hand."""

    def __init__(self, limit: int) -> None:
        self._samples: asyncio.Queue[Sample] = asyncio.Queue(limit)

    async def put(self, sample: Sample) -> None:
        """Add a sample as soon as there is room."""
        await self._samples.put(sample)

    async def get(self) -> Sample:
        """Return the oldest sample as soon as there is one."""
        return await self._samples.get()


class RaylaneWay:
    """Producer or consumer of a `TrajectoryQueue`."""

    def __init__(self, queue: TrajectoryQueue, copy: bool) -> None:
        self.queue, self.copy = queue, copy

    def put(self, samples: Iterator[Sample]) -> None:
        """Put samples, and wait until the queue has accepted them."""
        for sample in samples:
            self.queue.put(sample)
        self.queue.flush()

    def take(self, number: int) -> Iterator[Sample]:
        """Yield so many samples, in batches of those that are there."""
        while number:
            batch = self.queue.take(min(number, AHEAD), at_least=1, copy=self.copy)
            yield from batch.items
            number -= len(batch.groups)
            batch.acknowledge()


class RayQueueWay:
    """Producer or consumer of a `ray.util.queue.Queue`."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue

    def put(self, samples: Iterator[Sample]) -> None:
        """Put samples one after the other."""
        for sample in samples:
            self.queue.put(sample)

    def take(self, number: int) -> Iterator[Sample]:
        """Yield so many samples."""
        for _ in range(number):
            yield self.queue.get()


class ListActorWay:
    """Producer or consumer of a `ListActor`, with so many calls in flight."""

    def __init__(self, actor: Any, ahead: int) -> None:
        self.actor, self.ahead = actor, ahead

    def put(self, samples: Iterator[Sample]) -> None:
        """Put samples, and wait for the answers."""
        calls: deque[Any] = deque()
        for sample in samples:
            calls.append(self.actor.put.remote(sample))
            if len(calls) == self.ahead:
                ray.get(calls.popleft())
        ray.get(list(calls))

    def take(self, number: int) -> Iterator[Sample]:
        """Yield so many samples."""
        calls: deque[Any] = deque()
        for _ in range(number):
            calls.append(self.actor.get.remote())
            if len(calls) == self.ahead:
                yield ray.get(calls.popleft())
        for call in calls:
            yield ray.get(call)


class QueueUser:
    """Actor that puts samples into queues, or takes them out; all contenders of a case have the same ones."""

    def __init__(self, ways: Mapping[str, Any], case: Case) -> None:
        self.ways = ways
        self.elements = case.nbytes // 8

    def produce(self, contender: str, number: int) -> None:
        """Put so many samples, with the numbers 0, 1, ..."""
        tensor = torch.arange(self.elements)
        self.ways[contender].put({"tokens": tensor, "number": i} for i in range(number))

    def consume(self, contender: str, number: int) -> int:
        """Take so many samples; return the sum of their numbers. RuntimeError if a tensor is not the one that was put.

        Only the first and the last sample are compared: the time is that of the queue.
        """
        total = 0
        for i, sample in enumerate(self.ways[contender].take(number)):
            total += sample["number"]
            if i in (0, number - 1) and not torch.equal(sample["tokens"], torch.arange(self.elements)):
                raise RuntimeError(f"sample {sample['number']} has other tokens than were put. This is a bug")
        return total


_calls = count()


def places_and_noise(answer: str, row: Mapping[str, Any]) -> float:
    """Return the number of right places of an answer, and a hash in [0, 1) that differs between equal answers.

    No two answers have the same reward, so no row has the advantage 0 and is left out.
    """
    right: int = sum(a == b for a, b in zip(answer, row["answer"], strict=False))
    return right + zlib.crc32(f"{next(_calls)} {answer}".encode()) / 2**32


class PlainGrpoTrainer:
    """Trainer of the plain loop, of torch and transformers alone."""

    def __init__(self, config: GrpoRunConfig, vocabulary: Vocabulary) -> None:
        torch.set_num_threads(config.cluster.cpus_per_worker)
        self.model = load_model(config).train()
        self.config, policy, grpo = config, config.policy, config.grpo
        # Without weight decay for norms and biases, as raylane has it.
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim >= 2]
        vectors = [parameter for parameter in self.model.parameters() if parameter.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, **policy.optimizer.kwargs.model_dump(), fused=True)
        self.loss = GrpoLoss(GrpoOptions(grpo.clip_low, grpo.clip_high, temperature=config.rollout.temperature))
        self.options = RowOptions(policy.max_total_sequence_length, vocabulary.pad_id)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights, through the object store."""
        state: dict[str, torch.Tensor] = self.model.state_dict()
        return state

    def train(self, groups: Sequence[Sample]) -> tuple[int, int]:
        """Run a step; return the numbers of tokens that were sampled and that were trained on."""
        rows, counts = answer_rows(groups, self.options)
        size = self.config.policy.train_micro_batch_size
        batch = batch_of(rows, -(-len(rows) // size) * size, counts, self.options)
        trained = int((batch["labels"] != IGNORED).sum())
        for part in batch.micro_batches(size):
            inputs = {name: part[name] for name in ("input_ids", "position_ids")}
            loss = self.loss(self.model(**inputs, use_cache=False).logits.float(), part) / trained
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.policy.max_grad_norm or float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return counts.tokens, trained


class PlainGrpoEngine:
    """Engine of the plain loop."""

    def __init__(self, config: GrpoRunConfig, vocabulary: Vocabulary) -> None:
        torch.set_num_threads(config.rollout.cpus)
        self.model = load_model(config).eval()
        self.tokenizer = load_tokenizer(config)
        self.config, self.vocabulary = config, vocabulary
        self.generator = torch.Generator().manual_seed(config.grpo.seed)

    def sample(self, state: dict[str, torch.Tensor], prompts: Sequence[Prompt]) -> list[Sample]:
        """Load weights, and return a group of answers with their rewards for each prompt."""
        self.model.load_state_dict(state)
        config, ends, samples = self.config, set(self.vocabulary.end_ids), self.config.grpo.samples_per_prompt
        repeated = [prompt.tokens for prompt in prompts for _ in range(samples)]
        limits = config.rollout.max_new_tokens, self.vocabulary.end_ids, self.vocabulary.pad_id
        answers = generate(
            self.model, repeated, *limits, temperature=config.rollout.temperature, generator=self.generator
        )
        rows = [row[:n] for row, n in zip(answers.tokens.tolist(), answers.lengths.tolist(), strict=True)]
        texts = self.tokenizer.batch_decode([row[:-1] if row[-1] in ends else row for row in rows])
        groups = []
        for i, prompt in enumerate(prompts):
            at = slice(i * samples, (i + 1) * samples)
            rewards = torch.tensor([places_and_noise(text, prompt.row) for text in texts[at]])
            group = {"tokens": answers.tokens[at], "logprobs": answers.logprobs[at], "lengths": answers.lengths[at]}
            groups.append({"prompt": torch.tensor(prompt.tokens), **group, "rewards": rewards})
        return groups


def load_model(config: GrpoRunConfig) -> Any:
    """Return the model with which a run begins, float32."""
    from transformers import AutoModelForCausalLM

    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    return load(config.policy.model_name, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True)
