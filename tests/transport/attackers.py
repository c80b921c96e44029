"""Processes for `test_attacks`: a listener with one value, and attackers of five kinds that work until they are ended.

python -m tests.transport.attackers serve
python -m tests.transport.attackers KIND PORT KEY
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import sys
import time
from collections.abc import Callable

import torch
from tests.transport.servers import SECRET, Server, entry_of

from raylane.core.deadline import Deadline
from raylane.transport.link import wire
from raylane.transport.link.connection import Link

NBYTES = 1 << 16


def serve() -> None:
    server = Server()
    kept = entry_of((torch.arange(NBYTES) % 251).to(torch.uint8))
    server.store.publish(kept)
    print(server.listener.port, kept.key.hex(), flush=True)
    sys.stdin.read()
    server.listener.close()


def garbage(port: int, key: bytes) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
            sock.sendall(os.urandom(1 << 14))
            sock.recv(100)


def replay(port: int, key: bytes) -> None:
    """Answer each Challenge with a proof that was right once."""
    proof = wire.make_proof(SECRET, "client", b"n" * 16, b"m" * 16, ("127.0.0.1", port))
    hello = wire.pack_frame(wire.Hello(wire.VERSION, b"m" * 16, proof, "an honest reader"))
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
            sock.recv(100)
            sock.sendall(hello)
            sock.recv(100)


def slow(port: int, key: bytes) -> None:
    """One byte of a handshake every 10 ms, on 100 connections."""
    hello = wire.pack_frame(wire.Hello(wire.VERSION, b"m" * 16, b"p" * 32, "slow"))
    at: dict[socket.socket, int] = {}
    while True:
        while len(at) < 100:
            at[socket.create_connection(("127.0.0.1", port))] = 0
        for sock, sent in list(at.items()):
            try:
                at[sock] += sock.send(hello[sent : sent + 1] or b"x")
            except OSError:
                del at[sock]
                sock.close()
        time.sleep(0.01)


def hold(port: int, key: bytes) -> None:
    """A thousand connections that say nothing; those that are dropped are opened again."""
    poll, held = select.poll(), {}
    while True:
        while len(held) < 1000:
            with contextlib.suppress(OSError):
                sock = socket.create_connection(("127.0.0.1", port), timeout=1)
                held[sock.fileno()] = sock
                poll.register(sock, select.POLLRDHUP)
        for fd, _ in poll.poll(100):
            poll.unregister(fd)
            held.pop(fd).close()


def deaf(port: int, key: bytes) -> None:
    """Members that ask on 20 links, 1,500 times on each, and read no answer."""
    links = []
    while len(links) < 20:
        links.append(Link(("127.0.0.1", port), SECRET, Deadline(20), client="deaf", peer="the listener"))
        links[-1].socket.setblocking(True)
        links[-1].socket.sendall(wire.pack_frame(wire.ReadValue(key)) * 1500)
    sys.stdin.read()


KINDS: dict[str, Callable[[int, bytes], None]] = {
    "garbage": garbage,
    "replay": replay,
    "slow": slow,
    "hold": hold,
    "deaf": deaf,
}

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if sys.argv[1] == "serve":
        serve()
    else:
        print("begun", flush=True)
        KINDS[sys.argv[1]](int(sys.argv[2]), bytes.fromhex(sys.argv[3]))
