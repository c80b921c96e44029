"""This process's end of the transport: one object that owns the store, the pool, the listener and the links.

Made when first needed, for as long as this process is connected to one Ray session; after a `ray.shutdown` and a new
`ray.init` the next use makes a fresh one. Everything in `transport` reaches its state through `endpoint()`.
"""

from __future__ import annotations

import atexit
import collections
import os
import secrets
import threading
from typing import Any

import msgspec

from raylane import _ray
from raylane.core import place, vm
from raylane.core.deadline import Deadline
from raylane.core.segment import BufferPool
from raylane.errors import ProtocolError, SourceLostError, TransportError, TransportUnavailableError
from raylane.transport import wire
from raylane.transport.fetching import MAX_FETCHES, FetchPool
from raylane.transport.lifetime import Anchors, Keeper
from raylane.transport.link import Address, LinkPool, is_gone
from raylane.transport.listener import Listener, TakeStream
from raylane.transport.source import Source
from raylane.transport.store import Entry, Store

MAX_IDLE_POOL_BYTES = 2 << 30


def pool_limit_bytes() -> int:
    """Idle receive memory to keep: `RAYLANE_POOL_BYTES`, else a sixteenth of the machine's memory, at most 2 GiB."""
    text = os.environ.get("RAYLANE_POOL_BYTES")
    if text:
        if not text.isdigit():
            raise ValueError(f"RAYLANE_POOL_BYTES={text!r} is not a number of bytes, such as 1073741824")
        return int(text)
    return min(MAX_IDLE_POOL_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 16)


