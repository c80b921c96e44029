"""Splitting of a value into a skeleton and its tensors (leaves), and the reverse. Independent of how bytes travel.

A *leaf* is a torch tensor or Parameter (strided, CPU or CUDA) or a NumPy array; the *skeleton* is the pickle of the
rest. Leaves that share memory share a *block*: the block is transferred once, and the rebuilt leaves share it again, so
views and tied weights stay tied. Values that are not leaves (sparse, quantised and meta tensors, tensor subclasses,
object arrays) are pickled as usual; plain tensors inside them are leaves again. Called by `produce`, `read` and
`graph.values.message`.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter

from raylane import _ray
from raylane.core.memory.layout import bytes_at
from raylane.core.memory.spans import Span, merge
from raylane.errors import TensorFreedError
from raylane.transport.value.layout import (
    ARRAY,
    PARAMETER,
    TENSOR,
    Layout,
    LeafSpec,
    dtype_text,
    has_description,
    local_device,
    parse_array_dtype,
)
from raylane.transport.value.leaf_memory import (
    SPARSE_VIEW_FACTOR,
    is_fake,
    lacking_memory,
    leaf_address,
    leaf_span,
    overlaps_itself,
    strides_bytes,
    tied,
)

_ALIGNMENT = 16


class _DecodingState(threading.local):
    """Arguments of the `decode_value` call that runs in this thread; pickle offers no way to pass them along."""

    leaves: list[Any] | None = None
    own_objects: bool = False


# Thread-local, because several threads fetch and decode values at the same time.
_decoding = _DecodingState()


def _leaf(index: int) -> Any:
    """Return leaf number `index` of the running `decode_value`; skeletons refer to this function by its name."""
    if _decoding.leaves is None:
        raise pickle.UnpicklingError("could not unpickle a raylane skeleton: it can be unpickled by raylane only")
    return _decoding.leaves[index]


def _leaf_with_state(index: int, state: dict[str, Any]) -> Any:
    leaf = _leaf(index)
    if not _decoding.own_objects:  # a producer may have changed its attributes since publication; leave them alone
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
    return kind is np.ndarray and not value.dtype.hasobject and has_description(value.dtype)


class _SkeletonPickler(_ray.CloudPickler):  # type: ignore[misc]  # untyped base
    """A pickler that replaces each leaf by its number and collects the leaves."""

    def __init__(self, file: io.BytesIO, leaves: list[Any], refuse: Callable[[Any], None] | None = None) -> None:
        super().__init__(file, protocol=5)
        self.leaves = leaves
        self._refuse = refuse

    def reducer_override(self, obj: Any) -> Any:
        if not is_leaf(obj):
            if isinstance(obj, torch.Tensor) and is_fake(obj):
                raise TypeError(f"could not publish a tensor of shape {tuple(obj.shape)}: {lacking_memory(obj)}")
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


_OPAQUE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


class _ObjectPickler(_SkeletonPickler):
    """A pickler for a value that stays in this process: what pickling would disturb is a leaf as well.

    These are refs, actor handles and other objects of Ray, which Ray counts when they are pickled, and functions,
    classes and modules, which need no copy.
    """

    containers_only = False
    """True to take every object but builtin containers as a leaf."""

    def reducer_override(self, obj: Any) -> Any:
        if obj is _leaf or obj is _leaf_with_state:
            return NotImplemented
        if self.containers_only or isinstance(obj, _OPAQUE) or type(obj).__module__.partition(".")[0] == "ray":
            self.leaves.append(obj)
            return _leaf, (len(self.leaves) - 1,)
        return super().reducer_override(obj)


def encode_objects(value: Any, *, lenient: bool = False) -> tuple[bytes, list[Any]]:
    """Return (skeleton, leaves) of a value that is in this process already; only this process can decode the result.

    Leaves that are no tensors are in it too: pickling has no effect on refs and handles. TypeError if an object of the
    value cannot be pickled; with `lenient`, only builtin containers are looked into then.
    """
    leaves: list[Any] = []
    file = io.BytesIO()
    try:
        _ObjectPickler(file, leaves).dump(value)
    except Exception as error:
        if lenient:
            leaves, file = [], io.BytesIO()
            pickler = _ObjectPickler(file, leaves)
            pickler.containers_only = True
            pickler.dump(value)
            return file.getvalue(), leaves
        raise TypeError(
            f"could not look for tensors in a value of {type(value).__name__}, which no raylane method returned: "
            f"{error}. Decorate its method with raylane.method, or get the whole value without into, device and dtype"
        ) from error
    return file.getvalue(), leaves


def decode_value(skeleton: bytes, leaves: list[Any], *, own_objects: bool = False) -> Any:
    """Return the value that contains exactly these leaf objects.

    Pass `own_objects=True` if the leaves are the producer's own objects: their Python attributes then stay as they are.
    """
    if not skeleton:
        return leaves[0]
    # Unpickling a nested ref may call this function again in the same thread, so restore the outer call's state.
    outer = _decoding.leaves, _decoding.own_objects
    _decoding.leaves, _decoding.own_objects = leaves, own_objects
    try:
        return pickle.loads(skeleton)
    finally:
        _decoding.leaves, _decoding.own_objects = outer


def _evaluated(leaf: Any) -> Any:
    """Return a leaf without conjugate or negative bit: torch evaluates these lazily, and memory has the values before.

    TensorFreedError for a tensor without its memory.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if (lacking := lacking_memory(leaf)) is not None:
        raise TensorFreedError(f"could not publish a tensor of shape {tuple(leaf.shape)} and {leaf.dtype}: {lacking}")
    if leaf.is_conj() or leaf.is_neg():
        return leaf.detach().resolve_conj().resolve_neg()
    return leaf


