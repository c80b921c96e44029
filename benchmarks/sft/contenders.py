"""Contenders of the benchmark `sft`: ways to send steps to the workers of a group, each with workers of its own.

rpc           WorkerGroup: plain Ray calls
compiled      CompiledWorkerGroup: raylane's compiled graphs
ray:compiled  Ray's compiled graph over the actors of a WorkerGroup, one node for each worker, fed by the driver
loop          a loop in the workers: no driver between two steps
plain         (training) torch and transformers without raylane, in one process
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray import dag

from benchmarks import measure
from benchmarks.graph import workloads as graph_workloads
from benchmarks.sft.cases import COMPILED, LOOP, PLAIN, RAY, RPC, Blocks, Case
from benchmarks.sft.workers import StepWorker
from raylane.workers.batch import BatchDict
from raylane.workers.compiled import CompiledWorkerGroup
from raylane.workers.group import WorkerGroup
from raylane.workers.options import WorkerOptions

TIMEOUT_S = 120.0
AXES = ("worker",)
"""Axis of a group whose sharding is a number of workers."""
BATCH_SHAPE = (4, 512)
"""Shape of each of the four int64 tensors of one worker's batch: 64 KB together."""


def batch() -> BatchDict:
    """Return the batch of one worker."""
    names = ("input_ids", "labels", "position_ids", "document_ids")
    return BatchDict({name: torch.arange(BATCH_SHAPE[0] * BATCH_SHAPE[1]).view(BATCH_SHAPE) for name in names})


class Contender:
    """Workers and a way to send them steps: `open` for a case, `block` any number of times, `end`; at last `close`."""

    group_class: type[WorkerGroup] = WorkerGroup

    def __init__(self, name: str, workers: int, worker_class: type = StepWorker, threads: int = 1) -> None:
        self.name = name
        # Almost no logical CPU, so that Ray places the workers of all contenders at once; only one set runs at a time.
        options = WorkerOptions(num_cpus=0.01, env_vars={"OMP_NUM_THREADS": str(threads)})
        # StepWorker sets the number of its threads itself, in the thread that computes.
        arguments = () if worker_class is StepWorker else (threads,)
        self.group = self.group_class(worker_class, workers, init_args=arguments, options=options)
        self.pids: list[int] = self.ask("pid")
        self.products = 0
        """Number of matrix products in a step of the case's work, if it is not training."""
        self.walls_us: list[float] = []
        """Time of each step of the case."""
        self.works_us: list[float] = []
        """Longest work of a worker in each step of the case."""
        self.rates: list[float] = []
        """Tokens per second in each block of the case."""
        self._next = 0
        """Number of the next step."""

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method on all workers and return their results."""
        return self.group.call(method, *args).results(TIMEOUT_S)

    def open(self, case: Case) -> None:
        """Prepare the calls of a case."""
        self.walls_us, self.works_us, self.rates = [], [], []
        self.parts = [batch() for _ in range(case.workers)] if case.feed == "driver" else []

    def submit(self) -> Any:
        """Send one step and return a token for `finish`."""
        number, self._next = self._next, self._next + 1
        return number, self.send(number)

    def send(self, number: int) -> Any:
        """Send step `number`."""
        if not self.parts:
            # Replicated on the axis of the output, so that one worker returns its metrics, as `sft.run.policy` does it.
            return self.group.call("step", number, replicate=AXES, one_result=AXES)
        return self.group.call(
            "feed",
            shard=AXES,
            one_result=AXES,
            common={"number": number},
            data=self.parts,
        )

    def receive(self, sent: Any) -> dict[str, float]:
        """Wait for the metrics of a step."""
        metrics: dict[str, float] = sent.results(TIMEOUT_S)[0]
        return metrics

    def finish(self, token: Any) -> dict[str, float]:
        """Wait for a step and return its metrics; RuntimeError if they belong to another step."""
        # A contender that mixed up its steps would still be fast.
        number, sent = token
        metrics = self.receive(sent)
        if metrics["step"] != number:
            raise RuntimeError(f"{self.name}: step {number} returned the metrics {metrics!r}. This is a bug")
        return metrics

    def run(self, case: Case, steps: int) -> tuple[list[float], float]:
        """Run steps; return the microseconds of each, and the number of tokens of all of them."""
        tokens: list[float] = []
        tally = graph_workloads.steps(
            self.submit, lambda token: tokens.append(self.finish(token)["tokens"]), case.in_flight, steps
        )
        return tally.samples_us, sum(tokens)

    def block(self, case: Case, blocks: Blocks) -> measure.Tally:
        """Run and time one block."""
        walls_us, tokens = self.run(case, blocks.steps)
        works_us = [max(times) for times in zip(*self.ask("take_times"), strict=True)]
        self.walls_us += walls_us
        self.works_us += works_us
        # A rate of each block, not of each step: rows have different numbers of tokens.
        self.rates.append(tokens / sum(walls_us) * 1e6)
        overheads_us = [wall - work for wall, work in zip(walls_us, works_us, strict=True)]
        return measure.Tally(overheads_us if case.in_flight == 1 else walls_us, len(walls_us))

    def extra(self, case: Case) -> dict[str, float]:
        """Return further fields of the record of a case: medians of the step, of its work, and of tokens per second."""
        medians = {"step_us": statistics.median(self.walls_us), "work_us": statistics.median(self.works_us)}
        if case.trains:
            medians["tokens_per_s"] = statistics.median(self.rates)
        return {name: round(value, 1) for name, value in medians.items()}

    def warm(self, case: Case, blocks: Blocks) -> None:
        """Run some steps that do not count."""
        self.run(case, blocks.warm_steps)
        self.ask("take_times")

    def end(self) -> None:
        """Release what `open` made."""

    def close(self) -> None:
        """End the workers."""
        cleanup = "teardown" if hasattr(self.group.worker_class, "teardown") else None
        self.group.shutdown(30.0, cleanup_method=cleanup)


class Compiled(Contender):
    """raylane's compiled graphs."""

    group_class = CompiledWorkerGroup


