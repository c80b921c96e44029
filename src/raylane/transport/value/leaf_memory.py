"""Addresses of tensors and arrays, and sharing of memory among them. Reads and copies nothing. Called by `codec`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from raylane.core.memory.spans import Span, merge, strided_span

SPARSE_VIEW_FACTOR = 2
"""Ratio of span to elements above which a view (such as a column of a matrix) is packed before its transfer."""
_MOST_PAIRS = 10_000
"""Number of comparisons (microseconds each) after which leaves with interleaved elements count as sharing memory."""
_MOST_WORK = 100_000
"""Steps after which NumPy gives up the exact comparison of two layouts (milliseconds)."""


def leaf_address(leaf: Any) -> int:
    """Return the address of a leaf's first element."""
    address: int = leaf.data_ptr() if isinstance(leaf, torch.Tensor) else leaf.__array_interface__["data"][0]
    return address


def is_fake(tensor: torch.Tensor) -> bool:
    """Return True for a fake tensor of torch, which wraps nothing; other tensors that wrap some may be pickled."""
    return hasattr(tensor, "fake_mode")


def opaque(tensor: torch.Tensor) -> str | None:
    """Return why the values of a tensor are not those of plain memory at its address, with the remedy; None if so.

    Such tensors have no address, 0 as their address, or an address of something that is not their values.
    """
    if tensor.is_nested:
        return "it is a nested tensor, which has no one shape. Pass its parts, tensor.unbind()"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}. Pass tensor.to_dense()"
    if torch.nn.parameter.is_lazy(tensor):
        return "its module is lazy and has no shape yet. Run the module once before"
    if tensor.is_quantized:
        return "it is quantised, and its scale is not in its memory. Pass dequantize(), or int_repr() and the scale"
    if tensor.is_meta:
        return None
    try:
        storage = tensor.untyped_storage()
        # A fake tensor warns when somebody asks for its address.
        hidden = is_fake(tensor) or (
            storage.nbytes() > 0 and tensor.numel() > 0 and not (storage.data_ptr() and tensor.data_ptr())
        )
    except (RuntimeError, NotImplementedError):  # torch's errors for tensors that wrap others
        hidden = True
    if hidden:
        kind = type(tensor)
        return (
            f"it is a {kind.__module__}.{kind.__qualname__} that wraps other tensors, or none (fake tensors, "
            "torch.func, torch.compile). Pass plain tensors, such as those that it wraps"
        )
    return None


def lacking_memory(tensor: torch.Tensor) -> str | None:
    """Return why the elements of a tensor cannot be read at its address, with the remedy; None if they can.

    The one place that says so. The address of a tensor whose memory is gone may belong to other objects by now.
    """
    if (reason := opaque(tensor)) is not None:
        return reason
    if tensor.is_meta:
        return "it is on the device meta, so it has no data. Load it to another device before"
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    held = tensor.untyped_storage().nbytes()
    if count and (tensor.storage_offset() + count) * tensor.element_size() > held:
        return (
            f"its storage holds {held} bytes, fewer than its elements need (untyped_storage().resize_, or sharded "
            "parameters that are not gathered now). Fill the tensor again before"
        )
    return None


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


class _Elements:
    """The elements of a leaf for NumPy, which compares their addresses and never reads them."""

    def __init__(self, leaf: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (leaf_address(leaf), False),
            "shape": tuple(leaf.shape),
            "strides": strides_bytes(leaf),
            "typestr": f"|V{leaf.itemsize}",
        }


def share_memory(a: Any, b: Any) -> bool:
    """Return True if two leaves have a byte in common; also if that is too hard to find out."""
    try:
        most: Any = _MOST_WORK  # NumPy's stubs know -1 and 0 only
        return bool(np.shares_memory(np.asarray(_Elements(a)), np.asarray(_Elements(b)), max_work=most))
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(leaf: Any) -> bool:
    """Return True if two elements of a leaf may share memory, as those of an expanded tensor or a sliding window."""
    if 0 in leaf.shape:
        return False
    reach = leaf.itemsize
    for stride, size in sorted(
        (abs(stride), size) for stride, size in zip(strides_bytes(leaf), leaf.shape, strict=True)
    ):
        if size > 1:
            if stride < reach:
                return True
            reach += stride * (size - 1)
    return False


def tied(leaves: Sequence[Any], *, dense: bool = False) -> list[list[int]]:
    """Return the numbers of the leaves in groups; leaves that share memory are in one group.

    With `dense`, leaves that together fill their span by half are one group as well: a matrix in columns costs no more
    in one block than in several. Leaves without elements are in no group.
    """
    spans = [leaf_span(leaf) for leaf in leaves]
    merged, home = merge(spans)
    clusters: dict[int, list[int]] = {}
    for i, block in enumerate(home):
        if block >= 0:
            clusters.setdefault(block, []).append(i)
    groups = []
    for block, cluster in clusters.items():
        if dense and SPARSE_VIEW_FACTOR * sum(leaves[i].nbytes for i in cluster) >= merged[block].nbytes:
            groups.append(cluster)
            continue
        for part in _by_residue(leaves, cluster):
            if len(part) * (len(part) - 1) // 2 > _MOST_PAIRS:
                groups.append(part)
            else:
                pairs = itertools.combinations(part, 2)
                groups += _joined(part, pairs, lambda i, j: share_memory(leaves[i], leaves[j]))
    return groups


def _by_residue(leaves: Sequence[Any], cluster: list[int]) -> list[list[int]]:
    """Divide leaves into groups that share no memory with each other, such as the columns of a matrix. Quick.

    All bytes of a leaf lie in runs that begin at its address plus multiples of a common divisor of its strides. So two
    leaves share nothing if their runs do not overlap modulo a divisor of the strides of both.
    """
    if len(cluster) < 3:
        return [cluster]
    runs, divisor = [], 0
    for i in cluster:
        run = leaves[i].itemsize
        strides = sorted(
            (abs(stride), size)
            for stride, size in zip(strides_bytes(leaves[i]), leaves[i].shape, strict=True)
            if size > 1
        )
        for stride, size in strides:
            if stride == run:
                run *= size
            else:
                divisor = math.gcd(divisor, stride)
        runs.append(run)
    if not divisor or max(runs) > divisor:
        return [cluster]
    starts = [leaf_address(leaves[i]) % divisor for i in cluster]
    # A run may go on behind the divisor, that is at 0: twice, so that one of the two spans meets all others.
    spans = [
        Span(start + turn, start + turn + run) for start, run in zip(starts, runs, strict=True) for turn in (0, divisor)
    ]
    _, home = merge(spans)
    first_of: dict[int, int] = {}
    pairs = [(i, first_of.setdefault(home[2 * k + turn], i)) for k, i in enumerate(cluster) for turn in (0, 1)]
    return _joined(cluster, pairs, lambda i, j: True)


def _joined(
    members: Sequence[int], pairs: Iterable[tuple[int, int]], are_tied: Callable[[int, int], bool]
) -> list[list[int]]:
    """Return the members in groups that are connected by pairs for which `are_tied`, asked if it matters, is true."""
    parent = {member: member for member in members}

    def root(member: int) -> int:
        while parent[member] != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    for i, j in pairs:
        if root(i) != root(j) and are_tied(i, j):
            parent[root(i)] = root(j)
    groups: dict[int, list[int]] = {}
    for member in members:
        groups.setdefault(root(member), []).append(member)
    return list(groups.values())
