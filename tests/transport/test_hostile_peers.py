"""Peers that attack a listener or a link, and sources that vanish at awkward moments: real sockets, real processes."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.transport.servers import SECRET, Server, entry_of, read_value

from raylane.core.deadline import Deadline
from raylane.core.memory.spans import Span
from raylane.core.process import place
from raylane.errors import ProtocolError, SourceLostError, TransferTimeoutError, TransportError
from raylane.transport.hold.store import Entry
from raylane.transport.link import wire
from raylane.transport.link.connection import Link, LinkPool
from raylane.transport.value.layout import Layout
from raylane.transport.value.source import Source

LISTENING = """
import os, sys, time
sys.path[:0] = {path!r}
from tests.transport.servers import Server
server = Server()
{then}
print(server.name, server.listener.port, os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., tuple[Source, Any]]]:
    """`elsewhere(code)` starts a listener in a process of its own, which first runs `code`."""
    started = []

    def start(then: str = "") -> tuple[Source, Any]:
        script = LISTENING.format(path=[path for path in sys.path if path] + [os.getcwd()], then=then)
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        name, port, pid = process.stdout.readline().split()  # type: ignore[union-attr]
        ticks = place.start_ticks(int(pid))
        there = type(place.here())(**{**_fields(place.here()), "pid": int(pid), "start_ticks": ticks})
        return Source(there, "Actor(Elsewhere)", name, "127.0.0.1", int(port)), process

    yield start
    for process in started:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def _fields(struct_value: Any) -> dict[str, Any]:
    return {name: getattr(struct_value, name) for name in struct_value.__struct_fields__}


def _fill_backlog(name: str) -> list[socket.socket]:
    """Connect to an abstract Unix socket that nobody accepts from until the kernel takes no more."""
    taken = []
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect("\0" + name)
        except BlockingIOError:
            sock.close()
            return taken
        taken.append(sock)


@pytest.mark.claim("security", "a full backlog or a flood makes no actor look dead")
@pytest.mark.slow
@pytest.mark.processes
def test_link_waits_while_the_backlog_is_full(elsewhere: Any) -> None:
    source, process = elsewhere()
    process.send_signal(signal.SIGSTOP)
    flood = _fill_backlog(source.unix)
    pool = LinkPool(SECRET, "test", place.here(), Link)
    with pytest.raises(TransferTimeoutError), pool.borrow(source.unix, source, Deadline(0.3)):
        raise AssertionError("nobody accepts")
    answers = []

    def ask() -> None:
        with pool.borrow(source.unix, source, Deadline(60)) as link:
            link.send(wire.HeldQuery())
            answers.append(link.receive())

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(timeout=0.2)  # it is waiting now, or about to: both must end well
    process.send_signal(signal.SIGCONT)
    for sock in flood:
        sock.close()
    asking.join(timeout=60)
    assert answers == [wire.HeldCount(0)]
    pool.close()


def test_link_tries_again_when_its_handshake_is_dropped(server: Server) -> None:
    """A listener under attack drops strangers: that says nothing about what it holds."""
    front = socket.create_server(("127.0.0.1", 0))
    address = front.getsockname()[:2]

    def drop_two_then_serve() -> None:
        for _ in range(2):
            front.accept()[0].close()
        peer, _ = front.accept()
        nonce = b"n" * wire.NONCE_BYTES
        peer.sendall(wire.pack_frame(wire.Challenge(wire.VERSION, nonce)))
        hello = wire.FrameBuffer().feed(peer.recv(1000))[0]
        assert isinstance(hello, wire.Hello)
        peer.sendall(wire.pack_frame(wire.Welcome(wire.make_proof(SECRET, "listener", nonce, hello.nonce, address))))
        with contextlib.suppress(ConnectionResetError):
            peer.recv(1)
        peer.close()

    serving = threading.Thread(target=drop_two_then_serve)
    serving.start()
    pool = LinkPool(SECRET, "test", place.here(), Link)
    with pool.borrow(address, server.source, Deadline(30)):
        pass
    pool.close()
    serving.join()
    front.close()


