"""Documents laid out in rows of fixed length: what a model is given. Called by workers and, to feed them, the driver.

B = rows asked for, T = length of a row. Each document of a row starts its positions at 0 and has its own id, which is
what keeps attention inside it; the label of a position is the token that follows it *in the same document*:

    input_ids     a0  a1  a2  b0  b1  pad pad
    labels        a1  a2 -100 b1 -100 -100 -100     (and -100 wherever the following token is not supervised)
    position_ids   0   1   2   0   1   0   1
    document_ids   0   0   0   1   1  -1  -1
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from raylane.sft.cache import TokenCache
from raylane.sft.packing import PackPlan, efficiency, plan_packs

if TYPE_CHECKING:
    from raylane.sft.config import PolicyConfig

__all__ = ["IGNORED", "RowSource", "open_rows"]

IGNORED = -100  # the label that cross-entropy leaves out (torch.nn.functional.cross_entropy's ignore_index)


class RowSource:
    """Rows of T tokens, made from a token cache and a packing plan. Random access, no state.

    Attributes: `cache`; `packs`, the documents of each row; `row_tokens`, T; `pad_id`.
    """

    def __init__(self, cache: TokenCache, packs: PackPlan, row_tokens: int, pad_id: int) -> None:
        self.cache = cache
        self.packs = packs
        self.row_tokens = row_tokens
        self.pad_id = pad_id

    def __repr__(self) -> str:
        return f"RowSource({self.num_rows} rows of {self.row_tokens} tokens, {100 * self.efficiency:.1f}% full)"

    @property
    def num_rows(self) -> int:
        """Rows in one pass over the data."""
        return len(self.packs)

    @property
    def efficiency(self) -> float:
        """Part of all positions that hold a token rather than padding."""
        return efficiency(self.cache.lengths, self.num_rows, self.row_tokens)

    def rows(self, indices: Sequence[int] | np.ndarray) -> dict[str, np.ndarray]:
        """input_ids, labels, position_ids and document_ids, each int64[B, T]; see the drawing above.

        Index -1 gives a row of padding alone, which fills up a last batch. IndexError for a row that is not there.
        """
        shape = (len(indices), self.row_tokens)
        out = {
            "input_ids": np.full(shape, self.pad_id, np.int64),
            "labels": np.full(shape, IGNORED, np.int64),
            "position_ids": np.zeros(shape, np.int64),
            "document_ids": np.full(shape, -1, np.int64),
        }
        for place, row in enumerate(np.asarray(indices, dtype=np.int64).tolist()):
            if not -1 <= row < self.num_rows:
                raise IndexError(f"row {row} of {self.num_rows}")
            self._fill({name: array[place] for name, array in out.items()}, () if row == -1 else self.packs[row])
        return out

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
        row["position_ids"][start:] = np.arange(self.row_tokens - start)


def open_rows(folder: str | Path, policy: PolicyConfig, pad_id: int) -> RowSource:
    """The rows of a cache folder as `policy.sequence_packing` and `policy.max_total_sequence_length` lay them out."""
    cache = TokenCache.open(folder)
    algorithm = policy.sequence_packing.algorithm if policy.sequence_packing.enabled else "none"
    packs = plan_packs(cache.lengths, policy.max_total_sequence_length, algorithm)
    return RowSource(cache, packs, policy.max_total_sequence_length, pad_id)
