"""Rows of an epoch drawn from several data files by weight: a pure function of seed and epoch, without any state.

The weight of a file is the number of times that its rows are used in an epoch. Each file is packed by itself, so a row
belongs to one file, and every epoch has the same number of rows (file 1 with weight 2, file 2 with weight 0.5):

    packed rows   a0 a1 a2 | b0 b1 b2 b3
    epoch 0       a0 a1 a2 a0 a1 a2 | b2 b0           then `order.epoch_order` mixes them
    epoch 1       a0 a1 a2 a0 a1 a2 | b3 b1           the other half of b: all rows of a file are used equally often

Files of weight 1 only are packed together instead, as one file. Called by `worker`, `trainer` and `planning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data import order
from raylane.sft.data.packing import Algorithm, Packs, pack_documents
from raylane.sft.data.prepared import PreparedData
from raylane.sft.data.rows import RowSource, TokenCache, WeightedFiles
from raylane.training.config.layout import readers
from raylane.training.config.policy import PolicyConfig


def pack_by_file(
    lengths: np.ndarray, documents: Sequence[int], capacity: int, algorithm: Algorithm
) -> tuple[Packs, tuple[int, ...]]:
    """Return the packs of all files, one file after the other, and the number of packs of each file.

    `documents` holds the number of documents of each file; `lengths` the tokens of all documents.
    """
    packs: Packs = []
    counts = []
    for end, count in zip(accumulate(documents), documents, strict=True):
        start = end - count
        of_file = pack_documents(lengths[start:end], capacity, algorithm)
        packs += [tuple(start + document for document in pack) for pack in of_file]
        counts.append(len(of_file))
    return packs, tuple(counts)


def open_rows(folder: str | Path, policy: PolicyConfig, pad_id: int) -> RowSource:
    """Return the rows of a cache folder, laid out as `policy` asks (packing algorithm and row length)."""
    cache = TokenCache(folder)
    packs = pack_documents(cache.lengths, policy.max_total_sequence_length, _packing_algorithm(policy))
    return RowSource(cache, packs, policy.max_total_sequence_length, pad_id)


def _packing_algorithm(policy: PolicyConfig) -> Algorithm:
    """Return the name of the packing algorithm, "none" for one document in each row."""
    return policy.sequence_packing.algorithm if policy.sequence_packing.enabled else "none"


def open_training_rows(prepared: PreparedData, config: SftRunConfig) -> RowSource:
    """Return the rows of the training data, with the weights of its files; DataError if a weight uses no row."""
    policy, weights = config.policy, config.data.train_weights
    if set(weights) == {1.0}:
        return replace(open_rows(prepared.train, policy, prepared.pad_id), places=prepared.places)
    cache = TokenCache(prepared.train)
    documents = [file.documents for file in prepared.files]
    length = policy.max_total_sequence_length
    packs, counts = pack_by_file(cache.lengths, documents, length, _packing_algorithm(policy))
    return RowSource(cache, packs, length, prepared.pad_id, WeightedFiles(counts, weights), prepared.places)


def documents_of_step(rows: RowSource, config: SftRunConfig, step: int) -> list[int]:
    """Return the documents in the rows of a step's global batch, row by row."""
    return [document for row in rows_of_step(rows, config, step) for document in rows.packs[row]]


def rows_of_step(rows: RowSource, config: SftRunConfig, step: int) -> np.ndarray:
    """Return the indices of the rows of a step's global batch, int64 [rows], in the order in which workers take them.

    Each reader takes as many successive rows as the others. Rows that are not packed are dealt by length: then the
    padding of micro-batches is small, and readers wait little for each other. A batch has the same rows in any order.
    """
    policy, data = config.policy, config.data
    chosen = rows.step_rows(
        policy.train_global_batch_size, config.sft.seed, step, data.shuffle, group_by_length=data.group_by_length
    )
    if policy.sequence_packing.enabled:
        return chosen
    return order.deal_by_length(chosen, rows.row_lengths[chosen], readers(config), policy.micro_batch_divisor)