@pytest.mark.claim("security", "readers notice the death of a process whose forked child lives on")
@pytest.mark.processes
def test_link_of_a_dead_process_is_lost_although_its_child_lives(elsewhere: Any) -> None:
    fork = "child = os.fork()\nif not child:\n    time.sleep(600)\n    os._exit(0)\nprint(child, file=sys.stderr)"
    source, process = elsewhere(fork)
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    with open(children) as file:
        child = int(file.read().split()[0])
    process.kill()
    process.wait()
    pool = LinkPool(SECRET, "test", place.here(), Link)
    try:
        for address in (source.unix, (source.host, source.port)):
            with pytest.raises(SourceLostError), pool.borrow(address, source, Deadline(60)):
                raise AssertionError("the producer is dead")
    finally:
        os.kill(child, signal.SIGKILL)
    pool.close()


@pytest.mark.slow
@pytest.mark.processes
def test_idle_link_to_a_dead_source_is_closed_unasked(elsewhere: Any, eventually: Any) -> None:
    pool = LinkPool(SECRET, "test", place.here(), Link)
    for _ in range(3):
        source, process = elsewhere()
        with pool.borrow((source.host, source.port), source, Deadline(30)) as link:
            link.send(wire.HeldQuery())
            link.receive()
        process.kill()
    eventually(lambda: len(pool) == 0)
    assert link.socket.fileno() == -1
    pool.close()


@pytest.mark.claim("security", "processes of other users of the machine are refused")
@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run a process as another user")
def test_other_users_processes_are_refused(server: Server) -> None:
    reading, writing = os.pipe()
    child = os.fork()  # the interpreter itself may lie where no other user can read it
    if not child:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\0" + server.name)
            os.write(writing, sock.recv(1 << 16) + sock.recv(1))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with open(reading, "rb") as answer:
        messages = wire.FrameBuffer().feed(answer.read())
    assert messages == [wire.Refusal(f"only processes of user {os.geteuid()} are served here")]
    assert server.serves()


@pytest.mark.claim("security", "a relay without the secret cannot pass a handshake on to another address")
def test_relay_without_the_secret_cannot_pass_a_handshake_on(server: Server) -> None:
    """The proof names the listener that the client wanted: it is worth nothing at another."""
    front = socket.create_server(("127.0.0.1", 0))

    def relay() -> None:
        client, _ = front.accept()
        behind = socket.create_connection(("127.0.0.1", server.listener.port))
        pairs = {client: behind, behind: client}
        while True:
            for sock in select.select(list(pairs), [], [])[0]:
                data = b""
                with contextlib.suppress(ConnectionResetError):
                    data = sock.recv(1 << 16)
                if not data:
                    client.close()
                    behind.close()
                    return
                with contextlib.suppress(OSError):
                    pairs[sock].sendall(data)

    relaying = threading.Thread(target=relay)
    relaying.start()
    with pytest.raises(ProtocolError, match="another listener"):
        Link(front.getsockname()[:2], SECRET, Deadline(10), client="test", peer="Actor(Test)")
    relaying.join()
    front.close()
    assert server.serves()


@pytest.mark.claim("security", "a member that never reads answers, or sends many requests, costs bounded memory")
def test_peer_that_never_reads_has_one_request_served(server: Server) -> None:
    kept = entry_of(torch.zeros(1 << 20, dtype=torch.uint8))
    server.store.publish(kept)
    asked = []
    get = server.store.get
    server.store.get = lambda key: (asked.append(key), get(key))[1]  # type: ignore[method-assign]
    deaf = server.link()
    deaf.socket.sendall(wire.pack_frame(wire.ReadValue(kept.key)) * 1500)
    assert server.serves()
    assert server.serves()
    assert 1 <= len(asked) <= 8  # what the socket's buffers took of the answers, not 1,500
    deaf.close()


