"""Actors of the graph tests. They know nothing of graphs."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import ray

from raylane.errors import GraphClosedError
from raylane.testing.leaks import descriptors


class TwoArguments(Exception):
    """Exception that can be pickled but not unpickled, like many exceptions of libraries."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


class NoPickle(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("no pickle")


class Heavy(ValueError):
    """Exception that carries a payload."""

    def __init__(self, text: str, payload: bytes = b"") -> None:
        super().__init__(text, payload)
        self.text = text

    def __str__(self) -> str:
        return self.text


class Explosive:
    """Object that raises a BaseException when it is pickled."""

    def __reduce__(self) -> Any:
        raise SystemExit("no pickle")


class Speechless(Exception):
    """Exception whose text and repr raise."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def _speechless() -> None:
    raise Speechless


class Unreadable:
    """Object whose unpickling raises an exception that cannot be shown."""

    def __reduce__(self) -> Any:
        return _speechless, ()


class Worker:
    """Methods in every shape that a graph can call."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.calls = 0
        self.gate = threading.Event()
        self.waits = 0
        self.busy = 0
        self.overlaps = 0

    def echo(self, x: Any) -> Any:
        self.calls += 1
        return x

    def add(self, a: Any, b: Any = 0, *, times: int = 1) -> Any:
        return (a + b) * times

    def pair(self, x: Any) -> tuple[Any, Any]:
        return x, x + 1

    @ray.method(num_returns=2)
    def two(self, x: Any) -> tuple[Any, Any]:
        return x, x + 1

    @ray.method(num_returns=2)
    def declared_two(self, x: Any) -> Any:
        return x

    def grow_both(self, one: list[Any], two: dict[str, Any], x: Any) -> list[Any]:
        one.append(x)
        two["deep"][0].append(x)
        return [one, two]

    def record(self, **values: Any) -> dict[str, Any]:
        return values

    def describe(self, x: Any) -> str:
        return repr(x)

    def total(self, x: Any) -> float:
        return float(x.sum())

    def ones(self, count: int) -> Any:
        import numpy as np

        return np.ones(count)

    def shared_ones(self, count: int) -> Any:
        """Return an array that the actor keeps as well."""
        import numpy as np

        self.shared = np.ones(count)
        return self.shared

    def spoil(self) -> None:
        self.shared[:] = 7

    def forget_shared(self) -> None:
        del self.shared

    def keep(self, x: Any) -> int:
        self.kept.append(x)
        return len(self.kept)

    def drop(self) -> list[float]:
        sums = [float(x.sum()) for x in self.kept]
        self.kept.clear()
        return sums

    def fail(self, x: Any) -> Any:
        raise ValueError(f"cannot do {x}")

    def fail_strangely(self, how: str) -> Any:
        if how == "two arguments":
            raise TwoArguments("first", "second")
        if how == "no pickle":
            raise NoPickle("whatever")
        if how == "another graph":
            raise GraphClosedError("another graph was torn down")
        return Explosive() if how == "result" else how

    def fail_heavily(self, nbytes: int) -> Any:
        """Fail with an exception of this size: in its payload, or for a negative number in its text."""
        if nbytes:
            raise Heavy("heavy", bytes(nbytes)) if nbytes > 0 else Heavy("heavy " + "x" * -nbytes)
        return 0

    def unpicklable(self, x: Any) -> Any:
        return threading.Lock()

    def poison(self, x: int) -> Any:
        return Unreadable() if x else 0

    def nothing(self, x: Any = None) -> None:
        self.calls += 1

    def tick(self) -> int:
        self.calls += 1
        return self.calls

    def set_grad(self, enabled: bool) -> None:
        import torch

        torch.set_grad_enabled(enabled)

    def set_inference(self, enabled: bool) -> None:
        """Enter inference mode on the calling thread permanently."""
        import torch

        self.inference = torch.inference_mode(enabled)
        self.inference.__enter__()

    def modes(self, x: Any = None) -> tuple[bool, bool]:
        import torch

        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def count(self) -> int:
        return self.calls

    def pid(self, x: Any = None) -> int:
        return os.getpid()

    def wait(self, x: Any = None) -> Any:
        """Wait until `release`, which is an ordinary call."""
        self.waits += 1
        assert self.gate.wait(60)
        return x

    def wait_unless(self, x: Any) -> Any:
        """Return 1 at once; wait with any other value until `release`."""
        return x if x == 1 else self.wait(x)

    def fail_unless(self, x: Any) -> Any:
        """Fail for a negative value."""
        return self.fail(x) if x < 0 else x

    def empty_unless(self, x: Any) -> Any:
        return [x] if x >= 0 else []

    def release(self) -> None:
        self.gate.set()

    def started_waits(self) -> int:
        return self.waits

    def hold_again(self) -> None:
        self.gate.clear()

    def work(self, seconds: float) -> float:
        """Record if two calls of this method run at the same time."""
        self.busy += 1
        self.overlaps += self.busy > 1
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.001)
        self.busy -= 1
        return seconds

    def seen_overlaps(self) -> int:
        return self.overlaps

    def exit(self, x: Any) -> None:
        ray.actor.exit_actor()

    def left(self) -> list[str]:
        """Return what graphs have left in this process, besides its doorbell (a descriptor and a mapping)."""
        threads = [t.name for t in threading.enumerate() if t.name.startswith("raylane")]
        return descriptors()[3:] + threads


class AsyncWorker:
    """Asyncio actor."""

    async def echo(self, x: Any) -> Any:
        import asyncio

        await asyncio.sleep(0)
        return x

    async def fail(self, x: Any) -> Any:
        raise KeyError(x)

    async def loop_id(self, x: Any = None) -> int:
        import asyncio

        return id(asyncio.get_running_loop())

    def exit(self, x: Any) -> None:
        ray.actor.exit_actor()

    async def exit_coroutine(self, x: Any) -> None:
        ray.actor.exit_actor()
