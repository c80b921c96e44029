"""The contract suite over transports that were written for Ray."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from tests.transport.managers import FileManager, PipeManager

import raylane
from raylane.testing.contract import BackendContract
from raylane.transport.backends.registry import backends

pytestmark = pytest.mark.usefixtures("ray_session", "cluster")


class AdapterContract(BackendContract):
    manager: ClassVar[Any]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _registered(cls, ray_session: None) -> Iterator[None]:
        raylane.add_ray_transport(cls.name, cls.manager)
        yield
        backends().pop(cls.name, None)

    def test_registry_has_the_backend_with_a_summary(self) -> None:
        ref = self.publish([100])
        self.redeem(self.pending(ref))  # the first use adds it
        super().test_registry_has_the_backend_with_a_summary()


class TestFileManager(AdapterContract):
    name = "test-file"
    manager = FileManager


class TestPipeManager(AdapterContract):
    name = "test-pipe"
    manager = PipeManager
