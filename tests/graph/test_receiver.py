"""What a peer may send over a hop: sizes that it only claims cost nothing, and a defect is told once."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from raylane.graph.channels.lease import LeasePool
from raylane.graph.channels.peer_network import Station
from raylane.graph.channels.receiver import MAX_TOLD_BYTES, Inbound
from raylane.graph.values.message import ERROR, VALUE
from raylane.graph.worker.program import Directions
from raylane.testing.leaks import leaks, snapshot

ALARM = 9
HEAD = struct.Struct("<IBBxxIQQ")
"""As in `frames`: channel, kind, flags, buffers, sequence, body bytes."""


class Told:
    def __init__(self) -> None:
        self.alarms: list[str] = []
        self.failures: list[bytes] = []
        self.inbound = Inbound("a peer", {}, LeasePool(1 << 20), ALARM, self.alarms.append, self.failures.append)

    def connect(self) -> socket.socket:
        one, two = socket.socketpair()
        self.inbound.take(two)
        one.settimeout(20)
        assert one.recv(1)  # the greeting
        return one


@pytest.fixture
def told() -> Iterator[Told]:
    before = snapshot()
    made = Told()
    yield made
    made.inbound.close()
    made.inbound.join(10)
    del made
    assert not leaks(before, within_s=10)


@pytest.mark.parametrize(
    "head",
    [
        HEAD.pack(7, VALUE, 0, 2**28, 0, 0),
        HEAD.pack(7, VALUE, 0, 5_000_000, 0, 0),
        HEAD.pack(ALARM, VALUE, 0, 0, 0, 2**31),
        HEAD.pack(ALARM, ERROR, 0, 0, 0, MAX_TOLD_BYTES + 1),
        HEAD.pack(7, 77, 0, 0, 0, 0),
        HEAD.pack(7, VALUE, 0, 0, 5, 0),
        HEAD.pack(7, VALUE, 0, 0, 0, 4),
    ],
)
def test_frame_with_impossible_sizes_is_refused(
    told: Told, head: bytes, eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    from raylane.graph.channels.frames import FrameReader

    exactly = FrameReader.exactly
    monkeypatch.setattr(FrameReader, "exactly", lambda self, count: (asked.append(count), exactly(self, count))[1])
    peer = told.connect()
    peer.sendall(head)
    eventually(lambda: told.alarms)
    assert "a peer: ProtocolError" in told.alarms[0]
    assert max(asked) <= MAX_TOLD_BYTES
    while peer.recv(1 << 16):  # to its end
        pass
    peer.close()


def test_alarm_that_is_no_text_is_told_all_the_same(told: Told, eventually: Callable[..., None]) -> None:
    peer = told.connect()
    peer.sendall(HEAD.pack(ALARM, VALUE, 0, 0, 0, 3) + b"\xff\xfeo")
    peer.sendall(HEAD.pack(ALARM, ERROR, 0, 0, 4, 2) + b"no")  # some may be missing
    eventually(lambda: told.failures)
    assert (len(told.alarms), told.alarms[0][-1], told.failures) == (1, "o", [b"no"])
    peer.close()


def test_peer_that_reconnects_often_costs_one_thread(told: Told) -> None:
    peers = []
    for _ in range(50):
        one, two = socket.socketpair()
        told.inbound.take(two)
        peers.append(one)
        assert sum(thread.name == "raylane-hop" for thread in threading.enumerate()) <= 1
    peers[-1].settimeout(20)
    assert peers[-1].recv(1)
    for peer in peers:
        peer.close()


def test_station_refuses_peers_that_were_not_announced() -> None:
    directions = Directions(
        key=b"k", member=0, names=("driver", "a"), alarm=ALARM, timeout_s=5.0, max_lent_bytes=1 << 20
    )
    station = Station(directions)
    for level in range(20):
        one, two = socket.socketpair()
        station._take(two, 1, level)
        one.settimeout(20)
        assert one.recv(1) == b""
        one.close()
    assert not station._inbounds
    assert not any(thread.name == "raylane-hop" for thread in threading.enumerate())
    station.close()
