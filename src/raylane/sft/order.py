"""Which rows make up the batch of a step: a pure function of seed, epoch and step, so a run can be resumed anywhere.

Nothing is consumed and there is no state to save: the step number says it all, in the middle of an epoch and at its end
alike. The number of workers plays no part in the order, only in who takes which rows of a batch. Called by workers
(their own rows), by the driver when it feeds the data, and by `planning`.
"""

from __future__ import annotations

import functools

import numpy as np

from raylane.errors import DataError

__all__ = [
    "batch_rows",
    "epoch_of",
    "epoch_order",
    "rank_slice",
    "steps_per_epoch",
    "total_steps",
    "validation_batches",
]


def steps_per_epoch(num_rows: int, global_batch_size: int) -> int:
    """Whole batches in one pass over the rows; what is left over at the end of an epoch is not used in that epoch."""
    if num_rows < global_batch_size:
        raise DataError(
            f"the data makes {num_rows} rows, less than one global batch of {global_batch_size}; "
            "use a smaller policy.train_global_batch_size, a smaller policy.max_total_sequence_length, or more data",
            num_rows=num_rows,
            global_batch_size=global_batch_size,
        )
    return num_rows // global_batch_size


def epoch_of(step: int, num_rows: int, global_batch_size: int) -> tuple[int, int]:
    """(epoch, step within it) of the step that is counted from 0 over all epochs."""
    return divmod(step, steps_per_epoch(num_rows, global_batch_size))


def total_steps(num_rows: int, global_batch_size: int, max_num_steps: int | None, max_num_epochs: int | None) -> int:
    """Steps of a whole run: the sooner of the two limits. ValueError when there is none."""
    per_epoch = steps_per_epoch(num_rows, global_batch_size)
    limits = [limit for limit in (max_num_steps, max_num_epochs and max_num_epochs * per_epoch) if limit is not None]
    if not limits:
        raise ValueError("max_num_steps and max_num_epochs are both None: such a run never ends")
    return min(limits)


@functools.lru_cache(
    maxsize=2
)  # the epoch that is running, and the one before while the last steps of it are in flight
def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """The rows of an epoch in order: int64[num_rows], read-only. A fresh permutation per (seed, epoch).

    The permutation is the order of raw PCG64 words: NumPy promises that these words stay the same from version to
    version (NEP 19), which it does not for Generator.shuffle, and a run may be resumed under another version.
    """
    order = np.arange(num_rows, dtype=np.int64)
    if shuffle:
        words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
        order = np.argsort(words, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def batch_rows(num_rows: int, global_batch_size: int, seed: int, step: int, shuffle: bool = True) -> np.ndarray:
    """The rows of a step's global batch: int64[global_batch_size]. DataError when there is not one whole batch."""
    if step < 0:
        raise ValueError(f"step is {step}; it counts from 0")
    epoch, within = epoch_of(step, num_rows, global_batch_size)
    order = epoch_order(num_rows, seed, epoch, shuffle)
    return order[within * global_batch_size : (within + 1) * global_batch_size].copy()


def rank_slice(rows: np.ndarray, rank: int, world: int) -> np.ndarray:
    """The contiguous part of a global batch that data-parallel rank `rank` of `world` takes; ValueError if uneven."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of the {world} ranks 0..{world - 1}")
    if len(rows) % world:
        raise ValueError(f"a batch of {len(rows)} rows cannot be divided evenly among {world} workers")
    share = len(rows) // world
    return rows[rank * share : (rank + 1) * share]


def validation_batches(num_rows: int, global_batch_size: int, max_batches: int = 0) -> list[np.ndarray]:
    """Batches of rows in order, int64[global_batch_size] each, the last one filled up with -1 (rows of padding alone).

    `max_batches` 0 means all of them; nothing is dropped then.
    """
    count = -(-num_rows // global_batch_size)
    if max_batches:
        count = min(count, max_batches)
    rows = np.full(count * global_batch_size, -1, dtype=np.int64)
    used = min(num_rows, len(rows))
    rows[:used] = np.arange(used)
    return list(rows.reshape(count, global_batch_size))
