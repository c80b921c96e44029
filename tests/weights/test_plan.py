"""Layouts and plans against torch's own division of tensors, and against a plain copy of whole tensors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from raylane.errors import WeightsLayoutError
from raylane.weights.layout.boxes import (
    Box,
    Division,
    HeldBox,
    Layout,
    StoredLayout,
    TensorLayout,
    chunk_bytes,
    divide,
    store,
)
from raylane.weights.layout.plan import Plan, make_plans

ITEMSIZES = {"float32": 4, "bfloat16": 2, "int64": 8}
Placements = tuple[Division | None, ...]


def part_of(whole: torch.Tensor, mesh: Sequence[int], at: Sequence[int], placements: Placements) -> torch.Tensor:
    """Return what the rank at a coordinate holds, divided by torch.chunk as DTensor does."""
    part = whole
    for axis, rank, placement in zip(mesh, at, placements, strict=True):
        if placement is not None:
            groups = padded_chunks(part, placement.split_factor, placement.dim)
            part = torch.cat([padded_chunks(group, axis, placement.dim)[rank] for group in groups], placement.dim)
    return part


def padded_chunks(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    chunks = list(tensor.chunk(count, dim)) if tensor.shape[dim] else [tensor]
    return chunks + [tensor.narrow(dim, 0, 0)] * (count - len(chunks))


def boxed(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))]


def random_placements(rng: random.Random, ndim: int, axes: int) -> Placements:
    choices = [None, *(Division(dim, rng.choice((1, 1, 2, 3))) for dim in range(ndim))]
    return tuple(rng.choice(choices) for _ in range(axes))


def layouts_of(shape: tuple[int, ...], dtype: str, mesh: Sequence[int], placements: Placements) -> list[TensorLayout]:
    coordinates = itertools.product(*map(range, mesh))
    return [TensorLayout(shape, dtype, ITEMSIZES[dtype], divide(shape, mesh, at, placements)) for at in coordinates]


@pytest.mark.parametrize("seed", range(200))
def test_division_is_that_of_torch(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.choice((0, 1, 2, 3, 7, 8, 13)) for _ in range(rng.randint(1, 3)))
    mesh = [rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(1, 3))]
    placements = random_placements(rng, len(shape), len(mesh))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for at in itertools.product(*map(range, mesh)):
        expected = part_of(whole, mesh, at, placements)
        actual = torch.full_like(expected, -1)
        for box, begin in divide(shape, mesh, at, placements):
            boxed(actual, Box(begin, box.size)).copy_(boxed(whole, box))
        assert torch.equal(actual, expected), (shape, mesh, placements, at)


def write(stored: StoredLayout, wholes: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return each part after all boxes are written."""
    memories = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in stored.nbytes]
    for name, tensor in stored.tensors.items():
        for part, offset, room, writes in tensor.boxes:
            assert offset % 64 == 0
            area = memories[part][offset : offset + room.elements * tensor.itemsize]
            assert not area.any(), "two boxes share memory"
            whole = torch.zeros_like(wholes[name])
            for _, box in writes:
                assert not boxed(whole, box).any(), "two ranks write the same element"
                boxed(whole, box).copy_(boxed(wholes[name], box))
            area.copy_(boxed(whole, room).contiguous().view(-1).view(torch.uint8))
    return memories


def read(plan: Plan, memories: Sequence[torch.Tensor], targets: dict[str, torch.Tensor]) -> None:
    for pieces in plan.pieces:
        tensor = plan.stored.tensors[pieces.name]
        dtype = getattr(torch, tensor.dtype)
        for number, source, place, _ in pieces.rows():
            part, offset, box, _ = tensor.boxes[number]
            content = memories[part][offset : offset + box.elements * dtype.itemsize].view(dtype).view(box.size)
            boxed(targets[pieces.name], place).copy_(boxed(content, source))


@pytest.mark.claim("weights", "shards, replicas and uneven parts of meshes of three axes are read into any others")
@pytest.mark.parametrize("seed", range(150))
def test_any_layout_is_read_into_any_other(seed: int) -> None:
    rng = random.Random(seed)
    source_mesh = [rng.choice((1, 2, 3)) for _ in range(rng.randint(1, 3))]
    reader_mesh = [rng.choice((1, 2, 3)) for _ in range(rng.randint(1, 3))]
    count, readers = torch.Size(source_mesh).numel(), torch.Size(reader_mesh).numel()
    sources: list[dict[str, TensorLayout]] = [{} for _ in range(count)]
    targets: list[dict[str, TensorLayout]] = [{} for _ in range(readers)]
    wholes, parts = {}, {}
    for number in range(5):
        name, shape = f"w{number}", tuple(rng.choice((0, 1, 5, 6, 9)) for _ in range(rng.randint(0, 3)))
        dtype = rng.choice(list(ITEMSIZES))
        wholes[name] = (torch.rand(shape) * 100 + 1).to(getattr(torch, dtype))
        placements = random_placements(rng, len(shape), len(source_mesh))
        for rank, tensor in enumerate(layouts_of(shape, dtype, source_mesh, placements)):
            sources[rank][name] = tensor
        placements = random_placements(rng, len(shape), len(reader_mesh))
        for rank, at in enumerate(itertools.product(*map(range, reader_mesh))):
            targets[rank][name] = TensorLayout(
                shape, dtype, ITEMSIZES[dtype], divide(shape, reader_mesh, at, placements)
            )
            parts[rank, name] = part_of(wholes[name], reader_mesh, at, placements)
    stored = store(sources, [rng.choice("abc") for _ in sources])
    memories = write(stored, wholes)
    for rank, plan in enumerate(make_plans(stored, targets)):
        tensors = {name: torch.zeros_like(parts[rank, name]) for name in wholes}
        read(plan, memories, tensors)
        assert all(torch.equal(tensors[name], parts[rank, name]) for name in wholes)
        assert plan.nbytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.claim("weights", "replicas share the work of publication")
