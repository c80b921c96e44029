"""The transport state of this process: one object that owns the store, the buffer pool, the listener and the links.

The endpoint is created on first use and belongs to one Ray session: after `ray.shutdown` and a new `ray.init` the next
use creates a new one. Every module of `transport` reaches its state through `endpoint()`.
"""

from __future__ import annotations

import atexit
import collections
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from raylane import _ray
from raylane.core import settings
from raylane.core.deadline import Deadline
from raylane.core.memory import mappings, regions
from raylane.core.memory.idle_pool import pool_limit_bytes
from raylane.core.memory.receive_pool import BufferPool
from raylane.core.memory.shared_pool import SharedPool
from raylane.core.process import place, vm
from raylane.core.process.daemon_pool import MAX_FETCHES, FetchPool
from raylane.errors import ProtocolError, SourceLostError, TransportError, TransportUnavailableError
from raylane.transport.hold.anchors import ActorKeeper, AnchorPool
from raylane.transport.hold.budget import Budget
from raylane.transport.hold.store import Entry, Store
from raylane.transport.link import directory, wire
from raylane.transport.link.connection import Address, Link, LinkPool, LinkT, TakeStream, is_gone
from raylane.transport.link.holdings import holdings
from raylane.transport.link.listener import Listener
from raylane.transport.link.membership import groups_of_this_process
from raylane.transport.observe.recording import TransferRecorder
from raylane.transport.value.source import Source

SHARED_PART = 4
"""Part of the limit of idle receive memory that shared copies without a value may take in a source."""
ALIVE_WITHIN_S = 3.0
"""Seconds in which a source must answer after a transfer from it has broken off."""
_T = TypeVar("_T")


class _OnFirstUse(Generic[_T]):
    """A part of the endpoint that is created by the first call. Thread-safe; a failed creation is tried again."""

    __slots__ = ("_lock", "_make", "value")

    def __init__(self, lock: threading.RLock, make: Callable[[], _T]) -> None:
        self._lock = lock
        self._make = make
        self.value: _T | None = None
        """The part, or None as long as nobody has used it."""

    def __call__(self) -> _T:
        # Read without the lock first: most calls find the part, and these are on the path of every read.
        if self.value is None:
            with self._lock:
                if self.value is None:
                    self.value = self._make()
        return self.value


