"""Findings that need a process of their own: another Ray session, other decorators, tasks that share a worker."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tests.transport.unpickling import FetchedWhileUnpickled

import raylane
from raylane.core.deadline import Deadline
from raylane.transport.read.redeem import redeem
from raylane.transport.read.unpickling import collect

REINIT = """
import ray, torch, raylane, threading

class Maker:
    @raylane.method
    def make(self): return torch.ones(100_000)

class User:
    def total(self, value): return float(value.sum())
    def get(self, refs, transport): return float(raylane.get(refs[0], tensor_transport=transport, timeout=20).sum())

for session in range(2):
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    maker, user = ray.remote(num_cpus=0)(Maker).remote(), ray.remote(num_cpus=0)(User).remote()
    ref = maker.make.remote()
    put = raylane.put(torch.ones(100_000))
    assert ray.get(user.total.remote(ref)) == 100_000
    for transport in ("host", "tcp", "object_store"):
        assert ray.get(user.get.remote([put], transport)) == 100_000, (session, transport)
        assert float(raylane.get(ref, tensor_transport=transport).sum()) == 100_000
    assert raylane.stats()["entries"] == 1
    del ref, put
    ray.shutdown()
print("both sessions")
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_second_ray_session_in_one_driver_starts_afresh(tmp_path: Path) -> None:
    script = tmp_path / "reinit.py"
    script.write_text(REINIT)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=540, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert "both sessions" in done.stdout


@pytest.mark.usefixtures("cluster")
class TestOnOneSession:
    def test_plain_tasks_never_share_tensors(self) -> None:
        @ray.remote(num_cpus=0)
        @raylane.method
        def produce() -> torch.Tensor:
            return torch.zeros(100_000)

        @ray.remote(num_cpus=0)
        def consume(value: torch.Tensor) -> float:
            value += 1
            return float(value[0])

        ref = produce.remote()
        assert [ray.get(consume.remote(ref)) for _ in range(6)] == [1.0] * 6

    def test_several_returns_from_anything_that_can_be_split(self) -> None:
        class Splitter:
            @raylane.method(num_returns=2)
            def sort(self) -> Any:
                return torch.arange(50_000.0).flip(0).sort()

            @raylane.method(num_returns=2)
            def stacked(self) -> Any:
                return torch.arange(100_000.0).reshape(2, 50_000)

            @raylane.method(num_returns=2)
            def nothing(self) -> Any:
                return None

            @raylane.method(num_returns=2)
            def items(self) -> Any:
                return (self.item(i) for i in range(2))

            @raylane.method
            def item(self, number: int) -> torch.Tensor:
                return torch.full((50_000,), float(number))

        splitter = ray.remote(num_cpus=0)(Splitter).remote()
        zeros, ones = ray.get(splitter.items.remote())
        assert (float(zeros.sum()), float(ones.sum())) == (0.0, 50_000.0)
        values, indices = ray.get(splitter.sort.remote())
        assert torch.equal(values, torch.arange(50_000.0))
        assert torch.equal(indices, torch.arange(50_000).flip(0))
        first, second = ray.get(splitter.stacked.remote())
        assert torch.equal(torch.cat([first, second]), torch.arange(100_000.0))
        with pytest.raises(TypeError, match="NoneType"):
            ray.get(splitter.nothing.remote()[0])

    @pytest.mark.slow
    def test_a_decorator_above_sees_tensors_and_is_told(self) -> None:
        import functools
        import warnings

        def logged(method: Any) -> Any:
            @functools.wraps(method)
            def outer(self: Any, *args: Any) -> Any:
                assert all(isinstance(arg, torch.Tensor) for arg in args), args
                result = method(self, *args)
                assert isinstance(result, torch.Tensor), result
                return result

            return outer

        class Logged:
            def watch(self) -> None:
                self.caught: list[str] = []
                warnings.showwarning = lambda message, *_, **__: self.caught.append(str(message))
                warnings.simplefilter("always")

            def seen(self) -> list[str]:
                return self.caught

            @logged
            @raylane.method
            def double(self, value: torch.Tensor) -> torch.Tensor:
                return value * 2

        actor = ray.remote(num_cpus=0)(Logged).remote()
        ray.get(actor.watch.remote())
        ref = raylane.put(torch.ones(100_000))
        assert float(ray.get(actor.double.remote(ref))[0]) == 2
        assert "on top" in ray.get(actor.seen.remote())[0]

    def test_a_local_read_leaves_the_producers_attributes_alone(self) -> None:
        tensor = torch.ones(100_000)
        tensor.step = 1  # type: ignore[attr-defined]
        ref = raylane.put(tensor)
        tensor.step = 2  # type: ignore[attr-defined]
        assert raylane.get(ref).step == 2

    def test_unpickling_that_gets_a_ref_itself_gets_its_value(self) -> None:
        ref = raylane.put(
            {"lazy": FetchedWhileUnpickled(raylane.put(torch.ones(50_000))), "tensor": torch.ones(50_000)}
        )
        assert float(raylane.get(ref)["lazy"].value.sum()) == 50_000

    @pytest.mark.slow
    def test_an_actor_that_keeps_a_put_of_its_own_may_end(self, eventually: Any) -> None:
        class Hoarder:
            @raylane.method
            def make(self) -> torch.Tensor:
                self.kept = raylane.put(torch.ones(50_000))
                return torch.ones(50_000)

        ref = ray.remote(num_cpus=0)(Hoarder).remote().make.remote()
        assert float(ray.get(ref).sum()) == 50_000
        del ref
        # `cluster` sees that the actor ends.

    def test_a_copied_view_has_no_later_content_to_warn_of(self) -> None:
        matrix = torch.zeros(500, 500)
        column = matrix[:, 3]
        ref = raylane.put({"column": column, "more": torch.ones(50_000)}, on_mutation="error")

        @ray.remote(num_cpus=0)
        def read(value: dict[str, torch.Tensor]) -> float:
            return float(value["column"][0])

        matrix.fill_(7)
        assert ray.get(read.remote(ref)) == 0

    @pytest.mark.slow
    def test_a_readers_trouble_is_its_own(self) -> None:
        class Poor:
            def read(self, refs: list[Any]) -> str:
                import resource

                pending = collect([refs[0]], 30)[0]
                redeem(pending.ticket, pending.skeleton, "host", Deadline(20), may_call_ray=True)  # while it can
                highest = max(int(name) for name in os.listdir("/proc/self/fd"))
                resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 5, 4096))
                taken: list[int] = []
                with contextlib.suppress(OSError):
                    while True:
                        taken.append(os.open("/dev/null", os.O_RDONLY))
                try:
                    redeem(pending.ticket, pending.skeleton, "host", Deadline(20), may_call_ray=True)
                except raylane.errors.TransportError as error:
                    return f"{type(error).__name__}: {error}"
                finally:
                    for descriptor in taken:
                        os.close(descriptor)
                    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
                return "it could"

        poor = ray.remote(num_cpus=0)(Poor).remote()
        said = ray.get(poor.read.remote([raylane.put(torch.ones(100_000), snapshot=True)]))
        assert said.startswith("TransportError: this process cannot take in"), said
