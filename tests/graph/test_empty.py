"""Arrays made by `raylane.empty`: what travels without a copy, who may keep it, and what is refused."""

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
from tests.graph.keeper import BusyReceiver, Keeper, Sender, in_memfd

import raylane
from core.processes import start_code
from raylane.core.memory import regions
from raylane.core.memory.regions import RegionPlace
from raylane.core.memory.segment import Segment
from raylane.errors import GraphActorDiedError
from raylane.graph.channels.lease import LeaseReader
from raylane.graph.channels.ring import MAX_PLACES
from raylane.testing.leaks import descriptors
from raylane.transport.value.leaf_memory import leaf_address

Compile = Callable[..., Any]


@pytest.fixture
def keeper(ray_session: None) -> Any:
    actor = ray.remote(num_cpus=0)(Keeper).remote()
    yield actor
    ray.kill(actor)


# Making


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(0, np.float32), ((3, 0, 2), "i8"), (5, np.dtype("u1")), ((2, 3, 4), np.float64), ((), np.complex128), (7, bool)],
)
def test_empty_makes_arrays_of_every_kind(shape: Any, dtype: Any) -> None:
    array = raylane.empty(shape, dtype)
    like = np.empty(shape, dtype)
    assert (array.shape, array.dtype) == (like.shape, like.dtype)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    again = raylane.empty_like(array)
    assert (again.shape, again.dtype) == (like.shape, like.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_empty_makes_tensors_of_every_kind(dtype: torch.dtype) -> None:
    for shape in (4, (2, 3), (0, 2), ()):
        tensor = raylane.empty(shape, dtype)
        assert (tensor.shape, tensor.dtype) == (torch.empty(shape).shape, dtype)
        assert raylane.empty_like(tensor).dtype == dtype


def test_empty_refuses_what_it_cannot_make() -> None:
    with pytest.raises(ValueError, match="holds Python objects"):
        raylane.empty(3, object)
    with pytest.raises(ValueError, match=r"0 or more, got the shape \(2, -1\)"):
        raylane.empty((2, -1), np.int8)
    with pytest.raises(TypeError, match="list is neither a NumPy array nor a tensor"):
        raylane.empty_like([1, 2])
    with pytest.raises(ValueError, match="the tensor is on meta"):
        raylane.empty_like(torch.empty(3, device="meta"))
    with pytest.raises(TypeError):
        raylane.empty(3, "no such dtype")


def test_empty_memory_is_freed_after_the_last_array() -> None:
    gc.collect()
    regions.close()
    before, count = descriptors(), len(regions._regions)
    array = raylane.empty(100_000, np.float32)
    view = array[10:20]
    del array
    view[:] = 1
    assert len(regions._regions) == count + 1
    del view
    assert len(regions._regions) == count
    regions.close()
    assert descriptors() == before


def test_empty_memory_is_used_again_by_the_next_array() -> None:
    array = raylane.empty(100_000, np.float32)
    place, region = regions.find(array) or pytest.fail("no region")
    array[:] = 3
    del array
    again = raylane.empty((10, 10_001), torch.float32)  # of the same class of sizes
    assert regions.find(again.numpy()) == (place._replace(nbytes=400_040), region)
    assert again.max() == 3
    region.hand_over(1)  # a message that nobody has taken
    del again
    other = raylane.empty(100_000, np.float32)
    assert regions.find(other) != (place, region)
    del other
    region.take_back()
    regions.close()
    assert not region.is_under_way


@pytest.mark.processes
def test_forked_child_does_not_take_idle_memory_of_its_parent() -> None:
    code = """
import os
import numpy as np
import raylane
from raylane.core.memory import regions
from raylane.core.memory.segment import Segment
array = raylane.empty(1000, np.uint8)
array[:] = 5
place, region = regions.find(array)
memory = Segment.open(place.path)
del array
child = os.fork()
if not child:
    raylane.empty(1000, np.uint8)[:] = 6
    regions.close()
    os._exit(0)
os.waitpid(child, 0)
answer = bytes(memory.view[place.offset:place.offset + 3])
"""
    assert start_code(code).result() == b"\x05\x05\x05"


def test_empty_region_is_found_by_any_part_of_it() -> None:
    first, second = raylane.empty(1000, np.uint8), raylane.empty((10, 100), torch.uint8)
    for array in (first, second.numpy()):
        for part in (array, array[3:7], array[-1:]):
            found = regions.find(part)
            assert found is not None
            place, _ = found
            segment = Segment.open(place.path)
            part[...] = 7
            assert bytes(segment.view[place.offset : place.offset + place.nbytes]) == b"\x07" * part.nbytes
    assert regions.find(np.empty(1000)) is None
    assert regions.find(b"read-only") is None


@pytest.mark.processes
def test_empty_in_a_forked_child_leaves_the_parents_memory() -> None:
    code = """
import os
import numpy as np
import raylane
array = raylane.empty(1000, np.uint8)
array[:] = 5
child = os.fork()
if not child:
    del array
    os._exit(0)
os.waitpid(child, 0)
from raylane.core.memory import regions
from raylane.core.memory.segment import Segment
place, _ = regions.find(array)
answer = bytes(Segment.open(place.path).view[place.offset:place.offset + 3])
"""
    assert start_code(code).result() == b"\x05\x05\x05"


# Travelling


def test_empty_arrays_travel_in_place_and_read_only(keeper: Any, graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(keeper.describe, x))
    mine = raylane.empty((100, 1000), np.float32)
    mine[:] = 1
    tensor = raylane.empty(50_000, torch.float32)
    tensor[:] = 2
    other = np.full(50_000, 3, np.float32)
    in_place, copied = (100_000.0, False, True), (150_000.0, True, True)
    assert g.execute([mine]).get() == [in_place]
    assert g.execute([mine, other]).get() == [in_place, copied]
    assert g.execute([other, mine, mine[50:]]).get() == [copied, in_place, (50_000.0, False, True)]
    assert g.execute([tensor]).get() == [(100_000.0, True, True)]
    mine[:] = 5  # no execution has it any more
    assert g.execute([mine]).get() == [(500_000.0, False, True)]
    assert g.stats()["lent_bytes"]["driver"] <= 1 << 19  # what was copied; memory handed over is the user's own


def test_empty_array_reaches_every_reader(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.MultiOutputNode([raylane.bind(worker.echo, x) for worker in workers]))
    array = raylane.empty(100_000, np.int64)
    array[:] = np.arange(100_000)
    for _ in range(20):  # one region, lent many times at once
        results = [g.execute(array) for _ in range(2)]
        for result in results:
            assert all(np.array_equal(found, array) for found in result.get())
    tensor = raylane.empty(50_000, torch.int64)
    tensor[:] = 4
    assert all(torch.equal(found, tensor) for found in g.execute(tensor).get())


def test_empty_parts_of_a_scatter_are_handed_over(workers: list[Any], graph: Compile) -> None:
    def build(x: Any) -> Any:
        parts = raylane.graph.scatter(x, len(workers))
        return raylane.graph.gather([raylane.bind(w.echo, part) for w, part in zip(workers, parts, strict=True)], 0)

    array = raylane.empty((64, 10_000), np.float32)
    array[:] = np.arange(64)[:, None]
    assert np.array_equal(graph(build).execute(array).get(), array)


def test_empty_result_of_an_actor_needs_no_copy(keeper: Any, graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(keeper.make, x))
    kept = [g.execute(100_000).get() for _ in range(5)]
    assert all(in_memfd(one) and not one.flags.writeable and one.sum() == 300_000 for one in kept)


def test_empty_array_outlives_its_sender_in_the_receiver(
    keeper: Any, graph: Compile, eventually: Callable[..., None]
) -> None:
    g = graph(lambda x: raylane.bind(keeper.keep, x))
    before = ray.get(keeper.maps.remote())
    count = len(regions._regions)
    for number in range(3):
        array = raylane.empty(100_000, np.float32)
        array[:] = number
        g.execute(array).get()
        del array
    assert ray.get(keeper.sums.remote()) == [0, 100_000, 200_000]
    assert len(regions._regions) == count  # the memory is the receiver's alone
    ray.get(keeper.drop.remote())
    g.teardown()
    eventually(lambda: ray.get(keeper.maps.remote()) <= before)


def test_empty_many_arrays_in_one_message(keeper: Any, graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(keeper.describe, x))
    arrays = [raylane.empty(20_000, np.float32) for _ in range(3 * MAX_PLACES)]
    for number, array in enumerate(arrays):
        array[:] = number
    found = g.execute(arrays).get()
    assert [total for total, _, _ in found] == [20_000.0 * number for number in range(len(arrays))]
    assert sum(not is_writable for _, is_writable, _ in found) == MAX_PLACES


def test_empty_place_that_is_no_place_is_refused() -> None:
    array = raylane.empty(1000, np.uint8)
    found = regions.find(array)
    assert found is not None
    path = found[0].path
    reader = LeaseReader()
    for offset, nbytes in [(0, 10), (regions.DATA_OFFSET, 4097), (regions.DATA_OFFSET, 0), (1 << 40, 1), (-1, 1)]:
        with pytest.raises(OSError, match="smaller than the array"):
            reader.borrow_place(RegionPlace(path, offset, nbytes), private=False)
    assert os.path.exists(path.partition("#")[0])


# Use by receivers


def held(array: Any) -> int:
    """Return how many values in the memory of an array receivers of graphs hold."""
    region = regions.region_at(leaf_address(array))
    assert region is not None
    assert raylane.is_free(array) == (region.held_count == 0)
    return region.held_count


@pytest.mark.claim("graphs", "arrays that arrive without a copy may be kept; the writer waits for their memory")
def test_memory_is_not_free_while_receivers_hold_values(
    keeper: Any, graph: Compile, eventually: Callable[..., None]
) -> None:
    g = graph(lambda x: raylane.bind(keeper.keep, x))
    array, tensor = raylane.empty((10, 20_000), np.float32), raylane.empty(50_000, torch.float32)
    tensor.fill_(1)
    assert held(array) == held(tensor) == 0
    for part in (array, array[3:]):
        g.execute(part).get()
    g.execute(tensor).get()
    assert held(array) == held(array[5]) == 2
    assert held(tensor.view(torch.uint8)) == 1
    ray.get(keeper.drop.remote())
    eventually(lambda: raylane.is_free(array) and raylane.is_free(tensor))


def test_memory_is_free_after_its_receiver_was_killed(
    keeper: Any, graph: Compile, eventually: Callable[..., None]
) -> None:
    g = graph(lambda x: raylane.bind(keeper.keep, x))
    array = raylane.empty(50_000, np.float32)
    buffers = raylane.Buffers((50_000,), np.float32, 1)
    g.execute([array, buffers.take()]).get()
    assert held(array) == 1
    os.kill(ray.get(keeper.pid.remote()), signal.SIGKILL)
    raylane.wait_free(array, 30)
    assert buffers.take(30).shape == (50_000,)


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "busy"])
def test_messages_that_were_not_taken_end_with_the_graph(
    killed: bool, ray_session: None, graph: Compile, eventually: Callable[..., None]
) -> None:
    sender, receiver = ray.remote(num_cpus=0)(Sender).remote(), ray.remote(num_cpus=0)(BusyReceiver).remote()
    pid = ray.get(receiver.pid.remote())
    array = raylane.empty(50_000, np.float32)
    g = graph(lambda x: raylane.bind(receiver.wait, x, raylane.bind(sender.send, x)))
    results = [g.execute(array) for _ in range(2)]
    region = regions.region_at(leaf_address(array))
    assert region is not None
    eventually(lambda: region.held_count)
    if killed:
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(GraphActorDiedError):
            results[1].get()
    assert not raylane.is_free(array)
    assert not ray.get(sender.is_free.remote())
    g.teardown(timeout=1)
    ray.kill(receiver)
    eventually(lambda: raylane.is_free(array) and ray.get(sender.is_free.remote()))
    ray.kill(sender)


