"""Checks on the real model before the first step: is the loss the model's own, and does packing keep documents apart?

Both go wrong without any error: attention that leaks between packed documents, and a class whose head does more than a
matrix product (soft-capped or scaled logits), only give slightly other losses. A few forward passes find them.

The check must run wherever a training step does, so it needs less memory: one row at a time without gradients, hidden
states [1, T, H] instead of logits wherever whole rows are compared, and logits [1, N, V] of N <= 16 tokens only.
Called by `worker.setup`; collective.
"""

from __future__ import annotations

import logging
import math

import numpy as np
import torch
from torch import Tensor

from raylane.errors import ConfigError
from raylane.sft.loss import IGNORED, CrossEntropy
from raylane.sft.model import SupervisedModel, sharded
from raylane.sft.rows import RowSource
from raylane.sft.step import evaluating
from raylane.workers.batch import BatchDict

__all__ = ["check_model", "packed_pair"]

_log = logging.getLogger(__name__)

# Largest difference of hidden states, relative to the largest one. Measured with torch 2.13 on a CPU, random weights of
# llama, qwen2 and qwen3: 0 in both precisions; 0.24 to 0.85 when documents see each other. The room is for kernels that
# add up in another order.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}

_LOSS_TOKENS = 16
"""Tokens whose logits are made in full, to compare two ways to the loss."""


def check_model(model: SupervisedModel, source: RowSource, device: torch.device, precision: str) -> None:
    """Raise ConfigError unless the loss is that of the model's own logits, and packing does not change what it sees.

    Runs in evaluation mode: dropout would make any two passes differ.
    """
    with torch.no_grad(), evaluating(model):
        _check_loss(model, _few_tokens(source).to(device), precision)
        pair = packed_pair(source)
        if pair is None:
            _log.info("no row holds two documents; packing has nothing to keep apart")
        else:
            _check_rows(model, pair, device, precision)
    sharded(model).reshard()


def _few_tokens(source: RowSource) -> BatchDict:
    """Return one row of at most `_LOSS_TOKENS` tokens around the first supervised token of the data."""
    tokens, supervised = source.cache.document(0)
    first = int(np.argmax(supervised)) if supervised.any() else 0
    start = max(0, min(first - _LOSS_TOKENS // 2, len(tokens) - _LOSS_TOKENS))
    part = slice(start, start + _LOSS_TOKENS)
    ids = torch.from_numpy(tokens[part].astype(np.int64))[None]
    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = ids[:, 1:]  # supervised or not: any label serves to compare two ways to one loss
    return BatchDict(input_ids=ids, labels=labels, position_ids=torch.arange(ids.shape[1])[None])


def _check_loss(model: SupervisedModel, batch: BatchDict, precision: str) -> None:
    logits: Tensor = model(batch, None).float()
    by_logits = float(CrossEntropy()(logits, batch))
    by_hidden = float(model(batch, CrossEntropy()))
    if not math.isfinite(by_logits):
        raise ConfigError(
            f"the model gives a loss of {by_logits} before the first step: its weights are not finite, or overflow in "
            f"policy.precision={precision}. Check policy.model_name, or use policy.precision=float32"
        )
    if not abs(by_logits - by_hidden) <= _TOLERANCE[precision] * max(1.0, abs(by_logits)):
        raise ConfigError(
            f"this model class does more to its logits than its output head: the loss is {by_logits:.6g} from its "
            f"logits and {by_hidden:.6g} from its hidden states; llama, qwen2 and qwen3 can be trained"
        )


def _check_rows(model: SupervisedModel, pair: RowSource, device: torch.device, precision: str) -> None:
    """Compare the hidden states of two documents in one row with those that each has in a row of its own."""
    lengths = [int(pair.cache.lengths[document]) for document in pair.packs[0]]
    packed = _hidden(model, pair, 0, device)
    scale = max(float(packed.abs().max()), 1e-12)
    start = 0
    for row, length in enumerate(lengths, start=1):
        alone = _hidden(model, pair, row, device)[:length]
        difference = float((packed[start : start + length] - alone).abs().max()) / scale
        if not difference <= _TOLERANCE[precision]:
            raise ConfigError(
                f"packed documents are not kept apart by this model: the hidden states of document {row} of a row "
                f"differ by {difference:.2g} (relative) from those it gets alone; set "
                "policy.sequence_packing.enabled=false"
            )
        start += length


def _hidden(model: SupervisedModel, source: RowSource, row: int, device: torch.device) -> Tensor:
    """Return the hidden states float32 [T, H] of one row."""
    batch = BatchDict({name: torch.from_numpy(array) for name, array in source.rows([row]).items()}).to(device)
    hidden: Tensor = model(batch, None, hidden_only=True)[0].float()
    return hidden


def packed_pair(source: RowSource) -> RowSource | None:
    """Three rows made from the first row with two documents: both packed, the first alone, the second alone."""
    pair = next((pack[:2] for pack in source.packs if len(pack) >= 2), None)
    if pair is None:
        return None
    return RowSource(source.cache, [pair, pair[:1], pair[1:]], source.row_tokens, source.pad_id)
