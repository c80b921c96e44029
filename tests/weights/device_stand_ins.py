"""Stand-ins for the calls of NVIDIA's driver: memory that processes share takes the place of that of a device."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from raylane.core.memory.segment import HEAD_BYTES, Segment
from raylane.core.process import vm
from raylane.transport.backends.cuda import driver
from raylane.weights.memory import buckets

DEVICE_UUID = b"stand-in device!"
_made: list[Segment] = []
"""Memory of this process, which it keeps until it ends, as torch keeps that of a device."""
_opened: dict[int, Segment] = {}
"""Memory of other processes by the address that `open_allocation` has returned."""


def install() -> None:
    """Let this process take shared memory for that of a device."""
    vm.allow_readers()
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    replacements: list[tuple[Any, str, Any]] = [
        (driver, "driver", lambda: None),
        (driver, "uuid_of", lambda _: DEVICE_UUID),
        (driver, "allocation_of", allocation_of),
        (driver, "open_allocation", open_allocation),
        (driver, "close_allocation", close_allocation),
        (buckets, "new_bytes", new_bytes),
        (buckets, "as_tensor", as_tensor),
    ]
    for module, name, stand_in in replacements:
        setattr(module, name, stand_in)


def new_bytes(nbytes: int, _: torch.device) -> torch.Tensor:
    _made.append(Segment.make(HEAD_BYTES + nbytes))
    return torch.frombuffer(_made[-1].memory, dtype=torch.uint8, offset=HEAD_BYTES)


def allocation_of(address: int, _: int) -> driver.Allocation:
    segment = next(each for each in _made if each.address <= address < each.address + each.nbytes)
    return driver.Allocation(segment.path.encode().ljust(driver.HANDLE_BYTES, b"\0"), address - segment.address)


def open_allocation(handle: bytes, _: int) -> int:
    try:
        segment = Segment.open(handle.rstrip(b"\0").decode())
    except OSError as error:
        raise driver.CudaError("cuIpcOpenMemHandle_v2", 201, str(error)) from error
    _opened[segment.address] = segment
    return segment.address


def close_allocation(address: int, _: int) -> None:
    del _opened[address]


def opened() -> int:
    """Return the number of mapped allocations of other processes."""
    return len(_opened)


def as_tensor(memory: Any, _: int) -> torch.Tensor:
    address, nbytes = memory.__cuda_array_interface__["data"][0], memory.__cuda_array_interface__["shape"][0]

    class Bytes(ctypes.c_char * nbytes):  # type: ignore[misc]
        """Bytes that keep the object by which they are mapped."""

    data = Bytes.from_address(address)
    data.memory = memory
    return torch.frombuffer(data, dtype=torch.uint8)
