"""The order of the data: a pure function of seed, epoch and step, and of nothing else."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from raylane.errors import DataError
from raylane.sft.data.order import (
    batch_rows,
    deal_by_length,
    epoch_of,
    epoch_order,
    grouped_by_length,
    rank_slice,
    steps_per_epoch,
    total_steps,
    validation_batches,
)


def test_an_epoch_visits_every_row_once() -> None:
    for epoch in range(3):
        assert sorted(epoch_order(50, seed=1, epoch=epoch).tolist()) == list(range(50))


def test_steps_of_an_epoch_use_each_row_at_most_once() -> None:
    seen = np.concatenate([batch_rows(50, 8, seed=3, step=step) for step in range(6)])
    assert len(seen) == len(set(seen.tolist())) == 48


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_order(30, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_without_shuffling_rows_come_in_order() -> None:
    assert batch_rows(10, 4, seed=0, step=1, shuffle=False).tolist() == [4, 5, 6, 7]
    assert batch_rows(10, 4, seed=0, step=2, shuffle=False).tolist() == [0, 1, 2, 3]


def test_the_permutation_is_the_same_in_every_version_of_numpy() -> None:
    assert epoch_order(10, seed=42, epoch=0).tolist() == [4, 8, 1, 9, 3, 6, 0, 7, 2, 5]


@pytest.mark.processes
def test_another_process_makes_the_same_order() -> None:
    code = "from raylane.sft.data.order import batch_rows; print(batch_rows(100, 7, 5, 40).tolist())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(batch_rows(100, 7, 5, 40).tolist())


def test_resume_at_an_epoch_end_skips_and_repeats_nothing() -> None:
    """A run stopped after the last step of an epoch goes on with the first batch of the next, as if never stopped."""
    per_epoch = steps_per_epoch(21, 4)
    whole = [batch_rows(21, 4, 9, step).tolist() for step in range(3 * per_epoch)]
    epoch_order.cache_clear()
    resumed = [batch_rows(21, 4, 9, step).tolist() for step in range(per_epoch, 3 * per_epoch)]
    assert resumed == whole[per_epoch:]
    assert epoch_of(per_epoch, 21, 4) == (1, 0)
    assert epoch_of(per_epoch - 1, 21, 4) == (0, per_epoch - 1)


def test_steps_can_be_asked_for_in_any_order() -> None:
    forwards = [batch_rows(21, 4, 9, step).tolist() for step in range(15)]
    backwards = [batch_rows(21, 4, 9, step).tolist() for step in reversed(range(15))]
    assert backwards[::-1] == forwards


def test_a_caller_may_write_to_a_batch() -> None:
    batch_rows(10, 4, 0, 0)[:] = -1
    assert batch_rows(10, 4, 0, 0).min() >= 0


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_batch_does_not_depend_on_the_number_of_workers(world: int) -> None:
    batch = batch_rows(40, 8, 1, 3)
    assert np.concatenate([rank_slice(batch, rank, world) for rank in range(world)]).tolist() == batch.tolist()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="8 rows cannot be divided evenly among 3"):
        rank_slice(np.arange(8), 0, 3)
    with pytest.raises(ValueError, match="rank 2 is not one of the 2"):
        rank_slice(np.arange(8), 2, 2)
    with pytest.raises(ValueError, match="step is -1"):
        batch_rows(10, 2, 0, -1)


def test_too_few_rows_for_one_batch_are_refused() -> None:
    with pytest.raises(DataError, match="3 rows, which is less than one global batch of 4"):
        batch_rows(3, 4, 0, 0)


def test_total_steps_is_the_sooner_limit() -> None:
    assert total_steps(10, 4, None, 3) == 6
    assert total_steps(10, 4, 5, 3) == 5
    assert total_steps(10, 4, 50, None) == 50
    with pytest.raises(ValueError, match="never end"):
        total_steps(10, 4, None, None)


def test_validation_uses_every_row_once_and_pads() -> None:
    batches = validation_batches(5, 4)
    assert [batch.tolist() for batch in batches] == [[0, 1, 2, 3], [4, -1, -1, -1]]
    assert len(validation_batches(5, 4, max_batches=1)) == 1
    assert len(validation_batches(8, 4)) == 2
    assert [batch.tolist() for batch in validation_batches(3, 4, max_batches=9)] == [[0, 1, 2, -1]]


LENGTHS = np.random.default_rng(5).integers(1, 500, 1000)


@pytest.mark.parametrize("shuffle", [True, False])
def test_groups_by_length_use_each_row_of_an_epoch_once(shuffle: bool) -> None:
    """120 batches of 8: two groups of 50 and one of 20; the 40 rows left over are those of the order itself."""
    for epoch in range(2):
        row_order = epoch_order(1000, 3, epoch, shuffle)
        steps = range(epoch * 125, epoch * 125 + 125)
        batches = [grouped_by_length(row_order, LENGTHS, 8, 3, step, shuffle) for step in steps]
        for first in range(0, 125, 50):
            group = np.concatenate(batches[first : first + 50])
            assert sorted(group.tolist()) == sorted(row_order[first * 8 : (first + 50) * 8].tolist())
        assert max(int(np.ptp(LENGTHS[batch])) for batch in batches) < 60, "of 500"
        falls = all(LENGTHS[a].min() >= LENGTHS[b].max() for a, b in itertools.pairwise(batches[:50]))
        assert falls is not shuffle


def test_groups_by_length_differ_by_epoch_and_seed() -> None:
    row_order = np.arange(1000)
    steps = {tuple(grouped_by_length(row_order, LENGTHS, 8, seed, step)) for seed in (1, 2) for step in (0, 125, 250)}
    assert len(steps) == 6


def test_dealt_rows_of_one_round_have_similar_lengths() -> None:
    lengths = np.asarray([4, 9, 1, 7, 8, 2, 6, 5])
    rows = np.arange(10, 18)
    dealt = deal_by_length(rows, lengths, 2, 2)
    assert lengths[dealt - 10].tolist() == [9, 8, 5, 4, 7, 6, 2, 1]
    assert rank_slice(dealt, 1, 2).tolist() == [13, 16, 15, 12]
    assert lengths[deal_by_length(rows, lengths, 4, 1) - 10].tolist() == [9, 5, 8, 4, 7, 2, 6, 1]
