"""Delivery of a value the way its reader wants it: on a device, with a dtype, in targets of the reader's own."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raylane.core.deadline import Deadline
from raylane.core.memory.spans import Span, merge
from raylane.errors import TransportUnavailableError
from raylane.transport.read.targets import Destination, Targets, match, structure, with_part
from raylane.transport.value import codec
from raylane.transport.value.layout import ARRAY, LeafSpec, array_dtype
from raylane.transport.value.leaf_memory import (
    lacking_memory,
    leaf_address,
    leaf_span,
    overlaps_itself,
    strides_bytes,
    tied,
)

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors whose elements are known to lie in their storage; a subclass may keep them elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """How a reader wants the tensors of a value."""

    into: Any = None
    """Tensors to fill, as `targets.match` accepts them; None for new ones."""
    targets: Targets | None = None
    """Targets that `into` names in this value; None before the value is known, or without `into`."""
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    """Floating-point dtype of all floating-point tensors; None for the one of the producer."""
    copy: bool = False
    """True for memory that no other process sees, and that is not the producer's own."""

    @property
    def plain(self) -> bool:
        """True if the value is wanted as it is."""
        return self.into is None and self.device is None and self.dtype is None and not self.copy


def delivery(into: Any, device: Any, dtype: Any, *, copy: bool = False, where: str) -> Delivery:
    """Return the checked wishes. TypeError or ValueError names the argument and what is accepted."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"{where}: dtype must be a floating-point torch dtype such as torch.bfloat16, got {dtype!r}. Only "
            "floating-point tensors are converted"
        )
    parsed_device = None
    if device is not None:
        try:
            parsed_device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"{where}: device must be such as 'cpu' or 'cuda:0', got {device!r}") from error
        if parsed_device.type not in ("cpu", "cuda"):
            raise ValueError(f"{where}: device must be 'cpu' or 'cuda', got {device!r}")
        if parsed_device.type == "cuda" and (parsed_device.index or 0) >= torch.cuda.device_count():
            raise TransportUnavailableError(
                f"{where}: device={device!r} does not exist here: this process sees {torch.cuda.device_count()} CUDA "
                "devices. Use device='cpu', or give the actor a GPU"
            )
    if into is not None and (parsed_device is not None or dtype is not None):
        raise ValueError(f"{where}: into has a device and a dtype of its own. Pass into alone")
    return Delivery(into=into, device=parsed_device, dtype=dtype, copy=copy)


PLAIN = Delivery()


@dataclass(frozen=True)
class Present:
    """A value whose tensors are in this process."""

    skeleton: bytes
    leaves: list[Any]
    own_objects: bool = False
    """True if the leaves are the producer's own objects."""

    def deliver(self, wish: Delivery, deadline: Deadline) -> Any:
        """Return the value as its reader wants it; targets are written within `deadline.writing()`."""
        if wish.plain:
            return codec.decode_value(self.skeleton, self.leaves, own_objects=self.own_objects)
        if wish.targets is None:
            return codec.decode_value(self.skeleton, convert(self.leaves, wish), own_objects=self.own_objects)
        with deadline.writing():
            leaves = list(self.leaves)
            sources = _apart(self.leaves, wish.targets) if self.own_objects else self.leaves
            for number, target in enumerate(wish.targets.first):
                if target is not None:
                    leaves[number] = copy_into(target, sources[number])
            return with_targets(self.skeleton, leaves, wish.targets, own_objects=self.own_objects)

    def destinations(self, targets: Targets) -> list[Destination]:
        """Return the targets of this value with the places of their leaves. ValueError if one does not fit its leaf."""
        destinations = []
        for number, target in targets.all():
            leaf = self.leaves[number]
            check_target(codec.spec_of(leaf, leaf, -1, 0), target)
            destinations.append(Destination(target, (0, 0), leaf_address(leaf), strides_bytes(leaf)))
        return destinations

    def match(self, into: Any) -> Targets:
        """Return the targets of this value by the numbers of `leaves`, which need not all be tensors."""
        numbers = [i for i, leaf in enumerate(self.leaves) if codec.is_leaf(leaf)]
        matched = match(self.shown(), len(numbers), into)
        first = [None] * len(self.leaves)
        for number, target in zip(numbers, matched.first, strict=True):
            first[number] = target
        return Targets(first, [placed._replace(number=numbers[placed.number]) for placed in matched.further])

    def shown(self) -> Any:
        """Return the structure of the value, with a Slot for each tensor."""
        return structure(self.skeleton, self.leaves)


