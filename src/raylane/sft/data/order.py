"""Order of the rows: a pure function of seed, epoch and step, so that a run can be resumed anywhere.

There is no state to save: the step number determines the rows of the batch, also in the middle of an epoch. The order
does not depend on the number of workers; only the division of a batch among them does. Called by workers (their own
rows), by the driver when it reads the data, and by `planning`.
"""

from __future__ import annotations

import functools

import numpy as np

from raylane.errors import DataError

_GROUPED_BATCHES = 50
"""Number of successive batches whose rows `grouped_by_length` exchanges, as many as in the Hugging Face trainer."""
_BATCH_ORDER = 2**40
"""Number that stands beside the epoch in the seed of the order of batches, which is another one than that of rows."""


def steps_per_epoch(num_rows: int, global_batch_size: int) -> int:
    """Return the number of whole batches in one pass over the rows; rows left over are not used in that epoch."""
    if num_rows < global_batch_size:
        raise DataError(
            f"the data makes {num_rows} rows, which is less than one global batch of {global_batch_size}. "
            "Use a smaller policy.train_global_batch_size, a smaller policy.max_total_sequence_length, or more data",
            num_rows=num_rows,
            global_batch_size=global_batch_size,
        )
    return num_rows // global_batch_size


def epoch_of(step: int, num_rows: int, global_batch_size: int) -> tuple[int, int]:
    """Return (epoch, step within the epoch) of a step that is counted from 0 over all epochs."""
    return divmod(step, steps_per_epoch(num_rows, global_batch_size))


def total_steps(num_rows: int, global_batch_size: int, max_num_steps: int | None, max_num_epochs: int | None) -> int:
    """Return the number of steps of a run: the smaller of the two limits. ValueError if there is no limit."""
    per_epoch = steps_per_epoch(num_rows, global_batch_size)
    limits = [limit for limit in (max_num_steps, max_num_epochs and max_num_epochs * per_epoch) if limit is not None]
    if not limits:
        raise ValueError("max_num_steps and max_num_epochs are both None, so the run would never end; set one of them")
    return min(limits)


# Four entries: rows and groups of batches in the current epoch, and in the previous one while its last steps run.
@functools.lru_cache(maxsize=4)
def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return the order of the rows in an epoch, int64 [num_rows], read-only; another permutation per (seed, epoch).

    The permutation is the sort order of raw PCG64 words. NumPy guarantees that these words are the same in all versions
    (NEP 19), unlike the result of Generator.shuffle, and a run may be resumed with another version of NumPy.
    """
    order = np.arange(num_rows, dtype=np.int64)
    if shuffle:
        words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
        order = np.argsort(words, kind="stable").astype(np.int64)
    order.setflags(write=False)
    return order


def batch_rows(num_rows: int, global_batch_size: int, seed: int, step: int, shuffle: bool = True) -> np.ndarray:
    """Return the rows of a step's global batch, int64 [global_batch_size]; DataError if the data has no whole batch."""
    if step < 0:
        raise ValueError(f"step is {step}; it counts from 0")
    epoch, within = epoch_of(step, num_rows, global_batch_size)
    order = epoch_order(num_rows, seed, epoch, shuffle)
    return order[within * global_batch_size : (within + 1) * global_batch_size].copy()


def grouped_by_length(
    row_order: np.ndarray, lengths: np.ndarray, global_batch_size: int, seed: int, step: int, shuffle: bool = True
) -> np.ndarray:
    """Return the rows of a step's global batch, int64 [global_batch_size], all of about the same length; pure.

    `row_order` are the rows of the epoch of `step`, of which each has a length in `lengths`. Batches exchange rows with
    others near them, so an epoch has the same rows as without grouping:

        order      5 1 9 | 2 8 4 | ...        lengths of three rows in each batch, of two batches that exchange rows
        sorted     9 8 5 | 4 2 1
        shuffled   4 2 1 | 9 8 5 | ...        lengths must not fall over the steps
    """
    epoch, within = epoch_of(step, len(row_order), global_batch_size)
    group, place = divmod(within, _GROUPED_BATCHES)
    batches = min(_GROUPED_BATCHES, steps_per_epoch(len(row_order), global_batch_size) - group * _GROUPED_BATCHES)
    first = group * _GROUPED_BATCHES * global_batch_size
    rows = row_order[first : first + batches * global_batch_size]
    longest_first = rows[np.argsort(-lengths[rows], kind="stable")].reshape(batches, global_batch_size)
    batch: np.ndarray = longest_first[epoch_order(batches, seed, _BATCH_ORDER + epoch * 2**20 + group, shuffle)[place]]
    return batch


def deal_by_length(rows: np.ndarray, lengths: np.ndarray, readers: int, micro_batch_rows: int) -> np.ndarray:
    """Return the rows of a global batch so that rows of about the same length are computed at the same time; pure.

    `lengths` are those of `rows`. The result is for `rank_slice`, and for micro-batches of successive rows (2 readers,
    micro-batches of 2 rows, numbers are lengths):

        sorted     9 8 | 7 6 | 5 4 | 2 1
        reader 0   9 8 | 5 4                  the longest micro-batch comes first, so a lack of memory shows at once
        reader 1   7 6 | 2 1
    """
    longest_first = rows[np.argsort(-lengths, kind="stable")]
    return longest_first.reshape(-1, readers, micro_batch_rows).swapaxes(0, 1).reshape(-1)


def rank_slice(rows: np.ndarray, rank: int, world: int) -> np.ndarray:
    """Return the contiguous part of a global batch for rank `rank` of `world`; ValueError if the division is uneven."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of the {world} ranks 0..{world - 1}")
    if len(rows) % world:
        raise ValueError(f"a batch of {len(rows)} rows cannot be divided evenly among {world} workers")
    share = len(rows) // world
    return rows[rank * share : (rank + 1) * share]


def validation_batches(num_rows: int, global_batch_size: int, max_batches: int = 0) -> list[np.ndarray]:
    """Return the validation batches in order, int64 [global_batch_size] each.

    The last batch is filled up with -1 (rows of padding only), so no row is dropped. `max_batches` 0 means all batches.
    """
    count = -(-num_rows // global_batch_size)
    if max_batches:
        count = min(count, max_batches)
    rows = np.full(count * global_batch_size, -1, dtype=np.int64)
    used = min(num_rows, len(rows))
    rows[:used] = np.arange(used)
    return list(rows.reshape(count, global_batch_size))
