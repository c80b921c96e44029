"""Loss of GRPO, summed over the sampled tokens of a micro-batch. Called inside the model's forward.

A sum like every loss of the trainer (`training.model.loss`): the step divides by the number of sampled tokens of the
global batch. B = rows, T = tokens in a row, V = vocabulary, N = sampled tokens of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from raylane.training.labels import IGNORED
from raylane.workers.batch import BatchDict

RATIOS = ("token", "sequence")
IMPORTANCE = ("clip", "truncate")


@dataclass(frozen=True)
class GrpoOptions:
    """Options of `GrpoLoss`."""

    clip_low: float = 0.2
    """Ratios below 1 - clip_low give no gradient that lowers them further."""
    clip_high: float = 0.2
    """Ratios above 1 + clip_high give no gradient that raises them further."""
    ratio: str = "token"
    """`token`: the ratio of each token's probabilities; `sequence`: their geometric mean over the answer (GSPO, arXiv
    2507.18071)."""
    importance: str = "clip"
    """`clip`: the ratio to the policy that sampled, clipped (PPO, arXiv 1707.06347). `truncate`: each token is weighted
    by that ratio, at most `cap`, without a gradient through it: for samples of older weights."""
    cap: float = 2.0
    """Largest weight of `truncate`."""
    kl_coef: float = 0.0
    """Factor of the divergence from the reference policy; 0 needs no reference."""
    temperature: float = 1.0
    """Temperature at which the answers were sampled."""


@dataclass
class LossSums:
    """Sums over the sampled tokens of this worker since the last call of `take`."""

    tokens: float = 0.0
    clipped: float = 0.0
    """Tokens whose gradient was clipped away."""
    entropy: float = 0.0
    """Entropy of the policy at each token, in nats."""
    sampling_kl: float = 0.0
    """Divergence of the policy from the one that sampled, in nats (estimator k3 of joschu.net/blog/kl-approx.html)."""
    reference_kl: float = 0.0
    """Divergence from the reference policy."""

    def take(self) -> tuple[float, ...]:
        """Return the sums in the order of the fields, and begin new ones."""
        sums = astuple(self)
        self.tokens = self.clipped = self.entropy = self.sampling_kl = self.reference_kl = 0.0
        return sums


@dataclass
class GrpoLoss:
    """Clipped policy gradient.

    The batch holds, for each token of a row [B, T]: labels, int64, already shifted, -100 outside the answers;
    old_logprobs, float32, the log-probabilities that the labels had when they were sampled; advantages, float32;
    weights, float32, a factor of each token's loss; with `kl_coef` also reference_logprobs. A row has one answer.
    """

    options: GrpoOptions
    sums: LossSums = field(default_factory=LossSums)

    def __call__(self, logits: Tensor, batch: BatchDict) -> Tensor:
        """Return the loss summed over the sampled tokens of `logits` [B, T, V], a float32 scalar."""
        sampled = batch["labels"] != IGNORED
        if not bool(sampled.any()):
            return logits.sum() * 0.0  # every worker must use every parameter
        options = self.options
        # In float32 and at the temperature of sampling: ratios compare the same distribution before and after.
        distribution = F.log_softmax(logits[sampled].float() / options.temperature, dim=-1)
        logprobs = distribution.gather(1, batch["labels"][sampled][:, None]).squeeze(1)
        old, advantages, weights = (batch[name][sampled] for name in ("old_logprobs", "advantages", "weights"))
        difference = logprobs - old
        if options.ratio == "sequence":
            difference = self._sequence_means(difference, sampled)
        if options.importance == "clip":
            # The minimum is pessimistic: it bounds what a step gains, and not what it repairs.
            ratio = difference.exp()
            bounded = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
            gains, bounded_gains = ratio * advantages, bounded * advantages
            clipped = bounded_gains < gains
            losses = -torch.minimum(gains, bounded_gains)
        else:
            # REINFORCE with a weight: the last factor is 1, and its gradient that of the log-probability.
            weight = difference.detach().exp()
            clipped = weight > options.cap
            losses = -weight.clamp(max=options.cap) * advantages * (logprobs - logprobs.detach()).exp()
        if options.kl_coef:
            divergence = _k3(batch["reference_logprobs"][sampled] - logprobs)
            losses = losses + options.kl_coef * divergence
            self.sums.reference_kl += float(divergence.detach().sum())
        with torch.no_grad():
            self.sums.tokens += float(sampled.sum())
            self.sums.clipped += float(clipped.sum())
            self.sums.entropy -= float((distribution.exp() * distribution).sum())
            self.sums.sampling_kl += float(_k3(old - logprobs).sum())
        total: Tensor = (losses * weights).sum()
        return total

    @staticmethod
    def _sequence_means(difference: Tensor, sampled: Tensor) -> Tensor:
        """Return the mean over the answer of each token [N]; the gradient of each token goes through its own term."""
        rows = sampled.nonzero()[:, 0]
        counts = sampled.sum(dim=1).clamp(min=1).float()
        means = torch.zeros(sampled.shape[0], device=difference.device).index_add(0, rows, difference.detach()) / counts
        return means[rows] + difference - difference.detach()


def _k3(difference: Tensor) -> Tensor:
    return difference.exp() - difference - 1


@dataclass
class LogprobRecorder:
    """Loss function that notes the log-probability of each label, and returns 0: for a pass without gradients.

    The batch needs `labels`, and `row_number` and `place`, int64 [B, T]: where the result goes in `logprobs`.
    """

    logprobs: Tensor
    """Result, float32 [rows, T]; -inf where another worker computes it."""
    temperature: float = 1.0

    def __call__(self, logits: Tensor, batch: BatchDict) -> Tensor:
        """Note the log-probabilities of a micro-batch."""
        sampled = batch["labels"] != IGNORED
        distribution = F.log_softmax(logits[sampled].float() / self.temperature, dim=-1)
        logprobs = distribution.gather(1, batch["labels"][sampled][:, None]).squeeze(1)
        self.logprobs[batch["row_number"][sampled], batch["place"][sampled]] = logprobs
        return logits.sum() * 0.0


def named_sums(sums: LossSums) -> Iterator[tuple[str, float]]:
    """Yield the mean over tokens of each sum."""
    tokens = max(1.0, sums.tokens)
    yield "clipped", sums.clipped / tokens
    yield "entropy", sums.entropy / tokens
    yield "sampling_kl", sums.sampling_kl / tokens
    yield "reference_kl", sums.reference_kl / tokens
