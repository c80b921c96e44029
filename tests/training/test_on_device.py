"""Micro-batches that are copied ahead, in the order that hides the copies."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from raylane.training.run.micro_batches import on_device, one_ahead
from raylane.workers.batch import BatchDict


def test_one_ahead_starts_the_next_before_it_yields() -> None:
    events = []

    def start(item: str) -> str:
        events.append(f"start {item}")
        return item.upper()

    def finish(started: str) -> str:
        events.append(f"finish {started}")
        return started

    for ready, item in one_ahead("abc", start, finish):
        assert ready == item.upper()
        events.append(f"use {item}")
    assert events == [
        *("start a", "start b", "finish A", "use a"),
        *("start c", "finish B", "use b"),
        *("finish C", "use c"),
    ]


def test_one_ahead_of_nothing_yields_nothing() -> None:
    assert list(one_ahead([], str, str)) == []
    assert list(one_ahead(["a"], str, str)) == [("a", "a")]


def test_one_ahead_reads_at_most_one_item_more() -> None:
    taken = []

    def items() -> Iterator[int]:
        for number in range(9):
            taken.append(number)
            yield number

    for number, _ in one_ahead(items(), int, int):
        assert max(taken) <= number + 1


def test_on_device_shares_batches_on_the_cpu() -> None:
    parts = [BatchDict(x=torch.ones(2, 3)), BatchDict(x=torch.zeros(2, 3))]
    for part, (moved, host) in zip(parts, on_device(parts, torch.device("cpu")), strict=True):
        assert moved is host is part
