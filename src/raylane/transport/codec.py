"""Takes the tensors out of a value and puts them back: value <-> skeleton + leaves. Knows nothing of how bytes travel.

A *leaf* is a torch tensor or Parameter (strided, CPU or CUDA) or a NumPy array; the *skeleton* pickles the rest.
Leaves that share memory share a *block*, which moves once and is shared again after arrival, so views and tied weights
stay tied. What is not a leaf (sparse, quantised, meta tensors, tensor subclasses, object arrays) is pickled as usual,
and its own parts are leaves again where they are plain tensors. Called by `ticket`.
"""

from __future__ import annotations

import functools
import io
import pickle
import threading
from collections.abc import Sequence
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
"""A view that touches less than one byte in this many of its span is packed before it moves (a column of a matrix)."""
_ALIGNMENT = 16


class LeafSpec(msgspec.Struct, frozen=True, array_like=True):
    """How one leaf lies in its block. Strides and offset are in bytes; `block` is -1 for a leaf without elements."""

    kind: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: int
    offset: int
    requires_grad: bool
    device: str


class Layout(msgspec.Struct, frozen=True):
    """What has to move for a list of leaves."""

    specs: list[LeafSpec]
    blocks: list[Span]
    """Addresses in this process, in address order."""
    held: list[Any]
    """The objects whose memory the blocks are; they must outlive every use of the addresses."""


class _Arriving(threading.local):
    leaves: list[Any] | None = None
    own: bool = False


_arriving = _Arriving()


def _leaf(index: int) -> Any:
    """Named by skeletons: the leaf with that number, while `decode` runs in this thread."""
    if _arriving.leaves is None:
        raise pickle.UnpicklingError("a raylane skeleton can be unpickled by raylane only")
    return _arriving.leaves[index]


def _leaf_with_state(index: int, state: dict[str, Any]) -> Any:
    leaf = _leaf(index)
    if not _arriving.own:
        leaf.__dict__.update(state)
    return leaf


def is_leaf(value: Any) -> bool:
    kind = type(value)
    if kind is torch.Tensor or kind is Parameter:
        if value.is_nested:  # some are of strided layout, and have neither a shape nor one span
            return False
        return value.layout is torch.strided and value.device.type in ("cpu", "cuda") and not value.is_quantized
    return kind is np.ndarray and not value.dtype.hasobject and _has_a_description(value.dtype)


class _SkeletonPickler(_ray.CloudPickler):  # type: ignore[misc]  # untyped base
    def __init__(self, file: io.BytesIO, leaves: list[Any]) -> None:
        super().__init__(file, protocol=5)
        self.leaves = leaves

    def reducer_override(self, obj: Any) -> Any:
        if not is_leaf(obj):
            return super().reducer_override(obj)
        self.leaves.append(obj)  # pickle's own memo sees to it that the same object comes here once
        index = len(self.leaves) - 1
        state = getattr(obj, "__dict__", None)
        return (_leaf_with_state, (index, dict(state))) if state else (_leaf, (index,))


def encode(value: Any) -> tuple[bytes, list[Any]]:
    """(skeleton, leaves in the order of their numbers). An empty skeleton means: the value is leaf 0 itself.

    ObjectRefs and actor handles in the value are recorded by Ray as contained in the object it is serialising, which is
    why this runs while Ray pickles the result, not before. Raises what pickling the value raises.
    """
    if is_leaf(value) and not getattr(value, "__dict__", None):
        return b"", [value]
    leaves: list[Any] = []
    file = io.BytesIO()
    _SkeletonPickler(file, leaves).dump(value)
    return file.getvalue(), leaves


def decode(skeleton: bytes, leaves: list[Any], *, own: bool = False) -> Any:
    """The value, with exactly these leaf objects in it. `own`: they are the producer's, whose attributes stay as they
    are now."""
    if not skeleton:
        return leaves[0]
    outer = _arriving.leaves, _arriving.own  # unpickling a nested ref may decode another value in this thread
    _arriving.leaves, _arriving.own = leaves, own
    try:
        return pickle.loads(skeleton)
    finally:
        _arriving.leaves, _arriving.own = outer


def _plain(leaf: Any) -> Any:
    """A leaf whose bytes mean what they say: on the host, no conjugate or negative bit, no needlessly wide span."""
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach()
        _require_memory(leaf)
        if leaf.is_conj():
            leaf = leaf.resolve_conj()
        if leaf.is_neg():
            leaf = leaf.resolve_neg()
        if leaf.device.type != "cpu":
            return leaf.to("cpu")
        if not leaf.is_contiguous() and span(leaf).nbytes > SPARSE_VIEW_FACTOR * leaf.numel() * leaf.element_size():
            return leaf.contiguous()
    elif not leaf.flags.c_contiguous and span(leaf).nbytes > SPARSE_VIEW_FACTOR * leaf.nbytes:
        return np.ascontiguousarray(leaf).reshape(leaf.shape)
    return leaf


def _strides_bytes(leaf: Any) -> tuple[int, ...]:
    if isinstance(leaf, torch.Tensor):
        size = leaf.element_size()
        return tuple(stride * size for stride in leaf.stride())
    strides: tuple[int, ...] = leaf.strides
    return strides


def span(leaf: Any) -> Span:
    if isinstance(leaf, torch.Tensor):
        return strided_span(leaf.data_ptr(), leaf.shape, _strides_bytes(leaf), leaf.element_size())
    return strided_span(leaf.__array_interface__["data"][0], leaf.shape, leaf.strides, leaf.itemsize)


