"""Fixtures of the fine-tuning tests. A test file with data or a worker of its own defines them again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import RankGroups, Ranks, only_worker

from sft import tiny_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the data that `tiny_run.config_of` names."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_run.write_data(folder)
    return folder


@pytest.fixture(scope="session")
def groups() -> Iterator[RankGroups]:
    """Ranks that the tests of all files share: starting them costs seconds."""
    with RankGroups() as groups:
        yield groups


@pytest.fixture
def ranks(groups: RankGroups) -> Ranks:
    """Two ranks."""
    return groups.of(2)


@pytest.fixture
def four_ranks(groups: RankGroups) -> Ranks:
    """Four ranks."""
    return groups.of(4)


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    """Return the only worker of a run, in this process."""
    with only_worker() as worker:
        yield worker
