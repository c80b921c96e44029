"""Receiver of links: impossible sizes are refused without allocation, and each defect raises one alarm."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from raylane.graph.channels.layout import GraphLayout, GraphOptions
from raylane.graph.channels.lease import LeasePool
from raylane.graph.channels.peer_network import PeerNetwork
from raylane.graph.channels.receiver import MAX_REPORT_BYTES, Receiver
from raylane.graph.values.message import ERROR, VALUE
from raylane.testing.leaks import leaks, snapshot

ALARM = 9
HEAD = struct.Struct("<IBBxxIQQ")
"""As in `frames`: channel, kind, flags, buffers, sequence, body bytes."""


class Fixture:
    """Receiver with its alarms and failures."""

    def __init__(self) -> None:
        self.alarms: list[str] = []
        self.failures: list[bytes] = []
        self.receiver: Receiver | None = None

    def connect(self) -> socket.socket:
        one, two = socket.socketpair()
        self.receiver = Receiver(two, "a peer", {}, ALARM, self.alarms.append, self.failures.append)
        one.settimeout(20)
        assert one.recv(1)  # the greeting
        return one


@pytest.fixture
def peer_of() -> Iterator[Fixture]:
    before = snapshot()
    made = Fixture()
    yield made
    assert made.receiver is not None
    made.receiver.close()
    made.receiver.join(10)
    del made
    assert not leaks(before, within_s=10)


@pytest.mark.claim("security", "between hosts of a graph, a frame cannot claim memory by its sizes")
@pytest.mark.parametrize(
    "head",
    [
        HEAD.pack(7, VALUE, 0, 2**28, 0, 0),
        HEAD.pack(7, VALUE, 0, 5_000_000, 0, 0),
        HEAD.pack(ALARM, VALUE, 0, 0, 0, 2**31),
        HEAD.pack(ALARM, ERROR, 0, 0, 0, MAX_REPORT_BYTES + 1),
        HEAD.pack(7, 77, 0, 0, 0, 0),
        HEAD.pack(7, VALUE, 0, 0, 5, 0),
        HEAD.pack(7, VALUE, 0, 0, 0, 4),
    ],
)
def test_frame_with_impossible_sizes_is_refused(
    peer_of: Fixture, head: bytes, eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    from raylane.graph.channels.frames import FrameReader

    exactly = FrameReader.exactly
    monkeypatch.setattr(FrameReader, "exactly", lambda self, count: (asked.append(count), exactly(self, count))[1])
    peer = peer_of.connect()
    peer.sendall(head)
    eventually(lambda: peer_of.alarms)
    assert "a peer: ProtocolError" in peer_of.alarms[0]
    assert max(asked) <= MAX_REPORT_BYTES
    while peer.recv(1 << 16):  # to its end
        pass
    peer.close()


def test_alarm_that_is_no_text_is_raised_all_the_same(peer_of: Fixture, eventually: Callable[..., None]) -> None:
    peer = peer_of.connect()
    peer.sendall(HEAD.pack(ALARM, VALUE, 0, 0, 0, 3) + b"\xff\xfeo")
    peer.sendall(HEAD.pack(ALARM, ERROR, 0, 0, 4, 2) + b"no")  # some may be missing
    eventually(lambda: peer_of.failures)
    assert (len(peer_of.alarms), peer_of.alarms[0][-1], peer_of.failures) == (1, "o", [b"no"])
    peer.close()


def network_of(links: tuple[tuple[int, int, int], ...]) -> PeerNetwork:
    layout = GraphLayout(
        graph="6b",
        member=0,
        names=("driver", "a"),
        edge_count=ALARM - 2,
        options=GraphOptions(
            max_inflight=1, timeout_s=5.0, start_timeout_s=5.0, max_lent_bytes=1 << 20, exclusive=False
        ),
        near_driver=True,
        routes={},
        doorbells={},
        links=links,
        rings={},
        sources={},
    )
    assert layout.alarm_channel == ALARM
    return PeerNetwork(layout)


@pytest.mark.claim("security", "between hosts of a graph, only announced peers are served, with one thread each")
def test_network_refuses_peers_that_were_not_announced() -> None:
    network = network_of(())
    for level in range(20):
        one, two = socket.socketpair()
        network._accept(two, 1, level)
        one.settimeout(20)
        assert one.recv(1) == b""
        one.close()
    assert not network._receivers
    assert not any(thread.name == "raylane-receiver" for thread in threading.enumerate())
    network.close()


@pytest.mark.claim("security", "between hosts of a graph, only announced peers are served, with one thread each")
def test_peer_that_connects_often_costs_one_thread() -> None:
    network = network_of(((1, 0, 0),))
    network._pools[1, 0] = LeasePool(1 << 20)
    peers = []
    for _ in range(50):
        one, two = socket.socketpair()
        network._accept(two, 1, 0)
        one.settimeout(20)
        peers.append(one)
        assert sum(thread.name == "raylane-receiver" for thread in threading.enumerate()) <= 1
    assert peers[0].recv(1)
    assert all(peer.recv(1) == b"" for peer in peers[1:])
    for peer in peers:
        peer.close()
    network.close()
