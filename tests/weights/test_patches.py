"""Patches between the slots of keepers: made beside a trainer, proved before they count."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import ray

from raylane.core.deadline import Deadline
from raylane.weights.chunks import patches as patches_module
from raylane.weights.chunks.delta import MOST_GAP, DeltaOptions, Run
from raylane.weights.chunks.patches import (
    DeltaRequest,
    Patches,
    PatchOfChunk,
    Proof,
    SlotVersion,
    message,
    on_thread,
    restore,
)
from raylane.weights.layout.boxes import LEAST_BYTES
from raylane.weights.memory.slots import OpenSlot
from raylane.weights.service.keeper import Fetch, Incarnation, Keeper, PartKind, Turn

CHUNKS = 3
PART = PartKind("a", 1, CHUNKS * LEAST_BYTES - 4096, "")
TURN = Turn(Incarnation(1, ""), 1)
RUNS = (Run(PART.nbytes, 2),)
ALWAYS = DeltaOptions("always")
CHANGED = [0, 5, 70_000, LEAST_BYTES // 2, PART.nbytes // 2 - 1]
"""Elements that change in each version."""
MOST_PATCH_BYTES = CHUNKS * 24 + 4 * (len(CHANGED) + PART.nbytes // 2 // MOST_GAP + 1)
"""Heads of sections with what fills them up, and the entries; one in MOST_GAP elements is a bridge."""


def content(number: int) -> np.ndarray:
    """Return the bytes of a version."""
    made = np.random.default_rng(0).integers(0, 1 << 16, PART.nbytes // 2, dtype=np.uint16)
    made[CHANGED] = number
    return made.view(np.uint8)


def write(path: str, number: int, data: np.ndarray | None = None) -> None:
    slot = OpenSlot(path, PART.ranks)
    slot.begin_writing(0, Deadline(0), "a test waits")
    slot.view()[: PART.nbytes] = memoryview(content(number) if data is None else data)
    slot.end_writing(0, number)
    slot.close()


def read(path: str) -> np.ndarray:
    slot = OpenSlot(path, PART.ranks)
    found = np.frombuffer(bytes(slot.view()[: PART.nbytes]), dtype=np.uint8)
    slot.close()
    return found


async def keeper_with(numbers: list[int]) -> tuple[Keeper, list[SlotVersion]]:
    keeper = Keeper(None)
    paths, _ = await keeper.make(TURN, "policy", PART, len(numbers))
    for path, number in zip(paths, numbers, strict=True):
        write(path, number)
    return keeper, [SlotVersion(path, number) for path, number in zip(paths, numbers, strict=True)]


async def found(keeper: Keeper, slot: SlotVersion, base: int = 7, most: int = 1 << 20, wait_s: float = 0) -> Any:
    return await keeper._patches.find(slot, DeltaRequest(base, most, wait_s), 0, PART.nbytes)


def test_patches_between_slots_make_the_new_version() -> None:
    async def run() -> None:
        keeper, (old, new) = await keeper_with([7, 8])
        assert await found(keeper, new) is None
        await keeper.make_patches(new, old, RUNS, ALWAYS, None)
        data, proofs = message(await found(keeper, new))
        assert len(proofs) == CHUNKS
        assert len(data) <= MOST_PATCH_BYTES
        target = np.zeros(PART.nbytes, dtype=np.uint8)
        restored = restore(target, content(7), data, proofs)
        assert np.array_equal(target, content(8))
        assert restored is not None
        assert [len(each.patch) for each in restored] == [proof.patch_bytes for proof in proofs]
        # Other bases, versions and limits have none.
        assert await found(keeper, new, base=6) is None
        assert await found(keeper, SlotVersion(new.path, 9)) is None
        assert await found(keeper, new, most=len(data) - 1) is None
        assert await keeper._patches.find(new, DeltaRequest(7, 1 << 20, 0), 4096, LEAST_BYTES) is None
        await keeper.drop(TURN, "policy")
        assert await found(keeper, new) is None

    asyncio.run(run())


@pytest.mark.claim("weights", "a digest proves what a delta has made; otherwise the chunk comes whole")
def test_wrong_base_or_patch_is_not_accepted() -> None:
    async def run() -> None:
        keeper, (old, new) = await keeper_with([7, 8])
        await keeper.make_patches(new, old, RUNS, ALWAYS, None)
        data, proofs = message(await found(keeper, new))
        target = np.zeros(PART.nbytes + 64, dtype=np.uint8)
        inside, base = target[: PART.nbytes], content(7)
        wrong_base = base.copy()
        wrong_base[1_000_001] ^= 1
        assert restore(inside, wrong_base, data, proofs) is None
        wrong_value = data.copy()
        wrong_value[16] ^= 1
        assert restore(inside, base, wrong_value, proofs) is None
        assert restore(inside, base, data[:-8], proofs) is None
        assert restore(inside, base, data, proofs[:-1]) is None
        assert restore(inside, base, data, []) is None
        larger = [proofs[0]._replace(nbytes=PART.nbytes * 2), *proofs[1:]]
        assert restore(inside, base, data, larger) is None
        assert restore(inside, base, data, [Proof(8, -64, b""), *proofs]) is None
        assert not target[PART.nbytes :].any()
        assert restore(inside, base, data, proofs) is not None

    asyncio.run(run())


@pytest.mark.claim("weights", "a trainer does not wait for the computation of a delta")
@pytest.mark.parametrize("slot_in_use", ["base", "new"])
def test_trainer_does_not_wait_for_a_diff(monkeypatch: pytest.MonkeyPatch, slot_in_use: str) -> None:
    """A trainer begins to write one of both slots in the middle of a diff: it gets the lock at once."""

    async def run() -> None:
        keeper, (old, new) = await keeper_with([7, 8])
        real, calls = patches_module.diff, []
        writer = OpenSlot((old if slot_in_use == "base" else new).path, PART.ranks)

        def diff_while_trainer_writes(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 2:
                writer.begin_writing(0, Deadline(0), "the trainer waits")
            return real(*args)

        monkeypatch.setattr(patches_module, "diff", diff_while_trainer_writes)
        await keeper.make_patches(new, old, RUNS, ALWAYS, None)
        assert len(calls) == 2  # the rest is given up
        find = keeper._patches.find
        assert await find(new, DeltaRequest(7, 1 << 20, 9), 0, LEAST_BYTES) is not None
        assert await find(new, DeltaRequest(7, 1 << 20, 9), LEAST_BYTES, LEAST_BYTES) is None
        writer.end_writing(0, 9)
        calls.clear()
        await keeper.make_patches(new, old, RUNS, ALWAYS, None)
        assert len(calls) == 1  # another version by now
        assert await find(new, DeltaRequest(7, 1 << 20, 9), 0, LEAST_BYTES) is None
        writer.close()

    asyncio.run(run())


def test_reader_waits_for_a_patch_within_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        keeper, (old, new) = await keeper_with([7, 8])
        go_on, real = threading.Event(), patches_module.diff

        def slow_diff(*args: Any) -> Any:
            assert go_on.wait(20)
            return real(*args)

        monkeypatch.setattr(patches_module, "diff", slow_diff)
        making = asyncio.ensure_future(keeper.make_patches(new, old, RUNS, ALWAYS, None))
        await asyncio.sleep(0)  # the diff is begun
        assert await found(keeper, new, wait_s=0.01) is None
        finding = asyncio.ensure_future(found(keeper, new, wait_s=20))
        await asyncio.sleep(0)
        assert not finding.done()
        go_on.set()
        assert len(await finding) == CHUNKS
        await making

    asyncio.run(run())


def test_dense_changes_and_fast_links_make_no_patches() -> None:
    async def run() -> None:
        keeper, (old, new) = await keeper_with([7, 8])
        await keeper.make_patches(new, old, RUNS, DeltaOptions(), 10e9)
        assert await found(keeper, new, wait_s=9) is None
        other = content(8) ^ 1
        other[: 2 * LEAST_BYTES] = content(8)[: 2 * LEAST_BYTES]
        write(new.path, 9, other)
        new = SlotVersion(new.path, 9)
        await keeper.make_patches(new, old, RUNS, DeltaOptions(), 125e6)
        find = keeper._patches.find
        assert await find(new, DeltaRequest(7, 1 << 20, 9), 0, 2 * LEAST_BYTES) is not None
        assert await find(new, DeltaRequest(7, 1 << 20, 9), LEAST_BYTES, PART.nbytes - LEAST_BYTES) is None

    asyncio.run(run())


def test_patches_of_the_last_two_versions_are_kept() -> None:
    async def run() -> None:
        keeper, (first, second, third) = await keeper_with([7, 8, 9])
        await keeper.make_patches(second, first, RUNS, ALWAYS, None)
        await keeper.make_patches(third, second, RUNS, ALWAYS, None)
        assert await found(keeper, second) is not None
        assert await found(keeper, third, base=8) is not None
        write(first.path, 10)
        await keeper.make_patches(SlotVersion(first.path, 10), third, RUNS, ALWAYS, None)
        assert await found(keeper, second) is None
        assert await found(keeper, third, base=8) is not None

    asyncio.run(run())


def test_received_patches_are_kept_for_others() -> None:
    async def run() -> None:
        store, slot = Patches(), SlotVersion("a slot", 8)
        patch = PatchOfChunk(10, b"digest", np.zeros(16, dtype=np.uint8))
        store.keep(slot, 7, 10, [patch, patch])
        request = DeltaRequest(7, 100, 9)
        assert await store.find(slot, request, 10, 20) == [patch, patch]
        assert await store.find(slot, request, 20, 10) == [patch]
        assert await store.find(slot, request, 0, 20) is None
        store.keep(slot, 7, 0, [patch])
        assert await store.find(slot, request, 0, 30) == [patch] * 3
        store.keep(SlotVersion("a slot", 9), 8, 0, [patch])
        assert await store.find(slot, request, 0, 10) is None

    asyncio.run(run())


def test_cancelled_work_on_a_thread_is_waited_for() -> None:
    """Nothing may write to a slot any more when the next catalogue gets it."""

    async def run() -> None:
        begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            assert go_on.wait(20)
            ended.set()

        task = asyncio.ensure_future(on_thread(work))
        await asyncio.to_thread(begun.wait, 20)
        task.cancel()
        asyncio.get_running_loop().call_soon(go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(run())


class WritableKeeper(Keeper):
    """Keeper whose slots a test can fill and look at."""

    async def write(self, path: str, number: int, data: np.ndarray) -> None:
        write(path, number, data)

    async def read(self, path: str) -> np.ndarray:
        return read(path)


@pytest.mark.claim("weights", "a digest proves what a delta has made; otherwise the chunk comes whole")
@pytest.mark.ray
def test_keepers_fetch_patches_and_repair_mismatches(cluster: None) -> None:
    source, relay, target = (ray.remote(num_cpus=0)(WritableKeeper).remote(None) for _ in range(3))
    slots = {}
    for keeper in (source, relay, target):
        paths, _ = ray.get(keeper.make.remote(TURN, "policy", PART, 2))
        slots[keeper] = SlotVersion(paths[0], 7), SlotVersion(paths[1], 8)
    for number, slot in zip((7, 8), slots[source], strict=True):
        ray.get(source.write.remote(slot.path, number, content(number)))
    ray.get(source.make_patches.remote(slots[source][1], slots[source][0], RUNS, ALWAYS, None))

    def fetch(keeper: Any, holder: Any, options: DeltaOptions = ALWAYS, base: bool = True) -> Any:
        own, theirs = slots[keeper], slots[holder]
        ray.get(keeper.begin_copy.remote(TURN, own[1].path, 8, 5))
        wanted = Fetch(own[1], holder, theirs[1], 0, PART.nbytes, own[0] if base else None, options)
        result = ray.get(keeper.fetch.remote(wanted))
        assert np.array_equal(ray.get(keeper.read.remote(own[1].path)), content(8))
        ray.get(keeper.release.remote(TURN, own[1].path))
        return result

    for keeper in (relay, target):
        ray.get(keeper.write.remote(slots[keeper][0].path, 7, content(7)))
    first = fetch(relay, source)
    assert (first.kind, first.mismatch) == ("delta", False)
    assert first.nbytes <= MOST_PATCH_BYTES
    assert fetch(target, relay) == first  # which has got the patches, and passes them on
    # Not asked for, or not there.
    whole = ("dense", PART.nbytes, False)
    assert fetch(target, source, base=False)[:3] == whole
    assert fetch(target, source, DeltaOptions("never"))[:3] == whole
    ray.get(target.write.remote(slots[target][0].path, 6, content(6)))  # it has missed version 7
    assert fetch(target, source)[:3] == whole
    # A base of other bytes than it ought to have: the digests tell, and everything comes whole.
    wrong = content(7).copy()
    wrong[1_000_001] ^= 1
    ray.get(target.write.remote(slots[target][0].path, 7, wrong))
    repaired = fetch(target, source)
    assert repaired.kind == "dense"
    assert repaired.mismatch
    assert repaired.nbytes == PART.nbytes + first.nbytes
    assert repaired.link_bytes_per_s > 0
    for keeper in (source, relay, target):
        ray.kill(keeper)
