"""Names and targets of the tensors inside a value: matching of a reader's own tensors with those of a value. Pure."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import types
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from raylane.core.listing import listed
from raylane.transport.value import codec
from raylane.transport.value.layout import LeafSpec
from raylane.transport.value.leaf_memory import leaf_address, share_memory, strides_bytes, tied

Path = tuple[Any, ...]
"""Keys, indices and field names that lead from a value to one of its tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Placeholder of leaf number `index` in the structure of a value."""

    index: int


def structure(skeleton: bytes, leaves: Sequence[Any]) -> Any:
    """Return the value with a Slot in place of each leaf that is a tensor, an array or a LeafSpec.

    None if the value contains objects that cannot be rebuilt without their tensors.
    """
    number = itertools.count()
    shown = [Slot(next(number)) if isinstance(leaf, LeafSpec) or codec.is_leaf(leaf) else leaf for leaf in leaves]
    try:
        return codec.decode_value(skeleton, shown, own_objects=True)
    except Exception:  # of the user's own __setstate__ or __reduce__, which expects a tensor
        return None


def children(value: Any) -> list[tuple[Any, Any]]:
    """Return the named parts of a container: keys of a mapping, indices of a sequence, fields of a dataclass."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return list(vars(value).items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Slot):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def with_part(value: Any, path: Path, part: Any) -> Any:
    """Return a value with another part at a path of `paths`: the same object, except for tuples.

    TypeError if a container on the way cannot be changed.
    """
    if not path:
        return part
    name, rest = path[0], path[1:]
    inner = with_part(dict(children(value))[name], rest, part)
    if isinstance(value, MutableMapping | list):
        value[name] = inner
    elif isinstance(value, tuple):
        items = [*value[:name], inner, *value[name + 1 :]]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    elif isinstance(value, Mapping):
        raise TypeError(
            f"into names two targets for one tensor of the value, but a {type(value).__name__} cannot take the second "
            "one. Pass one target, and copy it"
        )
    else:
        object.__setattr__(value, name, inner)  # dataclasses may be frozen
    return value


def paths(value: Any) -> dict[int, list[Path]]:
    """Return all paths of every Slot that can be reached through containers."""
    places: dict[int, list[Path]] = {}
    for path, slot in _slots(value, ()):
        places.setdefault(slot.index, []).append(path)
    return places


def _slots(value: Any, at: Path) -> Iterator[tuple[Path, Slot]]:
    if isinstance(value, Slot):
        yield at, value
        return
    for name, part in children(value):
        yield from _slots(part, (*at, name))


class Placed(NamedTuple):
    """A target, and the place in the value that it is for."""

    number: int
    """Number of the leaf."""
    path: Path
    target: Any


@dataclasses.dataclass(frozen=True)
class Targets:
    """The targets of one value."""

    first: list[Any]
    """The target of each leaf, or its first one; None for new memory."""
    further: list[Placed]
    """Other targets of leaves that stand in several places of the value; they get a copy."""

    def all(self) -> list[tuple[int, Any]]:
        """Return all targets with the numbers of their leaves."""
        first = [(index, target) for index, target in enumerate(self.first) if target is not None]
        return first + [(placed.number, placed.target) for placed in self.further]


def match(value: Any, count: int, into: Any) -> Targets:
    """Return the targets of the `count` leaves of a structure.

    `into` is a tensor (for a value with one), a list with a tensor or None for each leaf in order, or has the
    containers of the value; a mapping may leave out keys. Raises ValueError or TypeError that names the place.
    """
    if _is_target(into):
        if count != 1:
            raise ValueError(
                f"into is one tensor, and the value has {count}. Pass a list of {count}, or a dict by name"
            )
        return Targets([into], [])
    if isinstance(into, list | tuple) and not isinstance(value, list | tuple):
        if len(into) != count:
            raise ValueError(f"into has {len(into)} tensors, and the value has {count} (see raylane.open(ref).tensors)")
        for i, target in enumerate(into):
            if target is not None and not _is_target(target):
                raise TypeError(f"into[{i}] must be a tensor, an array or None, got {target!r}")
        return Targets(list(into), [])
    targets = Targets([None] * count, [])
    for placed in _match(value, into, "into", ()):
        if targets.first[placed.number] is None:
            targets.first[placed.number] = placed.target
        elif targets.first[placed.number] is not placed.target:
            targets.further.append(placed)
    return targets


def _is_target(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _match(value: Any, into: Any, where: str, path: Path) -> Iterator[Placed]:
    if into is None:
        return
    if isinstance(value, Slot):
        if not _is_target(into):
            raise TypeError(f"{where} must be a tensor, an array or None, got {type(into).__name__}")
        yield Placed(value.index, path, into)
        return
    if _is_target(into):
        raise ValueError(f"{where} is a tensor, but the value has {type(value).__name__} there")
    named = dict(children(value))
    if isinstance(into, Mapping):
        parts: Mapping[Any, Any] = into
    elif isinstance(into, list | tuple) and isinstance(value, list | tuple):
        if len(into) != len(value):
            raise ValueError(f"{where} has {len(into)} items, the value has {len(value)} there")
        parts = dict(enumerate(into))
    elif type(into) is type(value) and named:
        parts = dict(children(into))
    else:
        raise TypeError(
            f"{where} is {type(into).__name__}, the value has {type(value).__name__} there. Pass a list with one "
            "tensor for each of raylane.open(ref).tensors instead"
        )
    unknown = [key for key in parts if key not in named]
    if unknown:
        raise ValueError(f"{where} has {unknown[0]!r}, which the value does not have; it has {listed(named)}")
    for key, part in parts.items():
        yield from _match(named[key], part, f"{where}[{key!r}]", (*path, key))


class Destination(NamedTuple):
    """A target with the place of its bytes in the source, for `check_apart`."""

    target: Any
    memory: tuple[int, int]
    """Numbers of the value and of its block: leaves share memory in the source if these are equal."""
    offset: int
    """Offset of the leaf in that memory, in bytes."""
    strides: tuple[int, ...]
    """Strides of the leaf in the source, in bytes."""


def check_apart(destinations: Sequence[Destination]) -> None:
    """Raise ValueError if two targets share memory, unless the leaves that they receive share it in the same way."""
    # Only these types: the elements of a subclass may lie elsewhere.
    types = (torch.Tensor, torch.nn.Parameter, np.ndarray)
    plain = [destination for destination in destinations if type(destination.target) in types]
    for group in tied([destination.target for destination in plain]):
        for first, second in itertools.combinations([plain[i] for i in group], 2):
            if not _alike(first, second) and share_memory(first.target, second.target):
                raise ValueError(
                    f"into has targets that share memory (of shapes {tuple(first.target.shape)} and "
                    f"{tuple(second.target.shape)}), but they are for different tensors of the value, so one would "
                    "overwrite the other. Pass targets with memory of their own"
                )


def _alike(a: Destination, b: Destination) -> bool:
    """Return True if two leaves share memory in the source as their targets do here."""
    distance = leaf_address(b.target) - leaf_address(a.target)
    strides = [strides_bytes(destination.target) for destination in (a, b)]
    if a.memory != b.memory or distance != b.offset - a.offset:
        return False
    same_leaf = (
        not distance and a.strides == b.strides and a.target.shape == b.target.shape and strides[0] == strides[1]
    )
    return same_leaf or (a.strides == strides[0] and b.strides == strides[1])
