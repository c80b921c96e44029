"""Records of collective groups in Ray's key-value store, and the groups of this process."""

from __future__ import annotations

import msgspec

from raylane import _ray

PREFIX = "group/"
"""Prefix of the keys of groups in Ray's key-value store."""
MOST_GROUPS = 4096


class GroupRecord(msgspec.Struct, frozen=True, array_like=True):
    """A group in Ray's key-value store."""

    backend: str
    actors: list[str]
    """Hexadecimal ids of the members, by rank."""
    handles: list[bytes]
    """Pickled handles of the members; they keep no actor alive."""
    token: bytes
    """Random bytes, which no other group has."""


def records() -> dict[str, GroupRecord]:
    """Return all groups of the cluster by name."""
    stored = _ray.kv_sample(PREFIX, MOST_GROUPS)
    return {key.removeprefix(PREFIX): msgspec.msgpack.decode(data, type=GroupRecord) for key, data in stored.items()}


def groups_of_this_process() -> dict[str, str]:
    """Return the transport of each group of this process by its name."""
    actor = _ray.current_actor_id()
    # A restarted actor was a member before it could be told.
    return {name: record.backend for name, record in records().items() if actor in record.actors} if actor else {}
