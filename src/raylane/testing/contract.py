"""Contract tests of a transport, for the built-in transports and for those of other packages.

    class TestMyBackend(BackendContract):
        name = "my-backend"

Run with pytest in a process connected to Ray, on one machine. The source of the values is an actor. For a transport
that works only within one process, set `within_process = True`; the source is then the test's own process.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
import ray
import torch

from raylane.core.deadline import Deadline
from raylane.errors import SourceLostError, TensorFreedError, TransportError
from raylane.transport.api import put
from raylane.transport.backends.registry import backends
from raylane.transport.link.endpoint import endpoint
from raylane.transport.read.redeem import redeem
from raylane.transport.read.unpickling import Pending, collect

SIZES = (0, 1, 7, 4096, 65_535, 65_536, 1_000_001, 20_000_000)


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Return a uint8 tensor [nbytes] of pseudorandom bytes that depend on the seed."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


class SourceActor:
    """Actor that publishes values."""

    def publish(self, sizes: list[int], transport: str, device: str) -> list[Any]:
        """Publish one tensor per size, and return the ref in a list, so that Ray does not redeem it."""
        value = [pattern(nbytes, seed).to(device) for seed, nbytes in enumerate(sizes)]
        return [put(value, tensor_transport=transport)]

    def pid(self) -> int:
        """Return the pid of this process."""
        import os

        return os.getpid()


class BackendContract:
    """Tests of every property of `raylane.transport.backends.base.Backend` that one machine can show."""

    name: ClassVar[str]
    within_process: ClassVar[bool] = False
    published_as: ClassVar[str] = ""
    """Transport for which values are published, if it differs from `name`."""
    device: ClassVar[str] = "cpu"
    """Device of the published tensors, such as "cuda"."""
    actor_options: ClassVar[dict[str, Any]] = {"num_cpus": 0}
    """Options of Ray for source actors; for a device, `num_gpus` must be among them."""

    source: ClassVar[Any] = None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _one_source(cls) -> Iterator[None]:
        """Start the source process once for the suite, because a start takes seconds."""
        if not cls.within_process:
            cls.source = cls.start_source()
        yield
        cls.source = None

    @classmethod
    def start_source(cls) -> Any:
        """Start a source actor and wait until it is ready."""
        source: Any = ray.remote(**cls.actor_options)(SourceActor).remote()
        ray.get(source.__ray_ready__.remote())
        return source

    def publish(self, sizes: list[int], source: Any = None) -> Any:
        """Return a ref to a list of patterns of these sizes."""
        transport = self.published_as or self.name
        if self.within_process:
            return SourceActor().publish(sizes, transport, self.device)[0]
        return ray.get((source or self.source).publish.remote(sizes, transport, self.device))[0]

    def pending(self, ref: Any) -> Pending:
        """Return the unredeemed ticket of a ref."""
        value = collect([ref], 60)[0]
        assert type(value) is Pending, f"a value of {self.name} went inline: {type(value)}"
        return value

    def redeem(self, pending: Pending, timeout_s: float = 60) -> Any:
        """Fetch a value over the tested transport; return it in host memory."""
        value = redeem(pending.ticket, pending.skeleton, self.name, Deadline(timeout_s), may_call_ray=True)
        return value if self.device == "cpu" else [tensor.cpu() for tensor in value]

    def test_registry_has_the_backend_with_a_summary(self) -> None:
        backend = backends()[self.name]
        assert backend.name == self.name
        assert backend.capability.summary
        assert backend.capability.same_process or backend.capability.same_host or backend.capability.across_hosts

    def test_fetch_of_every_size_returns_the_exact_bytes(self) -> None:
        ref = self.publish(list(SIZES))
        value = self.redeem(self.pending(ref))
        for seed, (nbytes, tensor) in enumerate(zip(SIZES, value, strict=True)):
            assert torch.equal(tensor, pattern(nbytes, seed)), nbytes

    def test_fetch_of_1500_blocks_returns_all_of_them(self) -> None:
        ref = self.publish([100] * 1500)
        value = self.redeem(self.pending(ref))
        assert all(torch.equal(tensor, pattern(100, seed)) for seed, tensor in enumerate(value))

    def test_write_to_a_result_leaves_later_results_alone(self) -> None:
        ref = self.publish([100_000])
        pending = self.pending(ref)
        self.redeem(pending)[0].fill_(1)
        again = self.redeem(pending)[0]
        assert (
            torch.equal(again, pattern(100_000, 0)) is not self.within_process
        )  # within the process the result is the source's own tensor

    def test_fetch_by_several_threads_returns_the_same_bytes(self) -> None:
        ref = self.publish([3_000_000])
        pending = self.pending(ref)
        with ThreadPoolExecutor(4) as pool:
            values = list(pool.map(lambda _: self.redeem(pending), range(12)))
        assert all(torch.equal(value[0], pattern(3_000_000, 0)) for value in values)

    def first_error(self, pending: Pending) -> Exception:
        """Read until a read fails, which must happen within 30 s, and return the error."""
        deadline = time.monotonic() + 30
        while True:
            gc.collect()
            try:
                self.redeem(pending)
            except TransportError as error:
                return error
            assert time.monotonic() < deadline, "still readable"

    def test_fetch_of_a_freed_value_raises_tensor_freed(self) -> None:
        ref = self.publish([100_000])
        pending = self.pending(ref)
        del ref
        error = self.first_error(pending)
        assert type(error) is TensorFreedError
        assert pending.ticket.origin().label in str(error)

    def test_fetch_from_a_dead_source_raises_source_lost(self) -> None:
        if self.within_process:
            return  # a dead source would be a dead reader as well
        source = self.start_source()
        ref = self.publish([100_000], source)  # kept: the source would free the value before it dies
        pending = self.pending(ref)
        ray.kill(source)
        error = self.first_error(pending)
        assert type(error) is SourceLostError, error
        assert pending.ticket.origin().label in str(error)

    def test_repeated_fetches_start_no_more_threads(self) -> None:
        ref = self.publish([100_000])
        pending = self.pending(ref)
        self.redeem(pending)
        before = threading.active_count()
        for _ in range(20):
            self.redeem(pending)
        assert threading.active_count() <= before + 1

    def test_fetch_increments_the_counter(self) -> None:
        ref = self.publish([100_000])
        pending = self.pending(ref)
        before = endpoint().counts[self.name]
        self.redeem(pending)
        assert endpoint().counts[self.name] == before + 1

    def test_refusal_between_unrelated_places_names_the_host(self) -> None:
        """Check that the transport accepts two unrelated places, or explains why it cannot connect them."""
        ref = self.publish([100_000])
        source = self.pending(ref).ticket.origin()
        elsewhere = type(source.place)("another-boot", 1, 1, 12345, 1, 1, "elsewhere")
        refusal = backends()[self.name].refusal(source, elsewhere)
        assert refusal is None or "elsewhere" in refusal
        assert backends()[self.name].capability.across_hosts == (refusal is None)