def _apart(leaves: list[Any], targets: Targets) -> list[Any]:
    """Return the producer's own leaves, copied where writing the targets would change them before they are read."""
    written, _ = merge([leaf_span(target) for _, target in targets.all() if codec.is_leaf(target)])
    starts = [span.start for span in written]

    def is_written(leaf: Any) -> bool:
        span = leaf_span(leaf)
        last = bisect.bisect_left(starts, span.stop) - 1  # the last one that begins before the end of the leaf
        return last >= 0 and written[last].stop > span.start

    return [copied(leaf) if codec.is_leaf(leaf) and is_written(leaf) else leaf for leaf in leaves]


def with_targets(skeleton: bytes, leaves: list[Any], targets: Targets, *, own_objects: bool = False) -> Any:
    """Return the value with its targets in it."""
    for placed in targets.further:
        if leaves[placed.number] is not placed.target:
            copy_into(placed.target, leaves[placed.number])
    value = codec.decode_value(skeleton, leaves, own_objects=own_objects)
    for placed in targets.further:
        value = with_part(value, placed.path, placed.target)
    return value


def check_target(spec: LeafSpec, target: Any) -> None:
    """Raise ValueError or TypeError if a leaf cannot be received into a target without a change of its values."""
    tensor = isinstance(target, torch.Tensor)
    if tuple(target.shape) != tuple(spec.shape):
        raise ValueError(
            f"into has shape {tuple(target.shape)}, the value {tuple(spec.shape)}. Pass a target of its shape"
        )
    if tensor and (target.is_quantized or target.layout is not torch.strided or target.is_nested):
        raise TypeError(f"into must hold strided tensors, got one of layout {target.layout}")
    if target.dtype != _dtype_as(spec, tensor=tensor):
        raise ValueError(f"into has dtype {target.dtype}, the value {spec.dtype}. Pass a target of its dtype")
    if not tensor and not target.flags.writeable:
        raise ValueError("into has a NumPy array that is not writable. Pass a writable one")
    if isinstance(target, np.ma.MaskedArray):
        raise TypeError("into has a masked array, whose mask would not fit the new values. Pass a plain array")
    if overlaps_itself(target):
        raise ValueError(
            "into has a tensor whose elements share memory (expand, as_strided). Pass one with memory of its own"
        )
    if type(target) in PLAIN_TENSORS and (lacking := lacking_memory(target)) is not None:
        raise ValueError(f"into has a tensor of shape {tuple(target.shape)} without its memory: {lacking}")


def _dtype_as(spec: LeafSpec, *, tensor: bool) -> Any:
    """Return the dtype that a target of a leaf must have: that of the leaf, as torch or as NumPy names it."""
    array = array_dtype(spec)
    if not tensor:
        return array
    if spec.kind != ARRAY:
        return getattr(torch, spec.dtype)
    try:
        return torch.from_numpy(np.empty(0, array)).dtype
    except TypeError:
        return None


def copy_into(target: Any, leaf: Any) -> Any:
    """Copy a leaf of the same shape and dtype into a target, tensor or array, and return the target."""
    if isinstance(target, torch.Tensor):
        with torch.no_grad():
            target.copy_(leaf if isinstance(leaf, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(leaf)))
        return target
    np.copyto(target, leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else leaf, casting="no")
    return target


