"""Links with TLS: real certificates, real sockets; wrong, missing and slow peers get typed errors."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import select
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tests import certificates
from tests.transport.servers import SECRET, Server, entry_of, read_value

from raylane.core.deadline import Deadline
from raylane.core.memory.spans import Span
from raylane.core.process import place
from raylane.errors import ProtocolError, SourceLostError, TransportError, TransportUnavailableError
from raylane.graph.channels import frames
from raylane.graph.channels.peer_link import configure
from raylane.graph.values.message import VALUE, Message
from raylane.transport.backends.registry import backends
from raylane.transport.hold.store import Entry
from raylane.transport.link import listener, tls, wire
from raylane.transport.link.connection import Link, LinkPool
from raylane.transport.read.choose import choose
from raylane.transport.value.layout import Layout
from raylane.transport.value.source import Source

pytestmark = pytest.mark.processes
Settings = dict[str, str]
Use = Callable[[Settings], None]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("tls")
    return certificates.make_certificate(certificates.make_authority(folder / "authority"), folder / "node")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("foreign")
    return certificates.make_certificate(certificates.make_authority(folder / "authority"), folder / "node")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    def set_all(settings: Settings) -> None:
        for name, value in settings.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.fixture
def server(use: Use, ours: Settings) -> Iterator[Server]:
    use(ours)
    before = set(threading.enumerate())  # an earlier test may have opened the endpoint of this process
    made = Server()
    yield made
    made.listener.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "raylane-listener"]


def test_authority_without_key_usage_is_explained(use: Use, tmp_path: Path) -> None:
    authority = certificates.make_authority(tmp_path / "authority", sloppy=True)
    settings = certificates.make_certificate(authority, tmp_path / "node")
    use(settings)
    server = Server()
    try:
        assert server.serves()  # as Ray itself accepts it
        context = tls._context(False, *list(settings.values())[1:])
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        with pytest.raises(ProtocolError, match=r"key usage extension.*keyUsage=critical,keyCertSign"):
            server.link()
    finally:
        server.listener.close()


@pytest.mark.parametrize("nbytes", [1, 16384, 16385, 50_000_000])
def test_value_arrives_through_tls(server: Server, nbytes: int) -> None:
    data = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    kept = entry_of(data)
    server.store.publish(kept)
    link = server.link()
    assert link.socket.version() == "TLSv1.3"  # type: ignore[attr-defined]
    assert bytes(read_value(link, kept.key, nbytes)) == data.numpy().tobytes()
    link.close()
    near = server.link(server.name)
    assert type(near.socket) is socket.socket  # the Unix socket stays as it is
    near.close()


def test_small_blocks_arrive_through_tls(server: Server) -> None:
    data = torch.arange(800_000, dtype=torch.uint8)
    start = data.data_ptr()
    spans = [Span(start + 8 * i, start + 8 * i + 4) for i in range(100_000)]
    layout = Layout(specs=[], blocks=spans, held=[data])
    kept = Entry(key=secrets.token_bytes(16), leaves=[], layout=layout, for_callers=True)
    server.store.publish(kept)
    link = server.link()
    link.send(wire.ReadValue(kept.key))
    assert link.receive() == wire.Data(400_000)
    found = [bytearray(4) for _ in range(100_000)]
    link.receive_into(found)
    assert isinstance(link.receive(), wire.Trailer)
    assert b"".join(found) == data.view(-1, 8)[:, :4].contiguous().numpy().tobytes()
    link.close()


def test_freed_memory_crashes_no_sender_with_tls(server: Server) -> None:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    start = libc.mmap(None, ctypes.c_size_t(4 << 20), 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    good = torch.ones(1 << 20, dtype=torch.uint8)
    blocks = [Span(start, start + (4 << 20)), Span(good.data_ptr(), good.data_ptr() + (1 << 20))]
    layout = Layout(specs=[], blocks=blocks, held=[good])
    kept = Entry(key=secrets.token_bytes(16), leaves=[], layout=layout, for_callers=True)
    server.store.publish(kept)
    link = server.link()
    assert bytes(read_value(link, kept.key, 5 << 20)[-(1 << 20) :]) == bytes(good.numpy())
    link.close()
    assert server.serves()
    libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(4 << 20))


def test_idle_link_with_tls_is_used_again(server: Server) -> None:
    pool = LinkPool(SECRET, "test", place.here(), Link)
    seen = set()
    for _ in range(5):
        with pool.borrow(server.addresses[1], server.source, Deadline(10)) as link:
            link.send(wire.HeldQuery())
            assert link.receive() == wire.HeldCount(0)
            seen.add(id(link))
    assert len(pool) == len(seen) == 1
    pool.close()


def test_reader_that_does_not_read_delays_nobody_with_tls(server: Server) -> None:
    kept = entry_of(torch.zeros(30 << 20, dtype=torch.uint8))
    server.store.publish(kept)
    deaf = server.link()
    deaf.send(wire.ReadValue(kept.key))
    for _ in range(3):
        assert server.serves()
    # It goes on where it stopped.
    assert deaf.receive() == wire.Data(30 << 20)
    found = bytearray(30 << 20)
    deaf.receive_into([found])
    assert deaf.receive() == wire.Trailer(True, False, False)
    assert not any(found)
    deaf.close()


@pytest.mark.claim("security", "with `RAY_USE_TLS=1` values travel by TLS, with certificates of both ends")
def test_peers_of_another_authority_are_refused(server: Server, use: Use, ours: Settings, foreign: Settings) -> None:
    use(foreign)
    with pytest.raises(ProtocolError, match="not signed by the CA in RAY_TLS_CA_CERT"):
        server.link()
    use({"RAY_TLS_CA_CERT": ours["RAY_TLS_CA_CERT"]})  # it trusts the listener, which does not trust it
    with pytest.raises(ProtocolError, match="refused the certificate of this process"):
        server.link()
    use(ours)
    assert server.serves()


@pytest.mark.claim("security", "with `RAY_USE_TLS=1` values travel by TLS, with certificates of both ends")
def test_client_without_a_certificate_is_refused(server: Server, ours: Settings) -> None:
    context = ssl.create_default_context(cafile=ours["RAY_TLS_CA_CERT"])
    context.check_hostname = False
    with (
        socket.create_connection(server.addresses[1], timeout=10) as sock,
        context.wrap_socket(sock) as wrapped,
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
    ):
        wrapped.recv(1)
    assert server.serves()


def test_old_versions_of_tls_are_refused(server: Server, ours: Settings) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(ours["RAY_TLS_SERVER_CERT"], ours["RAY_TLS_SERVER_KEY"])
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(server.addresses[1], timeout=10) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock)
    assert server.serves()


@pytest.mark.claim("security", "a process with TLS and one without get a typed error with the remedy")
def test_client_without_tls_is_told(server: Server, use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 0.1)
    use({"RAY_USE_TLS": "0"})
    with pytest.raises(ProtocolError, match="it uses TLS, and this process does not"):
        server.link()


@pytest.mark.claim("security", "a process with TLS and one without get a typed error with the remedy")
def test_listener_without_tls_is_told_from_one_with_it(use: Use, ours: Settings) -> None:
    plain = Server()
    use(ours)
    with pytest.raises(ProtocolError, match="the peer does not speak TLS"):
        plain.link()
    plain.listener.close()


def test_wrong_secret_is_refused_within_tls(server: Server) -> None:
    with pytest.raises(ProtocolError, match="wrong proof"):
        server.link(secret=b"x" * 32)


@pytest.mark.claim("security", "slow handshakes of TLS are dropped in time, and limited in number")
def test_slow_handshakes_with_tls_are_dropped_in_time(
    server: Server, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 0.3)
    slow = []
    for begin in (b"", b"\x16\x03\x01", b"garbage" * 100, b"\x16\x03\x01\xff\xff"):
        slow.append(socket.create_connection(server.addresses[1], timeout=10))
        slow[-1].sendall(begin)
    assert server.serves()
    eventually(lambda: server.listener.unauthenticated() == 0)
    for sock in slow:
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(1 << 16):  # to its end
                pass
        sock.close()
    assert server.serves()


@pytest.mark.claim("security", "slow handshakes of TLS are dropped in time, and limited in number")
def test_peers_without_proof_are_limited_with_tls(server: Server) -> None:
    held = [socket.create_connection(server.addresses[1], timeout=10) for _ in range(listener.MAX_UNAUTHENTICATED + 50)]
    assert server.serves()
    assert server.listener.unauthenticated() <= listener.MAX_UNAUTHENTICATED
    for sock in held:
        sock.close()


@pytest.fixture
def stream(server: Server, eventually: Any) -> Iterator[tuple[tls.TlsSocket, tls.TlsSocket]]:
    """Both ends of a connection that a listener has handed over."""
    taken: list[Any] = []
    server.streams[b"here"] = lambda sock, member, level: taken.append(sock)
    link = server.link()
    link.send(wire.StreamRequest(b"here", 0, 0))
    eventually(lambda: taken)
    configure(link.socket, 20.0, sender=True)
    yield link.socket, taken[0]  # type: ignore[misc]
    link.close()
    taken[0].close()


@pytest.mark.parametrize("sizes", [(10,), (200_000, 3, 0, 5_000_000), (7,) * 600])
def test_frames_of_graphs_arrive_through_tls(stream: tuple[Any, Any], sizes: tuple[int, ...]) -> None:
    sender, receiver = stream
    parts = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    pieces, _ = frames.pack_message(3, 8, Message(VALUE, b"body", [bytearray(part) for part in parts]), 0)
    sending = threading.Thread(target=frames.send_all, args=(sender, pieces))
    sending.start()
    reader = frames.FrameReader(receiver)
    header = frames.unpack_header(reader.exactly(frames.HEADER_BYTES))
    assert frames.unpack_sizes(reader.exactly(8 * header.buffers), header.buffers) == sizes
    assert [reader.exactly(size) for size in sizes] == parts
    assert reader.exactly(header.body) == b"body"
    sending.join()
    receiver.sendall(frames.RECEIPT_BYTE)
    assert sender.recv(100) == frames.RECEIPT_BYTE


def test_stream_with_tls_stops_waiting_at_its_limit(stream: tuple[Any, Any]) -> None:
    sender, _ = stream
    configure(sender, 20.0, sender=True)
    sender.settimeout(0.05)  # `configure` sets seconds; the way to the kernel is the same
    with pytest.raises(TimeoutError):
        sender.recv(1)


@pytest.mark.claim("security", "with TLS a connection never sends in the clear, and `gloo` and `nixl` are refused")
def test_shut_connection_never_sends_in_the_clear(stream: tuple[Any, Any]) -> None:
    sender, receiver = stream
    sender.shutdown(socket.SHUT_RD)  # `SSLSocket.shutdown` forgets TLS here, and would send these bytes as they are
    sender.sendall(b"secret")
    select.select([receiver], [], [], 10)
    assert b"secret" not in socket.socket.recv(receiver, 1000, socket.MSG_PEEK)
    assert receiver.recv(100) == b"secret"


def test_closed_connection_of_tls_is_a_lost_source(server: Server) -> None:
    link = server.link()
    server.listener.close()
    with pytest.raises(SourceLostError):
        link.receive()
    link.close()


@pytest.mark.parametrize("name", ["RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT"])
def test_unusable_files_of_tls_are_named(
    server: Server, use: Use, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.pem").write_text("")
    for path in (tmp_path / "missing.pem", tmp_path / "empty.pem"):
        use({name: str(path)})
        for attempt in (server.link, Server):
            with pytest.raises(TransportError, match=rf"{name}=.*{path.name}"):
                attempt()
    monkeypatch.delenv(name)
    with pytest.raises(TransportError, match=f"{name} is not: set it"):
        server.link()


@pytest.mark.claim("security", "with TLS a connection never sends in the clear, and `gloo` and `nixl` are refused")
@pytest.mark.parametrize("name", ["gloo", "nixl"])
def test_transports_in_the_clear_are_refused_with_tls(use: Use, name: str) -> None:
    there = Source(place.here(), "Actor(A, 1)", "u", "10.0.0.1", 1)
    there = Source(type(there.place)("other", 1, 1, 1000, 10, 5, "there"), there.label, "u", there.host, 1)

    def usable() -> tuple[str, ...]:
        return choose(there, place.here(), name, backends(), {}, may_call_ray=True).names

    assert usable() == (name,)
    use({"RAY_USE_TLS": "1"})
    with pytest.raises(TransportUnavailableError, match=f"{name} cannot encrypt.*RAYLANE_ALLOW_CLEARTEXT=1"):
        usable()
    use({"RAYLANE_ALLOW_CLEARTEXT": "1"})
    assert usable() == (name,)


CLUSTER = """
import importlib.util, os, socket
import ray, torch, raylane, raylane.errors
from raylane.transport.link.endpoint import endpoint
from raylane.transport.link.tls import TlsSocket

