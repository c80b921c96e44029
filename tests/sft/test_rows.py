"""Rows: the drawing in the module's docstring, padding, and asking for what is not there."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest

from raylane.errors import DataError
from raylane.sft.data.rows import RowSource, TokenCache
from raylane.training.labels import IGNORED

FEATURES = datasets.Features(
    {
        "tokens": datasets.List(datasets.Value("int32")),
        "mask": datasets.List(datasets.Value("uint8")),
        "row": datasets.Value("int64"),
    }
)


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    rows = {"tokens": [[10, 11, 12], [20, 21]], "mask": [[0, 1, 1], [0, 1]], "row": [0, 4]}
    datasets.Dataset.from_dict(rows, features=FEATURES).save_to_disk(str(tmp_path / "set"))
    return TokenCache(tmp_path / "set")


def test_the_drawing(cache: TokenCache) -> None:
    batch = RowSource(cache, [(0, 1)], row_tokens=7, pad_id=99).rows([0])
    assert {name: array.tolist() for name, array in batch.items()} == {
        "input_ids": [[10, 11, 12, 20, 21, 99, 99]],
        "labels": [[11, 12, IGNORED, 21, IGNORED, IGNORED, IGNORED]],
        "position_ids": [[0, 1, 2, 0, 1, 0, 1]],
        "document_ids": [[0, 0, 0, 1, 1, -1, -1]],
    }
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int64)}


def test_minus_one_is_a_row_of_padding(cache: TokenCache) -> None:
    batch = RowSource(cache, [(0,), (1,)], row_tokens=4, pad_id=99).rows([1, -1])
    assert batch["input_ids"].tolist() == [[20, 21, 99, 99], [99] * 4]
    assert batch["labels"][1].tolist() == [IGNORED] * 4
    assert batch["document_ids"][1].tolist() == [-1] * 4


def test_rows_that_are_not_there_are_refused(cache: TokenCache) -> None:
    rows = RowSource(cache, [(0, 1)], row_tokens=7, pad_id=0)
    for wrong in (1, -2):
        with pytest.raises(IndexError, match=f"row {wrong} of 1"):
            rows.rows([wrong])
    assert rows.rows([])["input_ids"].shape == (0, 7)


def test_it_says_how_full_it_is(cache: TokenCache) -> None:
    assert repr(RowSource(cache, [(0, 1)], 10, 0)) == "RowSource(1 rows of 10 tokens, 50.0% full)"


def test_a_cache_gives_back_what_was_written(cache: TokenCache) -> None:
    assert cache.lengths.tolist() == [3, 2]
    assert cache.origin.tolist() == [0, 4]
    assert (cache.num_tokens, cache.num_supervised, len(cache)) == (5, 3, 2)
    tokens, supervised = cache.document(1)
    assert (tokens.tolist(), supervised.tolist()) == ([20, 21], [False, True])
    assert (tokens.dtype, supervised.dtype) == (np.int32, np.bool_)
    assert "2 documents, 5 tokens" in repr(cache)


def test_a_cache_is_mapped_and_read_only(cache: TokenCache) -> None:
    tokens, _ = cache.document(0)
    address = tokens.__array_interface__["data"][0]
    ranges = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(cache.folder) in line]
    assert any(int(start, 16) <= address < int(end, 16) for line in ranges for start, end in [line[0].split("-")])
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_documents_that_are_not_there_are_refused(cache: TokenCache) -> None:
    for wrong in (-1, 2):
        with pytest.raises(IndexError, match=f"document {wrong} of 2"):
            cache.document(wrong)


def test_a_folder_that_is_no_cache_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"token cache .* cannot be read on this machine.* Delete it and run"):
        TokenCache(tmp_path)
