"""NIXL: registrations and metadata, many tensors, sources and readers that die, and what is left afterwards."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from tests.process_tools import stop

import raylane
from raylane.errors import SourceLostError, TensorFreedError, TransferTimeoutError, TransportError
from raylane.transport.backends.nixl import agents as nixl_agents
from raylane.transport.backends.nixl.agent import NixlError, missing
from raylane.transport.backends.nixl.agents import Agents
from raylane.transport.link.endpoint import endpoint

if (reason := missing()) is not None:
    pytest.skip(f"this process cannot use NIXL: {reason}", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("cluster")
N = 1_000_000


class Source:
    """Returns tensors by NIXL."""

    kept: Any = None

    @raylane.method(tensor_transport="nixl")
    def make(self, value: float = 1.0, count: int = N) -> torch.Tensor:
        return torch.full((count,), value)

    @raylane.method(tensor_transport="nixl")
    def keep(self, count: int = N) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.arange(count, dtype=torch.float32)
        return self.kept

    @raylane.method(tensor_transport="nixl")
    def many(self, count: int, size: int) -> list[torch.Tensor]:
        return [torch.full((size,), i, dtype=torch.int32) for i in range(count)]

    @raylane.method(tensor_transport="nixl")
    def mixed(self) -> dict[str, Any]:
        return {"a": torch.arange(N), "b": [np.arange(N), torch.zeros(3)], "c": "text"}

    def resize(self, count: int) -> None:
        self.kept.untyped_storage().resize_(count)

    def recycle(self, rounds: int) -> None:
        """Publish tensors one after the other in the same memory, and check that the reader sees the content."""
        memory = np.zeros(N, dtype=np.float32)
        for i in range(rounds):
            memory[:] = i
            tensor = torch.from_numpy(memory[:])  # a new storage, at an address that was registered before
            ref = raylane.put(tensor, tensor_transport="nixl")
            assert ray.get(self.reader.total.remote([ref])) == float(i) * N
            del tensor, ref
            gc.collect()
            # Ray's callback frees the value, and the reader's answer ends the use of its registration: both on threads.
            deadline = time.monotonic() + 30
            while registered := raylane.stats()["nixl_registered"]:
                assert time.monotonic() < deadline, f"{registered} registrations are left"
                time.sleep(0.001)

    def forbid(self) -> None:
        def refuse(*_: Any) -> None:
            raise NixlError("the card has no memory left")

        endpoint().part(Agents).offering().offered._register = refuse  # type: ignore[method-assign]

    def meet(self, reader: Any) -> None:
        self.reader = reader

    def total(self, refs: list[Any]) -> float:
        return sum(float(one.double().sum()) for one in raylane.get(refs))

    def stats(self) -> dict[str, Any]:
        return raylane.stats()

    def replace_agents_early(self) -> None:
        nixl_agents.MOST_FORGOTTEN = 4

    def descriptors(self) -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def pid(self) -> int:
        return os.getpid()


@contextlib.contextmanager
def sources(count: int = 1) -> Iterator[list[Any]]:
    actors = [ray.remote(num_cpus=0)(Source).remote() for _ in range(count)]
    try:
        ray.get([actor.pid.remote() for actor in actors])
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)


def stats(actor: Any) -> dict[str, Any]:
    found: dict[str, Any] = ray.get(actor.stats.remote())
    return found


def test_metadata_and_registrations_are_made_once_per_owner() -> None:
    with sources() as (source,):
        for _ in range(5):
            assert torch.equal(ray.get(source.keep.remote()), torch.arange(N, dtype=torch.float32))
        here = raylane.stats()
        assert here["nixl"] == 5
        # How to reach the agent, and the one registration.
        assert here["nixl_metadata"] <= 2
        assert here["nixl_receiving"] <= 2
        assert stats(source)["nixl_registrations"] == 1


def test_recycled_memory_is_registered_again() -> None:
    with sources(2) as (source, reader):
        ray.get(source.meet.remote(reader))
        ray.get(source.recycle.remote(12))
        found = stats(source)
        assert found["nixl_registrations"] == 12
        assert found["nixl_registered"] <= 1
        # The reader forgets what it knows about the memory every time: where the agent is, and the registration.
        assert stats(reader)["nixl_metadata"] == 24


def test_dropped_connections_leave_few_sockets(eventually: Any) -> None:
    # Over TCP, as between hosts, UCX keeps two sockets for each until the reading agent is replaced.
    over_tcp = {"env_vars": {"UCX_TLS": "tcp"}}
    source, reader = (ray.remote(num_cpus=0)(Source).options(runtime_env=over_tcp).remote() for _ in range(2))
    ray.get([source.meet.remote(reader), reader.replace_agents_early.remote()])
    ray.get(source.recycle.remote(6))

    def descriptors() -> list[int]:
        return ray.get([one.descriptors.remote() for one in (source, reader)])

    before = descriptors()
    ray.get(source.recycle.remote(30))
    assert stats(reader)["nixl_metadata"] > 36  # it has forgotten the source nearly every time
    # Not at once: each end learns of the end of an agent on a thread of its own.
    eventually(lambda: all(now <= then + 10 for then, now in zip(before, descriptors(), strict=True)))
    for actor in (source, reader):
        ray.kill(actor)


@pytest.mark.claim("transport", "small tensors move together, in one request")
def test_small_tensors_are_one_request() -> None:
    with sources() as (source,):
        value = ray.get(source.many.remote(1000, 1024))
        assert all(int(one[0]) == int(one[-1]) == i for i, one in enumerate(value))
        assert raylane.stats()["nixl_requests"] == 1
        assert stats(source)["nixl_registrations"] == 1
        large = ray.get(source.many.remote(300, 1 << 15))
        assert all(int(one[0]) == int(one[-1]) == i for i, one in enumerate(large))
        assert raylane.stats()["nixl_requests"] == 2


@pytest.mark.claim("transport", "readers take values by one-sided reads of NIXL over UCX (never run over RDMA)")
def test_put_get_and_nested_values_travel_by_nixl() -> None:
    with sources(2) as (source, reader):
        value = ray.get(source.mixed.remote())
        assert torch.equal(value["a"], torch.arange(N))
        assert np.array_equal(value["b"][0], np.arange(N))
        assert value["c"] == "text"
        ref = raylane.put(torch.ones(N), tensor_transport="nixl")
        assert ray.get(reader.total.remote([ref, source.make.remote(), source.make.remote(2.0)])) == 4 * N
        assert stats(reader)["nixl"] == 3
        other = raylane.put(torch.ones(N))
        assert ray.get(reader.total.remote([other])) == N
        assert stats(reader)["nixl"] == 3, "auto must not choose nixl by itself"


def test_moved_memory_raises_tensor_freed() -> None:
    with sources() as (source,):
        ref = source.keep.remote()
        assert float(ray.get(ref)[1]) == 1
        ray.get(source.resize.remote(8 * N))
        with pytest.raises(TensorFreedError, match="resized"):
            ray.get(ref)


def test_failure_in_a_living_source_is_reported_with_its_reason() -> None:
    with sources() as (source,):
        ray.get(source.make.remote())
        ray.get(source.forbid.remote())
        with pytest.raises(TransportError, match="the card has no memory left") as caught:
            ray.get(source.make.remote())
        assert not isinstance(caught.value, SourceLostError)


def test_timeout_of_a_stopped_source_is_obeyed() -> None:
    with sources() as (source,):
        ref, pid = source.keep.remote(), ray.get(source.pid.remote())
        ray.get(ref)
        stop(pid)
        try:
            start = time.monotonic()
            with pytest.raises(TransferTimeoutError):
                raylane.get(ref, timeout=0.5)
            assert time.monotonic() - start < 5
        finally:
            os.kill(pid, signal.SIGCONT)
        assert float(raylane.get(ref, timeout=30)[1]) == 1


@pytest.mark.claim("transport", "survivors of a failed two-sided transfer go on")
def test_killed_source_is_reported_and_others_go_on() -> None:
    with sources(2) as (source, other):
        ref, pid = source.make.remote(1.0, 100_000_000), ray.get(source.pid.remote())
        ray.wait([ref], fetch_local=False)
        ray.get(source.make.remote())  # the channel is open
        used = raylane.stats()["pool_used_bytes"]
        raised: list[BaseException] = []

        def read() -> None:
            try:
                raylane.get(ref, timeout=60)
            except BaseException as error:
                raised.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        while raylane.stats()["pool_used_bytes"] < used + 100_000_000 and reader.is_alive():
            time.sleep(0.001)  # until the memory for the value was taken: the transfer begins
        os.kill(pid, signal.SIGKILL)
        reader.join(30)
        assert not reader.is_alive()
        assert [type(error) for error in raised] == [SourceLostError]
        assert float(ray.get(other.make.remote(3.0))[5]) == 3


def test_killed_reader_leaves_nothing_in_the_source(eventually: Any) -> None:
    with sources(2) as (source, reader):
        ref = source.make.remote(1.0, 100_000_000)
        pid = ray.get(reader.pid.remote())
        ray.get(reader.total.remote([source.keep.remote()]))
        before = stats(source)
        call = reader.total.remote([ref])
        eventually(lambda: stats(source)["nixl_registrations"] > before["nixl_registrations"])
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayError):
            ray.get(call)
        eventually(lambda: stats(source)["served_channels"] == 0)
        del ref, call
        gc.collect()
        eventually(lambda: stats(source)["entries"] == 0)
        eventually(lambda: stats(source)["nixl_registered"] <= 1)  # that of `kept`
        assert float(ray.get(source.keep.remote())[7]) == 7


def test_parallel_reads_in_both_directions_end() -> None:
    with sources(2) as (a, b):
        refs = [(a.make.remote(i, 3 * N), b.make.remote(-i, 3 * N)) for i in range(6)]
        sums = [b.total.remote([x for x, _ in refs]), a.total.remote([y for _, y in refs])]
        assert ray.get(sums, timeout=120) == [45.0 * N, -45.0 * N]


def test_close_ends_threads_and_descriptors() -> None:
    def resources() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    with sources() as (source,):
        counts = []
        for _ in range(3):
            assert float(ray.get(source.make.remote())[0]) == 1
            assert raylane.stats()["nixl_peers"] == 1
            raylane.transport.link.endpoint.close()
            gc.collect()
            counts.append(resources())
        # The first round loads libraries, which keep descriptors of their own.
        assert counts[2] <= counts[1], counts
