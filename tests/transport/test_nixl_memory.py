"""Registrations by owner, and the ranges of a read; without NIXL."""

from __future__ import annotations

import gc
import importlib.util
from typing import Any

import pytest
import torch

from raylane.core.memory.receive_pool import BufferPool, mapping_of
from raylane.core.memory.spans import Span
from raylane.errors import TransportUnavailableError
from raylane.transport.backends.nixl import agent as nixl_agent
from raylane.transport.backends.nixl import agents as nixl_agents
from raylane.transport.backends.nixl import memory as nixl_memory
from raylane.transport.backends.nixl.agent import Agent, Range, merge_ranges
from raylane.transport.backends.nixl.memory import Registrations
from raylane.transport.backends.pieces import OwnedMemory, Piece, pieces_of_target


class Owner:
    """Owns memory, like a storage."""


class Card:
    """Registers memory, like a network card."""

    def __init__(self) -> None:
        self.held: list[Span] = []
        self.cache = Registrations(self.register, self.held.remove)

    def register(self, span: Span, device: int) -> Span:
        del device
        self.held.append(span)
        return span

    def use(self, owner: Any, start: int, stop: int, whole: Span | None = None) -> None:
        self.cache.release([self.cache.hold(OwnedMemory(owner, whole or Span(0, 1000), Span(start, stop)))])


def test_parts_of_one_owner_share_a_registration() -> None:
    card, owner = Card(), Owner()
    card.use(owner, 0, 10)
    card.use(owner, 500, 1000)
    assert card.held == [Span(0, 1000)]
    assert repr(card.cache) == "Registrations(1 of 1 made, epoch 1)"


def test_death_of_the_owner_drops_the_registration() -> None:
    card, owner = Card(), Owner()
    card.use(owner, 0, 10)
    del owner
    gc.collect()
    assert card.held == []


def test_owner_that_dies_during_a_transfer_is_dropped_after_it() -> None:
    card, owner = Card(), Owner()
    held = card.cache.hold(OwnedMemory(owner, Span(0, 10), Span(0, 10)))
    del owner
    gc.collect()
    assert card.held == [Span(0, 10)]
    card.cache.release([held])
    assert card.held == []


def test_recycled_memory_changes_the_epoch() -> None:
    card, owner = Card(), Owner()
    card.use(owner, 0, 10)
    epoch, told = card.cache.since(0, 0)
    assert (epoch, len(told)) == (1, 1)
    del owner
    gc.collect()
    other, third = Owner(), Owner()
    card.use(other, 2000, 2010, Span(2000, 2010))
    assert card.cache.since(1, told[-1].number)[0] == 1, "memory elsewhere is told in addition"
    card.use(third, 990, 1010, Span(990, 1010))
    epoch, told = card.cache.since(1, 3)
    assert (epoch, [one.span for one in told]) == (2, [Span(2000, 2010), Span(990, 1010)])


def test_moved_memory_is_registered_again() -> None:
    card, owner = Card(), Owner()
    card.use(owner, 0, 10)
    card.use(owner, 5000, 5010, Span(5000, 6000))
    assert card.held == [Span(5000, 6000)]
    del owner
    gc.collect()
    assert card.held == []


def test_memory_without_owner_is_registered_for_one_transfer() -> None:
    card = Card()
    card.use(None, 0, 10)
    assert card.held == []
    assert card.cache.made == 1


def test_small_part_of_a_large_owner_is_registered_alone() -> None:
    card, owner = Card(), Owner()
    card.use(owner, 100, 200, Span(0, 1 << 40))
    assert card.held == [Span(100, 200)]


def test_unused_registrations_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_memory, "MAX_UNUSED", 3)
    card, owners = Card(), [Owner() for _ in range(5)]
    for i, owner in enumerate(owners):
        card.use(owner, i * 1000, i * 1000 + 10, Span(i * 1000, i * 1000 + 10))
        card.use(owners[0], 0, 10, Span(0, 10))
    # That of the first owner was used again and again.
    assert [span.start for span in card.held] == [0, 3000, 4000]
    card.cache.clear()
    assert card.held == []


def test_registrations_of_a_storage_end_with_its_last_tensor() -> None:
    card = Card()
    tensor = torch.zeros(10)
    card.use(tensor.untyped_storage(), 0, 10)
    view = tensor[3:]
    del tensor
    gc.collect()
    assert card.held
    del view
    gc.collect()
    assert not card.held


@pytest.mark.claim("transport", "buffers that NIXL fills come from a pool, whose mapping they share")
def test_buffers_of_the_pool_share_the_mapping() -> None:
    pool = BufferPool(1 << 20)
    block = pool.take(100_000)
    mapping = mapping_of(block)
    (piece,) = pieces_of_target([block], [100_000], {})
    assert piece.memory.owner is mapping is not None
    del block, piece
    gc.collect()
    assert mapping_of(pool.take(100_000)) is mapping
    assert mapping_of(bytearray(3)) is None
    user = (nixl_agent.ctypes.c_char * 100_000)()
    assert Piece(*pieces_of_target([user], [100_000], {})[0]).memory.owner is None


def test_merge_joins_neighbours_on_both_sides() -> None:
    ranges = [(0, 100, 10), (10, 110, 10), (20, 200, 10), (40, 210, 10), (50, 220, 5)]
    merged = [(0, 100, 20), (20, 200, 10), (40, 210, 15)]
    assert merge_ranges([Range(*one) for one in ranges]) == [Range(*one) for one in merged]
    assert merge_ranges([]) == []


def test_batches_are_limited_in_size_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "MAX_READ_BYTES", 100)
    monkeypatch.setattr(nixl_agent, "MAX_RANGES", 2)
    found = list(nixl_agent._batches([Range(0, 1000, 250), Range(500, 2000, 10), Range(600, 3000, 10)]))
    assert found == [
        [Range(0, 1000, 100)],
        [Range(100, 1100, 100)],
        [Range(200, 1200, 50), Range(500, 2000, 10)],
        [Range(600, 3000, 10)],
    ]


def test_nixl_of_another_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    installed = {"nixl": True, "nixl_cu12": True, "nixl_cu13": False}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: (installed[name] or None) if name in installed else find_spec(name)
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "does not fit its torch (CUDA 13.0): pip install nixl-cu13" in str(nixl_agent.missing())
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assert nixl_agent.missing() is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert nixl_agent.missing() is None


def test_process_without_nixl_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TransportUnavailableError, match="pip install --no-deps nixl nixl-cu12"):
        Agent()


class Counting:
    """Stands for an agent, which takes half a second to create."""

    def __init__(self) -> None:
        self.forgotten = 0
        self.counts: dict[str, int] = {"nixl_requests": 1}
        self.quarantine: list[object] = []
        self.closed = False

    def stats(self) -> dict[str, int]:
        return self.counts

    def close(self) -> None:
        self.closed = True


def test_worn_agent_is_replaced_and_ends_with_its_last_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agents, "Agent", Counting)
    agents: Any = nixl_agents.Agents()
    with agents.reading() as first:
        first.forgotten = nixl_agents.MOST_FORGOTTEN
        first.quarantine.append("memory that NIXL may still write to")
        with agents.reading() as second:
            assert second is not first
            assert second.quarantine == first.quarantine
            assert not first.closed
    assert first.closed
    assert not second.closed
    assert agents.stats() == {"nixl_requests": 2}
    agents.close()
    assert second.closed
