"""Registrations of memory with NIXL: made once per owner of the memory, and dropped with the owner. Knows no sockets.

    owner (storage, array, pool region) ──> Registration [start, stop) ──> descriptor list of NIXL

The cache is keyed by the *owner*, not by the address. Python calls a finalizer when the owner dies, so memory that the
system hands out again at the same address has another owner and never meets an old registration. An owner that moved
its memory (`resize_`, `set_`) is noticed by its address and size, which are compared at every look-up.

Readers keep what they were told about registrations until it becomes wrong. It becomes wrong when new memory overlaps
a dropped registration; then the epoch changes, and readers forget everything from earlier epochs.
"""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raylane.core.memory.spans import Span
from raylane.core.process.finalizing import hand_over
from raylane.transport.backends.pieces import HOST, OwnedMemory

MAX_UNUSED = 1024
"""Number of registrations without a running transfer that are kept; those used longest ago are dropped first."""
MAX_STALE = 256
"""Number of dropped registrations that an epoch remembers."""
WHOLE_FACTOR = 4
WHOLE_BYTES = 256 << 20
"""An owner is registered whole up to this size, or up to this multiple of the block that is asked for.

Programs publish many views of one flat buffer, which then share one registration. But RDMA pins registered memory, and
the owner of a small block may be a mapped file of 100 GB.
"""


@dataclass(slots=True, eq=False)
class Registration:
    """Memory that is registered, and the transfers that use it at present."""

    number: int
    """Position in the order of registration in this process."""
    span: Span
    whole: Span
    """Memory of the owner at registration."""
    handle: Any
    """Descriptor list of NIXL."""
    owner: int | None
    """Key of the owner in the cache; None for a registration that lasts for one transfer."""
    device: int = HOST
    """Number of the CUDA device that has the memory."""
    uses: int = 0
    dead: bool = False
    """True after the owner died or moved its memory: not found any more, and dropped after the last use."""


class Registrations:
    """Cache of registrations. Thread-safe."""

    def __init__(self, register: Callable[[Span, int], Any], deregister: Callable[[Any], None]) -> None:
        """Use these functions of an agent; `register` returns a handle for `deregister`."""
        self._register, self._deregister = register, deregister
        self._lock = threading.Lock()  # guards everything below
        self._numbers = itertools.count(1)
        self._by_owner: dict[int, list[Registration]] = {}
        self._live: collections.OrderedDict[int, Registration] = collections.OrderedDict()
        """Registrations by number, in the order of their last use."""
        self._stale: list[Span] = []
        """Memory of registrations that were dropped in this epoch."""
        self._finished: collections.deque[int] = collections.deque()
        """Owners whose finalizers have run and that `_drop_finished` has not treated yet. Deques are atomic."""
        self.epoch = 1
        self.made = 0
        """Number of registrations made so far."""

    def hold(self, memory: OwnedMemory) -> Registration:
        """Return a registration of a block, made now or earlier; the caller calls `release` after the transfer."""
        with self._lock:
            self._drop_finished()
            # Registering waits for the card with the lock held: two threads would otherwise register the same memory.
            registration = self._find(memory) or self._make(memory)
            registration.uses += 1
            self._live.move_to_end(registration.number)
            return registration

    def release(self, registrations: list[Registration]) -> None:
        """End a use of registrations."""
        with self._lock:
            for registration in registrations:
                # A dead one was kept for its transfers only.
                registration.uses -= 1
                if registration.dead and not registration.uses:
                    self._drop(registration)
            self._drop_finished()
            self._limit()

    def since(self, epoch: int, number: int) -> tuple[int, list[Registration]]:
        """Return the epoch, and the registrations that a reader does not know, in the order of their numbers.

        The reader knows the registrations up to `number`, if its epoch is the present one.
        """
        with self._lock:
            known = number if epoch == self.epoch else 0
            return self.epoch, sorted(
                (o for n, o in self._live.items() if n > known), key=lambda registration: registration.number
            )

    def clear(self) -> None:
        """Drop all registrations, also those in use."""
        with self._lock:
            for registration in list(self._live.values()):
                self._drop(registration)
            self._by_owner.clear()

    def __len__(self) -> int:
        with self._lock:
            self._drop_finished()
            return len(self._live)

    def _find(self, memory: OwnedMemory) -> Registration | None:
        if memory.owner is None:
            return None
        for registration in list(self._by_owner.get(id(memory.owner), ())):
            if registration.whole != memory.whole:
                self._forget(registration)  # the owner resized or replaced its memory
            elif registration.span.start <= memory.block.start and memory.block.stop <= registration.span.stop:
                return registration
        return None

    def _make(self, memory: OwnedMemory) -> Registration:
        whole, block = memory.whole, memory.block
        fits = whole.start <= block.start and block.stop <= whole.stop
        small = whole.nbytes <= max(WHOLE_BYTES, WHOLE_FACTOR * block.nbytes)
        span = whole if memory.owner is not None and fits and small else block
        # Readers may still know the old registration of this memory.
        if any(_overlap(old, span) for old in self._stale):
            self._next_epoch()
        key = None if memory.owner is None else id(memory.owner)
        handle, dead = self._register(span, memory.device), key is None
        registration = Registration(next(self._numbers), span, whole, handle, key, memory.device, dead=dead)
        self.made += 1
        self._live[registration.number] = registration
        if key is not None:
            if key not in self._by_owner:
                # Not at exit: the agent may be gone then.
                weakref.finalize(memory.owner, self._owner_died, key).atexit = False
            self._by_owner.setdefault(key, []).append(registration)
        return registration

    def _owner_died(self, key: int) -> None:
        """Drop the registrations of an owner; runs as a finalizer and never waits for this object's lock."""
        hand_over(key, self._finished, self._lock, self._drop_finished)

    def _drop_finished(self) -> None:
        while self._finished:
            # The key is free for another owner only now: every look-up calls this function first.
            # The finalizer of an owner without registrations (all of them were moved) finds an empty list.
            for registration in self._by_owner.pop(self._finished.popleft(), ()):
                self._retire(registration)

    def _forget(self, registration: Registration) -> None:
        """Take a registration out of the cache of its living owner."""
        if registration.owner is not None:
            self._by_owner[registration.owner].remove(registration)  # the key stays: it marks that the finalizer is set
        self._retire(registration)

    def _retire(self, registration: Registration) -> None:
        registration.dead = True
        if not registration.uses:
            self._drop(registration)

    def _drop(self, registration: Registration) -> None:
        if self._live.pop(registration.number, None) is not None:
            self._stale.append(registration.span)
            self._deregister(registration.handle)
        # NIXL picks any registration that covers a range, so a dropped one must not cover memory that is still offered.
        shared = any(_overlap(registration.span, other.span) for other in self._live.values())
        if shared or len(self._stale) > MAX_STALE:
            self._next_epoch()

    def _next_epoch(self) -> None:
        self.epoch += 1
        self._stale.clear()

    def _limit(self) -> None:
        # Only here, and not when one is made: those of a running transfer must stay, however many they are.
        excess = max(0, len(self._live) - MAX_UNUSED)
        unused = [registration for registration in self._live.values() if not registration.uses]
        for registration in unused[:excess]:
            self._forget(registration)

    def __repr__(self) -> str:
        return f"Registrations({len(self)} of {self.made} made, epoch {self.epoch})"


def _overlap(span: Span, other: Span) -> bool:
    return span.start < other.stop and other.start < span.stop
