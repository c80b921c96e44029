"""Answers of a model in training to tokenised prompts, by greedy decoding, on any layout.

Each new token takes one forward pass over whole rows, without a key-value cache: slow for long answers, but it is the
very path that training uses, divided in the same way. The choice of a token happens inside the loss function, because
only there the logits of a divided model exist.

    row      prompt | answer so far | filler         every row has room for the longest answer
    label           one, at the last token           the place whose logits choose the next token

Called by `worker`; collective.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from raylane.training.labels import IGNORED
from raylane.training.model.supervised import RunModel
from raylane.training.run.micro_batches import FixedRows
from raylane.training.run.step import forward_only
from raylane.workers.batch import BatchDict


class _NextTokens:
    """Loss function that notes the most probable token at the labelled place of each row, and returns 0."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.chosen = torch.full((rows,), -1, device=device)
        """Token of each row; -1 where another worker computes it."""

    def __call__(self, logits: Tensor, batch: BatchDict) -> Tensor:
        labelled = batch["labels"] != IGNORED
        # With context parallelism the place may be in the part of another worker.
        is_local = labelled.any(dim=1)
        self.chosen[batch["row_number"][is_local]] = logits[labelled].argmax(dim=-1)
        return logits.sum() * 0.0


def generate(
    model: RunModel,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    end_ids: Collection[int],
    filler: int,
    device: torch.device,
) -> list[list[int]]:
    """Return at most `new_tokens` tokens for each prompt, the same on all workers; an answer stops before an end token.

    All workers pass the same prompts, and all compute all of them.
    """
    needed = max(len(prompt) for prompt in prompts) + new_tokens
    # One length for all passes: a pipeline prepares its buffers for each new one.
    length = needed + -needed % model.mesh.dims.row_multiple
    rows = len(prompts)
    answers: list[list[int]] = [[] for _ in prompts]
    ended = [False] * rows
    for _ in range(new_tokens):
        ids = torch.full((rows, length), filler)
        labels = torch.full((rows, length), IGNORED)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            # Filler behind the text changes nothing before it: attention is causal.
            text = [*prompt, *answer]
            ids[row, : len(text)] = torch.tensor(text)
            labels[row, len(text) - 1] = 0  # any label: only its place counts
        positions = torch.arange(length).expand(rows, length).contiguous()
        batch = BatchDict(input_ids=ids, labels=labels, position_ids=positions, row_number=torch.arange(rows))
        chooser = _NextTokens(rows, device)
        forward_only(model, batch, FixedRows(rows), chooser, device)
        # Each token is known to the workers that computed its logits; all need it for the next pass.
        dist.all_reduce(chooser.chosen, dist.ReduceOp.MAX)
        for row, token in enumerate(chooser.chosen.tolist()):
            ended[row] = ended[row] or token in end_ids
            if not ended[row]:
                answers[row].append(token)
        if all(ended):
            break
    return answers
