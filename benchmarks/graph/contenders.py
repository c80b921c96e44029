"""Contenders of the benchmark `graph`: raylane's graph, Ray's graph, plain calls, a loop in the worker.

All make the same calls, each with actors of its own. Called by `graph`; the study `vllm_queue` adds one.
"""

from __future__ import annotations

import asyncio
import copy
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import dag

import raylane
from benchmarks.graph import collectives as graph_collectives
from benchmarks.graph import values as graph_values
from benchmarks.graph import wake_ups
from benchmarks.graph import workloads as graph_workloads
from benchmarks.graph.actors import Peer, Stepper, Waker
from benchmarks.graph.cases import (
    BESIDE,
    BLOCKING,
    CALLS,
    COMPILED,
    COPIES,
    IN_METHOD,
    LOOP,
    RAYLANE,
    WAKE_UPS,
    Blocks,
    Case,
    contender_names,
    step_times_us,
)
from benchmarks.measure import Tally
from raylane.core.memory.segment import Segment
from raylane.core.native import PAGE_BYTES
from raylane.core.signals import semaphore
from raylane.core.signals.semaphore import SEMAPHORE_BYTES

TIMEOUT_S = 60.0
STEP_S = 20e-3
"""Target duration of one training step, in seconds."""
WAIT_VARIABLE = "RAYLANE_WAIT"
ARRAY_FLOATS = 2_500_000
"""Elements of the large array: 10 MB of float32, which holds all whole numbers up to this size exactly."""


class Contender:
    """Actors and a way to call them: `open` first, then `block` any number of times, then `close`.

    `block` serves any case with the same graph. Subclasses define the way: `submit` starts a call and `finish` waits
    for its answer.
    """

    actor: type[Peer] | None = None
    """Class of the actors, where the case does not decide."""

    def __init__(self, name: str, case: Case, actors: Sequence[Any], runner: asyncio.Runner) -> None:
        self.name = name
        self.case = case
        self.actors = actors
        self.pids: list[int] = ray.get([actor.pid.remote() for actor in actors], timeout=TIMEOUT_S)
        self.small = {"step": 1}
        """Value of cases that name none."""
        self.value: Any = self.small
        """Value to send."""
        self.answer: Any = [self.value] * case.actors if case.shape == "fan" else self.value
        """Answer to expect."""
        if case.method == "touch":
            self.value = (
                raylane.empty(ARRAY_FLOATS, dtype=np.float32) if case.empty else np.empty(ARRAY_FLOATS, np.float32)
            )
            self.value[:] = np.arange(ARRAY_FLOATS)
            self.answer = [float(ARRAY_FLOATS - 1)] * case.actors
        elif case.method == "allreduce":
            self.value, self.answer = 1, [float(case.actors)] * case.actors
        self.graph: Any = None
        """Graph compiled by `open`; None for contenders without a graph."""
        self.runner = runner
        """Runner of the event loop shared by asyncio cases: Ray's graph works only in the loop that compiled it."""

    def open(self) -> None:
        """Prepare the first call; for an asyncio case, call this in the running event loop."""

    def submit(self) -> Any:
        """Start one call and return a token for `finish`."""
        raise NotImplementedError

    def finish(self, token: Any) -> Any:
        """Wait for the answer to a call and return it."""
        raise NotImplementedError

    def call(self) -> Any:
        """Make one call and return its answer."""
        return self.finish(self.submit())

    async def call_async(self) -> Any:
        """Make one call in an event loop and return its answer."""
        raise NotImplementedError

    def recompile(self) -> None:
        """Release what `open` made and open again; the actors stay."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what `open` made, and end the actors."""
        for actor in self.actors:
            ray.kill(actor)

    def take_value(self, case: Case) -> None:
        """Send the value of a case from now on. RuntimeError if its answer is not the value."""
        if not case.value:
            self.value = self.small if case.method == "echo" else self.value
            return
        self.value = graph_values.make(case.value)
        if not graph_values.equal(answer := self.call(), self.value):
            raise RuntimeError(f"{case.name}: {self.name} returned {answer!r:.200}. This is a bug")

    def block(self, case: Case, blocks: Blocks) -> Tally:
        """Run and time one block of calls."""
        if case.workload == "asyncio":
            return self.runner.run(graph_workloads.in_event_loop(self.call_async, blocks.block_s))
        if case.workload == "stream":
            return graph_workloads.stream(self.submit, self.finish, case.in_flight, blocks.block_s)
        if case.workload == "steps":
            return graph_workloads.steps(self.submit, self.finish, case.in_flight, blocks.calls)
        if case.workload == "idle":
            return graph_workloads.idle(blocks.block_s)
        if case.workload == "compile":
            return graph_workloads.back_to_back(self.recompile, blocks.block_s)
        if case.workload == "million":
            return graph_workloads.million(self.call, blocks.calls, self._memory)
        return graph_workloads.back_to_back(self.call, blocks.block_s, case.gap_s)

    def _memory(self) -> dict[str, int]:
        """Return the resident memory of the driver and of all actors, in bytes."""
        return {"driver_rss_bytes": _rss("self"), "actor_rss_bytes": sum(_rss(str(pid)) for pid in self.pids)}


