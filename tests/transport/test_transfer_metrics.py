"""Counters of transfers in Ray's metrics."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from raylane.transport.observe import metrics
from raylane.transport.observe.metrics import GAUGES, MOST_DURATIONS, TransferMetrics

AGENT = ("aiohttp", "opentelemetry.exporter.prometheus", "prometheus_client")
"""Packages of ray[default] that Ray's metrics agent needs."""


class Recorded:
    """Ray's metrics, with what each of them received."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[tuple[str, str], list[float]] = defaultdict(list)

        class Metric:
            def __init__(self, kind: str, name: str, text: str) -> None:
                self.name = name

            def record(metric, value: float, tags: dict[str, str] | None = None) -> None:
                self.values[metric.name, (tags or {}).get("transport", "")].append(value)

            inc = observe = set = record

        monkeypatch.setattr(metrics, "ray_metric", Metric)


def test_push_passes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch).values
    counters = TransferMetrics(1000, lambda: dict.fromkeys(GAUGES, 7))
    for _ in range(2):
        counters.transferred("host", 100, 0.5)
    counters.failed("tcp")
    assert counters.push() == dict.fromkeys(GAUGES, 7.0)
    assert recorded["raylane_transfers", "host"] == [2]
    assert recorded["raylane_transfer_bytes", "host"] == [200]
    assert recorded["raylane_transfer_errors", "tcp"] == [1]
    assert recorded["raylane_transfer_seconds", "host"] == [0.5, 0.5]
    assert recorded["raylane_held_bytes", ""] == [7.0]
    recorded.clear()
    counters.push()
    assert set(recorded) == {(name, "") for name, _ in GAUGES.values()}
    for _ in range(2 * MOST_DURATIONS):
        counters.transferred("host", 1, 0.1)
    counters.push()
    assert len(recorded["raylane_transfer_seconds", "host"]) == MOST_DURATIONS
    assert recorded["raylane_transfers", "host"] == [2 * MOST_DURATIONS]
    counters.close()


def test_thread_of_metrics_runs_while_memory_is_held(
    monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    recorded = Recorded(monkeypatch).values
    held = dict.fromkeys(GAUGES, 1)
    counters = TransferMetrics(0.01, lambda: held)

    def threads() -> list[Any]:
        return [thread for thread in threading.enumerate() if thread.name == "raylane-metrics"]

    counters.touch()
    eventually(lambda: len(recorded["raylane_held_bytes", ""]) > 3)
    assert len(threads()) == 1
    held.update(dict.fromkeys(GAUGES, 0))
    eventually(lambda: not threads())
    assert recorded["raylane_held_bytes", ""][-1] == 0
    counters.touch()
    counters.close()
    assert not threads()


PROGRAM = """
import sys, time, urllib.request
import ray
import torch
import raylane
port = int(sys.argv[1])
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _metrics_export_port=port,
         _system_config={"metrics_report_interval_ms": 200}, runtime_env={"env_vars": {"RAYLANE_METRICS_S": "0.1"}})
@ray.remote(num_cpus=0)
class Worker:
    @raylane.method
    def make(self):
        return torch.ones(50_000)
    def read(self, value):
        self.value = value
maker, reader = Worker.remote(), Worker.remote()
ref = maker.make.remote()
ray.get(reader.read.remote(ref))
wanted = {"ray_raylane_transfers": 1, "ray_raylane_transfer_bytes": 200_000, "ray_raylane_held_bytes": 200_000,
          "ray_raylane_transfer_seconds_count": 1}
deadline = time.monotonic() + 60
while wanted:
    assert time.monotonic() < deadline, (wanted, page[-3000:])
    try:
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    except OSError:  # the agent has not started
        page = ""
    for line in page.splitlines():
        name, _, rest = line.partition("{")
        name = name.removesuffix("_total")
        if name in wanted and float(rest.rpartition(" ")[2]) == wanted[name]:
            assert name == "ray_raylane_held_bytes" or 'transport="host"' in rest, line
            del wanted[name]
    time.sleep(0.05)
ray.shutdown()
"""


def missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # not even its package
        return True


@pytest.mark.claim("transport", "Ray's metrics and Perfetto show the transfers, on request")
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(any(missing(name) for name in AGENT), reason="Ray's metrics agent needs ray[default]")
def test_metrics_agent_of_ray_exports_the_transfers() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", PROGRAM, str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 0, done.stderr