@pytest.mark.claim("security", "a member that never reads answers, or sends many requests, costs bounded memory")
def test_puts_run_on_one_thread(server: Server) -> None:
    kept = entry_of(torch.zeros(100_000, dtype=torch.uint8))
    server.store.publish(kept)
    links = [server.link() for _ in range(20)]
    before = threading.active_count()
    for link in links:
        link.socket.sendall(wire.pack_frame(wire.Put(kept.key)) * 50)
    for link in links:
        for _ in range(50):
            assert isinstance(link.receive(), wire.PutReply)
        link.close()
    assert threading.active_count() <= before + 1


def _deep(depth: int) -> bytes:
    body = b"\x91" * depth + b"\x00"
    return struct.pack("<I", len(body)) + body


HOSTILE = {
    "nested": _deep(3000),
    "nested_extra_field": (lambda body: struct.pack("<I", len(body)) + body)(
        b"\x93\x04\xc4\x01k" + b"\x91" * 2000 + b"\x00"
    ),
    "bad_utf8": (lambda body: struct.pack("<I", len(body)) + body)(
        b"\x95\x01\x02\xc4\x10" + b"n" * 16 + b"\xc4\x01p\xa2\xff\xfe"
    ),
    "long_before_proof": struct.pack("<I", wire.MAX_HANDSHAKE_FRAME_BYTES + 1),
}


@pytest.mark.claim("security", "hostile frames end one link, without a traceback")
@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_hostile_frames_end_one_link_quietly(server: Server, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        with socket.create_connection(("127.0.0.1", server.listener.port), timeout=10) as sock:
            sock.sendall(HOSTILE[name])
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(1 << 16):
                    pass
        assert server.serves()
    assert not caplog.records


@pytest.mark.claim("security", "no data is read from a listener without the secret; its messages are cut and quoted")
def test_refusal_of_a_stranger_is_quoted_and_cut() -> None:
    front = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:
        peer, _ = front.accept()
        peer.sendall(wire.pack_frame(wire.Refusal("\x1b[2J" + "x" * 3000)))
        peer.close()

    refusing = threading.Thread(target=refuse)
    refusing.start()
    with pytest.raises(ProtocolError) as caught:
        Link(front.getsockname()[:2], SECRET, Deadline(10), client="test", peer="Actor(Test)")
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 400
    refusing.join()
    front.close()


@pytest.mark.claim("transport", "small tensors move together, in one request")
@pytest.mark.slow
def test_value_of_400_000_blocks_is_read_by_tcp(server: Server) -> None:
    data = torch.arange(3_200_000, dtype=torch.uint8)
    start = data.data_ptr()
    layout = Layout(specs=[], blocks=[Span(start + 8 * i, start + 8 * i + 4) for i in range(400_000)], held=[data])
    kept = Entry(key=secrets.token_bytes(16), leaves=[], layout=layout, for_callers=True)
    server.store.publish(kept)
    link = server.link()
    assert bytes(read_value(link, kept.key, 1_600_000)) == data.view(-1, 8)[:, :4].contiguous().numpy().tobytes()
    link.close()


def test_unmapped_block_costs_no_peer_its_link(server: Server) -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    start = libc.mmap(None, ctypes.c_size_t(4 << 20), 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    good = torch.ones(1 << 20, dtype=torch.uint8)
    blocks = [Span(start, start + (4 << 20)), Span(good.data_ptr(), good.data_ptr() + (1 << 20))]
    layout = Layout(specs=[], blocks=blocks, held=[good])
    kept = Entry(key=secrets.token_bytes(16), leaves=[], layout=layout, for_callers=True)
    server.store.publish(kept)
    link = server.link()
    found = read_value(link, kept.key, 5 << 20)
    assert bytes(found[-(1 << 20) :]) == bytes(good.numpy())
    assert not kept.copy_to([(ctypes.c_char * block.nbytes)() for block in blocks])
    link.close()
    assert server.serves()
    libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(4 << 20))


def test_own_lack_of_descriptors_is_not_the_sources_death(server: Server) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    pool = LinkPool(SECRET, "test", place.here(), Link)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        with (
            pytest.raises(TransportError, match="ulimit -n") as caught,
            pool.borrow(server.name, server.source, Deadline(5)),
        ):
            raise AssertionError("there was a descriptor")
        assert not isinstance(caught.value, SourceLostError)
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    pool.close()
