"""docs/design/one-call.md against a trace of real calls: its steps in their order, and all files that a call enters."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tests.rules import tracing

import raylane

pytestmark = pytest.mark.usefixtures("ray_session", "cluster")

PAGE = (Path(__file__).parents[2] / "docs/design/one-call.md").read_text()
STEP = re.compile(r"\| \d+ \| (\w+) \| `([\w/]+\.py)` \| `([\w.]+)` \|")
Trace = list[tuple[str, str]]


class Producer:
    @raylane.method
    def activations(self) -> torch.Tensor:
        return torch.ones(300_000)  # more than travels in a ticket


class Consumer:
    @raylane.method
    def total(self, tensor: torch.Tensor) -> float:
        return float(tensor.sum())


class Encoder:
    def encode(self, batch: dict[str, int]) -> dict[str, int]:
        return batch


@pytest.fixture(autouse=True)
def coverage_of_this_process() -> Iterator[None]:
    """Put back a profile function that somebody else has set."""
    before = sys.getprofile()
    yield
    tracing.stop()
    sys.setprofile(before)


def section(title: str) -> str:
    return next(part for part in PAGE.split("\n## ") if part.startswith(title))


def check(text: str, traces: dict[str, Trace], package: str) -> None:
    """Check that the steps of a section happened in this order, and that it names all files that the call entered."""
    steps = STEP.findall(text)
    assert len(steps) >= 8
    for process, trace in traces.items():
        expected = [(file, name) for where, file, name in steps if where == process]
        functions = iter((file, name.replace("<locals>.", "")) for file, name in trace)
        missing = [step for step in expected if not any(step == function for function in functions)]
        assert not missing, f"{process} did not run {missing[0]} after the steps before it"
    entered = {file for trace in traces.values() for file, _ in trace if file.startswith(f"{package}/")}
    named = set(re.findall(r"`(\w[\w/]*\.py)`", text))
    assert entered <= named, f"the page does not name {sorted(entered - named)}"


def test_remote_call_runs_the_steps_of_the_page() -> None:
    producer: Any = ray.remote(num_cpus=0)(Producer).remote()
    consumer: Any = ray.remote(num_cpus=0)(Consumer).remote()
    actors = [producer, consumer]
    ray.get([actor.__ray_call__.remote(tracing.start) for actor in actors])
    tracing.start()
    for _ in range(2):  # the first call opens stores and listeners
        ray.get(consumer.total.remote(producer.activations.remote()))
    ray.get([actor.__ray_call__.remote(tracing.clear) for actor in actors])
    tracing.clear()
    ref = producer.activations.remote()
    assert ray.get(consumer.total.remote(ref)) == 300_000
    traces = {"caller": tracing.stop()}
    traces["producer"], traces["consumer"] = ray.get([actor.__ray_call__.remote(tracing.stop) for actor in actors])
    check(section("One `.remote()`"), traces, "transport")


def test_execute_runs_the_steps_of_the_page() -> None:
    encoder: Any = ray.remote(num_cpus=0)(Encoder).remote()
    ray.get(encoder.__ray_call__.remote(tracing.start))  # before the graph's thread starts
    with raylane.InputNode() as batch:
        node = raylane.bind(encoder.encode, batch)
    graph = raylane.compile(node)
    for _ in range(2):
        graph.execute({"rows": 1}).get()
    ray.get(encoder.__ray_call__.remote(tracing.clear))
    tracing.start()
    assert graph.execute({"rows": 1}).get() == {"rows": 1}
    traces = {"driver": tracing.stop()}
    traces["actor"] = ray.get(encoder.__ray_call__.remote(tracing.stop))
    graph.teardown()
    check(section("One `execute`"), traces, "graph")
