"""Driver cost of one call on a worker group against the number of workers: measured up to 64, computed up to 4,096.

    python -m benchmarks.studies.group_scale

The measured groups are light actors (no torch) on this machine, called as `CompiledWorkerGroup` and `WorkerGroup` call
theirs: every worker gets the same small message, one returns a small dict. The driver's CPU time is that of the whole
process, Ray's threads included. The computed rows place eight workers on each host: plain calls cost the measured time
for each worker; graphs cost what `graph_scale` computes from the routes and the recorded costs of single operations.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from benchmarks.studies import graph_scale
from raylane.core.deadline import Deadline
from raylane.workers.compiled import CallGraph
from raylane.workers.dispatch import DispatchPlan, plan_call
from raylane.workers.future import RefCalls
from raylane.workers.sharding import NamedSharding

MEASURED = (2, 8, 16, 32, 64)
COMPUTED = (64, 512, 4096)
WORKERS_PER_HOST = 8
CALLS = {"graph": 300, "plain": 60}
METRICS = {"loss": 2.5, "grad_norm": 1.0, "lr": 1e-3, "tokens": 8192.0, "step_time_s": 0.1}


class LightHost:
    """The methods of `workers.host.WorkerHost` that carry a call, without torch."""

    def call(self, head: Any, returns: bool, own: Any, common: Any) -> Any:
        """Answer a plain Ray call."""
        return METRICS if returns else None

    def run(self, message: Any) -> Any:
        """Answer a call of a graph with a result."""
        return METRICS

    def run_quietly(self, message: Any) -> None:
        """Answer a call of a graph without a result."""


@dataclass(frozen=True)
class Measured:
    """Cost of one call: medians of the wall time, mean of the driver's CPU time, in microseconds."""

    wall_us: float
    driver_cpu_us: float


def measure(call: Callable[[int], Any], count: int) -> Measured:
    """Return the cost of a call, one at a time."""
    for number in range(count // 10):
        call(number)
    walls = []
    cpu = time.process_time()
    for number in range(count):
        started = time.perf_counter()
        call(number)
        walls.append(time.perf_counter() - started)
    return Measured(statistics.median(walls) * 1e6, (time.process_time() - cpu) / count * 1e6)


def plan_of(workers: int) -> DispatchPlan:
    """Return the plan of a training step: the same arguments for all workers, the result of one."""
    return plan_call(NamedSharding.of(data=workers), replicate=["data"], one_result=["data"])


def measure_group(workers: int) -> dict[str, Measured]:
    """Return the costs for a group of light actors on this machine, through a graph and by plain Ray calls."""
    plan = plan_of(workers)
    light = ray.remote(num_cpus=0)(LightHost)
    actors = [light.remote() for _ in range(workers)]
    try:
        graph = CallGraph(plan, actors, inflight=2)

        def by_graph(number: int) -> Any:
            return graph.execute((0, "step"), {(): ((number,), {})}, {}).get()

        def by_calls(number: int) -> Any:
            own: tuple[Any, ...] = ((number,), {})
            refs = [actors[one.rank].call.remote((0, "step"), one.returns, own, {}) for one in plan.calls]
            return RefCalls(refs).values("step", plan, Deadline(60))

        found = {"graph": measure(by_graph, CALLS["graph"]), "plain": measure(by_calls, CALLS["plain"])}
        graph.graph.teardown()
        return found
    finally:
        for actor in actors:
            ray.kill(actor)


def computed_row(workers: int, plain_us: float) -> str:
    """Return the row of a cluster with eight workers on each host; `plain_us` is the driver's time for one call."""
    hosts = max(1, workers // WORKERS_PER_HOST)
    cost = graph_scale.simulate(graph_scale.broadcast(workers, hosts))
    graph_ms = (cost.submit_us + cost.collect_us) / 1e3
    return (
        f"| {workers:,} on {hosts:,} hosts | 1 | {cost.sends} | {cost.submit_us / 1e3:.2f} ms | {graph_ms:.1f} ms | "
        f"{workers:,} | {workers:,} | {workers * plain_us / 1e3:,.0f} ms |"
    )


def main() -> None:
    """Measure, compute, and print both tables in Markdown."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    print("| workers | graph: wall | graph: driver CPU | plain calls: wall | plain calls: driver CPU |")
    print("| --- | --- | --- | --- | --- |")
    plain_us = 0.0
    for workers in MEASURED:
        found = measure_group(workers)
        graph, plain = found["graph"], found["plain"]
        plain_us = plain.driver_cpu_us / workers
        print(
            f"| {workers} | {graph.wall_us:,.0f} us | {graph.driver_cpu_us:,.0f} us | {plain.wall_us:,.0f} us | "
            f"{plain.driver_cpu_us:,.0f} us |",
            flush=True,
        )
    ray.shutdown()
    print("\n| workers | pickled | frames sent | until sent | driver in all | pickled | messages | driver in all |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for workers in COMPUTED:
        print(computed_row(workers, plain_us))


if __name__ == "__main__":
    main()
