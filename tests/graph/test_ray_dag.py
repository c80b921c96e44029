"""Ray's own graph nodes as ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import dag

import raylane
from graph.graph_actors import Worker
from raylane import _ray
from raylane.errors import GraphPlanError
from raylane.graph import ray_dag
from raylane.graph.plan import planner as planning
from raylane.graph.plan.ir import Plan


@pytest.fixture(scope="module")
def actors(ray_session: None) -> Iterator[list[Any]]:
    """Two handles; nothing is called, so nobody waits until they have started."""
    made = [ray.remote(num_cpus=0.1)(Worker).options(name=name).remote() for name in ("one", "two")]
    yield made
    for actor in made:
        ray.kill(actor)


def plan(node: Any) -> Plan:
    found, _ = planning.plan(ray_dag.convert(node), identify=_ray.actor_id_of, name=_ray.class_name_of)
    return found


def traffic(found: Plan) -> list[str]:
    return [f"{found.source_label(edge.value)}: {edge.writer} -> {edge.readers}" for edge in found.edges]


def test_the_plan_is_that_of_our_own_nodes(actors: list[Any]) -> None:
    a, b = actors
    with dag.InputNode() as x:
        middle = a.add.bind(x[0], x.k, times=x["times"])
        echo = a.echo.bind(middle)
        one, two = b.two.bind([middle, {"k": middle}])
        theirs = dag.MultiOutputNode([echo, one, a.add.bind(two, 5)])
    with raylane.InputNode() as y:
        ours_middle = raylane.bind(a.add, y[0], y.k, times=y["times"])
        ours_echo = raylane.bind(a.echo, ours_middle)
        ours_one, ours_two = raylane.bind(b.two, [ours_middle, {"k": ours_middle}])
        ours = raylane.MultiOutputNode([ours_echo, ours_one, raylane.bind(a.add, ours_two, 5)])
    assert plan(theirs) == plan(ours)
    assert plan(theirs) == plan(theirs)


def test_a_value_used_twice_is_made_once(actors: list[Any]) -> None:
    a, b = actors
    with dag.InputNode() as x:
        made = a.echo.bind(x)
        node = dag.MultiOutputNode([b.echo.bind(made), b.add.bind(made, made), made])
    assert traffic(plan(node))[:2] == ["input: 0 -> (1,)", "Worker#1.echo: 1 -> (0, 2)"]


def test_convert_keeps_the_order_of_binding_per_actor(actors: list[Any]) -> None:
    a, b = actors
    with dag.InputNode() as x:
        made = [a.keep.bind(x), a.tick.bind(), a.echo.bind(x)]
        late = b.echo.bind(made[1])
        last = a.add.bind(late)
    for outputs in ([*made, last], [last, *made[::-1]], [made[2], last, made[0], made[1]]):
        found = plan(dag.MultiOutputNode(outputs))
        member = found.tasks[found.order[1][0]].member
        assert [found.tasks[task].method for task in found.order[member]] == ["keep", "tick", "echo", "add"]


def test_our_nodes_stay_as_they_are(actors: list[Any]) -> None:
    node = raylane.bind(actors[0].tick)
    number = node.number
    assert ray_dag.convert(node) is node
    assert node.number == number
    assert ray_dag.convert("text") == "text"


def test_convert_refuses_nodes_without_counterpart(actors: list[Any]) -> None:
    @ray.remote
    def task(x: Any) -> Any: ...

    with dag.InputNode() as x:
        unbound = ray.remote(Worker).bind()
        wrong = {
            "FunctionNode": [
                task.bind(x),
                actors[0].echo.bind(task.bind(x)),
                actors[0].echo.bind([{"k": task.bind(1)}]),
            ],
            "ClassNode": [actors[0].echo.bind(unbound)],
            "ClassMethodNode": [unbound.echo.bind(x)],
        }
    for name, made in wrong.items():
        for node in made:
            with pytest.raises(GraphPlanError, match=f"cannot convert {name} of ray.dag"):
                ray_dag.convert(node)


def test_the_two_kinds_do_not_mix(actors: list[Any]) -> None:
    a, b = actors
    with dag.InputNode() as x:
        theirs = a.echo.bind(x)
    with pytest.raises(TypeError, match=r"bind: ClassMethodNode is a node of ray\.dag. Write the whole graph with"):
        raylane.bind(b.echo, theirs)
    with pytest.raises(TypeError, match="bind: InputNode is a node of ray"):
        raylane.bind(b.add, 1, b=x)
