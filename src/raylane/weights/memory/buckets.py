"""Slots whose part lies on a CUDA device, in a *bucket*: memory of the rank that publishes it.

With `transport="cuda_ipc"` each rank writes a part of its own. A slot of it has words and locks as any other, but no
bytes; a *label* in its first page says where the bucket is:

    slot (of the keeper)                               bucket (of the rank)
    64     label: process, device, allocation   ──>    boxes of the rank
    4096   word of the rank

Readers of the host map the allocation once, and copy from it on the device. Memory of a device ends with its process,
whoever has mapped it, and CUDA does not define what the mapping shows then. So a reader compares the label before and
after it copies, and what was copied counts only if the process still lives and the label is the same.

Written after the documentation of CUDA 12; run with stand-ins for the calls of the driver, not on a device.
"""

from __future__ import annotations

import os
import secrets
import struct
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch

from raylane.core.deadline import Deadline
from raylane.core.memory.segment import Segment
from raylane.core.memory.windows import Window
from raylane.core.process.place import here, keeps_memory
from raylane.errors import WeightsError, WeightsLostError
from raylane.transport.backends.cuda import driver
from raylane.weights.layout.boxes import host_of, is_on_device
from raylane.weights.memory.slots import OpenSlot, StaleSlot

_LABEL = struct.Struct(f"<QQQQQ16s{driver.HANDLE_BYTES}s")
_LABEL_AT = 64


class Label(NamedTuple):
    """Place of a bucket, as a slot has it."""

    token: int
    """Random number of the bucket; 0 if there is none."""
    pid: int
    start_ticks: int
    """Start time of the process, as the pid may be used again."""
    offset: int
    """First byte of the bucket in the allocation."""
    nbytes: int
    device: bytes
    """UUID of the device."""
    handle: bytes
    """Name of the allocation in the driver."""

    def is_there(self) -> bool:
        """Return True if the process with the bucket lives."""
        return self.token != 0 and keeps_memory(self.pid, self.start_ticks)


class _DeviceBytes:
    """Bytes at an address of a device, as torch takes them: the tensor keeps this object."""

    def __init__(self, address: int, nbytes: int) -> None:
        interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = interface


_own_buckets: dict[int, torch.Tensor] = {}
"""Buckets of this process by token: the driver maps only those of other processes."""


def _open(label: Label, target: int) -> torch.Tensor:
    """Return the memory of a bucket; of another process it is mapped until the last tensor over it is gone.

    It is mapped for the device that has it, or for the `target` where this process does not see that device.
    """
    if label.token in _own_buckets:
        return _own_buckets[label.token]
    mine = [driver.uuid_of(number) for number in range(torch.cuda.device_count())]
    device = driver.pick_device(label.device, mine, target)
    start = driver.open_allocation(label.handle, device)
    address = start + label.offset
    memory = _DeviceBytes(address, label.nbytes)
    weakref.finalize(memory, driver.close_allocation, start, device).atexit = False
    tensor = as_tensor(memory, device)
    if tensor.data_ptr() != address:  # a copy, which would never show a later version
        raise driver.CudaError("torch.as_tensor", 0, f"the mapped memory is not on device {device}")
    return tensor


def as_tensor(memory: _DeviceBytes, device: int) -> torch.Tensor:
    """Return a tensor over mapped bytes of a device."""
    return torch.as_tensor(memory, device=f"cuda:{device}")


class BucketSlot(OpenSlot):
    """A slot of another process whose part lies on a device. Not thread-safe."""

    def __init__(self, path: str, ranks: int, device: int = 0) -> None:
        """Open a slot as `OpenSlot` does; `memory` maps its bucket, if it must for this device (`_open`)."""
        super().__init__(path, ranks)
        self._device = device
        self._label: Label | None = None
        """Label of the bucket that is mapped."""
        self._bucket: torch.Tensor | None = None

    def _read_label(self) -> Label:
        return Label(*_LABEL.unpack_from(self._segment.view, _LABEL_AT))

    def memory(self, window: Window | None = None) -> torch.Tensor:
        """Return the part as bytes on the device. WeightsError if this process cannot map it."""
        del window  # of shared memory
        if self._bucket is None:
            label = self._read_label()
            try:
                self._bucket, self._label = _open(label, self._device), label
            except driver.CudaError as error:
                if not label.is_there():
                    raise _ended(label) from error
                raise WeightsError(
                    f"the memory of process {label.pid} cannot be mapped: {error}. Publish with transport='host', or "
                    "run the reader on a device that can reach that of the trainer"
                ) from error
        return self._bucket

    def is_replaced(self) -> bool:
        """Return True if the bucket that was mapped is not that of the slot any more."""
        return self._label is not None and self._label != self._read_label()

    def hold(self, number: int) -> None:
        """Do the same as `OpenSlot.hold`. WeightsLostError if the process that has the bucket has ended."""
        super().hold(number)
        try:
            if self.is_replaced():
                raise StaleSlot
            self.check_present(number)
        except BaseException:
            self.release()
            raise

    def check_present(self, number: int) -> None:
        """Raise WeightsLostError if the version is not there any more, though this slot is held."""
        label = self._read_label()
        if not label.is_there() or self.is_replaced() or set(self.numbers()) != {number}:
            raise _ended(label)

    def close(self) -> None:
        """Close the slot. Tensors over its memory keep that mapped."""
        self._bucket = None
        super().close()