class Maker:
    @raylane.method
    def make(self): return torch.ones(1_000_000)

class User:
    @raylane.method
    def total(self, value): return float(value.sum())

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
maker, user = ray.remote(num_cpus=0)(Maker).remote(), ray.remote(num_cpus=0)(User).remote()
made = maker.make.remote()
assert float(raylane.get(made, tensor_transport="tcp", timeout=60).sum()) == 1_000_000
assert ray.get(user.total.remote(made), timeout=60) == 1_000_000
links = [link for idle in endpoint().links()._idle.values() for link in idle if not isinstance(link.socket, TlsSocket)]
assert endpoint().links()._idle and not [link for link in links if link.socket.family != socket.AF_UNIX]
try:
    raylane.get(maker.make.remote(), tensor_transport="gloo", timeout=60)
except raylane.errors.TransportUnavailableError as error:
    assert "cannot encrypt" in str(error)
    print("refused gloo")
os.environ["RAYLANE_ALLOW_CLEARTEXT"] = "1"
try:
    raylane.get(maker.make.remote(), tensor_transport="gloo", timeout=60)
except raylane.errors.TransportUnavailableError as error:
    assert "cannot encrypt" in str(error), error
    print("refused by the source")
free = ray.remote(num_cpus=0, runtime_env={"env_vars": {"RAYLANE_ALLOW_CLEARTEXT": "1"}})(Maker).remote()
for transport in ("gloo", *(["nixl"] if importlib.util.find_spec("nixl") else [])):
    assert float(raylane.get(free.make.remote(), tensor_transport=transport, timeout=60).sum()) == 1_000_000
ray.shutdown()
"""


@pytest.mark.claim("security", "with `RAY_USE_TLS=1` values travel by TLS, with certificates of both ends")
@pytest.mark.slow
def test_ray_with_tls_carries_values_by_tls(tmp_path: Path) -> None:
    address = ray.util.get_node_ip_address()
    settings = certificates.make_certificate(
        certificates.make_authority(tmp_path / "authority"), tmp_path / "node", address
    )
    script = tmp_path / "cluster.py"
    script.write_text(CLUSTER)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["refused gloo", "refused by the source"]
