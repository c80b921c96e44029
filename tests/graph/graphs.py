"""Plans for the pure tests of graphs: from a few lists, or at random."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import count

from raylane.graph.inspect.arrivals import CallRecord, DriverRecord
from raylane.graph.plan import schedule
from raylane.graph.plan.ir import DRIVER, INPUT, Build, Edge, Plan, Ref, Step, Task, Value

Source = tuple[int, tuple[Step, ...]]
WHOLE: tuple[Step, ...] = ()


def make_plan(
    task_members: Sequence[int],
    uses: Sequence[Sequence[int | Source]],
    *,
    order: Mapping[int, Sequence[int]] = {},
    exact_order: bool = False,
    outputs: Sequence[int] | None = None,
    names: Sequence[str] = (),
    labels: Sequence[str] = (),
) -> Plan:
    """Return a plan. `uses[t]` are the tasks (or INPUT) whose results task t uses, or (task, steps) for a part.

    `order` is the user's order of some members; with `exact_order` it is that of all members. The outputs are those
    given, else all tasks whose result no task uses.
    """
    numbers: dict[Source, int] = {}

    def value(source: int | Source) -> int:
        key = (source, WHOLE) if isinstance(source, int) else source
        return numbers.setdefault(key, len(numbers))

    reads = [tuple(dict.fromkeys(value(source) for source in used)) for used in uses]
    if outputs is None:
        used_tasks = {source if isinstance(source, int) else source[0] for used in uses for source in used}
        outputs = [task for task in range(len(task_members)) if task not in used_tasks] or [len(task_members) - 1]
    collects = tuple(dict.fromkeys(value(task) for task in outputs))
    values = tuple(Value(index, source, steps) for (source, steps), index in numbers.items())
    members = ("driver", *(names or [chr(ord("A") + m) for m in range(max(task_members, default=0))]))
    tasks = tuple(
        Task(t, member, f"f{t}", tuple(Ref(v) for v in reads[t]), (), reads[t], False)
        for t, member in enumerate(task_members)
    )
    needs = [{s for v in read if (s := values[v].source) != INPUT} for read in reads]
    return Plan(
        members=members,
        tasks=tasks,
        values=values,
        edges=edges_of(values, tasks, collects),
        order=tuple(tuple(order.get(m, ())) for m in range(len(members)))
        if exact_order
        else schedule.order_of(task_members, needs, order),
        output=Build("list", tuple(Ref(v) for v in collects)),
        collects=collects,
        leaves=(),
        multiple=True,
        labels=tuple(labels) or tuple(f"{members[m]}.f{t}" for t, m in enumerate(task_members)),
    )


def edges_of(values: Sequence[Value], tasks: Sequence[Task], collects: Sequence[int]) -> tuple[Edge, ...]:
    index = count()
    edges = []
    for value in values:
        writer = DRIVER if value.source == INPUT else tasks[value.source].member
        readers = {task.member for task in tasks if value.index in task.reads}
        readers |= {DRIVER} if value.index in collects else set()
        if others := tuple(sorted(readers - {writer})):
            edges.append(Edge(next(index), value.index, writer, others))
    return tuple(edges)


def random_plan(
    rng: random.Random, *, tasks: int = 7, members: int = 4, bad_orders: float = 0.5, back_edges: float = 0.0
) -> Plan:
    """Return a plan of 1 to `tasks` tasks on 1 to `members` members: a random DAG.

    Each member gets a random order with the given probability; with a smaller one an earlier task uses a later result.
    """
    number = rng.randint(1, tasks)
    owners = _numbered([rng.randint(1, rng.randint(1, members)) for _ in range(number)])
    uses: list[list[int | Source]] = []
    for task in range(number):
        earlier = [source for source in range(task) if rng.random() < 0.35]
        if rng.random() < back_edges:
            earlier.append(rng.randrange(number))
        parts = [(source, rng.choice([WHOLE, (("item", 0),), (("item", 1),)])) for source in earlier]
        if not parts or rng.random() < 0.3:
            parts.append((INPUT, rng.choice([WHOLE, (("argument", "item", rng.randint(0, 2)),)])))
        uses.append(list(parts))
    order = {}
    for member in set(owners):
        mine = [task for task in range(number) if owners[task] == member]
        if rng.random() < bad_orders:
            rng.shuffle(mine)
        order[member] = mine
    return make_plan(owners, uses, order=order, exact_order=True)


def _numbered(owners: Sequence[int]) -> list[int]:
    """Return the members numbered 1, 2, ... without gaps."""
    numbers = {owner: index for index, owner in enumerate(dict.fromkeys(owners), 1)}
    return [numbers[owner] for owner in owners]


def simulated(
    plan: Plan, rng: random.Random, executions: int, shortest_s: float = 0
) -> tuple[list[CallRecord], list[DriverRecord]]:
    """Records as a run would leave them: several executions overlap, and with `shortest_s=0` clocks stand still."""
    free = [100.0] * len(plan.members)
    calls, driver = [], []
    submitted = 100.0
    for number in range(executions):
        submitted += rng.choice([0, 1e-6, 3e-6])
        sent: dict[int, float] = {INPUT: submitted}
        waiting = [list(tasks) for tasks in plan.order]
        while any(waiting):
            member, task = next(
                (m, tasks[0])
                for m, tasks in enumerate(waiting)
                if tasks and all(plan.values[v].source in sent for v in plan.tasks[tasks[0]].reads)
            )
            waiting[member].pop(0)
            ready = free[member]
            start = max([ready, *(sent[plan.values[v].source] for v in plan.tasks[task].reads)])
            end = start + max(shortest_s, rng.choice([0, 1e-9, 5e-6]))
            sent[task] = free[member] = end + rng.choice([0, 2e-6])
            calls.append((task, number, ready, start, end, free[member]))
        driver.append((number, submitted, max(sent.values()) + 1e-6))
    return calls, driver
