"""Who takes part in `raylane bench graph`: the same calls made by raylane's graph, by Ray's, as plain calls and by a
loop inside the worker. Each has actors of its own. Called by `graph`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import dag

import raylane
from raylane.bench import graph_workloads
from raylane.bench.graph_actors import Peer, Stepper
from raylane.bench.graph_cases import (
    BLOCKING,
    CALLS,
    COMPILED,
    LOOP,
    RAYLANE,
    Case,
    Plan,
    contenders,
    step_times_us,
)
from raylane.bench.measure import Tally

__all__ = ["Contender", "start"]

TIMEOUT_S = 60.0
STEP_S = 20e-3
WAIT_VARIABLE = "RAYLANE_WAIT"
ARRAY_FLOATS = 2_500_000
"""10 MB of float32; whole numbers up to here are exact in it."""


class Contender:
    """Some actors and a way to call them. `open` first, `close` at the end; between the two `block` as often as wanted,
    for any case that has the same graph.

    Subclasses give the way: `submit` starts a call and `finish` waits for its answer.
    """

    def __init__(self, name: str, case: Case, actors: Sequence[Any], runner: asyncio.Runner) -> None:
        self.name = name
        self.case = case
        self.actors = actors
        self.pids: list[int] = ray.get([actor.pid.remote() for actor in actors], timeout=TIMEOUT_S)
        self.value, self.answer = _value_and_answer(case)
        self.graph: Any = None
        """What `open` has compiled, if it has."""
        self.runner = runner
        """Runs the event loop of an asyncio case, one for all: Ray's graph works only in that it was compiled in."""

    def open(self) -> None:
        """Make ready for the first call; in the running event loop where the case is an asyncio one."""

    def submit(self) -> Any:
        raise NotImplementedError

    def finish(self, token: Any) -> Any:
        raise NotImplementedError

    def call(self) -> Any:
        return self.finish(self.submit())

    async def call_async(self) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what `open` made; the actors end too."""
        for actor in self.actors:
            ray.kill(actor)

    def block(self, case: Case, plan: Plan) -> Tally:
        """One block of calls, timed."""
        if case.drive == "asyncio":
            return self.runner.run(graph_workloads.in_event_loop(self.call_async, plan.block_s))
        if case.drive == "stream":
            return graph_workloads.stream(self.submit, self.finish, case.in_flight, plan.block_s)
        if case.drive == "steps":
            return graph_workloads.steps(self.submit, self.finish, case.in_flight, plan.calls)
        if case.drive == "idle":
            return graph_workloads.idle(plan.block_s)
        if case.drive == "million":
            return graph_workloads.million(self.call, plan.calls, self._memory)
        return graph_workloads.back_to_back(self.call, plan.block_s, case.gap_s)

    def _memory(self) -> dict[str, int]:
        """Bytes of the driver and of all actors that are in physical memory now."""
        return {"driver_rss_bytes": _rss("self"), "actor_rss_bytes": sum(_rss(str(pid)) for pid in self.pids)}


class Graph(Contender):
    """What both compiled graphs offer alike; `open` makes `graph`."""

    def submit(self) -> Any:
        return self.graph.execute(self.value)

    async def call_async(self) -> Any:
        return await (await self.graph.execute_async(self.value))

    def close(self) -> None:
        if self.graph is not None:
            self.graph.teardown()
        super().close()


class Raylane(Graph):
    wait = "adaptive"

    def open(self) -> None:
        with raylane.InputNode() as x:
            if self.case.shape == "fan":
                node: Any = raylane.MultiOutputNode(
                    [raylane.bind(getattr(actor, self.case.method), x) for actor in self.actors]
                )
            else:
                node = x
                for actor in self.actors:
                    node = raylane.bind(getattr(actor, self.case.method), node)
        before = os.environ.get(WAIT_VARIABLE)
        os.environ[WAIT_VARIABLE] = self.wait
        try:
            self.graph = raylane.compile(node, max_inflight=max(2, self.case.in_flight), timeout_s=TIMEOUT_S)
        finally:
            if before is None:
                del os.environ[WAIT_VARIABLE]
            else:
                os.environ[WAIT_VARIABLE] = before

    def finish(self, token: Any) -> Any:
        return token.get()


class RaylaneBlocking(Raylane):
    wait = "block"


class RayCompiled(Graph):
    """Ray's own compiled graph with its own defaults."""

    def open(self) -> None:
        with dag.InputNode() as x:
            if self.case.shape == "fan":
                node: Any = dag.MultiOutputNode([getattr(actor, self.case.method).bind(x) for actor in self.actors])
            else:
                node = x
                for actor in self.actors:
                    node = getattr(actor, self.case.method).bind(node)
        self.graph = node.experimental_compile(enable_asyncio=self.case.drive == "asyncio")

    def finish(self, token: Any) -> Any:
        return ray.get(token, timeout=TIMEOUT_S)


