"""Collective groups: named sets of actors between which a two-sided transport (gloo) moves values.

A group is a record in Ray's key-value store, so any process may create, list or destroy it, and a restarted actor finds
its groups again. No process group spans all members: two members open a channel when they first need one
(`backends.channels`). A member that dies therefore harms no transfer between the others, and the group simply has one
member less.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import ray

from raylane import _ray
from raylane.core import settings
from raylane.core.deadline import Deadline
from raylane.errors import SourceLostError, TransferTimeoutError, TransportUnavailableError
from raylane.transport.backends.registry import backends, find
from raylane.transport.link.endpoint import endpoint
from raylane.transport.link.membership import MOST_GROUPS, PREFIX, GroupRecord, records

_LOOK_EVERY_S = 0.2
"""Interval in seconds at which a process that waits for the members of a group looks for groups that wait for it."""
_RAY_NAMES = {"torch_gloo": "gloo"}
"""Transports by the names that Ray has for them."""


@dataclass(frozen=True)
class CollectiveGroup:
    """Actors between which values travel by one transport, as they were when this object was made."""

    name: str
    backend: str
    """Name of the transport, such as "gloo"."""
    actors: tuple[Any, ...]
    """Handles of the living members, by rank."""

    def get_rank(self, actor: Any) -> int:
        """Return the rank of an actor in the group, -1 if it is no member."""
        ids = [_ray.actor_id_of(member) for member in self.actors]
        actor_id = _ray.actor_id_of(actor)
        return ids.index(actor_id) if actor_id in ids else -1


def create_collective_group(actors: Sequence[Any], backend: str, name: str | None = None) -> CollectiveGroup:
    """Create a group of actors whose values travel by one transport, and wait until every member knows of it.

    A value that a member publishes with this transport goes to other members through it; processes outside the group
    get the value another way, counted as `outside_group` in `raylane.stats()`. An actor may be in several groups. A
    transport works without a group as well; then any two processes open a channel when they need it.

    Args:
        actors: Handles of at least two different actors. They may still be starting.
        backend: "gloo" (or "torch_gloo", Ray's name for it), or "nccl".
        name: Name of the group in the Ray cluster; None for a new one.

    Raises:
        ValueError: The backend is unknown, the name is in use, or an actor is missing or named twice.
        TransportUnavailableError: A member cannot use the transport.
        TransferTimeoutError: A member did not answer within RAYLANE_TIMEOUT_S (60 s).
        SourceLostError: A member has died.
    """
    members = list(actors)
    ids = [_ray.actor_id_of(actor) if _ray.is_handle(actor) else "" for actor in members]
    if "" in ids:
        raise TypeError(f"create_collective_group: actors must be actor handles, got {members[ids.index('')]!r}")
    if len(ids) < 2 or len(set(ids)) < len(ids):
        raise ValueError(f"create_collective_group needs two or more different actors, got {len(ids)}: {members!r}")
    transport = _transport(backend)
    name = f"{transport}-{secrets.token_hex(4)}" if name is None else name
    record = GroupRecord(transport, ids, [_ray.dumps(actor) for actor in members], secrets.token_bytes(8))
    packed = msgspec.msgpack.encode(record)
    # The name is taken before the members are called, so that two processes cannot both create the group.
    if _ray.kv_put_if_absent(PREFIX + name, packed) != packed:
        raise ValueError(f"create_collective_group: the name {name!r} is in use. Choose another one, or destroy it")
    _ray.kv_set(_CREATING + name, packed)
    try:
        _tell(members, _join, name, record)
    except BaseException:
        _ray.kv_delete(PREFIX + name)
        # Members that have joined leave; those that get to it later find no record, and do not join. Not waited for.
        for actor in members:
            if _ray.actor_id_of(actor) == _ray.current_actor_id():
                _leave(None, name)
            else:
                actor.__ray_call__.remote(_leave, name)
        raise
    finally:
        _ray.kv_delete(_CREATING + name)
        for actor in ids:
            _ray.kv_delete(_joined_key(name, record, actor))
    return CollectiveGroup(name, transport, tuple(members))


def get_collective_groups(actors: Sequence[Any] = (), backend: str | None = None) -> list[CollectiveGroup]:
    """Return the groups that contain all of these actors, with their living members; any process may ask.

    `backend` selects the groups of one transport. Groups with fewer than two living members are left out.
    """
    transport = None if backend is None else _transport(backend)
    actor_ids = {_ray.actor_id_of(actor) for actor in actors}
    living = _ray.living_actors()
    groups = []
    for name, record in sorted(records().items()):
        if not actor_ids.issubset(record.actors) or transport not in (None, record.backend):
            continue
        pairs = zip(record.actors, record.handles, strict=True)
        members = tuple(ray.cloudpickle.loads(handle) for actor, handle in pairs if actor in living)
        if len(members) > 1:
            groups.append(CollectiveGroup(name, record.backend, members))
    return groups


def destroy_collective_group(group: CollectiveGroup | str) -> None:
    """Destroy a group, given by itself or by its name, from any process; values stay where they are.

    ValueError if there is no such group.
    """
    name = group.name if isinstance(group, CollectiveGroup) else group
    record = records().get(name)
    if record is None:
        known = ", ".join(sorted(records())) or "none"
        raise ValueError(f"destroy_collective_group: there is no group {name!r}; the groups are: {known}")
    _ray.kv_delete(PREFIX + name)
    living = _ray.living_actors()
    handles = zip(record.actors, record.handles, strict=True)
    _tell([ray.cloudpickle.loads(handle) for actor, handle in handles if actor in living], _leave, name)


def destroy_all_collective_groups() -> None:
    """Destroy all groups of the Ray cluster."""
    for name in records():
        destroy_collective_group(name)


def _transport(backend: str) -> str:
    name = str(backend).lower()
    name = _RAY_NAMES.get(name, name)
    two_sided = [known for known, transport in backends().items() if transport.capability.two_sided]
    if name not in two_sided:
        known = ", ".join([*two_sided, *_RAY_NAMES])
        raise ValueError(f"unknown backend {backend!r} of a collective group; the backends are {known}")
    return name


def _join(_: Any, name: str, record: GroupRecord) -> str | None:
    """Become a member; return why this process cannot use the transport, None if it can. Runs in the actor."""
    backend = find(record.backend)
    reason = "it has no such transport" if backend is None else backend.missing()
    # Else the group was destroyed, or not created in the end.
    if reason is None and _ray.kv_get(PREFIX + name) == msgspec.msgpack.encode(record):
        endpoint().groups()[name] = record.backend
    return reason


def _leave(_: Any, name: str) -> None:
    """Leave a group that was destroyed. Runs in the actor, perhaps after another one of this name was created."""
    stored = _ray.kv_get(PREFIX + name)
    if stored is None or _ray.current_actor_id() not in msgspec.msgpack.decode(stored, type=GroupRecord).actors:
        endpoint().groups().pop(name, None)


_CREATING, _JOINED = "creating/", "joined/"
"""Prefixes of keys: groups whose members are not all told yet, and members that found such a group by themselves."""


def _joined_key(name: str, record: GroupRecord, actor: str) -> str:
    return f"{_JOINED}{name}/{record.token.hex()}/{actor}"


def _join_others(joined: set[str]) -> None:
    """Join the groups that other processes create meanwhile with this actor, and tell them so.

    This actor runs no other method while it creates a group: two actors that create groups of each other at the same
    time would wait for each other. `joined` has the names that need no more care.
    """
    this_actor = _ray.current_actor_id()
    if this_actor is None:
        return
    for key, data in _ray.kv_sample(_CREATING, MOST_GROUPS).items():
        name, record = key.removeprefix(_CREATING), msgspec.msgpack.decode(data, type=GroupRecord)
        if name not in joined and this_actor in record.actors and _join(None, name, record) is None:
            joined.add(name)
            _ray.kv_set(_joined_key(name, record, this_actor), b"1")


def _tell(actors: Sequence[Any], function: Any, *args: Any) -> None:
    """Run a function in all actors at the same time, and wait; raises the errors of `create_collective_group`."""
    deadline = Deadline(settings.TIMEOUT_S.read())
    this_actor = _ray.current_actor_id()
    # An actor that creates a group of its own would wait for itself.
    others = [actor for actor in actors if _ray.actor_id_of(actor) != this_actor]
    refs = [actor.__ray_call__.remote(function, *args) for actor in others]
    if len(others) < len(actors):
        function(None, *args)
    joined: set[str] = set()
    for actor, ref in zip(others, refs, strict=True):
        reason = _answer(actor, ref, args, deadline, joined)
        if reason is not None:
            raise TransportUnavailableError(f"{actor!r} cannot be a member of the group: {reason}")


def _answer(actor: Any, ref: Any, args: tuple[Any, ...], deadline: Deadline, joined: set[str]) -> Any:
    """Return what an actor answers; None if it has told by `_join_others` that it is a member."""
    while True:
        remaining_s = deadline.left_s()
        try:
            return ray.get(ref, timeout=_LOOK_EVERY_S if remaining_s is None else min(remaining_s, _LOOK_EVERY_S))
        except ray.exceptions.GetTimeoutError as error:
            if remaining_s is not None and remaining_s <= _LOOK_EVERY_S:
                raise TransferTimeoutError(
                    f"{actor!r} did not answer within {deadline.timeout_s} s: it is busy, or still starting. Raise "
                    "RAYLANE_TIMEOUT_S, or call it when it is idle"
                ) from error
        except ray.exceptions.RayActorError as error:
            raise SourceLostError(f"{actor!r} has died: {error}") from error
        _join_others(joined)
        # Only of a member that is asked to join.
        if len(args) == 2 and _ray.kv_get(_joined_key(*args, _ray.actor_id_of(actor))) is not None:
            return None
