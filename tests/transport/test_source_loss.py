"""Producers, owners and consumers killed at chosen moments: what the survivors see, how soon, and what they leave."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest
import ray
import torch
from tests.process_tools import stop
from tests.victims import VICTIMS

import raylane
from raylane.core.deadline import Deadline
from raylane.core.memory.layout import address_of
from raylane.core.process import vm
from raylane.errors import (
    SourceLostError,
    TensorFreedError,
    TransferTimeoutError,
    TransportError,
    TransportUnavailableError,
)
from raylane.transport.link.connection import Link
from raylane.transport.read.redeem import redeem
from raylane.transport.read.unpickling import collect

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("victims", "cluster")]
N = 4_000_000  # 16 MB


class Maker:
    @raylane.method
    def make(self) -> torch.Tensor:
        return torch.ones(N)

    @raylane.method(tensor_transport="tcp")
    def make_tcp(self) -> torch.Tensor:
        return torch.ones(N)

    def pid(self) -> int:
        return os.getpid()


class User:
    def total(self, value: torch.Tensor) -> float:
        return float(value.double().sum())

    def get(self, refs: list[Any], transport: str | None = None) -> float:
        return float(raylane.get(refs[0], tensor_transport=transport).double().sum())

    @raylane.method
    def decorated_total(self, value: torch.Tensor) -> float:
        return float(value.double().sum())

    def keep(self, refs: list[Any]) -> None:
        self.refs = refs

    def read_kept(self) -> str:
        try:
            return str(float(raylane.get(self.refs[0], timeout=30).double().sum()))
        except (TransportError, ray.exceptions.RayError) as error:
            return type(error).__name__

    def drop(self) -> None:
        self.refs = []


actor = VICTIMS.take


def kill(pid: int) -> None:
    """SIGKILL, and wait until the kernel has let go of the process's memory."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}/maps"):
        try:
            with open(f"/proc/{pid}/maps") as maps:
                if not maps.read(1):
                    return
        except OSError:
            return
        assert time.monotonic() < deadline
        time.sleep(0.001)


def assert_lost(action: Any) -> None:
    """Assert that a read reports the death itself: one that waited for its limit would raise TransferTimeoutError."""
    with pytest.raises(SourceLostError, match=r"Actor\(Maker"):
        action()


@pytest.mark.tour
@pytest.mark.parametrize("method", ["make", pytest.param("make_tcp", marks=pytest.mark.slow)])
def test_producer_killed_before_the_read(method: str) -> None:
    maker, user = actor(Maker), actor(User)
    ref = getattr(maker, method).remote()
    pid = ray.get(maker.pid.remote())
    assert ray.get(user.total.remote(ref)) == N
    kill(pid)
    for action in (
        lambda: ray.get(ref),
        lambda: raylane.get(ref),
        lambda: ray.get(user.total.remote(ref)),
        lambda: ray.get(user.get.remote([ref])),
        lambda: ray.get(user.decorated_total.remote(ref)),
    ):
        assert_lost(action)
    other = actor(Maker)
    assert ray.get(user.total.remote(other.make.remote())) == N


