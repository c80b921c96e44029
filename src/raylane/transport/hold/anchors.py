"""Lifetimes of published values and of the actors that hold them. Ray's own reference count decides both.

*Anchors.* The ticket of each published result contains a small ObjectRef, the anchor, which the producing process owns.
Ray counts the anchor together with the ticket everywhere: in queued calls, in borrowers, in other objects. When the
anchor is out of scope in the whole cluster, Ray calls back and the value is freed. (Watching the outer ref in the
caller would be cheaper, but wrong: Ray copies a small result into the calls that take it as an argument and drops the
outer ref while those calls are still queued.)

*The actor keeper.* Ray ends an actor when its last handle is gone, even while refs to values in that actor exist. So
the process that called a decorated method keeps the handle as long as the ref exists, and afterwards until the actor
answers that it holds no more results:

    caller                                              actor
    ref goes out of scope, handle kept ── HeldQuery ──> count of results in the store
    count is 0: drop the handle        <── HeldCount ── (asked once per second)
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable
from typing import Any

import ray

from raylane import _ray
from raylane.core import settings
from raylane.core.deadline import Deadline
from raylane.errors import TransferTimeoutError

log = logging.getLogger("raylane.transport")

SPARE_ANCHORS = 32
"""Number of spare anchors below which the thread makes more."""
BATCH = 256
"""Number of anchors from one empty task."""
FROM_PUT = 8
"""Number of first anchors that come from `ray.put`, so that a rare publisher does not make Ray start a worker."""
SPARE_KEPT_S = 5.0
"""Seconds after the last `take` until the spare anchors are dropped."""
ASK_EVERY_S = 1.0
ASK_TIMEOUT_S = 5.0
SESSION_CHECK_S = 2.0


def _started(run: Callable[[], None], name: str) -> threading.Thread:
    """Return a running daemon thread. RuntimeError if the system starts no more threads; the next call tries again."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class AnchorPool:
    """Spare anchors, made ahead by a thread that `take` starts, and dropped when none was taken for SPARE_KEPT_S.

    Ray 2.60 ends no idle worker process that owns an object, and spare anchors are objects.

    After the first few, anchors are the return refs of empty tasks (BATCH each). Whether such a task has run is
    irrelevant, because only its refs are used. A ref from `ray.put` works as well but costs 0.5 ms instead of 0.03 ms,
    since it creates (and later deletes) an object in the node's store.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards everything below
        self._spare: collections.deque[Any] = collections.deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._error: Exception | None = None

    def take(self) -> Any:
        """Return a fresh ObjectRef owned by this process; wait for one if there is none.

        TransferTimeoutError if Ray accepts no tasks from this process.
        """
        # An anchor is never made on the calling thread: Ray is serialising there, and a nested call to Ray would lose
        # the contained refs that Ray is collecting.
        timeout_s = settings.TIMEOUT_S.read()
        with self._changed:
            if self._thread is None:
                self._thread = _started(self._fill, "raylane-anchors")
            self._changed.wait_for(lambda: self._spare or self._closing or self._error, timeout_s)
            error, self._error = self._error, None  # the next call tries again
            if not self._spare:
                reason = error or ("this process is leaving Ray" if self._closing else f"no ref within {timeout_s} s")
                raise TransferTimeoutError(
                    f"could not create the ObjectRef that tracks the lifetime of a published value: {reason}. Check "
                    "that Ray still accepts tasks from this process, or raise RAYLANE_TIMEOUT_S"
                ) from error
            anchor = self._spare.popleft()
            if len(self._spare) < SPARE_ANCHORS:
                self._changed.notify_all()
        return anchor

    def _fill(self) -> None:
        count = 0
        while True:
            with self._changed:
                enough = SPARE_ANCHORS if count >= FROM_PUT else 1
                while len(self._spare) >= enough and not self._closing:
                    spare = len(self._spare)  # which only this thread adds to
                    if not self._changed.wait(SPARE_KEPT_S) and len(self._spare) == spare:
                        self._spare.clear()
                        self._thread = None
                        return
                if self._closing:
                    return
            try:
                refs = _ray.empty_task_refs(BATCH) if count >= FROM_PUT else [ray.put(None)]
            except Exception as error:
                # Pass any exception to `take`: on this thread nobody would see it, and `take` would wait in vain.
                with self._changed:
                    self._error, self._thread = error, None
                    self._changed.notify_all()
                return
            count += len(refs)
            with self._changed:
                self._spare.extend(refs)
                self._changed.notify_all()
            del refs  # otherwise this thread keeps the last batch referenced while it waits

    def close(self) -> None:
        """Drop the spare anchors and end the thread; waits at most ASK_TIMEOUT_S seconds."""
        with self._changed:
            self._closing = True
            self._spare.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=ASK_TIMEOUT_S)


HoldsAnything = Callable[[bytes, Deadline], bool]
"""Function that asks the actor with a binary id whether it holds results; raises if the actor cannot be asked."""


class _Watched:
    """A ref that this process has to a result, as the callback that Ray calls when it is gone."""

    __slots__ = ("keeper", "method")

    def __init__(self, keeper: ActorKeeper, method: Any) -> None:
        self.keeper = keeper
        self.method = method
        """Method of a handle; it holds the handle."""

    def __call__(self, _: bytes) -> None:
        self.keeper.ref_gone(self)


class ActorKeeper:
    """Handles of actors that are needed only for the results they hold. One thread, asleep while there are none."""

    def __init__(self, holds_anything: HoldsAnything, session_ended: Callable[[], bool]) -> None:
        self._holds_anything = holds_anything
        self._session_ended = session_ended
        self._changed = threading.Condition()  # guards everything below
        self._kept: dict[bytes, tuple[object, int]] = {}
        """By actor: an object that holds its handle, and the number of refs gone since the handle was first kept."""
        self._watched: set[_Watched] = set()
        """One for each ref that this process has. Needs no lock: adding to a set and removing are atomic."""
        self._closing = False
        self._thread: threading.Thread | None = None

    def watch(self, ref: Any, method: Any) -> None:
        """Keep `method`, which holds the handle of its actor, for the ref that it returned."""
        watched = _Watched(self, method)
        self._watched.add(watched)
        # Ray holds the callback for as long as the ref exists.
        _ray.on_out_of_scope(ref, watched)

    def ref_gone(self, watched: _Watched) -> None:
        """Go on with the handle of a ref that is gone. Runs on Ray's callback thread."""
        # Before it is kept: a report between the two shows neither, which is better than both.
        self._watched.discard(watched)
        self.keep(_ray.identity_of(watched.method)[0], watched.method)

    def keep(self, actor: bytes, keep: object) -> None:
        """Keep a handle after the ref is gone: queued calls that took the ref may still need the value."""
        with self._changed:
            if self._closing:
                return
            if not self._kept:
                # Wake the thread for the first handle only; with handles to check it wakes by itself every second.
                self._changed.notify_all()
            handle, ended = self._kept.get(actor, (keep, 0))
            self._kept[actor] = handle, ended + 1
            if self._thread is None:
                self._thread = _started(self._run, "raylane-keeper")

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._kept or self._closing or self._session_ended()):
                    self._changed.wait(SESSION_CHECK_S)
                # Wait even if a handle is there: one query then covers the refs of many calls.
                self._changed.wait_for(lambda: self._closing, ASK_EVERY_S)
                if self._closing or self._session_ended():
                    self._kept.clear()
                    return
                due = {actor: ended for actor, (_, ended) in self._kept.items()}
            for actor, ended in due.items():
                self._drop_if_unused(actor, ended)

    def _drop_if_unused(self, actor: bytes, ended: int) -> None:
        """Drop the handle of an actor that holds nothing, unless more refs have gone since it was asked."""
        try:
            if self._holds_anything(actor, Deadline(ASK_TIMEOUT_S)):
                return
        except Exception as error:  # the actor is stopped, or Ray's key-value store does not answer: ask again later
            log.debug("could not ask actor %s how many results it holds: %s", actor.hex(), error)
            return
        with self._changed:
            dropped = self._kept.get(actor)
            # A ref that went after the query may belong to a newer result, which the answer does not cover.
            if dropped is not None and dropped[1] == ended:
                del self._kept[actor]
        del dropped  # outside the lock: this may drop the last handle, and Ray then runs code of its own

    def __len__(self) -> int:
        with self._changed:
            return len(self._kept)

    def kept(self) -> dict[bytes, tuple[dict[str, int], int]]:
        """Return, by actor, the refs of this process by method, and the number of refs gone since it was first kept."""
        actors: dict[bytes, tuple[dict[str, int], int]] = {}
        with self._changed:
            for actor, (_, ended) in self._kept.items():
                actors[actor] = {}, ended
        # A copy, because refs come and go meanwhile; set.copy is atomic.
        for watched in self._watched.copy():
            actor, name = _ray.identity_of(watched.method)
            refs = actors.setdefault(actor, ({}, 0))[0]
            refs[name] = refs.get(name, 0) + 1
        return actors

    def close(self) -> None:
        """Drop all handles and end the thread; waits at most ASK_TIMEOUT_S + 1 seconds."""
        with self._changed:
            self._closing = True
            handles = list(self._kept.values())
            self._kept.clear()
            self._changed.notify_all()
            thread = self._thread
        handles.clear()  # outside the lock, as in `_drop_if_unused`
        if thread is not None:
            thread.join(timeout=ASK_TIMEOUT_S + 1)
