"""Contenders of the benchmark `transfer`: transports of raylane and Ray, and bare copies as a lower limit."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from benchmarks import measure
from benchmarks.transfer.actors import Consumer, Copier, RawNixl, RawSocket, producer_class
from benchmarks.transfer.cases import BASELINE, OWN_COPY, OWN_MEMORY, Case
from raylane.transport.api import method

SUBMITS = 20
"""Calls whose submission is one sample."""
GPU_PART = 0.05
"""Part of the GPU that each actor gets: all share it."""
START_S = 1.0
"""Time that an actor needs to start where the case measures calls of a starting actor."""


def unavailable(name: str) -> str | None:
    """Return why a contender cannot take part here, or None."""
    if name.endswith("nixl") or name.startswith("nixl"):
        return None if importlib.util.find_spec("nixl") else "nixl is not installed"
    return None


class Contender:
    """Actors with one transport. A subclass does the work of one group of cases."""

    def __init__(self, name: str, case: Case) -> None:
        self.name = name
        self.device = "cuda" if case.cuda else "cpu"
        self.actors: list[Any] = []
        self.pids: list[int] = []
        self.start(case)
        self.pids = ray.get([actor.pid.remote() for actor in self.actors])

    def start(self, case: Case) -> None:
        """Start the actors."""
        raise NotImplementedError

    def prepare(self, case: Case) -> None:
        """Get ready for a case of the group."""

    def sample(self, case: Case, count: int) -> list[float]:
        """Return the microseconds of `count` samples."""
        raise NotImplementedError

    def close(self) -> None:
        """End the actors."""
        for actor in self.actors:
            ray.kill(actor)

    def actor(self, cls: Any, *args: Any) -> Any:
        """Start an actor with the options that the transport needs."""
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": GPU_PART if self.device == "cuda" else 0}
        if ":rdt" in self.name:  # raylane and the object store use ordinary actors
            options["enable_tensor_transport"] = True
        handle = ray.remote(**options)(cls).remote(*args)
        self.actors.append(handle)
        return handle


def _decorator(name: str) -> Callable[[Any], Any]:
    if name in (BASELINE, "ray:plain", OWN_MEMORY, OWN_COPY):
        return lambda function: function
    library, _, transport = name.partition(":")
    if library == "raylane":
        return method(tensor_transport=transport)
    decorate: Callable[[Any], Any] = ray.method(tensor_transport=transport.removeprefix("rdt-"))
    return decorate


class Pass(Contender):
    """A producer returns a value, a consumer gets it as an argument."""

    def start(self, case: Case) -> None:
        """Start a producer and as many consumers as the case has readers."""
        self.producer = self.actor(producer_class(_decorator(self.name)), self.device)
        readers = case.count if case.workload == "fanout" else 1
        self.consumers = [self.actor(Consumer, self.device) for _ in range(readers)]
        if self.name == "ray:rdt-gloo":
            from ray.experimental.collective import create_collective_group

            create_collective_group(self.actors, backend="torch_gloo")

    def prepare(self, case: Case) -> None:
        """Let the producer hold the value of the case, and nothing else."""
        count = case.count if case.workload == "pass" else 1
        mapped = case.mapped and self.name.startswith("raylane")
        ray.get(self.producer.hold.remote(0 if case.fresh else case.nbytes, count, mapped))

    def sample(self, case: Case, count: int) -> list[float]:
        """Return the microseconds of single calls."""

        def pass_on() -> None:
            tensor = self.producer.fresh.remote(case.nbytes, case.count) if case.fresh else self.producer.held.remote()
            ray.get(self.consumers[0].total.remote(tensor))

        def fan_out() -> None:
            tensor = self.producer.held.remote()
            ray.get([consumer.ends.remote(tensor) for consumer in self.consumers])

        call = fan_out if case.workload == "fanout" else pass_on
        return [measure.timed(call) for _ in range(count)]


class OwnMemory(Pass):
    """The same calls without a transfer: the consumer sums a tensor of its own, or a copy that it makes of it."""

    def prepare(self, case: Case) -> None:
        """Let the consumer hold the tensor of the case, and the producer a small one."""
        ray.get([self.producer.hold.remote(4, 1), self.consumers[0].hold.remote(case.nbytes)])

    def sample(self, case: Case, count: int) -> list[float]:
        """Return the microseconds of single calls."""

        def pass_on() -> None:
            ray.get(self.consumers[0].total_of_own.remote(self.producer.held.remote(), self.name == OWN_COPY))

        return [measure.timed(pass_on) for _ in range(count)]


class Get(Contender):
    """A consumer reads a held value again and again; it measures by itself, so calls are not part of the time."""

    LIBRARIES = ("raylane", "rdt", "object_store")

    def start(self, case: Case) -> None:
        """Start a producer and a consumer."""
        self.producer = self.actor(producer_class(_decorator(self.name)))
        self.consumer = self.actor(Consumer)
        self.library = next(name for name in self.LIBRARIES if name in self.name)

    def prepare(self, case: Case) -> None:
        """Publish the value."""
        ray.get(self.producer.hold.remote(case.nbytes, 1))
        publish = self.producer.snapshot if case.shared else self.producer.held
        self.refs = [publish.remote()]
        ray.wait(self.refs)

    def sample(self, case: Case, count: int) -> list[float]:
        """Return the microseconds of reads; one read before them is not counted."""
        call = self.consumer.read.remote(self.refs, case.nbytes, case.into, self.library, count + 1)
        times: list[float] = ray.get(call)[1:]
        return times


class Copy(Contender):
    """Bare copies in one process."""

    def start(self, case: Case) -> None:
        """Start the process."""
        self.copier = self.actor(Copier)

    def prepare(self, case: Case) -> None:
        """Allocate the memory."""
        ray.get(self.copier.prepare.remote(case.nbytes, case.shared))

    def sample(self, case: Case, count: int) -> list[float]:
        """Return the microseconds of copies; one copy before them is not counted."""
        times: list[float] = ray.get(self.copier.copy.remote(count + 1))[1:]
        return times


class Raw(Contender):
    """Bare transfers between two processes, by a TCP socket or by NIXL."""

    def start(self, case: Case) -> None:
        """Start both processes."""
        cls = RawSocket if self.name == "socket:raw" else RawNixl
        self.source, self.reader = self.actor(cls), self.actor(cls)

    def prepare(self, case: Case) -> None:
        """Connect the two, with memory of the case's size."""
        if self.name == "socket:raw":
            address = ray.get(self.source.serve.remote(case.nbytes))
            ray.get(self.reader.connect.remote(address, case.nbytes))
        else:
            ray.get(self.reader.prepare.remote(case.nbytes))
            ray.get(self.reader.connect.remote(*ray.get(self.source.prepare.remote(case.nbytes))))

    def sample(self, case: Case, count: int) -> list[float]:
        """Return the microseconds of transfers; one before them is not counted."""
        times: list[float] = ray.get(self.reader.read.remote(count + 1))[1:]
        return times