def _require_memory(tensor: torch.Tensor) -> None:
    """Raise TensorFreedError for a tensor whose storage was freed or made smaller than the tensor: nobody knows what
    lies where its elements were."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    held = tensor.untyped_storage().nbytes()
    if count and (tensor.storage_offset() + count) * tensor.element_size() > held:
        raise TensorFreedError(
            f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} cannot be published: its storage holds "
            f"{held} bytes, less than its elements take (untyped_storage().resize_, or sharded parameters "
            "that are not gathered now). Fill it again before it is returned or put"
        )


def _aligned(span: Span, leaf: Any) -> Span:
    """Begin at a multiple of 16 bytes from the start of the storage, so that views of other dtypes stay aligned."""
    if not isinstance(leaf, torch.Tensor) or not span.nbytes:
        return span
    base = leaf.untyped_storage().data_ptr()
    return Span(span.start - (span.start - base) % _ALIGNMENT, span.stop)


def plan(leaves: Sequence[Any]) -> Layout:
    """Which bytes to move for these leaves, and how each lies in them. Copies only what `_plain` must copy."""
    plain = [_plain(leaf) for leaf in leaves]
    blocks, home = merge([_aligned(span(leaf), leaf) for leaf in plain])
    specs = []
    for leaf, original, block in zip(plain, leaves, home, strict=True):
        tensor = isinstance(leaf, torch.Tensor)
        address = leaf.data_ptr() if tensor else leaf.__array_interface__["data"][0]
        specs.append(
            LeafSpec(
                kind=(PARAMETER if type(original) is Parameter else TENSOR) if tensor else ARRAY,
                dtype=str(leaf.dtype).removeprefix("torch.") if tensor else _array_dtype(leaf.dtype),
                shape=tuple(leaf.shape),
                strides=_strides_bytes(leaf),
                block=block,
                offset=address - blocks[block].start if block >= 0 else 0,
                requires_grad=bool(tensor and original.requires_grad),
                device=str(original.device) if tensor else "cpu",
            )
        )
    return Layout(specs=specs, blocks=blocks, held=plain)


@functools.lru_cache(maxsize=256)
def _has_a_description(dtype: np.dtype[Any]) -> bool:
    """Return True if a description in text brings back this very dtype. Overlapping fields have none, and that of a
    dtype from another package (ml_dtypes.bfloat16) says bytes of unknown meaning: such arrays are pickled."""
    try:
        return _parse_array_dtype(_array_dtype(dtype)) == dtype
    except (ValueError, TypeError):
        return False


def _array_dtype(dtype: np.dtype[Any]) -> str:
    # A structured dtype has no short name; its description is a literal that numpy itself writes and reads in .npy.
    return dtype.str if dtype.names is None else repr(np.lib.format.dtype_to_descr(dtype))


def _parse_array_dtype(text: str) -> np.dtype[Any]:
    if text.startswith("["):
        import ast

        return np.lib.format.descr_to_dtype(ast.literal_eval(text))
    return np.dtype(text)


def build(specs: Sequence[LeafSpec], blocks: Sequence[Any]) -> list[Any]:
    """The leaves, made over received blocks (ctypes arrays, in the order of `Layout.blocks`); nothing is copied.

    The leaves own the blocks together. A CUDA leaf is copied to its device number if this process has it, else to the
    current CUDA device; RuntimeError from torch if there is none.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    return [
        _build_array(spec, blocks) if spec.kind == ARRAY else _build_tensor(spec, blocks, storages) for spec in specs
    ]


def _build_array(spec: LeafSpec, blocks: Sequence[Any]) -> np.ndarray[Any, Any]:
    dtype = _parse_array_dtype(spec.dtype)
    if spec.block < 0:
        return np.empty(spec.shape, dtype)
    return np.ndarray(spec.shape, dtype, buffer=blocks[spec.block], offset=spec.offset, strides=spec.strides)


def _build_tensor(spec: LeafSpec, blocks: Sequence[Any], storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    if spec.block < 0:
        strides = [stride // dtype.itemsize for stride in spec.strides]
        tensor = torch.empty_strided(spec.shape, strides, dtype=dtype, device="cpu")  # whatever the default device is
    else:
        storage = storages.get(spec.block)
        if storage is None:
            storage = torch.frombuffer(blocks[spec.block], dtype=torch.uint8).untyped_storage()
            storages[spec.block] = storage
        size = dtype.itemsize
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        if spec.offset % size:  # shares memory with an array that starts off this dtype's grid: it cannot share here
            part = torch.frombuffer(bytearray(blocks[spec.block])[spec.offset :], dtype=torch.uint8)
            storage, offset = part.untyped_storage(), 0
        else:
            offset = spec.offset // size
        tensor.set_(storage, offset, spec.shape, [stride // size for stride in spec.strides])
    if spec.device != "cpu":
        tensor = tensor.to(_device_here(spec.device))
    if spec.kind == PARAMETER:
        return Parameter(tensor, requires_grad=spec.requires_grad)
    return tensor.requires_grad_() if spec.requires_grad else tensor


def _device_here(device: str) -> torch.device:
    wanted = torch.device(device)
    if (wanted.index or 0) >= torch.cuda.device_count():
        return torch.device(wanted.type)
    return wanted
