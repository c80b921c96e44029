"""Direct transport from actors that wrap an object: an outer actor of your own, and a replica as in Ray Serve.

Run with `python examples/outer_actors.py`; no GPU is needed.
"""

from __future__ import annotations

import collections
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch

import raylane


class Model:
    """An ordinary object, not an actor."""

    def features(self, rows: int) -> torch.Tensor:
        return torch.ones(rows, 1000)


@ray.remote
class Outer:
    def __init__(self) -> None:
        self.model = Model()

    @raylane.method  # on the method that Ray calls
    def run(self, name: str, *args: Any) -> Any:
        return getattr(self.model, name)(*args)


class Embedder:  # with @serve.deployment in a program of Ray Serve
    def __init__(self) -> None:
        self.refs: collections.deque[ray.ObjectRef] = collections.deque(maxlen=100)

    async def embed(self, rows: int) -> ray.ObjectRef:
        self.refs.append(raylane.put(torch.ones(rows, 1000)))
        return self.refs[-1]  # kept here too, until callers have read it

    async def total(self, tensor: torch.Tensor) -> float:  # arguments need nothing
        return float(tensor.sum())


@ray.remote
class Replica:
    """Stands for the actor of Ray Serve that holds an object of the user."""

    def __init__(self, user: Any) -> None:
        self.user = user

    async def handle(self, name: str, *args: Any) -> AsyncIterator[Any]:
        yield await getattr(self.user, name)(*args)


def main() -> None:
    outer, replica = Outer.remote(), Replica.remote(Embedder())

    def call(name: str, *args: Any) -> Any:
        """Stand for `handle.NAME.remote(...).result()` of Ray Serve."""
        return ray.get(next(replica.handle.options(num_returns="streaming").remote(name, *args)))

    ref = outer.run.remote("features", 1000)
    print("from an outer actor:  ", float(ray.get(ref).sum()))
    print("given to a replica:   ", call("total", ref))
    print("returned by a replica:", float(raylane.get(call("embed", 2000), timeout=60).sum()))
    print("read directly:        ", raylane.stats()["host"])


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    main()
