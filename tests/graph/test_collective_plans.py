"""Plans of collectives, without actors: random programs against plain torch, and the check against deadlock."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import raylane
from raylane import MultiOutputNode, bind
from raylane.graph import allgather, allreduce, reducescatter


class Adder:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def add(self, *tensors: Any) -> Any:
        """Return the sum over all rows and tensors in two rows, and this rank: no two calls give the same."""
        return torch.stack([torch.stack([tensor.sum() for tensor in tensors]).sum() + self.rank] * 2) % 1000


def _program(rng: random.Random, actors: list[Adder], x: Any) -> list[tuple[Any, Any]]:
    """Return (node, its value for the input) of every call of a random program."""
    start = torch.arange(4.0)
    made: list[tuple[Any, Any]] = [(x, start)]
    own: list[list[tuple[Any, Any]]] = [[] for _ in actors]
    """Calls of each actor, which a collective may take."""
    for _ in range(rng.randint(3, 12)):
        if all(own) and rng.random() < 0.5:
            size = len(actors)
            ranks = rng.sample(range(size), size)
            given = [rng.choice(own[rank]) for rank in ranks]
            given = [one for one in given if one[1].shape == given[0][1].shape]
            ranks = [rank for rank in ranks if any(one in own[rank] for one in given)]
            kind = rng.choice(["allreduce", "allgather", "reducescatter"])
            if len(given) != len(ranks) or given[0][1].shape[0] % len(given):
                continue
            values = torch.stack([value for _, value in given])
            nodes = [node for node, _ in given]
            if kind == "allreduce":
                op = rng.choice(["sum", "max"])
                total = values.sum(0) if op == "sum" else values.amax(0)
                found = [(node, total) for node in allreduce.bind(nodes, op=op)]
            elif kind == "allgather":
                found = [(node, values.flatten(0, 1)) for node in allgather.bind(nodes)]
            else:
                parts = values.sum(0).chunk(len(given))
                found = list(zip(reducescatter.bind(nodes), parts, strict=True))
            for rank, one in zip(ranks, found, strict=True):
                own[rank].append(one)
            made += found
        else:
            actor = rng.choice(actors)
            used = rng.sample(made, rng.randint(1, min(3, len(made))))
            one = bind(actor.add, *(node for node, _ in used)), actor.add(*(value for _, value in used))
            own[actor.rank].append(one)
            made.append(one)
    return made[1:]


@pytest.mark.parametrize("overlap", [False, True])
def test_random_programs_give_what_torch_gives(overlap: bool) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        actors = [Adder(rank) for rank in range(rng.randint(1, 4))]
        with raylane.InputNode() as x:
            made = _program(rng, actors, x)
        node = MultiOutputNode([node for node, _ in made])
        with raylane.compile(node, backend="inline", overlap=overlap) as g:
            for _ in range(2):
                found = g.execute(torch.arange(4.0)).get()
                assert all(torch.equal(one, wanted) for one, (_, wanted) in zip(found, made, strict=True)), seed
