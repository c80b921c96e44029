"""Graphs whose actors are on different (pretended) hosts: the same results, and an error when a connection breaks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from tests.graph import hosts

import raylane
from raylane.errors import GraphPlanError, GraphTimeoutError, GraphValueError
from raylane.graph.channels.ends import open_shared
from raylane.testing.leaks import leaks, snapshot

Compile = Callable[..., Any]


@pytest.fixture(scope="module")
def workers(ray_session: None) -> Iterator[list[Any]]:
    """Six actors: two on host a, the others on a host each. With the driver's that makes six hosts."""
    made = hosts.start(["a", "b", "c", "d", "e", "a"])
    yield made
    for worker in made:
        ray.kill(worker)
    made.clear()


@pytest.fixture(autouse=True)
def clean(workers: list[Any]) -> Iterator[None]:
    before, connected = snapshot(), hosts.connections()
    yield
    hosts.wait_until_gone(workers, connected)
    left = leaks(before, within_s=20)
    assert not left, f"left behind: {left}"


def chain(x: Any, workers: list[Any], method: str = "echo", *rest: Any) -> Any:
    for worker in workers:
        x = raylane.bind(getattr(worker, method), x, *rest)
    return x


def test_a_chain_over_three_hosts_and_the_driver(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: chain(x, workers[:3], "add", 1))
    assert [g.execute(i).get() for i in range(50)] == [i + 3 for i in range(50)]
    made = [g.execute(i) for i in range(2)]
    assert [result.get() for result in made] == [3, 4]
    assert "link to 1 host" in g.show()
    assert "relayed by driver" in g.show()
    stats = g.stats()
    assert stats["edges"]["Worker#1.add -> Worker#2"]["count"] == 52
    assert stats["unanswered"] == []


def test_a_host_of_two_actors_gets_one_copy_and_shares_memory(workers: list[Any], graph: Compile) -> None:
    a, b, beside_a = workers[0], workers[1], workers[5]

    def write(x: Any) -> Any:
        made = raylane.bind(b.ones, x)
        return raylane.MultiOutputNode([raylane.bind(w.total, made) for w in (a, beside_a, b)] + [made])

    g = graph(write)
    *sums, ones = g.execute(200_000).get()
    assert sums == [200_000.0] * 3
    assert ones.sum() == 200_000
    assert [(r.member, r.readers) for r in g._connections.routes.edges[1].relays] == [(0, (0,)), (2, (2, 3))]
    lent = g.stats()["lent_bytes"]
    assert lent["Worker#1"] == 0  # b sent from its own memory
    assert lent["Worker#2"] >= 1_600_000 > lent["Worker#3"]  # the relay received it into memory that both read


@pytest.mark.claim("graphs", "a broadcast to other hosts goes down a tree, four at each level")
@pytest.mark.parametrize("size", [10, 20_000, 1_000_000])
def test_a_broadcast_to_six_hosts_goes_down_a_tree(workers: list[Any], graph: Compile, size: int) -> None:
    g = graph(lambda x: raylane.MultiOutputNode([raylane.bind(w.total, x) for w in workers]), max_inflight=3)
    route = g._connections.routes.edges[0]
    assert [relay.source for relay in route.relays] == [0, 0, 0, 0, 1]
    for scale in range(10):
        assert g.execute(np.full(size, scale)).get() == [float(size * scale)] * 6


@pytest.mark.slow
def test_values_of_every_kind_and_size(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: chain(x, workers[:2]))
    base = torch.arange(300_000, dtype=torch.float32)
    value = {
        "none": None,
        "text": "x" * 200_000,
        "bytes": b"y" * 70_000,
        "arrays": [np.arange(n) for n in (0, 1, 5000, 300_000)],
        "views": (base[:1000], base[500:]),
        "bfloat": torch.ones(3, 5, dtype=torch.bfloat16),
    }
    for _ in range(3):
        got = g.execute(value).get()
        assert (got["none"], got["text"], got["bytes"]) == (None, value["text"], value["bytes"])
        assert all((x == y).all() for x, y in zip(got["arrays"], value["arrays"], strict=True))
        assert torch.equal(got["views"][0], base[:1000])
        assert got["views"][0].untyped_storage().data_ptr() == got["views"][1].untyped_storage().data_ptr()
        assert got["bfloat"].dtype == torch.bfloat16
    for plain in (None, 1, "text", b"z" * 40_000, b"z" * 65_530, b"z" * 131_072, [np.ones(3000)] * 3):
        assert repr(g.execute(plain).get()) == repr(plain)
    mine = np.zeros(100_000)
    result = g.execute(mine)
    mine[:] = 1  # the input is the caller's again
    assert not result.get().any()


