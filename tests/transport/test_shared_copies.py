"""Large values with several readers on one host: they share one copy, on a real Ray."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import numpy as np
import pytest
import ray
import torch
from tests.process_tools import stop

import raylane
from raylane.errors import TensorFreedError, TensorMutatedError

pytestmark = pytest.mark.usefixtures("tidy")
N = 2_000_000  # 8 MB


class Maker:
    def __init__(self) -> None:
        self.kept = torch.arange(N, dtype=torch.float32)

    @raylane.method
    def hold(self) -> Any:
        return [self.kept, self.kept[10:20], torch.ones(N)]

    @raylane.method(on_mutation="allow")
    def live(self) -> torch.Tensor:
        return self.kept

    @raylane.method(on_mutation="error")
    def strict(self) -> torch.Tensor:
        return self.kept

    @raylane.method
    def counter(self) -> Any:
        self.array = np.zeros(N, dtype=np.float32)
        return {"array": self.array, "view": torch.ones(3)}

    @raylane.method(on_mutation="error")
    def strict_array(self) -> Any:
        return np.ones(N, dtype=np.float32)

    def count(self) -> None:
        self.array += 1

    def write(self, value: float) -> None:
        self.kept[0] = value

    def release(self) -> None:
        self.kept.untyped_storage().resize_(0)

    def refill(self) -> None:
        self.kept = torch.arange(N, dtype=torch.float32)

    def pid(self) -> int:
        return os.getpid()

    def stats(self) -> dict[str, Any]:
        return raylane.stats()


class Reader:
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def read(self, refs: list[Any]) -> tuple[float, int]:
        """Keep a value, and return its sum and the number of shared copies that this process has mapped."""
        value = raylane.get(refs[0])
        self.kept.append(value)
        first = value[0] if isinstance(value, list) else value
        return float(first.double().sum()), raylane.stats().get("shared", 0)

    def write(self, value: float) -> bool:
        """Write to the first tensor, and tell whether its view sees the write."""
        first, view, _ = self.kept[-1]
        first[10] = value
        return bool(view[0] == value)

    def sum(self) -> float:
        return float(self.kept[-1][0].double().sum())

    def forget(self) -> None:
        self.kept.clear()

    def stats(self) -> dict[str, Any]:
        return raylane.stats()


class Crew:
    def __init__(self) -> None:
        self.maker: Any = ray.remote(num_cpus=0)(Maker).remote()
        self.readers: list[Any] = [ray.remote(num_cpus=0)(Reader).remote() for _ in range(3)]
        ray.get([one.__ray_ready__.remote() for one in (self.maker, *self.readers)])

    def makers(self) -> list[Any]:
        ray.get([reader.forget.remote() for reader in self.readers])
        return [self.maker, *self.readers]


SUM = float(torch.arange(N, dtype=torch.float64).sum())


def shared(crew: Any) -> list[int]:
    return [ray.get(reader.stats.remote()).get("shared", 0) for reader in crew.readers]


@pytest.mark.claim("transport", "readers on the source's host share one copy of a tensor, and write to their own")
def test_later_readers_share_a_copy_and_write_to_their_own(crew: Any) -> None:
    ref = crew.maker.hold.remote()
    before = shared(crew)
    sums = [ray.get(reader.read.remote([ref]))[0] for reader in crew.readers]
    assert sums == [SUM] * 3
    assert [now - then for now, then in zip(shared(crew), before, strict=True)] == [0, 1, 1]
    assert ray.get(crew.readers[1].write.remote(1e6))
    assert ray.get(crew.readers[2].sum.remote()) == SUM
    assert ray.get(crew.readers[1].sum.remote()) == SUM - 10 + 1e6
    assert float(raylane.get(ref)[0].double().sum()) == SUM


def test_readers_at_the_same_time_get_the_value(crew: Any) -> None:
    for _ in range(5):
        ref = crew.maker.hold.remote()
        assert [found[0] for found in ray.get([reader.read.remote([ref]) for reader in crew.readers])] == [SUM] * 3
        del ref
        ray.get([reader.forget.remote() for reader in crew.readers])


def test_freed_values_leave_readers_their_content(crew: Any, eventually: Any) -> None:
    for value in (1.0, 2.0, 3.0):
        ray.get(crew.maker.write.remote(value))
        ref = crew.maker.hold.remote()
        for reader in crew.readers[:2]:
            assert ray.get(reader.read.remote([ref]))[0] == SUM + value
        del ref
        eventually(lambda: ray.get(crew.maker.stats.remote())["entries"] == 0)
        # The copy of this value may be filled again for the next one, which must not reach this reader.
        ray.get(crew.readers[0].forget.remote())
        if value == 1.0:
            kept, crew.readers[1] = crew.readers[1], crew.readers[2]
            crew.readers[2] = kept
    assert ray.get(crew.readers[2].sum.remote()) in (SUM + 1.0, SUM + 2.0)
    ray.get(crew.maker.refill.remote())


@pytest.mark.claim("transport", "memory of copies that readers of a host share is used again")
def test_copies_are_used_again(crew: Any, eventually: Any) -> None:
    for _ in range(6):
        ref = crew.maker.hold.remote()
        ray.get([reader.read.remote([ref]) for reader in crew.readers])
        ray.get([reader.forget.remote() for reader in crew.readers])
        del ref
        eventually(lambda: ray.get(crew.maker.stats.remote())["entries"] == 0)
    idle = ray.get(crew.maker.stats.remote())["shared_idle_bytes"]
    assert 16_000_000 <= idle <= 3 * 20_000_000


def test_changed_and_freed_memory_is_noticed(crew: Any) -> None:
    ref = crew.maker.strict.remote()
    for reader in crew.readers[:2]:
        assert ray.get(reader.read.remote([ref]))[0] == SUM
    ray.get(crew.maker.write.remote(5.0))
    # The shared copy still has the published content, and so may be returned; a new copy may not.
    strict = crew.maker.strict.remote()
    ray.get(crew.maker.write.remote(6.0))
    for reader in crew.readers[:2]:
        with pytest.raises(TensorMutatedError):
            ray.get(reader.read.remote([strict]))
    loose = crew.maker.hold.remote()
    raylane.get(loose)
    ray.get(crew.maker.write.remote(7.0))
    with pytest.warns(UserWarning, match="written to in place"):
        assert raylane.get(loose)[0][0] == 7
    ray.get(crew.maker.release.remote())
    with pytest.raises(TensorFreedError), warnings.catch_warnings():
        raylane.get(loose)
    ray.get(crew.maker.refill.remote())


def test_readers_of_a_live_tensor_see_what_is_in_it(crew: Any) -> None:
    ref = crew.maker.live.remote()
    for value in (3.0, 4.0, 5.0):
        ray.get(crew.maker.write.remote(value))
        assert raylane.get(ref)[0] == value
    ray.get(crew.maker.refill.remote())


def test_source_that_does_not_answer_is_read_without_it(cluster: None) -> None:
    maker: Any = ray.remote(num_cpus=0)(Maker).remote()
    ref = maker.hold.remote()
    assert float(raylane.get(ref)[2].sum()) == N
    pid = ray.get(maker.pid.remote())
    stop(pid)
    try:
        assert float(raylane.get(ref)[2].sum()) == N
    finally:
        os.kill(pid, signal.SIGCONT)
    assert any("shared copy" in name for name in raylane.stats()["blocked"])


def test_values_outlive_a_killed_source(cluster: None, eventually: Any) -> None:
    maker: Any = ray.remote(num_cpus=0)(Maker).remote()
    ref = maker.hold.remote()
    values = [raylane.get(ref) for _ in range(3)]
    pid = ray.get(maker.pid.remote())
    ray.kill(maker)
    eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    assert [float(value[0].double().sum()) for value in values] == [SUM] * 3


def test_arrays_are_read_as_they_are_unless_checked(crew: Crew) -> None:
    ref = crew.maker.counter.remote()
    for number in range(4):
        for transport in ("host", "tcp"):
            assert float(raylane.get(ref, tensor_transport=transport)["array"][7]) == number
        ray.get(crew.maker.count.remote())
    strict, before = crew.maker.strict_array.remote(), raylane.stats().get("shared", 0)
    for _ in range(3):
        assert float(raylane.get(strict)[7]) == 1
    assert raylane.stats()["shared"] == before + 2
