"""Digests of tensors: the C function against a formulation of its own, layouts, changes; what is compared with what."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import numpy as np
import pytest
import torch

from raylane.core import native
from raylane.weights.layout.boxes import Box, Division, HeldBox, TensorLayout, View, divide, store
from raylane.weights.layout.comparison import groups_of, whole_plan
from raylane.weights.layout.plan import make_plans
from raylane.weights.memory.digests import DigestPlace, PreparedDigests, WrittenDigests, rows_of
from raylane.weights.memory.tensors import target_regions, writes_of
from raylane.weights.state.options import VerifySchedule

DTYPES = (torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.complex128)
MASK = (1 << 64) - 1


def mixed(number: int) -> int:
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def expected(tensor: torch.Tensor) -> int:
    """Return the digest word by word, with Python's numbers."""
    size = min(tensor.itemsize, 4)
    words = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().view(f"u{size}").tolist()
    total = 0
    for position, word in enumerate(words):
        folded = (word ^ (word >> 16) if size == 4 else word) ^ 0x9E3779B9
        block, place = divmod(position, 1024)
        total += folded * (mixed(~place & MASK) >> 32 | 1) * (mixed(block) | 1)
    return total & MASK


def digest(*parts: tuple[torch.Tensor, tuple[int, ...]], shape: tuple[int, ...], dtype: Any = None) -> int:
    """Return the digest of a tensor of this shape that consists of parts, each with its first element."""
    places = [DigestPlace(0, shape, start, dtype or view.dtype) for view, start in parts]
    views = [view for view, _ in parts]
    return int(PreparedDigests(places, views, 1).run(lambda numbers: [views[number] for number in numbers])[0])


