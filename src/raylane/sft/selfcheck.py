"""Checks on the real model before the first step: is the loss the model's own, and does packing keep documents apart?

Both go wrong without any error: attention that leaks between packed documents, and a class whose head does more than a
matrix product (soft-capped or scaled logits), only give slightly other losses. One forward of a few rows finds them.
Called by `worker.setup`; collective.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from raylane.errors import ConfigError
from raylane.sft.loss import CrossEntropy
from raylane.sft.model import SupervisedModel, sharded
from raylane.sft.rows import RowSource
from raylane.workers.batch import BatchDict

__all__ = ["check_model", "packed_pair"]

_log = logging.getLogger(__name__)

# Largest difference of logits, relative to the largest logit. Measured with torch 2.13 on a CPU, random weights of
# llama, qwen2 and qwen3: 0 in both precisions; 0.24 to 0.85 when documents see each other. The room is for kernels that
# add up in another order.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def check_model(model: SupervisedModel, source: RowSource, device: torch.device, precision: str) -> None:
    """Raise ConfigError unless the loss is that of the model's own logits, and packing does not change logits."""
    pair = packed_pair(source)
    rows = pair or RowSource(source.cache, [(0,)], source.row_tokens, source.pad_id)
    arrays = rows.rows(range(rows.num_rows))
    batch = BatchDict({name: torch.from_numpy(array) for name, array in arrays.items()}).to(device)
    with torch.no_grad():
        logits: Tensor = model(batch, None).float()
        loss: Tensor = model(batch, CrossEntropy())
    sharded(model).reshard()
    _compare_losses(float(CrossEntropy()(logits, batch)), float(loss), precision)
    if pair is None:
        _log.info("no row holds two documents; packing has nothing to keep apart")
    else:
        _compare_rows(logits, pair, precision)


def _compare_losses(by_logits: float, by_hidden: float, precision: str) -> None:
    if not abs(by_logits - by_hidden) <= _TOLERANCE[precision] * max(1.0, abs(by_logits)):
        raise ConfigError(
            f"this model class does more to its logits than its output head: the loss is {by_logits:.6g} from its "
            f"logits and {by_hidden:.6g} from its hidden states; llama, qwen2 and qwen3 can be trained"
        )


def _compare_rows(logits: Tensor, pair: RowSource, precision: str) -> None:
    lengths = [int(pair.cache.lengths[document]) for document in pair.packs[0]]
    scale = float(logits.abs().max())
    start = 0
    for row, length in enumerate(lengths, start=1):
        packed, alone = logits[0, start : start + length], logits[row, :length]
        difference = float((packed - alone).abs().max()) / max(scale, 1e-12)
        if not difference <= _TOLERANCE[precision]:
            raise ConfigError(
                f"packed documents are not kept apart by this model: the logits of document {row} of a row differ by "
                f"{difference:.2g} (relative) from those it gets alone; set policy.sequence_packing.enabled=false"
            )
        start += length


def packed_pair(source: RowSource) -> RowSource | None:
    """Three rows made from the first row with two documents: both packed, the first alone, the second alone."""
    pair = next((pack[:2] for pack in source.packs if len(pack) >= 2), None)
    if pair is None:
        return None
    return RowSource(source.cache, [pair, pair[:1], pair[1:]], source.row_tokens, source.pad_id)
