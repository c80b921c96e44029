"""Transports that are chosen for one value of a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from ray import dag
from tests.graph.graph_actors import Worker
from tests.graph.hosts import connections, start, wait_until_gone

import raylane
from raylane import MultiOutputNode, _ray, bind
from raylane.errors import GraphPlanError
from raylane.graph import allreduce, ray_dag, scatter
from raylane.graph.plan import planner, routing
from raylane.graph.plan.ir import Plan


def _plan(node: Any) -> Plan:
    found, _ = planner.plan(node, identify=id, name=lambda actor: type(actor).__name__)
    return found


def _transports(plan: Plan) -> dict[str, str]:
    return {plan.source_label(edge.value): edge.transport for edge in plan.edges}


def test_items_go_the_way_of_their_value() -> None:
    a, b = Worker(), Worker()
    with raylane.InputNode() as x:
        one = bind(a.pair, x[0]).with_tensor_transport("tcp")
        parts = scatter(bind(a.echo, x[1].with_tensor_transport("SHM")), 2)
        parts[1].with_tensor_transport("tcp")
        node = MultiOutputNode([bind(b.echo, one[1]), *parts])
    found = _transports(_plan(node))
    assert found == {
        "input[0]": "auto",
        "input[1]": "shm",
        "Worker#1.pair[1]": "tcp",
        "Worker#1.echo (part 0 of 2)": "auto",
        "Worker#1.echo (part 1 of 2)": "tcp",
        "Worker#2.echo": "auto",
    }


@pytest.mark.claim("graphs", "each value may name its transport; one that a process lacks is refused with the reason")
def test_unknown_and_impossible_transports_are_refused() -> None:
    with raylane.InputNode() as x:
        node = bind(Worker().pair, x)
        match = "unknown transport 'smh' of a value; the transports are auto, shm, tcp, host, .*gloo.*nixl"
        with pytest.raises(ValueError, match=match):
            node.with_tensor_transport("smh")
        for name in ("local", "object_store"):
            with pytest.raises(GraphPlanError, match=f"'{name}' is not available.*Use 'auto'"):
                node.with_tensor_transport(name)
        with pytest.raises(GraphPlanError, match=r"transport 'nixl' is for values of calls.*torch.distributed"):
            allreduce.bind([node, bind(Worker().echo, x)], transport="nixl")
        both = [node[0].with_tensor_transport("tcp"), node[0].with_tensor_transport("shm")]
    with pytest.raises(GraphPlanError, match="two transports, 'tcp' and 'shm'"):
        _plan(MultiOutputNode(both))


def test_routes_of_transports() -> None:
    with raylane.InputNode() as x:
        workers = [Worker() for _ in range(3)]
        given = [bind(worker.echo, x) for worker in workers]
        node = MultiOutputNode(allreduce.bind(given, transport="tcp"))
    plan = _plan(node)
    found = routing.routes(plan, ["here"] * 4)
    shares = [edge.index for edge in plan.edges if "share" in plan.source_label(edge.value)]
    assert [len(found.edges[edge].relays) for edge in shares] == [2, 2, 2]
    assert not found.edges[0].relays
    with raylane.InputNode() as x:
        alone = bind(workers[1].echo, bind(workers[0].echo, x).with_tensor_transport("shm"))
    assert not routing.routes(_plan(alone), ["here"] * 3).links
    with pytest.raises(GraphPlanError, match=r"echo has the transport 'shm', but Worker#1 and Worker#2 are on diff"):
        routing.routes(_plan(alone), ["here", "here", "there"])
    with raylane.InputNode() as x:
        near = bind(workers[1].echo, bind(workers[0].echo, x).with_tensor_transport("host"))
    with pytest.raises(GraphPlanError, match="echo has the transport 'host', but Worker#1 and Worker#2 are on diff"):
        routing.routes(_plan(near), ["here", "here", "there"])


@pytest.fixture
def three(ray_session: None) -> Iterator[list[Any]]:
    before = connections()
    made = start(["", "", "b"])
    yield made
    wait_until_gone(made, before)
    for worker in made:
        ray.kill(worker)
    made.clear()


@pytest.mark.claim("graphs", "each value may name its transport; one that a process lacks is refused with the reason")
def test_values_over_tcp_within_a_host(three: list[Any]) -> None:
    a, b, c = three
    with raylane.InputNode() as x:
        x.with_tensor_transport("tcp")
        first = bind(a.echo, x)
        second = bind(b.echo, bind(a.echo, first).with_tensor_transport("tcp")).with_tensor_transport("tcp")
        reduced = allreduce.bind([bind(worker.echo, x) for worker in three], transport="tcp")
        node = MultiOutputNode([second, bind(c.total, second), *reduced])
    with raylane.compile(node) as g:
        assert "tcp" in g.show()
        for size in (3, 100_000):
            sent = torch.ones(size)
            echoed, total, *sums = g.execute(sent).get()
            assert torch.equal(echoed, sent)
            assert total == size
            assert all(torch.equal(one, 3 * sent) for one in sums)
        with raylane.InputNode() as x:
            split = bind(c.echo, bind(b.echo, x).with_tensor_transport("shm"))
        with pytest.raises(GraphPlanError, match="on different hosts, which share no memory"):
            raylane.compile(split)


@pytest.mark.parametrize("name", ["auto", "shm", "nccl", "accelerator"])
def test_transports_of_ray_nodes(session_workers: list[Any], name: str) -> None:
    a, b, *_ = session_workers
    with dag.InputNode() as x:
        node = b.echo.bind(a.echo.bind(x).with_tensor_transport(name))
    with dag.InputNode() as x:
        moved = b.echo.bind(a.echo.bind(x).with_tensor_transport(device="cpu"))
    found, _ = planner.plan(ray_dag.convert(node), identify=_ray.actor_id_of, name=_ray.class_name_of)
    assert set(_transports(found).values()) == {"auto"}
    with pytest.raises(GraphPlanError, match=r"device='cpu'.*tensor.to"):
        ray_dag.convert(moved)
