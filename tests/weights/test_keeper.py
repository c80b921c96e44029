"""The keeper of a host without Ray: slots, budget, memory and digests."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys

import pytest

from raylane.core.deadline import Deadline
from raylane.errors import WeightsError, WeightsLostError, WeightsTimeoutError
from raylane.weights.memory.slots import OpenSlot, StaleSlot, make_slot
from raylane.weights.service.keeper import Incarnation, Keeper, PartKind, Turn

PART = PartKind("a", 2, 100_000, "")


def write(path: str, number: int, byte: int) -> None:
    slot = OpenSlot(path, PART.ranks)
    for rank in range(PART.ranks):
        slot.begin_writing(rank, Deadline(1), "a test waits")
    slot.view()[: PART.nbytes] = bytes([byte]) * PART.nbytes
    for rank in range(PART.ranks):
        slot.end_writing(rank, number)
    slot.close()


def turn(number: int, catalogue: int = 1) -> Turn:
    return Turn(Incarnation(catalogue, ""), number)


async def made(keeper: Keeper, number: int = 0) -> list[str]:
    paths, _ = await keeper.make(turn(number), "policy", PART, 2)
    return paths


def test_slots_stay_for_the_next_catalogue_and_are_counted() -> None:
    async def run() -> None:
        keeper = Keeper(None)
        paths = await made(keeper)
        before = (await keeper.memory())["policy"]
        write(paths[1], 7, 3)
        assert (await keeper.memory())["policy"] - before == 102_400  # whole pages
        assert await keeper.make(turn(0, 2), "policy", PART, 2) == (paths, 7)
        await keeper.drop(turn(1), "policy", [PART])
        assert await made(keeper) == paths
        await keeper.drop(turn(1), "policy")
        assert await keeper.memory() == {}
        with pytest.raises(FileNotFoundError):
            OpenSlot(paths[0], PART.ranks)

    asyncio.run(run())


@pytest.mark.claim("weights", "each version has, on request, a digest of its bytes as they are stored")
def test_digest_is_that_of_the_stored_bytes() -> None:
    async def run() -> None:
        keeper = Keeper(None)
        path, other = await made(keeper)
        write(path, 7, 3)
        assert await keeper.digest(path, 7) == hashlib.sha256(b"\3" * PART.nbytes).hexdigest()
        assert await keeper.digest(path, 6) is None
        assert await keeper.digest(other, 7) is None
        await keeper.drop(turn(1), "policy")
        assert await keeper.digest(path, 7) is None

    asyncio.run(run())


def test_new_catalogue_releases_held_slots() -> None:
    async def run() -> None:
        keeper = Keeper(None)
        path, _ = await made(keeper)
        write(path, 7, 3)
        assert await keeper.hold(turn(1), path, 7)
        assert not await keeper.hold(turn(1), "/proc/1/fd/1#1", 7)
        slot = OpenSlot(path, PART.ranks)
        with pytest.raises(WeightsTimeoutError, match="a reader still holds the version that this one would replace"):
            slot.begin_writing(0, Deadline(0), "rank 0 waits")
        await keeper.make(turn(0, 2), "policy", PART, 2)
        slot.begin_writing(0, Deadline(0), "rank 0 waits")
        with pytest.raises(StaleSlot):
            OpenSlot(path, PART.ranks).hold(7)

    asyncio.run(run())


def test_calls_that_later_ones_overtook_change_nothing() -> None:
    """Ray runs calls of an asynchronous actor in any order, above all while the actor starts."""

    async def run() -> None:
        keeper = Keeper(None)
        path, _ = await made(keeper, 2)
        await keeper.drop(turn(1), "policy")
        write(path, 7, 3)
        assert await keeper.hold(turn(4), path, 7)
        await keeper.release(turn(3), path)
        slot = OpenSlot(path, PART.ranks)
        with pytest.raises(WeightsTimeoutError, match="a reader still holds"):
            slot.begin_writing(0, Deadline(0), "rank 0 waits")
        await keeper.release(turn(5), path)
        slot.begin_writing(0, Deadline(0), "rank 0 waits")
        await keeper.drop(turn(6), "policy")
        assert await keeper.memory() == {}

    asyncio.run(run())


@pytest.mark.claim("weights", "publications beyond `RAYLANE_BUDGET_BYTES` are refused")
def test_slots_beyond_the_budget_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLANE_BUDGET_BYTES", "150000")

    async def run() -> None:
        with pytest.raises(WeightsError, match=r"takes 100,000 bytes .* keeps 100,000 of RAYLANE_BUDGET_BYTES=150,000"):
            await made(Keeper(None))

    asyncio.run(run())


@pytest.mark.claim("weights", "a slot is written again only when no living reader holds it, forked children included")
@pytest.mark.processes
def test_forked_child_keeps_the_locks_of_its_parent() -> None:
    code = """if True:
        import gc, os
        from raylane.core.memory.file_locks import WRITE, is_free
        from raylane.weights.memory.slots import OpenSlot, make_slot
        segment = make_slot(1, 100)
        slot, other = (OpenSlot(segment.path, 1) for _ in range(2))
        slot.hold(0)
        if (child := os.fork()) == 0:
            slot.release()
            slot.close()
            os._exit(0)
        os.waitpid(child, 0)
        print(is_free(other._fd, WRITE))
        slot.close()
        print(is_free(other._fd, WRITE))
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\nTrue\n"


def test_order_that_a_later_version_overtook_is_not_written() -> None:
    segment = make_slot(2, 100)
    slot = OpenSlot(segment.path, 2)
    for rank, number in ((0, 5), (1, 5), (0, 6)):
        slot.begin_writing(rank, Deadline(0), "rank 0 waits", number)
        slot.end_writing(rank, number)
    with pytest.raises(WeightsLostError, match="rank 1 waits: version 5 was given up, a later one is in its place"):
        slot.begin_writing(1, Deadline(0), "rank 1 waits", 5)
    slot.begin_writing(1, Deadline(0), "rank 1 waits", 6)


@pytest.mark.claim("weights", "other users of the machine cannot open the memory of versions")
@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_users_cannot_open_slots() -> None:
    keeper = Keeper(None)
    path, *_ = asyncio.run(made(keeper))
    code = """if True:
        import os, sys
        os.setgid(65534)
        os.setuid(65534)
        for flags in (os.O_RDONLY, os.O_RDWR):
            try:
                os.open(sys.argv[1], flags)
            except PermissionError:
                print("refused")
        """
    words = [sys.executable, "-c", code, path.partition("#")[0]]
    assert subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout == "refused\n" * 2
