"""Splitting of a value into a skeleton and its tensors (leaves), and the reverse. Independent of how bytes travel.

A *leaf* is a torch tensor or Parameter (strided, CPU or CUDA) or a NumPy array; the *skeleton* is the pickle of the
rest. Leaves that share memory share a *block*: the block is transferred once, and the rebuilt leaves share it again, so
views and tied weights stay tied. Values that are not leaves (sparse, quantised and meta tensors, tensor subclasses,
object arrays) are pickled as usual; plain tensors inside them are leaves again. Called by `publish`, `reader` and
`graph.message`.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch.nn import Parameter

from raylane import _ray
from raylane.core.spans import Span, merge, strided_span
from raylane.errors import TensorFreedError

TENSOR, PARAMETER, ARRAY = 0, 1, 2
SPARSE_VIEW_FACTOR = 2
"""Ratio of span to elements above which a view (such as a column of a matrix) is packed before its transfer."""
_ALIGNMENT = 16


class LeafSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Layout of one leaf in its block. Strides and offset are in bytes; `block` is -1 for a leaf without elements."""

    kind: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: int
    offset: int
    requires_grad: bool
    device: str


def itemsize_of(spec: LeafSpec) -> int:
    """Return the size in bytes of one element of a leaf."""
    if spec.kind == ARRAY:
        return _parse_array_dtype(spec.dtype).itemsize
    size: int = getattr(torch, spec.dtype).itemsize
    return size


def array_dtype(spec: LeafSpec) -> np.dtype[Any] | None:
    """Return the dtype of a leaf as NumPy names it; None for a dtype that only torch has (bfloat16)."""
    if spec.kind == ARRAY:
        return _parse_array_dtype(spec.dtype)
    try:
        return torch.empty(0, dtype=getattr(torch, spec.dtype), device="cpu").numpy().dtype
    except TypeError:
        return None


def leaf_address(leaf: Any) -> int:
    """Return the address of a leaf's first element."""
    address: int = leaf.data_ptr() if isinstance(leaf, torch.Tensor) else leaf.__array_interface__["data"][0]
    return address


class Layout(msgspec.Struct, frozen=True):
    """Bytes to transfer for a list of leaves, and the place of each leaf in these bytes."""

    specs: list[LeafSpec]
    blocks: list[Span]
    """Addresses in this process, in ascending order."""
    held: list[Any]
    """Objects that own the memory of the blocks; they must be kept for as long as the addresses are used."""
    devices: dict[int, int] = {}
    """Blocks in the memory of a CUDA device, with the number of the device in this process; the others are in host
    memory. Addresses of all devices and of the host are different (unified addressing)."""


class _DecodingState(threading.local):
    """Arguments of the `decode_value` call that runs in this thread; pickle offers no way to pass them along."""

    leaves: list[Any] | None = None
    own: bool = False


# Thread-local, because several threads fetch and decode values at the same time.
_decoding = _DecodingState()


def _leaf(index: int) -> Any:
    """Return leaf number `index` of the running `decode_value`; skeletons refer to this function by its name."""
    if _decoding.leaves is None:
        raise pickle.UnpicklingError("could not unpickle a raylane skeleton: it can be unpickled by raylane only")
    return _decoding.leaves[index]


def _leaf_with_state(index: int, state: dict[str, Any]) -> Any:
    leaf = _leaf(index)
    if not _decoding.own:  # a producer may have changed its attributes since publication; leave them alone
        leaf.__dict__.update(state)
    return leaf


def is_leaf(value: Any) -> bool:
    """Return True if a value is transferred as raw memory instead of being pickled."""
    # Exact types only: an instance of a subclass may have state that is not in its memory, so it is pickled.
    kind = type(value)
    if kind is torch.Tensor or kind is Parameter:
        if value.is_nested:  # a nested tensor may report a strided layout, but has neither one shape nor one span
            return False
        return value.layout is torch.strided and value.device.type in ("cpu", "cuda") and not value.is_quantized
    return kind is np.ndarray and not value.dtype.hasobject and _has_description(value.dtype)


