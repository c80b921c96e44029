"""Compiled graph over three actors: an encoder and two heads that read its result, with several steps in flight.

Run with `python examples/compiled_graph.py`; no GPU is needed.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import ray

import raylane


class Encoder:
    """An ordinary class; it needs no knowledge of graphs."""

    def encode(self, rows: Any) -> Any:
        return np.tanh(rows)


class Head:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def score(self, encoded: Any, *, bias: float) -> float:
        return float(encoded.mean() * self.scale + bias)


def main() -> None:
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    encoder = ray.remote(Encoder).remote()
    heads = [ray.remote(Head).remote(scale) for scale in (1.0, 10.0)]

    with raylane.InputNode() as x:
        encoded = raylane.bind(encoder.encode, x)  # two actors read this result, and it is serialised only once
        scores = [raylane.bind(head.score, encoded, bias=0.5) for head in heads]

    with raylane.compile(raylane.MultiOutputNode(scores), max_inflight=3) as graph:
        print(graph.show())
        in_flight: deque[Any] = deque()
        for step in range(5):
            in_flight.append(graph.execute(np.full((256, 256), step / 10)))
            if len(in_flight) == 3:
                print(in_flight.popleft().get())
        while in_flight:
            print(in_flight.popleft().get())
        print(graph.stats()["executions"])
    ray.shutdown()


if __name__ == "__main__":
    main()
