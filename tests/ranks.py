"""Ranks of a fine-tuning run without Ray: plain processes, each of which runs functions on its own `SftWorker`.

`only_worker` makes the calling process the one rank of a run. The processes of `Ranks` are forks of a server that has
imported torch and transformers once, so sixteen of them start about as fast as one.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pytest
from tests.forkservers import CONTEXT, Server
from torch.distributed import TCPStore

DEADLINE_S = 240.0
PRELOADED = ["raylane.sft.run.worker", *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen3", "llama"))]
_server = Server(PRELOADED)


def sft_worker() -> Any:
    """Return the worker of this process for fine-tuning."""
    from raylane.sft.run.worker import SftWorker

    return SftWorker("cpu")


def _serve(rank: int, world: int, port: int, pipe: Any, make: Callable[[], Any]) -> None:
    """Run functions that arrive on `pipe` in a process that is one rank."""
    import ray

    os.environ.update(_variables(rank, world, port))
    ray.init = _refuse_ray  # tests of ranks do not run for a change in what acts on Ray only
    worker = make()
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            pipe.send((True, function(worker, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    worker.teardown()


def _refuse_ray(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a rank of a test without Ray starts Ray")


@contextmanager
def only_worker(device_type: str = "cpu") -> Iterator[Any]:
    """Make this process the only rank of a run for a `with` block, and give its worker."""
    from raylane.sft.run.worker import SftWorker

    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _variables(0, 1, store.port).items():
            patch.setenv(name, value)
        worker = SftWorker(device_type)
        yield worker
        worker.teardown()


def _variables(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the variables by which torch.distributed finds the store and its rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


class Ranks:
    """`world` processes, each with one worker; a context manager that ends them."""

    def __init__(self, world: int, make: Callable[[], Any] = sft_worker) -> None:
        self.is_usable = True
        """False after a failure: other ranks may still wait for the one that failed."""
        self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        pipes = [CONTEXT.Pipe() for _ in range(world)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            _server.start(_serve, rank, world, self._store.port, theirs, make) for rank, (_, theirs) in enumerate(pipes)
        ]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(worker, *args)` on every rank; return the results, or raise the first failure."""
        self.is_usable = False
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + DEADLINE_S
        while len(answers) < len(self._pipes):
            missing = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = multiprocessing.connection.wait(list(missing), deadline - time.monotonic())
            assert ready, f"ranks {sorted(missing.values())} did not answer within {DEADLINE_S} s"
            for pipe in ready:
                ok, answers[missing[pipe]] = pipe.recv()
                # At once: the other ranks may wait for this one for ever.
                assert ok, f"rank {missing[pipe]}: {answers[missing[pipe]]}"
        self.is_usable = True
        return [answers[rank] for rank in range(len(self._pipes))]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kind is None and self.is_usable and process.is_alive():
                pipe.send(None)
        for process in self._processes:
            if kind is None and self.is_usable:
                process.join(60)
            process.kill()
            process.join(10)


class RankGroups:
    """Groups of ranks by their number, made when they are first used; a context manager that ends them."""

    def __init__(self) -> None:
        self._groups: dict[int, Ranks] = {}

    def of(self, world: int) -> Ranks:
        """Return the group of so many ranks; a new one after a failure."""
        if world in self._groups and not self._groups[world].is_usable:
            self._groups.pop(world).__exit__(None, None, None)
        if world not in self._groups:
            self._groups[world] = Ranks(world)
        return self._groups[world]

    def __enter__(self) -> RankGroups:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for ranks in self._groups.values():
            ranks.__exit__(kind, error, trace)