def whole(tensor: torch.Tensor) -> int:
    return digest((tensor, (0,) * tensor.dim()), shape=tuple(tensor.shape))


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor of random bits: NaNs and subnormal numbers among them."""
    chance = np.random.default_rng(seed)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(chance.integers(0, 256, size, dtype=np.uint8)).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_equals_the_sum_over_words(dtype: torch.dtype) -> None:
    for shape in ((), (1,), (5000,), (37, 129), (3, 4, 5, 6), (2, 1, 3, 2, 2, 5), (64, 1)):
        tensor = random_tensor(dtype, *shape)
        assert whole(tensor) == expected(tensor), shape
        for dims in itertools.islice(itertools.permutations(range(len(shape))), 30):
            moved = tensor.permute(dims)
            assert whole(moved) == expected(moved), (shape, dims)
    stepped = random_tensor(dtype, 300, 40)[::3, 1::2]
    assert whole(stepped) == expected(stepped)
    assert whole(torch.empty(0, 3, dtype=dtype)) == 0


def test_lazy_tensors_count_as_they_are_read() -> None:
    tensor = torch.randn(6, 5, dtype=torch.complex64)
    assert whole(tensor.conj()) == expected(tensor.conj_physical())


@pytest.mark.claim("weights", "digests of tensors do not depend on the layout, and those of ranks add up")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mesh", [(1,), (3,), (2, 2), (2, 3)])
def test_parts_of_ranks_add_up_in_every_layout(dtype: torch.dtype, mesh: tuple[int, ...]) -> None:
    tensor = random_tensor(dtype, 13, 9, 4)
    dims = ((0,), (1,), (2,)) if len(mesh) == 1 else ((0, 1), (2, 0), (1, 1))
    for placed in dims:
        parts = []
        for coordinate in itertools.product(*(range(size) for size in mesh)):
            held = divide(tensor.shape, mesh, coordinate, [Division(dim, 2 if dim == 1 else 1) for dim in placed])
            parts += [(each.box.of(tensor), each.box.start) for each in held]
        assert digest(*parts, shape=(13, 9, 4)) == whole(tensor)
        assert digest(*parts[::-1], shape=(13, 9, 4)) == whole(tensor)
        if len(parts) > 1:
            assert digest(*parts[1:], shape=(13, 9, 4)) != whole(tensor)  # a rank's part is missing
            assert digest(*parts, parts[0], shape=(13, 9, 4)) != whole(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = random_tensor(dtype, 3, 5)
    data = tensor.view(torch.uint8).view(-1)
    digests = {whole(tensor)}
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            digests.add(whole(tensor))
            data[at] ^= 1 << bit
    assert len(digests) == 1 + 8 * len(data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_exchanged_and_negated_elements_change_the_digest(dtype: torch.dtype) -> None:
    experts = torch.randn(4, 64, 48).to(dtype)
    changes = [experts, experts[[1, 0, 2, 3]], experts[:, torch.randperm(64)], -experts, experts.flip(2)]
    changes.append(torch.cat([experts[:2], -experts[2:3], experts[3:]]))
    changes += [experts.clone().index_fill_(0, torch.tensor([number]), 0) for number in range(4)]
    assert len({whole(each) for each in changes}) == len(changes)
    # Only the highest bits change here, in few elements.
    signs = torch.ones(2000).to(dtype)
    digests = set()
    for first, second in itertools.combinations(range(0, 2000, 97), 2):
        changed = signs.clone()
        changed[first], changed[second] = -1, -1
        digests.add(whole(changed))
    assert len(digests) == 21 * 20 // 2
    assert len({whole(torch.zeros(number)) for number in range(1, 50)}) == 49
    assert whole(torch.zeros(2)) != whole(-torch.zeros(2))


def test_elements_count_in_another_dtype_after_conversion() -> None:
    tensor = torch.randn(700, 1301)  # more than the scratch memory holds at once
    converted = tensor.bfloat16()
    assert digest((tensor, (0, 0)), shape=(700, 1301), dtype=torch.bfloat16) == whole(converted)
    parts = [(tensor[:, :400], (0, 0)), (tensor[:, 400:], (0, 400))]
    assert digest(*parts, shape=(700, 1301), dtype=torch.bfloat16) == whole(converted)
    assert whole(tensor) != whole(converted)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as it is", "converted"])
def test_written_digests_of_ranks_add_up(dtype: torch.dtype | None) -> None:
    tensors = {"a": torch.randn(8, 6), "b": torch.randn(6), "n": torch.arange(5)}
    kinds = {name: dtype if dtype and each.is_floating_point() else each.dtype for name, each in tensors.items()}
    layouts = []
    for rank in range(2):  # halves of `a`, and replicas of the others
        boxes = {
            name: HeldBox(Box((0,) * each.dim(), tuple(each.shape)), (0,) * each.dim())
            for name, each in tensors.items()
        }
        boxes["a"] = HeldBox(Box((4 * rank, 0), (4, 6)), (0, 0))
        layouts.append(
            {
                name: TensorLayout(tuple(each.shape), str(kinds[name])[6:], kinds[name].itemsize, (boxes[name],))
                for name, each in tensors.items()
            }
        )
    stored = store(layouts)
    memory = torch.zeros(stored.nbytes[0], dtype=torch.uint8)
    sums = np.zeros(3, dtype=np.uint64)
    for rank in range(2):
        own = {**tensors, "a": tensors["a"][4 * rank : 4 * rank + 4]}
        regions, places = writes_of(stored, rank, layouts[rank], memory)
        sums += WrittenDigests(stored, rank, regions, own, places).run(lambda own=own: own)
    assert sums.tolist() == [expected(tensors[name].to(kinds[name])) for name in stored.tensors]


def test_long_rows_are_divided_and_threads_agree() -> None:
    tensor = random_tensor(torch.int16, 3, 1 << 18)
    for view in (tensor, tensor.t(), tensor[:, ::2]):
        box = Box((0, 0), tuple(view.shape))
        rows = list(rows_of(view.data_ptr(), 2, view.stride(), box, tuple(view.shape), 0))
        assert len(rows) > 1
        sums = []
        for threads in (1, 3, 16):
            sums.append(np.zeros(1, dtype=np.uint64))
            native.add_digests(np.array(rows, dtype=np.uint64), sums[-1], threads)
        assert sums[0] == sums[1] == sums[2] == whole(view)


def test_rows_that_do_not_fit_are_refused() -> None:
    row = [0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    native.add_digests(array("Q", row), array("Q", [0]), 1)
    native.add_digests(array("Q"), array("Q"), 1)
    for wrong, message in (
        (row[:-1], "13 64-bit numbers"),
        ([0, 3, *row[2:]], "words of 3"),
        ([0, 4, 1, *row[3:]], "sum 1 of 1"),
    ):
        with pytest.raises(ValueError, match=message):
            native.add_digests(array("Q", wrong), array("Q", [0]), 1)
    with pytest.raises(ValueError, match="between 1 and 16 threads"):
        native.add_digests(array("Q", row), array("Q", [0]), 17)


def layout(
    name: str, shape: tuple[int, ...], start: tuple[int, ...] = (0, 0), size: Any = None
) -> dict[str, TensorLayout]:
    held = HeldBox(Box(start, size or shape), (0,) * len(shape))
    return {name: TensorLayout(shape, "float32", 4, (held,))}


def test_whole_tensors_of_the_same_dtype_need_no_slot() -> None:
    stored = store([layout("w", (4, 2), (0, 0), (2, 2)), layout("w", (4, 2), (2, 0), (2, 2))], ["a", "b"])
    for reader, dtype, is_whole, elements in (
        (layout("w", (4, 2)), "float32", True, 8),
        (layout("w", (4, 2)), "bfloat16", False, 8),
        (layout("w", (4, 2), (1, 0), (3, 2)), "float32", False, 6),
    ):
        (plan,) = make_plans(stored, [reader])
        (group,) = groups_of(plan, target_regions(plan), {"w": dtype})
        assert (group.source, group.is_whole, group.text) == ("w", is_whole, "'w'")
        assert sum(region.box.elements for region in group.regions) == elements
    assert whole_plan(stored, ["w"]).bytes_by_part == {"a": 16, "b": 16}


def test_elements_in_two_tensors_are_compared_in_each() -> None:
    stored = store([layout("w", (4, 2))])
    (plan,) = make_plans(stored, [layout("w", (4, 2))])
    name, *arrays = plan.pieces[0]
    twice = type(plan)(stored, (type(plan.pieces[0])(name, *(np.repeat(each, 2, axis=0) for each in arrays)),))
    regions = [("x", View((4, 2), (2, 1), 0)), ("y", View((4, 2), (1, 4), 0))]
    groups = groups_of(twice, regions, {"x": "float32", "y": "float32"})
    assert [(group.text, group.is_whole) for group in groups] == [("'w' (in 'x')", True), ("'w' (in 'y')", True)]


def test_schedule_of_verifications() -> None:
    due = {
        option: [turn for turn in range(1, 8) if VerifySchedule(option).is_due(turn)]
        for option in (None, "each", "first", 1, 3)
    }
    assert due == {None: [], "each": [*range(1, 8)], "first": [1], 1: [*range(1, 8)], 3: [3, 6]}
    for wrong, message in (
        ("all", "'each', 'first', a whole number"),
        (0, "at least 1"),
        (True, "whole number"),
        (1.5, "whole number"),
    ):
        with pytest.raises(ValueError, match=f"verify must be .*{message}"):
            VerifySchedule(wrong)