class _SkeletonPickler(_ray.CloudPickler):  # type: ignore[misc]  # untyped base
    """A pickler that replaces each leaf by its number and collects the leaves."""

    def __init__(self, file: io.BytesIO, leaves: list[Any], refuse: Callable[[Any], None] | None = None) -> None:
        super().__init__(file, protocol=5)
        self.leaves = leaves
        self._refuse = refuse

    def reducer_override(self, obj: Any) -> Any:
        if not is_leaf(obj):
            if self._refuse is not None:
                self._refuse(obj)
            return super().reducer_override(obj)
        # Pickle's memo calls this once for each object, so a tensor that occurs twice is one leaf.
        self.leaves.append(obj)
        index = len(self.leaves) - 1
        state = getattr(obj, "__dict__", None)
        return (_leaf_with_state, (index, dict(state))) if state else (_leaf, (index,))


def encode_value(value: Any, refuse: Callable[[Any], None] | None = None) -> tuple[bytes, list[Any]]:
    """Return (skeleton, leaves). An empty skeleton means that the value is leaf 0 itself.

    `refuse` is called with each object of the rest, and may raise.

    Call this while Ray pickles the result, not before: Ray records the ObjectRefs and actor handles that are pickled
    here as contained in the object that it is serialising. Raises the errors of pickling the value.
    """
    if is_leaf(value) and not getattr(value, "__dict__", None):
        return b"", [value]  # the common case, a single tensor, needs no pickle at all
    leaves: list[Any] = []
    file = io.BytesIO()
    _SkeletonPickler(file, leaves, refuse).dump(value)
    return file.getvalue(), leaves


class _ContainerPickler(_SkeletonPickler):
    """A pickler that pickles containers and plain values, and takes every other object as a leaf."""

    def reducer_override(self, obj: Any) -> Any:
        # Pickle calls this for everything but exact builtin types, such as dict, list, tuple and str.
        if obj is _leaf:
            return NotImplemented
        self.leaves.append(obj)
        return _leaf, (len(self.leaves) - 1,)


def encode_containers(value: Any) -> tuple[bytes, list[Any]]:
    """Return (skeleton, leaves) of a value in this process; all objects but builtin containers count as leaves.

    Pickles nothing that the value contains, so it has no effect on refs, and only this process can decode the result.
    """
    leaves: list[Any] = []
    file = io.BytesIO()
    _ContainerPickler(file, leaves).dump(value)
    return file.getvalue(), leaves


def decode_value(skeleton: bytes, leaves: list[Any], *, own: bool = False) -> Any:
    """Return the value that contains exactly these leaf objects.

    Pass `own=True` if the leaves are the producer's own objects: their Python attributes are then left unchanged.
    """
    if not skeleton:
        return leaves[0]
    # Unpickling a nested ref may call this function again in the same thread, so restore the outer call's state.
    outer = _decoding.leaves, _decoding.own
    _decoding.leaves, _decoding.own = leaves, own
    try:
        return pickle.loads(skeleton)
    finally:
        _decoding.leaves, _decoding.own = outer


def _transferable(leaf: Any, *, in_place: bool) -> Any:
    """Return a leaf as raw memory: no conjugate or negative bit, no unnecessarily wide span; copied if needed.

    CUDA tensors are copied to the host unless `in_place`.
    """
    if isinstance(leaf, torch.Tensor):
        contiguous = leaf.is_contiguous()
        _require_memory(leaf, contiguous=contiguous)
        # torch evaluates these two lazily: the memory holds the values before conjugation or negation.
        lazy = leaf.is_conj() or leaf.is_neg()
        if contiguous and not lazy and (in_place or leaf.is_cpu):
            return leaf
        leaf = leaf.detach()  # so that autograd does not record the copies below
        if lazy:
            leaf = leaf.resolve_conj().resolve_neg()
        if not leaf.is_cpu and not in_place:
            return leaf.to("cpu")
        if not contiguous and (leaf_span(leaf).nbytes > SPARSE_VIEW_FACTOR * leaf.numel() * leaf.element_size()):
            return leaf.contiguous()
    elif not leaf.flags.c_contiguous and leaf_span(leaf).nbytes > SPARSE_VIEW_FACTOR * leaf.nbytes:
        return np.ascontiguousarray(leaf).reshape(leaf.shape)  # ascontiguousarray turns zero dimensions into one
    return leaf


def strides_bytes(leaf: Any) -> tuple[int, ...]:
    """Return the strides of a tensor or array in bytes."""
    if isinstance(leaf, torch.Tensor):
        size = leaf.element_size()
        return tuple(stride * size for stride in leaf.stride())
    strides: tuple[int, ...] = leaf.strides
    return strides


