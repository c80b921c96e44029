"""raylane as a tensor transport of Ray: programs that name it where they named another one."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raylane
from raylane.errors import SourceLostError

pytestmark = pytest.mark.usefixtures("cluster")
N = 200_000


@functools.cache
def trainer_class() -> Any:
    """Register, and define a class: Ray checks the names of transports in its decorators."""
    raylane.register_with_ray()
    raylane.register_with_ray("raylane_tcp", tensor_transport="tcp")

    class Trainer:
        """A program that is written for Ray's direct transport."""

        @ray.method(tensor_transport="RAYLANE")
        def weights(self) -> torch.Tensor:
            return torch.arange(N, dtype=torch.float32)

        @ray.method(tensor_transport="raylane")
        def nested(self) -> dict[str, Any]:
            return {"a": torch.ones(N), "b": [torch.zeros(3), {"c": torch.full((N,), 2.0)}], "d": "text"}

        @ray.method(tensor_transport="RAYLANE_TCP")
        def by_tcp(self) -> torch.Tensor:
            return torch.full((N,), 5.0)

        def put_total(self, other: Any) -> float:
            raylane.register_with_ray()  # Ray may register it here later than it runs this method
            ref = ray.put(torch.full((N,), 3.0), _tensor_transport="RAYLANE")
            return float(ray.get(other.total.remote(ref)))

        def total(self, value: Any) -> float:
            if isinstance(value, dict):
                return float(value["a"].sum() + value["b"][0].sum() + value["b"][1]["c"].sum())
            return float(value.double().sum())

        def stats(self) -> dict[str, Any]:
            return raylane.stats()

        def pid(self) -> int:
            return os.getpid()

    return ray.remote(num_cpus=0)(Trainer)


TOTAL = float(torch.arange(N, dtype=torch.float64).sum())


@contextlib.contextmanager
def trainers(count: int = 2) -> Iterator[list[Any]]:
    actors = [trainer_class().remote() for _ in range(count)]
    try:
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)


def test_method_and_nested_values_reach_another_actor(eventually: Any) -> None:
    with trainers() as (a, b):
        assert ray.get(b.total.remote(a.weights.remote())) == TOTAL
        assert ray.get(b.total.remote(a.nested.remote())) == 3.0 * N
        assert ray.get(b.stats.remote())["host"] == 2
        # Ray frees the values after the last ref.
        gc.collect()
        eventually(lambda: ray.get(a.stats.remote())["entries"] == 0)


def test_put_in_an_actor_reaches_another_actor(eventually: Any) -> None:
    with trainers() as (a, b):
        assert ray.get(a.put_total.remote(b)) == 3.0 * N
        eventually(lambda: ray.get(a.stats.remote())["entries"] == 0)


def test_driver_gets_a_value_into_its_own_tensor() -> None:
    with trainers(1) as (a,):
        ref, target = a.weights.remote(), torch.zeros(N)
        ray.experimental.set_target_for_ref(ref, [target])
        assert ray.get(ref).data_ptr() == target.data_ptr()
        assert float(target.double().sum()) == TOTAL


def test_driver_gets_values(eventually: Any) -> None:
    with trainers(1) as (a,):
        ref = a.nested.remote()
        value = ray.get(ref)
        assert value["d"] == "text"
        assert torch.equal(value["b"][1]["c"], torch.full((N,), 2.0))
        assert ray.get(a.stats.remote())["entries"] == 1
        del ref, value
        gc.collect()
        eventually(lambda: ray.get(a.stats.remote())["entries"] == 0)


def test_other_name_uses_the_transport_it_was_registered_for() -> None:
    with trainers() as (a, b):
        assert ray.get(b.total.remote(a.by_tcp.remote())) == 5.0 * N
        assert ray.get(b.stats.remote())["tcp"] == 1


def test_killed_source_raises_source_lost(eventually: Any) -> None:
    with trainers() as (a, b):
        ref = a.weights.remote()
        pid = ray.get(a.pid.remote())
        ray.kill(a)
        eventually(lambda: not os.path.exists(f"/proc/{pid}"))
        with pytest.raises(SourceLostError, match="Trainer"):
            ray.get(ref, timeout=30)
        with pytest.raises(SourceLostError, match="Trainer"):
            ray.get(b.total.remote(ref), timeout=30)


def test_mistakes_in_registration_are_explained() -> None:
    trainer_class()
    raylane.register_with_ray("raylane")  # again
    with pytest.raises(ValueError, match=r"'RAYLANE' is the name of another .* for auto"):
        raylane.register_with_ray("RAYLANE", tensor_transport="tcp")
    with pytest.raises(TypeError, match="got 3"):
        raylane.register_with_ray(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown"):
        raylane.register_with_ray(tensor_transport="carrier-pigeon")
