"""The driver of `test_transport_networks`, run by it inside the head's namespace.

It runs on the head of `tests.networks.Hosts`.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from tests.network_drivers import ask, connect, say, until

import raylane
from raylane.core.process.place import here
from raylane.errors import RaylaneError, TransferTimeoutError, TransportUnavailableError
from raylane.testing.leaks import leaks, snapshot

LARGE = 20_000_000
"""Bytes that take a while through a throttled link."""
MARGIN_S = 8.0
"""Time beyond a timeout in which the error must have arrived, on a machine that is busy with three Ray nodes."""


class Maker:
    @raylane.method
    def make(self, nbytes: int) -> torch.Tensor:
        return (torch.arange(nbytes) % 251).to(torch.uint8)

    @raylane.method
    def total(self, *values: torch.Tensor) -> int:
        return sum(int(value.sum()) for value in values)

    def add(self, value: Any) -> Any:
        return value + 1

    def place(self) -> Any:
        return here()

    def read(self, refs: list[Any]) -> Any:
        return ray.get(refs)

    def entries(self) -> int:
        return int(raylane.stats()["entries"])


def expected(nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes) % 251).to(torch.uint8)


def read(ref: Any, transport: str | None, timeout: float = 60.0) -> torch.Tensor:
    value: torch.Tensor = raylane.get(ref, tensor_transport=transport, timeout=timeout)
    return value


def in_thread(call: Callable[[], Any], within_s: float) -> Callable[[], Any]:
    """Start a call; the returned function waits for its result, or for its typed error. Fails if it hangs."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except RaylaneError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(within_s)
        assert not thread.is_alive(), f"no answer within {within_s} s"
        assert found, "an error without type; its traceback is above"
        return found[0]

    return wait


def cross(makers: list[Any], transports: list[str]) -> None:
    """Values between all nodes, by every transport."""
    _, one, two = makers
    made = one.make.remote(3_000_000)
    assert torch.equal(read(made, None), expected(3_000_000))
    counts = raylane.stats()
    assert counts["tcp"] == 1, counts
    assert "host" not in counts, counts
    say("auto takes tcp")
    refs = [maker.make.remote(1_000_000) for maker in makers]
    assert ray.get(two.total.remote(*refs), timeout=60) == 3 * int(expected(1_000_000).sum())
    say("values from three nodes")
    for transport in transports:
        for nbytes in (1000, 3_000_001):
            value = one.make.remote(nbytes)
            assert torch.equal(read(value, transport), expected(nbytes))
        say(f"crossed by {transport}")
    for transport in {"tcp", "gloo", "nixl"} - set(transports):
        try:
            read(made, transport)
        except TransportUnavailableError as error:
            say(f"refused {transport}: {error}")
    with raylane.InputNode() as x:
        node = raylane.bind(two.add, raylane.bind(one.add, x))
    with raylane.compile(node, timeout=30) as graph:
        for nbytes in (10, 30_000, 1_000_000):
            data = torch.ones(nbytes)
            assert torch.equal(graph.execute(data).get(), data + 2)
    say("graph over two links")


def cut(maker: Any, transport: str) -> None:
    """A link that breaks within a transfer: an error in time, and the value is still there afterwards."""
    value = maker.make.remote(LARGE)
    ray.wait([value], timeout=60, fetch_local=False)
    for timeout, down_s in ((2.0, 4.0), (60.0, 1.0)):
        wait = in_thread(lambda timeout=timeout: read(value, transport, timeout), timeout + MARGIN_S)
        time.sleep(0.4)  # into the middle of the transfer: nothing tells when its first byte has come
        ask("cut")
        began = time.monotonic()
        if down_s > timeout:
            found = wait()
            assert isinstance(found, RaylaneError), "the whole value came through a link that was cut"
            say(f"cut {transport}: {type(found).__name__} {time.monotonic() - began:.1f} s after")
            time.sleep(max(0.0, down_s - (time.monotonic() - began)))
            ask("restore")
        else:
            time.sleep(down_s)
            ask("restore")
            found = wait()
            state = type(found).__name__ if isinstance(found, RaylaneError) else "came"
            say(f"short cut {transport}: {state} {time.monotonic() - began:.1f} s after")
        assert torch.equal(read(value, transport), expected(LARGE))
    say(f"retried {transport}")


def weather(maker: Any, transports: list[str]) -> None:
    """Links that are slow, lose packets or take small ones only."""
    for wanted in ("throttle", "lose", "small packets"):
        ask(wanted)
        for transport in transports:
            began = time.monotonic()
            value = maker.make.remote(4_000_000)
            assert torch.equal(read(value, transport), expected(4_000_000))
            say(f"{wanted}: {transport} in {time.monotonic() - began:.2f} s")
    try:
        read(maker.make.remote(LARGE), "tcp", 0.05)
    except TransferTimeoutError:
        say("timeout on a slow link")
    ask("calm")


def main(address: str) -> None:
    connect(address)
    before = snapshot()
    actor = ray.remote(num_cpus=0.1)(Maker)
    makers = [actor.options(resources={name: 0.1}).remote() for name in ("head", "one", "two")]
    places = ray.get([maker.place.remote() for maker in makers], timeout=60)
    assert len({found.net_namespace for found in places}) == 3
    assert len({found.pid_namespace for found in places}) == 3
    transports = ["tcp"]
    if os.environ.get("RAY_USE_TLS") != "1":
        transports += ["gloo", *(["nixl"] if importlib.util.find_spec("nixl") else [])]
    cross(makers, transports)
    weather(makers[1], transports)
    for transport in transports:
        ask("throttle")
        cut(makers[1], transport)
        ask("calm")
    gc.collect()  # errors that were kept refer to frames, and these to the errors and to refs
    # A cut may leave a connection of Ray half open: ended here, unknown to the actor. By such connections Ray learns
    # who holds refs, and its own probes find that out within seven minutes. A question of the actor does at once: for
    # a small result, which its owner keeps.
    ray.get([maker.read.remote([maker.entries.remote()]) for maker in makers], timeout=60)
    # A source waits for a reader behind a cut cable for as long as its own limit, a minute.
    until(lambda: not any(ray.get([maker.entries.remote() for maker in makers], timeout=60)), "no value is left", 120)
    makers.clear()
    found = leaks(before, within_s=20)
    assert not found, found
    say("done")


if __name__ == "__main__":
    main(sys.argv[1])
