"""The few functions of NVIDIA's driver library by which processes of a host share memory of a device.

By ctypes instead of `torch.multiprocessing`: torch counts readers in shared memory, and keeps the tensors of a reader
that died for ever. Here the source keeps the value, and the connection to the reader says when it is done.

Source: CUDA driver API, "Memory Management" (cuIpcGetMemHandle, cuIpcOpenMemHandle) and "Device Management".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from raylane.transport.backends.base import ChannelError

HANDLE_BYTES = 64
_INVALID_VALUE = 1
_PERMANENT = (_INVALID_VALUE, 46, 101, 217, 800, 801)
"""Codes that later calls get as well: invalid value, device unavailable, invalid device, no peer access, not permitted,
not supported. Source: CUresult in cuda.h of CUDA 12.
"""
_LAZY_PEER_ACCESS = 1


class CudaError(ChannelError):
    """The driver refused a call."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} ({code})")
        self.code = code
        self.permanent = code in _PERMANENT
        """True if another transport has to be used between the two processes."""


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class Allocation(NamedTuple):
    """Memory of a device as another process can open it."""

    handle: bytes
    """Name of the allocation in which the memory lies (CUipcMemHandle)."""
    offset: int
    """Place of the memory in the allocation, in bytes."""


@functools.cache
def driver() -> Any:
    """Return the driver library. CudaError if this machine has none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError("loading libcuda.so.1", 0, str(error)) from error
    address, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
    library.cuMemGetAddressRange_v2.argtypes = [ctypes.POINTER(address), ctypes.POINTER(size), address]
    library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), address]
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(address), _Handle, ctypes.c_uint]
    library.cuIpcCloseMemHandle.argtypes = [address]
    library.cuMemcpyDtoDAsync_v2.argtypes = [address, address, size, pointer]
    library.cuDeviceGetUuid_v2.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.cuDevicePrimaryCtxRetain.argtypes = [ctypes.POINTER(pointer), ctypes.c_int]
    library.cuDevicePrimaryCtxRelease_v2.argtypes = [ctypes.c_int]
    library.cuCtxPushCurrent_v2.argtypes = [pointer]
    library.cuCtxPopCurrent_v2.argtypes = [ctypes.POINTER(pointer)]
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    _call(library, "cuInit", 0)
    return library


def _call(library: Any, name: str, *args: Any) -> None:
    code = getattr(library, name)(*args)
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(name, code, (text.value or b"unknown error").decode())


@contextlib.contextmanager
def _context(device: int) -> Iterator[Any]:
    """Run the block in the context of a device that torch uses as well; yield the driver."""
    library, context = driver(), ctypes.c_void_p()
    # A number of torch is a number of the driver: both count what CUDA_VISIBLE_DEVICES lists.
    _call(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        _call(library, "cuCtxPushCurrent_v2", context)
        try:
            yield library
        finally:
            library.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        library.cuDevicePrimaryCtxRelease_v2(device)


@functools.cache
def uuid_of(device: int) -> bytes:
    """Return the 16 bytes by which all processes know a device."""
    uuid = ctypes.create_string_buffer(16)
    _call(driver(), "cuDeviceGetUuid_v2", uuid, device)
    return uuid.raw


def allocation_of(address: int, device: int) -> Allocation:
    """Return what another process needs to open this memory. CudaError if its allocator does not allow that."""
    with _context(device) as library:
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        _call(library, "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        try:
            _call(library, "cuIpcGetMemHandle", ctypes.byref(handle), base.value)
        except CudaError as error:
            if error.code == _INVALID_VALUE:
                raise CudaError(
                    "cuda_ipc cannot share memory of this allocator. Remove expandable_segments:True and "
                    "backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF in the source, or use "
                    "tensor_transport='nccl' or 'host'",
                    error.code,
                    "invalid argument",
                ) from error
            raise
        return Allocation(bytes(handle.bytes), address - base.value)


@contextlib.contextmanager
def mapped(handles: Sequence[bytes], device: int) -> Iterator[dict[bytes, int]]:
    """Map allocations of another process; yield the address of each. They are unmapped at the end of the block.

    CudaError if the device cannot reach that memory (other GPU without peer access).
    """
    addresses: dict[bytes, int] = {}
    with _context(device):
        try:
            # Each once, and unmapped at once: memory that its owner gives back to the driver must not be mapped.
            for handle in dict.fromkeys(handles):
                addresses[handle] = open_allocation(handle, device)
            yield addresses
        finally:
            for start in addresses.values():
                close_allocation(start, device)


def open_allocation(handle: bytes, device: int) -> int:
    """Map an allocation of another process until `close_allocation`; return its address.

    It may be mapped several times. CudaError if the device cannot reach that memory.
    """
    with _context(device) as library:
        address = ctypes.c_uint64()
        packed_handle = _Handle.from_buffer_copy(handle)
        _call(library, "cuIpcOpenMemHandle_v2", ctypes.byref(address), packed_handle, _LAZY_PEER_ACCESS)
        return address.value


def close_allocation(address: int, device: int) -> None:
    """Unmap what `open_allocation` has mapped at an address, once."""
    with _context(device) as library:
        library.cuIpcCloseMemHandle(address)


def copy_async(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy memory of devices on a stream; the context of the target's device is current."""
    _call(driver(), "cuMemcpyDtoDAsync_v2", target, source, nbytes, stream)


def pick_device(uuid: bytes, mine: Sequence[bytes], target: int) -> int:
    """Return the device in whose context another process's memory is opened. Pure.

    The device that has the memory, if this process sees it among `mine`; else the one that takes the copy, which then
    needs peer access.
    """
    return mine.index(uuid) if uuid in mine else target
