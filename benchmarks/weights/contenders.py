"""Contenders of the benchmark `weights`: ways to move the weights of two ranks to readers, and a bare memcpy."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray

from benchmarks import measure
from benchmarks.weights import actors as weights_actors
from benchmarks.weights.cases import BLOCKED, COPIED, DIGESTS, MAPPED, MEMCPY, MOVED, NUMPY, RANKS, RAYLANE, STORE, Case
from raylane import weights

DELAY_S = 0.02
"""Time until actors that shall begin together do so: all have their call by then."""

TORCHSTORE_CAUSE = "torchstore 0.1.2 needs torch 2.9.0, and a torchmonarch 0.1.2 that loads only with libcuda.so.1"


class Way(NamedTuple):
    """One way to move weights."""

    sender: Callable[..., Any]
    receiver: Callable[..., Any]
    together: bool = False
    """True if ranks and readers are called at once, False if readers get what the ranks return."""
    by_part: bool = False
    """True if a rank sends something else to the readers of each part."""
    transport: str | None = None
    """Transport of Ray that carries what the ranks return."""


_BUCKETS = weights_actors.BucketSender, weights_actors.BucketReceiver
WAYS = {
    RAYLANE: Way(weights_actors.RaylaneSender, weights_actors.RaylaneReceiver, together=True),
    DIGESTS: Way(weights_actors.DigestSender, weights_actors.VerifyingReceiver, together=True),
    STORE: Way(weights_actors.StoreSender, weights_actors.StoreReceiver),
    NUMPY: Way(weights_actors.NumpySender, weights_actors.StoreReceiver),
    "ray:rdt-gloo": Way(*_BUCKETS, by_part=True, transport="gloo"),
    "ray:rdt-nixl": Way(*_BUCKETS, by_part=True, transport="nixl"),
    "gloo:broadcast": Way(weights_actors.BroadcastSender, weights_actors.BroadcastReceiver, together=True),
    "dcp:tmpfs": Way(weights_actors.CheckpointSender, weights_actors.CheckpointReceiver),
}


def unavailable(name: str) -> str | None:
    """Return why a contender cannot take part here, or None."""
    if name == "ray:rdt-nixl" and not importlib.util.find_spec("nixl"):
        return "nixl is not installed"
    return TORCHSTORE_CAUSE if name == "torchstore" else None


class Deployment:
    """Ranks and readers of one way. Their constructors wait for each other where they form a group."""

    def __init__(self, name: str, case: Case) -> None:
        self.way, self.case, self.step = WAYS[name], case, 0
        self.is_raylane = name in (RAYLANE, DIGESTS)
        self.home = tempfile.mkdtemp(prefix="weights-bench-", dir="/dev/shm")
        """Folder of rendezvous and files, and raylane's name of the weights."""
        self.ranks: list[Any] = []
        self.readers: list[Any] = []
        self.pids: list[int] = []

    def start(self) -> None:
        """Start all actors."""
        case, transport = self.case, self.way.transport
        options: dict[str, Any] = {"num_cpus": 0}
        rank_class: Any = weights_actors.Rank
        if transport is not None:
            options["enable_tensor_transport"] = True
            send = ray.method(tensor_transport=transport)(lambda self, part: self.sender.send(part))
            rank_class = type("Rank", (rank_class,), {"send": send})
        start = ray.remote(**options)
        self.ranks = [start(rank_class).remote(self.way.sender, case, i, self.home) for i in range(RANKS)]
        reader_class = start(weights_actors.Reader)
        self.readers = [reader_class.remote(self.way.receiver, case, i, self.home) for i in range(case.readers)]
        self.pids = ray.get([actor.pid.remote() for actor in self.actors])
        if transport == "gloo":
            from ray.experimental.collective import create_collective_group

            create_collective_group(self.actors, backend="torch_gloo")
        if self.is_raylane:  # its own actors: the catalogue, and the keeper of this host
            named = ray.util.list_named_actors(all_namespaces=True)
            actors = [ray.get_actor(**entry) for entry in named if entry["namespace"].startswith("raylane")]
            self.pids += ray.get([actor.__ray_call__.remote(process_id) for actor in actors])

    @property
    def actors(self) -> list[Any]:
        """Return all actors."""
        return [*self.ranks, *self.readers]

    def train(self) -> None:
        """Change the weights of all ranks; all actors run when this returns."""
        self.step += 1
        ray.get([rank.train.remote() for rank in self.ranks] + [reader.pid.remote() for reader in self.readers])

    def publish(self) -> None:
        """Send without readers."""
        ray.get([rank.send.remote(0) for rank in self.ranks])

    def move(self) -> None:
        """Send the weights of all ranks and wait until all readers have them."""
        if self.way.together:
            ray.get([rank.send.remote(0) for rank in self.ranks] + [reader.receive.remote() for reader in self.readers])
            return
        parts = range(self.case.parts if self.way.by_part else 1)
        sent = [[rank.send.remote(part) for rank in self.ranks] for part in parts]
        ray.get([reader.receive.remote(*sent[i % len(parts)]) for i, reader in enumerate(self.readers)])

    def check(self) -> None:
        """Compare the weights of all readers with those of the last step."""
        ray.get([reader.check.remote(self.step) for reader in self.readers])

    def close(self) -> None:
        """End the actors and remove what they left."""
        shutil.rmtree(self.home)
        for actor in self.actors:
            ray.kill(actor)
        if self.is_raylane:
            weights.drop(self.home)