class Submit(Contender):
    """Submission of calls, without waiting for them."""

    def start(self, case: Case) -> None:
        """Start the actor, unless the case starts one for each sample."""
        self.cls = producer_class(_decorator(self.name))
        if not case.starting:
            self.producer = self.actor(self.cls)

    def prepare(self, case: Case) -> None:
        """Let the producer hold the value."""
        if not case.starting:
            ray.get(self.producer.hold.remote(case.nbytes, 1))

    def sample(self, case: Case, count: int) -> list[float]:
        """Return the mean microseconds of one `.remote()`, for each sample of SUBMITS calls."""
        means = []
        for _ in range(count):
            producer = ray.remote(num_cpus=0)(self.cls).remote(start_s=START_S) if case.starting else self.producer
            try:
                began = time.perf_counter()
                refs = [producer.held.remote() for _ in range(SUBMITS)]
                means.append((time.perf_counter() - began) / SUBMITS * 1e6)
                ray.wait(refs, num_returns=len(refs))
                del refs  # released before the producer is killed and before the next sample
            finally:
                if case.starting:
                    ray.kill(producer)
        return means


WORKLOADS: dict[str, type[Contender]] = {"pass": Pass, "fanout": Pass, "get": Get, "submit": Submit}
BARE: dict[str, type[Contender]] = {
    OWN_MEMORY: OwnMemory,
    OWN_COPY: OwnMemory,
    "memcpy": Copy,
    "socket:raw": Raw,
    "nixl:raw": Raw,
}


def start(case: Case, names: Sequence[str]) -> list[Contender]:
    """Start the contenders of a group of cases."""
    return [BARE.get(name, WORKLOADS[case.workload])(name, case) for name in names]