def test_receiver_of_many_regions_copies_beyond_its_limit(
    keeper: Any, graph: Compile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raylane.graph.channels.lease.MAX_OPEN_REGIONS", 4)
    g = graph(lambda x: raylane.bind(keeper.make, x))
    kept = [g.execute(100_000).get() for _ in range(8)]
    assert [in_memfd(one) for one in kept] == [True] * 4 + [False] * 4
    assert all(not one.flags.writeable and one.sum() == 300_000 for one in kept)


def test_region_without_a_row_for_a_reader_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "_ROWS", regions._ROWS[:1])
    array = raylane.empty(1000, np.uint8)
    array[:] = 3
    place, region = regions.find(array) or pytest.fail("not in a region")
    region.hand_over(2)
    readers = LeaseReader(), LeaseReader()
    mapped, copied = (reader.borrow_place(place, private=False) for reader in readers)
    assert not region.is_under_way
    array[:] = 4
    assert (mapped[0], copied[0]) == (4, 3)
    assert held(array) == 1
    del mapped
    assert held(array) == 0


def test_memory_is_free_after_the_readers_of_every_graph(
    workers: list[Any], graph: Compile, eventually: Callable[..., None]
) -> None:
    array = raylane.empty(50_000, np.float32)
    graphs = [graph(lambda x: raylane.MultiOutputNode([raylane.bind(w.keep, x) for w in workers])) for _ in range(2)]
    for count, g in enumerate(graphs, 1):
        g.execute(array).get()
        assert held(array) == count * len(workers)
    graphs[0].teardown()
    ray.get([worker.drop.remote() for worker in workers])
    raylane.wait_free(array, 30)


