"""Names and targets of the tensors inside a value: matching of a reader's own tensors with those of a value. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raylane.transport import codec

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
    shown = [Slot(next(number)) if isinstance(leaf, codec.LeafSpec) or codec.is_leaf(leaf) else leaf for leaf in leaves]
    try:
        return codec.decode_value(skeleton, shown, own=True)
    except Exception:  # of the user's own __setstate__ or __reduce__, which expects a tensor
        return None


def children(value: Any) -> list[tuple[Any, Any]]:
    """Return the named parts of a container: keys of a mapping, indices of a sequence, fields of a dataclass."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type | Slot):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def paths(value: Any) -> dict[int, Path]:
    """Return the path of every Slot that can be reached through containers."""
    return {slot.index: path for path, slot in _slots(value, ())}


def _slots(value: Any, at: Path) -> Iterator[tuple[Path, Slot]]:
    if isinstance(value, Slot):
        yield at, value
        return
    for name, part in children(value):
        yield from _slots(part, (*at, name))


def match(value: Any, count: int, into: Any) -> list[Any]:
    """Return the target of each of the `count` leaves of a structure; None for a leaf without one.

    `into` is a tensor (for a value with one), a list with a tensor or None for each leaf in order, or has the
    containers of the value; a mapping may leave out keys. Raises ValueError or TypeError that names the place.
    """
    targets: list[Any] = [None] * count
    if _is_target(into):
        if count != 1:
            raise ValueError(
                f"into is one tensor, and the value has {count}. Pass a list of {count}, or a dict by name"
            )
        return [into]
    if isinstance(into, list | tuple) and not isinstance(value, list | tuple):
        if len(into) != count:
            raise ValueError(f"into has {len(into)} tensors, and the value has {count} (see raylane.open(ref).tensors)")
        for i, one in enumerate(into):
            if one is not None and not _is_target(one):
                raise TypeError(f"into[{i}] must be a tensor, an array or None, got {one!r}")
        return list(into)
    _match(value, into, "into", targets)
    return targets


def _is_target(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray)


def _match(value: Any, into: Any, where: str, targets: list[Any]) -> None:
    if into is None:
        return
    if isinstance(value, Slot):
        if not _is_target(into):
            raise TypeError(f"{where} must be a tensor, an array or None, got {type(into).__name__}")
        targets[value.index] = into
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
        raise ValueError(f"{where} has {unknown[0]!r}, which the value does not have; it has {_some(list(named))}")
    for key, part in parts.items():
        _match(named[key], part, f"{where}[{key!r}]", targets)


def _some(names: Sequence[Any]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "none"
