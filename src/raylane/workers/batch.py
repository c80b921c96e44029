"""Batches: dicts whose values are tensors [B, ...] or lists of length B, with operations along B.

A batch is a plain subclass of dict that can be pickled, and copies tensors only where rows have to move. This module
uses torch, and is independent of Ray and of worker groups. Drivers split batches for workers, and workers split them
further into micro-batches.

B = number of rows of a batch. A token budget counts rows x longest row, which is the cost of a padded micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch


class BatchDict(dict[str, Any]):
    """A dict of torch tensors [B, ...] of any dtype and device, or lists of length B, with the same B for all keys.

    The constructor and all methods check this: ValueError with keys and sizes, TypeError for any other kind of value.
    Methods return new batches and do not change this one; `slice`, `chunk` and shards without reordering share its
    storage.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of dict."""
        super().__init__(*args, **kwargs)
        self.size  # noqa: B018 - the property raises

    @property
    def size(self) -> int:
        """Number of rows, B; 0 for a batch without keys."""
        sizes: dict[str, int] = {}
        for key, value in self.items():
            sizes[key] = _rows(key, value)
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the values of a batch must have the same number of rows, got {sizes}")
        return next(iter(sizes.values()), 0)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> BatchDict:
        """Return a batch of tensors that share the memory of NumPy arrays [B, ...]."""
        return cls({key: torch.from_numpy(array) for key, array in arrays.items()})

    @classmethod
    def from_batches(cls, batches: Sequence[Mapping[str, Any]], pad_values: Mapping[str, float] = {}) -> BatchDict:
        """Concatenate batches along B.

        Tensors of one key whose sizes differ in later dimensions are padded at their ends to the largest size, with
        `pad_values[key]` (default 0). Raises ValueError if batches have different keys, if a key has different dtypes,
        kinds or numbers of dimensions, or if `pad_values` names a key that no batch has.
        """
        parts = [cls(batch) for batch in batches]
        if not parts:
            raise ValueError("from_batches needs at least one batch, got none")
        keys = list(parts[0])
        for i, part in enumerate(parts):
            part.size  # noqa: B018 - the property raises if values of the batch differ in B
            if set(part) != set(keys):
                raise ValueError(
                    f"batches must have the same keys: batch {i} has {sorted(part)}, batch 0 has {sorted(keys)}"
                )
        _check_keys("pad_values", pad_values, keys)
        return cls({key: _join(key, [part[key] for part in parts], pad_values.get(key, 0)) for key in keys})

    def select(self, rows: Sequence[int] | torch.Tensor) -> BatchDict:
        """Return these rows in this order as a copy; rows may be repeated.

        ValueError for a row outside the batch, TypeError for a mask or fractions.
        """
        # Without this check a mask would select only the rows 0 and 1, and a fraction the row below it.
        listed = rows.tolist() if isinstance(rows, torch.Tensor) else list(rows)
        for row in listed:
            if isinstance(row, (bool, np.bool_)) or not hasattr(row, "__index__"):
                raise TypeError(
                    f"rows are integers, got {row!r}. For a mask pass mask.nonzero().flatten(), which lists its rows"
                )
        picked = [int(row) for row in listed]
        size = self.size
        outside = [row for row in picked if not 0 <= row < size]
        if outside:
            raise ValueError(f"rows {outside[:5]} are not in a batch of {size} rows")
        index = torch.tensor(picked, dtype=torch.long, device="cpu")
        return self._map(
            lambda value: (
                value[index.to(value.device)] if isinstance(value, torch.Tensor) else [value[row] for row in picked]
            )
        )

    def slice(self, start: int, stop: int) -> BatchDict:
        """Return rows `start` to `stop` (excluded) as views. ValueError unless 0 <= start <= stop <= size."""
        if not 0 <= start <= stop <= self.size:
            raise ValueError(f"slice {start}:{stop} does not lie in a batch of {self.size} rows")
        return self._map(lambda value: value[start:stop])

    def chunk(self, index: int, chunks: int) -> BatchDict:
        """Return one of `chunks` equal, contiguous parts as views. ValueError if the rows cannot be divided evenly."""
        if not 0 <= index < chunks:
            raise ValueError(f"chunk index must be from 0 to {chunks - 1}, got {index}")
        rows = _divided(self.size, chunks, "chunks")
        return self.slice(index * rows, (index + 1) * rows)

    def shard(self, shards: int, *, batch_size: int | None = None, allow_uneven: bool = False) -> list[BatchDict]:
        """Split the batch into one batch per shard.

        With `batch_size`, each run of that many rows is split over all shards, so that shard i holds its part of every
        global batch, in order. With `allow_uneven`, the first shards get one row more if the rows do not divide evenly
        (not together with `batch_size`); without it, such sizes raise ValueError.
        """
        size = self.size
        if shards < 1:
            raise ValueError(f"shards must be at least 1, got {shards}")
        if allow_uneven:
            if batch_size is not None:
                raise ValueError("allow_uneven and batch_size contradict each other. Pass one of them")
            edges = [i * (size // shards) + min(i, size % shards) for i in range(shards + 1)]
            return [self.slice(edges[i], edges[i + 1]) for i in range(shards)]
        batch_size = size if batch_size is None else batch_size
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 row, got {batch_size} for a batch of {size} rows")
        steps, rows = (
            _divided(size, batch_size, "rows per global batch", sized=True),
            _divided(batch_size, shards, "shards"),
        )
        if steps == 1:  # contiguous rows: views instead of copies
            return [self.slice(i * rows, (i + 1) * rows) for i in range(shards)]
        # Rows of a shard are not contiguous now: shard i takes its part out of each global batch.
        starts = [[step * batch_size + i * rows for step in range(steps)] for i in range(shards)]
        return [self.select([at + row for at in own_starts for row in range(rows)]) for own_starts in starts]

    def pad(self, size: int, fill: Mapping[str, Any] = {}) -> BatchDict:
        """Return a batch grown to `size` rows, filled with `fill[key]` (default 0 for tensors, None for lists)."""
        missing = size - self.size
        if missing < 0:
            raise ValueError(f"cannot pad {self.size} rows to {size}")
        _check_keys("fill", fill, self)
        grown = BatchDict()
        for key, value in self.items():
            if isinstance(value, torch.Tensor):
                grown[key] = torch.cat([value, value.new_full((missing, *value.shape[1:]), fill.get(key, 0))])
            else:
                grown[key] = value + [fill.get(key)] * missing
        return grown

    def micro_batches(self, rows: int) -> Iterator[BatchDict]:
        """Return contiguous parts of `rows` rows each, as views. ValueError if the batch does not divide evenly."""
        count = _divided(self.size, rows, "rows per micro-batch", sized=True)
        return (self.slice(i * rows, (i + 1) * rows) for i in range(count))

    def to(self, device: torch.device | str) -> BatchDict:
        """Return the batch with its tensors on a device. Tensors that are on it already are shared, and lists too."""
        return self._map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value)

    def _map(self, cut: Any) -> BatchDict:
        return BatchDict({key: cut(value) for key, value in self.items()})


def plan_token_budget(
    lengths: Sequence[int], max_tokens: int, *, round_to: int = 1, at_least: int = 1
) -> list[tuple[int, ...]]:
    """Group rows so that rows x longest length (rounded up to `round_to`) is at most `max_tokens` in each group.

    Rows are taken from long to short (equal ones by index), so the plan is deterministic and wastes little padding.
    `at_least` requests a number of groups, because ranks that train together need equally many; the largest groups are
    halved for it. Raises ValueError for a row that is too long by itself, and for fewer rows than requested groups.
    """
    if round_to < 1:
        raise ValueError(f"round_to must be at least 1 token, got {round_to}")
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths cannot be negative, got {min(lengths)}")
    if at_least > len(lengths):
        raise ValueError(f"at least {at_least} micro-batches cannot be made of {len(lengths)} rows")
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        tokens = math.ceil(lengths[row] / round_to) * round_to
        if tokens > max_tokens:
            raise ValueError(f"row {row} has {lengths[row]} tokens ({tokens} rounded); the budget is {max_tokens}")
        # Rows come from long to short, so the first row of a group decides its padded length.
        if groups and (len(groups[-1]) + 1) * longest <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest = tokens
    # Halving the largest group keeps every group within the budget. `at_least` <= rows, so the loop ends.
    while len(groups) < at_least:
        widest = max(range(len(groups)), key=lambda i: len(groups[i]))
        half = len(groups[widest]) // 2
        groups[widest : widest + 1] = [groups[widest][:half], groups[widest][half:]]
    return [tuple(group) for group in groups]


def _rows(key: str, value: Any) -> int:
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            raise ValueError(
                f"{key!r} is a tensor without dimensions; the first dimension of every value must be the rows"
            )
        return value.shape[0]
    if isinstance(value, list):
        return len(value)
    raise TypeError(f"{key!r} is a {type(value).__name__}; a batch holds tensors [B, ...] and lists of length B")


def _join(key: str, values: list[Any], pad_value: float) -> Any:
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if not all(isinstance(value, torch.Tensor) for value in values):
        raise ValueError(f"{key!r} is a tensor in some batches and a list in others")
    if len({value.dtype for value in values}) > 1 or len({value.ndim for value in values}) > 1:
        raise ValueError(f"{key!r} differs between batches: {[(value.dtype, tuple(value.shape)) for value in values]}")
    shape = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    padded = []
    for value in values:
        if list(value.shape[1:]) != shape:
            wide = value.new_full((value.shape[0], *shape), pad_value)
            wide[tuple(slice(0, size) for size in value.shape)] = value
            value = wide
        padded.append(value)
    return torch.cat(padded)


def _divided(size: int, by: int, what: str, *, sized: bool = False) -> int:
    if by < 1 or size % by:
        raise ValueError(f"{size} rows cannot be divided by {by} {what}" + ("" if sized else " evenly"))
    return size // by


def _check_keys(argument: str, named: Iterable[str], known: Iterable[str]) -> None:
    unknown = sorted(set(named) - set(known))
    if unknown:
        raise ValueError(f"{argument} names unknown keys {unknown}; the batch has the keys {sorted(known)}")