def convert(leaves: Sequence[Any], wish: Delivery) -> list[Any]:
    """Return leaves on the device and with the dtype of a wish; the same objects where they are so already.

    Tensors that share memory share it afterwards. ValueError where the conversion makes that impossible.
    """
    converted = list(leaves)
    changed = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            device = leaf.device if wish.device is None else wish.device
            elsewhere = device.type != leaf.device.type or device.index not in (None, leaf.device.index)
            if elsewhere or _dtype_for(leaf, wish) != leaf.dtype:
                changed.append(i)
    if not changed:
        return converted
    # A tensor subclass, or lazily negated memory, has no plain memory that others could share.
    lazy = [isinstance(leaf, torch.Tensor) and (leaf.is_conj() or leaf.is_neg()) for leaf in leaves]
    plain = [i for i, leaf in enumerate(leaves) if codec.is_leaf(leaf) and not lazy[i]]
    groups = [[plain[k] for k in group] for group in tied([leaves[i] for i in plain])]
    together = {i: group for group in groups if len(group) > 1 for i in group}
    with torch.no_grad():
        for i in changed:
            if i not in together:
                moved = leaves[i].to(device=wish.device, dtype=_dtype_for(leaves[i], wish))
                converted[i] = _as_before(leaves[i], moved)
        for group in {id(group): group for i in changed for group in [together.get(i)] if group}.values():
            for i, tensor in zip(group, _convert_together([leaves[i] for i in group], wish), strict=True):
                converted[i] = _as_before(leaves[i], tensor)
    return converted


def _dtype_for(leaf: torch.Tensor, wish: Delivery) -> torch.dtype:
    return wish.dtype if wish.dtype is not None and leaf.dtype.is_floating_point else leaf.dtype


def _convert_together(leaves: Sequence[Any], wish: Delivery) -> list[torch.Tensor]:
    """Return tensors that share memory, converted to others that share it in the same way; ValueError if impossible."""
    spans = [leaf_span(leaf) for leaf in leaves]
    start, stop = min(span.start for span in spans), max(span.stop for span in spans)
    tensors = all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    converts = any(isinstance(leaf, torch.Tensor) and _dtype_for(leaf, wish) != leaf.dtype for leaf in leaves)
    dtypes = {leaf.dtype for leaf in leaves}
    # Bytes may move as they are; a conversion needs elements of one dtype, at multiples of its size.
    uniform = len(dtypes) == 1 and not any((leaf_address(leaf) - start) % leaf.itemsize for leaf in leaves)
    if not tensors or (converts and not uniform):
        raise ValueError(
            f"tensors of {', '.join(sorted(map(str, dtypes)))} share memory in this value, which they could not after "
            f"a conversion to dtype={wish.dtype}, device={wish.device}. Read the value without these options, and "
            "convert copies of its tensors"
        )
    memory = codec.memory_of(leaves[0], Span(start, stop))
    offsets = [leaf_address(leaf) - start for leaf in leaves]
    if not converts:
        storage = memory.to(device=wish.device, copy=True).untyped_storage()
        return [codec.view_in(storage, offset, leaf) for offset, leaf in zip(offsets, leaves, strict=True)]
    before = leaves[0].dtype
    moved = memory.view(before).to(device=wish.device, dtype=wish.dtype, copy=True)
    return [
        codec.view_in(moved.untyped_storage(), offset // before.itemsize * moved.itemsize, leaf, moved.dtype)
        for offset, leaf in zip(offsets, leaves, strict=True)
    ]


def _as_before(leaf: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """Return a converted tensor as a Parameter if its leaf is one, and with its requires_grad."""
    if isinstance(leaf, torch.nn.Parameter):
        return torch.nn.Parameter(moved, requires_grad=leaf.requires_grad)
    return moved.requires_grad_(leaf.requires_grad)


def copied(leaf: Any) -> Any:
    """Return a copy of a tensor or an array, without its history of autograd."""
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf.copy()
