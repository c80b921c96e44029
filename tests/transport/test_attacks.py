"""A listener that is attacked serves its honest readers; with -s this prints their times with and without attackers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import certificates
from tests.transport.attackers import KINDS, NBYTES
from tests.transport.servers import SECRET, read_value

from raylane.core.deadline import Deadline
from raylane.core.process import place
from raylane.transport.link.connection import Link, LinkPool
from raylane.transport.value.source import Source

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.processes]
READS = 150
CASES = [(False, "nobody"), *((False, kind) for kind in KINDS), (True, "deaf"), (True, "slow")]
"""With TLS those that hold a connection open; what they send is not read before the handshake (`test_tls`)."""


@pytest.fixture(scope="module")
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[bool]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            folder = tmp_path_factory.mktemp("certificates")
            authority = certificates.make_authority(folder / "authority")
            for name, value in certificates.make_certificate(authority, folder / "node").items():
                patch.setenv(name, value)
        yield bool(request.param)


def _start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.transport.attackers", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


@pytest.fixture(scope="module")
def attacked(secured: bool) -> Iterator[tuple[int, bytes]]:
    """Port and key of the value of a listener in a process of its own."""
    process = _start("serve")
    assert process.stdout is not None
    port, key = process.stdout.readline().split()
    yield int(port), bytes.fromhex(key)
    process.communicate("", timeout=30)
    assert process.returncode == 0


def _honest(port: int, key: bytes) -> dict[str, list[float]]:
    """Read the value many times over kept links and over new ones; return the seconds of each."""
    address = "127.0.0.1", port
    source = Source(place.here(), "Actor(Attacked)", "", *address)
    expected = bytes(i % 251 for i in range(NBYTES))
    taken: dict[str, list[float]] = {"kept link": [], "new link": []}
    kept = LinkPool(SECRET, "honest", place.here(), Link)
    for i in range(READS):
        name = "kept link" if i % 3 else "new link"
        pool = kept if i % 3 else LinkPool(SECRET, "honest", place.here(), Link)
        began = time.perf_counter()
        with pool.borrow(address, source, Deadline(30)) as link:
            found = read_value(link, key, NBYTES)
        taken[name].append(time.perf_counter() - began)
        assert bytes(found) == expected
        if pool is not kept:
            pool.close()
    kept.close()
    return taken


def _say(kind: str, secured: bool, taken: dict[str, list[float]]) -> None:
    for name, seconds in taken.items():
        ranked = sorted(seconds)
        p50, p99 = (ranked[int(len(ranked) * share)] * 1e3 for share in (0.5, 0.99))
        print(f"{'tls' if secured else 'plain'}, {kind}, {name}: p50 {p50:.2f} ms, p99 {p99:.2f} ms")


@pytest.mark.claim("security", "honest readers are served among attackers with garbage, replays and slow connections")
@pytest.mark.parametrize(("secured", "kind"), CASES, indirect=["secured"])
def test_honest_readers_are_served_among_attackers(kind: str, secured: bool, attacked: tuple[int, bytes]) -> None:
    port, key = attacked
    attackers: list[Any] = [] if kind == "nobody" else [_start(kind, str(port), key.hex())]
    try:
        for attacker in attackers:
            assert attacker.stdout.readline() == "begun\n"
        _say(kind, secured, _honest(port, key))
        assert all(attacker.poll() is None for attacker in attackers), "an attacker gave up"
    finally:
        for attacker in attackers:
            attacker.kill()
            attacker.communicate()
