"""Rows of fixed length made of documents: the input of the model. Called by workers and, to feed them, by the driver.

B = rows requested, T = length of a row. Each document in a row starts its positions at 0 and has its own id, which
limits attention to the document. The label of a position is the next token *of the same document*:

    input_ids     a0  a1  a2  b0  b1  pad pad
    labels        a1  a2 -100 b1 -100 -100 -100     (-100 also where the next token is not supervised)
    position_ids   0   1   2   0   1   0   1
    document_ids   0   0   0   1   1  -1  -1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from raylane.sft.data import order
from raylane.sft.data.cache import TokenCache
from raylane.sft.data.packing import Packs, efficiency

IGNORED = -100
"""Label of a position without a loss (`ignore_index` of torch.nn.functional.cross_entropy)."""


class Mixture(Protocol):
    """Choice of the rows of each epoch (`mixing.WeightedFiles`)."""

    @property
    def num_rows(self) -> int:
        """Number of rows in an epoch, the same for all epochs."""

    def epoch_rows(self, seed: int, epoch: int) -> np.ndarray:
        """Return indices of rows, int64 [num_rows]; a row may occur more than once."""


class RowSource:
    """Rows of T tokens, made from a token cache and packs. Random access, no state.

    Attributes: `cache`; `packs`, the documents of each row; `row_tokens`, T; `pad_id`; `mixture`, the rows of an epoch
    (None: each row once).
    """

    def __init__(
        self, cache: TokenCache, packs: Packs, row_tokens: int, pad_id: int, mixture: Mixture | None = None
    ) -> None:
        self.cache = cache
        self.packs = packs
        self.row_tokens = row_tokens
        self.pad_id = pad_id
        self.mixture = mixture

    def __repr__(self) -> str:
        return f"RowSource({self.num_rows} rows of {self.row_tokens} tokens, {100 * self.efficiency:.1f}% full)"

    @property
    def num_rows(self) -> int:
        """Number of rows in one pass over the data (an epoch)."""
        return len(self.packs) if self.mixture is None else self.mixture.num_rows

    @property
    def efficiency(self) -> float:
        """Fraction of all positions that hold a token instead of padding."""
        return efficiency(self.cache.lengths, len(self.packs), self.row_tokens)

    def step_rows(self, global_batch_size: int, seed: int, step: int, shuffle: bool = True) -> np.ndarray:
        """Return the indices of the rows of a step's global batch, int64 [global_batch_size]; pure (`order`)."""
        chosen = order.batch_rows(self.num_rows, global_batch_size, seed, step, shuffle)
        if self.mixture is None:
            return chosen
        epoch, _ = order.epoch_of(step, self.num_rows, global_batch_size)
        return np.take(self.mixture.epoch_rows(seed, epoch), chosen)

    def rows(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Return input_ids, labels, position_ids and document_ids, each int64 [B, T], as drawn in the module docstring.

        Index -1 gives a row of padding only, which fills up a last batch. IndexError for a row that does not exist.
        """
        shape = (len(indices), self.row_tokens)
        out = {
            "input_ids": np.full(shape, self.pad_id, np.int64),
            "labels": np.full(shape, IGNORED, np.int64),
            "position_ids": np.zeros(shape, np.int64),
            "document_ids": np.full(shape, -1, np.int64),
        }
        for place, row in enumerate(np.asarray(indices, dtype=np.int64).tolist()):
            if not -1 <= row < len(self.packs):
                raise IndexError(f"row {row} of {len(self.packs)}")
            self._fill({name: array[place] for name, array in out.items()}, () if row == -1 else self.packs[row])
        return out

    def full_rows(self, count: int, row_tokens: int) -> dict[str, np.ndarray]:
        """Return rows as `rows` does, but [count, row_tokens] without padding: the most work that a step can be.

        Each row is one document of tokens from the data, and every position but the last one has a label.
        """
        needed, parts, number = count * row_tokens, list[np.ndarray](), 0
        while needed > 0 and number < len(self.cache.lengths):
            parts.append(np.asarray(self.cache.document(number)[0], np.int64))
            needed, number = needed - len(parts[-1]), number + 1
        ids = np.resize(np.concatenate(parts), (count, row_tokens))  # repeats the tokens if the data are too few
        labels = np.full_like(ids, IGNORED)
        labels[:, :-1] = ids[:, 1:]
        positions = np.broadcast_to(np.arange(row_tokens), ids.shape).copy()
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": positions,
            "document_ids": np.zeros_like(ids),
        }

    def _fill(self, row: dict[str, np.ndarray], pack: tuple[int, ...]) -> None:
        start = 0
        for number, document in enumerate(pack):
            tokens, supervised = self.cache.document(document)
            end = start + len(tokens)
            row["input_ids"][start:end] = tokens
            row["labels"][start : end - 1] = np.where(supervised[1:], tokens[1:], IGNORED)
            row["position_ids"][start:end] = np.arange(len(tokens))
            row["document_ids"][start:end] = number
            start = end
        # Padding counts as one more document: its positions restart, so no document attends to it.
        row["position_ids"][start:] = np.arange(self.row_tokens - start)
