"""Record the waits of real graphs, as their doorbells report them to `Patience.review`. Run by hand:

    python tests/core/traces/record.py             writes one file for each case into this folder

Each case is a graph (echo: one actor; chain: four actors; gaps: echo with pauses of 1 ms) beside neighbours (none, one
or two processes that compute, or one that computes for 20 ms and sleeps for 80). The file has one trace for the driver
and one for the first actor:

    "start_delay_us"    run delay when the doorbell was made
    "reviews"           [time in us, run delay in us, [[number, length in us, longest yield in us], ...]] of each review

Times begin at the first review. Equal waits of a review are counted together; lengths are rounded (`rounded`).
"""

from __future__ import annotations

import collections
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

import raylane

HERE = Path(__file__).parent
COMPUTES = "while True: pass"
BURSTS = """
import time
while True:
    end = time.monotonic() + 0.020
    while time.monotonic() < end:
        pass
    time.sleep(0.080)
"""
GRAPHS = {"echo": (1, 0.0), "chain": (4, 0.0), "gaps": (1, 1e-3)}
"""Actors, and seconds between two executions."""
NEIGHBOURS = {"idle": [], "busy1": [COMPUTES], "busy2": [COMPUTES] * 2, "bursty": [BURSTS]}
SECONDS = 1.2
KEPT_REVIEWS = {"idle": 80, "busy1": 150, "busy2": 150, "bursty": 150}
"""Number of reviews of each trace that are written. A burst comes every 100 ms, an echo every 10 to 20 us."""


class Echo:
    def echo(self, x: Any) -> Any:
        return x


def record_reviews(_: Any = None) -> None:
    """Keep the arguments of all reviews of policies that are made from now on, on the policy itself."""
    from raylane.core.signals.patience import Patience

    review = Patience.review

    def recording(self: Any, waits: list[tuple[int, int]], now_ns: int) -> tuple[int, int]:
        if not hasattr(self, "recorded"):
            self.start_delay_ns, self.recorded = self._delayed_ns, []
        found = review(self, waits, now_ns)
        self.recorded.append((now_ns, self._delayed_ns, list(waits)))
        return found

    Patience.review = recording  # type: ignore[method-assign]


def rounded(ns: int) -> int:
    """Return a length in us, to 5 us below 50, to 20 us below 200, else to 50 us."""
    length_us = ns / 1000
    step = 5 if length_us < 50 else 20 if length_us < 200 else 50
    return round(length_us / step) * step


def recorded_by(policy: Any) -> dict[str, Any]:
    """Return the trace of a policy in the form of the files."""

    first_ns = policy.recorded[0][0]
    reviews = []
    for now_ns, delay_ns, waits in policy.recorded:
        # A slow yield ends a review, so it stays last among its waits.
        counted = collections.Counter(
            (rounded(length), max(1, rounded(worst)) if worst else 0) for length, worst in waits
        )
        groups = [[number, *wait] for wait, number in sorted(counted.items(), key=lambda item: item[0][1])]
        reviews.append([(now_ns - first_ns) // 1000, delay_ns // 1000, groups])
    return {"start_delay_us": policy.start_delay_ns // 1000, "reviews": reviews}


def recorded_in_actor(_: Any) -> dict[str, Any]:
    from raylane.graph.worker.loop import graph_loop

    return recorded_by(graph_loop().doorbell.policy)


@contextlib.contextmanager
def neighbours(programs: list[str]) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        time.sleep(0.3 if programs else 0)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def record(count: int, gap_s: float, programs: list[str]) -> dict[str, Any]:
    """Return the traces of one case."""
    actors = [ray.remote(num_cpus=0)(Echo).remote() for _ in range(count)]
    ray.get([actor.__ray_call__.remote(record_reviews) for actor in actors])
    with raylane.InputNode() as x:
        node: Any = x
        for actor in actors:
            node = raylane.bind(actor.echo, node)
    time.sleep(1)  # until the workers have finished their start
    with neighbours(programs), raylane.compile(node) as graph:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            graph.execute(1).get()
            if gap_s:
                time.sleep(gap_s)
        driver = recorded_by(graph._collector.doorbell.policy)
        actor = ray.get(actors[0].__ray_call__.remote(recorded_in_actor))
    for each in actors:
        ray.kill(each)
    return {"driver": driver, "actor": actor}


def main() -> None:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    record_reviews()
    for graph, (count, gap_s) in GRAPHS.items():
        for beside, programs in NEIGHBOURS.items():
            found = record(count, gap_s, programs)
            for trace in found.values():
                del trace["reviews"][KEPT_REVIEWS[beside] :]
            path = HERE / f"{graph}-{beside}.json"
            path.write_text(json.dumps(found, separators=(",", ":")) + "\n")
            print(path.name, path.stat().st_size, {name: len(trace["reviews"]) for name, trace in found.items()})


if __name__ == "__main__":
    main()
