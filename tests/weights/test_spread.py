"""Copies between hosts, as values: nobody waits for ever, and the source sends every chunk once."""

from __future__ import annotations

import random

import pytest

from raylane.weights.chunks.spread import ATTEMPTS, PATCHED_BYTES, Spread, Transfer
from raylane.weights.layout.boxes import LEAST_BYTES, chunk_bytes


def simulate(spread: Spread, seed: int, dying: str | None = None) -> dict[str, int]:
    """Let transfers end in random order; return the number that each host has sent. A host may die in between."""
    chance, sent, under_way = random.Random(seed), dict.fromkeys(spread.holders, 0), spread.assign()
    dead: set[str] = set()
    while under_way:
        transfer = under_way.pop(chance.randrange(len(under_way)))
        if dying is not None and chance.random() < 0.1:
            dead.add(dying)
            spread.remove(dying)
        failed = bool({transfer.holder, transfer.host} & dead)
        spread.end(transfer, "died" if failed else None)
        sent[transfer.holder] = sent.get(transfer.holder, 0) + (0 if failed else transfer.amount)
        under_way += spread.assign()
    return sent


@pytest.mark.claim("weights", "hosts share one copy out of the trainer, and a dead holder is replaced")
@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("seed", range(20))
def test_source_sends_each_chunk_once(seed: int, parts: int) -> None:
    spread = Spread("source", 40 * LEAST_BYTES, parts)
    for host in "abcd":
        spread.want(host, range(40))
    sent = simulate(spread, seed)
    assert sent["source"] == 40
    assert sum(sent.values()) == 4 * 40
    assert spread.is_finished()
    assert not any(spread.missing(host) for host in "abcd")


@pytest.mark.claim("weights", "hosts share one copy out of the trainer, and a dead holder is replaced")
@pytest.mark.parametrize("seed", range(20))
def test_dead_holder_is_replaced(seed: int) -> None:
    spread = Spread("source", 40 * LEAST_BYTES)
    for host in "abcd":
        spread.want(host, range(0, 40, 2) if host == "d" else range(40))
    simulate(spread, seed, dying="b")
    assert spread.is_finished()
    assert not any(spread.missing(host) for host in "acd")
    assert spread.holders["d"] == set(range(0, 40, 2))


@pytest.mark.parametrize("seed", range(20))
def test_dead_source_is_replaced_by_what_others_have(seed: int) -> None:
    spread = Spread("source", 10 * LEAST_BYTES)
    for host in "abc":
        spread.want(host, range(10))
    simulate(spread, seed, dying="source")
    assert spread.is_finished()
    for host in "abc":
        missing = spread.missing(host)
        # Who misses a chunk knows why; and nobody else has it.
        assert (spread.reason(host) is None) == (not missing)
        assert not any(missing & spread.holders.get(other, set()) for other in "abc")


def test_host_gives_up_after_several_failures_and_may_try_again() -> None:
    spread = Spread("source", LEAST_BYTES)
    spread.want("a", [0])
    for _ in range(ATTEMPTS):
        assert spread.reason("a") is None
        assert spread.assign() == [Transfer(0, 1, "source", "a")]
        assert spread.assign() == []
        spread.end(Transfer(0, 1, "source", "a"), "link down")
    assert (spread.assign(), spread.reason("a"), spread.is_finished()) == ([], "link down", True)
    spread.want("a", [0])
    assert (spread.reason("a"), len(spread.assign())) == (None, 1)


def test_host_that_does_not_answer_holds_nobody_up() -> None:
    spread = Spread("source", LEAST_BYTES)
    for host in ("a", "b"):
        spread.want(host, [0])
    (transfer,) = spread.assign()
    spread.holders["a"] = {0}
    spread.end(transfer, "a did not answer")
    spread.give_up("a", "a did not answer")
    assert spread.reason("a") == "a did not answer"
    assert spread.assign() == [Transfer(0, 1, "source", "b")]
    spread.end(Transfer(0, 1, "source", "b"))
    assert spread.is_finished()
    spread.want("a", [0])  # it asks again
    assert not spread.is_finished()
    assert [each.holder for each in spread.assign()] == ["b"]


def test_adjacent_chunks_go_together_where_there_are_many_parts() -> None:
    spread = Spread("source", 20 * LEAST_BYTES, parts=16)
    spread.want("a", [*range(10), *range(12, 20)])
    assert spread.assign() == [Transfer(0, 8, "source", "a"), Transfer(8, 2, "source", "a")]
    spread.end(Transfer(0, 8, "source", "a"))
    assert spread.assign() == [Transfer(12, 8, "source", "a")]
    assert spread.place(range(12, 20)) == (12 * LEAST_BYTES, 8 * LEAST_BYTES)


def test_chunks_cover_the_part() -> None:
    for nbytes in (0, 1, LEAST_BYTES, LEAST_BYTES + 1, 10**9 + 7, 62 * 10**9):
        spread = Spread("source", nbytes)
        places = [spread.place(range(chunk, chunk + 1)) for chunk in range(spread.chunks)]
        assert sum(size for _, size in places) == nbytes
        assert all(offset + size <= nbytes and 0 < size <= chunk_bytes(nbytes) for offset, size in places)


@pytest.mark.parametrize("seed", range(5))
def test_patches_go_together_and_without_others(seed: int) -> None:
    together = PATCHED_BYTES // LEAST_BYTES
    spread = Spread("source", 40 * LEAST_BYTES)
    spread.want("a", range(40), range(3, 39))
    transfers = spread.assign()
    chance = random.Random(seed)
    for _ in range(40):
        if not transfers:
            break
        transfer = transfers.pop(chance.randrange(len(transfers)))
        patched = [chunk in range(3, 39) for chunk in transfer.chunks]
        assert all(patched) or transfer.amount == 1
        assert transfer.amount <= together
        spread.end(transfer)
        transfers += spread.assign()
    assert spread.is_finished()
    assert not spread.missing("a")
    spread.want("b", range(40), range(40))
    assert spread.assign()[0].amount == together


def test_patches_of_large_chunks_come_one_by_one() -> None:
    spread = Spread("source", 64 * 2 * PATCHED_BYTES)
    spread.want("a", range(64), range(64))
    assert [transfer.amount for transfer in spread.assign()] == [1, 1]
