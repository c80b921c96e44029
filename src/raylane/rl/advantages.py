"""Advantages of the samples of a prompt over each other. Pure."""

from __future__ import annotations

from torch import Tensor

BASELINES = ("mean", "leave_one_out")
SCALES = ("none", "std")


def group_advantages(rewards: Tensor, *, baseline: str = "mean", scale: str = "none") -> Tensor:
    """Return the advantage of each sample, float32 [N, G], from rewards [N, G] of G samples of each of N prompts.

    `baseline`: `mean` of the group (GRPO, arXiv 2402.03300), or `leave_one_out`: the mean of the others (RLOO, arXiv
    2402.14740). `scale`: `std` divides by the standard deviation of the group, as GRPO does; `none` does not, so that
    prompts of all difficulties weigh the same (Dr. GRPO, arXiv 2503.20783). Equal rewards of a group get exact zeros.
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards must have the shape [prompts, samples], got {list(rewards.shape)}")
    if baseline not in BASELINES:
        raise ValueError(f"baseline must be {' or '.join(BASELINES)}, got {baseline!r}")
    if scale not in SCALES:
        raise ValueError(f"scale must be {' or '.join(SCALES)}, got {scale!r}")
    # In float64, and of differences: rewards may be large beside what they differ by, and the mean of equal ones would
    # be rounded.
    rewards = rewards.double()
    rewards = rewards - rewards[:, :1]
    samples = rewards.shape[1]
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if baseline == "leave_one_out" and samples > 1:
        advantages = advantages * (samples / (samples - 1))
    if scale == "std":
        # Of the population: a single sample has a standard deviation too, which is 0.
        advantages = advantages / (rewards.std(dim=1, keepdim=True, correction=0) + 1e-4)
    return advantages.float()
