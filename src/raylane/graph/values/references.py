"""References to objects of Ray inside values: ObjectRefs, actor handles, generators, futures.

Ray counts a reference only in its own calls. In a message of a graph nobody would count it, and the object or actor
could end before the reader uses it. So messages refuse references (`refuse`), and constants of a graph, which an
ordinary call brings to the actor, give theirs to that call (`pack`).
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import copyreg
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray

from raylane import _ray
from raylane.errors import GraphValueError

MAX_SEARCHED = 100_000
"""Number of objects in which the place of a reference is looked for."""
_REMEDIES: dict[type, tuple[str, str]] = {
    ray.ObjectRef: ("an ObjectRef", "Pass the value, ray.get(ref), or the result of another graph"),
    ray.actor.ActorHandle: (
        "an actor handle",
        "Give the actor a name and pass ray.get_actor(name), which does not keep it alive; or pass the handle by an "
        "ordinary call, or as a constant of the graph",
    ),
    ray.ObjectRefGenerator: ("an ObjectRefGenerator", "Read its items and pass their values"),
    concurrent.futures.Future: ("a future", "Pass its result"),
    asyncio.Future: ("a future", "Pass its result"),
}
"""(name for messages, remedy) of each type of reference."""
_TYPES = tuple(_REMEDIES)


class ReferenceInside(Exception):
    """A reference was found during pickling. `reference` is the object."""

    def __init__(self, reference: Any) -> None:
        super().__init__(reference)
        self.reference = reference


def is_counted(value: Any) -> bool:
    """Return True for an object whose life Ray ties to the number of references."""
    return isinstance(value, ray.ObjectRef) or _ray.is_counted_handle(value)


def refuse(value: Any) -> None:
    """Raise ReferenceInside if an object is a reference that must not travel in a message."""
    if isinstance(value, _TYPES) and (not _ray.is_handle(value) or _ray.is_counted_handle(value)):
        raise ReferenceInside(value)


def _reduce(value: Any) -> Any:
    refuse(value)
    return value.__reduce__()


def dispatch_table() -> dict[type, Callable[[Any], Any]]:
    """Return the reducers of a pickler that refuses references."""
    return {**copyreg.dispatch_table, **dict.fromkeys(_TYPES, _reduce)}


def refused(value: Any, reference: Any) -> GraphValueError:
    """Return the error for a value with a reference in it; it names the reference, its place and the remedy."""
    name, remedy = next(remedy_of_kind for kind, remedy_of_kind in _REMEDIES.items() if isinstance(reference, kind))
    place = _place_of(reference, value)
    return GraphValueError(
        f"{name} cannot travel in a graph{f' at {place}' if place else ''}: Ray would not count it, and it could end "
        f"before it is used. {remedy}"
    )


class _ReferenceRefuser(_ray.CloudPickler):  # type: ignore[misc]  # untyped base
    def reducer_override(self, obj: Any) -> Any:
        refuse(obj)
        return super().reducer_override(obj)


def pickler(file: io.BytesIO, **options: Any) -> Any:
    """Return a cloudpickle pickler that raises ReferenceInside for a reference."""
    return _ReferenceRefuser(file, protocol=5, **options)


# Places


def _place_of(reference: Any, value: Any) -> str:
    """Return the place of an object in a value, such as `['a'][0].inner`; empty for the value itself, or if unknown."""
    seen = {id(value)}
    waiting = collections.deque([("", value)])
    while waiting and len(seen) < MAX_SEARCHED:
        place, current = waiting.popleft()
        for step, item in _items(current):
            if item is reference:
                return place + step
            if id(item) not in seen:
                seen.add(id(item))
                waiting.append((place + step, item))
    return ""


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (step, item) for the items and attributes of an object."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"[{key!r}]", item
    elif isinstance(value, list | tuple | collections.deque):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    elif isinstance(value, set | frozenset):
        yield from (("", item) for item in value)
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict and not isinstance(value, type):
        for name, item in attributes.items():
            yield f".{name}", item


# Constants


def pack(value: Any) -> tuple[bytes, list[Any]]:
    """Pickle a value with cloudpickle. Return the pickle and the references in it, which `unpack` needs.

    Pass both to an ordinary call of Ray: it counts the references for as long as the unpacked value exists.
    """
    references: list[Any] = []

    def number_of(item: Any) -> int | None:
        if not is_counted(item):
            return None
        references.append(item)
        return len(references) - 1

    return _ray.dumps(value, number_of), references


class _ReferenceUnpickler(pickle.Unpickler):
    """The unpickler of what `pack` has pickled."""

    references: list[Any]

    def persistent_load(self, number: Any) -> Any:
        return self.references[number]


def unpack(packed: bytes, references: list[Any]) -> Any:
    """Return the value that `pack` has pickled."""
    # No class within this function: it would be garbage in a cycle, and keep the references until it is collected.
    unpickler = _ReferenceUnpickler(io.BytesIO(packed))
    unpickler.references = references
    return unpickler.load()
