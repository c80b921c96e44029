"""`raylane.open`: look at the tensors of a value without moving them, and read only what is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import ray
import torch

from raylane.core.deadline import Deadline
from raylane.errors import TransferTimeoutError
from raylane.transport.backends.registry import check_name
from raylane.transport.read.deliver import Delivery, Present, check_target, convert, copy_into, delivery
from raylane.transport.read.redeem import redeem_parts
from raylane.transport.read.targets import Path, paths, structure
from raylane.transport.read.unpickling import Pending, collect
from raylane.transport.value import codec
from raylane.transport.value.layout import ARRAY, PARAMETER, TENSOR, LeafSpec, array_dtype, itemsize_of
from raylane.transport.value.parts import size_of, sliced


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor or array of a value, as it is in the producer."""

    index: int
    paths: tuple[Path, ...]
    """Places of the tensor: keys, indices and dataclass fields that lead to it; `()` if the value is the tensor itself.

    Empty if it lies inside an object of another class.
    """
    shape: tuple[int, ...]
    dtype: Any
    """A torch dtype for a tensor, a NumPy dtype for an array."""
    device: str
    nbytes: int
    requires_grad: bool

    @property
    def path(self) -> Path | None:
        """First of the paths; None if there is none."""
        return self.paths[0] if self.paths else None