def leaf_span(leaf: Any) -> Span:
    """Return the addresses that a leaf occupies: host addresses, or device addresses for CUDA."""
    if isinstance(leaf, torch.Tensor):
        start = leaf.data_ptr()
        if leaf.is_contiguous():  # the common case, in half the time
            return Span(start, start + leaf.nbytes)
        return strided_span(start, leaf.shape, strides_bytes(leaf), leaf.element_size())
    return strided_span(leaf_address(leaf), leaf.shape, leaf.strides, leaf.itemsize)


def _require_memory(tensor: torch.Tensor, *, contiguous: bool) -> None:
    """Raise TensorFreedError for a tensor whose storage was freed or shrunk below the tensor's own size.

    The addresses of such a tensor may belong to other objects by now, so publishing them would leak unrelated memory.
    """
    count = tensor.numel()
    if count and not contiguous:
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    held = tensor.untyped_storage().nbytes()
    if count and (tensor.storage_offset() + count) * tensor.element_size() > held:
        raise TensorFreedError(
            f"could not publish a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}: its storage holds "
            f"{held} bytes, fewer than its elements need (untyped_storage().resize_, or sharded parameters "
            "that are not gathered now). Fill the tensor again before it is returned or put"
        )


def _aligned(span: Span, leaf: Any) -> Span:
    """Extend a span down to a multiple of 16 bytes from the start of its storage.

    A view of the storage with another dtype then stays aligned in the block, as torch requires.
    """
    if not isinstance(leaf, torch.Tensor) or not span.nbytes:
        return span
    over = int(leaf.storage_offset()) * leaf.element_size() % _ALIGNMENT
    return Span(span.start - over, span.stop) if over else span


@functools.cache
def _torch_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def spec_of(leaf: Any, original: Any, block: int, offset: int) -> LeafSpec:
    """Return the layout of a leaf in a block. `original` is the leaf before `_transferable` detached or moved it."""
    tensor = isinstance(leaf, torch.Tensor)
    return LeafSpec(
        kind=(PARAMETER if type(original) is Parameter else TENSOR) if tensor else ARRAY,
        dtype=_torch_dtype(leaf.dtype) if tensor else _array_dtype(leaf.dtype),
        shape=tuple(leaf.shape),
        strides=strides_bytes(leaf),
        block=block,
        offset=offset,
        requires_grad=bool(tensor and original.requires_grad),
        device="cpu" if not tensor or original.is_cpu else str(original.device),
    )


def plan_layout(leaves: Sequence[Any], *, in_place: bool = False) -> Layout:
    """Return the bytes to transfer for these leaves, and the layout of each leaf in them.

    Copies only leaves that cannot be read in place: lazily conjugated or negated ones, sparse views, and CUDA tensors.
    With `in_place`, CUDA tensors are not copied, and their blocks lie on the device.
    """
    plain = [_transferable(leaf, in_place=in_place) for leaf in leaves]
    # Overlapping leaves become one block, so that they share memory again after the transfer.
    blocks, home = merge([_aligned(leaf_span(leaf), leaf) for leaf in plain])
    specs = []
    for leaf, original, block in zip(plain, leaves, home, strict=True):
        offset = leaf_address(leaf) - blocks[block].start if block >= 0 else 0
        specs.append(spec_of(leaf, original, block, offset))
    devices = {}
    if in_place:
        on_device = ((leaf, block) for leaf, block in zip(plain, home, strict=True) if isinstance(leaf, torch.Tensor))
        devices = {block: leaf.get_device() for leaf, block in on_device if block >= 0 and not leaf.is_cpu}
    return Layout(specs=specs, blocks=blocks, held=plain, devices=devices)


@functools.lru_cache(maxsize=256)
def _has_description(dtype: np.dtype[Any]) -> bool:
    """Return True if the text description of a dtype restores the same dtype; other arrays are pickled.

    Dtypes with overlapping fields have no description, and the description of a dtype from another package
    (ml_dtypes.bfloat16) means bytes without a type.
    """
    try:
        return _parse_array_dtype(_array_dtype(dtype)) == dtype
    except (ValueError, TypeError):
        return False


