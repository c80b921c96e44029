"""Tensor transports that programs have registered in this Ray cluster, and this process's objects of them."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from raylane import _ray

_PREFIX = "transport/"
"""Prefix of the keys of managers in Ray's key-value store."""


@dataclass(frozen=True)
class Registered:
    """One manager of this process."""

    name: str
    manager: Any
    device: str
    """Device of the tensors that the manager is given: `cpu` where it takes those."""


_known: dict[str, Registered] = {}
"""Managers of this process by name. They stay when a Ray session ends: Ray keeps its own for ever, too."""
_creating = threading.Lock()


def announce(name: str, manager_class: type, devices: Sequence[str]) -> None:
    """Store a manager's class where all processes of the cluster find it, in place of an earlier one."""
    # Only this process creates the new class at its next use; others go on with the object that they have.
    with _creating:
        _known.pop(name, None)
    _ray.kv_set(_PREFIX + name, _ray.dumps((manager_class, list(devices))))


def find(name: str) -> Registered | None:
    """Return the manager of this name, or None if nobody in this cluster has registered one.

    The first call in a process asks Ray, and creates the manager.
    """
    known = _known.get(name)
    if known is not None or not ray.is_initialized():
        return known
    with _creating:
        if name not in _known:
            data = _ray.kv_get(_PREFIX + name)
            if data is None:
                return None
            # From Ray's own store, which every process of the cluster trusts with its classes and functions.
            manager_class, devices = pickle.loads(data)
            # Managers that take the CPU need no copy to a device, so it comes first.
            _known[name] = Registered(name, manager_class(), "cpu" if "cpu" in devices else devices[0])
        return _known[name]
