"""Kills of actors at random moments of repaired graphs: nothing hangs, no value is wrong, errors name who died."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest
import ray

import raylane
from raylane import MultiOutputNode, bind
from raylane.errors import GraphActorDiedError
from raylane.graph import allreduce

pytestmark = [pytest.mark.faults, pytest.mark.slow]

KILLS = int(os.environ.get("RAYLANE_KILLS", "5"))
"""Number of kills: hundreds of them are for `make faults`, not for continuous integration."""
LATEST_KILL_S = 0.02
IN_FLIGHT = 4
SIZES = (1, 1_000, 200_000)
"""Numbers of elements of 8 bytes: such as travel in a slot of a ring, and in leased memory."""

SHAPES = ("chain", "scatter and gather", "collective", "asyncio", "two graphs on an actor")


class Adder:
    """Actor whose results tell how often a number was increased."""

    def __init__(self) -> None:
        self.calls = 0

    def add(self, *terms: Any) -> Any:
        self.calls += 1
        return sum(terms) + 1

    def state(self) -> tuple[int, int]:
        return os.getpid(), self.calls


@pytest.fixture
def adders(cluster: None) -> Iterator[list[Any]]:
    """Start four actors that Ray restarts whenever they die."""
    made = [ray.remote(num_cpus=0.1)(Adder).options(max_restarts=-1).remote() for _ in range(4)]
    yield made
    for adder in made:
        ray.kill(adder)


def state_of(adder: Any, ended_pid: int = 0) -> tuple[int, int]:
    """Return the state of an actor's process, of the one after `ended_pid`, as soon as it answers."""
    deadline = time.monotonic() + 60
    while True:
        try:
            state: tuple[int, int] = ray.get(adder.state.remote(), timeout=60)
        except ray.exceptions.RayActorError:
            pass
        else:
            if state[0] != ended_pid:
                return state
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Stream:
    """Executions of one graph, of which several are in flight. `expected` is what the graph makes of a number."""

    def __init__(self, write: Callable[[Any], Any], expected: Callable[[int], Any]) -> None:
        with raylane.InputNode() as x:
            node = write(x)
        self.graph = raylane.compile(node, on_death="repair", max_inflight=IN_FLIGHT, timeout=60)
        self.expected = expected
        self.numbers = itertools.count()
        self.pending: deque[tuple[np.ndarray, Any]] = deque()

    def _new_value(self) -> np.ndarray:
        number = next(self.numbers)
        return np.full(SIZES[number % len(SIZES)], number)

    def step(self, victims: Collection[str]) -> bool:
        """Start executions and take the oldest result. Return True if it came, False if one of `victims` failed it."""
        while len(self.pending) < IN_FLIGHT:
            value = self._new_value()
            self.pending.append((value, self.graph.execute(value)))
        value, result = self.pending.popleft()
        return self._check(value, result.get, victims)

    def step_in_asyncio(self, victims: Collection[str]) -> bool:
        """Do as `step`, in an event loop, with results that are awaited beside each other."""

        async def run() -> list[bool]:
            values = [self._new_value() for _ in range(IN_FLIGHT)]
            results = [await self.graph.execute_async(value) for value in values]
            taken = await asyncio.gather(*results, return_exceptions=True)
            return [self._check(*pair, victims) for pair in zip(values, map(_raiser, taken), strict=True)]

        return all(asyncio.run(run()))

    def drain(self, victims: Collection[str]) -> None:
        while self.pending:
            value, result = self.pending.popleft()
            self._check(value, result.get, victims)

    def _check(self, value: np.ndarray, get: Callable[[], Any], victims: Collection[str]) -> bool:
        try:
            made = get()
        except GraphActorDiedError as error:
            if "ended during this execution" not in str(error) or error.fields["actor"] not in victims:
                raise
            return False
        expected = self.expected(int(value[0]))
        for array in made if isinstance(made, list) else [made]:
            assert array.shape == value.shape
            assert (array == expected).all()
        return True


def _raiser(taken: Any) -> Callable[[], Any]:
    """Return a function that returns what an awaitable has returned, or raises what it has raised."""

    def get() -> Any:
        if isinstance(taken, BaseException):
            raise taken
        return taken

    return get


def streams_on(adders: list[Any]) -> dict[str, list[Stream]]:
    """Compile the graphs, all on the same actors, and return those that run beside each other, by shape."""
    first, second, third, fourth = (adder.add for adder in adders)

    def gather(x: Any) -> Any:
        scattered = bind(first, x)
        return bind(fourth, *(bind(method, scattered) for method in (first, second, third)))

    chain = Stream(lambda x: bind(third, bind(second, bind(first, x))), lambda number: number + 3)
    gathered = Stream(gather, lambda number: 3 * (number + 2) + 1)
    reduced = Stream(
        lambda x: MultiOutputNode(allreduce.bind([bind(method, x) for method in (first, second, third)])),
        lambda number: 3 * (number + 1),
    )
    back = Stream(lambda x: bind(first, bind(fourth, bind(second, x))), lambda number: number + 3)
    return dict(zip(SHAPES, ([chain], [gathered], [reduced], [chain], [gathered, back]), strict=True))


@pytest.mark.timeout(60 + 20 * KILLS)
@pytest.mark.claim("graphs", 'with `on_death="repair"` no kill at any moment makes a graph hang or its values wrong')
def test_graphs_go_on_after_kills_at_any_moment(adders: list[Any]) -> None:
    draw, outcomes = random.Random(KILLS), Counter[str]()
    by_shape = streams_on(adders)
    every = {id(stream): stream for streams in by_shape.values() for stream in streams}.values()
    before = [state_of(adder) for adder in adders]
    for kill in range(KILLS):
        shape = SHAPES[kill % len(SHAPES)]
        victims = draw.sample(range(len(adders)), draw.choice((1, 1, 1, 2)))
        victim_ids = {adders[victim]._actor_id.hex() for victim in victims}
        timers = [
            threading.Timer(draw.uniform(0, LATEST_KILL_S), os.kill, (before[victim][0], signal.SIGKILL))
            for victim in victims
        ]
        for timer in timers:
            timer.start()
        while any(timer.is_alive() for timer in timers):
            for stream in by_shape[shape]:
                came = stream.step_in_asyncio(victim_ids) if shape == "asyncio" else stream.step(victim_ids)
                outcomes["results" if came else "failed"] += 1
        new = {victim: state_of(adders[victim], before[victim][0]) for victim in victims}
        for stream in every:  # also those that had nothing in flight
            stream.drain(victim_ids)
            while not stream.step(victim_ids):
                outcomes["failed"] += 1
            stream.drain(victim_ids)
        after = [state_of(adder) for adder in adders]
        for adder in range(len(adders)):
            if adder in new:
                assert after[adder][0] == new[adder][0]
            else:
                assert after[adder][0] == before[adder][0], "only the dead were started anew"
                assert after[adder][1] > before[adder][1], "it has kept its state"
        outcomes[shape] += 1
        before = after
    for stream in every:
        stream.graph.teardown()
    print(dict(outcomes))
