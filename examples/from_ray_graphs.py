"""Programs written for Ray's compiled graphs, run by raylane. Changed lines name the lines that they replace.

Run with `python examples/from_ray_graphs.py`; no GPU is needed.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import ray
from ray.dag import InputNode, MultiOutputNode
from ray.experimental.collective import allreduce

import raylane


@ray.remote(num_cpus=0)
class Worker:
    """An ordinary actor: the same for Ray's compiled graphs and for raylane's."""

    def __init__(self, factor: int = 1) -> None:
        self.factor = factor
        self.gate = threading.Event()

    def scale(self, x: Any) -> Any:
        return x * self.factor

    def fit(self, batch: list[float], rate: float) -> float:
        return sum(batch) * rate

    @ray.method(num_returns=2)
    def split(self, x: list[int]) -> tuple[list[int], list[int]]:
        return x[::2], x[1::2]

    def root(self, x: float) -> float:
        if x < 0:
            raise ValueError(f"no root of {x}")
        return float(x**0.5)

    def ones(self, count: int) -> Any:
        return np.ones(count)

    def wait(self, x: int) -> int:
        self.gate.wait()
        self.gate.clear()
        return x

    def release(self) -> None:
        self.gate.set()


def one_actor(worker: Any) -> None:
    with InputNode() as inp:
        dag = worker.scale.bind(inp)
    graph = raylane.compile(dag)  # was: graph = dag.experimental_compile()
    print("one actor:", graph.execute(21).get())  # was: ray.get(graph.execute(21))
    graph.teardown()


def chain(first: Any, second: Any) -> None:
    with InputNode() as inp:
        dag = second.scale.bind(first.scale.bind(inp))
    with raylane.compile(dag) as graph:  # was: dag.experimental_compile(), and teardown at the end
        print("chain:", graph.execute(3).get())


def several_outputs(workers: list[Any]) -> None:
    with InputNode() as inp:
        dag = MultiOutputNode([worker.scale.bind(inp) for worker in workers])
    with raylane.compile(dag) as graph:
        print("several outputs:", graph.execute(10).get())  # was: ray.get of a list of refs, one for each output


def several_arguments(worker: Any) -> None:
    with InputNode() as inp:
        dag = worker.fit.bind(inp[0], rate=inp.rate)
    with raylane.compile(dag) as graph:
        print("several arguments:", graph.execute([1.0, 2.0, 3.0], rate=0.5).get())


def several_returns(splitter: Any, even: Any, odd: Any) -> None:
    with InputNode() as inp:
        evens, odds = splitter.split.bind(inp)
        dag = MultiOutputNode([even.scale.bind(evens), odd.scale.bind(odds)])
    with raylane.compile(dag) as graph:
        print("several returns:", graph.execute([0, 1, 2, 3]).get())


async def in_an_event_loop(worker: Any) -> None:
    with InputNode() as inp:
        dag = worker.scale.bind(inp)
    with raylane.compile(dag) as graph:  # was: dag.experimental_compile(enable_asyncio=True)
        result = await graph.execute_async(4)
        print("asyncio:", await result)
        print("asyncio and blocking:", graph.execute(5).get())  # was: a second graph, compiled without asyncio


def errors(worker: Any) -> None:
    with InputNode() as inp:
        dag = worker.root.bind(inp)
    with raylane.compile(dag) as graph:
        try:
            graph.execute(-1.0).get()
        except ValueError as error:
            print("error:", isinstance(error, ray.exceptions.RayTaskError), "no root of -1.0" in str(error))
        print("after an error:", graph.execute(9.0).get())


def death(workers: list[Any]) -> None:
    with InputNode() as inp:
        dag = MultiOutputNode([worker.scale.bind(inp) for worker in workers])
    with raylane.compile(dag) as graph:
        ray.kill(workers[0])  # takes a moment
        try:
            while True:
                graph.execute(10).get()
        except raylane.errors.GraphActorDiedError:  # was: ActorDiedError or RayChannelError
            print("death: the graph has ended, the other actors live")
    with InputNode() as inp:
        dag = MultiOutputNode([worker.scale.bind(inp) for worker in workers[1:]])
    with raylane.compile(dag) as graph:
        print("compiled again:", graph.execute(10).get())


def timeouts(worker: Any) -> None:
    with InputNode() as inp:
        dag = worker.wait.bind(inp)
    with raylane.compile(dag, timeout=30) as graph:  # was: RAY_CGRAPH_submit_timeout and RAY_CGRAPH_get_timeout
        result = graph.execute(7)
        try:
            result.get(timeout=0.1)  # was: ray.get(ref, timeout=0.1)
        except raylane.errors.GraphTimeoutError:  # was: RayChannelTimeoutError
            print("timeout: the result is not lost")
        ray.get(worker.release.remote())  # an ordinary call, beside the method that the graph runs
        print("later:", result.get())  # was: an error: a result that was late once was lost


def several_in_flight(worker: Any) -> None:
    with InputNode() as inp:
        dag = worker.scale.bind(inp)
    with raylane.compile(dag, max_inflight=3) as graph:  # was: _max_inflight_executions=3
        results = [graph.execute(step) for step in range(8)]  # was: an error at the fourth
        print("in flight:", [result.get() for result in results])
        print("again:", results[0].get())  # was: an error: a ref could be read once


def refused_when_full(worker: Any) -> None:
    with InputNode() as inp:
        dag = worker.wait.bind(inp)
    with raylane.compile(dag, max_inflight=1) as graph:
        result = graph.execute(1)
        try:
            graph.execute_nowait(2)  # was: graph.execute(2)
        except raylane.errors.GraphFullError:  # was: RayCgraphCapacityExceeded
            print("full: nothing was started")
        ray.get(worker.release.remote())
        result.get()


def kept_arrays(worker: Any) -> None:
    with InputNode() as inp:
        dag = worker.ones.bind(inp)
    with raylane.compile(dag) as graph:
        arrays = [graph.execute(100_000).get() for _ in range(5)]  # was: del each array before the next result
        print("kept arrays:", sum(array.sum() for array in arrays))


def two_graphs_of_one_actor(worker: Any, other: Any) -> None:
    with InputNode() as inp:
        first = raylane.compile(worker.scale.bind(inp))
    with InputNode() as inp:
        second = raylane.compile(other.scale.bind(worker.scale.bind(inp)))  # was: first.teardown() before this line
    print("two graphs:", first.execute(1).get(), second.execute(1).get())
    print("result as input:", second.execute(first.execute(1)).get())  # was: refs could not be passed on
    first.teardown()
    second.teardown()


def sum_of_all(workers: list[Any]) -> None:
    with InputNode() as inp:
        sums = allreduce.bind([worker.ones.bind(inp) for worker in workers])  # of ray.experimental.collective
        dag = MultiOutputNode([worker.scale.bind(one) for worker, one in zip(workers, sums, strict=True)])
    with raylane.compile(dag) as graph:
        print("allreduce:", [array.tolist() for array in graph.execute(2).get()])


def main() -> None:
    workers = [Worker.remote(factor) for factor in (1, 2, 3)]
    one, two, three = workers
    one_actor(two)
    chain(two, three)
    several_outputs(workers)
    several_arguments(one)
    several_returns(one, two, three)
    asyncio.run(in_an_event_loop(two))
    errors(one)
    timeouts(one)
    several_in_flight(two)
    refused_when_full(one)
    kept_arrays(one)
    two_graphs_of_one_actor(two, three)
    sum_of_all(workers)
    death(workers)
    for worker in workers:
        ray.kill(worker)  # `bind` of ray.dag keeps an actor alive after its last handle


if __name__ == "__main__":
    main()
