"""Edges whose tensors travel by a transport of direct transport, on actors of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from tests.graph.graph_actors import Worker
from tests.graph.hosts import left, start
from tests.process_tools import stop
from tests.transport.managers import FileManager

import raylane
from raylane import MultiOutputNode, bind
from raylane.core.memory.receive_pool import BufferPool
from raylane.core.process.place import Place
from raylane.errors import GraphActorDiedError, GraphClosedError, GraphError, GraphPlanError, GraphTimeoutError
from raylane.graph.worker.loop import graph_loop
from raylane.transport.backends.nixl.agents import Agents
from raylane.transport.link.endpoint import endpoint
from raylane.transport.produce import staging
from raylane.transport.produce.staging import EdgeStage

pytestmark = pytest.mark.ray
TRANSPORTS = ["gloo", "nixl"]
LARGE = 200_000
"""Number of floats of a tensor that does not travel inside its message."""
TEXT = "larger than a slot of a ring " * 10_000


class Sender(Worker):
    """Worker whose methods return tensors."""

    def reuse(self, x: float) -> Any:
        """Return the same tensor in every call, with other content."""
        if not hasattr(self, "buffer"):
            self.buffer = torch.empty(LARGE)
        self.calls += 1
        return self.buffer.fill_(x)

    def mixed(self, x: float) -> Any:
        weights = torch.full((LARGE,), x)
        return {"weights": weights, "tied": weights[:10], "array": np.full(LARGE, x), "text": TEXT, "small": x}

    def shared_and_reused(self, x: float) -> Any:
        return np.ones(LARGE), self.reuse(x)

    def freed_if_negative(self, x: Any) -> Any:
        if x[0] < 0:
            x = x.clone()
            x.untyped_storage().resize_(10)
        return x

    def registrations(self) -> int:
        return endpoint().part(Agents).offering().offered.made

    def hold(self, x: Any) -> Any:
        """Wait until `release`; `holding` tells that the call has begun."""
        self.holding = True
        self.wait()
        self.holding = False
        return x

    def is_holding(self) -> bool:
        return getattr(self, "holding", False)

    def tied(self, x: dict[str, Any]) -> Any:
        x["weights"][0] = 7.0
        return float(x["tied"][0]), float(x["array"].sum()), x["text"] == TEXT, x["small"], x["array"].flags.writeable

    def stats(self) -> dict[str, Any]:
        return raylane.stats()


def entries(workers: list[Any]) -> list[int]:
    """Return the number of published values in each actor and in this process."""
    return [one["entries"] for one in ray.get([w.stats.remote() for w in workers], timeout=30)] + [
        raylane.stats()["entries"]
    ]


def wait_until_empty(workers: list[Any], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while any(found := entries(workers)):
        assert time.monotonic() < deadline, f"left in the stores: {found}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def senders(ray_session: None) -> Iterator[list[Any]]:
    made = [ray.remote(num_cpus=0)(Sender).remote() for _ in range(3)]
    ray.get([worker.__ray_ready__.remote() for worker in made])
    yield made
    for worker in made:
        ray.kill(worker)
    made.clear()


@pytest.fixture
def three(senders: list[Any]) -> Iterator[list[Any]]:
    """Return three actors, and check after the test that no value is left in any store."""
    yield senders
    wait_until_empty(senders)


@pytest.mark.claim("graphs", "edges carry CUDA tensors by NCCL, CUDA IPC or NIXL on request, else through host memory")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_values_arrive_whole_and_writable(three: list[Any], transport: str) -> None:
    a, b, _ = three
    with raylane.InputNode() as x:
        node = bind(b.tied, bind(a.mixed, x).with_tensor_transport(transport))
    with raylane.compile(node) as g:
        before = ray.get(b.stats.remote()).get(transport, 0)
        for i in range(5):
            assert g.execute(float(i)).get() == (7.0, float(i) * LARGE, True, float(i), True)
        assert ray.get(b.stats.remote())[transport] == before + 5
        assert transport in g.show()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_output_buffer_that_is_used_again_is_right(three: list[Any], transport: str) -> None:
    a, b, _ = three
    ray.get(b.hold_again.remote())
    with raylane.InputNode() as x:
        node = bind(b.total, bind(b.wait, bind(a.reuse, x).with_tensor_transport(transport)))
    with raylane.compile(node, max_inflight=3) as g:
        calls = ray.get(a.count.remote())
        results = [g.execute(float(i)) for i in range(3)]
        # The reader is in its first call. The buffer has the content of the third one when the second is fetched.
        eventually(lambda: ray.get(a.count.remote()) == calls + 3)
        ray.get(b.release.remote())
        assert [result.get() for result in results] == [i * LARGE for i in range(3)]
        more = [g.execute(float(i)) for i in range(20)]
        assert [result.get() for result in more] == [i * LARGE for i in range(20)]
        assert entries(three)[0] == 3  # one for each slot


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_driver_and_several_actors_read_one_value(three: list[Any], transport: str) -> None:
    a, b, c = three
    with raylane.InputNode() as x:
        value = bind(a.mixed, x).with_tensor_transport(transport)
        node = MultiOutputNode([bind(b.tied, value), value, bind(c.tied, value)])
    with raylane.compile(node, max_inflight=2) as g:
        results = [g.execute(float(i)) for i in range(6)]
        for i, result in enumerate(results):
            one, own, two = result.get()
            assert one == two == (7.0, i * LARGE, True, float(i), True)
            assert torch.equal(own["weights"], torch.full((LARGE,), float(i)))
            assert own["tied"].untyped_storage().data_ptr() == own["weights"].untyped_storage().data_ptr()
            own["array"][:] = 1


def test_inputs_of_one_call_come_by_several_transports(three: list[Any]) -> None:
    a, b, c = three
    with raylane.InputNode() as x:
        one = bind(a.reuse, x).with_tensor_transport("gloo")
        two = bind(b.reuse, x).with_tensor_transport("nixl")
        node = bind(c.total, bind(c.add, one, two))
    with raylane.compile(node, max_inflight=4) as g:
        results = [g.execute(float(i)) for i in range(10)]
        assert [result.get() for result in results] == [2 * i * LARGE for i in range(10)]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_driver_publishes_its_inputs(three: list[Any], transport: str) -> None:
    a, b, _ = three
    with raylane.InputNode() as x:
        x.with_tensor_transport(transport)
        node = MultiOutputNode([bind(a.total, x), bind(b.total, x)])
    with raylane.compile(node) as g:
        sent = torch.empty(LARGE)
        results = [g.execute(sent.fill_(i)) for i in range(6)]  # the input may be changed as soon as it is sent
        assert [result.get() for result in results] == [[i * LARGE] * 2 for i in range(6)]
        assert [g.execute(np.ones(count)).get() for count in (1, LARGE, 7, 2 * LARGE)] == [
            [1, 1],
            [LARGE] * 2,
            [7, 7],
            [2 * LARGE] * 2,
        ]
        numbers = g.stats()["edges"]["input -> Sender#1, Sender#2"]
        assert numbers["bytes"] > 6 * 4 * LARGE
    assert raylane.stats()["entries"] == 0


def test_small_values_and_errors_go_as_over_other_edges(three: list[Any]) -> None:
    a, b, _ = three
    before = ray.get(b.stats.remote()).get("gloo", 0)
    with raylane.InputNode() as x:
        node = bind(b.echo, bind(a.fail_unless, x).with_tensor_transport("gloo"))
    with raylane.compile(node) as g:
        assert g.execute(3).get() == 3
        with pytest.raises(ValueError, match="cannot do -1"):
            g.execute(-1).get()
        assert g.execute(4).get() == 4
    assert ray.get(b.stats.remote()).get("gloo", 0) == before


def test_results_are_awaited(three: list[Any]) -> None:
    a, _, _ = three
    with raylane.InputNode() as x:
        node = bind(a.reuse, x).with_tensor_transport("nixl")

    async def run(g: Any) -> list[float]:
        results = [await g.execute_async(float(i)) for i in range(5)]
        return [float((await result).sum()) for result in results]

    with raylane.compile(node, max_inflight=2) as g:
        assert asyncio.run(run(g)) == [i * LARGE for i in range(5)]


def test_a_transport_that_fails_fails_the_execution(three: list[Any]) -> None:
    a, b, _ = three
    with raylane.InputNode() as x:
        node = bind(b.total, bind(a.reuse, x).with_tensor_transport("gloo"))
    with raylane.compile(node) as g:
        assert g.execute(1.0).get() == LARGE
        source = ray.get(a.__ray_call__.remote(_place))
        ray.get(b.__ray_call__.remote(_block, "gloo", source))
        with pytest.raises(GraphError, match=r"Sender#1.reuse could not be brought to Sender#2 over gloo.*by the test"):
            g.execute(1.0).get()
        ray.get(b.__ray_call__.remote(_unblock))
        assert g.execute(2.0).get() == 2 * LARGE
    with raylane.InputNode() as x:
        node = bind(a.reuse, x).with_tensor_transport("nixl")
    with raylane.compile(node) as g:
        _block(None, "nixl", source)
        with pytest.raises(GraphError, match=r"Sender.reuse could not be brought to driver over nixl.*by the test"):
            g.execute(1.0).get()
        _unblock(None)
        assert float(g.execute(2.0).get().sum()) == 2 * LARGE


def test_value_that_cannot_be_published_fails_the_execution(three: list[Any]) -> None:
    a, b, _ = three
    with raylane.InputNode() as x:
        x.with_tensor_transport("gloo")
        node = bind(b.total, bind(a.freed_if_negative, x).with_tensor_transport("gloo"))
    with raylane.compile(node) as g:
        for sign, text in ((-1, "Sender#1.freed_if_negative"), (0, "input")):
            sent = torch.full((LARGE,), float(sign))
            if sign == 0:
                sent.untyped_storage().resize_(10)
            with pytest.raises(GraphError, match=f"edge {text} could not be published.*TensorFreedError"):
                g.execute(sent).get()
            assert g.execute(torch.ones(LARGE)).get() == LARGE


@pytest.mark.claim("graphs", "each value may name its transport; one that a process lacks is refused with the reason")
def test_a_process_without_the_transport_is_named(three: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = three
    with raylane.InputNode() as x:
        node = bind(b.total, bind(a.reuse, x).with_tensor_transport("nixl"))
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with raylane.InputNode() as x:
        output = bind(a.reuse, x).with_tensor_transport("gloo")
    with pytest.raises(
        GraphPlanError, match=r"Sender.reuse has the transport 'gloo', which driver cannot use: RAY_USE"
    ):
        raylane.compile(output)
    monkeypatch.delenv("RAY_USE_TLS")
    ray.get(b.__ray_call__.remote(_set, "RAY_USE_TLS", "1"))
    try:
        with pytest.raises(GraphPlanError, match="which Sender#2 cannot use: RAY_USE_TLS is set"):
            raylane.compile(node)
    finally:
        ray.get(b.__ray_call__.remote(_set, "RAY_USE_TLS", "0"))
    with raylane.compile(node) as g:
        assert g.execute(1.0).get() == LARGE


def test_message_behind_one_without_memory_is_published_once(three: list[Any]) -> None:
    a, b, c = three
    with raylane.InputNode() as x:
        value = bind(a.shared_and_reused, x)
        node = MultiOutputNode([bind(b.keep, value[0]), bind(c.total, value[1].with_tensor_transport("gloo"))])
    with raylane.compile(node, max_lent_bytes=4 << 20) as g:
        results = []
        while not results or results[-1].done():
            results.append(g.execute(float(len(results))))
            with contextlib.suppress(GraphTimeoutError):
                results[-1].get(timeout=1)
        ray.get(a.__ray_call__.remote(_spoil))  # the message was copied when it found no memory
        ray.get(b.drop.remote())
        assert [result.get(timeout=20)[1] for result in results] == [i * LARGE for i in range(len(results))]
        assert entries(three) == [min(2, len(results)), 0, 0, 0]


def test_edges_between_hosts_and_their_names(ray_session: None, tmp_path: Path) -> None:
    made = start(["", "b", "b"])
    with raylane.InputNode() as x:
        sent = bind(made[0].echo, x).with_tensor_transport("gloo")
        node = MultiOutputNode([bind(worker.total, sent) for worker in made[1:]])
    with raylane.compile(node) as g:
        assert [g.execute(torch.full((LARGE,), float(i))).get() for i in range(3)] == [
            [i * LARGE] * 2 for i in range(3)
        ]
        assert "gloo" in g.show()
        assert "tickets: link to 1 host; relayed by Worker#2" in " ".join(g.show().split())
        found = g.stats()["edges"]["Worker#1.echo -> Worker#2, Worker#3"]
        assert (found["count"], found["transport"]) == (3, "gloo")
        assert found["bytes"] > 3 * 4 * LARGE
        g.trace(tmp_path / "run.json")
        assert '"transport": "gloo"' in (tmp_path / "run.json").read_text()
    eventually(lambda: all("raylane-graph-loop" not in left(worker) for worker in made))
    assert raylane.stats()["entries"] == 0
    for worker in made:
        ray.kill(worker)


def test_registered_transport_carries_an_edge(three: list[Any]) -> None:
    a, b, _ = three
    raylane.add_ray_transport("edgefile", FileManager)
    with raylane.InputNode() as x:
        node = bind(b.total, bind(a.reuse, x).with_tensor_transport("edgefile"))
    with raylane.compile(node) as g:
        assert [g.execute(float(i)).get() for i in range(4)] == [i * LARGE for i in range(4)]
        assert ray.get(b.stats.remote())["edgefile"] == 4


def test_memory_of_a_slot_is_registered_once(three: list[Any]) -> None:
    a, b, _ = three
    with raylane.InputNode() as x:
        node = bind(b.total, bind(a.reuse, x).with_tensor_transport("nixl"))
    with raylane.compile(node, max_inflight=2) as g:
        assert [g.execute(1.0).get() for _ in range(3)] == [LARGE] * 3
        before = ray.get(a.registrations.remote())
        assert [g.execute(1.0).get() for _ in range(5)] == [LARGE] * 5
        assert ray.get(a.registrations.remote()) == before


def test_a_dropped_graph_leaves_nothing(three: list[Any]) -> None:
    a, b, _ = three
    with raylane.InputNode() as x:
        x.with_tensor_transport("gloo")
        node = bind(b.total, bind(a.echo, x).with_tensor_transport("nixl"))
    g = raylane.compile(node)
    assert g.execute(torch.ones(LARGE)).get() == LARGE
    assert entries(three) == [1, 0, 0, 1]
    del g, node, x


def test_inline_graphs_accept_the_names() -> None:
    a, b = Worker(), Worker()
    with raylane.InputNode() as x:
        node = bind(b.total, bind(a.echo, x).with_tensor_transport("nixl"))
    with raylane.compile(node, backend="inline") as g:
        assert g.execute(torch.ones(LARGE)).get() == LARGE


def _place(_: Any) -> Place:
    return endpoint().place


def _block(_: Any, transport: str, source: Place) -> None:
    """Make the process believe that a transport does not reach a source."""
    endpoint().blocked[transport, source] = "blocked by the test"


def _spoil(instance: Any) -> None:
    instance.buffer.fill_(-1)


def _unblock(_: Any) -> None:
    endpoint().blocked.clear()


def _set(instance: Any, name: str, value: str) -> None:
    os.environ[name] = value


# Deaths, and transfers that do not end


@pytest.fixture
def pair() -> Iterator[list[Any]]:
    """Start two actors that Ray restarts, and check that nothing is left in the stores of those that live."""
    made = [ray.remote(num_cpus=0, max_restarts=-1)(Sender).remote() for _ in range(2)]
    ray.get([worker.__ray_ready__.remote() for worker in made])
    pids = ray.get([worker.pid.remote() for worker in made])
    yield made
    for pid in pids:  # of a test that failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    wait_until_empty(made)
    for worker in made:
        ray.kill(worker)
    made.clear()


def _stalled(pair: list[Any], transport: str, **options: Any) -> tuple[Any, Any, int]:
    """Return a graph, a result whose tensors do not arrive because their source is stopped, and the source's pid."""
    a, b = pair
    with raylane.InputNode() as x:
        node = bind(b.total, bind(b.hold, bind(a.reuse, x).with_tensor_transport(transport)))
    g = raylane.compile(node, max_inflight=2, **options)
    ray.get(b.release.remote())
    assert g.execute(1.0).get() == LARGE  # the channel between the two is open
    ray.get(b.hold_again.remote())
    first, second = g.execute(1.0), g.execute(2.0)
    pid = ray.get(a.pid.remote())
    # The reader is in a call, and the message of the second execution lies in the ring.
    eventually(lambda: ray.get(a.__ray_call__.remote(_sent)) == 3 and ray.get(b.is_holding.remote()))
    stop(pid)
    ray.get(b.release.remote())
    assert first.get(timeout=10) == LARGE
    return g, second, pid


