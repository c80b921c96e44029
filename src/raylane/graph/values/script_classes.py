"""Classes of a script, or of a function: no other process can import them, so they travel with the instances.

cloudpickle takes 150 us to pickle a class. Here it does so once: an instance is pickled as usual, and its class as the
same compressed bytes in every message, which a reader loads once. The reader sends these same bytes when it passes an
instance on, and the process that made them knows its own class by them: cloudpickle would set all attributes of that
class again, which makes it another one for the next message. A class is pickled anew when its attributes change.

Globals that its methods use are those of that moment, as in Ray's tasks and actors.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import types
import weakref
import zlib
from collections.abc import Callable
from typing import Any

from raylane.graph.values import references

SCRIPT = b"\x8c\x08__main__"
"""Name of the module `__main__` as a pickle of protocol 4 and later has it."""
KEPT_CLASSES = 256
"""Maximum number of classes that a process keeps by their bytes."""
_NUMBER_BYTES = 8
_numbers = itertools.count()
_CONSTANTS = (int, float, complex, bool, str, bytes, type(None))
_MADE_WITH_CLASS = ("__dataclass_", "__annotations__", "__slotnames__")
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)

_pickled: weakref.WeakKeyDictionary[type, tuple[Any, bytes]] = weakref.WeakKeyDictionary()
"""Pickles of classes: what each depends on (`_state`), and its compressed bytes."""
_classes: dict[bytes, Any] = {}
"""Classes by their compressed bytes, the oldest first."""


class NotPlain(Exception):
    """A value needs cloudpickle for more than its classes."""


def dumps(value: Any, table: dict[type, Any], buffer_callback: Callable[[pickle.PickleBuffer], object]) -> bytes:
    """Return the pickle of a value with instances of classes of the script. `table` has the reducers of other types.

    NotPlain if anything else of the script is in it, such as a function. Raises what pickling raises.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, 5, buffer_callback=buffer_callback)
    pickler.dispatch_table = table
    pickler.dump(value)
    body = file.getvalue()
    # A name that is still there is that of a function or a constant of the script.
    if SCRIPT in body:
        raise NotPlain
    return body


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, type) or not _travels(obj):
            return NotImplemented
        state = _state(obj)
        known = _pickled.get(obj)
        if known is None or state is None or known[0] != state:
            file = io.BytesIO()
            references.pickler(file).dump(obj)
            # The number makes the bytes new: a class that got an old attribute back must be loaded again.
            known = state, zlib.compress(next(_numbers).to_bytes(_NUMBER_BYTES, "little") + file.getvalue(), 1)
            _remember(obj, *known)
        return class_of, (known[1],)


def class_of(pickled: bytes) -> Any:
    """Return the class of a message."""
    kind = _classes.get(pickled)
    if kind is None:
        kind = pickle.loads(memoryview(zlib.decompress(pickled))[_NUMBER_BYTES:])
        _remember(kind, _state(kind), pickled)
    return kind


def _remember(kind: type, state: Any, pickled: bytes) -> None:
    _pickled[kind] = state, pickled
    _classes[pickled] = kind
    # Several threads may do this at the same time.
    while len(_classes) > KEPT_CLASSES:
        with contextlib.suppress(StopIteration, RuntimeError):
            _classes.pop(next(iter(_classes)), None)


def _travels(kind: type) -> bool:
    return kind.__module__ == "__main__" or "<locals>" in kind.__qualname__


def _state(kind: type) -> list[Any] | None:
    """Return what changes when an attribute of a class or of its bases is set; None if that cannot be seen."""
    state: list[Any] = []
    for base in kind.__mro__:
        if not _travels(base):
            continue
        for name, value in vars(base).items():
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            if isinstance(value, _CONSTANTS):
                state.append((base.__name__, name, type(value), value))
            elif isinstance(value, types.FunctionType | type):
                state.append((base.__name__, name, weakref.ref(value), None))
            elif isinstance(value, property):
                accessors = (value.fget, value.fset, value.fdel)
                if not all(isinstance(each, types.FunctionType | None) for each in accessors):
                    return None
                state += [(base.__name__, name, each and weakref.ref(each), None) for each in accessors]
            elif name.startswith(_MADE_WITH_CLASS):  # or made later: by the first pickling of an instance
                continue
            elif isinstance(value, _DESCRIPTORS):
                state.append((base.__name__, name, None, None))
            elif isinstance(value, tuple) and all(isinstance(item, _CONSTANTS) for item in value):
                state.append((base.__name__, name, tuple, value))
            else:  # a list or another object, which may change in place
                return None
    return state