class Contender:
    """One contender in one case."""

    def __init__(self, label: str, case: Case, deployment: Deployment) -> None:
        self.label, self.case, self.deployment = label, case, deployment
        self.measured = deployment.ranks if case.workload == BLOCKED else deployment.readers
        if label == MEMCPY:
            ray.get([actor.prepare_memcpy.remote() for actor in self.measured])

    @property
    def name(self) -> str:
        """Key of this contender among all of its group."""
        return f"{self.case.name} {self.label}"

    @property
    def pids(self) -> Sequence[int]:
        """Return the IDs of all its processes."""
        return self.deployment.pids

    def ready(self) -> None:
        """Do what comes before a sample and is not measured."""
        if self.label == MEMCPY:
            ray.get([actor.pid.remote() for actor in self.measured])
            return
        self.deployment.train()
        if self.case.workload in (COPIED, MAPPED):
            self.deployment.publish()
        if self.case.workload == MAPPED:
            ray.get([reader.prefetch.remote() for reader in self.measured])

    def sample(self) -> list[float]:
        """Return the microseconds of one sample; of each reader where readers map."""
        if self.case.workload == MOVED:
            return [measure.timed(self.deployment.move)]
        begin_s = time.monotonic() + DELAY_S
        methods = [actor.memcpy if self.label == MEMCPY else actor.timed for actor in self.measured]
        times: list[float] = ray.get([method.remote(begin_s) for method in methods])
        return times if self.case.workload == MAPPED else [max(times)]

    def check(self) -> None:
        """Compare what has arrived with what was published."""
        if self.label == MEMCPY:
            return
        if self.case.workload == BLOCKED:
            ray.get([reader.receive.remote() for reader in self.deployment.readers])
        self.deployment.check()

    def memory(self, kind: str) -> dict[str, int]:
        """Return the bytes of each process in the table of /proc/PID/status, or the Pss."""
        names = [f"rank {i}" for i in range(RANKS)] + [f"reader {i}" for i in range(self.case.readers)]
        names += [f"service {i}" for i in range(len(self.pids) - len(names))]
        return {name: memory_of(pid, kind) for name, pid in zip(names, self.pids, strict=True)}


def process_id(_: object) -> int:
    """Return the ID of the process of an actor."""
    import os

    return os.getpid()


def memory_of(pid: int, kind: str) -> int:
    """Return the bytes of a process: `VmHWM` (peak), `RssAnon` (its own), `Pss` (with its share of shared pages)."""
    with open(f"/proc/{pid}/{'smaps_rollup' if kind == 'Pss' else 'status'}") as file:
        (line,) = (line for line in file if line.startswith(f"{kind}:"))
    return int(line.split()[1]) * 1024


def forget_peak(pid: int) -> None:
    """Let the peak of a process's memory begin anew (proc(5), clear_refs)."""
    with open(f"/proc/{pid}/clear_refs", "w") as file:
        file.write("5")


def start(case: Case, names: Sequence[str], stack: contextlib.ExitStack) -> list[Contender]:
    """Start the contenders of a case; `stack` ends them. A memcpy runs in the processes of raylane."""
    deployments = {name: Deployment(name, case) for name in names if name != MEMCPY}
    for deployment in deployments.values():
        stack.callback(deployment.close)
    for deployment in deployments.values():
        deployment.start()
    return [Contender(name, case, deployments[RAYLANE if name == MEMCPY else name]) for name in names]