def test_arrays_that_are_kept_stay_as_they_were(workers: list[Any], graph: Compile) -> None:
    g = graph(lambda x: raylane.bind(workers[1].keep, x))
    for i in range(5):
        g.execute(np.full(100_000, float(i))).get()
    assert ray.get(workers[1].drop.remote()) == [100_000.0 * i for i in range(5)]


def test_pool_timeout_names_readers_on_another_host(workers: list[Any], graph: Compile) -> None:
    b = workers[1]
    g = graph(lambda x: raylane.bind(b.keep, x), timeout=1.0, max_lent_bytes=1_000_000)
    assert g.execute(np.ones(100_000)).get() == 1
    with pytest.raises(
        GraphTimeoutError, match=r"Worker.* holds \d+ bytes, in arrays that they received and still keep"
    ):
        g.execute(np.ones(100_000)).get(timeout=20)
    assert ray.get(b.drop.remote()) == [100_000.0]
    assert g.execute(np.ones(100_000)).get() == 1  # and goes on
    with pytest.raises(GraphValueError, match="max_lent_bytes is 1000000"):
        g.execute(np.ones(200_000)).get(timeout=20)
    ray.get(b.drop.remote())


def test_errors_cross_hosts_and_the_graph_goes_on(workers: list[Any], graph: Compile) -> None:
    a, b, c = workers[:3]
    g = graph(lambda x: raylane.bind(c.echo, raylane.bind(b.fail, raylane.bind(a.echo, x))))
    for i in range(3):
        with pytest.raises(ValueError, match=f"cannot do {i}") as caught:
            g.execute(i).get()
        assert "in fail" in str(caught.value)
    unfit = graph(lambda x: raylane.bind(b.unpicklable, x))
    with pytest.raises(GraphValueError, match="type lock cannot be pickled"):
        unfit.execute(1).get()


def test_asyncio_is_woken_by_results_of_other_hosts(workers: list[Any], graph: Compile) -> None:
    a, b = workers[:2]
    g = graph(lambda x: raylane.MultiOutputNode([raylane.bind(a.add, x, 1), raylane.bind(b.add, x, 2)]), max_inflight=4)

    async def use() -> list[Any]:
        first = [await g.execute(i) for i in range(20)]
        later = await asyncio.gather(*[_await(await g.execute_async(i)) for i in range(20)])
        return [*first, *later]

    assert asyncio.run(asyncio.wait_for(use(), 30)) == [[i + 1, i + 2] for i in range(20)] * 2


async def _await(result: Any) -> Any:
    return await result


