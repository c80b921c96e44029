"""Values in memory of `raylane.empty`: readers map them, producers wait for them, and rings use the memory again."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
import torch

import raylane
from raylane.errors import TransferTimeoutError
from raylane.transport.link.memory_report import ask_everywhere

pytestmark = pytest.mark.usefixtures("cluster")

COUNT = 200_000


class Maker:
    """Producer whose results lie in shared memory."""

    def __init__(self) -> None:
        self.ring = raylane.Buffers(COUNT, torch.float32, 2)
        self.kept: Any = None

    @raylane.method
    def keep(self, kind: str) -> Any:
        if kind == "tensor":
            self.kept = raylane.empty(COUNT, torch.float32).fill_(1)
            return self.kept
        if kind == "array":
            self.kept = raylane.empty(COUNT, np.float32)
            self.kept[:] = 1
            return self.kept
        base = raylane.empty(COUNT, torch.float32).fill_(1)
        self.kept = {"whole": base, "part": base[10:20], "other": torch.full((COUNT,), 2.0), "small": torch.ones(3)}
        return self.kept

    @raylane.method
    def model(self) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        self.module = raylane.to_shared(torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300)))
        return dict(self.module.state_dict())

    @raylane.method
    def from_ring(self, number: float, timeout: float | None = None) -> torch.Tensor:
        return self.ring.take(timeout).fill_(number)

    def free(self) -> bool:
        return raylane.is_free(self.kept)

    def overwrite(self, timeout: float) -> None:
        raylane.wait_free(self.kept, timeout)
        self.kept[:] = 9

    def pid(self) -> int:
        return os.getpid()


class Reader:
    """Consumer that may keep what it gets."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def total(self, value: Any) -> float:
        return float(value.sum())

    def keep(self, refs: list[Any], copy: bool = False) -> int:
        """Keep the value, and return how many values this process has mapped."""
        self.kept.append(raylane.get(refs[0], copy=copy))
        return int(raylane.stats().get("mapped", 0))

    def write(self) -> tuple[float, float]:
        """Write to what was kept last; return its first and last element."""
        self.kept[-1][0] = 5
        return float(self.kept[-1][0]), float(self.kept[-1][-1])

    def totals(self) -> list[float]:
        return [float(value.sum()) for value in self.kept]

    def ties(self) -> tuple[bool, list[float]]:
        value = self.kept[-1]
        value["whole"][12] = 7
        return float(value["part"][2]) == 7, [float(each.sum()) for each in value.values()]

    def drop(self) -> None:
        self.kept.clear()
        gc.collect()

    def mapped_bytes(self) -> tuple[int, int]:
        stats = raylane.stats()
        return stats["mapped_bytes"], stats["mapped_idle_bytes"]

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def maker() -> Any:
    return ray.remote(num_cpus=0)(Maker).remote()


@pytest.fixture
def reader() -> Any:
    return ray.remote(num_cpus=0)(Reader).remote()


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_readers_map_the_memory_and_the_producer_sees_them(
    maker: Any, reader: Any, kind: str, eventually: Callable[..., None]
) -> None:
    ref = maker.keep.remote(kind)
    assert ray.get(reader.total.remote(ref)) == COUNT
    assert ray.get(reader.keep.remote([ref])) == 2
    assert not ray.get(maker.free.remote())  # there is a ref
    del ref
    with pytest.raises(TransferTimeoutError, match="mapped"):
        ray.get(maker.overwrite.remote(0.5))
    # What a reader writes stays with it, and it sees no write of others.
    assert ray.get(reader.write.remote()) == (5, 1)
    ray.get(reader.drop.remote())
    eventually(lambda: ray.get(maker.free.remote()))
    ray.get(maker.overwrite.remote(30))


def test_a_mapping_used_again_shows_what_the_producer_wrote(
    maker: Any, reader: Any, eventually: Callable[..., None]
) -> None:
    for number in (1.0, 2.0, 3.0, 4.0):  # two buffers, each mapped twice
        ref = maker.from_ring.remote(number, 30)
        ray.get(reader.keep.remote([ref]))
        del ref
        assert ray.get(reader.totals.remote()) == [COUNT * number]
        assert ray.get(reader.write.remote()) == (5, number)
        ray.get(reader.drop.remote())


def test_copies_leave_the_memory_free(maker: Any, reader: Any, eventually: Callable[..., None]) -> None:
    ref = maker.keep.remote("tensor")
    assert ray.get(reader.keep.remote([ref], copy=True)) == 0
    mine = raylane.get(ref, into=torch.zeros(COUNT))
    del ref
    eventually(lambda: ray.get(maker.free.remote()))
    ray.get(maker.overwrite.remote(30))
    assert ray.get(reader.totals.remote()) == [COUNT]
    assert float(mine.sum()) == COUNT


def test_reports_tell_what_is_mapped(maker: Any, reader: Any, eventually: Callable[..., None]) -> None:
    def in_maker() -> tuple[int, int, int]:
        reports = [each.holdings for each in ask_everywhere(30, 1) if each.pid == pid]
        assert reports[0] is not None
        held = reports[0]
        return held.region_bytes, held.region_read_bytes, held.region_idle_bytes

    pid = ray.get(maker.pid.remote())
    ref = maker.keep.remote("tensor")
    ray.get(reader.keep.remote([ref]))
    region_bytes, read_bytes, idle_before = in_maker()
    assert region_bytes >= read_bytes >= 4 * COUNT
    used_bytes, idle_bytes = ray.get(reader.mapped_bytes.remote())
    assert used_bytes >= 4 * COUNT
    assert idle_bytes == 0
    ray.get(reader.drop.remote())
    eventually(lambda: ray.get(reader.mapped_bytes.remote()) == (0, used_bytes))
    assert in_maker() == (region_bytes, 0, idle_before)


