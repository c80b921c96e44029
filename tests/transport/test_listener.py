"""Links against a real listener over real sockets, without Ray: what is right is served, what is wrong is dropped."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import resource
import socket
import struct
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.transport.servers import SECRET, Server, entry_of, read_value

from raylane import _ray, _ray_calls
from raylane.core.deadline import Deadline
from raylane.core.process import place
from raylane.errors import ProtocolError, SourceLostError, TransferTimeoutError
from raylane.transport.hold import anchors as anchor_pools
from raylane.transport.hold.anchors import ActorKeeper, AnchorPool
from raylane.transport.link import listener, wire
from raylane.transport.link.connection import Link, LinkPool
from raylane.transport.value.source import Source


def test_reads_over_both_sockets(server: Server) -> None:
    tensor = torch.arange(1_000_000, dtype=torch.int32)
    kept = entry_of(tensor)
    server.store.publish(kept)
    for address in server.addresses:
        link = server.link(address)
        for _ in range(3):
            assert read_value(link, kept.key, 4_000_000) == tensor.numpy().tobytes()
        link.close()


def test_many_readers_at_once(server: Server) -> None:
    tensor = torch.arange(500_000, dtype=torch.int64)
    kept = entry_of(tensor)
    server.store.publish(kept)
    expected, wrong = tensor.numpy().tobytes(), []

    def work() -> None:
        link = server.link()
        for _ in range(5):
            if read_value(link, kept.key, 4_000_000) != expected:
                wrong.append(1)
        link.close()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.claim("transport", "a reader that does not read holds up nobody")
def test_a_reader_that_does_not_read_holds_up_nobody(server: Server) -> None:
    kept = entry_of(torch.zeros(20_000_000, dtype=torch.uint8))
    server.store.publish(kept)
    lazy = server.link()
    lazy.send(wire.ReadValue(kept.key))
    assert server.serves()
    eager = server.link()
    assert read_value(eager, kept.key, 20_000_000) == bytes(20_000_000)
    eager.close()
    server.store.free([kept.key])  # the bytes under way are still whole
    answer = lazy.receive()
    assert isinstance(answer, wire.Data)
    data = bytearray(20_000_000)
    lazy.receive_into([data])
    assert data == bytes(20_000_000)
    lazy.close()


def test_listener_answers_that_a_value_is_gone(server: Server) -> None:
    link = server.link()
    for request in (wire.ReadValue(b"unknown"), wire.Put(b"unknown")):
        link.send(request)
        assert link.receive() == wire.Gone(b"unknown")
    link.close()


def test_put_and_done(server: Server) -> None:
    kept = entry_of(torch.ones(10))
    server.store.publish(kept)
    link = server.link()
    link.send(wire.Put(kept.key))
    assert link.receive() == wire.PutReply(b"id", b"owner", False, False)
    link.send(wire.Release(kept.key))
    link.send(wire.HeldQuery())
    assert link.receive() == wire.HeldCount(1)
    link.close()


def test_wrong_secret_is_refused_and_says_so(server: Server) -> None:
    with pytest.raises(ProtocolError, match="wrong proof"):
        server.link(secret=b"x" * 32)
    assert server.serves()


@pytest.mark.claim("security", "no data is read from a listener without the secret; its messages are cut and quoted")
def test_a_listener_that_cannot_prove_itself_is_not_trusted(server: Server) -> None:
    class Impostor(threading.Thread):
        def __init__(self) -> None:
            super().__init__()
            self.socket = socket.create_server(("127.0.0.1", 0))

        def run(self) -> None:
            peer, _ = self.socket.accept()
            peer.sendall(wire.pack_frame(wire.Challenge(wire.VERSION, b"n" * 16)))
            peer.recv(1000)
            peer.sendall(wire.pack_frame(wire.Welcome(b"p" * 32)))
            peer.close()
            self.socket.close()

    impostor = Impostor()
    impostor.start()
    with pytest.raises(ProtocolError, match="could not prove"):
        server.link(impostor.socket.getsockname()[:2])
    impostor.join()


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 100,
    struct.pack("<I", wire.MAX_FRAME_BYTES + 1) + b"x" * 100,
    struct.pack("<I", 0),
    struct.pack("<I", 5) + b"\x93abcd",
    wire.pack_frame(wire.ReadValue(b"key")),  # before any proof
    wire.pack_frame(wire.Hello(99, b"n" * 16, b"p" * 32, "from the future")),
    wire.pack_frame(wire.Challenge(1, b"n")),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_before_the_proof_ends_the_connection(server: Server, garbage: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.listener.port), timeout=10) as sock:
        sock.sendall(garbage)
        while sock.recv(1 << 16):
            pass
    assert server.serves()


@pytest.mark.parametrize("garbage", [*GARBAGE[:5], wire.pack_frame(wire.HeldCount(3))], ids=range(6))
def test_garbage_after_the_proof_ends_the_link(server: Server, garbage: bytes) -> None:
    link = server.link()
    link.socket.sendall(garbage)
    with pytest.raises(SourceLostError):
        link.receive()
    link.close()
    assert server.serves()


def test_a_truncated_frame_waits_for_its_rest_and_does_no_harm(server: Server) -> None:
    link = server.link()
    frame = wire.pack_frame(wire.HeldQuery())
    link.socket.sendall(frame[:3])
    assert server.serves()
    link.socket.sendall(frame[3:])
    assert link.receive() == wire.HeldCount(0)
    link.socket.sendall(frame[:5])
    link.close()
    assert server.serves()


def test_unused_link_is_closed_after_a_while(server: Server, eventually: Any) -> None:
    pool = LinkPool(SECRET, "test", place.here(), Link, idle_s=0.05)
    with pool.borrow(server.addresses[1], server.source, Deadline(10)) as link:
        link.send(wire.HeldQuery())
        link.receive()
    eventually(lambda: not len(pool))
    assert link.socket.fileno() == -1
    with pool.borrow(server.addresses[1], server.source, Deadline(10)) as again:
        assert again is not link
    pool.close()


@pytest.mark.claim("security", "a listener serves among a thousand idle connections, and drops silent ones in time")
def test_a_thousand_idle_connections(server: Server) -> None:
    idle = []
    for _ in range(1000):
        with contextlib.suppress(OSError):
            idle.append(socket.create_connection(("127.0.0.1", server.listener.port), timeout=10))
    assert server.serves()
    assert server.listener.unauthenticated() <= listener.MAX_UNAUTHENTICATED
    for sock in idle:
        sock.close()
    assert server.serves()


@pytest.mark.claim("security", "a listener serves among a thousand idle connections, and drops silent ones in time")
def test_silent_connections_are_dropped_in_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", server.listener.port), timeout=10) as sock:
        while sock.recv(1 << 16):
            pass
    assert server.serves()


def test_a_listener_that_never_answers_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = Source(place.here(), "Actor(Silent)", "", "127.0.0.1", silent.getsockname()[1])
        with pytest.raises(TransferTimeoutError, match=r"Actor\(Silent\).*0\.2 s"):
            Link(("127.0.0.1", source.port), SECRET, Deadline(0.2), client="test", peer=str(source))


def test_listener_passes_streams_to_their_owner_only(server: Server) -> None:
    taken: queue.Queue[tuple[socket.socket, int, int]] = queue.Queue()
    server.streams[b"key"] = lambda *found: taken.put(found)
    for address in server.addresses:
        link = server.link(address)
        link.send(wire.StreamRequest(b"key", 3, 1))
        sock, *who = taken.get(timeout=10)
        assert who == [3, 1]
        sock.sendall(wire.pack_frame(wire.Streaming(1.5)))  # from now on it is the taker's alone
        assert link.receive() == wire.Streaming(1.5)
        link.send(wire.HeldQuery())
        assert sock.recv(100) == wire.pack_frame(wire.HeldQuery())
        sock.close()
        link.close()
        refused = server.link(address)
        refused.send(wire.StreamRequest(b"other", 3, 1))
        answer = refused.receive()
        assert isinstance(answer, wire.Refusal)
        assert "this process has no such stream" in answer.reason
        refused.close()
    with socket.create_connection(("127.0.0.1", server.listener.port), timeout=10) as sock:
        sock.sendall(wire.pack_frame(wire.StreamRequest(b"key", 3, 1)))  # without proof
        while sock.recv(1 << 16):
            pass
    assert taken.empty()
    assert server.serves()


def test_link_without_a_listener_raises_source_lost(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(SourceLostError, match=r"Actor\(Test\)"):
        server.link(("127.0.0.1", port))


def test_a_pool_reuses_good_links_and_closes_bad_ones(server: Server) -> None:
    pool = LinkPool(SECRET, "test", place.here(), Link)
    address = server.addresses[0]

    def ask() -> Any:
        with pool.borrow(address, server.source, Deadline(10)) as link:
            link.send(wire.HeldQuery())
            assert link.receive() == wire.HeldCount(0)
            return link

    first = ask()
    assert ask() is first
    with pytest.raises(KeyError), pool.borrow(address, server.source, Deadline(10)):
        raise KeyError
    assert len(pool) == 0
    second = ask()
    assert second is not first
    server.listener.close()
    with pytest.raises(SourceLostError), pool.borrow(address, server.source, Deadline(10)):
        raise AssertionError("there is nobody to link to")
    pool.close()


def test_closing_ends_every_link(server: Server) -> None:
    def listeners() -> int:
        return sum(thread.name == "raylane-listener" for thread in threading.enumerate())

    link, before = server.link(), listeners()
    server.listener.close()
    with pytest.raises(SourceLostError):
        link.receive()
    link.close()
    deadline = time.monotonic() + 60
    while listeners() == before:
        assert time.monotonic() < deadline


def test_put_that_fails_is_refused_with_its_cause(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(server.listener, "_put_entry", fail)
    entry = entry_of(torch.ones(100))
    server.store.publish(entry)
    link = server.link()
    link.send(wire.Put(entry.key))
    answer = link.receive()
    assert isinstance(answer, wire.Refusal)
    assert "no room" in answer.reason
    link.close()
    assert server.serves()


def test_link_closed_by_its_owner_ends_beside_forked_copies(server: Server, eventually: Any) -> None:
    link = server.link()
    assert len(server.listener._peers) == 1
    copy = link.socket.dup()  # what a forked child holds
    link.close()
    eventually(lambda: not server.listener._peers)
    copy.close()


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The system starts no thread until the patch is undone."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return monkeypatch


def test_pool_without_threads_lends_links_and_leaves_nothing(server: Server, no_threads: pytest.MonkeyPatch) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    pool = LinkPool(SECRET, "test", server.source.place, Link)
    with pool.borrow(server.addresses[0], server.source, Deadline(10)) as link:
        link.send(wire.HeldQuery())
        assert link.receive() == wire.HeldCount(0)
    assert len(pool) == 0
    pool.close()
    no_threads.undo()
    assert server.serves()
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1


def test_put_without_threads_is_tried_again(server: Server, no_threads: pytest.MonkeyPatch) -> None:
    entry = entry_of(torch.ones(100))
    server.store.publish(entry)
    link = server.link()
    link.send(wire.Put(entry.key))
    with pytest.raises(SourceLostError):
        link.receive()
    link.close()
    no_threads.undo()
    link = server.link()
    link.send(wire.Put(entry.key))
    assert isinstance(link.receive(), wire.PutReply)
    link.close()


def test_lifetimes_without_threads_are_tried_again(no_threads: pytest.MonkeyPatch) -> None:
    anchors = AnchorPool()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="new thread"):
            anchors.take()
    anchors.close()
    keeper = ActorKeeper(lambda actor, deadline: False, lambda: False)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="new thread"):
            keeper.keep(b"actor", object())
    keeper.close()


def test_ref_that_is_gone_already_calls_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values whose refs were dropped at once stayed for ever: Ray calls back only where its answer is True."""
    called: list[bytes] = []
    for answer, expected in ((True, []), (False, [b"ref"])):
        core = types.SimpleNamespace(add_object_out_of_scope_callback=lambda ref, callback, answer=answer: answer)
        monkeypatch.setattr(_ray_calls._worker, "global_worker", types.SimpleNamespace(core_worker=core))
        _ray.on_out_of_scope(types.SimpleNamespace(binary=lambda: b"ref"), called.append)
        assert called == expected


