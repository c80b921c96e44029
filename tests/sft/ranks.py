"""Ranks of a fine-tuning run as plain processes, without Ray: each runs a function on its own `SftWorker`.

`run_ranks` waits for all of them and returns their results in the order of the ranks. Starting a process costs about
two seconds of imports, so `Ranks` keeps some processes for many functions.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore

DEADLINE_S = 240.0


def _serve(rank: int, world: int, port: int, pipe: Any) -> None:
    """Run functions that arrive on `pipe` in a process that is one rank."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    from raylane.sft.worker import SftWorker

    worker = SftWorker("cpu")
    while (task := pipe.recv()) is not None:
        function, args = task
        try:
            pipe.send((True, function(worker, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    worker.teardown()


class Ranks:
    """`world` processes, each with one worker; a context manager that ends them."""

    def __init__(self, world: int) -> None:
        self._store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(world)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, world, self._store.port, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(worker, *args)` on every rank; return the results, or raise the first failure."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(DEADLINE_S), f"rank {rank} did not answer within {DEADLINE_S} s"
            ok, value = pipe.recv()
            assert ok, f"rank {rank}: {value}"
            answers.append(value)
        return answers

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kind is None and process.is_alive():
                pipe.send(None)
        for process in self._processes:
            if kind is None:
                process.join(60)
            process.kill()
            process.join(10)
