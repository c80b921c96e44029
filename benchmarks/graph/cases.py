"""Cases of the benchmark `graph` as values: the workload, the contenders, and the number and length of the blocks.

Pure: nothing is started here; `graph` runs the cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from benchmarks import measure
from benchmarks.goals import CPU, FIRST, P50, P99, Ratio, at_most, faster
from benchmarks.graph import values as graph_values

RAYLANE, COMPILED, CALLS, LOOP = "raylane", "ray:compiled", "ray:calls", "loop"
BLOCKING = "raylane:block"
"""raylane's graph with processes that always sleep while they wait (RAYLANE_WAIT=block)."""
BESIDE = "raylane:beside"
"""raylane's graph on an actor that has idle graphs as well (`Case.idle_graphs`)."""
IN_METHOD = "raylane:in-method"
"""raylane's graph with methods that call torch.distributed themselves, by gloo."""
WAKE_UPS = "wake-ups"
"""Processes that wake each other by bare semaphores in C, with nothing to carry: what the kernel takes."""
COPIES = "copies"
"""Bare copies of the array in the driver, there and back where it comes back."""
FLOORS = {WAKE_UPS: "bare wake-ups", COPIES: "bare copies", LOOP: "loop"}
"""Contenders that show what the machine can do, with their texts; the first in a case stands beside its goals."""
_GRAPHS = (RAYLANE, COMPILED, CALLS)


@dataclass(frozen=True)
class Case:
    """One measurement. Its graph sends a value through `actors` actors in a chain, or to all of them at once (fan)."""

    name: str
    actors: int = 1
    shape: Literal["chain", "fan"] = "chain"
    method: Literal["echo", "touch", "step", "allreduce"] = "echo"
    workload: Literal["calls", "asyncio", "stream", "steps", "idle", "million", "compile"] = "calls"
    """Way in which calls are made.

    - calls: one after the other, blocking. asyncio: the same in an event loop.
    - stream: several in flight, timed in groups. steps: several in flight, each timed.
    - idle: no calls. million: very many calls, with memory use.
    - compile: no calls; the graph is torn down and compiled again.
    """
    in_flight: int = 1
    """Number of calls in flight, for stream and steps."""
    gap_s: float = 0.0
    """Pause in seconds after each call, not part of its time."""
    busy: int = 0
    """Number of other processes that use as much CPU as they can get."""
    idle_graphs: int = 0
    """Number of idle graphs on the actor of the contender BESIDE."""
    empty: bool = False
    """True if the value is an array made by `raylane.empty`."""
    value: str = ""
    """Name of the value in `graph_values`; empty for a small dict, or what the method needs."""
    contenders: tuple[str, ...] = _GRAPHS
    """Names of the contenders."""


@dataclass(frozen=True)
class Blocks:
    """Measurement blocks of a case: every contender has `rounds` blocks of `block_s` seconds or `calls` calls."""

    rounds: int
    block_s: float
    calls: int = 0
    """Number of calls in a block that is counted instead of timed (steps, million)."""


_WITH_LOOP = (*_GRAPHS, LOOP)
_AWAKENED = (*_GRAPHS, WAKE_UPS)
_ECHO = (*_WITH_LOOP, WAKE_UPS)
_AGAINST_BLOCKING = (RAYLANE, BLOCKING, COMPILED, CALLS, WAKE_UPS)
_ALL = [
    Case("echo", contenders=_ECHO),
    Case("echo-1ms", gap_s=1e-3, contenders=_ECHO),
    Case("echo-10ms", gap_s=10e-3, contenders=_ECHO),
    Case("async", workload="asyncio"),
    Case("chain-4", 4, contenders=_AWAKENED),
    Case("chain-4-1ms", 4, gap_s=1e-3, contenders=_AWAKENED),
    Case("scatter-4", 4, "fan"),
    Case("scatter-8", 8, "fan", contenders=_AWAKENED),
    # The calls of scatter-8, for contenders that only broadcast.
    Case("broadcast-8", 8, "fan"),
    Case("array-10MB-4", 4, "fan", "touch", contenders=(*_GRAPHS, COPIES)),
    Case("array-10MB-4-empty", 4, "fan", "touch", empty=True),
    Case("idle-8", 8, "fan", workload="idle"),
    Case("step-20ms", 2, "fan", "step", workload="steps", in_flight=2, contenders=_WITH_LOOP),
    Case("throughput-8", workload="stream", in_flight=8, contenders=_WITH_LOOP),
    Case("million", workload="million", contenders=(RAYLANE,)),
    Case("compile-8", 8, "fan", workload="compile", contenders=(RAYLANE, COMPILED)),
    Case("beside-150", idle_graphs=150, contenders=(RAYLANE, BESIDE)),
]
_ALL += [
    Case(f"allreduce-1MB-{actors}", actors, "fan", "allreduce", contenders=(RAYLANE, IN_METHOD, COMPILED))
    for actors in (2, 4)
]
_ALL += [
    Case(f"values-{name}", value=name, contenders=(RAYLANE, COMPILED, *([COPIES] if name.endswith("10MB") else [])))
    for name in graph_values.NAMES
]
# Last: a graph goes on to sleep at once for up to a minute after others have computed beside it.
_ALL += [
    Case("echo-busy1", busy=1, contenders=_AGAINST_BLOCKING),
    Case("echo-busy2", busy=2, contenders=_AGAINST_BLOCKING),
    Case("chain-4-busy1", 4, busy=1, contenders=_AGAINST_BLOCKING),
    Case("chain-4-busy2", 4, busy=2, contenders=_AGAINST_BLOCKING),
]
CASES = {case.name: case for case in _ALL}

