"""Memory that was used and waits for its next user for a while: what the pools of this process share."""

from __future__ import annotations

import collections
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

from raylane.core import settings
from raylane.core.process.finalizing import hand_over

MAX_IDLE_BYTES = 2 << 30


def pool_limit_bytes() -> int:
    """Return the limit of idle memory in a pool: `RAYLANE_POOL_BYTES`, else 1/16 of the host's, at most 2 GiB."""
    limit = settings.POOL_BYTES.read()
    if limit is not None:
        return limit
    return min(MAX_IDLE_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 16)


class Memory(Protocol):
    """Memory that is used again."""

    key: Any
    """Size of the memory, or name of what it shows, by which users ask for it."""
    capacity: int
    """Bytes."""
    idle_since: float
    """Time (monotonic clock) of the last return."""


_Memory = TypeVar("_Memory", bound=Memory)


class IdlePool(Generic[_Memory]):
    """Counts memory that is lent, and keeps what came back. Thread-safe.

    At most `max_idle_bytes` and `most_idle` pieces stay, those with the keys that were used last; lent memory is not
    limited. Memory that was idle for `idle_s` seconds is freed by a thread, which runs while memory is lent or idle.
    """

    def __init__(self, max_idle_bytes: int, idle_s: float, name: str, most_idle: float = math.inf) -> None:
        """Name the thread `name`; there is none if `idle_s` is infinite."""
        if max_idle_bytes < 0:
            raise ValueError(f"max_idle_bytes must be at least 0, got {max_idle_bytes}")
        self.max_idle_bytes, self.idle_s = max_idle_bytes, idle_s
        self._most_idle = most_idle
        self._name = name
        self._lock = threading.Lock()  # guards _idle, the counters and _thread
        self._idle: collections.OrderedDict[Hashable, list[_Memory]] = collections.OrderedDict()
        """By key, the one that was used longest ago first; each list in the order of return, and never empty."""
        self._idle_count = 0
        self.idle_bytes = 0
        """Size of the idle memory, as of the last `reclaim`, like `used_bytes`."""
        self.used_bytes = 0
        """Size of the lent memory."""
        self._returned: collections.deque[_Memory] = collections.deque()
        """Memory that finalizers gave back and that is not counted yet. Deques are atomic."""
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        # The thread has no reference to the pool while it waits, so a pool that is dropped ends its thread.
        weakref.finalize(self, self._closed.set).atexit = False

    def lend_idle(self, key: Hashable, ready: Callable[[_Memory], bool] = lambda memory: True) -> _Memory | None:
        """Return idle memory with this key that is `ready`, the piece that came back last, counted as lent.

        None if there is none.
        """
        with self._lock:
            self._reclaim()
            for i in reversed(range(len(self._idle.get(key, ())))):
                if ready(self._idle[key][i]):
                    memory = self._remove(key, i)
                    self._count_lent(memory)
                    return memory
            return None

    def idle_keys(self) -> list[Any]:
        """Return the keys of all idle memory."""
        with self._lock:
            self._reclaim()
            return list(self._idle)

    def lend(self, memory: _Memory) -> None:
        """Count new memory as lent until `give_back` or `drop`."""
        with self._lock:
            self._count_lent(memory)

    def _count_lent(self, memory: _Memory) -> None:
        self.used_bytes += memory.capacity
        # Here and not when memory comes back: a finalizer must not start threads.
        self._start_thread()

    def give_back(self, memory: _Memory) -> None:
        """Take back memory that was lent. For finalizers too: never waits."""
        memory.idle_since = time.monotonic()
        hand_over(memory, self._returned, self._lock, self._reclaim)

    def drop(self, memory: _Memory) -> None:
        """Free memory that was lent."""
        with self._lock:
            self.used_bytes -= memory.capacity
        self.free(memory)

    def free(self, memory: _Memory) -> None:
        """Free memory that is no longer counted, where more is needed for that than to drop the last reference."""

    def reclaim(self) -> None:
        """Count memory that was returned while another thread used the pool."""
        with self._lock:
            self._reclaim()

    def _reclaim(self) -> None:
        """Move returned memory to the idle one, and free the surplus. Call with the lock held."""
        while self._returned:
            memory = self._returned.popleft()
            self.used_bytes -= memory.capacity
            self.idle_bytes += memory.capacity
            self._idle_count += 1
            self._idle.setdefault(memory.key, []).append(memory)
            self._idle.move_to_end(memory.key)
        most_bytes = 0 if self._closed.is_set() else self.max_idle_bytes
        while self.idle_bytes > most_bytes or self._idle_count > self._most_idle:
            self._free_oldest()

    def _free_oldest(self) -> int:
        """Free a piece with the key that was used longest ago, and return its size. Call with the lock held."""
        memory = self._remove(next(iter(self._idle)), 0)
        self.free(memory)
        return memory.capacity

    def _remove(self, key: Hashable, position: int) -> _Memory:
        memory = self._idle[key].pop(position)
        if not self._idle[key]:
            del self._idle[key]
        self.idle_bytes -= memory.capacity
        self._idle_count -= 1
        return memory

    def drop_idle(self, nbytes: float = math.inf) -> None:
        """Free idle memory, the oldest first, until this many bytes are free or none is left."""
        with self._lock:
            self._reclaim()
            while nbytes > 0 and self._idle:
                nbytes -= self._free_oldest()

    def trim(self) -> float | None:
        """Free what was idle for `idle_s` seconds. Returns the seconds until the next piece is due.

        Returns None, and forgets the thread, if no memory is lent or idle.
        """
        now = time.monotonic()
        next_due = now + self.idle_s
        with self._lock:
            self._reclaim()
            for key in list(self._idle):
                while key in self._idle and self._idle[key][0].idle_since + self.idle_s <= now:
                    self.free(self._remove(key, 0))
                if key in self._idle:
                    next_due = min(next_due, self._idle[key][0].idle_since + self.idle_s)
            if not self.used_bytes and not self.idle_bytes:
                self._thread = None
                return None
        return next_due - now

    def _start_thread(self) -> None:
        if self._thread is not None or self.idle_s == math.inf or self._closed.is_set():
            return
        arguments = (weakref.ref(self), self._closed, self.idle_s)
        thread = threading.Thread(target=_trim_while_used, args=arguments, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: the memory stays until the next call tries again
            return
        self._thread = thread

    def close(self) -> None:
        """Free idle memory and end the thread; waits for it. Memory that is returned later is freed at once."""
        self._closed.set()
        self.drop_idle()
        thread = self._thread
        if thread is not None:
            thread.join(timeout=5)

    def __repr__(self) -> str:
        self.reclaim()
        return f"{type(self).__name__}({self.used_bytes} bytes used, {self.idle_bytes} of {self.max_idle_bytes} idle)"


def _trim_while_used(pool: weakref.ref[IdlePool[Any]], closed: threading.Event, idle_s: float) -> None:
    """Trim a pool from time to time, as long as it has memory, exists and is not closed."""
    wait_s: float | None = idle_s
    while wait_s is not None and not closed.wait(min(wait_s, threading.TIMEOUT_MAX)):
        used_pool = pool()
        if used_pool is None:
            return
        wait_s = used_pool.trim()
        del used_pool
