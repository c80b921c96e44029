"""Sampling of answers with a key-value cache, for transformers' models in this process.

N = sequences, P = tokens of the longest prompt, R = tokens of the longest answer, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Answers:
    """Sampled answers."""

    tokens: Tensor
    """int64 [N, R]; the filler after the end of an answer."""
    logprobs: Tensor
    """Log-probabilities of the tokens when they were sampled, float32 [N, R]; 0 after the end."""
    lengths: Tensor
    """Number of tokens of each answer with its end token, int64 [N]."""


@torch.inference_mode()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    end_ids: Collection[int],
    filler: int,
    *,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Answers:
    """Sample an answer of at most `new_tokens` tokens to each prompt; temperature 0 takes the most probable tokens.

    Log-probabilities are those of the distribution that was sampled from; at temperature 0, of temperature 1. Nothing
    is cut off (no top-k, no top-p). Equal calls with generators of equal state give equal answers.
    """
    from transformers import DynamicCache

    # Prompts are padded on the left, so that all sequences get their next token at the same place.
    device, rows = next(model.parameters()).device, len(prompts)
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((rows, longest), filler, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, device=device)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    # Without padding no mask, which is quicker.
    mask = None if not bool(padding.any()) else (torch.arange(longest, device=device) >= padding[:, None]).long()
    places = (torch.arange(longest, device=device) - padding[:, None]).clamp(min=0)
    ends = torch.tensor(sorted(end_ids), device=device)
    cache: Any = DynamicCache(config=model.config)
    ended = torch.zeros(rows, dtype=torch.bool, device=device)
    tokens, logprobs = [], []
    for _ in range(new_tokens):
        inputs = {"input_ids": ids, "position_ids": places, "past_key_values": cache, "use_cache": True}
        logits = model(**inputs, attention_mask=mask, logits_to_keep=1).logits[:, -1].float()
        chosen, logprob = _choose(logits, temperature, generator)
        # Sequences that have ended go on with filler, which costs less than to take them out of the cache.
        chosen = torch.where(ended, filler, chosen)
        tokens.append(chosen)
        logprobs.append(torch.where(ended, 0.0, logprob))
        ended = ended | torch.isin(chosen, ends)
        if bool(ended.all()):
            break
        ids, places = chosen[:, None], places[:, -1:] + 1
        if mask is not None:
            mask = F.pad(mask, (0, 1), value=1)
    stacked = torch.stack(tokens, 1)
    # Lengths are found at the end, from whole rows: nothing is counted while tokens are made.
    is_end = torch.isin(stacked, ends)
    # The filler may be an end token: the first one counts.
    first = torch.where(is_end.any(1), is_end.int().argmax(1) + 1, stacked.shape[1])
    return Answers(stacked, torch.stack(logprobs, 1), first)


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Return a token for each of logits [N, V], and its log-probability."""
    distribution = F.log_softmax(logits / (temperature or 1.0), dim=-1)
    if temperature == 0:
        chosen = distribution.argmax(-1)
    else:
        # The largest of log-probabilities with Gumbel noise: the same draw as multinomial, in less time.
        noise = torch.empty_like(distribution).exponential_(generator=generator)
        chosen = (distribution - noise.log()).argmax(-1)
    return chosen, distribution.gather(1, chosen[:, None]).squeeze(1)
