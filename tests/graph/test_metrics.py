"""Counters of graphs in Ray's metrics."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

import raylane
from raylane.graph.driver import metrics
from raylane.graph.driver.metrics import COUNTERS, CounterKey, Publisher, counters_of

CALL = {"wait_s": 3.0, "compute_s": 2.0, "send_s": 0.5}
STATS = {
    "executions": {"submitted": 7, "completed": 6},
    "calls": {"W#1.f": {"actor": "W#1", **CALL}, "W#1.g": {"actor": "W#1", **CALL}, "W#2.f": {"actor": "W#2", **CALL}},
    "edges": {"input -> W#1": {"count": 7, "bytes": 70}},
}
AGENT = ("aiohttp", "opentelemetry.exporter.prometheus", "prometheus_client")
"""Packages of ray[default] that Ray's metrics agent needs."""


class Recorded:
    """Ray's counters, with the sum of what each was incremented by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sums: dict[tuple[str, str], float] = defaultdict(float)
        real = metrics.ray_counter

        class Counter:
            def __init__(self, name: str, tag: str) -> None:
                self.name, self.tag = name, tag

            def inc(counter, value: float, tags: dict[str, str]) -> None:
                real(counter.name, counter.tag).inc(value, tags)
                assert tags["graph"] == "train"
                self.sums[counter.name.removeprefix("raylane_graph_"), tags.get(counter.tag, "")] += value

        monkeypatch.setattr(metrics, "ray_counter", Counter)


def test_counters_of_stats_sum_the_calls_of_an_actor() -> None:
    found = counters_of(STATS)
    assert {key.counter for key in found} == set(COUNTERS)
    assert found[CounterKey("raylane_graph_computing_seconds", "actor", "W#1")] == 4.0
    assert found[CounterKey("raylane_graph_computing_seconds", "actor", "W#2")] == 2.0
    assert found[CounterKey("raylane_graph_edge_bytes", "edge", "input -> W#1")] == 70
    assert found[CounterKey("raylane_graph_executions_completed", "", "")] == 6


def test_publisher_adds_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    publisher = Publisher()
    publisher.publish("train", STATS, {})
    first = dict(recorded.sums)
    assert first["executions_submitted", ""] == 7
    publisher.publish("train", STATS, {})
    assert recorded.sums == first
    # An actor that does not answer has no calls, and its edges show fewer messages.
    silent = STATS | {"calls": {}, "edges": {"input -> W#1": {"count": 0, "bytes": 0}}}
    publisher.publish("train", silent, {})
    assert recorded.sums == first
    publisher.publish("train", STATS | {"edges": {"input -> W#1": {"count": 9, "bytes": 90}}}, {})
    assert recorded.sums == first | {("edge_messages", "input -> W#1"): 9, ("edge_bytes", "input -> W#1"): 90}


def test_publisher_adds_all_counts_of_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    publisher = Publisher()
    for pid in (1, 1, 2):
        publisher.publish("train", STATS, {"W#1": pid, "input -> W#1": pid})
    assert recorded.sums["edge_messages", "input -> W#1"] == 14
    assert recorded.sums["computing_seconds", "W#1"] == 8.0
    assert recorded.sums["computing_seconds", "W#2"] == 2.0
    assert recorded.sums["executions_completed", ""] == 6


@pytest.mark.claim("graphs", "counters are always on, also as Ray metrics, and in words where the time went")
@pytest.mark.usefixtures("clean")
def test_running_graph_publishes_its_counters(
    workers: list[Any], graph: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch)
    g = graph(lambda x: raylane.bind(workers[0].echo, x))
    for count in (3, 5):
        for _ in range(count):
            g.execute("x").get()
        g.publish_metrics("train")
    sums = recorded.sums
    assert sums["executions_submitted", ""] == sums["executions_completed", ""] == 8
    assert sums["edge_messages", "input -> Worker"] == sums["edge_messages", "Worker.echo -> driver"] == 8
    assert sums["edge_bytes", "input -> Worker"] == g.stats()["edges"]["input -> Worker"]["bytes"]
    assert all(sums[f"{kind}_seconds", "Worker"] > 0 for kind in ("waiting", "computing", "sending"))


def test_inline_graph_publishes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Same:
        def echo(self, x: int) -> int:
            return x

    recorded = Recorded(monkeypatch)
    with raylane.InputNode() as x:
        g = raylane.compile(raylane.bind(Same().echo, x), backend="inline")
    assert g.execute(1).get() == 1
    g.publish_metrics("train")
    assert not recorded.sums
    g.teardown()


PROGRAM = """
import sys, time, urllib.request
import ray
import raylane
port = int(sys.argv[1])
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _metrics_export_port=port,
         _system_config={"metrics_report_interval_ms": 200})
@ray.remote(num_cpus=0)
class Worker:
    def echo(self, x):
        return x
worker = Worker.remote()
with raylane.InputNode() as x:
    graph = raylane.compile(raylane.bind(worker.echo, x))
graph.execute(1).get()
graph.publish_metrics("train")
deadline = time.monotonic() + 60
seen = []
while not any(line.endswith(" 1.0") for line in seen):
    assert time.monotonic() < deadline, seen
    try:
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    except OSError:  # the agent has not started
        page = ""
    seen = [line for line in page.splitlines() if line.startswith("ray_raylane_graph_executions_completed")]
    time.sleep(0.05)
assert 'graph="train"' in seen[0], seen
graph.teardown()
ray.shutdown()
"""


def missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # not even its package
        return True


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(any(missing(name) for name in AGENT), reason="Ray's metrics agent needs ray[default]")
def test_metrics_agent_of_ray_exports_the_counters() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", PROGRAM, str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