def _array_dtype(dtype: np.dtype[Any]) -> str:
    # A structured dtype has no short name. Its description is the Python literal that NumPy uses in .npy files.
    return dtype.str if dtype.names is None else repr(np.lib.format.dtype_to_descr(dtype))


def _parse_array_dtype(text: str) -> np.dtype[Any]:
    if text.startswith("["):
        import ast

        return np.lib.format.descr_to_dtype(ast.literal_eval(text))
    return np.dtype(text)


def build_leaves(specs: Sequence[LeafSpec], blocks: Sequence[Any]) -> list[Any]:
    """Return the leaves as views of received blocks, in the order of `Layout.blocks`, without a copy.

    A block is a ctypes array, or a uint8 tensor if it was received into a device. The leaves own the blocks together.
    A CUDA leaf whose block is elsewhere is copied to the device with its number if this process has that device, else
    to the current CUDA device; torch raises RuntimeError if there is none.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    users = collections.Counter(spec.block for spec in specs)
    leaves: list[Any] = []
    for spec in specs:
        if spec.kind == TENSOR and users[spec.block] == 1 and (found := _build_alone(spec, blocks)) is not None:
            leaves.append(found)
            continue
        if spec.kind != ARRAY:
            leaves.append(_build_tensor(spec, blocks, storages))
            continue
        dtype = _parse_array_dtype(spec.dtype)
        if spec.block < 0:
            leaves.append(np.empty(spec.shape, dtype))
        else:
            block = blocks[spec.block]
            leaves.append(np.ndarray(spec.shape, dtype, buffer=block, offset=spec.offset, strides=spec.strides))
    return leaves


def _build_alone(spec: LeafSpec, blocks: Sequence[Any]) -> torch.Tensor | None:
    """Return a contiguous CPU tensor that has a block for itself, in half the time of `_build_tensor`; else None."""
    if spec.block < 0 or spec.offset or spec.device != "cpu":
        return None
    dtype: torch.dtype = getattr(torch, spec.dtype)
    block, step = blocks[spec.block], dtype.itemsize
    if isinstance(block, torch.Tensor):
        return None
    for size, stride in zip(reversed(spec.shape), reversed(spec.strides), strict=True):
        if stride != step:
            return None
        step *= size
    if step != len(block):
        return None
    tensor = torch.frombuffer(block, dtype=dtype).view(spec.shape)
    return tensor.requires_grad_() if spec.requires_grad else tensor


def _build_tensor(spec: LeafSpec, blocks: Sequence[Any], storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    # Every tensor names its device: the user may have set another default device.
    if spec.block < 0:
        strides = [stride // dtype.itemsize for stride in spec.strides]
        tensor = torch.empty_strided(spec.shape, strides, dtype=dtype, device="cpu")
    else:
        # One storage for each block: tensors that shared memory in the source share a storage here.
        storage, start = _storage_of(blocks[spec.block], storages, spec.block)
        size = dtype.itemsize
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        offset = start + spec.offset
        if offset % size:
            # The block begins with an array whose address is not a multiple of this dtype's size. torch has no
            # unaligned tensors, so this tensor gets a copy and no longer shares memory with the array.
            part = torch.frombuffer(bytearray(blocks[spec.block])[spec.offset :], dtype=torch.uint8)
            storage, offset = part.untyped_storage(), 0
        tensor.set_(storage, offset // size, spec.shape, [stride // size for stride in spec.strides])
    if spec.device != "cpu":
        tensor = tensor.to(local_device(spec.device))
    if spec.kind == PARAMETER:
        return Parameter(tensor, requires_grad=spec.requires_grad)
    return tensor.requires_grad_() if spec.requires_grad else tensor


def _storage_of(block: Any, storages: dict[int, torch.UntypedStorage], number: int) -> tuple[torch.UntypedStorage, int]:
    """Return the storage of a received block, always the same one, and the offset of the block in it."""
    # Several small blocks of a device lie in one storage, at multiples of 64 bytes.
    if isinstance(block, torch.Tensor):
        return block.untyped_storage(), int(block.storage_offset())
    storage = storages.get(number)
    if storage is None:
        storage = storages[number] = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    return storage, 0


def local_device(name: str) -> torch.device:
    """Return the device for a leaf that was on this device in its source.

    The device of the same number if this process has it, else the current one of the same type.
    """
    device = torch.device(name)
    known = device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()
    return device if known else torch.device(device.type)
