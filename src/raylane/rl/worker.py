"""Worker of a GRPO run: one rank of the trainer, which takes the payloads of its rows out of the queue itself.

The driver sends tickets; every method is collective, as in `training.run.worker`. Called by `policy`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist

from raylane.rl.config import GrpoRunConfig
from raylane.rl.loss import GrpoLoss, GrpoOptions, LogprobRecorder, LossSums, named_sums
from raylane.rl.queue.book import ItemTicket
from raylane.rl.queue.handle import TrajectoryQueue
from raylane.rl.rollout import process_memory_bytes
from raylane.rl.rows import AnswerCounts, RowOptions, answer_rows, batch_of
from raylane.training.model.defaults import with_own_defaults_in_methods
from raylane.training.model.supervised import RunModel, release_gathered
from raylane.training.run import step
from raylane.training.run.micro_batches import FixedRows, division
from raylane.training.run.worker import TrainingWorker
from raylane.training.vocabulary import Vocabulary
from raylane.workers.batch import BatchDict


def _is_noise(module: torch.nn.Module, name: str) -> bool:
    """Return True for an attribute of a layer that is the probability of dropout, or the noise of a router."""
    is_layer = "dropout" in type(module).__name__.lower() and name == "p"
    return is_layer or any(part in name for part in ("dropout", "pdrop", "jitter_noise"))


@with_own_defaults_in_methods
class GrpoWorker(TrainingWorker[GrpoRunConfig, Vocabulary]):
    """Model, optimizer and loss of one rank."""

    def __init__(self, device_type: str, num_threads: int, queue: TrajectoryQueue) -> None:
        """Join the process group, as `TrainingWorker` does; take payloads from `queue`."""
        super().__init__(device_type, num_threads)
        self._queue = queue
        self._reference: RunModel | None = None
        """Model with the initial weights; None without `grpo.kl_coef`."""

    def on_regroup(self, rank: int, world: int) -> None:
        """Join the process group that is formed again, without the models of before."""
        self._reference = None
        super().on_regroup(rank, world)

    def setup(self, config: GrpoRunConfig, vocabulary: Vocabulary, total_steps: int) -> dict[str, Any]:
        """Build model, optimizer and loss, and with `grpo.kl_coef` the reference model. Replaces an earlier setup."""
        facts = super().setup(config, vocabulary, total_steps)
        # Built from the same folder; checkpoints change only the model that is trained.
        self._reference = self.new_model() if self.config.grpo.kl_coef else None
        self._step_metrics: dict[str, float] = {}
        """Metrics of the rows of the step that is under way."""
        return facts

    def new_model(self) -> RunModel:
        """Return a further model without dropout: engines sample without it, and ratios compare with them."""
        model = super().new_model()
        for module in model.modules():
            # Layers keep the probability in their own attributes, under several names.
            for name, value in vars(module).items():
                if isinstance(value, float) and _is_noise(module, name):
                    setattr(module, name, 0.0)
        return model

    def make_loss(self) -> GrpoLoss:
        """Return the loss that the configuration describes."""
        grpo, temperature = self.config.grpo, self.config.rollout.temperature
        clips = grpo.clip_low, grpo.clip_high
        options = GrpoOptions(*clips, grpo.ratio, grpo.importance, grpo.importance_cap, grpo.kl_coef, temperature)
        self._sums = LossSums()
        return GrpoLoss(options, self._sums)

    def train_groups(self, number: int, tickets: Sequence[Sequence[ItemTicket]]) -> dict[str, float]:
        """Run step `number` on groups of answers, of which this worker reads its part; return the metrics of the step.

        Metrics are those of `TrainingWorker.train_batch`, and reward, reward_std (within groups), length, signal (share
        of groups with different rewards), lag (steps between the weights that sampled and these), clipped, entropy,
        sampling_kl and reference_kl (means over the tokens that are trained on), and trainer_memory_bytes (the most
        that the workers have had, all together).
        """
        started = time.perf_counter()
        reader, readers = self.mesh.reader, self.mesh.dims.readers
        share = len(tickets) // readers
        own_tickets = tickets[reader * share : (reader + 1) * share]
        # Without a copy: `batch_of` copies into padded rows, and the driver acknowledges after the step.
        groups = [group for (group,) in self._queue.open(own_tickets, copy=False)]
        batch = self._batch(groups, number)
        if self._reference is not None:
            batch["reference_logprobs"] = self._logprobs(self._reference, batch)
        metrics = self._step(batch, number, self._loss, division(self.config.policy), started)
        return {**metrics, **self._more_metrics()}

    def _batch(self, groups: Sequence[dict[str, Any]], number: int) -> BatchDict:
        """Return this worker's rows, equally many on all workers; note their metrics. Collective."""
        options = self._row_options()
        rows, own_counts = answer_rows(groups, options)
        rewards = torch.stack([group["rewards"] for group in groups])
        lags = [float(number - group["step"]) for group in groups]
        sums = torch.tensor(
            [
                *map(float, astuple(own_counts)),
                float(rewards.sum()),
                float(rewards.std(dim=1, correction=0).sum()),
                float((rewards.max(dim=1).values > rewards.min(dim=1).values).sum()),
                sum(lags),
                float(len(groups)),
            ],
            dtype=torch.float64,
        )
        # Workers that share rows have counted the same answers.
        dist.all_reduce(sums)
        sums /= self.mesh.dims.copies
        answers, tokens, kept, kept_tokens, reward, deviation, signals, lag, count = sums.tolist()
        self._step_metrics = {
            "reward": reward / answers,
            "reward_std": deviation / count,
            "length": tokens / answers,
            "signal": signals / count,
            "lag": lag / count,
            "sampled_tokens": tokens,
        }
        size = self.config.policy.train_micro_batch_size
        # Every micro-batch has collectives, so workers with fewer answers add rows without labels.
        most = torch.tensor(max(1, -(-len(rows) // size)))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        counts = AnswerCounts(int(answers), int(tokens), int(kept), int(kept_tokens))
        return batch_of(rows, int(most) * size, counts, options)

    def _row_options(self) -> RowOptions:
        grpo, policy = self.config.grpo, self.config.policy
        return RowOptions(
            policy.max_total_sequence_length,
            self.vocabulary.pad_id,
            grpo.baseline,
            grpo.scale_advantages,
            grpo.average,
            keeps_all=grpo.kl_coef > 0,
        )

    def _logprobs(self, model: RunModel, batch: BatchDict) -> torch.Tensor:
        """Return the log-probabilities of the labels of this worker's rows, float32 [B, T]; 0 without a label."""
        rows, tokens = batch["labels"].shape
        readers = self.mesh.dims.readers
        first = self.mesh.reader * rows
        recorder = LogprobRecorder(
            torch.full((rows * readers, tokens), -torch.inf, device=self.device), self.config.rollout.temperature
        )
        # Where each value belongs: with context parallelism a worker sees parts of rows only.
        places = BatchDict(batch)
        places["row_number"] = torch.arange(first, first + rows)[:, None].expand(rows, tokens).contiguous()
        places["place"] = torch.arange(tokens).expand(rows, tokens).contiguous()
        how = FixedRows(self.config.policy.train_micro_batch_size)
        step.forward_only(model, places, how, recorder, self.device)
        # Workers that share rows have different tokens or stages of them.
        dist.all_reduce(recorder.logprobs, dist.ReduceOp.MAX)
        release_gathered(model)
        own_logprobs = recorder.logprobs[first : first + rows].cpu()
        return torch.where(own_logprobs.isinf(), 0.0, own_logprobs)

    def _more_metrics(self) -> dict[str, float]:
        """Return the metrics of the rows and of the loss of the step that has ended. Collective."""
        # Of copies with the same tokens sums and their divisor grow alike, so nothing has to be divided here.
        sums = torch.tensor([*self._sums.take(), process_memory_bytes()], dtype=torch.float64)
        dist.all_reduce(sums)
        *of_loss, memory = sums.tolist()
        return {**self._step_metrics, **dict(named_sums(LossSums(*of_loss))), "trainer_memory_bytes": memory}
