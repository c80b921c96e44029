"""What `raylane bench graph` measures, as values: the cases, who takes part in each, and how long it goes on.

Pure: nothing is started here. `graph` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from raylane.bench import measure

__all__ = [
    "BLOCKING",
    "CALLS",
    "CASES",
    "COMPILED",
    "LOOP",
    "RAYLANE",
    "Case",
    "Plan",
    "cases",
    "plan",
    "step_times_us",
]

RAYLANE, COMPILED, CALLS, LOOP = "raylane", "ray:compiled", "ray:calls", "loop"
BLOCKING = "raylane:block"
"""raylane's graph whose processes only ever sleep while they wait (RAYLANE_WAIT=block)."""
_GRAPHS = (RAYLANE, COMPILED, CALLS)


@dataclass(frozen=True)
class Case:
    """One question. Its graph sends a value through `actors` actors in a chain, or to all of them at once (fan)."""

    name: str
    actors: int = 1
    shape: Literal["chain", "fan"] = "chain"
    method: Literal["echo", "touch", "step"] = "echo"
    drive: Literal["calls", "asyncio", "stream", "steps", "idle", "million"] = "calls"
    """calls: one after the other, blocking. asyncio: the same in an event loop. stream, steps: several in flight,
    timed in stretches or each by itself. idle: nothing is called. million: very many calls, with memory."""
    in_flight: int = 1
    gap_s: float = 0.0
    """Pause after each call, not part of its time."""
    busy: int = 0
    """Processes beside it that use all the CPU they get."""
    contenders: tuple[str, ...] = _GRAPHS


@dataclass(frozen=True)
class Plan:
    """How much of a case is run: every contender has `rounds` blocks of `block_s` seconds or `calls` calls."""

    rounds: int
    block_s: float
    calls: int = 0
    """Where a block is counted, not timed (steps, million)."""


_WITH_LOOP = (*_GRAPHS, LOOP)
_AGAINST_BLOCKING = (RAYLANE, BLOCKING, COMPILED, CALLS)
_ALL = [
    Case("echo", contenders=_WITH_LOOP),
    Case("echo-1ms", gap_s=1e-3, contenders=_WITH_LOOP),
    Case("echo-10ms", gap_s=10e-3, contenders=_WITH_LOOP),
    Case("async", drive="asyncio"),
    Case("chain-4", 4),
    Case("scatter-4", 4, "fan"),
    Case("scatter-8", 8, "fan"),
    Case("array-10MB-4", 4, "fan", "touch"),
    Case("idle-8", 8, "fan", drive="idle"),
    Case("step-20ms", 2, "fan", "step", drive="steps", in_flight=2, contenders=_WITH_LOOP),
    Case("throughput-8", drive="stream", in_flight=8, contenders=_WITH_LOOP),
    Case("million", drive="million", contenders=(RAYLANE,)),
    Case("echo-busy1", busy=1, contenders=_AGAINST_BLOCKING),
    Case("echo-busy2", busy=2, contenders=_AGAINST_BLOCKING),
    Case("chain-4-busy1", 4, busy=1, contenders=_AGAINST_BLOCKING),
    Case("chain-4-busy2", 4, busy=2, contenders=_AGAINST_BLOCKING),
]
CASES = {case.name: case for case in _ALL}


def cases(only: str | None) -> list[Case]:
    """The cases to run. ValueError names an unknown one and those that there are."""
    return measure.choose(CASES, only)


def same_graph(wanted: Iterable[Case]) -> list[list[Case]]:
    """The cases that differ only in how the calls are made, together: one set of actors and graphs serves them all."""
    found: dict[tuple[object, ...], list[Case]] = {}
    for case in wanted:
        key = (case.actors, case.shape, case.method, case.in_flight, case.drive == "asyncio")
        found.setdefault(key, []).append(case)
    return list(found.values())


def contenders(together: Iterable[Case]) -> list[str]:
    """Who takes part in any of these cases."""
    return list(dict.fromkeys(name for case in together for name in case.contenders))


def plan(case: Case, *, quick: bool) -> Plan:
    """How much of a case to run; `quick` is to see that it runs, not to quote."""
    if case.drive == "idle":
        return Plan(2, 1.0) if quick else Plan(4, 2.5)
    if case.drive == "steps":
        return Plan(2, 0, 10) if quick else Plan(4, 0, 50)
    if case.drive == "million":
        return Plan(1, 0, 20_000 if quick else 1_000_000)
    if quick:
        return Plan(2, 0.05)
    # Time slices beside busy processes are milliseconds long: more time for as many samples.
    return Plan(8, 0.5 if case.gap_s >= 10e-3 or case.busy else 0.25)


def step_times_us(start_s: float, ends_s: list[list[float]]) -> list[float]:
    """Time of each step of several actors that step at the same time, in microseconds.

    `ends_s` has, for each actor, when its steps ended. A step ends when it has ended on all actors and, like the next
    result that a driver gets, never before the step in front of it.
    """
    times = []
    for ends in zip(*ends_s, strict=True):
        end = max(start_s, *ends)
        times.append((end - start_s) * 1e6)
        start_s = end
    return times