def _sent(instance: Any) -> int:
    """Return the number of calls whose result this actor has sent. Runs in the actor."""
    (session,) = graph_loop().sessions
    return int(session.executor.execution)  # type: ignore[attr-defined]


def eventually(condition: Any, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.01)


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_source_dies_during_the_transfer(pair: list[Any], transport: str) -> None:
    g, result, pid = _stalled(pair, transport)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(GraphActorDiedError, match="Sender"):
        result.get(timeout=60)
    assert ray.get(pair[1].add.remote(1, 1), timeout=30) == 2
    with g.recompile() as again:
        assert again.execute(3.0).get() == 3 * LARGE


@pytest.mark.processes
def test_source_dies_while_the_driver_fetches(pair: list[Any]) -> None:
    a, _ = pair
    with raylane.InputNode() as x:
        node = bind(a.reuse, x).with_tensor_transport("gloo")
    g = raylane.compile(node)
    assert float(g.execute(1.0).get().sum()) == LARGE
    result = g.execute(2.0)
    pid = ray.get(a.pid.remote())
    eventually(lambda: ray.get(a.__ray_call__.remote(_sent)) == 2)
    stop(pid)
    with pytest.raises(GraphTimeoutError, match="did not end"):
        result.get(timeout=0.5)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(GraphActorDiedError, match="Sender"):
        result.get(timeout=60)
    with g.recompile() as again:
        assert float(again.execute(3.0).get().sum()) == 3 * LARGE


