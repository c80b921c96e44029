"""Rows of fixed length made of tokenised documents: the input of the model. Called by workers and by the driver.

The documents are on disk, in Arrow files that `datasets` has written, and read through memory maps: written once by the
driver, opened quickly by every worker.

    folder/data-*.arrow    tokens      list<int32>    tokens of a document
                           mask        list<uint8>    1 where the token has a loss
                           row         int64          row of the data files that the document was made from

This module knows nothing of text.

B = rows requested, T = length of a row. Each document in a row starts its positions at 0 and has its own id, which
limits attention to the document. The label of a position is the next token *of the same document*:

    input_ids     a0  a1  a2  b0  b1  pad pad
    labels        a1  a2 -100 b1 -100 -100 -100     (-100 also where the next token is not supervised)
    position_ids   0   1   2   0   1   0   1
    document_ids   0   0   0   1   1  -1  -1
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from raylane.errors import DataError
from raylane.sft.data import order
from raylane.sft.data.packing import Packs, efficiency
from raylane.sft.data.places import FilePlace
from raylane.training.labels import IGNORED

CACHE_COLUMNS = ("tokens", "mask", "row")
"""Columns of a cache."""


class TokenCache:
    """Open cache folder. The arrays it returns are read-only views of the mapped files.

    Attributes: `folder`; `lengths` int64 [N], tokens in each document; `origin` int64 [N], its row of the data files.
    """

    def __init__(self, folder: str | Path) -> None:
        """Map the files of `folder`; DataError if files are missing or damaged."""
        import pyarrow as pa

        self.folder = folder = Path(folder)
        expected = [pa.list_(pa.int32()), pa.list_(pa.uint8()), pa.int64()]
        try:
            files = sorted(folder.glob("data-*.arrow"))
            if not files:
                raise DataError(f"token cache {folder} cannot be read on this machine: no files. {_AGAIN}")
            tables = [pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files]
            if any([table.schema.field(name).type for name in CACHE_COLUMNS] != expected for table in tables):
                raise DataError(f"token cache {folder} is damaged: its columns are of other types. {_AGAIN}")
        except (OSError, KeyError, pa.ArrowException) as error:
            raise DataError(f"token cache {folder} cannot be read on this machine: {error}. {_AGAIN}") from error
        batches = [batch for table in tables for batch in table.to_batches() if batch.num_rows]
        self._chunks = [
            _Chunk(tokens.offsets.to_numpy(), tokens.values.to_numpy(), mask.values.to_numpy().view(np.bool_))
            for tokens, mask in ((batch.column("tokens"), batch.column("mask")) for batch in batches)
        ]
        lengths = [np.diff(chunk.offsets) for chunk in self._chunks]
        self._ends = np.cumsum([len(part) for part in lengths], dtype=np.int64)
        """Number of documents up to the end of each chunk."""
        self.lengths = np.concatenate([np.zeros(0, np.int64), *lengths]).astype(np.int64)
        rows = [batch.column("row").to_numpy() for batch in batches]
        self.origin = np.concatenate([np.zeros(0, np.int64), *rows])

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"TokenCache({str(self.folder)!r}, {len(self)} documents, {self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all documents."""
        return int(self.lengths.sum())

    @property
    def num_supervised(self) -> int:
        """Number of supervised tokens in all documents; each access reads the whole mask."""
        return sum(int(np.count_nonzero(chunk.supervised)) for chunk in self._chunks)

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens int32 [n], supervised bool [n]) of one document; IndexError if the index is out of range."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        chunk = self._chunks[number]
        at = index - (int(self._ends[number - 1]) if number else 0)
        part = slice(int(chunk.offsets[at]), int(chunk.offsets[at + 1]))
        return chunk.tokens[part], chunk.supervised[part]


class _Chunk(NamedTuple):
    """Documents of one record batch."""

    offsets: np.ndarray
    """Document i has the tokens from offsets[i] to offsets[i + 1]."""
    tokens: np.ndarray
    supervised: np.ndarray


