"""Packing plans: every document once, no row too full, always the same."""

from __future__ import annotations

import numpy as np
import pytest

from raylane.sft.data.packing import efficiency, pack_documents

ALGORITHMS = ["first_fit_decreasing", "best_fit_decreasing", "concatenate", "none"]


def naive_first_fit_decreasing(lengths: list[int], capacity: int) -> list[tuple[int, ...]]:
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, free in enumerate(room) if free >= lengths[index]), len(packs))
        if row == len(packs):
            packs.append([])
            room.append(capacity)
        packs[row].append(index)
        room[row] -= lengths[index]
    return sorted(tuple(sorted(pack)) for pack in packs)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(5))
def test_every_document_is_in_one_row_that_it_fits(algorithm: str, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 65, size=200)
    packs = pack_documents(lengths, 64, algorithm)
    assert sorted(index for pack in packs for index in pack) == list(range(200))
    assert max(sum(int(lengths[index]) for index in pack) for pack in packs) <= 64
    assert packs == pack_documents(lengths.tolist(), 64, algorithm)


@pytest.mark.parametrize("seed", range(5))
def test_first_fit_is_the_textbook_one(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 40, size=60).tolist()
    assert pack_documents(lengths, 50, "first_fit_decreasing") == naive_first_fit_decreasing(lengths, 50)


def test_best_fit_takes_the_fullest_row_with_room() -> None:
    # 7 and 6 open two rows of 10; 4 fits the second only; 3 fits the first only.
    assert pack_documents([7, 6, 4, 3], 10, "best_fit_decreasing") == [(0, 3), (1, 2)]


def test_concatenate_keeps_the_order_of_the_data() -> None:
    assert pack_documents([3, 3, 5, 9, 1], 10, "concatenate") == [(0, 1), (2,), (3, 4)]


def test_none_gives_each_its_own_row() -> None:
    assert pack_documents([3, 1], 10, "none") == [(0,), (1,)]


def test_no_documents_make_no_rows() -> None:
    assert all(pack_documents([], 10, algorithm) == [] for algorithm in ALGORITHMS)
    assert efficiency([], 0, 10) == 0


@pytest.mark.parametrize("length", [0, 11])
def test_a_document_that_cannot_be_placed_is_named(length: int) -> None:
    with pytest.raises(ValueError, match=f"document 1 has {length} tokens, which must be 1 to 10"):
        pack_documents([3, length], 10, "none")


def test_an_unknown_algorithm_is_answered_with_the_known() -> None:
    known = "first_fit_decreasing, best_fit_decreasing, concatenate, none"
    with pytest.raises(ValueError, match=f"algorithm must be one of {known}, got 'ffd'"):
        pack_documents([1], 10, "ffd")  # type: ignore[arg-type]


def test_efficiency_is_the_part_that_holds_tokens() -> None:
    assert efficiency([3, 5], 2, 10) == pytest.approx(0.4)
