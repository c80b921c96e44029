"""From nodes to a plan: every rule, without Ray. Actors are plain objects."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest

import raylane
from raylane import MultiOutputNode, bind
from raylane.errors import GraphDeadlockError, GraphPlanError
from raylane.graph import first, gather, mean, scatter
from raylane.graph.plan import planner as planning
from raylane.graph.plan import schedule
from raylane.graph.plan.ir import DRIVER, INPUT, Build, Const, Join, Plan, Ref, Select


class Stage:
    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, *args: Any, **kwargs: Any) -> Any: ...

    def other(self, x: Any) -> Any: ...

    def step(self, x: Any, *, k: int = 1) -> Any: ...

    def tick(self) -> Any: ...

    def __repr__(self) -> str:
        return self.name


class Head(Stage):
    pass


a, b, c, d = Stage("a"), Stage("b"), Stage("c"), Head("d")


def plan(output: Any, order: Any = None) -> Plan:
    found, _ = planning.plan(output, identify=id, name=lambda actor: actor.name, order=order)
    schedule.check(found, 2)
    read = {value for task in found.tasks for value in task.reads} | set(found.collects)
    assert read == set(range(len(found.values)))  # nothing is selected in vain
    return found


def written(write: Callable[[Any], Any], order: Any = None) -> Plan:
    with raylane.InputNode() as x:
        node = write(x)
    return plan(node, order)


def traffic(found: Plan) -> list[str]:
    """Who sends what to whom."""
    return [
        f"{found.source_label(edge.value)}: {found.members[edge.writer]} -> "
        + ", ".join(found.members[reader] for reader in edge.readers)
        for edge in found.edges
    ]


# What travels


@pytest.mark.claim("graphs", "values go from actor to actor without the driver")
def test_a_chain() -> None:
    found = written(lambda x: bind(b.run, bind(a.run, x)))
    assert traffic(found) == ["input: driver -> a", "a.run: a -> b", "b.run: b -> driver"]
    assert found.members == ("driver", "a", "b")
    assert [(task.member, task.method, task.args, task.leaf) for task in found.tasks] == [
        (1, "run", (Ref(0),), False),
        (2, "run", (Ref(1),), False),
    ]
    assert found.output == Ref(found.collects[0])
    assert (found.leaves, found.multiple) == ((), False)


def test_arguments_of_the_input_travel_alone() -> None:
    found = written(lambda x: bind(b.run, bind(a.run, x[0], x.mask), x[1], k=x["k"]))
    assert traffic(found) == [
        "input[0]: driver -> a",
        "input.mask: driver -> a",
        "a.run: a -> b",
        "input[1]: driver -> b",
        "input['k']: driver -> b",
        "b.run: b -> driver",
    ]


def test_the_same_argument_by_both_spellings_is_two_values() -> None:
    found = written(lambda x: bind(a.run, x.k, x["k"], x["k"]))
    assert traffic(found)[:2] == ["input.k: driver -> a", "input['k']: driver -> a"]
    assert found.tasks[0].args == (Ref(0), Ref(1), Ref(1))
    assert found.tasks[0].reads == (0, 1)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: bind(a.run, x[0], x),
        lambda x: bind(a.run, x[0], [{"deep": x}]),
        lambda x: bind(b.run, bind(a.run, x[0]), *scatter(x, 2)),
        lambda x: MultiOutputNode([bind(a.run, x[0]), x]),  # only the output has it whole
        lambda x: MultiOutputNode([bind(a.run, x[0]), [gather([x])]]),
        lambda x: MultiOutputNode([bind(a.run, x[0]), first([x])]),
    ],
)
def test_with_the_whole_input_in_use_its_items_are_items(write: Callable[[Any], Any]) -> None:
    found = written(write)
    assert not [v for v in found.values if v.source == INPUT and v.steps[:1] and v.steps[0][0] == "argument"]
    assert "input[0]: driver -> a" in traffic(found)


def test_items_of_an_argument_are_items_of_that_argument() -> None:
    found = written(lambda x: bind(a.run, x[0]["tokens"], x.batch[1], x["k"][0]["deep"]))
    assert [value.steps for value in found.values if value.source == INPUT] == [
        (("argument", "item", 0), ("item", "tokens")),
        (("argument", "attr", "batch"), ("item", 1)),
        (("argument", "item", "k"), ("item", 0), ("item", "deep")),
    ]


def test_items_of_results_are_cut_where_they_are_made() -> None:
    def write(x: Any) -> Any:
        made = bind(a.run, x)
        return bind(d.run, bind(b.run, made[0]), bind(c.run, made["loss"][1]))

    assert traffic(written(write)) == [
        "input: driver -> a",
        "a.run[0]: a -> b",
        "a.run['loss'][1]: a -> c",
        "b.run: b -> d",
        "c.run: c -> d",
        "d.run: d -> driver",
    ]


def test_one_value_for_several_readers_is_one_edge() -> None:
    def write(x: Any) -> Any:
        made = bind(a.run, x)
        return MultiOutputNode([bind(b.run, made), bind(c.run, made, made), made])

    found = written(write)
    assert traffic(found)[1] == "a.run: a -> driver, b, c"
    assert len(found.edges) == 4
    assert found.tasks[2].reads == found.tasks[1].reads


def test_plan_has_no_edge_for_a_value_used_by_its_own_member() -> None:
    def write(x: Any) -> Any:
        made = bind(a.run, x)
        return bind(a.other, [made[0], bind(a.run, made)])

    found = written(write)
    assert traffic(found) == ["input: driver -> a", "a.other: a -> driver"]
    assert found.labels == ("a.run#1", "a.run#2", "a.other")


def test_plan_edge_leaves_out_the_member_that_computes() -> None:
    def write(x: Any) -> Any:
        made = bind(a.run, x)
        return bind(b.run, made, bind(a.other, made))

    assert traffic(written(write)) == [
        "input: driver -> a",
        "a.run: a -> b",
        "a.other: a -> b",
        "b.run: b -> driver",
    ]


def test_the_input_may_come_back() -> None:
    found = written(lambda x: MultiOutputNode([x, bind(a.run, x)]))
    assert traffic(found) == ["input: driver -> a", "a.run: a -> driver"]
    assert found.output == Build("list", (Ref(0), Ref(1)))
    assert [found.values[value].source for value in found.collects] == [INPUT, 0]


# Arguments


def test_constants_and_containers() -> None:
    constant = [1, {"k": (2,)}]
    found = written(lambda x: bind(a.run, constant, [x, {"in": (x, 5)}], text="t", empty=[], maps={"one": x, 2: None}))
    task = found.tasks[0]
    assert task.args[0] == Const(constant)
    assert task.args[0].value is constant  # type: ignore[union-attr]  # what the user holds, until it is sent
    assert task.args[1] == Build("list", (Ref(0), Build("dict", (Build("tuple", (Ref(0), Const(5))),), ("in",))))
    assert task.kwargs == (
        ("text", Const("t")),
        ("empty", Const([])),
        ("maps", Build("dict", (Ref(0), Const(None)), ("one", 2))),
    )
    assert task.reads == (0,)


def test_constant_may_contain_itself_but_not_with_nodes() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert written(lambda x: bind(a.run, x, endless)).tasks[0].args[1].value is endless
    with raylane.InputNode() as x:
        endless.append(x)
        node = bind(a.run, endless)
    with pytest.raises(GraphPlanError, match="a list that holds nodes and itself"):
        plan(node)


Pair = collections.namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda node: Pair(node, 1),
        lambda node: collections.OrderedDict(k=node),
        lambda node: [collections.defaultdict(list, k=[node])],
        lambda node: type("Mine", (list,), {})([node]),
    ],
)
def test_containers_of_other_kinds_may_not_hold_nodes(wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(GraphPlanError, match="holds nodes: only lists, tuples and dicts may"):
        written(lambda x: bind(a.run, wrap(x)))


# Scatter, gather, first, mean


def test_parts_are_cut_where_the_value_is_made() -> None:
    def write(x: Any) -> Any:
        made = bind(a.run, x)
        return gather([bind(actor.run, part) for actor, part in zip((b, c), scatter(made, 2, axis=1), strict=True)])

    found = written(write)
    assert traffic(found)[1:3] == ["a.run (part 0 of 2): a -> b", "a.run (part 1 of 2): a -> c"]
    assert found.output == Join("gather", (Ref(3), Ref(4)), None)
    assert [v.steps for v in found.values if v.steps] == [(("part", 0, 2, 1),), (("part", 1, 2, 1),)]


def test_a_part_of_the_input_and_of_one_argument() -> None:
    whole = written(lambda x: [bind(s.run, p) for s, p in zip((a, b), scatter(x, 2), strict=True)][1])
    assert traffic(whole)[:2] == ["input (part 0 of 2): driver -> a", "input (part 1 of 2): driver -> b"]
    named = written(lambda x: bind(a.run, scatter(x.batch, 2)[0]))
    assert named.values[0].steps == (("argument", "attr", "batch"), ("part", 0, 2, 0))


def test_a_scatter_of_a_scatter_and_of_an_item() -> None:
    found = written(lambda x: bind(b.run, scatter(scatter(bind(a.run, x)["batch"], 2)[1], 3)[2]))
    assert traffic(found)[1] == "a.run['batch'] (part 1 of 2) (part 2 of 3): a -> b"


def test_plan_selects_from_joined_values_where_they_are_used() -> None:
    def write(x: Any) -> Any:
        both = gather([bind(a.run, x), bind(b.run, x)], axis=0)
        return bind(c.run, scatter(both, 2)[0], both["loss"][1])

    found = written(write)
    assert found.tasks[2].args == (
        Select(Join("gather", (Ref(1), Ref(2)), 0), (("part", 0, 2, 0),)),
        Select(Join("gather", (Ref(1), Ref(2)), 0), (("item", "loss"), ("item", 1))),
    )
    assert traffic(found)[1:3] == ["a.run: a -> c", "b.run: b -> c"]


@pytest.mark.claim("graphs", "`first` transfers one value, and of the others only whether they failed")
def test_first_transfers_nothing_of_the_others() -> None:
    def write(x: Any) -> Any:
        made = [bind(actor.run, x) for actor in (a, b, c)]
        return bind(d.run, first([made[0]["loss"], made[1], gather([made[1], made[2]["x"]], axis=0)]))

    found = written(write)
    assert traffic(found) == [
        "input: driver -> a, b, c",
        "a.run['loss']: a -> d",
        "b.run (done): b -> d",
        "c.run (done): c -> d",
        "d.run: d -> driver",
    ]
    assert found.leaves == ()


def test_value_used_elsewhere_is_sent_beside_its_signal() -> None:
    def write(x: Any) -> Any:
        made = [bind(actor.run, x) for actor in (a, b)]
        return MultiOutputNode([first(made), mean(made)])

    assert traffic(written(write))[1:] == ["a.run: a -> driver", "b.run (done): b -> driver", "b.run: b -> driver"]


# Which calls belong to a graph


def test_calls_that_no_output_needs_are_leaves() -> None:
    def write(x: Any) -> Any:
        bind(b.run, bind(c.run, x))
        bind(d.tick)  # in the block, though it uses no node
        return bind(a.run, x)

    found = written(write)
    assert [task.leaf for task in found.tasks] == [True, True, True, False]
    assert [found.labels[task] for _, task in found.leaves] == ["b.run", "d.tick"]
    assert [found.source_label(value) for value, _ in found.leaves] == ["b.run (done)", "d.tick (done)"]
    assert traffic(found) == [
        "input: driver -> c, a",
        "c.run: c -> b",
        "input (done): driver -> d",
        "a.run: a -> driver",
        "b.run (done): b -> driver",
        "d.tick (done): d -> driver",
    ]


def test_a_call_without_inputs_waits_for_the_execution() -> None:
    found = plan(bind(a.tick))
    assert traffic(found) == ["input (done): driver -> a", "a.tick: a -> driver"]
    with raylane.InputNode() as x:
        outside = bind(a.run, x)
    assert len(plan(bind(b.tick)).tasks) == 1  # the block has ended
    bind(c.run, outside)  # bound to that input, though later
    assert len(plan(outside).tasks) == 2


def test_a_call_outside_the_block_belongs_to_the_input_it_uses() -> None:
    with raylane.InputNode() as x:
        first_call = bind(a.run, x[0])
    with raylane.InputNode() as y:
        bind(b.run, first_call)
        last = bind(c.run, y)
    assert [task.method for task in plan(last).tasks] == ["run"]
    assert len(plan(first_call).tasks) == 2


def test_blocks_within_blocks() -> None:
    with raylane.InputNode() as x:
        outer = bind(a.run, x)
        with raylane.InputNode() as y:
            inner = bind(b.run, y)
            bind(c.tick)
        bind(d.tick)
    assert plan(outer).members == ("driver", "a", "d")
    assert plan(inner).members == ("driver", "b", "c")


def test_two_inputs_are_refused() -> None:
    x, y = raylane.InputNode(), raylane.InputNode()
    with pytest.raises(GraphPlanError, match=r"2 InputNodes; use one, and x\[0\], x\[1\], x.name for several inputs"):
        plan(bind(a.run, x, y))
    with pytest.raises(GraphPlanError, match="2 InputNodes"):
        plan(MultiOutputNode([bind(a.run, x), bind(b.run, y)]))


@pytest.mark.parametrize("wrong", [None, 5, "text", [], a.run, (), object])
def test_plan_refuses_an_output_that_is_no_node(wrong: Any) -> None:
    with pytest.raises(GraphPlanError, match=r"the argument must be a node, such as the result of raylane.bind"):
        plan(wrong)


def test_a_graph_calls_somebody() -> None:
    for node in (raylane.InputNode(), raylane.InputNode()[0], MultiOutputNode([raylane.InputNode()])):
        with pytest.raises(GraphPlanError, match="the graph calls no actor"):
            plan(node)


def test_outputs() -> None:
    def write(x: Any) -> Any:
        made = bind(a.run, x)
        return MultiOutputNode([made, made, {"k": [made[0]]}, 7, (x,)])

    found = written(write)
    assert found.multiple
    assert isinstance(found.output, Build)
    assert found.output.items[:2] == (Ref(1), Ref(1))
    assert found.output.items[3] == Const(7)
    assert [found.source_label(value) for value in found.collects] == ["a.run", "a.run[0]", "input"]
    with pytest.raises(ValueError, match="needs at least one output"):
        MultiOutputNode([])


def test_outputs_are_outermost() -> None:
    with raylane.InputNode() as x:
        inner = MultiOutputNode([bind(a.run, x)])
        outer = [bind(b.run, inner), MultiOutputNode([inner]), MultiOutputNode([[inner]]), inner[0]]
    for node in outer:
        with pytest.raises(GraphPlanError, match="can only be the outermost node; pass a list of nodes instead"):
            plan(node)


def test_arguments_of_execute_are_counted_from_0() -> None:
    with pytest.raises(GraphPlanError, match=r"input\[-1\]: the arguments of execute are counted from 0"):
        written(lambda x: bind(a.run, x[-1]))
    assert traffic(written(lambda x: bind(a.run, x, x[-1])))[1] == "input[-1]: driver -> a"  # an item


# Cycles


def test_nodes_that_are_made_from_one_another_are_refused() -> None:
    with raylane.InputNode() as x:
        one = bind(a.step, x)
        two = bind(b.step, one)
    one.args = (two,)
    with pytest.raises(GraphPlanError, match=r"from each other: .*Stage.step\(...\) -> Stage.step\(...\)"):
        plan(two)
    alone = bind(a.step, raylane.InputNode())
    alone.args = (alone,)
    with pytest.raises(GraphPlanError, match="from each other"):
        plan(alone)


def test_nodes_without_calls_can_go_in_circles_too() -> None:
    call = bind(a.step, raylane.InputNode())
    item, part, join = call[0], scatter(call, 2)[0], gather([call])
    item.base, part.base = part, item  # type: ignore[attr-defined]
    join.nodes = [[join]]  # type: ignore[attr-defined]
    for node in (item, part, join, MultiOutputNode([call, join])):
        with pytest.raises(GraphPlanError, match="made from each other: "):
            plan(node)


def test_a_long_chain_is_no_cycle() -> None:
    node: Any = raylane.InputNode()
    for _ in range(3000):
        node = bind(a.step, node)
    assert len(plan(node).tasks) == 3000


# Order


def test_calls_run_in_the_order_in_which_they_were_bound() -> None:
    def write(x: Any) -> Any:
        made = [bind(a.run, x), bind(a.other, x), bind(a.step, x)]
        return MultiOutputNode(made[::-1])

    assert written(write).order == ((), (0, 1, 2))


def three() -> tuple[Any, list[Any]]:
    with raylane.InputNode() as x:
        bound = [bind(a.step, x), bind(a.other, x), bind(b.step, x)]
        late = bind(a.tick)
    return MultiOutputNode([*bound, late]), [*bound, late]


def test_the_user_may_give_another_order() -> None:
    node, bound = three()
    assert plan(node, {a: [bound[3], bound[1], bound[0]]}).order == ((), (3, 1, 0), (2,))
    assert plan(node, {b: [bound[2]]}).order == ((), (0, 1, 3), (2,))
    assert plan(node, {}).order == plan(node).order


def test_an_order_takes_what_bind_returns() -> None:
    class Two(Stage):
        def two(self, x: Any) -> Any: ...

        two.__ray_num_returns__ = 2  # type: ignore[attr-defined]  # as ray.method(num_returns=2) writes it

    actor = Two("two")
    with raylane.InputNode() as x:
        one, other = bind(actor.two, x)
        again = bind(actor.step, x)
    node = MultiOutputNode([one, other, again])
    assert plan(node, {actor: [again, other]}).order == ((), (1, 0))


@pytest.mark.parametrize(
    ("choose", "says"),
    [
        (lambda bound: {a: bound[:2]}, r"order for a must list each of its 3 calls once; it lists \["),
        (lambda bound: {a: [bound[0], bound[0], bound[1]]}, "each of its 3 calls once"),
        (lambda bound: {a: [*bound]}, "each of its 3 calls once"),
        (lambda bound: {b: [bound[0]]}, "order for b must list each of its 1 calls once"),
        (lambda bound: {c: []}, "order names c, which has no call in this graph"),
        (lambda bound: {b: [bind(b.step, 1)]}, r"order lists Stage.step\(...\), which is no call of this graph"),
        (lambda bound: {b: ["step"]}, "order lists 'step', which is no call of this graph"),
    ],
)
def test_an_order_names_each_call_once(choose: Callable[[Any], Any], says: str) -> None:
    node, bound = three()
    with pytest.raises(GraphPlanError, match=says):
        plan(node, choose(bound))


def test_an_order_that_waits_for_itself_is_refused() -> None:
    with raylane.InputNode() as x:
        one = bind(a.step, x)
        two = bind(a.other, bind(b.step, one))
    with pytest.raises(GraphDeadlockError, match=r"a\.other"):
        plan(two, {a: [two, one]})


# Names


def test_names_tell_actors_and_calls_apart() -> None:
    same, again = Stage("a"), Stage("a")
    found = written(lambda x: bind(same.run, bind(again.run, bind(d.run, bind(same.run, x)))))
    assert found.members == ("driver", "a#1", "d", "a#2")
    assert found.labels == ("a#1.run#1", "d.run", "a#2.run", "a#1.run#2")


# The plan as a whole


def test_a_plan_does_not_change_the_nodes() -> None:
    with raylane.InputNode() as x:
        node = bind(b.run, [bind(a.run, x)[0]], k={"x": x})
    assert plan(node) == plan(node)


def test_the_driver_and_no_one_else_is_member_0() -> None:
    found = plan(bind(a.tick))
    assert (found.members[DRIVER], found.order[DRIVER]) == ("driver", ())
    assert [edge.writer for edge in found.edges_from(DRIVER)] == [DRIVER]
    assert [edge.value for edge in found.edges_to(DRIVER)] == list(found.collects)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"max_inflight": 0}, ValueError, "max_inflight must be an int of 1 or more, got 0"),
        ({"max_inflight": 1.5}, TypeError, "max_inflight must be an int of 1 or more, got 1.5"),
        ({"max_inflight": "2"}, TypeError, "max_inflight must be an int of 1 or more, got '2'"),
        ({"max_lent_bytes": -1}, ValueError, "max_lent_bytes must be an int of 1 or more .bytes., got -1"),
        ({"timeout": "x"}, TypeError, "timeout must be a number of seconds, or None, got 'x'"),
        ({"timeout": float("nan")}, ValueError, "timeout must be a number of seconds, or None, got nan"),
        ({"backend": "mpi"}, ValueError, "backend must be 'ray' or 'inline', got 'mpi'"),
    ],
)
def test_options_that_are_none_are_told(options: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        raylane.compile(raylane.InputNode(), **options)
