"""Rows of training from groups of answers. Pure.

    row        prompt | answer | filler
    labels     the next token where the answer is predicted, -100 elsewhere

P = tokens of a prompt, G = answers to it, R = tokens of the longest of them, B = rows, T = tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raylane.rl.advantages import group_advantages
from raylane.training.labels import IGNORED
from raylane.workers.batch import BatchDict


@dataclass(frozen=True)
class RowOptions:
    """Way in which rows are made."""

    tokens: int
    """Length of a row, T."""
    pad_id: int
    baseline: str = "mean"
    scale: str = "none"
    average: str = "token"
    """`token`: all tokens weigh the same; `sequence`: all answers do."""
    keeps_all: bool = False
    """True to keep answers whose advantage is 0, which have no gradient but one of the divergence."""


@dataclass(frozen=True)
class AnswerCounts:
    """Numbers of answers and their tokens, kept or not."""

    answers: int
    tokens: int
    """Sampled tokens."""
    kept: int
    """Answers that became rows."""
    kept_tokens: int


@dataclass(frozen=True)
class AnswerRow:
    """One answer with its prompt."""

    prompt: torch.Tensor
    """int64 [P]."""
    tokens: torch.Tensor
    """int64 [length of the answer]."""
    logprobs: torch.Tensor
    """float32, as `tokens`."""
    advantage: float


def answer_rows(groups: Sequence[dict[str, Any]], options: RowOptions) -> tuple[list[AnswerRow], AnswerCounts]:
    """Return the answers that are trained on, and the counts of all of them.

    A group has prompt, int64 [P]; tokens, int64 [G, R]; logprobs, float32 [G, R]; lengths, int64 [G]; rewards,
    float64 [G].
    """
    rows, tokens, answers = [], 0, 0
    for group in groups:
        # Per group: the number of answers may differ between groups of other engines.
        (advantages,) = group_advantages(group["rewards"][None], baseline=options.baseline, scale=options.scale)
        for i, length in enumerate(group["lengths"].tolist()):
            tokens, answers = tokens + length, answers + 1
            advantage = float(advantages[i])
            if advantage or options.keeps_all:
                row = AnswerRow(group["prompt"], group["tokens"][i, :length], group["logprobs"][i, :length], advantage)
                rows.append(row)
    return rows, AnswerCounts(answers, tokens, len(rows), sum(len(row.tokens) for row in rows))


def batch_of(rows: Sequence[AnswerRow], size: int, counts: AnswerCounts, options: RowOptions) -> BatchDict:
    """Return a batch of `size` rows; those beyond the answers have no labels. `counts` are those of all workers."""
    shape = size, options.tokens
    ids = torch.full(shape, options.pad_id)
    labels = torch.full(shape, IGNORED)
    documents = torch.full(shape, -1)
    old, advantages, weights = (torch.zeros(shape) for _ in range(3))
    for number, row in enumerate(rows):
        # The last token predicts nothing, so it is no input.
        whole = torch.cat([row.prompt, row.tokens])
        end, first = len(whole) - 1, len(row.prompt) - 1
        ids[number, :end] = whole[:-1]
        labels[number, first:end] = row.tokens
        documents[number, :end] = 0
        old[number, first:end] = row.logprobs
        advantages[number, first:end] = row.advantage
        # The step divides by the number of tokens with labels, and answers that were left out count too.
        if options.average == "token":
            weights[number, first:end] = counts.kept_tokens / max(1, counts.tokens)
        else:
            weights[number, first:end] = counts.kept_tokens / max(1, counts.answers * len(row.tokens))
    return BatchDict(
        input_ids=ids,
        labels=labels,
        position_ids=torch.arange(options.tokens).expand(shape).contiguous(),
        document_ids=documents,
        old_logprobs=old,
        advantages=advantages,
        weights=weights,
    )
