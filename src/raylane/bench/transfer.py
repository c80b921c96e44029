"""Benchmark of tensor transfer: a producer returns a tensor and a consumer sums it, one call after the other.

Each contender has two actors of its own; `measure` describes how contenders take turns. Called by `raylane bench
transfer`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
import torch

from raylane.bench import measure
from raylane.transport.api import method

SIZES = {"4B": 4, "80KB": 80 << 10, "96KB": 96 << 10, "150KB": 150_000, "1MB": 1_000_000, "100MB": 100_000_000}
LARGE = {"1GB": 1_000_000_000}
BASELINE = "ray:object_store"


@dataclass(frozen=True)
class Case:
    """One tensor size, new in each call or kept by the producer."""

    name: str
    nbytes: int
    fresh: bool
    """True if the producer makes a new tensor in every call, False if it returns one that it keeps."""


@dataclass(eq=False)
class Contender:
    """A producer and a consumer with one tensor transport."""

    name: str
    producer: Any
    consumer: Any
    pids: list[int] = field(default_factory=list)

    def call(self, case: Case) -> None:
        produce = self.producer.fresh if case.fresh else self.producer.held
        ray.get(self.consumer.total.remote(produce.remote(case.nbytes)))


def cases(*, large: bool, only: str | None) -> list[Case]:
    """Return the cases to run. ValueError names unknown cases and the known ones."""
    sizes = SIZES | (LARGE if large else {})
    known = {}
    for name, nbytes in sizes.items():
        known[name] = Case(name, nbytes, fresh=False)
        known[f"{name}-new"] = Case(f"{name}-new", nbytes, fresh=True)
    return measure.choose(known, only, "" if large else " (1GB with --large)")


def _producer(decorate: Callable[[Any], Any]) -> Any:
    """Return a producer class whose methods have the decorator of one transport."""

    class Producer:
        def __init__(self) -> None:
            self.kept: dict[int, torch.Tensor] = {}

        def pid(self) -> int:
            return os.getpid()

        def hold(self, nbytes: int) -> None:
            self.kept = {nbytes: torch.ones(nbytes // 4)}

        @decorate
        def held(self, nbytes: int) -> torch.Tensor:
            return self.kept[nbytes]

        @decorate
        def fresh(self, nbytes: int) -> torch.Tensor:
            return torch.ones(nbytes // 4)

    return Producer


class Consumer:
    """Actor that sums a tensor."""

    def pid(self) -> int:
        return os.getpid()

    def total(self, tensor: torch.Tensor) -> float:
        return float(tensor.sum())


def _contenders() -> list[Contender]:
    """Start the two actors of every contender."""
    decorators: dict[str, Callable[[Any], Any]] = {
        "raylane:auto": method,
        "raylane:host": method(tensor_transport="host"),
        "raylane:tcp": method(tensor_transport="tcp"),
        BASELINE: lambda function: function,
        "ray:rdt-gloo": ray.method(tensor_transport="gloo"),
    }
    if importlib.util.find_spec("nixl") is not None:
        decorators["ray:rdt-nixl"] = ray.method(tensor_transport="nixl")
    found = []
    for name, decorate in decorators.items():
        # Ray's transports need actors with enable_tensor_transport; raylane and the object store use ordinary actors.
        options: dict[str, Any] = (
            {"num_cpus": 1, "enable_tensor_transport": True} if ":rdt" in name else {"num_cpus": 1}
        )
        producer = ray.remote(**options)(_producer(decorate)).remote()
        consumer = ray.remote(**options)(Consumer).remote()
        if name == "ray:rdt-gloo":
            from ray.experimental.collective import create_collective_group

            create_collective_group([producer, consumer], backend="torch_gloo")
        pids = ray.get([producer.pid.remote(), consumer.pid.remote()])
        found.append(Contender(name, producer, consumer, pids))
    return found


def _blocks_of(case: Case, *, quick: bool) -> tuple[int, int]:
    """Return (rounds, calls per round)."""
    if case.nbytes >= 10_000_000:
        return (3, 1) if quick else ((8, 1) if case.nbytes >= 1_000_000_000 else (20, 2))
    return (4, 5) if quick else (30, 10)


def run(selected: list[Case], *, quick: bool) -> list[dict[str, Any]]:
    """Start Ray and the contenders, run every case, and shut Ray down; return one record per case and contender."""
    # More logical CPUs than cores: the actors of all contenders exist at once, but only one pair runs at a time.
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="warning")
    try:
        contenders = _contenders()
        return [record for case in selected for record in _measure_case(case, contenders, quick=quick)]
    finally:
        ray.shutdown()


def _measure_case(case: Case, contenders: list[Contender], *, quick: bool) -> list[dict[str, Any]]:
    """Measure one case with all contenders; return one record for each."""
    rounds, calls = _blocks_of(case, quick=quick)
    # hold(0) releases the tensor of the previous case; otherwise every contender would keep up to 1 GB.
    ray.get([contender.producer.hold.remote(0 if case.fresh else case.nbytes) for contender in contenders])
    first = {contender.name: measure.timed(functools.partial(contender.call, case)) for contender in contenders}
    for contender in contenders:  # warm up connections, memory pools and lazily loaded code
        for _ in range(2):
            contender.call(case)

    def block(contender: Contender) -> measure.Tally:
        return measure.Tally([measure.timed(functools.partial(contender.call, case)) for _ in range(calls)], calls)

    tallies = measure.take_turns(contenders, rounds, block, seed=case.name)
    print(f"{case.name}: {rounds * calls} calls each", flush=True)
    return [measure.record(case.name, name, tally, first[name]) for name, tally in tallies.items()]


def table(records: list[dict[str, Any]]) -> str:
    """Return the records as text; column `x faster` is the baseline's p50 divided by the record's."""
    return measure.table(records, {"x faster": (BASELINE, "p50")})