def test_a_killed_reader_counts_no_more(maker: Any, reader: Any, eventually: Callable[..., None]) -> None:
    ref = maker.keep.remote("tensor")
    ray.get(reader.keep.remote([ref]))
    del ref
    pid = ray.get(reader.pid.remote())
    assert not ray.get(maker.free.remote())
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: ray.get(maker.free.remote()))


def test_mapped_values_survive_their_producer(maker: Any, reader: Any) -> None:
    ref = maker.keep.remote("tensor")
    ray.get(reader.keep.remote([ref]))
    ray.kill(maker)
    assert ray.get(reader.totals.remote()) == [COUNT]


def test_values_partly_in_shared_memory_keep_their_ties(maker: Any, reader: Any) -> None:
    ref = maker.keep.remote("parts")
    assert ray.get(reader.keep.remote([ref])) == 1
    tied, totals = ray.get(reader.ties.remote())
    assert tied
    assert totals == [COUNT + 6, 16, 2 * COUNT, 3]
    assert [float(each.sum()) for each in raylane.get(ref).values()] == [COUNT, 10, 2 * COUNT, 3]


@pytest.mark.parametrize("transport", ["host", "tcp", "object_store"])
def test_every_transport_brings_the_same_values(maker: Any, transport: str) -> None:
    ref = maker.keep.remote("parts")
    value = raylane.get(ref, tensor_transport=transport)
    assert [float(each.sum()) for each in value.values()] == [COUNT, 10, 2 * COUNT, 3]


def test_parameters_of_a_model_move_into_shared_memory(maker: Any) -> None:
    state = ray.get(maker.model.remote())
    torch.manual_seed(0)
    expected = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300)).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert raylane.stats()["mapped"] >= 1


def test_a_ring_gives_out_what_nobody_has(maker: Any, reader: Any, eventually: Callable[..., None]) -> None:
    for number in range(6):  # refs and values are dropped at once, so the ring goes round
        assert ray.get(reader.total.remote(maker.from_ring.remote(float(number), 30))) == COUNT * number
    refs = [maker.from_ring.remote(1.0), maker.from_ring.remote(2.0)]
    ray.get(reader.keep.remote([refs[0]]))
    ray.get(reader.keep.remote([refs[1]]))
    with pytest.raises(TransferTimeoutError, match="none of 2 buffers"):
        ray.get(maker.from_ring.remote(3.0, 0.2))
    del refs
    with pytest.raises(TransferTimeoutError, match="copy=True"):
        ray.get(maker.from_ring.remote(3.0, 0.2))
    assert ray.get(reader.totals.remote()) == [COUNT, 2 * COUNT]
    waiting = maker.from_ring.remote(4.0, 60)
    ray.get(reader.drop.remote())
    assert ray.get(reader.total.remote(waiting)) == 4 * COUNT


def test_a_ring_in_one_process_follows_views() -> None:
    ring = raylane.Buffers((10, 3), np.int64, 2)
    first, second = ring.take(), ring.take()
    row = first[2]
    del first
    with pytest.raises(TransferTimeoutError):
        ring.take(0)
    row[:] = 4
    del row
    third = ring.take(0)
    assert third[2].tolist() == [4, 4, 4]
    assert len(ring) == 2
    assert repr(ring) == "Buffers((10, 3), int64, 2): 0 free"
    del second, third
    assert repr(ring).endswith("2 free")


def test_bad_rings_are_refused() -> None:
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        raylane.Buffers(3, torch.float32, 0)
    with pytest.raises(ValueError, match="no memory"):
        raylane.Buffers((3, 0), torch.float32, 1)
    with pytest.raises(ValueError, match="Buffers: object holds Python objects"):
        raylane.Buffers(3, object, 1)
    with pytest.raises(ValueError, match=r"Buffers: .* got the shape \(-1,\)"):
        raylane.Buffers(-1, torch.float32, 1)


def test_to_shared_keeps_the_rest_of_a_value() -> None:
    x = torch.arange(10.0)
    moved = raylane.to_shared({"x": x, "part": x[2:5], "array": np.ones(3), "text": "t", "none": torch.empty(0)})
    moved["x"][2] = 9
    assert moved["part"].tolist() == [9, 3, 4]
    assert x[2] == 2
    assert moved["text"] == "t"
    assert moved["none"].shape == (0,)
    layer = torch.nn.Linear(3, 4)
    tied = torch.nn.Linear(3, 4)
    tied.weight = layer.weight
    both = torch.nn.ModuleList([layer, tied])
    optimizer = torch.optim.SGD(both.parameters(), lr=1.0)
    assert raylane.to_shared(both) is both
    before = layer.weight.detach().clone()
    both[1](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert both[1].weight is layer.weight
    assert not torch.equal(layer.weight, before)
    assert raylane.to_shared("text") == "text"


def test_free_memory_of_any_kind_is_told() -> None:
    for tensor in (torch.ones(3), np.ones(3), raylane.empty((0, 3), torch.int8), raylane.empty(3, np.int8)):
        assert raylane.is_free(tensor)
        raylane.wait_free(tensor, 0)
    for other in ([1], torch.ones(3, device="meta")):
        with pytest.raises(TypeError, match="expected a torch tensor or a NumPy array"):
            raylane.is_free(other)
