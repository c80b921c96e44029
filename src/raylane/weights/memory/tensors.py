"""Tensors of users as layouts and views: modules, dicts, DTensors, parts of larger tensors. Knows nothing of Ray."""

from __future__ import annotations

import contextlib
import gc
import operator
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter

from raylane.core.listing import listed
from raylane.errors import WeightsError, WeightsLayoutError
from raylane.transport.value.leaf_memory import lacking_memory, opaque, overlaps_itself
from raylane.weights.layout.boxes import Box, Division, HeldBox, StoredBox, StoredLayout, TensorLayout, View, divide
from raylane.weights.layout.plan import Plan
from raylane.weights.layout.recording import Record
from raylane.weights.memory.structure import Structure, check_complete, homes_of, ties_of


class Part(NamedTuple):
    """Place of a plain tensor within a whole one that no single rank holds, for `places`."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    """First element of this part in it."""

    @classmethod
    def even(cls, tensor: torch.Tensor, dim: int, rank: int, size: int) -> Part:
        """Return the place of part `rank` of `size` equal parts along a dimension."""
        shape, start = list(tensor.shape), [0] * tensor.dim()
        start[dim], shape[dim] = shape[dim] * rank, shape[dim] * size
        return cls(tuple(shape), tuple(start))


TAKEN_FROM_BYTES = 1 << 16
"""Size from which new memory of a tensor comes from a pool.

