"""Collectives of graphs with CUDA tensors."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch

import raylane
from raylane import MultiOutputNode, bind
from raylane.graph import allgather, allreduce, reducescatter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.usefixtures("cluster"),
]


class Rank:
    def ones(self, rows: int) -> Any:
        return torch.ones(rows, 1000, device="cuda")

    def total(self, x: Any) -> float:
        assert x.device.type == "cuda"
        return float(x.sum())


@pytest.mark.claim("graphs", "actors take part in allreduce, allgather and reducescatter; CUDA tensors by host memory")
def test_collectives_of_cuda_tensors() -> None:
    actors = [ray.remote(num_gpus=0.1)(Rank).remote() for _ in range(2)]
    with raylane.InputNode() as x:
        given = [bind(actor.ones, x) for actor in actors]
        found = [f.bind(given) for f in (allreduce, allgather, reducescatter)]
        outputs = [bind(a.total, one) for nodes in found for a, one in zip(actors, nodes, strict=True)]
    with raylane.compile(MultiOutputNode(outputs)) as g:
        for rows in (2, 200):
            assert g.execute(rows).get() == [2000 * rows] * 4 + [1000 * rows] * 2
    for actor in actors:
        ray.kill(actor)
