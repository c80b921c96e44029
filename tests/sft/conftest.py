"""Fixtures of the fine-tuning tests. A test file with data or a worker of its own defines them again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft import tiny_run
from sft.ranks import only_worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the data that `tiny_run.config_of` names."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_run.write_data(folder)
    return folder


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    """Return the only worker of a run, in this process."""
    with only_worker() as worker:
        yield worker