def _is_sparse(leaf: Any) -> bool:
    """Return True if the elements of a leaf take a small part of its span."""
    contiguous = leaf.is_contiguous() if isinstance(leaf, torch.Tensor) else leaf.flags.c_contiguous
    return not contiguous and leaf_span(leaf).nbytes > SPARSE_VIEW_FACTOR * leaf.nbytes


def _packed(leaf: Any) -> Any:
    """Return a contiguous copy of a leaf."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().contiguous()  # autograd does not record it
    return np.ascontiguousarray(leaf).reshape(leaf.shape)  # ascontiguousarray turns zero dimensions into one


def _to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors in host memory; those that share memory share it in the copies."""
    copies = list(tensors)
    for group in tied(tensors):
        if len(group) == 1:
            copies[group[0]] = tensors[group[0]].detach().to("cpu", copy=True)
            continue
        spans = [_aligned(leaf_span(tensors[i]), tensors[i]) for i in group]
        start, stop = min(span.start for span in spans), max(span.stop for span in spans)
        storage = memory_of(tensors[group[0]], Span(start, stop)).to("cpu", copy=True).untyped_storage()
        for i in group:
            copies[i] = view_in(storage, leaf_address(tensors[i]) - start, tensors[i])
    return copies


def memory_of(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the bytes of a span, on a device one of the storage of a tensor; the caller keeps the memory alive."""
    if tensor.is_cpu:
        return torch.frombuffer(bytes_at(span.start, span.nbytes), dtype=torch.uint8)
    storage = tensor.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(storage, span.start - storage.data_ptr(), (span.nbytes,), (1,))


def view_in(
    storage: torch.UntypedStorage, offset: int, like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a tensor of the shape and strides of another one, `offset` bytes into a storage; detached."""
    dtype = like.dtype if dtype is None else dtype
    view = torch.empty(0, dtype=dtype, device=storage.device)
    return view.set_(storage, offset // dtype.itemsize, like.shape, like.stride())


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
    """Return the layout of a leaf in a block. `original` is the leaf before `plan_layout` moved or packed it."""
    tensor = isinstance(leaf, torch.Tensor)
    return LeafSpec(
        kind=(PARAMETER if type(original) is Parameter else TENSOR) if tensor else ARRAY,
        dtype=_torch_dtype(leaf.dtype) if tensor else dtype_text(leaf.dtype),
        shape=tuple(leaf.shape),
        strides=strides_bytes(leaf),
        block=block,
        offset=offset,
        requires_grad=bool(tensor and original.requires_grad),
        device="cpu" if not tensor or original.is_cpu else str(original.device),
    )


def _pack(leaves: list[Any]) -> None:
    """Replace leaves whose elements take a small part of their span by contiguous copies.

    A leaf that shares memory with another one stays as it is; equal views get one copy.
    """
    views: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        views.setdefault((leaf_address(leaf), tuple(leaf.shape), strides_bytes(leaf), leaf.dtype), []).append(i)
    firsts = [numbers[0] for numbers in views.values()]
    alone = {firsts[group[0]] for group in tied([leaves[i] for i in firsts], dense=True) if len(group) == 1}
    for first, *further in views.values():
        if first in alone and _is_sparse(leaves[first]):
            packed = _packed(leaves[first])
            for i in (first, *further):
                leaves[i] = packed


def plan_layout(leaves: Sequence[Any], *, in_place: bool = False) -> Layout:
    """Return the bytes to transfer for these leaves, and the layout of each leaf in them.

    Copies only leaves that cannot be read in place: lazily conjugated or negated ones, views of a small part of their
    span that share memory with no other leaf, and CUDA tensors.
    With `in_place`, CUDA tensors are not copied, and their blocks lie on the device.
    """
    plain = [_evaluated(leaf) for leaf in leaves]
    if not in_place:
        on_device = [i for i, leaf in enumerate(plain) if isinstance(leaf, torch.Tensor) and not leaf.is_cpu]
        if on_device:
            for i, copy in zip(on_device, _to_host([plain[i] for i in on_device]), strict=True):
                plain[i] = copy
    if any(map(_is_sparse, plain)):
        _pack(plain)
    # Overlapping leaves become one block, so that they share memory again after the transfer.
    blocks, home = merge([_aligned(leaf_span(leaf), leaf) for leaf in plain])
    specs = []
    for leaf, original, block in zip(plain, leaves, home, strict=True):
        offset = leaf_address(leaf) - blocks[block].start if block >= 0 else 0
        specs.append(spec_of(leaf, original, block, offset))
    devices = {}
    if in_place:
        tensors = ((leaf, block) for leaf, block in zip(plain, home, strict=True) if isinstance(leaf, torch.Tensor))
        devices = {block: leaf.get_device() for leaf, block in tensors if block >= 0 and not leaf.is_cpu}
    return Layout(specs=specs, blocks=blocks, held=plain, devices=devices)


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
        if spec.kind == TENSOR and users[spec.block] == 1 and (tensor := _build_alone(spec, blocks)) is not None:
            leaves.append(tensor)
            continue
        if spec.kind != ARRAY:
            leaves.append(_build_tensor(spec, blocks, storages))
            continue
        dtype = parse_array_dtype(spec.dtype)
        if spec.block < 0:
            leaves.append(np.empty(spec.shape, dtype))
        else:
            block = blocks[spec.block]
            array = np.ndarray(spec.shape, dtype, buffer=block, offset=spec.offset, strides=spec.strides)
            if not array.flags.c_contiguous and overlaps_itself(
                array
            ):  # such as a sliding window: a write to one element would change others
                array.flags.writeable = False
            leaves.append(array)
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
        storage, start = _storage_of(blocks[spec.block], storages, spec)
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


def _storage_of(
    block: Any, storages: dict[int, torch.UntypedStorage], spec: LeafSpec
) -> tuple[torch.UntypedStorage, int]:
    """Return the storage of a received block on the device of its leaves, always the same one, and its offset in it."""
    # Several small blocks of a device lie in one storage, at multiples of 64 bytes.
    if isinstance(block, torch.Tensor):
        return block.untyped_storage(), int(block.storage_offset())
    storage = storages.get(spec.block)
    if storage is None:
        memory = torch.frombuffer(block, dtype=torch.uint8)
        if spec.device != "cpu":
            memory = memory.to(local_device(spec.device))
        storage = storages[spec.block] = memory.untyped_storage()
    return storage, 0
