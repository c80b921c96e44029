"""Fixtures of the tests with a real vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from raylane import weights


@pytest.fixture
def started() -> Iterator[list[Any]]:
    """Actors that the test has started; they are killed, and the weights dropped."""
    actors: list[Any] = []
    yield actors
    for actor in actors:
        ray.kill(actor)
    for name in ("policy", "policy-lora"):
        weights.drop(name)