class RayCalls(Contender):
    """Plain calls; what one actor returns goes to the next as a ref, and a large value to all as one ref."""

    def open(self) -> None:
        self.methods = [getattr(actor, self.case.method) for actor in self.actors]

    def submit(self) -> Any:
        value = ray.put(self.value) if isinstance(self.value, np.ndarray) else self.value
        if self.case.shape == "fan":
            return [method.remote(value) for method in self.methods]
        for method in self.methods:
            value = method.remote(value)
        return value

    def finish(self, token: Any) -> Any:
        return ray.get(token, timeout=TIMEOUT_S)

    async def call_async(self) -> Any:
        return await self.submit()


class Loop(Contender):
    """The method in a loop inside the actors, which one plain call starts: what the calls cost by themselves."""

    def open(self) -> None:
        self.methods = [getattr(actor, self.case.method) for actor in self.actors]

    def submit(self) -> Any:
        return [method.remote(self.value) for method in self.methods]

    def finish(self, token: Any) -> Any:
        answers = ray.get(token, timeout=TIMEOUT_S)
        return answers if self.case.shape == "fan" else answers[0]

    def block(self, case: Case, plan: Plan) -> Tally:
        if case.drive == "steps":
            start = time.perf_counter()
            ends = ray.get([actor.steps.remote(plan.calls) for actor in self.actors], timeout=TIMEOUT_S)
            return Tally(step_times_us(start, ends), plan.calls)
        (actor,) = self.actors
        arguments = (case.method, self.value, plan.block_s, case.gap_s)
        samples = ray.get(actor.loop.remote(*arguments), timeout=TIMEOUT_S)
        return Tally(samples, len(samples))


KINDS: dict[str, Callable[..., Contender]] = {
    RAYLANE: Raylane,
    BLOCKING: RaylaneBlocking,
    COMPILED: RayCompiled,
    CALLS: RayCalls,
    LOOP: Loop,
}


def start(together: Sequence[Case], runner: asyncio.Runner) -> list[Contender]:
    """All contenders of some cases with the same graph, their actors running, none opened."""
    case = together[0]
    kind = Stepper if case.method == "step" else Peer
    # So little CPU each that the actors of all contenders fit at once: only one set works at a time.
    remote = ray.remote(num_cpus=0.01)(kind)
    actors = {
        name: [remote.options(**_options(name)).remote() for _ in range(case.actors)] for name in contenders(together)
    }
    if case.method == "step":
        _same_steps([actor for several in actors.values() for actor in several], case.actors)
    return [KINDS[name](name, case, several, runner) for name, several in actors.items()]


def _options(name: str) -> dict[str, Any]:
    return {"runtime_env": {"env_vars": {WAIT_VARIABLE: "block"}}} if name == BLOCKING else {}


def _same_steps(actors: Sequence[Any], together: int) -> None:
    """Have all actors do the same work in a step: what takes STEP_S where as many work at once as will."""
    counts = ray.get([actor.calibrate.remote(STEP_S) for actor in actors[:together]], timeout=TIMEOUT_S)
    ray.get([actor.repeat.remote(round(sum(counts) / together)) for actor in actors], timeout=TIMEOUT_S)


def _value_and_answer(case: Case) -> tuple[Any, Any]:
    """What is sent, and what must come back."""
    if case.method == "touch":
        array = np.arange(ARRAY_FLOATS, dtype=np.float32)
        return array, [float(ARRAY_FLOATS - 1)] * case.actors
    value = {"step": 1}
    return value, [value] * case.actors if case.shape == "fan" else value


def _rss(pid: str) -> int:
    """proc_pid_statm(5), second field: resident pages."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
