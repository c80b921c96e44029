"""Patches of changed elements: bit for bit, of every size of element, and refused where they do not fit."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from raylane.weights.chunks.delta import (
    MOST_SHARE,
    DeltaOptions,
    LinkSpeed,
    MalformedPatch,
    Run,
    apply,
    diff,
    runs_between,
    runs_of,
)
from raylane.weights.layout.boxes import Box, HeldBox, TensorLayout, store

SIZES = (1, 2, 4, 8)


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def changed(old: np.ndarray, itemsize: int, density: float, seed: int = 1) -> np.ndarray:
    chance = np.random.default_rng(seed)
    elements = old.copy().view(f"u{itemsize}")
    elements[chance.random(len(elements)) < density] ^= 1
    return elements.view(np.uint8)


def patched(new: np.ndarray, old: np.ndarray, runs: list[Run]) -> np.ndarray:
    """Make `new` of `old` by a patch, check that, and return the patch."""
    patch = diff(new, old, runs, 1 << 30)
    assert patch is not None
    made = old.copy()
    apply(patch, made)
    assert np.array_equal(made, new)
    return patch


@pytest.mark.claim("weights", "between hosts a delta carries only the elements that have changed, bit for bit")
@pytest.mark.parametrize("itemsize", SIZES)
@pytest.mark.parametrize("density", [0.0, 0.0001, 0.01, 0.3, 1.0])
def test_patch_makes_the_new_bytes(itemsize: int, density: float) -> None:
    old = random_bytes(160_000)
    new = changed(old, itemsize, density)
    patch = patched(new, old, [Run(len(old), itemsize)])
    count = np.count_nonzero(new.view(f"u{itemsize}") != old.view(f"u{itemsize}"))
    assert len(patch) <= 24 + count * (itemsize + 2)
    assert density or not len(patch)


@pytest.mark.claim("weights", "between hosts a delta carries only the elements that have changed, bit for bit")
def test_nan_and_zero_are_compared_by_their_bits() -> None:
    old = np.array([np.nan, 0.0, 1.0, -np.inf], dtype=np.float32)
    new = np.array([np.nan, -0.0, 1.0, np.inf], dtype=np.float32)
    other_nan = old.copy()
    other_nan.view(np.uint32)[0] ^= 1
    runs = [Run(16, 4)]
    assert not len(patched(old.view(np.uint8), old.copy().view(np.uint8), runs))  # NaN is unequal to itself
    assert len(patched(new.view(np.uint8), old.view(np.uint8), runs)) == 32
    assert len(patched(other_nan.view(np.uint8), old.view(np.uint8), runs)) == 24


@pytest.mark.parametrize("place", [0, 65_534, 65_535, 65_536, 131_070, 131_071, 199_999])
def test_long_gaps_are_bridged(place: int) -> None:
    old = random_bytes(400_000)
    new = old.copy()
    new.view(np.uint16)[[place, 199_999]] ^= 7
    patched(new, old, [Run(len(old), 2)])


@pytest.mark.parametrize("nbytes", [0, 1, 7, 64])
def test_tiny_and_empty_chunks(nbytes: int) -> None:
    old = random_bytes(nbytes)
    patched(changed(old, 1, 1.0), old, [Run(nbytes, 1)] if nbytes else [])


def test_runs_of_several_sizes_and_rooms_between_them() -> None:
    old = random_bytes(64 * 100)
    runs = [Run(640, 2), Run(1280, 8), Run(1344, 1), Run(3200, 4), Run(6400, 2)]
    for density in (0.01, 0.5):
        patched(changed(old, 1, density), old, runs)
    # Any part of it, as chunks cut it.
    assert runs_between(runs, 1280, 3200) == [Run(64, 1), Run(1920, 4)]
    assert runs_between(runs, 0, 640) == [Run(640, 2)]
    assert runs_between(runs, 640, 6400) == [Run(640, 8), Run(704, 1), Run(2560, 4), Run(5760, 2)]
    assert runs_between(runs, 64, 128) == [Run(64, 2)]


def test_runs_are_those_of_the_stored_boxes() -> None:
    def tensor(elements: int, dtype: str, itemsize: int) -> TensorLayout:
        return TensorLayout((elements,), dtype, itemsize, (HeldBox(Box((0,), (elements,)), (0,)),))

    layout = {
        "a": tensor(10, "bfloat16", 2),
        "b": tensor(33, "bfloat16", 2),
        "c": tensor(1, "int64", 8),
        "d": tensor(9, "complex128", 16),
        "e": tensor(3, "bool", 1),
    }
    assert runs_of(store([layout]), 0) == (Run(192, 2), Run(448, 8), Run(512, 1))
    # The part of another host has runs of its own.
    assert runs_of(store([layout, {"f": tensor(2, "float32", 4)}], ["x", "y"]), 1) == (Run(64, 4),)


def test_patch_beyond_its_limit_is_none() -> None:
    old = random_bytes(80_000)
    new = changed(old, 2, 0.1)
    patch = diff(new, old, [Run(len(old), 2)], 80_000)
    assert patch is not None
    assert diff(new, old, [Run(len(old), 2)], len(patch)) is not None
    assert diff(new, old, [Run(len(old), 2)], len(patch) - 1) is None
    assert diff(old, old, [Run(len(old), 2)], 0) is not None
    assert diff(old, old, [Run(len(old), 2)], -1) is None


def section(start: int, itemsize: int, gaps: list[int]) -> bytes:
    values = bytes(itemsize * len(gaps))
    return struct.pack("<QII", start, itemsize, len(gaps)) + values + struct.pack(f"<{len(gaps)}H", *gaps)


@pytest.mark.claim("weights", "a digest proves what a delta has made; otherwise the chunk comes whole")
@pytest.mark.parametrize(
    "data",
    [
        b"\0",
        b"\0" * 15,
        b"\0" * 16,  # no entries
        section(0, 3, [0]),
        section(0, 0, [0]),
        section(0, 16, [0]),
        section(1, 2, [0]),
        section(64, 2, [0]),
        section(1 << 40, 2, [0]),
        section(0, 2, [32]),  # the first element beyond
        section(62, 2, [0, 1]),
        section(0, 2, [31, 65_535]),
        section(0, 2, [0])[:-1],
        struct.pack("<QII", 0, 2, 0xFFFFFFFF),
        section(0, 2, [0]) + b"\0" * 4 + section(64, 1, [0]),
    ],
)
def test_malformed_patches_are_refused(data: bytes) -> None:
    memory = random_bytes(192)
    before = memory.copy()
    with pytest.raises(MalformedPatch):
        apply(np.frombuffer(data, dtype=np.uint8), memory[64:128])
    assert np.array_equal(memory[:64], before[:64])
    assert np.array_equal(memory[128:], before[128:])


def test_random_patches_write_nothing_beside_the_chunk() -> None:
    chance = np.random.default_rng(5)
    old = random_bytes(4096)
    good = diff(changed(old, 2, 0.05), old, [Run(4096, 2)], 4096)
    assert good is not None
    refused = 0
    for _ in range(2000):
        patch = good.copy()
        # Bits of the head half of the time, else anywhere; then cut off anywhere.
        places = chance.integers(0, 16 if chance.random() < 0.5 else len(patch), 3)
        patch[places] ^= chance.integers(1, 256, 3, dtype=np.uint8)
        memory = random_bytes(3 * 4096)
        before = memory.copy()
        try:
            apply(patch[: chance.integers(1, len(patch) + 1)], memory[4096:8192])
        except MalformedPatch:
            refused += 1
        assert np.array_equal(memory[:4096], before[:4096])
        assert np.array_equal(memory[8192:], before[8192:])
    assert refused > 1000


@pytest.mark.claim("weights", "whole versions go where a delta does not pay, after a missed one, and on one host")
def test_patch_pays_by_density_and_link() -> None:
    auto = DeltaOptions("auto")
    gigabit = auto.most_patch_bytes(1_000_000, 125e6)
    assert gigabit == 1_000_000 * MOST_SHARE
    assert 0 < auto.most_patch_bytes(1_000_000, 1e9) < gigabit
    assert auto.most_patch_bytes(1_000_000, 5e9) < 0  # the whole chunk arrives before the patch is applied
    assert auto.most_patch_bytes(1_000_000, None) < 0  # not measured yet
    assert DeltaOptions("always").most_patch_bytes(1_000_000, None) == 1_000_000
    assert DeltaOptions("never").most_patch_bytes(1_000_000, 1.0) < 0


def test_anchors_and_options() -> None:
    options = DeltaOptions("auto", 3)
    assert [number for number in range(1, 10) if not options.allow(number)] == [3, 6, 9]
    assert not any(DeltaOptions("never").allow(number) for number in range(1, 10))
    assert not any(DeltaOptions("always", 1).allow(number) for number in range(1, 10))
    with pytest.raises(ValueError, match="delta must be one of auto, never, always, got 'sometimes'"):
        DeltaOptions("sometimes").check()
    with pytest.raises(ValueError, match="anchor_every must be at least 1"):
        DeltaOptions("auto", 0).check()


def test_link_speed_counts_chunks_side_by_side() -> None:
    link = LinkSpeed()
    assert link.bytes_per_s is None
    link.begin(10.0)
    link.begin(10.0)
    link.end(11.0, 0)  # failed
    assert link.bytes_per_s is None
    link.end(12.0, 200)
    assert link.bytes_per_s == 100
    link.begin(20.0)
    link.begin(20.0)
    link.end(21.0, 100)
    link.end(21.0, 100)
    assert link.bytes_per_s == pytest.approx(100 + 0.3 * 100)