def test_empty_result_is_right_if_its_memory_is_free(keeper: Any, graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(keeper.fill, x), max_inflight=4)
    for kind in ("array", "tensor"):
        results = [g.execute((kind, number)) for number in range(12)]
        kept = [result.get() for result in results]
        assert [(float(one.min()), float(one.max())) for one in kept] == [(float(n), float(n)) for n in range(12)]


def test_empty_tensor_is_not_changed_by_its_receivers(keeper: Any, graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(keeper.add_one, x), max_inflight=3)
    tensor, array = raylane.empty(50_000, torch.float32), raylane.empty(50_000, np.float32)
    for value in (1, 5):  # the same memory again
        tensor.fill_(value)
        array[:] = value
        for sent in (tensor, [tensor], [tensor, array], [tensor[:20_000], tensor[30_000:]]):
            results = [g.execute(sent) for _ in range(3)]
            assert {result.get() for result in results} == {(value + 1.0, value + 1.0)}
            assert (tensor == value).all()
            assert (array == value).all()
    g.teardown()
    ray.get(keeper.drop.remote())


@pytest.mark.ray
def test_empty_region_in_two_graphs_serves_each_of_them(
    workers: list[Any], graph: Compile, eventually: Callable[..., None]
) -> None:
    late, quick = workers[:2]
    held = graph(lambda x: raylane.bind(late.wait, x), max_inflight=4)
    with raylane.InputNode() as x:
        other = raylane.compile(raylane.bind(quick.total, x))
    ray.get(late.hold_again.remote())
    first = held.execute(0)  # the actor waits in it, and has not read the message that follows
    array = raylane.empty(100_000, np.float32)
    array[:] = 2
    result = held.execute(array)
    assert other.execute(array).get() == 200_000
    assert other.execute(np.zeros(1)).get() == 0  # the actor has dropped the array
    del array
    second = held.execute(raylane.empty(100_000, np.float32))  # looks at what was returned
    other.teardown()
    del other
    gc.collect()
    ray.get(late.release.remote())
    assert first.get() == 0
    assert float(result.get().sum()) == 200_000
    assert second.get().shape == (100_000,)