The C library kept 1.1 GB for 64 MB of weights that were replaced again and again (glibc 2.36, 2026-11-24).
"""
PLAIN = {torch.Tensor, Parameter}
"""Types of tensors that are no DTensors."""
_dtype, _shape = operator.attrgetter("dtype"), operator.attrgetter("shape")
PublishedDtype = torch.dtype | Mapping[str, torch.dtype | None] | None
"""One dtype for all tensors, or dtypes by regular expression; None: as they are."""
Places = Mapping[str, Part] | Callable[[str, torch.Tensor], Part | None] | None


class _Kind(NamedTuple):
    """Shapes of a tensor and of what this process has of it, and its division (None: a plain tensor)."""

    shape: tuple[int, ...]
    own: tuple[int, ...]
    placements: tuple[Any, ...] | None

    def text(self) -> str:
        return f"of shape {self.own}" + ("" if self.placements is None else f" of {self.shape}, {self.placements}")


def inner_of(tensor: Any) -> torch.Tensor:
    """Return the tensor of this process: the local part of a DTensor."""
    inner: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return inner


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Make many objects at once without Python's search for cycles, which takes longer than to make them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _kind(tensor: Any) -> _Kind:
    return _Kind(tuple(tensor.shape), tuple(inner_of(tensor).shape), getattr(tensor, "placements", None))


class NamedTensors:
    """Tensors of a module or a mapping by name, looked up anew at each use: their memory may be replaced."""

    keep_values = True
    """False if what was loaded cannot be read again, as it is packed or handed on."""

    def __init__(self, model: Any) -> None:
        """TypeError if `model` is neither a module nor a mapping of tensors by name.

        WeightsLayoutError if it keeps weights elsewhere, or if a tensor is none of plain memory.
        """
        if not isinstance(model, Module | Mapping):
            raise TypeError(f"weights are those of a torch module or a dict of tensors by name, got {type(model)}")
        self._model = model
        self._homes, self._structure = homes_of(model), Structure(model)
        for name, tensor in self.items():
            if not isinstance(name, str):
                raise TypeError(f"names of tensors are texts, got {name!r} of type {type(name).__name__}")
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name!r} is no tensor but {type(tensor).__name__}; leave it out of the dict")
            if (reason := opaque(inner_of(tensor))) is not None:
                raise WeightsLayoutError(f"{name!r} cannot be published or read: {reason}")
        if isinstance(model, Module):
            check_complete(model, self._homes)
        self.same = ties_of(self._homes)
        """Further names of tensors, and the first name of each: tied weights."""
        self._kinds = {name: _kind(tensor) for name, tensor in self.items()}
        """Shape and division of each tensor, on which layouts and plans rely."""
        self._dtypes = {name: tensor.dtype for name, tensor in self.items()}

    def refresh(self) -> None:
        """Look where the tensors are now: modules and tensors may have been replaced by others of the same names.

        WeightsLayoutError if names were added or removed, or if other tensors are tied now.
        """
        structure = Structure(self._model)
        if structure == self._structure:  # so are names and ties
            return
        homes, ties = homes_of(self._model), None
        if homes.keys() == self._homes.keys():
            ties = ties_of(homes)
        again = "Make a new publisher or subscriber"
        if ties is None:
            added, removed = homes.keys() - self._homes.keys(), self._homes.keys() - homes.keys()
            changes = [
                f"{text} {listed(sorted(names))}" for text, names in (("added", added), ("removed", removed)) if names
            ]
            raise WeightsLayoutError(
                f"the model has other tensors than at its registration: {'; '.join(changes)}. {again}"
            )
        if ties != self.same:
            changed = sorted({*ties.items()} ^ {*self.same.items()})
            texts = [
                f"{name!r} {'is' if name in ties else 'is no longer'} tied to {first!r}" for name, first in changed
            ]
            raise WeightsLayoutError(
                f"the model has other ties than at its registration: {'; '.join(texts[:3])}. Tie the tensors as they "
                f"were (tie_weights()), or: {again.lower()}"
            )
        self._homes, self._structure = homes, structure

    def items(self) -> list[tuple[str, Any]]:
        """Return all names with their present tensors."""
        return [(name, home[key]) for name, (home, key) in self._homes.items()]

    def values(self) -> list[Any]:
        """Return all present tensors."""
        return [home[key] for home, key in self._homes.values()]

    def distinct(self) -> dict[str, torch.Tensor]:
        """Return each tensor once, by the first of its names."""
        return {name: tensor for name, tensor in self.items() if name not in self.same}

    def check(self, *, meta: bool) -> None:
        """Raise WeightsLayoutError if a tensor has another shape or division by now, or no memory.

        With `meta`, for a reader, tensors on the meta device are accepted: they get memory. But elements that share
        memory, or are conjugated or negated when they are read, are refused then.
        """
        for name, tensor in self.items():
            if not isinstance(tensor, torch.Tensor):
                raise WeightsLayoutError(f"{name!r} is no tensor any more but {type(tensor).__name__}. Bring it back")
            inner = inner_of(tensor)
            reason = opaque(inner) if meta and inner.is_meta else lacking_memory(inner)
            if reason is None and meta and not inner.is_contiguous() and overlaps_itself(inner):
                reason = "its elements share memory (expand, as_strided), so it cannot be written. Pass its clone()"
            if reason is None and meta and (inner.is_conj() or inner.is_neg()):
                reason = "it is conjugated or negated when it is read. Pass its resolve_conj().resolve_neg()"
            if reason is not None:
                raise WeightsLayoutError(f"{name!r} cannot be published or read now: {reason}")
            kind, before = _kind(tensor), self._dtypes[name]
            if inner.dtype != before and not (_is_plain_float(inner.dtype) and _is_plain_float(before)):
                raise WeightsLayoutError(
                    f"{name!r} has the dtype {inner.dtype} now, and had {before} when it was registered: its values "
                    "would be converted without a scale. Make a new publisher or subscriber"
                )
            if kind != self._kinds[name]:
                raise WeightsLayoutError(
                    f"{name!r} is {kind.text()} now, and was {self._kinds[name].text()} when it was registered. Make "
                    "a new publisher or subscriber, or bring the tensor back (FSDP2 gathers parameters for a forward)"
                )

    def check_exchangeable(self) -> None:
        """Raise WeightsLayoutError if other tensors see the memory of these, which an exchange would tear apart."""
        first_of: dict[int, str] = {}
        for name, tensor in self.distinct().items():
            inner = inner_of(tensor)
            if inner.is_meta:
                continue
            cause = None
            first = first_of.setdefault(inner.untyped_storage()._cdata, name)
            if first != name:
                cause = f"{first!r} lies in the same storage"
            elif inner is not tensor and _has_other_users(inner):
                cause = "it is a DTensor whose storage its module uses in another way too, as FSDP2 does"
            elif not isinstance(self._model, Module) and _has_other_users(inner):
                cause = "other tensors lie in its storage, as those of a module whose state_dict() was passed"
            if cause is not None:
                raise WeightsLayoutError(
                    f"the memory of {name!r} cannot be exchanged: {cause}, and would keep the old values. Subscribe "
                    "with apply='copy'; or pass the module itself where a dict was passed"
                )

    def check_unmerged(self) -> None:
        """Raise WeightsLayoutError if adapters were merged into the base (PEFT): an update would add them twice."""
        merged = next((each for each in self._structure.adapted if getattr(each, "merged", 0) is True), None)
        if merged is not None and isinstance(self._model, Module):
            name = next(name for name, each in self._model.named_modules() if each is merged)
            raise WeightsLayoutError(
                f"{name!r} has merged its adapters into the base weights, which an update would overwrite. Call "
                "unmerge_adapter() before it, and merge again afterwards"
            )

    def memory(self) -> tuple[list[Any], ...]:
        """Return address, shape, strides and dtype of all tensors: while they stay the same, so do views of them."""
        tensors = self.values()
        if set(map(type, tensors)) - PLAIN:
            self.check(meta=True)  # else torch would raise errors of its own
            tensors = [inner_of(tensor) for tensor in tensors]
        reads = (torch.Tensor.data_ptr, _shape, torch.Tensor.stride, _dtype)
        with _uncollected():
            return tuple(list(map(read, tensors)) for read in reads)

    def set_memory(self, name: str, memory: torch.Tensor) -> None:
        """Let a tensor lie in other memory of its shape and dtype. One on the meta device is replaced."""
        home, key = self._homes[name]
        tensor = home[key]
        inner = inner_of(tensor)
        if not inner.is_meta:
            inner.data = memory
            return
        if inner is not tensor:
            raise WeightsLayoutError(f"{name!r} is a DTensor on the meta device. Call model.to_empty(device=...)")
        new = Parameter(memory, requires_grad=tensor.requires_grad) if isinstance(tensor, Parameter) else memory
        for other in (name, *(further for further, first in self.same.items() if first == name)):
            home, key = self._homes[other]
            home[key] = new

    def learn(self, stored: StoredLayout) -> None:
        """Take note of the published layout, before a plan is made for it."""

    def new(self, names: Collection[str], take: Callable[[int], Any]) -> dict[str, torch.Tensor]:
        """Return new memory for these tensors, for an exchange. `take(nbytes)` returns host memory for large ones."""
        tensors = self.distinct()
        return {name: new_memory_like(local(tensors[name]), take) for name in names}

    def prepare(self, memory: dict[str, torch.Tensor]) -> Any:
        """Make what `exchange` takes of new memory that has been written."""
        return memory

    def exchange(self, prepared: Any) -> None:
        """Let the tensors lie in new memory."""
        for name, memory in prepared.items():
            self.set_memory(name, memory)


def _is_plain_float(dtype: torch.dtype) -> bool:
    """Return True for floating-point dtypes whose values need no scale, as those of one byte do."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _has_other_users(tensor: torch.Tensor) -> bool:
    """Return True if another tensor lies in the storage of a tensor, and somebody has it."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return False
    storage, base = tensor.untyped_storage(), tensor._base
    # `storage` is a user too. So is the base of a view, which counts if more than torch and this call refer to it.
    users = 2 if base is None else 3
    return bool(count(storage._cdata) > users or (base is not None and sys.getrefcount(base) > 3))


class PublishedTensors(NamedTensors):
    """All tensors that are published, whatever they are: each version in new memory of this host.

    For a `Subscriber` with `apply="swap"` and the mapping `Mapping()`, which reads the layout when it is known.

    Attributes:
        version: Tensors of the version that was taken last, by name; the memory is not used again.
    """

    keep_values = False

    def __init__(self) -> None:
        super().__init__({})
        self.version: dict[str, torch.Tensor] = {}
        self._further: dict[str, str] = {}
        """Further names of tied tensors, and the name under which each is stored."""

    def learn(self, stored: StoredLayout) -> None:
        """Have the published tensors, without memory."""
        blank = {
            name: torch.empty(each.shape, dtype=getattr(torch, each.dtype), device="meta")
            for name, each in stored.tensors.items()
        }
        super().__init__(blank)
        self._further = stored.same

    def exchange(self, prepared: dict[str, torch.Tensor]) -> None:
        """Note the tensors of a new version."""
        self.version = prepared | {name: prepared[first] for name, first in self._further.items()}


def published_dtypes(
    tensors: Mapping[str, torch.Tensor], dtype: PublishedDtype, *, whole: bool = True
) -> dict[str, torch.dtype]:
    """Return the dtype in which each tensor is published, as `Publisher` describes. ValueError for what it refuses.

    With `whole`, the tensors are all of a model, so that each pattern has to decide on one of them.
    """
    by_pattern = dtype if isinstance(dtype, Mapping) else {"": dtype}
    compiled = []
    for pattern, target in by_pattern.items():
        try:
            compiled.append((re.compile(pattern), target))
        except (re.error, TypeError) as error:
            raise ValueError(f"dtype has the key {pattern!r}, which is no regular expression: {error}") from None
        if target is not None and not getattr(target, "is_floating_point", False):
            raise ValueError(f"dtype must be a floating-point dtype such as torch.bfloat16, got {target!r}")
        if target is not None and target.itemsize == 1 and dtype is target:
            raise ValueError(
                f"dtype must have two bytes or more, got {target!r}: quantise weights with their scales before they "
                "are published, or name the tensors that are to be converted without a scale: dtype={pattern: dtype}"
            )
    used: set[re.Pattern[str]] = set()
    dtypes = {}
    for name, tensor in tensors.items():
        found = next(((pattern, target) for pattern, target in compiled if pattern.search(name)), None)
        used.update(() if found is None else {found[0]})
        target = None if found is None or not tensor.dtype.is_floating_point else found[1]
        dtypes[name] = target or tensor.dtype
    unused = [pattern.pattern for pattern, _ in compiled if pattern not in used]
    if whole and unused and dtype is by_pattern:
        raise ValueError(
            f"dtype has patterns that decide on no tensor: {listed(unused)}. The first pattern that is found in a name "
            f"counts; the names are {listed(list(tensors))}"
        )
    return dtypes


def layout_of(
    tensors: Mapping[str, torch.Tensor], places: Places, dtypes: Mapping[str, torch.dtype] | None = None
) -> dict[str, TensorLayout]:
    """Return the layout of a rank's tensors, which count as of these dtypes (None: as they are).

    WeightsLayoutError for a DTensor of partial sums, and for a part that does not lie in its whole tensor.
    """
    if places is not None and not callable(places):
        if not isinstance(places, Mapping):
            raise TypeError(f"places must be a dict of Part by name, or a function, got {places!r}")
        unknown = [name for name in places if name not in tensors]
        if unknown:
            raise ValueError(f"places has no tensors of the names {listed(unknown)}; there are {listed(list(tensors))}")
    layout = {}
    for name, tensor in tensors.items():
        cast = tensor.dtype if dtypes is None else dtypes[name]
        shape = tuple(tensor.shape)
        held: tuple[HeldBox, ...]
        if hasattr(tensor, "placements"):
            held = boxes_of(name, tensor)
        else:
            origin = (0,) * tensor.dim()
            given_part = places(name, tensor) if callable(places) else (places or {}).get(name)
            part = given_part or Part(shape, origin)  # the tensor is whole
            stop = [start + size for start, size in zip(part.start, shape, strict=True)]
            if any(start < 0 or end > size for start, end, size in zip(part.start, stop, part.shape, strict=True)):
                raise WeightsLayoutError(f"{name!r} of shape {shape} does not lie in {part}")
            held = (HeldBox(Box(tuple(part.start), shape), origin),) if tensor.numel() else ()
            shape = tuple(part.shape)
        layout[name] = TensorLayout(shape, str(cast).removeprefix("torch."), cast.itemsize, held)
    return layout


def boxes_of(name: str, tensor: Any) -> tuple[HeldBox, ...]:
    """Return the boxes of a DTensor on this rank."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # this rank is not part of the mesh
        return ()
    divisions: list[Division | None] = []
    for placement in tensor.placements:
        if placement.is_partial():
            raise WeightsLayoutError(
                f"{name!r} is a DTensor of partial sums ({placement}), which is no weight yet. Redistribute it first"
            )
        dim = getattr(placement, "dim", None)
        divisions.append(None if dim is None else Division(dim % tensor.dim(), getattr(placement, "split_factor", 1)))
    return divide(tuple(tensor.shape), tuple(tensor.device_mesh.shape), coordinate, divisions)