@pytest.mark.processes
def test_reader_dies_during_the_transfer(pair: list[Any]) -> None:
    g, result, pid = _stalled(pair, "gloo")
    os.kill(ray.get(pair[1].pid.remote()), signal.SIGKILL)
    with pytest.raises(GraphActorDiedError, match="Sender"):
        result.get(timeout=60)
    os.kill(pid, signal.SIGCONT)
    with g.recompile() as again:
        ray.get(pair[1].release.remote())
        assert again.execute(3.0).get() == 3 * LARGE


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_teardown_during_the_transfer_leaves_nothing(pair: list[Any], transport: str) -> None:
    a, b = pair
    g, result, pid = _stalled(pair, transport)
    with raylane.InputNode() as x:
        other = raylane.compile(bind(b.echo, x))
    assert other.execute(5).get(timeout=10) == 5  # the reader's loop serves its other graphs
    assert "Sender#2.total" in g.stats()["calls"]  # and orders
    other.teardown()
    g.teardown(timeout=2)
    with pytest.raises(GraphClosedError):
        result.get()
    assert not ray.get(b.__ray_call__.remote(_sessions))
    os.kill(pid, signal.SIGCONT)
    with raylane.InputNode() as x:
        node = bind(b.total, bind(a.reuse, x).with_tensor_transport(transport))
    with raylane.compile(node) as g:
        assert g.execute(2.0).get() == 2 * LARGE


