"""Tensor transports as others write them for Ray: one that is one-sided, through files, and two two-sided ones."""

from __future__ import annotations

import os
import select
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from ray.experimental import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata

ROOT = os.path.join(tempfile.gettempdir(), "raylane-test-managers")


@dataclass
class PathMetadata(TensorTransportMetadata):
    """Place of the bytes."""

    path: str = ""


class FileManager(TensorTransportManager):
    """Writes the tensors to a file when they are published; readers read it."""

    def tensor_transport_backend(self) -> str:
        return "FILE"

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return False

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> PathMetadata:
        os.makedirs(ROOT, exist_ok=True)
        found = PathMetadata([(one.shape, one.dtype) for one in rdt_object], "cpu", os.path.join(ROOT, obj_id))
        self.fill(found.path, rdt_object)
        return found

    def fill(self, path: str, tensors: list[Any]) -> None:
        with open(path, "wb") as file:
            for one in tensors:
                file.write(memoryview(one.numpy()))

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> Any:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any, target_buffers: Any = None
    ) -> list[Any]:
        # As a transport that ignores the target buffers.
        found = [torch.empty(shape, dtype=dtype) for shape, dtype in tensor_transport_metadata.tensor_meta]
        with open(tensor_transport_metadata.path, "rb") as file:
            for one in found:
                assert file.readinto(memoryview(one.numpy())) == one.nbytes
        return found

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise NotImplementedError

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: Any) -> None:
        os.unlink(tensor_transport_meta.path)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        raise NotImplementedError


class PipeManager(FileManager):
    """Two-sided: the source writes the tensors into a named pipe while the reader reads it. Can abort."""

    def __init__(self) -> None:
        self.aborted: set[str] = set()

    @staticmethod
    def is_one_sided() -> bool:
        return False

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def fill(self, path: str, tensors: list[Any]) -> None:
        os.mkfifo(path)

    def check(self, path: str) -> None:
        if os.path.basename(path) in self.aborted:
            raise RuntimeError("aborted")

    def recv_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any, target_buffers: Any = None
    ) -> list[Any]:
        path = tensor_transport_metadata.path
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            for one in target_buffers:
                view = memoryview(one.numpy()).cast("B")
                while view.nbytes:
                    self.check(path)
                    if select.select([pipe], [], [], 0.05)[0]:
                        view = view[os.readv(pipe, [view]) :]
        finally:
            os.close(pipe)
        return list(target_buffers)

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        path = tensor_transport_metadata.path
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            for one in tensors:
                view = memoryview(one.numpy()).cast("B")
                while view.nbytes:
                    self.check(path)
                    if select.select([], [pipe], [], 0.05)[1]:
                        view = view[os.write(pipe, view[:65536]) :]
            # The pipe's content ends with its last descriptor: wait until the reader has it all.
            while select.select([pipe], [], [], 0)[0]:
                self.check(path)
                time.sleep(0.001)
        finally:
            os.close(pipe)

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        self.aborted.add(obj_id)


class StuckManager(PipeManager):
    """Never delivers anything, until it is aborted."""

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        while True:
            self.check(tensor_transport_metadata.path)
            time.sleep(0.01)


class BrokenManager(FileManager):
    """Fails in the source."""

    def fill(self, path: str, tensors: list[Any]) -> None:
        raise OSError(28, "the card is on fire")