def local(tensor: Any) -> torch.Tensor:
    """Return the memory of a tensor on this rank, detached."""
    inner: torch.Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return inner.detach()


def new_memory_like(
    tensor: torch.Tensor, take: Callable[[int], Any], device: torch.device | None = None
) -> torch.Tensor:
    """Return new memory for a tensor on a device (None: its own; in host memory for one on the meta device).

    `take(nbytes)` returns host memory for large tensors.
    """
    if device is None:
        device = torch.device("cpu") if tensor.is_meta else tensor.device
    if device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes >= TAKEN_FROM_BYTES:
        return torch.frombuffer(take(tensor.nbytes), dtype=tensor.dtype).view(tensor.shape)
    return torch.empty_like(tensor, device=device)


Regions = Sequence[tuple[str, Box | View]]
"""Names of tensors of this process, each with a region. Those of a mapping have the dimensions of published tensors."""


def views_of(tensors: Mapping[str, torch.Tensor], regions: Regions) -> list[torch.Tensor]:
    """Return regions of tensors, without a copy."""
    views, inner, current = [], None, None
    for name, place in regions:
        if name != current:
            inner, current = local(tensors[name]), name
        assert inner is not None
        views.append(place.of(inner))
    return views


def target_regions(plan: Plan) -> Regions:
    """Return the regions of a reader's tensors into which the pieces of a plan go."""
    return [(pieces.name, target) for pieces in plan.pieces for _, _, target, _ in pieces.rows()]


