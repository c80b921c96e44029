from __future__ import annotations

import random

import pytest

from raylane.transport.link import wire

MESSAGES: list[wire.Message] = [
    wire.Challenge(1, b"n" * 16),
    wire.Hello(1, b"n" * 16, b"p" * 32, "driver"),
    wire.Welcome(b"p"),
    wire.Refusal("no"),
    wire.ReadValue(b"k"),
    wire.Data(123),
    wire.Trailer(True, True, False),
    wire.Gone(b"k"),
    wire.Put(b"k"),
    wire.PutReply(b"i", b"o", False, True),
    wire.Release(b"k"),
    wire.HeldQuery(),
    wire.HeldCount(4),
    wire.StreamRequest(b"k", 3, 1),
    wire.Streaming(1.5),
]


def test_every_message_survives_any_cut_of_the_stream() -> None:
    stream = b"".join(map(wire.pack_frame, MESSAGES))
    rng = random.Random(1)
    for _ in range(50):
        frames, got, at = wire.FrameBuffer(), [], 0
        while at < len(stream):
            step = rng.randint(1, 40)
            got += frames.feed(stream[at : at + step])
            at += step
        assert got == MESSAGES


@pytest.mark.claim("security", "random bytes in a frame are refused, and never crash a process")
def test_random_bytes_are_refused_never_crash() -> None:
    rng = random.Random(2)
    refused = 0
    for _ in range(2000):
        data = rng.randbytes(rng.randint(1, 60))
        try:
            wire.FrameBuffer().feed(len(data).to_bytes(4, "little") + data)
        except wire.WireError:
            refused += 1
    assert refused >= 1999  # a valid frame may come up by chance


@pytest.mark.claim("security", "a recorded handshake cannot be replayed")
def test_proof_fits_one_role_one_handshake_and_one_listener() -> None:
    right = (b"secret", "client", b"theirs", b"mine", "name")
    good = wire.make_proof(*right)
    assert wire.proofs_equal(good, wire.make_proof(*right))
    for i, other in enumerate((b"other", "listener", b"other", b"other", ("name", 1))):
        wrong = (*right[:i], other, *right[i + 1 :])
        assert not wire.proofs_equal(good, wire.make_proof(*wrong)), wrong