class Endpoint:
    """State of one process in one Ray session. Its parts are thread-safe; its own lock guards their creation only."""

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.place = place.here()
        self.store = Store()
        self.pool = BufferPool(pool_limit_bytes())
        self.blocked: dict[tuple[str, place.Place], str] = {}
        """Transports that were tried on a process and cannot reach it, with the reason."""
        self.streams: dict[bytes, TakeStream] = {}
        """Who takes over connections to this process's listener, by the key that the other side names."""
        self.counts: collections.Counter[str] = collections.Counter()
        """Values and bytes by what happened to them; approximate where threads meet."""
        self._lock = threading.RLock()
        self._secret: bytes | None = None
        self._listener: Listener | None = None
        self._source: Source | None = None
        self._keeper: Keeper | None = None
        self._anchors: Anchors | None = None
        self._links: LinkPool | None = None
        self.fetchers = FetchPool(MAX_FETCHES, "raylane-fetch")
        """Threads that fetch several values at once; none runs before the first fetch."""
        self.getters = FetchPool(None, "raylane-get")
        """Threads that wait for producing calls on behalf of coroutines: one for each call of `get_async`."""

    def over(self) -> bool:
        """Whether the session this was made for has ended."""
        return _ray.worker_token() != self.token

    def secret(self) -> bytes:
        """What all processes of this Ray cluster share and nobody else knows."""
        if self._secret is None:
            with self._lock:
                if self._secret is None:
                    self._secret = _ray.kv_put_if_absent("secret", secrets.token_bytes(32))
        return self._secret

    def source(self) -> Source:
        """Who holds what this process publishes. Starts the listener at the first call."""
        if self._source is not None:
            return self._source
        with self._lock:
            if self._source is None:
                vm.allow_readers()
                if self._listener is None:  # else an earlier call failed after this step
                    self._listener = self._listen()
                found = self._listener
                source = Source(self.place, _ray.describe_self(), found.name, found.host, found.port)
                actor = _ray.current_actor_id()
                if actor is not None:
                    self._forget_dead_actors()
                    _ray.kv_set(_actor_key(actor, self.place), msgspec.msgpack.encode(source))
                self._source = source
        return self._source

    def _listen(self) -> Listener:
        secret, host = self.secret(), _ray.node_ip()
        try:
            return Listener(
                self.store,
                secret,
                name=f"raylane-{secrets.token_hex(16)}",
                host=host,
                put_entry=self._put_entry,
                session_over=self.over,
                streams=self.streams,
            )
        except OSError as error:
            raise TransportError(
                f"this process cannot listen on {host} for readers of what it publishes: {error.strerror}. Free "
                "descriptors here (ulimit -n), or look at the node's address",
            ) from error

    def _forget_dead_actors(self) -> None:
        """Delete the entries of this host's actors that have ended without deleting their own (killed ones, and those
        that Ray ends with their last handle, which runs no exit handler). Each actor that begins to publish looks at
        some, so the dead ones stay few."""
        for key, data in _ray.kv_sample(_ACTOR_PREFIX, _MOST_KEYS).items():
            if place.known_dead(msgspec.msgpack.decode(data, type=Source).place, self.place):
                _ray.kv_delete(key)

    def keeper(self) -> Keeper:
        if self._keeper is None:
            with self._lock:
                if self._keeper is None:
                    self._keeper = Keeper(self._holds_anything, self.over)
        return self._keeper

    def anchors(self) -> Anchors:
        if self._anchors is None:
            with self._lock:
                if self._anchors is None:
                    self._anchors = Anchors()
        return self._anchors

    def links(self) -> LinkPool:
        if self._links is None:
            with self._lock:
                if self._links is None:
                    self._links = LinkPool(self.secret(), _ray.describe_self(), self.place)
        return self._links

    def address_of(self, source: Source) -> Address:
        """Return how a control link reaches a source from here. Unix sockets serve their own user, and root, only."""
        near = source.place.same_host(self.place) and source.place.net_namespace == self.place.net_namespace
        near = near and self.place.uid in (source.place.uid, 0)
        return source.unix if near else (source.host, source.port)

    def _put_entry(self, entry: Entry) -> tuple[bytes, bytes, object] | None:
        """Put the blocks of a value into Ray's object store. Copied once more before, by the kernel: their owner may
        unmap them at any time, and Ray's own copy would crash."""
        import numpy as np
        import ray

        blocks = [self.pool.take(block.nbytes) for block in entry.layout.blocks]
        if not entry.copy_to(blocks):
            return None
        ref = ray.put([np.frombuffer(block, dtype=np.uint8) for block in blocks])
        return (*_ray.hand_over_ref(ref), ref)

    def _holds_anything(self, actor: bytes, deadline: Deadline) -> bool:
        """Return True if an actor still holds published values; False if it never published, or is gone for certain.
        Any other failure to ask is raised: the actor's last handle may be dropped on this answer."""
        found = _ray.kv_sample(f"{_ACTOR_PREFIX}{actor.hex()}/", _MOST_KEYS)
        return any(self._process_holds_anything(key, data, deadline) for key, data in found.items())

    def _process_holds_anything(self, key: str, data: bytes, deadline: Deadline) -> bool:
        source = msgspec.msgpack.decode(data, type=Source)
        try:
            with self.links().borrow(self.address_of(source), source, deadline) as link:
                link.send(wire.Holding())
                answer = link.receive()
        except SourceLostError as error:
            if not is_gone(error):
                raise
            _ray.kv_delete(key)
            return False
        if not isinstance(answer, wire.Held):
            raise ProtocolError(f"{source} answered {type(answer).__name__} to the question what it holds")
        return answer.count > 0

    def stats(self) -> dict[str, Any]:
        self.pool.settle()
        found: dict[str, Any] = dict(self.counts)
        found.update(self.store.stats())
        found["kept_actors"] = len(self._keeper) if self._keeper else 0
        found["idle_links"] = len(self._links) if self._links else 0
        found["pool_idle_bytes"] = self.pool.idle_bytes
        found["pool_used_bytes"] = self.pool.used_bytes
        found["blocked"] = {f"{name} to {where}": why for (name, where), why in self.blocked.items()}
        return found

    def close(self) -> None:
        """End threads and links, let go of everything published and of all actors kept. Waits seconds at most."""
        for part in (self._keeper, self._anchors, self._listener, self._links, self.fetchers, self.getters):
            if part is not None:
                part.close()
        actor = _ray.current_actor_id()
        if self._source is not None and actor is not None and not self.over():
            _ray.kv_delete(_actor_key(actor, self.place))
        self.store.clear()


_ACTOR_PREFIX = "actor/"
_MOST_KEYS = 256


def _actor_key(actor: str, process: place.Place) -> str:
    """Return the key of one process of an actor: a restarted actor has another, so that deleting the entry of a dead
    process never deletes that of its successor."""
    return f"{_ACTOR_PREFIX}{actor}/{process.pid}-{process.start_ticks}"


_current: Endpoint | None = None
_making = threading.Lock()


def endpoint() -> Endpoint:
    """This process's endpoint in the current Ray session. TransportUnavailableError when not connected to Ray."""
    global _current
    token = _ray.worker_token()
    current = _current
    if current is not None and current.token == token:
        return current
    if token is None:
        raise TransportUnavailableError("this process is not connected to Ray: call ray.init() first")
    with _making:
        if _current is None or _current.token != token:
            if _current is not None:
                _current.close()
            _current = Endpoint(token)
        return _current


def existing() -> Endpoint | None:
    """The endpoint if there is one, without making it."""
    return _current


def _forget() -> None:
    """In a forked child: its parent's endpoint is not its own, and closing it would act on shared kernel objects (the
    epoll and event descriptors) and on the parent's entries in Ray's key-value store."""
    global _current, _making
    _current, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def close() -> None:
    """End this process's endpoint, if it has one; the next use makes a new one."""
    global _current
    with _making:
        current, _current = _current, None
    if current is not None:
        current.close()
