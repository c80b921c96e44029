"""Checks of the real model before the first step: the loss matches the model's logits, and packing separates documents.

Both can go wrong without any error. Attention between packed documents, and a class whose head does more than a matrix
product (soft-capped or scaled logits), only change losses a little. A few forward passes detect them.

The check must run wherever a training step runs, so it needs less memory: one row at a time without gradients, hidden
states [1, T, H] instead of logits where whole rows are compared, and logits [1, N, V] only of N <= 16 tokens. Called by
`worker.setup`; collective.
"""

from __future__ import annotations

import logging
import math

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from raylane.errors import ConfigError
from raylane.sft.loss import IGNORED, CrossEntropy
from raylane.sft.model import OnHost, RunModel, SupervisedModel, release_gathered
from raylane.sft.pipeline import PipelinedModel
from raylane.sft.rows import RowSource
from raylane.sft.step import evaluating, forward_only
from raylane.workers.batch import BatchDict

__all__ = ["check_model", "packed_pair"]

_log = logging.getLogger(__name__)

# Largest accepted difference of hidden states, relative to the largest value. Measured with torch 2.13 on a CPU with
# random weights of llama, qwen2 and qwen3: 0 in both precisions, and 0.24 to 0.85 if attention crosses documents. The
# tolerance is for kernels that sum in another order.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}

_LOSS_TOKENS = 16
"""Number of tokens whose logits are computed in full, to compare the two ways to the loss."""


def check_model(model: RunModel, source: RowSource, device: torch.device, precision: str) -> None:
    """Raise ConfigError unless the loss matches the model's own logits and packing does not change hidden states.

    Runs in evaluation mode: with dropout any two passes would differ. In a pipeline, where no worker can compute hidden
    states alone, packing must not change the loss.
    """
    if isinstance(model, PipelinedModel):
        _check_losses(model, packed_pair(source), device, precision)
        release_gathered(model)
        return
    assert isinstance(model, SupervisedModel)
    with torch.no_grad(), evaluating(model):
        _check_loss(model, _few_tokens(source, model.mesh.dims.row_multiple).to(device), precision)
        pair = packed_pair(source)
        if pair is None:
            _log.info("no row holds two documents, so the check of packing is skipped")
        else:
            _check_rows(model, pair, device, precision)
    release_gathered(model)


def _check_losses(model: PipelinedModel, pair: RowSource | None, device: torch.device, precision: str) -> None:
    """Compare the loss of two documents in one row with those of each document in a row of its own."""
    if pair is None:
        return
    totals = torch.stack([forward_only(model, _row(pair, i), 1, CrossEntropy(), device) for i in range(3)])
    dist.all_reduce(totals)
    packed, alone = float(totals[0]), float(totals[1] + totals[2])
    if not abs(packed - alone) <= _TOLERANCE[precision] * max(1.0, abs(alone)):
        raise ConfigError(
            f"this model does not separate packed documents: two documents have the loss {packed:.6g} in one row and "
            f"{alone:.6g} in rows of their own. Set policy.sequence_packing.enabled=false"
        )


def _row(source: RowSource, number: int) -> BatchDict:
    return BatchDict.from_arrays(source.rows([number]))


def _few_tokens(source: RowSource, multiple: int) -> BatchDict:
    """Return one row of at most `_LOSS_TOKENS` tokens around the first supervised token of the data.

    If their number is no multiple of `multiple`, the last token is repeated, without a label.
    """
    tokens, supervised = source.cache.document(0)
    first = int(np.argmax(supervised)) if supervised.any() else 0
    start = max(0, min(first - _LOSS_TOKENS // 2, len(tokens) - _LOSS_TOKENS))
    part = slice(start, start + _LOSS_TOKENS)
    ids = torch.from_numpy(tokens[part].astype(np.int64))[None]
    labels = torch.full_like(ids, IGNORED)
    labels[:, :-1] = ids[:, 1:]  # all positions, supervised or not: the two losses can be compared on any labels
    missing = -ids.shape[1] % multiple
    ids = torch.cat([ids, ids[:, -1:].expand(1, missing)], dim=1)
    labels = F.pad(labels, (0, missing), value=IGNORED)
    return BatchDict(input_ids=ids, labels=labels, position_ids=torch.arange(ids.shape[1])[None])


def _check_loss(model: SupervisedModel, batch: BatchDict, precision: str) -> None:
    """Compare the loss from logits with the loss from hidden states."""
    by_logits = float(model(batch, _from_logits))
    by_hidden = float(model(batch, CrossEntropy()))
    if not math.isfinite(by_logits):
        raise ConfigError(
            f"the loss is {by_logits} before the first step: the weights are not finite, or overflow in "
            f"policy.precision={precision}. Check policy.model_name, or use policy.precision=float32"
        )
    # Written as `not <=`, so that a NaN on either side fails the check.
    if not abs(by_logits - by_hidden) <= _TOLERANCE[precision] * max(1.0, abs(by_logits)):
        raise ConfigError(
            f"this model class changes its logits after its output head: the loss is {by_logits:.6g} from its logits "
            f"and {by_hidden:.6g} from its hidden states. Use an architecture that can be trained: llama, "
            "qwen2, qwen3, gemma, mistral"
        )


def _from_logits(logits: Tensor, batch: BatchDict) -> Tensor:
    """Return the same loss as CrossEntropy; as another function, the model gives it logits instead of hidden states."""
    return CrossEntropy()(logits, batch)


def _check_rows(model: SupervisedModel, pair: RowSource, device: torch.device, precision: str) -> None:
    """Compare the hidden states of two documents in one row with those of each document in a row of its own."""
    lengths = [int(pair.cache.lengths[document]) for document in pair.packs[0]]
    packed = _hidden(model, pair, 0, device)
    scale = max(float(packed.abs().max()), 1e-12)
    start = 0
    for row, length in enumerate(lengths, start=1):
        alone = _hidden(model, pair, row, device)[:length]
        difference = float((packed[start : start + length] - alone).abs().max()) / scale
        if not difference <= _TOLERANCE[precision]:
            raise ConfigError(
                f"this model does not separate packed documents: the hidden states of document {row} of a row differ "
                f"by {difference:.2g} (relative) from those of the same document alone. Set "
                "policy.sequence_packing.enabled=false"
            )
        start += length


def _hidden(model: SupervisedModel, source: RowSource, row: int, device: torch.device) -> Tensor:
    """Return the hidden states float32 [T, H] of one row."""
    batch = _row(source, row)
    hidden: Tensor = model(batch.to(device), None, host=OnHost(batch), hidden_only=True)[0].float()
    return hidden


def packed_pair(source: RowSource) -> RowSource | None:
    """Return three rows made from the first row with two documents: both packed, the first alone, the second alone."""
    pair = next((pack[:2] for pack in source.packs if len(pack) >= 2), None)
    if pair is None:
        return None
    return RowSource(source.cache, [pair, pair[:1], pair[1:]], source.row_tokens, source.pad_id)