class RayCompiled(Contender):
    """Ray's compiled graph with its default settings; the actors run the same methods as with raylane's graphs."""

    graph: Any = None

    def open(self, case: Case) -> None:
        super().open(case)
        # The methods of the host that raylane's graphs call, so that the workers do the same in all contenders.
        actors = self.group._actors
        with dag.InputNode() as x:
            if self.parts:
                methods = [actors[0].run, *(actor.run_quietly for actor in actors[1:])]
                nodes = [method.bind(x[0], x[1 + rank]) for rank, method in enumerate(methods)]
            else:
                nodes = [actors[0].run.bind(x), *(actor.run_quietly.bind(x) for actor in actors[1:])]
            graph = dag.MultiOutputNode(nodes)
        # Only in `open`: an actor runs one graph of Ray at a time, and runs it by spinning.
        self.graph = graph.experimental_compile()

    def send(self, number: int) -> Any:
        # Generation 0: no call has failed (`workers.host.Head`).
        if not self.parts:
            return self.graph.execute((((0, "step"), {}), ((number,), {})))
        return self.graph.execute(((0, "feed"), {"number": number}), *(((), {"data": part}) for part in self.parts))

    def receive(self, sent: Any) -> dict[str, float]:
        metrics: dict[str, float] = ray.get(sent, timeout=TIMEOUT_S)[0]
        return metrics

    def end(self) -> None:
        if self.graph is not None:
            self.graph.teardown()
        self.graph = None

    def close(self) -> None:
        self.end()
        super().close()


class Loop(Contender):
    """Loop in the workers, started by one call."""

    def run(self, case: Case, steps: int) -> tuple[list[float], float]:
        measured: Sequence[tuple[list[float], float]] = self.ask("steps", self._next, steps)
        self._next += steps
        each = [[(after - before) * 1e6 for before, after in itertools.pairwise(times)] for times, _ in measured]
        # Nothing keeps the workers of a loop together, except the collectives of training. A step takes as long as its
        # slowest worker, as if the workers waited for one another without any cost.
        return [max(times) for times in zip(*each, strict=True)], measured[0][1]


KINDS: dict[str, type[Contender]] = {
    RPC: Contender,
    COMPILED: Compiled,
    RAY: RayCompiled,
    LOOP: Loop,
    PLAIN: Loop,
}
