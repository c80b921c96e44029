"""What `raylane bench transfer` measures: a producer returns a tensor, a consumer sums it, one call after the other.

All contenders run in one session, in blocks of a few calls, in a new random order every round, so that a slow minute
of the machine hits all of them. Each has two actors of its own, stopped (SIGSTOP) while another contender has its turn:
some burn CPU when idle, such as UCX's progress threads. CPU time is that of a contender's actors and of the driver.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch

from raylane.transport.api import method

SIZES = {"4B": 4, "150KB": 150_000, "1MB": 1_000_000, "100MB": 100_000_000}
LARGE = {"1GB": 1_000_000_000}
BASELINE = "ray:object_store"
QUANTILES = {"p50_us": 0.5, "p90_us": 0.9, "p99_us": 0.99}


@dataclass(frozen=True)
class Case:
    name: str
    nbytes: int
    fresh: bool
    """Whether the producer makes the tensor anew in every call, or returns one that it holds."""


@dataclass(eq=False)
class Contender:
    name: str
    producer: Any
    consumer: Any
    pids: list[int] = field(default_factory=list)

    def call(self, case: Case) -> None:
        produce = self.producer.fresh if case.fresh else self.producer.held
        ray.get(self.consumer.total.remote(produce.remote(case.nbytes)))


def cases(*, large: bool, only: str | None) -> list[Case]:
    """The cases to run. ValueError names an unknown one and those that there are."""
    sizes = SIZES | (LARGE if large else {})
    known = {}
    for name, nbytes in sizes.items():
        known[name] = Case(name, nbytes, fresh=False)
        known[f"{name}-new"] = Case(f"{name}-new", nbytes, fresh=True)
    if only is None:
        return list(known.values())
    wanted = only.split(",")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"unknown cases {', '.join(unknown)}; there are {', '.join(known)} (1GB with --large)")
    return [known[name] for name in wanted]


def _producer(decorate: Callable[[Any], Any]) -> Any:
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
    def pid(self) -> int:
        return os.getpid()

    def total(self, tensor: torch.Tensor) -> float:
        return float(tensor.sum())


def _contenders() -> list[Contender]:
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
        # Ray's transports need both actors enabled for them; ours and the object store run on ordinary actors.
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


def cpu_seconds(pid: str) -> float:
    """CPU time of a process, all threads, with nanosecond resolution (proc_pid_schedstat, first field)."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((thread / "schedstat").read_text().split()[0])
        except OSError:  # the thread has ended meanwhile
            continue
    return total / 1e9


def _cpu(contender: Contender) -> float:
    return sum(cpu_seconds(pid) for pid in [*map(str, contender.pids), "self"])


def _plan(case: Case, *, quick: bool) -> tuple[int, int]:
    """(rounds, calls a round)."""
    if case.nbytes >= 10_000_000:
        return (3, 1) if quick else ((8, 1) if case.nbytes >= 1_000_000_000 else (20, 2))
    return (4, 5) if quick else (30, 10)


def measure(wanted: list[Case], *, quick: bool) -> list[dict[str, Any]]:
    """Start Ray and the contenders, run every case, shut down. One record a case and contender."""
    # More logical CPUs than cores: the actors of all contenders exist at once, and only one pair works at a time.
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="warning")
    try:
        contenders = _contenders()
        return [record for case in wanted for record in _measure_case(case, contenders, quick=quick)]
    finally:
        ray.shutdown()


def _measure_case(case: Case, contenders: list[Contender], *, quick: bool) -> list[dict[str, Any]]:
    rounds, calls = _plan(case, quick=quick)
    ray.get([contender.producer.hold.remote(0 if case.fresh else case.nbytes) for contender in contenders])
    first = {contender.name: _timed(functools.partial(contender.call, case)) for contender in contenders}
    for contender in contenders:  # warm: links, pools, lazily loaded code
        for _ in range(2):
            contender.call(case)
    _signal(contenders, signal.SIGSTOP)
    try:
        times, cpu = _rounds(case, contenders, rounds, calls)
    finally:
        _signal(contenders, signal.SIGCONT)
    print(f"{case.name}: {rounds * calls} calls each", flush=True)
    return [_record(case, name, samples, first[name], cpu[name]) for name, samples in times.items()]


def _signal(contenders: list[Contender], number: signal.Signals) -> None:
    for contender in contenders:
        for pid in contender.pids:
            os.kill(pid, number)


def _rounds(
    case: Case, contenders: list[Contender], rounds: int, calls: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Microseconds of every call and CPU seconds in all, by contender."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    cpu = dict.fromkeys(times, 0.0)
    order = list(contenders)
    rng = random.Random(case.name)
    for _ in range(rounds):
        rng.shuffle(order)
        for contender in order:
            _signal([contender], signal.SIGCONT)
            before = _cpu(contender)
            for _ in range(calls):
                times[contender.name].append(_timed(functools.partial(contender.call, case)))
            cpu[contender.name] += _cpu(contender) - before
            _signal([contender], signal.SIGSTOP)
    return times, cpu


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def quantile(ordered: list[float], q: float) -> float:
    """The smallest sample that at least a share `q` of the samples do not exceed."""
    return ordered[min(len(ordered) - 1, max(0, -(-int(q * len(ordered) * 1000) // 1000) - 1))]


def _record(case: Case, contender: str, samples: list[float], first_us: float, cpu_s: float) -> dict[str, Any]:
    ordered = sorted(samples)
    record: dict[str, Any] = {"case": case.name, "contender": contender, "n": len(ordered)}
    record.update({name: round(quantile(ordered, q), 1) for name, q in QUANTILES.items()})
    return record | {"min_us": round(ordered[0], 1), "first_us": round(first_us, 1), "cpu_s": round(cpu_s, 4)}


def table(records: list[dict[str, Any]]) -> str:
    """The records as text; `x faster` is the baseline's p50 over this one's."""
    base = {record["case"]: record["p50_us"] for record in records if record["contender"] == BASELINE}
    head = ("p50", "p99", "min", "first", "cpu/call", "x faster")
    lines = [f"{'case':10} {'contender':18}" + "".join(f"{word:>11}" for word in head)]
    for record in records:
        ratio = base[record["case"]] / record["p50_us"] if record["case"] in base else float("nan")
        shown = [_time(record[name]) for name in ("p50_us", "p99_us", "min_us", "first_us")]
        shown += [_time(record["cpu_s"] / record["n"] * 1e6), f"{ratio:.2f}"]
        lines.append(f"{record['case']:10} {record['contender']:18}" + "".join(f"{word:>11}" for word in shown))
    return "\n".join(lines)


def _time(us: float) -> str:
    return f"{us:.0f} us" if us < 1000 else f"{us / 1000:.2f} ms"
