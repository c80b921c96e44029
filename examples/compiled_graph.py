"""A graph over three actors: encode, then two heads on the same encoding, driven with several steps in flight."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import ray

import raylane


class Encoder:
    """Knows nothing of graphs."""

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
        encoded = raylane.bind(encoder.encode, x)  # one result, two readers: it is serialised once
        scores = [raylane.bind(head.score, encoded, bias=0.5) for head in heads]

    with raylane.compile(raylane.MultiOutputNode(scores), max_inflight=3) as graph:
        print(graph.show())
        under_way: deque[Any] = deque()
        for step in range(5):
            under_way.append(graph.execute(np.full((256, 256), step / 10)))
            if len(under_way) == 3:
                print(under_way.popleft().get())
        while under_way:
            print(under_way.popleft().get())
        print(graph.stats()["executions"])
    ray.shutdown()


if __name__ == "__main__":
    main()