class OpenedValue:
    """A value whose tensors stay where they are until they are read; returned by `raylane.open`.

    It holds the ref, so the value lives as long as this object, or until `close`. May be used as a context manager, and
    by several threads.
    """

    def __init__(self, ref: ray.ObjectRef, value: Pending | Present) -> None:
        self._ref: ray.ObjectRef | None = ref
        self._value = value
        if isinstance(value, Pending):
            self._specs = list(value.ticket.specs)
            shown = structure(value.skeleton, self._specs)
        else:
            self._leaves = [leaf for leaf in value.leaves if codec.is_leaf(leaf)]
            self._specs = [codec.spec_of(leaf, leaf, 0, 0) for leaf in self._leaves]
            shown = value.shown()
        where = paths(shown)
        self.tensors: tuple[TensorInfo, ...] = tuple(
            TensorInfo(
                index=i,
                paths=tuple(where.get(i, ())),
                shape=tuple(spec.shape),
                dtype=array_dtype(spec) if spec.kind == ARRAY else getattr(torch, spec.dtype),
                device=spec.device,
                nbytes=size_of(spec, itemsize_of(spec)),
                requires_grad=spec.requires_grad,
            )
            for i, spec in enumerate(self._specs)
        )
        """All tensors and arrays of the value, in order."""

    @property
    def nbytes(self) -> int:
        """Size of the elements of all tensors in bytes; tensors that share memory count each."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def source(self) -> str:
        """Description of the process that holds the tensors."""
        return str(self._value.ticket.origin()) if isinstance(self._value, Pending) else "this process"

    def read(
        self,
        which: Any = None,
        *,
        slices: Any = None,
        into: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        timeout: float | None = None,
        tensor_transport: str | None = None,
    ) -> Any:
        """Return one tensor of the value, or a slice of it; only these bytes are moved (with `host` and `tcp`).

        The caller owns the result; in the producing process it is a copy. Waits at most for the timeout.

        Args:
            which: Index in `tensors`, or a path: a tuple of keys, or one key. None for a value with one tensor.
            slices: What would be between the brackets of `tensor[...]`: integers, slices, an Ellipsis, or a tuple of
                these. The bytes between the elements of a slice are moved too where that is faster than many short
                reads; and the whole value is moved if it has a checksum (`on_mutation="error"`).
            into: Tensor or array of the shape and dtype of the result, which receives it.
            device: Device of the result, such as `"cuda:0"`; None: as in the producer, where this process has it.
            dtype: Floating-point dtype of the result, if the tensor has one.
            timeout: Seconds; None means RAYLANE_TIMEOUT_S (60 s).
            tensor_transport: The transport, as in `raylane.method`.

        Raises:
            KeyError: The value has no such tensor.
            IndexError: A slice does not fit the shape.
            ValueError: `into` has another shape or dtype, or an option is not accepted.
            TransportError: As `raylane.get`.
        """
        if self._ref is None:
            raise ValueError("this value was closed; open its ref again")
        wish = delivery(into, device, dtype, where="read")
        transport = None if tensor_transport is None else check_name(tensor_transport)
        index = self._index(which)
        spec = self._specs[index]
        if slices is not None:
            spec = sliced(spec, itemsize_of(spec), slices)
            # As in torch, a slice of a Parameter is no Parameter.
            kind = ARRAY if spec.kind == ARRAY else TENSOR
            spec = msgspec.structs.replace(spec, kind=kind, requires_grad=False)
        deadline = Deadline.of_call(timeout)
        if deadline.left_s() == 0 and isinstance(self._value, Pending):
            raise TransferTimeoutError("read: a timeout of 0 leaves no time to move a tensor. Pass a longer one")

        def own(leaves: list[Any]) -> list[Any]:
            return [_copied(leaves[index], slices, spec, wish)]

        if wish.into is not None:
            check_target(spec, wish.into)
        if isinstance(self._value, Present):
            return own(self._leaves)[0]
        if wish.device is not None and spec.kind != ARRAY:
            spec = msgspec.structs.replace(spec, device=str(wish.device))
        leaf = redeem_parts(self._value.ticket, [spec], [wish.into], transport, deadline, own)[0]
        return convert([leaf], wish)[0]

    def _index(self, which: Any) -> int:
        if which is None:
            if len(self.tensors) != 1:
                raise KeyError(f"the value has {len(self.tensors)} tensors; name one by index or path, see `tensors`")
            return 0
        if isinstance(which, int) and not isinstance(which, bool):
            if not -len(self.tensors) <= which < len(self.tensors):
                raise KeyError(f"the value has no tensor {which}; it has {len(self.tensors)}")
            return which % len(self.tensors)
        path = which if isinstance(which, tuple) else (which,)
        for tensor in self.tensors:
            if path in tensor.paths:
                return tensor.index
        known = [
            tensor.path if tensor.path is None or len(tensor.path) != 1 else tensor.path[0] for tensor in self.tensors
        ]
        shown = ", ".join(repr(tensor) for tensor in known[:8]) + (", ..." if len(known) > 8 else "")
        raise KeyError(f"the value has no tensor at {which!r}; it has {shown}")

    def close(self) -> None:
        """Drop the ref; reads raise ValueError from then on."""
        self._ref = None

    def __enter__(self) -> OpenedValue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OpenedValue({len(self.tensors)} tensors, {self.nbytes} bytes, in {self.source})"


def _copied(leaf: Any, slices: Any, spec: LeafSpec, wish: Delivery) -> Any:
    """Return a copy of a leaf of this process, or of a slice of it, as its reader wants it."""
    with torch.no_grad():
        view = leaf if slices is None else leaf[slices]
        if isinstance(view, np.generic):  # of integers alone; a scalar has the byte order of the machine
            view = np.asarray(view, leaf.dtype)
        if wish.into is not None:
            return copy_into(wish.into, view)
        if isinstance(view, torch.Tensor):
            copy = view.detach().clone()
            if spec.kind == PARAMETER:
                copy = torch.nn.Parameter(copy, requires_grad=spec.requires_grad)
            return convert([copy.requires_grad_(spec.requires_grad)], wish)[0]
        return np.array(view)


def open_value(ref: ray.ObjectRef, *, timeout: float | None = None) -> OpenedValue:
    """Return the value of a ref for reads of parts: its tensors stay in the producer until they are read.

    Works for every ref; a value that Ray carries, or that travelled inside Ray's reply, is in this process already.
    In values that no raylane method returned, tensors are found where pickle finds them; if such a value cannot be
    pickled again (it holds a lock, for example), in dicts, lists and tuples only.

    Args:
        ref: The ref; the result keeps it.
        timeout: Seconds for the producing call; None for no limit.

    Raises:
        TransferTimeoutError: The value was not produced in time.
        TypeError: `ref` is no ObjectRef.
        Exception: The error of the producing call.
    """
    if not isinstance(ref, ray.ObjectRef):
        raise TypeError(f"raylane.open takes one ObjectRef, got {type(ref).__name__}")
    try:
        value = collect([ref], timeout, [True], lenient=True)[0]
    except ray.exceptions.GetTimeoutError as error:
        raise TransferTimeoutError(
            f"raylane.open: the value was not produced within {timeout} s. Its call is still running, or waiting for "
            "resources; raise the timeout if that is expected"
        ) from error
    return OpenedValue(ref, value)