class Graph(Contender):
    """Base class of both compiled graphs; `open` sets `graph`."""

    def submit(self) -> Any:
        return self.graph.execute(self.value)

    async def call_async(self) -> Any:
        return await (await self.graph.execute_async(self.value))

    def recompile(self) -> None:
        self.graph.teardown()
        self.open()

    def close(self) -> None:
        if self.graph is not None:
            self.graph.teardown()
        super().close()


class Raylane(Graph):
    """raylane's compiled graph."""

    wait = "adaptive"

    def _node(self) -> Any:
        if self.case.method == "allreduce":
            return graph_collectives.bind_raylane(self.actors)
        with raylane.InputNode() as x:
            if self.case.shape == "fan":
                node: Any = raylane.MultiOutputNode(
                    [raylane.bind(getattr(actor, self.case.method), x) for actor in self.actors]
                )
            else:
                node = x
                for actor in self.actors:
                    node = raylane.bind(getattr(actor, self.case.method), node)
        return node

    def open(self) -> None:
        # The driver reads the variable when it compiles; its actors got theirs from the runtime_env.
        before = os.environ.get(WAIT_VARIABLE)
        os.environ[WAIT_VARIABLE] = self.wait
        try:
            self.graph = raylane.compile(self._node(), max_inflight=max(2, self.case.in_flight), timeout=TIMEOUT_S)
        finally:
            if before is None:
                del os.environ[WAIT_VARIABLE]
            else:
                os.environ[WAIT_VARIABLE] = before

    def finish(self, token: Any) -> Any:
        return token.get()


class RaylaneInMethod(Raylane):
    """raylane's compiled graph whose methods call torch.distributed."""

    def _node(self) -> Any:
        graph_collectives.open_groups(self.actors, TIMEOUT_S)
        return graph_collectives.bind_in_method(self.actors)


class RaylaneBlocking(Raylane):
    """raylane's compiled graph with processes that always sleep while they wait."""

    wait = "block"


class RaylaneBeside(Raylane):
    """raylane's compiled graph on an actor that has idle graphs as well."""

    def open(self) -> None:
        self.idle = []
        for _ in range(self.case.idle_graphs):
            with raylane.InputNode() as x:
                node = raylane.bind(getattr(self.actors[0], self.case.method), x)
            self.idle.append(raylane.compile(node, timeout=TIMEOUT_S))
        super().open()

    def close(self) -> None:
        for graph in self.idle:
            graph.teardown()
        super().close()


class RayCompiled(Graph):
    """Ray's compiled graph with its default settings."""

    def open(self) -> None:
        if self.case.method == "allreduce":
            self.graph = graph_collectives.bind_ray(self.actors).experimental_compile()
            return
        with dag.InputNode() as x:
            if self.case.shape == "fan":
                node: Any = dag.MultiOutputNode([getattr(actor, self.case.method).bind(x) for actor in self.actors])
            else:
                node = x
                for actor in self.actors:
                    node = getattr(actor, self.case.method).bind(node)
        self.graph = node.experimental_compile(enable_asyncio=self.case.workload == "asyncio")

    def finish(self, token: Any) -> Any:
        return ray.get(token, timeout=TIMEOUT_S)


