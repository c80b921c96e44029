"""Updates of a vLLM that answers requests, on CPUs: raylane's ways beside vLLM's own, and a bare memcpy.

    python -m benchmarks.studies.weights_vllm [--quick] [--json FILE]

Run it with the environment of `make test-vllm`. The ways take turns, in a new random order in each round; each has an
engine of its own (an `AsyncLLM`), which has requests under way while it is measured, and no other has any then.

    raylane            `attach(engine, pause="keep")`: prepared beside the requests, exchanged in the pause
    raylane:factory    `WeightTransferConfig(backend="raylane")`: applied in the pause, as vLLM calls its backends
    vllm:disk          pause, `collective_rpc("reload_weights")` from a folder on disk (in the page cache), resume
    vllm:tmpfs         the same with a folder in shared memory
    vllm:rpc           the same with tensors sent as arguments of the call
    memcpy             as many bytes as the weights have, copied by the process of raylane's engine without requests
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray

from benchmarks import environment, measure
from benchmarks.goals import Goal
from benchmarks.goals import lines as goal_lines
from benchmarks.studies.weights_vllm_actors import (
    ATTACHED,
    BACKENDS,
    ENVIRONMENT,
    FACTORY,
    LARGE,
    SMALL,
    Backends,
    Engine,
    Times,
    Trainer,
)
from benchmarks.weights.cases import MEMCPY, RAYLANE
from raylane import weights

BY_FACTORY, DISK, TMPFS, RPC, NONE = "raylane:factory", "vllm:disk", "vllm:tmpfs", "vllm:rpc", "no updates"
PAUSE, UPDATE, OFFERED, TOKENS, JOIN, BACKEND = "pause", "update", "offer", "tokens", "join", "backend"
"""Cases: the engine's pause; the whole update; the trainer's part before it; a token under load; a killed engine."""
WARM_UPS = 3
OPTIONS: dict[str, Any] = {"runtime_env": {"env_vars": ENVIRONMENT}, "num_cpus": 0}


class Size(NamedTuple):
    """Extent of a run."""

    model: dict[str, int]
    rounds: int
    windows: int
    """Number of windows in which tokens are counted, with and without updates."""
    window_s: float
    joins: int
    requests: int = 4


QUICK, FULL = Size(SMALL, 5, 2, 2.0, 1), Size(LARGE, 10, 3, 5.0, 3)


class Way:
    """One way to update an engine."""

    def __init__(
        self, label: str, engine: Any, offer: Callable[[], float] | None, take: Callable[[], Times] | None
    ) -> None:
        self.label, self.engine, self.offer, self.take = label, engine, offer, take
        self.name = label
        self.pids: Sequence[int] = ray.get(engine.pids.remote())
        self.pauses, self.wholes, self.offers = measure.Tally(), measure.Tally(), measure.Tally()
        self.first: Times | None = None

    def sample(self) -> None:
        """Note one update, which finds new weights of the trainer."""
        if self.take is None:
            return
        if self.offer is not None:
            self.offers.samples_us.append(self.offer() * 1e6)
        before = measure.cpu_seconds(self.pids)
        times = self.take()
        self.pauses.cpu_s += measure.cpu_seconds(self.pids) - before
        self.pauses.samples_us.append(times.pause_s * 1e6)
        self.wholes.samples_us.append(times.seconds * 1e6)
        self.first = self.first or times

    def forget(self) -> None:
        """Begin the measurement anew after the warm-up."""
        self.pauses, self.wholes, self.offers = measure.Tally(), measure.Tally(), measure.Tally()

    def records(self) -> list[dict[str, Any]]:
        """Return the records of this way. The CPU time of an update is that of the requests beside it, too."""
        assert self.first is not None
        self.wholes.cpu_s = self.pauses.cpu_s
        for tally in (self.pauses, self.wholes, self.offers):
            tally.calls = len(tally.samples_us)
        result = [measure.record(PAUSE, self.label, self.pauses, self.first.pause_s * 1e6)]
        if self.label != MEMCPY:
            result.append(measure.record(UPDATE, self.label, self.wholes, self.first.seconds * 1e6))
        if self.offer is not None:
            result.append(measure.record(OFFERED, self.label, self.offers, self.offers.samples_us[0]))
        return result


class Bench:
    """A trainer and the engines of all ways."""

    def __init__(self, size: Size, home: Path, shared: Path) -> None:
        self.size, self.start_folder = size, str(home / "start")
        self.trainer = ray.remote(**OPTIONS)(Trainer).remote(size.model)
        self.nbytes: int = ray.get(self.trainer.nbytes.remote())
        ray.get(self.trainer.write.remote(self.start_folder))
        attached, by_factory, reloaded = (self.start(backend) for backend in (None, "raylane", None))
        self.engines = [attached, by_factory, reloaded]
        ray.get(self.trainer.publish.remote())
        ray.get(attached.attach.remote())
        ray.get(self.trainer.connect.remote(by_factory))
        bench = self.trainer

        def folder(path: Path) -> tuple[Callable[[], float], Callable[[], Times]]:
            return (
                lambda: ray.get(bench.write.remote(str(path))),
                lambda: ray.get(reloaded.reload.remote(str(path))),
            )

        def by_client() -> Times:
            seconds = ray.get(bench.send.remote())
            return Times(ray.get(by_factory.last_pause.remote()), seconds)

        def copied() -> Times:
            return Times(*[ray.get(attached.memcpy.remote(self.nbytes))] * 2)

        self.ways = [
            Way(RAYLANE, attached, lambda: ray.get(bench.publish.remote()), lambda: ray.get(attached.update.remote())),
            Way(BY_FACTORY, by_factory, None, by_client),
            Way(DISK, reloaded, *folder(home / "next")),
            Way(TMPFS, reloaded, *folder(shared / "next")),
            Way(RPC, reloaded, None, lambda: ray.get(reloaded.reload_tensors.remote(bench.tensors.remote()))),
            Way(MEMCPY, attached, None, copied),
        ]

    def start(self, backend: str | None) -> Any:
        """Start an engine from the first folder."""
        engine_class = ray.remote(max_concurrency=50, **OPTIONS)(Engine)
        return engine_class.remote(self.start_folder, self.size.requests, backend)

    def close(self) -> None:
        """End all actors, and drop the weights."""
        for engine in self.engines:
            ray.get(engine.shut_down.remote())
        for actor in (*self.engines, self.trainer):
            ray.kill(actor)
        for name in (ATTACHED, FACTORY):
            weights.drop(name)

    def under_load(self, way: Way, updates: int) -> None:
        """Update so many times while requests are under way; those of a memcpy are not."""
        if way.label != MEMCPY:
            ray.get(way.engine.begin_load.remote())
        try:
            for _ in range(updates):
                ray.get(self.trainer.train.remote())
                way.sample()
        finally:
            if way.label != MEMCPY:
                ray.get(way.engine.end_load.remote())

    def updates(self) -> list[dict[str, Any]]:
        """Measure the updates of all ways; those that do not work are left out."""
        for way in list(self.ways):
            try:
                self.under_load(way, WARM_UPS)
                way.forget()
            except ray.exceptions.RayTaskError as error:
                print(f"{way.label} left out: {str(error.cause).splitlines()[0]}", flush=True)
                self.ways.remove(way)
        order, chance = list(self.ways), random.Random(0)
        for number in range(self.size.rounds):
            chance.shuffle(order)
            for way in order:
                self.under_load(way, 1)
            print(f"round {number + 1} of {self.size.rounds}", flush=True)
        self.compare()
        return sorted((record for way in self.ways for record in way.records()), key=lambda record: record["case"])

    def compare(self) -> None:
        """Say whether the ways lead to the same answers for the same weights."""
        ray.get(self.trainer.train.remote())
        answers = {}
        for way in self.ways:
            way.sample()
            answers[way.label] = ray.get(way.engine.answers.remote())
        differ = [label for label, answer in answers.items() if answer != answers[RAYLANE]]
        print(f"greedy answers that differ from raylane's: {', '.join(differ) or 'none'}", flush=True)

    def tokens(self) -> list[dict[str, Any]]:
        """Count tokens per second, without updates and with one each second."""
        chance, counted = random.Random(1), {}
        by_label = {way.label: way for way in self.ways}
        labels = [label for label in (RAYLANE, BY_FACTORY, DISK, TMPFS) if label in by_label]
        pairs = [(NONE, by_label[RAYLANE]), *((label, by_label[label]) for label in labels)]
        counted = {label: measure.Tally() for label, _ in pairs}
        for _ in range(self.size.windows):
            chance.shuffle(pairs)
            for label, way in pairs:
                seconds, tokens = self.window(way, updated=label != NONE)
                counted[label].samples_us.append(seconds * 1e6 / tokens)
        records = []
        for label, tally in counted.items():
            tally.calls = len(tally.samples_us)
            row = measure.record(TOKENS, label, tally, tally.samples_us[0])
            records.append(row | {"tokens_per_s": round(1e6 / row["p50_us"], 1)})
        return records

    def window(self, way: Way, *, updated: bool) -> tuple[float, int]:
        """Return the seconds and tokens of one window."""
        ray.get(way.engine.begin_load.remote())
        began_s, before = ray.get(way.engine.count.remote())
        ends_s = time.perf_counter() + self.size.window_s
        while (left_s := ends_s - time.perf_counter()) > 0:
            next_s = time.perf_counter() + min(1.0, left_s)
            ray.get(self.trainer.train.remote())  # also without updates: the trainer takes a core for a moment
            if updated:
                way.sample()
            time.sleep(max(0.0, next_s - time.perf_counter()))
        ended_s, after = ray.get(way.engine.count.remote())
        ray.get(way.engine.end_load.remote())
        return ended_s - began_s, after - before

    def joins(self) -> list[dict[str, Any]]:
        """Kill the attached engine; measure the time until one in its place has answered with the newest version."""
        whole, started = measure.Tally(), []
        for _ in range(self.size.joins):
            pids = ray.get(self.engines[0].pids.remote())
            began_s = time.perf_counter()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            ray.get(self.trainer.publish.remote())
            self.engines[0] = engine = self.start(None)
            ray.get(engine.attach.remote())
            started.append(time.perf_counter() - began_s)
            ray.get(engine.update.remote())
            _, version = ray.get(engine.answer.remote([1, 2, 3], 1))
            whole.samples_us.append((time.perf_counter() - began_s) * 1e6)
            newest = max(info.number for info in weights.versions(ATTACHED))
            if int(version) != newest:
                raise RuntimeError(f"the engine answered with version {version}, and {newest} is the newest")
        whole.calls = len(whole.samples_us)
        whole.extra["engine_start_s"] = [round(seconds, 3) for seconds in started]
        whole.extra["after_start_s"] = [
            round(us / 1e6 - seconds, 3) for us, seconds in zip(whole.samples_us, started, strict=True)
        ]
        return [measure.record(JOIN, RAYLANE, whole, whole.samples_us[0])]


def backends(folder: str) -> dict[str, str]:
    """Return what comes of each of vLLM's own backends on a CPU."""
    actor, outcomes = Backends.remote(folder), {}  # type: ignore[attr-defined]
    for backend in BACKENDS:
        try:
            outcomes[backend] = ray.get(actor.outcome.remote(backend), timeout=90)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            outcomes[backend] = f"the engine does not answer any more: {type(error).__name__}"
        print(f"vLLM's backend {backend}: {outcomes[backend]}", flush=True)
    ray.kill(actor)
    return outcomes


