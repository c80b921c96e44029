from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
from typing import Any

import pytest

from graph.graphs import make_plan, random_plan, simulated
from raylane.graph.inspect.arrivals import CallRecord, DriverRecord
from raylane.graph.inspect.trace import chrome_trace
from raylane.graph.plan.ir import DRIVER, INPUT
from raylane.graph.plan.schedule import reading_task

CHAIN = make_plan([1, 2], [[INPUT], [0]], names=["Encoder", "Head"], labels=["Encoder.forward", "Head.loss"])
CALLS: list[CallRecord] = [
    (0, 0, 9.0, 10.000010, 10.000020, 10.000023),
    (1, 0, 9.0, 10.000030, 10.000070, 10.000072),
]
EXECUTIONS: list[DriverRecord] = [(0, 10.0, 10.000080)]


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_a_chain() -> None:
    trace = chrome_trace(CHAIN, CALLS, EXECUTIONS)
    slices = [(event["name"], event["pid"], event["ts"], event["dur"]) for event in events(trace, "X")]
    micro = 1_000_000.0  # the first record is one second before the submission
    assert slices == [
        ("execution 0", 1, micro, 80),
        ("wait for driver", 2, micro, 10),
        ("wait for Encoder", 3, micro, 30),
        ("Encoder.forward", 2, micro + 10, 10),
        ("send", 2, micro + 20, 3),
        ("Head.loss", 3, micro + 30, 40),
        ("send", 3, micro + 70, 2),
    ]
    arrows = [
        (begin["name"], begin["pid"], begin["ts"] - micro, end["pid"], end["ts"] - micro)
        for begin, end in zip(events(trace, "s"), events(trace, "f"), strict=True)
    ]
    assert arrows == [
        ("input", 1, 0, 2, 10),
        ("Encoder.forward", 2, 20, 3, 30),
        ("Head.loss", 3, 70, 1, 70),
    ]


def test_names_of_processes_and_threads() -> None:
    overlapping = [(0, 0.0, 5.0), (1, 1.0, 6.0), (2, 5.0, 7.0)]
    trace = chrome_trace(CHAIN, [], overlapping, pids={1: 4711})
    named = [
        (event["name"], event["pid"], next(iter(event["args"].values())))
        for event in events(trace, "M")
        if "thread_sort" not in event["name"]
    ]
    assert named == [
        ("process_name", 1, "driver"),
        ("process_sort_index", 1, 0),
        ("thread_name", 1, "in flight"),
        ("thread_name", 1, "in flight"),
        ("process_name", 2, "Encoder (pid 4711)"),
        ("process_sort_index", 2, 1),
        ("thread_name", 2, "graph loop"),
        ("process_name", 3, "Head"),
        ("process_sort_index", 3, 2),
        ("thread_name", 3, "graph loop"),
    ]
    tids = {event["name"]: event["tid"] for event in events(trace, "X")}
    assert tids["execution 0"] == tids["execution 2"] != tids["execution 1"]


@pytest.mark.claim("graphs", "traces have the form that Perfetto and chrome://tracing ask for")
@pytest.mark.parametrize("seed", range(15))
def test_a_trace_is_what_viewers_ask_for(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, tasks=8, bad_orders=0)
    calls, driver = simulated(plan, rng, executions=20)
    trace = json.loads(json.dumps(chrome_trace(plan, rng.sample(calls, len(calls)), driver), allow_nan=False))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    _check_fields(trace["traceEvents"])
    slices = _check_slices(trace)
    _check_arrows(trace, slices)
    names = [event["name"] for event in events(trace, "X")]
    assert sum(name in plan.labels for name in names) == len(calls)
    assert sum(name.startswith("execution") for name in names) == 20


def _check_fields(found: list[dict[str, Any]]) -> None:
    for event in found:
        assert event["ph"] in {"M", "X", "s", "f"}
        assert isinstance(event["name"], str)
        for key in ("pid", "tid"):
            assert isinstance(event[key], int)
            assert event[key] > 0
        assert event["ts"] >= 0
    rest = [event for event in found if event["ph"] != "M"]
    assert found[len(found) - len(rest) :] == rest  # metadata first
    assert [event["ts"] for event in rest] == sorted(event["ts"] for event in rest)
    owners = {(event["tid"], event["pid"]) for event in found}
    assert len(owners) == len({tid for tid, _ in owners})


def _ns(event: dict[str, Any], key: str) -> int:
    """As Perfetto reads it, and as the text is meant."""
    assert int(event[key] * 1000) == round(event[key] * 1000)
    return int(event[key] * 1000)


def _check_slices(trace: dict[str, Any]) -> dict[int, list[tuple[int, int]]]:
    slices = defaultdict(list)
    for event in events(trace, "X"):
        start, length = _ns(event, "ts"), _ns(event, "dur")
        assert length > 0
        slices[event["tid"]].append((start, start + length))
    for spans in slices.values():
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    return slices


def _check_arrows(trace: dict[str, Any], slices: dict[int, list[tuple[int, int]]]) -> None:
    begins = {event["id"]: event for event in events(trace, "s")}
    ends = {event["id"]: event for event in events(trace, "f")}
    assert len(begins) == len(events(trace, "s"))
    assert begins.keys() == ends.keys()
    found = trace["traceEvents"]
    for number, begin in begins.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"])
        assert begin["pid"] != end["pid"]
        assert begin["ts"] <= end["ts"]
        assert found.index(begin) < found.index(end)
        for one in (begin, end):
            assert any(start <= _ns(one, "ts") < stop for start, stop in slices[one["tid"]])


@pytest.mark.parametrize("seed", range(5))
def test_there_is_an_arrow_for_every_message(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, tasks=8, bad_orders=0)
    calls, driver = simulated(plan, rng, 6, shortest_s=1e-8)
    found: dict[tuple[int, int], int] = defaultdict(int)
    for event in events(chrome_trace(plan, calls, driver), "s"):
        found[event["args"]["edge"], event["args"]["execution"]] += 1
    assert found == {(edge.index, n): len(edge.readers) for edge in plan.edges for n in range(6)}


def test_an_arrow_ends_at_the_call_that_takes_the_message() -> None:
    plan = make_plan([1, 2, 2], [[INPUT], [0], [0]], order={2: [2, 1]})
    calls, driver = simulated(plan, random.Random(0), 1)
    edge = next(edge for edge in plan.edges if edge.writer == 1 and DRIVER not in edge.readers)
    end = next(e for e in events(chrome_trace(plan, calls, driver), "f") if e["args"]["edge"] == edge.index)
    call = next(e for e in events(chrome_trace(plan, calls, driver), "X") if e["name"] == "B.f2")
    assert reading_task(plan, edge.index, 2) == 2
    assert end["ts"] == call["ts"]


def test_records_may_be_missing() -> None:
    for calls, driver, arrows in ((CALLS[1:], EXECUTIONS, 1), (CALLS, [], 1), (CALLS[:1], EXECUTIONS, 1), ([], [], 0)):
        trace = chrome_trace(CHAIN, calls, driver)
        assert len(events(trace, "s")) == len(events(trace, "f")) == arrows


def test_no_arrow_goes_back_in_time() -> None:
    """Clocks of two hosts may differ by more than a message takes."""
    late = [(0, 0, 9.0, 10.5, 10.6, 10.7), CALLS[1]]
    trace = chrome_trace(CHAIN, late, [])
    assert events(trace, "s") == []
    assert len(events(trace, "X")) == 6