def test_many_threads_and_several_graphs(workers: list[Any], graph: Compile) -> None:
    one = graph(lambda x: chain(x, workers[:2], "add", 1), max_inflight=4)
    two = graph(lambda x: chain(x, [workers[1], workers[0], workers[5]], "add", 10), max_inflight=3)
    wrong: list[Any] = []

    def use(start: int) -> None:
        for i in range(start, start + 50):
            first, second = one.execute(i), two.execute(i)
            if (second.get(timeout=30), first.get(timeout=30)) != (i + 30, i + 2):
                wrong.append(i)

    threads = [threading.Thread(target=use, args=(1000 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.faults
def test_messages_of_all_sizes_keep_the_order(workers: list[Any], graph: Compile) -> None:
    a, b = workers[:2]
    g = graph(lambda x: raylane.bind(b.record, i=x["i"], data=raylane.bind(a.echo, x["data"])), max_inflight=4)
    results = []
    for i in range(300):
        data = np.full((10, 30_000, 200_000)[i % 3], i)
        results.append((i, len(data), g.execute(i=i, data=data)))
    for i, size, result in results:
        got = result.get(timeout=60)
        assert (got["i"], len(got["data"]), got["data"].min(), got["data"].max()) == (i, size, i, i)
    counts = {edge: numbers["count"] for edge, numbers in g.stats()["edges"].items()}
    assert set(counts.values()) == {300}


def cut_of_driver(g: Any, a: Any, b: Any) -> str:
    """Break what the driver sends over."""
    for link in g._connections.network.links.values():
        link.cut()
    return r"the connection from driver .* to Worker#\d .* broke"


def cut_to_driver(g: Any, a: Any, b: Any) -> str:
    """Break what the second actor sends over: its connections to the driver."""
    assert ray.get(b.__ray_call__.remote(hosts.cut_links)) == 2
    return r"the connection from Worker#2 .* to driver .* broke"


def cut_between(g: Any, a: Any, b: Any) -> str:
    """Break the connection from the first actor to the second one, at its sending end."""
    assert ray.get(a.__ray_call__.remote(hosts.cut_links_to, 2)) == 1
    return r"the connection from Worker#1 .* to Worker#2 .* broke"


def cut_arriving(g: Any, a: Any, b: Any) -> str:
    """Break the same connection at its receiving end."""
    assert ray.get(b.__ray_call__.remote(hosts.cut_inbound, 1)) == 1
    return r"the connection from Worker#1 .* to Worker#2 .* broke"


@pytest.mark.claim("graphs", "a graph extends over hosts; a link that is cut for too long ends it and names both ends")
@pytest.mark.faults
@pytest.mark.parametrize("cut", [cut_of_driver, cut_to_driver, cut_between, cut_arriving])
@pytest.mark.parametrize("size", [10, 200_000])
def test_cut_link_ends_the_graph_and_names_both_ends(
    workers: list[Any], graph: Compile, cut: Callable[..., str], size: int
) -> None:
    """A broken connection is noticed at once, also while nobody writes; the graph can be compiled again."""
    a, b = workers[:2]
    ray.get(b.hold_again.remote())
    g = graph(lambda x: raylane.bind(b.wait, raylane.bind(a.echo, x)), max_inflight=4)
    results = [g.execute(np.full(size, 1.0)) for _ in range(3)]
    began = time.monotonic()
    broken = cut(g, a, b)
    for result in results:
        with pytest.raises(GraphTimeoutError, match=broken + r".*recompile\(\) starts the graph again"):
            result.get(timeout=30)
    assert time.monotonic() - began < 10  # of which this machine's load takes most
    ray.get(b.release.remote())
    g.teardown()
    again = g.recompile()
    assert again.execute("more").get(timeout=20) == "more"
    again.teardown()


def test_memory_that_cannot_be_opened_is_told_with_the_remedy() -> None:
    with pytest.raises(GraphPlanError, match=r"shared memory of Worker.*RAYLANE_HOST"):
        open_shared("/proc/1/fd/987654", "Worker")


def test_a_compilation_that_fails_half_way_undoes_the_rest(workers: list[Any]) -> None:
    with raylane.InputNode() as x:
        node = raylane.bind(workers[1].add, raylane.bind(workers[0].echo, x), 1)
    node.method = "no_such_method"
    with pytest.raises(GraphPlanError, match="Worker has no method 'no_such_method'"):
        raylane.compile(node)


def test_clocks_of_one_machine_agree_and_a_trace_can_be_written(
    workers: list[Any], graph: Compile, tmp_path: Any
) -> None:
    g = graph(lambda x: chain(x, workers[:2]))
    assert g.execute(1).get() == 1
    connections = g._connections
    assert [connections.clock_offset_s(member) for member in (1, 2)] == [0.0, 0.0]
    measured = [connections.network.links[member, 0].clock_offset_s for member in (1, 2)]
    assert all(abs(offset) < 0.5 for offset in measured)  # as measured over the link: half a round trip off at most
    g.trace(tmp_path / "run.json")
    assert "Worker" in (tmp_path / "run.json").read_text()