def _ended(label: Label) -> WeightsLostError:
    return WeightsLostError(
        f"the version lay on a device of process {label.pid or 'of the trainer'}, which has ended or has closed its "
        "publisher. Update when the trainer has published again, or publish with transport='host', where versions "
        "outlive the trainer"
    )


class OwnBucket(BucketSlot):
    """A slot with a bucket of this process, to which it publishes."""

    def __init__(self, path: str, ranks: int, nbytes: int, device: int) -> None:
        """Take memory for a bucket. WeightsError if the device has too little, or its allocator cannot share it."""
        super().__init__(path, ranks, device)
        try:
            self._bucket = new_bytes(nbytes, torch.device("cuda", device))
            allocation, uuid = driver.allocation_of(self._bucket.data_ptr(), device), driver.uuid_of(device)
        except (driver.CudaError, torch.OutOfMemoryError) as error:
            raise WeightsError(
                f"a bucket of {nbytes:,} bytes for a version cannot be had on GPU {device}: {error}. Publish with a "
                "smaller keep, or with transport='host'"
            ) from error
        place = here()
        token = secrets.randbits(63) + 1
        self._label = Label(token, place.pid, place.start_ticks, allocation.offset, nbytes, uuid, allocation.handle)
        _own_buckets[token] = self._bucket
        self._end = weakref.finalize(self, _forget, self._segment, self._label)

    def begin_writing(self, rank: int, deadline: Deadline, waiting: str, number: int | None = None) -> int:
        """Do the same as `OpenSlot.begin_writing`, and label the slot, which nobody reads now."""
        before = super().begin_writing(rank, deadline, waiting, number)
        assert self._label is not None
        _LABEL.pack_into(self._segment.view, _LABEL_AT, *self._label)
        return before

    def is_surplus(self) -> bool:
        """Return True if the bucket has no version, as the one that was held there was released."""
        return not any(self.numbers())

    def close(self) -> None:
        """Give the bucket up: what readers copy from it from now on does not count."""
        self._end()
        super().close()


def _forget(segment: Segment, label: Label) -> None:
    """Remove the label of a bucket, if it is still in the slot. A forked child leaves that of its parent."""
    _own_buckets.pop(label.token, None)
    if label.pid == os.getpid() and Label(*_LABEL.unpack_from(segment.view, _LABEL_AT)) == label:
        _LABEL.pack_into(segment.view, _LABEL_AT, 0, label.pid, 0, 0, 0, b"", b"")


def new_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return new memory of a device. Waits once for what this thread's stream has to do."""
    memory = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
    # It may have belonged to a tensor that kernels of this stream still use, and it is written on another stream.
    torch.cuda.current_stream(device).synchronize()
    return memory


def device_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the device on which these tensors are published or read: the first one that one of them is on.

    Without any, that of this thread, which is that of the user; 0 if this process does not use CUDA.
    """
    device = next((tensor.device.index for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    return int(device)


def check_driver(name: str) -> None:
    """Raise WeightsError if this process has no CUDA device, for weights of this name."""
    try:
        driver.driver()
    except driver.CudaError as error:
        raise WeightsError(
            f"{name!r} with transport='cuda_ipc' needs a CUDA device in the trainer and in the readers: {error}. "
            "Publish with transport='host'"
        ) from error


def check_reader(name: str, apply: str) -> None:
    """Raise WeightsError if a reader cannot take versions from devices."""
    if apply == "map":
        raise WeightsError(
            f"{name!r} is published with transport='cuda_ipc', and cannot be mapped: its memory is written again. Use "
            "apply='copy' or 'swap', or publish with transport='host'"
        )
    check_driver(name)


def check_host(name: str, parts: Iterable[str], host: str) -> None:
    """Raise WeightsError if some of these parts, which are not on the host of a reader, are on devices."""
    hosts = sorted({host_of(part) for part in parts if is_on_device(part)})
    if hosts:
        raise WeightsError(
            f"{name!r} is published with transport='cuda_ipc' on nodes {', '.join(hosts)}, and this reader is on node "
            f"{host}. Publish with transport='host', or place the reader there"
        )
