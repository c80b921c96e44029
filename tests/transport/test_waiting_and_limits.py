"""Deadlines, coroutines that wait, limits of descriptors, and what is left in Ray's key-value store. On a real Ray."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import signal
import socket
import threading
import warnings
import weakref
from typing import Any

import pytest
import ray
import torch
from tests.process_tools import stop
from tests.transport.unpickling import FetchedWhileUnpickled

import raylane
from raylane import _ray
from raylane.errors import TransferTimeoutError, TransportError
from raylane.transport.hold.anchors import ActorKeeper
from raylane.transport.link.endpoint import close, endpoint

pytestmark = pytest.mark.usefixtures("cluster")


class Maker:
    def __init__(self) -> None:
        self.gate = threading.Event()

    @raylane.method
    def make(self, numel: int = 50_000) -> torch.Tensor:
        return torch.ones(numel)

    @raylane.method
    def make_when_open(self) -> torch.Tensor:
        self.gate.wait(120)
        return torch.ones(50_000)

    def open(self) -> None:
        self.gate.set()

    def pid(self) -> int:
        return os.getpid()

    def fork_a_child_that_exits(self) -> int:
        """What a forked child runs of raylane when it exits normally; returns its wait status."""
        child = os.fork()
        if not child:
            signal.alarm(20)
            close()
            os._exit(0)
        return os.waitpid(child, 0)[1]

    def snapshots_under_few_descriptors(self, tensors: int, numel: int) -> tuple[str, int, Any]:
        """Publish a snapshot of many tensors with hardly a descriptor left; returns (error, descriptors more, ref)."""
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        before = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, limits[1]))
        error, box = "", []
        try:
            box = [raylane.put([torch.full((numel,), float(i)) for i in range(tensors)], snapshot=True)]
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return error, len(os.listdir("/proc/self/fd")) - before, box

    def snapshot_without_descriptors(self) -> tuple[str, int]:
        kept = raylane.put(torch.ones(50_000), snapshot=True)  # what a first publication opens is open now
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        open_now = len(os.listdir("/proc/self/fd"))
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            raylane.put(torch.ones(50_000), snapshot=True)
        except TransportError as caught:
            said = str(caught)
        else:
            said = "published"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            del kept
        return said, len(os.listdir("/proc/self/fd")) - open_now


class Consumer:
    def __init__(self) -> None:
        self.gate = threading.Event()

    def wait(self) -> None:
        self.gate.wait(120)

    @ray.method(concurrency_group="control")
    def open(self) -> None:
        self.gate.set()

    def total(self, value: torch.Tensor) -> float:
        return float(value.sum())


def actor(cls: type, **options: Any) -> Any:
    made: Any = ray.remote(num_cpus=0, **options)(cls).remote()
    ray.get(made.__ray_ready__.remote())
    return made


@pytest.mark.claim("transport", "`await ref` and `raylane.get_async` wait in an event loop, each for its value alone")
@pytest.mark.slow
def test_get_async_of_slow_values_delays_no_ready_one() -> None:
    maker = actor(Maker, max_concurrency=60)
    slow = [maker.make_when_open.remote() for _ in range(40)]
    ready = maker.make.remote()
    ray.wait([ready])

    async def main() -> None:
        waiting = [asyncio.create_task(raylane.get_async(ref)) for ref in slow]
        await asyncio.sleep(0)
        assert float((await asyncio.wait_for(raylane.get_async(ready), 60)).sum()) == 50_000
        assert not any(task.done() for task in waiting)
        await maker.open.remote()
        assert all(float(value.sum()) == 50_000 for value in await asyncio.gather(*waiting))

    asyncio.run(main())


@pytest.mark.slow
def test_get_async_that_is_cancelled_leaves_no_thread(eventually: Any) -> None:
    maker = actor(Maker, max_concurrency=4)
    never = maker.make_when_open.remote()

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(raylane.get_async(never), 0.05)
        with pytest.raises(TransferTimeoutError):
            await raylane.get_async(never, timeout=0.05)

    asyncio.run(main())
    eventually(lambda: endpoint().getters.busy == 0)
    ray.get(maker.open.remote())


@pytest.mark.parametrize("transport", ["host", pytest.param("tcp", marks=pytest.mark.slow)])
def test_get_keeps_its_deadline_during_a_transfer(transport: str) -> None:
    maker = actor(Maker)
    ref = maker.make.remote(1 << 28)  # 1 GiB
    ray.wait([ref])
    for timeout in (0.001, 0.01):
        with pytest.raises(TransferTimeoutError):
            raylane.get(ref, tensor_transport=transport, timeout=timeout)


def test_get_with_timeout_0_fetches_only_what_is_ready() -> None:
    maker = actor(Maker, max_concurrency=2)
    ready, waiting = maker.make.remote(), maker.make_when_open.remote()
    ray.wait([ready])
    assert float(raylane.get(ready, timeout=0).sum()) == 50_000
    assert float(asyncio.run(raylane.get_async([ready], timeout=0))[0].sum()) == 50_000
    with pytest.raises(TransferTimeoutError, match="produced within 0"):
        raylane.get([ready, waiting], timeout=0)
    with pytest.raises(TransferTimeoutError, match="produced within 0"):
        asyncio.run(raylane.get_async(waiting, timeout=0))
    ray.get(maker.open.remote())


@pytest.mark.slow
def test_function_called_get_objects_changes_no_transport() -> None:
    ref = actor(Maker).make.remote()

    def get_objects() -> Any:
        return raylane.get(ref, tensor_transport="tcp")

    before = endpoint().counts["tcp"]
    assert float(get_objects().sum()) == 50_000
    assert endpoint().counts["tcp"] == before + 1


@pytest.mark.slow
def test_get_within_unpickling_keeps_both_transports() -> None:
    maker = actor(Maker)
    inner, outer = maker.make.remote(), maker.make.remote()
    before = endpoint().counts["tcp"]
    lazy, value = raylane.get([ray.put(FetchedWhileUnpickled(inner, transport="tcp")), outer], tensor_transport="tcp")
    assert float(lazy.value.sum() + value.sum()) == 100_000
    assert endpoint().counts["tcp"] == before + 2


@pytest.mark.slow
def test_forked_child_that_exits_leaves_its_parent_alone() -> None:
    maker = actor(Maker)
    ref = maker.make.remote()
    assert float(raylane.get(ref, tensor_transport="tcp").sum()) == 50_000
    keys = _ray.kv_sample("actor/", 256)
    assert ray.get(maker.fork_a_child_that_exits.remote()) == 0
    assert _ray.kv_sample("actor/", 256) == keys
    assert float(raylane.get(ref, tensor_transport="tcp").sum()) == 50_000


@pytest.mark.slow
def test_strided_nested_tensor_travels() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(3), torch.zeros(2)])

    class Reader:
        def parts(self, value: Any) -> list[torch.Tensor]:
            return [part.clone() for part in value["nested"].unbind()]

    parts = ray.get(actor(Reader).parts.remote(raylane.put({"nested": nested, "more": torch.ones(50_000)})))
    assert [part.tolist() for part in parts] == [[1, 1, 1], [0, 0]]


def test_keeper_holds_one_handle_for_each_actor() -> None:
    class Handle:
        pass

    keeper = ActorKeeper(lambda actor, deadline: True, lambda: False)
    handles = [Handle() for _ in range(100)]
    alive = [weakref.ref(handle) for handle in handles]
    for handle in handles:
        keeper.keep(b"actor", handle)
    del handle
    handles.clear()
    gc.collect()
    assert sum(found() is not None for found in alive) == 1
    assert len(keeper) == 1
    keeper.close()


@pytest.mark.slow
def test_keys_of_ended_actors_do_not_pile_up(eventually: Any) -> None:
    def ended(pid: int) -> bool:
        return not os.path.exists(f"/proc/{pid}")

    before = set(_ray.kv_sample("actor/", 256))
    for how in (ray.kill, lambda maker: None):
        for _ in range(3):
            maker = actor(Maker)
            ray.get(maker.make.remote())
            pid = ray.get(maker.pid.remote())
            how(maker)
            del maker
            eventually(lambda pid=pid: ended(pid), within_s=30)
    last = actor(Maker)
    ray.get(last.make.remote())
    assert len(set(_ray.kv_sample("actor/", 256)) - before) == 1


@pytest.mark.slow
def test_snapshot_of_many_tensors_takes_one_descriptor() -> None:
    maker = actor(Maker)
    error, more, box = ray.get(maker.snapshots_under_few_descriptors.remote(2000, 20))
    assert not error
    open_before = len(os.listdir("/proc/self/fd"))
    values = [raylane.get(box[0], tensor_transport="host") for _ in range(5)]
    assert all(float(value[i][0]) == i for value in values for i in (0, 7, 1999))
    assert len(os.listdir("/proc/self/fd")) <= open_before + 4  # Ray opens a few of its own
    del values
    assert raylane.get(box[0], tensor_transport="tcp")[1999].tolist() == [1999.0] * 20
    assert more <= 8  # the memfd, the listener's and its first links


@pytest.mark.slow
def test_snapshot_without_descriptors_fails_and_leaves_none() -> None:
    said, more = ray.get(actor(Maker).snapshot_without_descriptors.remote())
    assert "could not publish a snapshot" in said
    assert "ulimit -n" in said
    assert more <= 0


@pytest.mark.claim("security", "a full backlog or a flood makes no actor look dead")
@pytest.mark.slow
def test_flooded_actor_is_kept_while_its_value_is_referenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full backlog (anybody on the machine can fill it) does not mean that the actor holds nothing."""
    maker, consumer = actor(Maker), actor(Consumer, concurrency_groups={"control": 1})
    ref = maker.make.remote()
    ray.wait([ref])
    blocked = consumer.wait.remote()
    total = consumer.total.remote(ref)  # queued: from now on only this call needs the value
    pid = ray.get(maker.pid.remote())
    asked, answers = threading.Event(), []
    holds_anything = endpoint()._holds_anything

    def ask(actor: bytes, deadline: Any) -> bool:
        try:
            answers.append(holds_anything(actor, type(deadline)(0.3)))
            return answers[-1]
        finally:
            asked.set()

    monkeypatch.setattr(endpoint().keeper(), "_holds_anything", ask)
    name = _listener_of(pid)
    stop(pid)
    flood = []
    try:
        full = False
        while not full:
            flood.append(socket.socket(socket.AF_UNIX))
            flood[-1].setblocking(False)
            full = flood[-1].connect_ex(name) == errno.EAGAIN
        del maker, ref
        assert asked.wait(60)
        assert answers == []  # it could not be asked, which is no answer
    finally:
        os.kill(pid, signal.SIGCONT)
        for sock in flood:
            sock.close()
    ray.get([consumer.open.remote(), blocked])
    assert ray.get(total) == 50_000


def _listener_of(pid: int) -> str:
    """The abstract socket on which a process listens, as every user can find it in /proc/net/unix."""
    inodes = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    with open("/proc/net/unix") as table:
        for line in table.readlines()[1:]:
            fields = line.split()
            if len(fields) == 8 and fields[7].startswith("@raylane-") and f"socket:[{fields[6]}]" in inodes:
                return "\0" + fields[7][1:]
    raise AssertionError("no listener found")
