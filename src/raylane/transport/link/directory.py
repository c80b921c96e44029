"""Directory of the processes that publish values, in Ray's key-value store.

Callers of an actor find its processes here (`endpoint`), and `memory` finds all processes. An entry is written with the
first publication of a process and deleted when the process ends its Ray session.
"""

from __future__ import annotations

import msgspec

from raylane import _ray
from raylane.core.process import place
from raylane.core.process.place import Place
from raylane.transport.value.source import Source

_ACTORS = "actor/"
"""Prefix of the keys of actors."""
_OTHERS = "process/"
"""Prefix of the keys of drivers and of workers that run plain tasks."""
_MOST_KEYS = 256
"""Limit of entries read at a publication; `everywhere` reads all."""


def _key(process: Place) -> str:
    """Return the key of this process.

    The key of an actor names the process, too, because a restarted actor has a new one: deleting a dead process's entry
    must not delete the entry of its successor.
    """
    actor = _ray.current_actor_id()
    if actor is not None:
        return f"{_ACTORS}{actor}/{process.pid}-{process.start_ticks}"
    # Nothing else tells processes of different hosts and containers apart.
    return f"{_OTHERS}{process.boot_id}-{process.pid_namespace}/{process.pid}-{process.start_ticks}"


def announce(source: Source) -> None:
    """Store this process's entry, and delete entries of dead processes of this host."""
    # Killed processes leave their entries behind, and so do actors that Ray ends with their last handle, which runs no
    # exit handler. Each process that begins to publish looks at a sample of entries, so their number stays small.
    for prefix in (_ACTORS, _OTHERS):
        for key, other in _read(prefix, _MOST_KEYS).items():
            if place.known_dead(other.place, source.place):
                _ray.kv_delete(key)
    _ray.kv_set(_key(source.place), msgspec.msgpack.encode(source))


def withdraw(process: Place) -> None:
    """Delete this process's entry."""
    _ray.kv_delete(_key(process))


def processes_of(actor: str) -> dict[str, Source]:
    """Return the processes of an actor by key; several if it was restarted and the old entries are not deleted yet."""
    return _read(f"{_ACTORS}{actor}/", _MOST_KEYS)


def everywhere() -> dict[str, Source]:
    """Return all processes of the cluster that have published, by key."""
    # No limit: a report that leaves processes out at random would be wrong.
    return {**_read(_ACTORS, 1 << 30), **_read(_OTHERS, 1 << 30)}


def _read(prefix: str, most: int) -> dict[str, Source]:
    return {key: msgspec.msgpack.decode(data, type=Source) for key, data in _ray.kv_sample(prefix, most).items()}
