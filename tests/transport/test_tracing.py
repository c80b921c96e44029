"""The trace of transfers: its files, their merge, and a run on a real Ray."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
import torch

import raylane
from raylane.cli import main
from raylane.core.process import place
from raylane.core.trace_file import merge, parse_lines
from raylane.transport.link import endpoint
from raylane.transport.observe import tracing
from raylane.transport.observe.tracing import TransferTrace


def test_merge_keeps_processes_with_one_pid_apart() -> None:
    event = {"name": "fetch", "ph": "X", "dur": 1.0, "pid": 7, "tid": 1}
    found = merge([[{**event, "ts": 1e15}], [{**event, "ts": 1e15 + 5}]])
    assert [one["ts"] for one in found["traceEvents"]] == [0.0, 5.0]
    assert len({one["pid"] for one in found["traceEvents"]}) == 2
    assert found["otherData"]["first_event_s"] == 1e9
    assert merge([])["traceEvents"] == []


def test_trace_file_is_read_up_to_a_torn_line(tmp_path: Path) -> None:
    trace = TransferTrace(str(tmp_path), place.here(), "the driver")
    trace.add("fetch tcp", time.perf_counter_ns() - 5000, bytes=3)
    trace.close()
    trace.add("late", time.perf_counter_ns())
    (file,) = tmp_path.glob(tracing.FILES)
    name, fetch = parse_lines(file.read_text() + '{"name": "torn')
    assert name["args"] == {"name": "the driver"}
    assert fetch["dur"] >= 5
    assert abs(fetch["ts"] / 1e6 - time.time()) < 60
    assert fetch["args"] == {"bytes": 3}


def test_trace_ends_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST_EVENTS", 2)
    trace = TransferTrace(str(tmp_path), msgspec.structs.replace(place.here(), pid=1), "x")
    for _ in range(5):
        trace.add("fetch", time.perf_counter_ns())
    trace.close()
    (file,) = tmp_path.glob(tracing.FILES)
    assert len(parse_lines(file.read_text())) == 3


def test_trace_merge_of_an_empty_folder_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "merge", str(tmp_path), str(tmp_path / "out.json")]) == 1
    assert "Set RAYLANE_TRACE" in capsys.readouterr().err


class Maker:
    @raylane.method
    def make(self) -> torch.Tensor:
        return torch.ones(50_000)


@pytest.mark.claim("transport", "Ray's metrics and Perfetto show the transfers, on request")
@pytest.mark.usefixtures("cluster")
def test_trace_shows_publication_and_fetch_of_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLANE_TRACE", str(tmp_path))
    endpoint.close()  # the next use reads the variable
    variables = {"RAYLANE_TRACE": str(tmp_path)}
    maker: Any = ray.remote(num_cpus=0)(Maker).options(runtime_env={"env_vars": variables}).remote()
    ref = maker.make.remote()
    raylane.get(ref, tensor_transport="tcp")
    ray.kill(maker)  # without an exit handler
    endpoint.close()
    out = tmp_path / "merged" / "out.json"
    assert main(["trace", "merge", str(tmp_path), str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    by_name = {event["name"]: event for event in events if event["ph"] == "X"}
    assert set(by_name) == {"publish", "wait for calls", "fetch tcp"}
    assert by_name["publish"]["args"] == {"origin": "Maker.make", "bytes": 200_000}
    fetch, published = by_name["fetch tcp"], by_name["publish"]
    assert fetch["args"]["bytes"] == 200_000
    assert fetch["args"]["source"].startswith("Actor(Maker, ")
    assert published["pid"] != fetch["pid"] == by_name["wait for calls"]["pid"]
    assert published["ts"] + published["dur"] <= fetch["ts"]
    assert {event["args"]["name"].split(",")[0] for event in events if event["ph"] == "M"} == {
        "the driver",
        "Actor(Maker",
    }
    del ref