# Published targets, also those that are missed: `docs/reference/figures.md` says what limits them.
_THAN_COMPILED = {
    "echo": 6,
    "echo-1ms": 3.5,
    "echo-10ms": 2.5,
    "async": 8,
    "chain-4": 8,
    "scatter-8": 7,
    "throughput-8": 10,
    "array-10MB-4": 2.5,
    "array-10MB-4-empty": 5,
}
_BESIDE_OTHERS = [case.name for case in _ALL if case.busy]
GOALS = [
    *(faster(case, "faster than Ray's graph", COMPILED, RAYLANE, factor) for case, factor in _THAN_COMPILED.items()),
    *(faster(case, "p99, faster than Ray's graph", COMPILED, RAYLANE, 1, P99) for case in _THAN_COMPILED),
    *(faster(case, "CPU time, less than Ray's graph", COMPILED, RAYLANE, 6, CPU) for case in ("echo", "chain-4")),
    *(at_most(case, "of bare wake-ups", RAYLANE, WAKE_UPS, 2) for case in ("echo-1ms", "chain-4-1ms", "scatter-8")),
    faster("scatter-8", "faster than Ray's calls", CALLS, RAYLANE, 25),
    Ratio("echo-10ms", "first call, of the median", (RAYLANE,), RAYLANE, 3, figures=(FIRST, P50)),
    *(
        at_most(case, f"{figure.removesuffix('_us')}, of blocking", RAYLANE, BLOCKING, 1.1, figure)
        for case in _BESIDE_OTHERS
        for figure in (P50, P99)
    ),
    at_most("step-20ms", "of the loop", RAYLANE, LOOP, 1.01),
    at_most("beside-150", "beside 150 idle graphs, of alone", BESIDE, RAYLANE, 1.1),
    Ratio("compile-8", "compile and tear down", (RAYLANE,), "", 30),
    *(
        faster(f"values-{name}", "faster than Ray's graph", COMPILED, RAYLANE, 2 if name.endswith("MB") else 4)
        for name in graph_values.NAMES
    ),
]


def cases(only: str | None) -> list[Case]:
    """Return the cases to run. ValueError names unknown cases and the known ones."""
    return measure.choose(CASES, only)


def group_by_graph(cases: Iterable[Case]) -> list[list[Case]]:
    """Return the cases grouped by graph: one set of actors and graphs serves all cases of a group."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        way_of_calling = case.workload if case.workload in ("asyncio", "compile") else ""
        key = (case.actors, case.shape, case.method, case.in_flight, way_of_calling, case.idle_graphs, case.empty)
        groups.setdefault(key, []).append(case)
    return list(groups.values())


def contender_names(group: Iterable[Case]) -> list[str]:
    """Return the names of the contenders in any of these cases."""
    return list(dict.fromkeys(name for case in group for name in case.contenders))


def blocks_of(case: Case, *, quick: bool) -> Blocks:
    """Return the blocks of a case. `quick` is a test that the case runs; its results are not meaningful."""
    if case.workload == "idle":
        return Blocks(2, 1.0) if quick else Blocks(4, 2.5)
    if case.workload == "steps":
        return Blocks(2, 0, 10) if quick else Blocks(4, 0, 50)
    if case.workload == "million":
        return Blocks(1, 0, 20_000 if quick else 1_000_000)
    if quick:
        return Blocks(2, 0.05)
    if case.workload == "compile":  # a sample takes up to a second
        return Blocks(8, 1.0)
    # Beside busy processes a time slice is milliseconds long, so the same number of samples needs more time.
    return Blocks(8, 0.5 if case.gap_s >= 10e-3 or case.busy else 0.25)


def step_times_us(start_s: float, ends_s: list[list[float]]) -> list[float]:
    """Return the time of each step, in microseconds, of several actors that step at the same time.

    `ends_s` has the end times of each actor's steps. A step ends when all actors have ended it and, like the next
    result for a driver, not before the step that precedes it.
    """
    times = []
    for ends in zip(*ends_s, strict=True):
        end = max(start_s, *ends)
        times.append((end - start_s) * 1e6)
        start_s = end
    return times