class RayCalls(Contender):
    """Plain actor calls. Results go to the next actor as ObjectRefs; a large value is stored once for all actors."""

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
    """Loop inside the actors, started by one plain call: the cost of the method alone."""

    def open(self) -> None:
        self.methods = [getattr(actor, self.case.method) for actor in self.actors]

    def submit(self) -> Any:
        return [method.remote(self.value) for method in self.methods]

    def finish(self, token: Any) -> Any:
        answers = ray.get(token, timeout=TIMEOUT_S)
        return answers if self.case.shape == "fan" else answers[0]

    def block(self, case: Case, blocks: Blocks) -> Tally:
        if case.workload == "steps":
            start = time.perf_counter()
            ends = ray.get([actor.steps.remote(blocks.calls) for actor in self.actors], timeout=TIMEOUT_S)
            return Tally(step_times_us(start, ends), blocks.calls)
        (actor,) = self.actors
        arguments = (case.method, self.value, blocks.block_s, case.gap_s)
        samples = ray.get(actor.loop.remote(*arguments), timeout=TIMEOUT_S)
        return Tally(samples, len(samples))


class WakeUps(Contender):
    """Bare semaphores, in C: the driver sleeps until the actors have woken each other in the pattern of the case."""

    actor = Waker
    folder: tempfile.TemporaryDirectory[str] | None = None
    """Folder of the compiled functions, from `open` on."""

    def open(self) -> None:
        self.segment = Segment.make(PAGE_BYTES)
        count, chain = len(self.actors), self.case.shape == "chain"
        for number in range(1 + count):
            semaphore.init(self.segment.address + number * SEMAPHORE_BYTES)
        self.folder = tempfile.TemporaryDirectory(prefix="raylane-wake-ups-")
        library = wake_ups.build(self.folder.name)
        self.wake_ups = wake_ups.WakeUps(library, self.segment.address)
        self.wake_ups.prepare([1] if chain else range(1, 1 + count), TIMEOUT_S)
        for number, actor in enumerate(self.actors, 1):
            actor.serve.remote(self.segment.path, number, wake_ups.next_of(number, count, chain=chain), library)

    def call(self) -> Any:
        if not self.wake_ups.call():
            raise RuntimeError(f"an actor of {self.name} has not answered within {TIMEOUT_S} s. This is a bug")
        return self.answer

    def close(self) -> None:
        super().close()
        if self.folder is not None:
            self.folder.cleanup()


class Copies(Contender):
    """Bare copies of the array in the driver: one there and, if the method returns the array, one back."""

    copied: Any = None
    """Memory for the copy, from `take_value` on: the value of the first call may be no array."""

    def take_value(self, case: Case) -> None:
        self.value = graph_values.make(case.value) if case.value else self.value
        self.copied = copy.deepcopy(self.value)

    def call(self) -> Any:
        if self.copied is not None:
            for _ in range(2 if self.case.method == "echo" else 1):
                np.copyto(np.asarray(self.copied), np.asarray(self.value))
        return self.answer


KINDS: dict[str, type[Contender]] = {
    RAYLANE: Raylane,
    BLOCKING: RaylaneBlocking,
    COMPILED: RayCompiled,
    CALLS: RayCalls,
    LOOP: Loop,
    BESIDE: RaylaneBeside,
    IN_METHOD: RaylaneInMethod,
    WAKE_UPS: WakeUps,
    COPIES: Copies,
}


def start(group: Sequence[Case], runner: asyncio.Runner) -> list[Contender]:
    """Start the actors of all contenders of cases with the same graph; return the contenders, not yet opened."""
    case = group[0]
    kind = {"step": Stepper, "allreduce": graph_collectives.Reducer}.get(case.method, Peer)
    # Almost no logical CPU, so that Ray places the actors of all contenders at once; only one set runs at a time.
    actors = {}
    for name in contender_names(group):
        remote = ray.remote(num_cpus=0.01)(KINDS[name].actor or kind)
        actors[name] = [remote.options(**_options(name)).remote() for _ in range(case.actors)]
    if case.method == "step":
        # The same work per step for all: about STEP_S seconds if all actors of one contender work at once.
        everyone = [actor for several in actors.values() for actor in several]
        calibrated = everyone[: case.actors]
        counts = ray.get([actor.calibrate.remote(STEP_S) for actor in calibrated], timeout=TIMEOUT_S)
        mean = round(sum(counts) / case.actors)
        ray.get([actor.repeat.remote(mean) for actor in everyone], timeout=TIMEOUT_S)
    return [KINDS[name](name, case, several, runner) for name, several in actors.items()]


def _options(name: str) -> dict[str, Any]:
    return {"runtime_env": {"env_vars": {WAIT_VARIABLE: "block"}}} if name == BLOCKING else {}


def _rss(pid: str) -> int:
    """Return the resident memory of a process in bytes: proc_pid_statm(5), second field."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