def mapped_regions(plan: Plan, recorded: Record) -> Regions:
    """Return the regions of a reader's tensors into which the pieces of a plan go that a mapping has recorded."""
    regions = []
    for pieces in plan.pieces:
        of_tensor = recorded.regions[pieces.name]
        for _, _, box, held in pieces.rows():
            _, target, view = of_tensor[held]
            regions.append((target, View(box.size, view.strides, view.at(box.start))))
    return regions


def writes_of(
    stored: StoredLayout, rank: int, layout: Mapping[str, TensorLayout], memory: torch.Tensor
) -> tuple[Regions, list[torch.Tensor]]:
    """Return the regions of a rank's own tensors that it writes to a version, and their places in its host's part."""
    regions, places = [], []
    for name, published in stored.tensors.items():
        begins = {held.box: held.at for held in layout[name].held} if name in layout else {}
        for room in published.boxes:
            for writer, box in room.writes:
                if writer == rank:
                    regions.append((name, Box(begins[box], box.size)))
                    places.append(box.within(room.box).of(view_of_box(memory, room, published.dtype)))
    return regions, places


def view_of_box(memory: torch.Tensor, room: StoredBox, dtype_name: str) -> torch.Tensor:
    """Return a stored box as a tensor in the bytes of its part."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    return memory[room.offset : room.offset + room.box.elements * dtype.itemsize].view(dtype).view(room.box.size)


def stored_pieces(plan: Plan, memories: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the pieces of a plan as they lie in the parts, which `memories` has by host."""
    views = []
    for pieces in plan.pieces:
        published = plan.stored.tensor(pieces.name)
        for number, source, _, _ in pieces.rows():
            room = published.boxes[number]
            stored = view_of_box(memories[plan.stored.parts[room.part]], room, published.dtype)
            views.append(source.of(stored))
    return views


def refuse_training(model: Module) -> None:
    """Refuse calls of a model in training mode: its weights lie in memory that is replaced."""
    model.eval()

    def refuse(module: Module, *_: Any) -> None:
        if module.training:
            raise WeightsError(
                "this model's weights are mapped from shared memory (apply='map'), so it cannot be trained: the next "
                "update replaces them. Call model.eval(), or subscribe with apply='copy'"
            )

    model.register_forward_pre_hook(refuse)
    model.requires_grad_(False)