def test_spare_anchors_are_dropped_when_none_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray ends no idle worker that owns objects, so workers of tasks that had published once stayed for ever."""
    monkeypatch.setattr(anchor_pools, "SPARE_KEPT_S", 0.05)
    monkeypatch.setattr(anchor_pools.ray, "put", lambda value: object())
    monkeypatch.setattr(anchor_pools._ray, "empty_task_refs", lambda count: [object() for _ in range(count)])
    anchors = AnchorPool()
    for _ in range(2):  # the thread that has ended is started again
        taken = {anchors.take() for _ in range(40)}
        assert len(taken) == 40
        thread = anchors._thread
        assert thread is not None
        thread.join(60)
        assert not thread.is_alive()
        assert not anchors._spare
    anchors.close()


@contextlib.contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """Leave this process so many descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(free):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.claim("security", "a listener without descriptors goes on later, and no process counts as dead meanwhile")
def test_listener_without_descriptors_accepts_again_later(server: Server, eventually: Any) -> None:
    clients = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_INET)]
    addresses = ["\0" + server.name, ("127.0.0.1", server.listener.port)]
    held = threading.Event()
    server.listener._callbacks.append(lambda: held.wait(10))  # both sockets are announced at once
    server.listener.wake()
    with few_descriptors(0):
        for client, address in zip(clients, addresses, strict=True):
            client.connect(address)
        held.set()
        eventually(lambda: server.listener._accept_after)
    eventually(lambda: server.listener.unauthenticated() == 2)
    assert server.serves()
    for client in clients:
        client.close()


@pytest.mark.parametrize("free", range(4))
def test_listener_that_cannot_start_leaves_no_descriptor(free: int) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with few_descriptors(free), pytest.raises(OSError, match="Too many open files"):
        Server()
    assert len(os.listdir("/proc/self/fd")) == before