class Endpoint:
    """State of one process in one Ray session. Its parts are thread-safe; its own lock guards only their creation."""

    def __init__(self, session: Any) -> None:
        self.session = weakref.ref(session)
        """The Ray session, from `_ray.session`."""
        self.place = place.here()
        self._idle_s = settings.POOL_IDLE_S.read()
        """Seconds after which unused memory and unused connections are given up."""
        self.store = Store(SharedPool(pool_limit_bytes() // SHARED_PART, self._idle_s))
        self.budget = Budget(self.store, settings.BUDGET_BYTES.read())
        """Limit of the bytes in the store."""
        self.recorder = TransferRecorder(self.place, self.stats)
        """Record of publications and reads, for traces and metrics."""
        self.pool = BufferPool(pool_limit_bytes(), idle_s=self._idle_s)
        self.blocked: dict[tuple[str, place.Place], str] = {}
        """Transports that failed to reach a process, with the reason."""
        self.streams: dict[bytes, TakeStream] = {}
        """Components that take over connections to this process's listener, by the key in the Stream request."""
        # Reentrant, because creating one part uses others: the source needs the listener, which needs the secret.
        self._lock = lock = threading.RLock()
        self.groups = _OnFirstUse(lock, groups_of_this_process)
        """Transports of the collective groups of this process, by name of the group. The first use asks Ray."""
        self.secret = _OnFirstUse(lock, lambda: _ray.kv_put_if_absent("secret", secrets.token_bytes(32)))
        """Secret that all processes of this Ray cluster share, for the handshake of links."""
        self.listener = _OnFirstUse(lock, self._listen)
        """Listener for readers of the values that this process publishes."""
        self.source = _OnFirstUse(lock, self._announce)
        """This process as the source of published values. The first use starts the listener."""
        self.keeper = _OnFirstUse(lock, lambda: ActorKeeper(self._holds_anything, self.session_ended))
        """Handles of actors that are kept alive for their results."""
        self.anchors = _OnFirstUse(lock, AnchorPool)
        """Spare anchors for tickets."""
        self.links = _OnFirstUse(lock, lambda: self.link_pool(Link))
        """Idle connections to other processes."""
        self._parts: dict[type[Any], Any] = {}
        """State of transports, by its class."""
        self.fetchers = FetchPool(MAX_FETCHES, "raylane-fetch")
        """Threads that fetch several values at once; none runs before the first fetch."""
        self.getters = FetchPool(None, "raylane-get")
        """Threads that wait for producing calls on behalf of coroutines, one for each call of `get_async`."""

    @property
    def counts(self) -> collections.Counter[str]:
        """Values and bytes by transport. Not locked, so concurrent increments can be lost."""
        return self.recorder.counts

    def session_ended(self) -> bool:
        """Return True if the Ray session of this endpoint has ended."""
        session = _ray.session()
        return session is None or session is not self.session()

    def _announce(self) -> Source:
        """Start the listener, and store the Source where callers of this actor and `raylane memory` can find it."""
        # First permit one-sided reads: a reader may come as soon as the first ticket exists.
        vm.allow_readers()
        listener = self.listener()
        source = Source(self.place, _ray.describe_self(), listener.name, listener.host, listener.port)
        directory.announce(source)
        return source

    def _listen(self) -> Listener:
        secret, host = self.secret(), _ray.node_ip()
        try:
            return Listener(
                self.store,
                secret,
                name=f"raylane-{secrets.token_hex(16)}",
                host=host,
                put_entry=self._put_entry,
                session_ended=self.session_ended,
                streams=self.streams,
                holdings=self._holdings,
            )
        except OSError as error:
            raise TransportError(
                f"this process cannot listen on {host} for readers of its values: {error.strerror}. Free descriptors "
                "in this process (ulimit -n), or check the node's address",
            ) from error

    def part(self, kind: type[_T], make: Callable[[], _T] | None = None) -> _T:
        """Return the state of this kind; `make` (else `kind` without arguments) creates it at the first call.

        It has `stats()`, which returns counters for `raylane.stats`, and `close()`, called when the session ends.
        """
        # Without the lock first: every read by a channel calls this function.
        state: _T | None = self._parts.get(kind)
        if state is None:
            with self._lock:
                state = self._parts.get(kind)
                if state is None:
                    state = self._parts[kind] = (make or kind)()
        return state

    def _holdings(self, most: int) -> wire.Holdings:
        """Return what this process holds, as `holdings.holdings`."""
        counters = self.stats()
        return holdings(
            self.store,
            self.pool,
            self.keeper.value,
            most,
            budget=self.budget.limit,
            waiting=self.budget.waiting,
            regions=regions.totals(),
            mapped=(counters.get(mappings.USED_BYTES, 0), counters.get(mappings.IDLE_BYTES, 0)),
        )

    def link_pool(self, open_link: Callable[..., LinkT]) -> LinkPool[LinkT]:
        """Return a new pool of connections to other processes, which `open_link` opens."""
        return LinkPool(self.secret(), _ray.describe_self(), self.place, open_link, idle_s=self._idle_s)

    def check_alive(self, source: Source) -> None:
        """Raise SourceLostError if a source has died; waits ALIVE_WITHIN_S at most."""
        deadline = Deadline(ALIVE_WITHIN_S)
        try:
            with self.links().borrow(self.address_of(source), source, deadline) as link:
                link.send(wire.HeldQuery())
                link.receive()
        except TransportError as error:
            # A process that ends closes its connections a moment before its listener's address is free.
            raise SourceLostError(f"{source} died during a transfer: {error}", source=source.label) from error

    def address_of(self, source: Source) -> Address:
        """Return the address by which a control link reaches a source from here."""
        # A Unix socket is visible within one network namespace, and a listener serves its own user and root only.
        near = source.place.same_host(self.place) and source.place.net_namespace == self.place.net_namespace
        near = near and self.place.uid in (source.place.uid, 0)
        return source.unix if near else (source.host, source.port)

    def _put_entry(self, entry: Entry) -> tuple[bytes, bytes, object] | None:
        """Put the blocks of a value into Ray's object store. Returns None if their owner has freed the memory."""
        import numpy as np
        import ray

        # Copy before ray.put: the owner may unmap the memory at any time, which a copy by the kernel survives as EFAULT
        # and the copy that Ray makes does not.
        blocks = [self.pool.take(block.nbytes) for block in entry.layout.blocks]
        if not entry.copy_to(blocks):
            return None
        ref = ray.put([np.frombuffer(block, dtype=np.uint8) for block in blocks])
        return (*_ray.hand_over_ref(ref), ref)

    def _holds_anything(self, actor: bytes, deadline: Deadline) -> bool:
        """Return True if an actor holds results, False if it never published or is certainly gone.

        Any other failure to ask the actor is raised, because the caller may drop the actor's last handle on this
        answer.
        """
        # A restarted actor has an entry for each of its processes, and the old ones may not be deleted yet.
        for key, source in directory.processes_of(actor.hex()).items():
            try:
                with self.links().borrow(self.address_of(source), source, deadline) as link:
                    link.send(wire.HeldQuery())
                    answer = link.receive()
            except SourceLostError as error:
                if not is_gone(error):
                    raise
                _ray.kv_delete(key)
                continue
            if not isinstance(answer, wire.HeldCount):
                raise ProtocolError(
                    f"could not ask {source} how many results it holds: the answer was {type(answer).__name__}"
                )
            if answer.count > 0:
                return True
        return False

    def stats(self) -> dict[str, Any]:
        """Return the counters of this process, as described in `raylane.stats`."""
        self.pool.reclaim()
        counters: dict[str, Any] = dict(self.counts)
        counters.update(self.store.stats())
        keeper, links = self.keeper.value, self.links.value
        # Compare with None: an empty keeper or pool has length 0 and is false.
        counters["kept_actors"] = 0 if keeper is None else len(keeper)
        counters["idle_links"] = 0 if links is None else len(links)
        counters["idle_channels"] = counters["served_channels"] = 0  # if no transport has used one yet
        for part in list(self._parts.values()):
            counters.update(part.stats())
        counters["budget_waits"], counters["budget_wait_s"] = self.budget.waits, self.budget.wait_s
        counters["pool_idle_bytes"] = self.pool.idle_bytes
        counters["pool_used_bytes"] = self.pool.used_bytes
        counters["shared_bytes"], counters["shared_idle_bytes"] = self.store.shared.nbytes, self.store.shared.idle_bytes
        counters["blocked"] = {f"{name} to {where}": why for (name, where), why in self.blocked.items()}
        return counters

    def close(self) -> None:
        """End threads and links, free all published values, and drop all kept actors. Waits seconds at most."""
        # The keeper first: its thread uses the links, and may create them while the keeper closes. So `value` is read
        # only when it is a part's turn.
        for on_first_use in (self.keeper, self.anchors, self.listener, self.links):
            if on_first_use.value is not None:
                on_first_use.value.close()
        for state in list(self._parts.values()):
            state.close()
        self.pool.close()
        self.recorder.close()
        self.fetchers.close()
        self.getters.close()
        if self.source.value is not None and not self.session_ended():
            directory.withdraw(self.place)
        self.store.clear()
        self.store.shared.close()


_current: Endpoint | None = None
_creating = threading.Lock()


def endpoint() -> Endpoint:
    """Return this process's endpoint in the current Ray session; create it if needed.

    TransportUnavailableError if this process is not connected to Ray.
    """
    global _current
    # Without the lock first: every publication and every read calls this function.
    session = _ray.session()
    current = _current
    if session is None:
        raise TransportUnavailableError("this process is not connected to Ray. Call ray.init() first")
    if current is not None and current.session() is session:
        return current
    with _creating:
        if _current is None or _current.session() is not session:
            # The old endpoint belongs to a session that has ended; its threads and sockets must not stay.
            if _current is not None:
                _current.close()
            _current = Endpoint(session)
        return _current


def existing() -> Endpoint | None:
    """Return the endpoint if this process has one, without creating it."""
    return _current


def _forget_in_child() -> None:
    """Drop the parent's endpoint in a forked child, without closing it.

    A close would act on kernel objects that the child shares (epoll and event descriptors) and on the parent's entries
    in Ray's key-value store. The lock is replaced, because another thread may hold it at the moment of the fork.
    """
    global _current, _creating
    _current, _creating = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_in_child)


@atexit.register
def close() -> None:
    """Close this process's endpoint if it has one; the next use creates a new one."""
    global _current
    # Close outside the lock: closing waits for threads, which may call `endpoint()` meanwhile.
    with _creating:
        current, _current = _current, None
    if current is not None:
        current.close()
    regions.close()
