"""Frames of hops through real sockets, in pieces of every size."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import pytest

from raylane.graph.channels import frames
from raylane.graph.values.message import NOTHING, VALUE, Message


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair()
    yield one, two
    one.close()
    two.close()


def messages() -> list[Message]:
    rng = random.Random(3)
    found = [Message(NOTHING, b""), Message(VALUE, b"body"), Message(VALUE, rng.randbytes(300_000))]
    for _ in range(40):
        buffers = [rng.randbytes(rng.choice((0, 1, 100, 70_000, 500_000))) for _ in range(rng.randint(0, 4))]
        found.append(Message(VALUE, rng.randbytes(rng.choice((1, 50, 66_000))), buffers))
    found.append(Message(VALUE, b"many", [b"%d" % i for i in range(3000)]))
    found.append(Message(VALUE, b"many large", [b"x" * 100] * 2000))
    return found


def test_frames_arrive_as_they_were_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    sent = messages()

    def send() -> None:
        for sequence, message in enumerate(sent):
            frames.send_all(pair[0], frames.pack_message(7, sequence, message, 4)[0])
        pair[0].shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    reader = frames.FrameReader(pair[1])
    for sequence, message in enumerate(sent):
        head = frames.unpack_header(reader.exactly(frames.HEADER_BYTES))
        assert (head.channel, head.kind, head.sequence) == (7, message.kind, sequence)
        large = message.nbytes >= frames.JOIN_BELOW_BYTES
        assert head.flags == (4 | frames.RECEIPT if large else 4)
        sizes = frames.unpack_sizes(reader.exactly(8 * head.buffers), head.buffers)
        got = [bytearray(size) for size in (*sizes, head.body)]
        for part in got:
            reader.fill(memoryview(part))
        assert got == [*message.buffers, message.body]
    sender.join()
    with pytest.raises(ConnectionError):
        reader.exactly(1)


def test_small_frames_are_copies_and_large_ones_lend() -> None:
    small, large = bytearray(100), bytearray(frames.JOIN_BELOW_BYTES)
    pieces, lent = frames.pack_message(0, 0, Message(VALUE, b"b", [small]), 0)
    assert not lent
    small[:] = b"x" * 100
    assert b"x" not in bytes(pieces[0])
    pieces, lent = frames.pack_message(0, 0, Message(VALUE, b"b", [large]), 0)
    assert lent
    large[0] = 1
    assert pieces[1][0] == 1