@pytest.mark.processes
def test_transfer_ends_with_the_time_limit(pair: list[Any]) -> None:
    g, result, pid = _stalled(pair, "gloo", timeout=2.0)
    with pytest.raises(GraphTimeoutError):
        result.get()
    with pytest.raises(GraphError, match="could not be brought to Sender#2 over gloo"):
        result.get(timeout=20)
    os.kill(pid, signal.SIGCONT)
    assert g.execute(4.0).get(timeout=20) == 4 * LARGE
    g.teardown()


def test_large_tensors_on_gpus_are_published_with_auto(pair: list[Any]) -> None:
    a, b = pair
    ray.get([one.__ray_call__.remote(_seem_to_have_gpu) for one in pair])
    with raylane.InputNode() as x:
        node = bind(b.tied, bind(a.mixed, x))
    with raylane.compile(node) as g:
        assert "large CUDA tensors" in g.show()
        for i in range(5):
            assert g.execute(float(i)).get() == (7.0, float(i) * LARGE, True, float(i), True)
        assert ray.get(b.stats.remote())["host"] == 5
        ray.get(a.__ray_call__.remote(_refuse_to_publish))  # as a device does that has no memory for the copy
        for i in range(5):
            assert g.execute(float(i)).get() == (7.0, float(i) * LARGE, True, float(i), True)
        assert ray.get(b.stats.remote())["host"] == 5
    wait_until_empty(pair)


def _seem_to_have_gpu(instance: Any) -> None:
    torch.cuda.is_available = lambda: True
    staging._on_gpu = lambda leaf: isinstance(leaf, torch.Tensor)  # type: ignore[attr-defined]
    staging.LARGE_ON_GPU_BYTES = 4 * LARGE


def _refuse_to_publish(instance: Any) -> None:
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    EdgeStage.publish = refuse  # type: ignore[method-assign, assignment]


def _sessions(instance: Any) -> int:
    return len(graph_loop().sessions)


def test_stage_copies_tensors_that_cannot_lie_in_their_blocks() -> None:
    # An array at an odd address and a tensor that overlaps it: one block, which begins with the array.
    memory = np.zeros(1 << 20, np.uint8)
    base = memory[(16 - memory.ctypes.data % 16) % 16 :]
    array, tensor = base[1:500_001], torch.from_numpy(base[8:400_008].view(np.float32))

    class Here:
        pool = BufferPool(1 << 30)

    stage = EdgeStage()
    for value in (1.0, 2.0):
        tensor.fill_(value)
        copies = stage._copied(Here, [array, tensor])  # type: ignore[arg-type]
        assert torch.equal(copies[1], tensor)
        assert np.array_equal(copies[0], array)
    Here.pool.close()
