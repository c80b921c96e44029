"""The one contract suite over every transport that is here."""

from __future__ import annotations

import pytest

from raylane.testing.contract import BackendContract
from raylane.transport.backends.nixl.agent import missing
from raylane.transport.backends.ray_managers.backend import ManagedBackend
from raylane.transport.backends.registry import backends

pytestmark = pytest.mark.usefixtures("ray_session", "cluster")


class TestLocal(BackendContract):
    name = "local"
    within_process = True


class TestHost(BackendContract):
    name = "host"


class TestTcp(BackendContract):
    name = "tcp"


class TestGloo(BackendContract):
    name = "gloo"


@pytest.mark.skipif(missing() is not None, reason=f"this process cannot use NIXL: {missing()}")
class TestNixl(BackendContract):
    name = "nixl"


@pytest.mark.claim("transport", "every transport passes the contract tests of `raylane.testing`, without a GPU")
def test_every_transport_is_under_contract() -> None:
    here = {"local", "host", "tcp", "gloo", "nixl", "object_store"}
    with_gpu = {"cuda_ipc", "nccl"}  # tests/gpu/test_contracts.py
    # Other tests of this process may have registered transports.
    own = {name for name, backend in backends().items() if not isinstance(backend, ManagedBackend)}
    assert own == here | with_gpu


class TestObjectStore(BackendContract):
    """Published for any transport, fetched through Ray's store: a value *declared* object_store has no ticket."""

    name = "object_store"
    published_as = "auto"
