"""Plans of partial reads: compared with NumPy's own indexing, in plain memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from raylane.core.deadline import Deadline
from raylane.core.memory.layout import bytes_at
from raylane.core.memory.receive_pool import BufferPool
from raylane.transport.read.deliver import check_target
from raylane.transport.read.receiving import receive
from raylane.transport.read.targets import Targets, match, paths, structure
from raylane.transport.value import codec
from raylane.transport.value.layout import LeafSpec
from raylane.transport.value.parts import Part, parts_of, runs, sliced, span_of

NONE = Deadline(None)


def spec_for(array: Any) -> tuple[LeafSpec, Any]:
    """Return the spec of a leaf, and its only block as bytes."""
    layout = codec.plan_layout([array])
    block = layout.blocks[0] if layout.blocks else None
    return layout.specs[0], bytes_at(block.start, block.nbytes) if block else b""


def moved_by(parts: list[Part], block: Any) -> None:
    """Do what a transport does with parts."""
    for part in parts:
        assert part.block == 0
        bytes_at(part.address, part.nbytes)[:] = bytes(block[part.offset : part.offset + part.nbytes])


def random_case(seed: int) -> tuple[np.ndarray[Any, Any], tuple[Any, ...]]:
    """Return an array of some layout, and an index of it."""
    rng = np.random.default_rng(seed)
    shape = rng.integers(1, 6, rng.integers(1, 5))
    array = np.arange(int(np.prod(shape)), dtype=rng.choice(["u1", "f4", "f8"])).reshape(shape)
    array = array.transpose(rng.permutation(len(shape)))

    def bound(size: int) -> int | None:
        return None if rng.random() < 0.3 else int(rng.integers(-size - 1, size + 2))

    def index(size: int) -> Any:
        if rng.random() < 0.3:
            return int(rng.integers(-size, size))
        return slice(bound(size), bound(size), rng.choice([None, 1, 2, -1, -3]))

    before = int(rng.integers(0, array.ndim + 1))
    after = int(rng.integers(0, array.ndim - before + 1))
    wanted = [index(size) for size in array.shape[:before]]
    if after or rng.random() < 0.5:
        wanted += [Ellipsis, *(index(size) for size in array.shape[array.ndim - after :])]
    return array, tuple(wanted)


def test_slice_of_a_spec_describes_the_slice_of_the_array() -> None:
    for seed in range(2000):
        array, wanted = random_case(seed)
        spec, block = spec_for(array)
        found = sliced(spec, array.itemsize, wanted)
        expected = array[wanted]
        assert found.shape == expected.shape, (seed, wanted)
        if found.block >= 0:
            got: Any = np.ndarray(found.shape, array.dtype, buffer=block, offset=found.offset, strides=found.strides)
            assert np.array_equal(got, expected), (seed, wanted)
        else:
            assert expected.size == 0


@pytest.mark.parametrize("into", ["new", "contiguous", "turned"])
def test_received_slice_equals_the_slice(into: str) -> None:
    for seed in range(1000):
        array, wanted = random_case(seed)
        spec, block = spec_for(array)
        view = sliced(spec, array.itemsize, wanted)
        memory = np.zeros(view.shape[:: -1 if into == "turned" else 1], array.dtype)
        target = {"new": None, "contiguous": memory, "turned": memory.T}[into]
        found = receive([view], [target], BufferPool(1 << 20), lambda parts, b=block: moved_by(parts, b), NONE)[0]
        assert np.array_equal(found, array[wanted]), (seed, wanted)
        assert target is None or found is target


def test_runs_join_dimensions_that_are_contiguous_in_both() -> None:
    nbytes, there, here = runs((4, 3, 2), 4, (100, 8, 4), (24, 8, 4))
    assert (nbytes, there.tolist(), here.tolist()) == (24, [0, 100, 200, 300], [0, 24, 48, 72])
    assert runs((2, 3), 4, (4, 8), (4, 8))[0] == 24  # column by column in both


def test_columns_of_a_large_matrix_are_read_as_runs_only() -> None:
    spec, _ = spec_for(torch.zeros(1000, 4096))
    view = sliced(spec, 4, (slice(None), slice(0, 512)))
    parts = parts_of(view, 4, 0, (2048, 4))
    assert parts is not None
    assert (len(parts), sum(part.nbytes for part in parts)) == (1000, 1000 * 2048)


def test_every_other_element_is_read_as_one_span() -> None:
    spec, _ = spec_for(torch.zeros(100_000))
    view = sliced(spec, 4, slice(None, None, 2))
    assert parts_of(view, 4, 0, (4,)) is None
    assert span_of(view, 4).nbytes == 4 * 99_999


@pytest.mark.parametrize(
    ("wanted", "error", "text"),
    [
        ((0, 0, 0), IndexError, "2 dimensions"),
        (7, IndexError, "index 7"),
        ((Ellipsis, Ellipsis), IndexError, "do not fit"),
        ("x", TypeError, "'x'"),
        (torch.tensor([1, 2]), TypeError, "slices must be"),
    ],
)
def test_slices_that_do_not_fit_are_named(wanted: Any, error: type[Exception], text: str) -> None:
    spec, _ = spec_for(torch.zeros(3, 4))
    with pytest.raises(error, match=text):
        sliced(spec, 4, wanted)


def test_targets_are_matched_by_name_and_by_order() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), np.zeros(3)
    skeleton, leaves = codec.encode_value({"x": [a, {"y": b}], "n": 3, "z": c})
    shown = structure(skeleton, leaves)
    assert paths(shown) == {0: [("x", 0)], 1: [("x", 1, "y")], 2: [("z",)]}
    t = [torch.ones(1), torch.ones(2), np.ones(3)]
    assert match(shown, 3, {"x": [t[0], {"y": t[1]}], "z": t[2]}) == Targets(t, [])
    assert match(shown, 3, t) == Targets(t, [])
    assert match(shown, 3, {"x": [None, {"y": t[1]}]}) == Targets([None, t[1], None], [])


@pytest.mark.parametrize(
    ("into", "error", "text"),
    [
        (torch.zeros(1), ValueError, "the value has 3"),
        ([torch.zeros(1)], ValueError, "into has 1 tensors"),
        ([torch.zeros(1), 2, 3], TypeError, r"into\[1\]"),
        ({"q": torch.zeros(1)}, ValueError, "'q', which the value does not have; it has 'x', 'n', 'z'"),
        ({"x": torch.zeros(1)}, ValueError, r"into\['x'\] is a tensor"),
        ({"x": [torch.zeros(1)]}, ValueError, r"into\['x'\] has 1 items"),
        ({"z": "text"}, TypeError, r"into\['z'\] must be"),
        ({"n": [torch.zeros(1)]}, TypeError, r"into\['n'\]"),
        (17, TypeError, "into is int"),
    ],
)
def test_targets_that_do_not_match_are_named(into: Any, error: type[Exception], text: str) -> None:
    value = {"x": [torch.zeros(1), {"y": torch.zeros(2)}], "n": 3, "z": np.zeros(3)}
    with pytest.raises(error, match=text):
        match(structure(*codec.encode_value(value)), 3, into)


@pytest.mark.parametrize(
    ("target", "error", "text"),
    [
        (torch.zeros(3, 2), ValueError, r"shape \(3, 2\), the value \(2, 3\)"),
        (torch.zeros(2, 3, dtype=torch.float64), ValueError, "dtype torch.float64, the value float32"),
        (np.zeros((2, 3)), ValueError, "dtype float64"),
        (torch.zeros(1, 3).expand(2, 3), ValueError, "share memory"),
        (torch.zeros(2, 3).to_sparse(), TypeError, "strided"),
        (np.broadcast_to(np.zeros(3, "f4"), (2, 3)), ValueError, "not writable"),
    ],
)
def test_targets_that_cannot_hold_the_tensor_are_named(target: Any, error: type[Exception], text: str) -> None:
    spec, _ = spec_for(torch.ones(2, 3))
    with pytest.raises(error, match=text):
        check_target(spec, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float32])
def test_targets_of_every_layout_receive_the_tensor(dtype: torch.dtype) -> None:
    source = torch.arange(600).reshape(3, 10, 20).to(dtype)
    for order in itertools.permutations(range(3)):
        spec, block = spec_for(source.permute(order))
        for target_order in itertools.permutations(range(3)):
            shape = source.permute(order).shape
            target = torch.empty([shape[i] for i in target_order], dtype=dtype)
            target = target.permute([target_order.index(i) for i in range(3)])
            before = target._version
            found = receive([spec], [target], BufferPool(1 << 20), lambda parts, b=block: moved_by(parts, b), NONE)[0]
            assert found is target
            assert torch.equal(target, source.permute(order))
            assert target._version > before