@pytest.mark.slow
def test_producer_killed_during_a_tcp_read(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = actor(Maker)
    ref = maker.make_tcp.remote()
    pid = ray.get(maker.pid.remote())
    ray.wait([ref])
    fill = Link._fill

    def fill_some_then_kill(self: Link, view: memoryview) -> None:
        if view.nbytes > 1 << 20:
            fill(self, view[: 1 << 20])
            kill(pid)
            view = view[1 << 20 :]
        fill(self, view)

    monkeypatch.setattr(Link, "_fill", fill_some_then_kill)
    assert_lost(lambda: raylane.get(ref))


@pytest.mark.slow
def test_producer_killed_during_one_sided_reads() -> None:
    """Readers in a loop while it dies: each read is whole or a typed error, and after the first error only errors."""
    maker = actor(Maker)
    ref = maker.make.remote()
    pid = ray.get(maker.pid.remote())
    results: list[Any] = []
    first = threading.Event()

    def read() -> None:
        for _ in range(10_000):
            try:
                value = raylane.get(ref, tensor_transport="host")
            except TransportError as error:
                results.append(error)
                return
            results.append(bool((value == 1).all()))
            first.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert first.wait(30)
    kill(pid)
    reader.join(timeout=30)
    assert not reader.is_alive()
    assert isinstance(results[-1], SourceLostError), results[-1]
    assert "Actor(Maker" in str(results[-1])
    assert all(result is True for result in results[:-1])


@pytest.mark.slow
def test_values_read_before_the_death_live_on() -> None:
    maker = actor(Maker)
    value = ray.get(maker.make.remote())
    kill(ray.get(maker.pid.remote()))
    assert float(value.double().sum()) == N


@pytest.mark.claim("transport", "a snapshot that a reader has mapped outlives its producer")
@pytest.mark.slow
def test_snapshot_mapped_before_the_death_lives_on() -> None:
    class Snap:
        @raylane.method(snapshot=True)
        def make(self) -> torch.Tensor:
            return torch.ones(N)

        def pid(self) -> int:
            return os.getpid()

    maker = actor(Snap)
    ref = maker.make.remote()
    value = ray.get(ref)
    kill(ray.get(maker.pid.remote()))
    assert float(value.double().sum()) == N
    with pytest.raises(SourceLostError, match=r"Actor\(Snap"):
        ray.get(ref)


@pytest.mark.claim("transport", "a value whose source died is lost, with a typed error, also after a restart")
@pytest.mark.slow
def test_restarted_producer_says_that_the_old_value_is_lost() -> None:
    maker = actor(Maker, max_restarts=1)
    ref = maker.make.remote()
    pid = ray.get(maker.pid.remote())
    ray.wait([ref])
    kill(pid)
    with pytest.raises(SourceLostError):
        ray.get(ref)
    deadline = time.monotonic() + 60
    while True:
        try:
            assert float(ray.get(maker.make.remote()).double().sum()) == N
            break
        except (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError):
            assert time.monotonic() < deadline


@pytest.mark.slow
def test_consumer_killed_leaves_the_value_and_the_producer(eventually: Any) -> None:
    maker, user = actor(Maker), actor(User)
    ref = maker.make.remote()
    assert ray.get(user.total.remote(ref)) == N
    ray.kill(user)
    assert float(ray.get(ref).double().sum()) == N


def test_a_stopped_producer_times_out_and_recovers() -> None:
    maker = actor(Maker)
    ref = maker.make_tcp.remote()
    pid = ray.get(maker.pid.remote())
    ray.wait([ref])
    stop(pid)
    try:
        with pytest.raises(TransferTimeoutError, match=r"Actor\(Maker.*0\.3 s"):
            raylane.get(ref, timeout=0.3)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert float(raylane.get(ref, timeout=30).double().sum()) == N


def test_timeout_while_the_value_is_being_made() -> None:
    class Slow:
        @raylane.method
        def make(self) -> torch.Tensor:
            threading.Event().wait(30)
            return torch.ones(N)

    maker = actor(Slow)
    with pytest.raises(TransferTimeoutError, match="not all of the values were produced"):
        raylane.get(maker.make.remote(), timeout=0.2)
    ray.kill(maker)


@pytest.mark.slow
def test_death_of_the_owner_frees_the_value(eventually: Any) -> None:
    """The submitter dies while another process still borrows the ref: a typed error there, and nothing held."""
    maker, borrower = actor(Maker), actor(User)

    class Submitter:
        def go(self, maker: Any, borrower: Any) -> int:
            ref = maker.make.remote()
            ray.wait([ref])
            ray.get(borrower.keep.remote([ref]))
            return os.getpid()

    submitter = actor(Submitter)
    pid = ray.get(submitter.go.remote(maker, borrower))
    assert ray.get(borrower.read_kept.remote()) == str(float(N))
    kill(pid)
    seen: set[str] = set()

    def gone() -> bool:
        answer = ray.get(borrower.read_kept.remote())
        seen.add(answer)
        return answer not in (str(float(N)),)

    eventually(gone, within_s=30)
    assert seen <= {str(float(N)), "TensorFreedError", "OwnerDiedError", "ObjectLostError"}, seen

    ray.get(borrower.drop.remote())
    other = maker.make.remote()
    assert float(ray.get(other).double().sum()) == N


@pytest.mark.slow
def test_a_host_read_races_with_a_free_and_is_whole_or_refused() -> None:
    """A producer frees and reuses its memory while another process reads it: never anything but the published bytes."""
    script = textwrap.dedent(
        """
        import ctypes, sys
        import torch
        from raylane.core.process import vm
        from raylane.transport.value import codec
        from raylane.transport.hold.store import Entry, Store
        vm.allow_readers()
        store = Store()
        for line in sys.stdin:
            tensor = torch.full((64_000,), int(line) % 1000 + 1, dtype=torch.int32)
            layout = codec.plan_layout([tensor])
            entry = Entry(key=line.encode(), leaves=[tensor], layout=layout, for_callers=True)
            store.publish(entry)
            print(layout.blocks[0].start, entry.header_address, entry.nonce, flush=True)
            key = entry.key
            for _ in range(int(line) % 7 * 300):
                pass
            store.free([key])
            tensor.fill_(-1)  # what the freed memory is used for next
            del tensor, entry, layout
        """
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    whole = refused = 0
    assert child.stdin is not None
    assert child.stdout is not None
    buffer, header = (ctypes.c_int32 * 64_000)(), (ctypes.c_uint64 * 2)()
    for i in range(1000):
        child.stdin.write(f"{i}\n")
        child.stdin.flush()
        start, header_at, nonce = map(int, child.stdout.readline().split())
        try:
            vm.read(child.pid, [(start, address_of(buffer), 256_000), (header_at, address_of(header), 16)])
        except OSError:
            refused += 1
            continue
        if header[0] != nonce:
            refused += 1
            continue
        whole += 1
        assert buffer[0] == buffer[31_999] == buffer[63_999] == i % 1000 + 1
    child.stdin.close()
    assert child.wait(timeout=30) == 0
    child.stdout.close()
    assert whole + refused == 1000
    assert refused > 0


DRIVER = """
import os, signal, sys, threading
import ray, torch
import raylane

class Maker:
    @raylane.method
    def make(self):
        return torch.ones(1_000_000)
    def pid(self):
        return os.getpid()

if __name__ == "__main__":
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    maker = ray.remote(num_cpus=0)(Maker).remote()
    ref, put = maker.make.remote(), raylane.put(torch.ones(1_000_000), snapshot=True)
    assert float(ray.get(ref).sum()) == 1_000_000
    print(ray.get(maker.pid.remote()), flush=True)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_driver_that_ends_or_is_killed_leaves_nothing(tmp_path: Any, end: str, eventually: Any) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [sys.executable, str(script), end], capture_output=True, text=True, timeout=540, check=False, env=os.environ
    )
    assert done.returncode == (0 if end == "exit" else -signal.SIGKILL), done.stderr
    pid = int(done.stdout.split()[-1])
    eventually(lambda: not os.path.exists(f"/proc/{pid}"), within_s=60)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "raylane" in name]


@pytest.mark.slow
def test_an_actor_goes_on_while_its_listener_is_abused() -> None:
    maker, user = actor(Maker), actor(User)
    ref = maker.make_tcp.remote()
    ray.wait([ref])
    ticket = collect([ref], None)[0].ticket
    address = (ticket.source.host, ticket.source.port)
    idle = [socket.create_connection(address, timeout=10) for _ in range(1000)]
    for sock in idle[::3]:
        sock.send(b"\xff\xff\xff\xff garbage")
    assert ray.get(user.total.remote(ref)) == N
    for sock in idle:
        sock.close()
    assert ray.get(user.get.remote([ref], "tcp")) == N
    assert isinstance(ray.get(maker.pid.remote()), int)


CAP_SYS_PTRACE = 19


class Guarded:
    """A producer that lets nobody read its memory."""

    def __init__(self) -> None:
        assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE: as a program with secrets would

    @raylane.method
    def make(self) -> torch.Tensor:
        return torch.ones(N)

    @raylane.method(tensor_transport="host")
    def make_host(self) -> torch.Tensor:
        return torch.ones(N)


class Unprivileged:
    """A reader without the capability that would let root read everybody (as in a container)."""

    def __init__(self) -> None:
        class Header(ctypes.Structure):
            _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

        libc, header, data = ctypes.CDLL(None), Header(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(ctypes.byref(header), data) == 0
        data[0] &= ~(1 << CAP_SYS_PTRACE)
        data[1] &= ~(1 << CAP_SYS_PTRACE)
        assert libc.capset(ctypes.byref(header), data) == 0

    def total(self, value: torch.Tensor) -> float:
        return float(value.double().sum())

    def stats(self) -> dict[str, Any]:
        return raylane.stats()


@pytest.mark.claim("transport", "TCP takes over by itself where the kernel forbids reads from another process")
@pytest.mark.slow
def test_tcp_takes_over_where_the_kernel_forbids_reads() -> None:
    guarded, reader = actor(Guarded), actor(Unprivileged)
    for _ in range(2):
        assert ray.get(reader.total.remote(guarded.make.remote())) == N
    stats = ray.get(reader.stats.remote())
    assert stats["tcp"] == 2
    assert "host" not in stats
    (why,) = stats["blocked"].values()
    assert "the kernel forbids reading" in why
    assert "ptrace" in why
    with pytest.raises(TransportUnavailableError, match="the kernel forbids reading"):
        ray.get(reader.total.remote(guarded.make_host.remote()))


@pytest.mark.slow
def test_freed_is_said_when_a_ticket_outlives_its_value(eventually: Any) -> None:
    """By hand, as no program should: the ticket's bytes kept past the ref."""
    maker = actor(Maker)
    ref = maker.make.remote()
    pending = collect([ref], None)[0]
    del ref

    def freed(transport: str) -> bool:
        try:
            redeem(pending.ticket, pending.skeleton, transport, Deadline(10), may_call_ray=True)
        except TensorFreedError:
            return True
        return False

    eventually(lambda: freed("host"))
    assert freed("tcp")
    assert freed("object_store")
