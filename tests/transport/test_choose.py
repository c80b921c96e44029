from __future__ import annotations

import msgspec
import pytest

from raylane.core.process.place import Place
from raylane.errors import TransportUnavailableError
from raylane.transport.backends.registry import backends, check_name
from raylane.transport.produce.options import publish_options
from raylane.transport.read.choose import choose
from raylane.transport.value.source import Source

HERE = Place("boot", 1, 1, 1000, 10, 5, "here")


def source(**changes: object) -> Source:
    return Source(msgspec.structs.replace(HERE, **changes), "Actor(A, 1)", "u", "10.0.0.1", 1)


def names(there: Source, wanted: str = "auto", *, may_call_ray: bool = True, **blocked: str) -> tuple[str, ...]:
    stopped = {(name, there.place): why for name, why in blocked.items()}
    return choose(there, HERE, wanted, backends(), stopped, may_call_ray=may_call_ray).names


@pytest.mark.claim("transport", "`auto` takes the closest transport for each pair of processes")
def test_auto_takes_the_closest() -> None:
    assert names(source()) == ("local",)
    assert names(source(pid=11)) == ("host", "tcp", "object_store")
    assert names(source(boot_id="other", hostname="there")) == ("tcp", "object_store")
    assert names(source(pid=11), may_call_ray=False) == ("host", "tcp")


def test_a_reused_pid_is_another_process() -> None:
    assert names(source(start_ticks=6))[0] == "host"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pid": 11, "pid_namespace": 2}, "pid namespaces"),
        ({"pid": 11, "uid": 7}, "user 7"),
        ({"pid": 11, "boot_id": "b2", "hostname": "far"}, "another host"),
    ],
)
def test_host_says_why_it_cannot(changes: dict[str, object], reason: str) -> None:
    there = source(**changes)
    choice = choose(there, HERE, "auto", backends(), {}, may_call_ray=True)
    assert choice.names[0] == "tcp"
    assert reason in choice.refused["host"]
    assert reason in str(choice)
    with pytest.raises(TransportUnavailableError, match=reason):
        names(there, "host")


def test_choose_skips_a_transport_that_failed_before() -> None:
    there = source(pid=11)
    assert names(there, host="the kernel forbids it") == ("tcp", "object_store")
    with pytest.raises(TransportUnavailableError, match="the kernel forbids it"):
        names(there, "host", host="the kernel forbids it")


def test_within_one_process_nothing_moves_unless_asked_to() -> None:
    assert names(source(), "tcp") == ("local",)
    assert names(source(), "object_store") == ("object_store",)
    with pytest.raises(TransportUnavailableError, match="another process"):
        names(source(pid=11), "local")


def test_object_store_refuses_reads_while_unpickling() -> None:
    with pytest.raises(TransportUnavailableError, match=r"raylane\.get"):
        names(source(pid=11), "object_store", may_call_ray=False)


def test_names() -> None:
    assert check_name("TCP") == "tcp"
    with pytest.raises(
        ValueError, match=r"did you mean 'host'.*auto, local, host, tcp, object_store, cuda_ipc, gloo, nccl, nixl"
    ):
        check_name("hst")
    with pytest.raises(TypeError, match="3"):
        check_name(3)


def test_options() -> None:
    assert publish_options(None, "HOST", False, "warn", where="x").tensor_transport == "host"
    with pytest.raises(ValueError, match="another spelling"):
        publish_options("tcp", "host", False, "warn", where="x")
    with pytest.raises(ValueError, match=r"on_mutation must be one of warn, error, allow, got 'log'"):
        publish_options(None, None, False, "log", where="x")
    with pytest.raises(ValueError, match="shared memory"):
        publish_options("tcp", None, True, "warn", where="x")
    with pytest.raises(TypeError, match="snapshot must be True or False, got 1"):
        publish_options(None, None, 1, "warn", where="x")  # type: ignore[arg-type]