def goals(records: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals for which there are records."""
    medians = {(row["case"], row["contender"]): float(row["p50_us"]) for row in records}
    pauses = {label: us for (case, label), us in medians.items() if case == PAUSE}
    others = {label: us for label, us in pauses.items() if label.startswith("vllm")}
    result = [Goal(PAUSE, "pause, of a memcpy of the weights", pauses[RAYLANE] / pauses[MEMCPY], 1.5, "x")]
    if others:
        best = min(others, key=lambda label: others[label])
        shorter = others[best] / pauses[RAYLANE]
        result.append(Goal(PAUSE, f"shorter than the best other, {best}", shorter, 5, "x", True))
    return result


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return the records as text, then tokens per second, and the goals with what was reached."""
    timed = [row for row in records if row["case"] != BACKEND]
    lines = [measure.table(timed, {"x memcpy": (MEMCPY, "p50"), "x disk": (DISK, "p50")}), ""]
    rates = {row["contender"]: row["tokens_per_s"] for row in timed if row["case"] == TOKENS}
    for label, rate in rates.items():
        lines.append(f"{label}: {rate:,.1f} tokens/s, {rate / rates[NONE] - 1:+.1%} against no updates")
    return "\n".join([*lines, *goal_lines(goals(timed))])


def run(size: Size, report: Callable[[list[dict[str, Any]]], None]) -> None:
    """Start Ray, measure all, and shut Ray down. `report` gets all records so far after each part."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 lets a busy neighbour starve the engines
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="warning")
    home, shared = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp(prefix="raylane-bench-", dir="/dev/shm"))
    try:
        bench = Bench(size, home, shared)
        print(f"{bench.nbytes / 1e6:.0f} MB of weights", flush=True)
        records: list[dict[str, Any]] = []
        for part in (bench.updates, bench.tokens, bench.joins):
            records += [record | {"nbytes": bench.nbytes} for record in part()]
            report(records)
        bench.close()
        for name, outcome in backends(bench.start_folder).items():
            records.append({"case": BACKEND, "contender": name, "outcome": outcome})
        report(records)
    finally:
        shutil.rmtree(home)
        shutil.rmtree(shared)
        ray.shutdown()


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model, few updates: a test that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and records to FILE")
    args = parser.parse_args()

    def report(records: list[dict[str, Any]]) -> None:
        print(table(records), flush=True)
        if args.json is not None:
            environment.write_report(args.json, records, quick=args.quick)

    run(QUICK if args.quick else FULL, report)


if __name__ == "__main__":
    main()