_AGAIN = "Delete it and run the command again"
_FIXED = 2**32
"""Number that stands for the epoch in the seed of a file's fixed order; no run has so many epochs."""


@dataclass(frozen=True)
class WeightedFiles:
    """Number of packed rows of each file, in the order of the packs, and weight of each file."""

    rows: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        for number, (rows, weight) in enumerate(zip(self.rows, self.weights, strict=True)):
            if not sum(_shares(rows, weight)):
                raise DataError(
                    f"data.train[{number}] makes {rows} rows, and weight={weight:g} uses none of them in an epoch. Use "
                    f"a weight of at least {0.5 / max(rows, 1):.2g}, or more data",
                    rows=rows,
                    weight=weight,
                )

    @property
    def num_rows(self) -> int:
        """Number of rows in one epoch."""
        return sum(
            whole * rows + part
            for rows, weight in zip(self.rows, self.weights, strict=True)
            for whole, part in [_shares(rows, weight)]
        )

    def epoch_rows(self, seed: int, epoch: int) -> np.ndarray:
        """Return the packed rows that an epoch uses, file by file, int64 [num_rows], read-only."""
        return _drawn(self.rows, self.weights, seed, epoch)


# Every step of an epoch asks again; two entries for the same reason as in `order.epoch_order`.
@functools.lru_cache(maxsize=2)
def _drawn(rows_of_files: tuple[int, ...], weights: tuple[float, ...], seed: int, epoch: int) -> np.ndarray:
    drawn, first = [], 0
    for number, (rows, weight) in enumerate(zip(rows_of_files, weights, strict=True)):
        whole, part = _shares(rows, weight)
        # One fixed order per file. Each epoch takes the next rows of it, and starts again at its end.
        fixed = order.epoch_order(rows, seed, _FIXED + number)
        chosen = fixed[np.arange(epoch * part, (epoch + 1) * part) % rows]
        drawn += [np.tile(np.arange(rows, dtype=np.int64), whole) + first, chosen + first]
        first += rows
    joined = np.concatenate(drawn)
    joined.setflags(write=False)
    return joined


def _shares(rows: int, weight: float) -> tuple[int, int]:
    """Return (times that all rows are used, number of rows used once more) in an epoch."""
    whole = math.floor(weight)
    return whole, round((weight - whole) * rows)


@dataclass(eq=False, repr=False)
class RowSource:
    """Rows of T tokens, made from a token cache and packs. Random access, no state."""

    cache: TokenCache
    packs: Packs
    """Documents of each row."""
    row_tokens: int
    """T."""
    pad_id: int
    mixture: WeightedFiles | None = None
    """Choice of the rows of each epoch; None: each row once."""
    places: tuple[FilePlace, ...] = ()
    """Files of the data, which tell where a document is from."""

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

    @functools.cached_property
    def row_lengths(self) -> np.ndarray:
        """Number of tokens in each row, int64 [len(packs)]."""
        # Without a loop over the packs, of which there may be millions.
        counts = np.fromiter(map(len, self.packs), np.int64, len(self.packs))
        documents = np.fromiter(itertools.chain.from_iterable(self.packs), np.int64, int(counts.sum()))
        return np.add.reduceat(self.cache.lengths[documents], np.cumsum(counts) - counts)

    def step_rows(
        self, global_batch_size: int, seed: int, step: int, shuffle: bool = True, group_by_length: bool = False
    ) -> np.ndarray:
        """Return the indices of the rows of a step's global batch, int64 [global_batch_size]; pure (`order`)."""
        epoch, _ = order.epoch_of(step, self.num_rows, global_batch_size)
        of_epoch = None if self.mixture is None else self.mixture.epoch_rows(seed, epoch)
        if group_by_length:
            row_order = order.epoch_order(self.num_rows, seed, epoch, shuffle)
            row_order = row_order if of_epoch is None else of_epoch[row_order]
            return order.grouped_by_length(row_order, self.row_lengths, global_batch_size, seed, step, shuffle)
        chosen = order.batch_rows(self.num_rows, global_batch_size, seed, step, shuffle)
        return chosen if of_epoch is None else np.take(of_epoch, chosen)

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