def test_replicas_share_the_writing() -> None:
    layout = {f"w{i}": TensorLayout((10, 10), "float32", 4, divide((10, 10), [4], [0], [None])) for i in range(40)}
    stored = store([layout] * 4)
    assert stored.nbytes == (40 * 448,)
    written = [rank for tensor in stored.tensors.values() for box in tensor.boxes for rank, _ in box.writes]
    assert sorted(written) == sorted([0, 1, 2, 3] * 10)
    # Hosts share it, too, and each has whole tensors.
    stored = store([layout] * 4, ["a", "a", "b", "b"])
    assert stored.nbytes == (20 * 448,) * 2
    assert all(len(tensor.boxes) == 1 for tensor in stored.tensors.values())


def test_plans_of_many_ranks_read_every_byte_once() -> None:
    shape, sources, readers = (4096, 1024), [], []
    for rank in range(128):
        held = divide(shape, [128], [rank], [Division(0)])
        sources.append({f"w{i}": TensorLayout(shape, "bfloat16", 2, held) for i in range(1000)})
    for rank in range(64):
        halves = [divide(shape, [64], [rank], [Division(dim)]) for dim in (0, 1)]
        readers.append({f"w{i}": TensorLayout(shape, "bfloat16", 2, halves[i % 2]) for i in range(1000)})
    plans = make_plans(store(sources, [f"host {rank // 8}" for rank in range(128)]), readers)
    assert sum(plan.nbytes for plan in plans) == 2 * 1000 * 4096 * 1024


def rows(shape: tuple[int, ...], start: int, stop: int, dtype: str = "float32") -> Layout:
    held = HeldBox(Box((start, 0), (stop - start, shape[1])), (0, 0))
    return {"w": TensorLayout(shape, dtype, ITEMSIZES[dtype], (held,))}


@pytest.mark.claim("weights", "missing, surplus and misshapen tensors are named before anything is written")
def test_layouts_that_do_not_fit_are_refused_with_names() -> None:
    shape = (8, 2)
    with pytest.raises(WeightsLayoutError, match=r"hold 12 elements of 'w', whose shape \(8, 2\) has 16: no rank"):
        store([rows(shape, 0, 4), rows(shape, 4, 6)])
    with pytest.raises(WeightsLayoutError, match="different regions that overlap"):
        store([rows(shape, 0, 5), rows(shape, 4, 7)])
    with pytest.raises(WeightsLayoutError, match=r"rank 0 has float32 \(8, 2\), rank 1 has bfloat16 \(8, 2\)"):
        store([rows(shape, 0, 4), rows(shape, 4, 8, "bfloat16")])
    stored = store([rows(shape, 0, 4), rows(shape, 4, 8)])
    other = {"v": rows(shape, 0, 8)["w"]}
    with pytest.raises(WeightsLayoutError, match=r"1 tensors of the reader are not published: 'v'; 1 published .* 'w'"):
        make_plans(stored, [other])
    with pytest.raises(WeightsLayoutError, match=r"published with the shape \(8, 2\), and the reader has \(9, 2\)"):
        make_plans(stored, [rows((9, 2), 0, 8)])
    with pytest.raises(WeightsLayoutError, match="published as float32, and the reader has int64"):
        make_plans(stored, [rows(shape, 0, 8, "int64")])
    assert make_plans(stored, [{}], subset=True)[0].nbytes == 0


def test_chunks_are_those_with_bytes_of_the_reader() -> None:
    layout = {
        f"w{i}": TensorLayout((1000, 1000), "float32", 4, divide((1000, 1000), [1], [0], [None])) for i in range(9)
    }
    stored = store([layout])
    step = chunk_bytes(stored.nbytes[0])
    for names, start in ((["w3"], 0), (["w1", "w8"], 500)):
        held = HeldBox(Box((start, 0), (500, 1000)), (0, 0))
        reader = {name: TensorLayout((1000, 1000), "float32", 4, (held,)) for name in names}
        (plan,) = make_plans(stored, [reader], subset=True)
        firsts = [stored.tensors[name].boxes[0].offset + start * 4000 for name in names]
        expected = {byte // step for first in firsts for byte in range(first, first + 2_000_000, 4)}
        assert plan.chunks("") == sorted(expected)
