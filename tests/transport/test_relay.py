"""Readers of one host that share a transfer: threads with a source whose network is taken for another one. No Ray."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch
from tests.transport.servers import SECRET, Server, entry_of

from raylane.core.deadline import Deadline
from raylane.core.memory.receive_pool import BufferPool
from raylane.core.memory.shared_pool import SharedPool
from raylane.core.process import place
from raylane.errors import SourceLostError, TensorFreedError
from raylane.transport.backends.base import FetchResult
from raylane.transport.backends.tcp import backend as tcp
from raylane.transport.backends.tcp import relay
from raylane.transport.hold.budget import Budget
from raylane.transport.hold.store import Entry, Store
from raylane.transport.link.connection import Link, LinkPool
from raylane.transport.value import codec
from raylane.transport.value.guards import footprint
from raylane.transport.value.parts import Part
from raylane.transport.value.ticket import VERSION, Ticket

N = 3 << 20
"""Elements of a value of 12 MiB."""


class Reader:
    """The parts of an endpoint that a read by tcp uses."""

    def __init__(self, secret: bytes = SECRET) -> None:
        self.place = place.here()
        self.pool = BufferPool(1 << 30)
        self.store = Store(SharedPool(1 << 30))
        self.counts: Counter[str] = Counter()
        self._links = LinkPool(SECRET, "reader", self.place, Link)
        self.secret = lambda: secret

        self._parts: dict[type[Any], Any] = {}

    def links(self) -> LinkPool[Link]:
        return self._links

    def part(self, kind: type[Any]) -> Any:
        return self._parts.setdefault(kind, kind())

    def read(self, ticket: Ticket, timeout_s: float = 30.0) -> FetchResult:
        here: Any = self
        return tcp.TcpBackend().fetch(ticket, here, Deadline(timeout_s))

    def read_into(self, ticket: Ticket) -> torch.Tensor:
        target = torch.zeros(N)
        here: Any = self
        parts = [Part(0, at, 1 << 20, target.data_ptr() + at) for at in range(0, 4 * N, 1 << 20)]
        tcp.TcpBackend().fetch_parts(ticket, parts, here, Deadline(30))
        return target

    def meet(self, ticket: Ticket) -> relay.HostRelay:
        here: Any = self
        found = relay.meet(ticket, here, Deadline(30))
        assert isinstance(found, relay.HostRelay)
        return found

    def fill(self, first: relay.HostRelay, ticket: Ticket) -> FetchResult:
        """Read the value as the relay does, without an end of the meeting."""
        here: Any = self
        return tcp._fetch(ticket, here, Deadline(30), first.receive_into)


class Scene:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.tensor = torch.arange(N, dtype=torch.float32)
        self.entry = entry_of(self.tensor)
        server.store.publish(self.entry)
        self.ticket = self.ticket_of(self.entry)
        self.readers = [Reader() for _ in range(4)]
        self.threads = ThreadPoolExecutor(8)

    def ticket_of(self, entry: Entry, on_mutation: str = "warn") -> Ticket:
        there = msgspec.structs.replace(self.server.source.place, net_namespace=1)
        return Ticket(
            VERSION,
            "auto",
            on_mutation,
            entry.layout.specs,
            entry.layout.blocks,
            key=entry.key,
            source=msgspec.structs.replace(self.server.source, place=there),
            nonce=secrets.randbits(60),
        )

    def others(self, first: relay.HostRelay, wait: Callable[..., None]) -> list[Future[FetchResult]]:
        """Let all other readers begin, and return when they wait for the first one."""
        begun = [self.threads.submit(one.read, self.ticket) for one in self.readers[1:]]
        wait(lambda: first.accept() == len(begun))
        return begun

    def count(self, name: str) -> int:
        return sum(one.counts[name] for one in self.readers)


def content(found: FetchResult) -> list[torch.Tensor]:
    return [torch.frombuffer(block, dtype=torch.float32) for block in found.blocks]


@pytest.fixture
def scene(server: Server) -> Iterator[Scene]:
    before = set(os.listdir("/proc/self/fd"))
    made = Scene(server)
    yield made
    made.threads.shutdown()
    for reader in made.readers:
        reader.links().close()
        reader.store.shared.close()
        reader.pool.close()
    server.store.clear()
    gc.collect()
    deadline = time.monotonic() + 60  # the listener closes its ends on its own thread
    while not (left := set(os.listdir("/proc/self/fd"))) <= before and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert left <= before


@pytest.mark.claim("transport", "simultaneous readers on another host share one transfer by `tcp`")
def test_waiters_get_one_copy_and_write_to_their_own(scene: Scene, eventually: Any) -> None:
    with scene.readers[0].meet(scene.ticket) as first:
        begun = scene.others(first, eventually)
        found = scene.readers[0].fill(first, scene.ticket)
        first.deliver(found)
    values = [content(one.result(30))[0] for one in begun]
    values[0][0] = 7
    for value in (content(found)[0], *values[1:]):
        assert torch.equal(value, scene.tensor)
    assert (scene.count("relayed"), scene.count("relays")) == (3, 1)
    # The copy is filled again only when its last reader is done.
    again = scene.readers[0].store.shared.take(4 * N)
    del value, found
    values.clear()
    begun.clear()
    gc.collect()
    reused = scene.readers[0].store.shared.take(4 * N)
    assert again is not reused
    assert scene.readers[0].store.shared.idle_bytes == 0
    scene.readers[0].store.shared.drop(again)
    scene.readers[0].store.shared.drop(reused)


@pytest.mark.claim("transport", "simultaneous readers on another host share one transfer by `tcp`")
def test_targets_are_filled_by_a_copy_where_several_read(scene: Scene, eventually: Any) -> None:
    there = scene.ticket.origin().place
    with scene.readers[0].meet(scene.ticket) as first:
        assert not first.expects_others
        first.refuse()
        begun = [scene.threads.submit(one.read_into, scene.ticket) for one in scene.readers[1:]]
        eventually(lambda: first.accept() == 3)
        first._next_word = 0
        scene.readers[0].fill(first, scene.ticket)
        # Refused during the transfer, not after it.
        assert all(torch.equal(one.result(30), scene.tensor) for one in begun)
    assert scene.count("relayed") == 0
    assert all(there in one.part(relay.SharedSources) for one in scene.readers)
    with scene.readers[0].meet(scene.ticket) as first:
        assert first.expects_others
        begun = [scene.threads.submit(one.read_into, scene.ticket) for one in scene.readers[1:]]
        eventually(lambda: first.accept() == 3)
        first.deliver(scene.readers[0].fill(first, scene.ticket))
    assert all(torch.equal(one.result(30), scene.tensor) for one in begun)
    assert scene.count("relayed") == 3
    # A relay that nobody waited for expects nobody any more, and receives straight into its targets again.
    for _ in range(2):
        assert torch.equal(scene.readers[1].read_into(scene.ticket), scene.tensor)
        assert there not in scene.readers[1].part(relay.SharedSources)


def test_single_reader_makes_no_copy(scene: Scene) -> None:
    assert torch.equal(content(scene.readers[0].read(scene.ticket))[0], scene.tensor)
    assert scene.readers[0].store.shared.nbytes == 0
    assert not scene.readers[0].counts


def test_many_blocks_arrive_in_order(scene: Scene, eventually: Any) -> None:
    tensors = [torch.full((1 + i % 7 * 50_000,), float(i)) for i in range(40)]
    entry = entry_of(tensors[0])
    entry.leaves, entry.layout = tensors, codec.plan_layout(tensors)
    entry.footprints = [footprint(one) for one in tensors]
    scene.server.store.publish(entry)
    scene.ticket = scene.ticket_of(entry)
    with scene.readers[0].meet(scene.ticket) as first:
        begun = scene.others(first, eventually)
        first.deliver(scene.readers[0].fill(first, scene.ticket))
    for one in begun:
        leaves = codec.build_leaves(scene.ticket.specs, one.result(30).blocks)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(leaves, tensors, strict=True))


@pytest.mark.parametrize("why", ["error", "mutated", "no room"])
def test_waiters_read_for_themselves_after_a_refusal(scene: Scene, why: str, eventually: Any) -> None:
    if why == "no room":
        Budget(scene.readers[0].store, 1000)
    with contextlib.suppress(KeyError), scene.readers[0].meet(scene.ticket) as first:
        begun = scene.others(first, eventually)
        if why == "error":
            raise KeyError
        if why == "mutated":
            scene.entry.versions = [(scene.tensor, scene.tensor._version)]
            scene.tensor[0] = 5
        first.deliver(scene.readers[0].fill(first, scene.ticket))
    found = [one.result(30) for one in begun]
    assert [one.mutated for one in found] == [why == "mutated"] * 3
    assert all(torch.equal(content(one)[0], scene.tensor) for one in found)
    assert scene.count("relayed") == 0


@pytest.mark.parametrize("change", ["written", "freed", "resized"])
def test_change_after_the_transfer_is_noticed_by_waiters(scene: Scene, change: str, eventually: Any) -> None:
    scene.entry.versions = [(scene.tensor, scene.tensor._version)]
    with scene.readers[0].meet(scene.ticket) as first:
        found = scene.readers[0].fill(first, scene.ticket)
        # These readers come after the relay has asked for the state of the memory.
        begun = scene.others(first, eventually)
        if change == "written":
            scene.tensor[0] = 5
        elif change == "freed":
            scene.server.store.clear()
        else:
            scene.tensor.untyped_storage().resize_(0)
        first.deliver(found)
    assert content(found)[0][0] == 0
    for one in begun:
        if change == "written":
            assert one.result(30).mutated
            assert content(one.result(30))[0][0] == 5
        else:
            with pytest.raises(TensorFreedError):
                one.result(30)


def test_end_of_the_relay_makes_another_one(scene: Scene, eventually: Any) -> None:
    first = scene.readers[0].meet(scene.ticket)
    begun = scene.others(first, eventually)
    first._dismiss()  # as the kernel does when the process dies
    first._server.close()
    assert all(torch.equal(content(one.result(30))[0], scene.tensor) for one in begun)


def test_silent_relay_is_not_waited_for_long(scene: Scene) -> None:
    with scene.readers[0].meet(scene.ticket):
        found = scene.readers[1].read(scene.ticket, timeout_s=1.0)
    assert torch.equal(content(found)[0], scene.tensor)
    assert scene.count("relayed") == 0


def test_freed_value_and_dead_source_are_errors_of_all(scene: Scene, eventually: Any) -> None:
    def read_all(error: type[Exception]) -> None:
        with scene.readers[0].meet(scene.ticket) as first:
            begun = scene.others(first, eventually)
            with pytest.raises(error):
                scene.readers[0].fill(first, scene.ticket)
        for one in begun:
            with pytest.raises(error):
                one.result(30)

    scene.server.store.clear()
    read_all(TensorFreedError)
    scene.server.listener.close()
    read_all(SourceLostError)


@pytest.mark.claim("security", "strangers at the socket of a shared transfer get nothing and give nothing")
def test_strangers_get_nothing_and_give_nothing(scene: Scene, eventually: Any) -> None:
    with scene.readers[0].meet(scene.ticket) as first:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(first._name.address)
        stranger.send(b"x" * 32)
        assert first.accept() == 0
        assert stranger.recv(100) == b""
        stranger.close()
        # Another cluster's readers do not even find the name.
        Reader(b"t" * 32).meet(scene.ticket).__exit__(None, None, None)
    name = first._name
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(name.address)
        server.listen()
        reading = scene.threads.submit(scene.readers[0].read, scene.ticket)
        sock, _ = server.accept()
        with sock:
            sock.send(relay._PACKET.pack(b"x" * 32, relay._WORD, 1))
            assert torch.equal(content(reading.result(30))[0], scene.tensor)


def test_only_large_values_of_other_networks_are_shared(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    here: Any = scene.readers[0]
    assert relay.relays(scene.ticket, here)
    assert not relay.relays(scene.ticket_of(scene.entry, "allow"), here)
    near = msgspec.structs.replace(scene.ticket, source=scene.server.source)
    assert not relay.relays(near, here)
    for limit in ("none", str(4 * N + 1)):
        monkeypatch.setenv("RAYLANE_SHARE_FROM_BYTES", limit)
        assert not relay.relays(scene.ticket, here)
