"""Plain worker classes for the tests of groups; the workers' processes import this module."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import torch


class Recorder:
    """A worker that reports its rank, returns its arguments, and fails on request."""

    def __init__(self, fail_on_rank: int | None = None) -> None:
        self.rank = int(os.environ["RANK"])
        self.sent_back = 0
        self.echoes = 0
        if self.rank == fail_on_rank:
            raise RuntimeError(f"rank {self.rank} does not want to start")

    def environment(self, names: list[str]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def echo(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        self.echoes += 1
        return self.rank, args, kwargs

    def total(self, data: Any, scale: int = 1) -> int | None:
        return None if data is None else int(data["ids"].sum()) * scale

    def costly_result(self) -> Undeliverable:
        return Undeliverable(self.rank)

    def calls(self) -> int:
        """Return the number of calls of `echo`."""
        return self.echoes

    def lazy_rows(self) -> Any:
        return (row for row in range(3))

    def fail_oddly(self) -> None:
        raise Unsendable("odd")

    def fail(self, rank: int) -> int:
        if self.rank == rank:
            raise KeyError("the reason")
        return self.rank

    def die(self, rank: int) -> int:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.rank

    def die_or_hang(self, rank: int) -> None:
        self.die(rank)
        threading.Event().wait()

    def hang(self) -> None:
        threading.Event().wait()

    def mean_over_ranks(self, value: float) -> float:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        tensor = torch.tensor([value])
        dist.all_reduce(tensor)
        return tensor.item() / dist.get_world_size()

    def leave_process_group(self) -> None:
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()


class Undeliverable:
    """A result that can be pickled on rank 0 only, to detect that another rank sends its result."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __getstate__(self) -> dict[str, int]:
        if self.rank != 0:
            raise AssertionError(f"the result of rank {self.rank} was sent though nobody asked for it")
        return {"rank": self.rank}


class NeverReady:
    """A worker whose constructor waits until its process is killed."""

    def __init__(self) -> None:
        threading.Event().wait()


class Unsendable(Exception):
    """An exception that cannot be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise ValueError("no way")
