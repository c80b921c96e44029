"""How long published values and the actors that hold them live. Ray's own reference count decides both.

*Anchors.* Each published value's ticket has a tiny ObjectRef nested in it, owned by the producing process. Ray counts
it with the ticket wherever that goes: into queued calls, borrowers, other objects. When it is out of scope everywhere,
Ray calls back and the value is freed. (Watching the outer ref in the caller would be cheaper, and wrong: Ray copies a
small result into the calls that take it as an argument and drops the outer ref, while those calls are still queued.)

*The keeper.* Ray ends an actor when its last handle is gone, although refs to what it holds are not. So the process
that called a decorated method keeps the handle for as long as the ref lives, and then until the actor says that it
holds nothing any more.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import ray

from raylane import _ray
from raylane.core.deadline import Deadline, default_timeout_s
from raylane.errors import TransferTimeoutError

log = logging.getLogger("raylane.transport")

SPARE_ANCHORS = 32
"""More are made, by a thread, when there are fewer than this."""
BATCH = 256
FROM_PUT = 8
"""The first few come from `ray.put`: an actor that publishes only some weights should not make Ray start a worker."""
ASK_EVERY_S = 1.0
ASK_TIMEOUT_S = 5.0
SESSION_CHECK_S = 2.0


def _started(run: Callable[[], None], name: str) -> threading.Thread:
    """Return a running daemon thread. RuntimeError if the system starts no more of them; the next call tries again."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class Anchors:
    """Spare anchors: after the first few, the return refs of empty tasks, many from each. Whether such a task has run
    yet, or ever does, is of no account; only its refs are used. A ref from `ray.put` does the same and costs 0.5 ms
    instead of 0.03, as it makes, and later deletes, an object in the node's store. The thread is started by the first
    anchor needed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards everything below
        self._spare: collections.deque[Any] = collections.deque()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._error: Exception | None = None

    def take(self) -> Any:
        """A fresh ObjectRef owned by this process. Waits for one if there is none; TransferTimeoutError if Ray takes no
        tasks from this process.

        Never made on the calling thread: Ray is serialising there, and a nested call would lose the refs it collects.
        """
        timeout_s = default_timeout_s()
        with self._changed:
            if self._thread is None:
                self._thread = _started(self._fill, "raylane-anchors")
            self._changed.wait_for(lambda: self._spare or self._closing or self._error, timeout_s)
            error, self._error = self._error, None  # the next call tries again
            if not self._spare:
                why = error or ("it is leaving Ray" if self._closing else f"nothing within {timeout_s} s")
                raise TransferTimeoutError(f"this process got no ref to hang a value's lifetime on: {why}") from error
            anchor = self._spare.popleft()
            if len(self._spare) < SPARE_ANCHORS:
                self._changed.notify_all()
        return anchor

    def _fill(self) -> None:
        made = 0
        while True:
            with self._changed:
                enough = SPARE_ANCHORS if made >= FROM_PUT else 1
                while len(self._spare) >= enough and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
            try:
                refs = _ray.empty_task_refs(BATCH) if made >= FROM_PUT else [ray.put(None)]
            except Exception as error:  # of whatever kind: nobody else would hear of it, and `take` would wait
                with self._changed:
                    self._error, self._thread = error, None
                    self._changed.notify_all()
                return
            made += len(refs)
            with self._changed:
                self._spare.extend(refs)
                self._changed.notify_all()
            del refs  # or this thread would hold each of them while it waits

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._spare.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=ASK_TIMEOUT_S)


HoldsAnything = Callable[[bytes, Deadline], bool]


class Keeper:
    """Holds actor handles that nothing but a value still needs. One thread, which sleeps while it holds none."""

    def __init__(self, holds_anything: HoldsAnything, session_over: Callable[[], bool]) -> None:
        self._holds_anything = holds_anything
        self._session_over = session_over
        self._changed = threading.Condition()  # guards everything below
        self._kept: dict[bytes, tuple[object, int]] = {}
        """By actor: one of the objects that hold its handle, and how many calls have ended since it was first kept."""
        self._closing = False
        self._thread: threading.Thread | None = None

    def watch(self, ref: Any, keep: object) -> None:
        """Keep `keep`, which holds the actor's handle, for the ref that the actor's method returned."""
        _ray.on_out_of_scope(ref, functools.partial(self._out_of_scope, _ray.actor_of(ref), keep))

    def _out_of_scope(self, actor: bytes, keep: object, _: bytes) -> None:
        """On Ray's callback thread. The value may still be needed: by calls that took the ref and are queued."""
        with self._changed:
            if self._closing:
                return
            if not self._kept:
                self._changed.notify_all()  # once for many: the thread comes round by itself while it keeps anything
            kept, ended = self._kept.get(actor, (keep, 0))
            self._kept[actor] = kept, ended + 1
            if self._thread is None:
                self._thread = _started(self._run, "raylane-keeper")

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._kept or self._closing or self._session_over()):
                    self._changed.wait(SESSION_CHECK_S)
                # A short stay in any case: it makes one question of many calls.
                self._changed.wait_for(lambda: self._closing, ASK_EVERY_S)
                if self._closing or self._session_over():
                    self._kept.clear()
                    return
                due = {actor: ended for actor, (_, ended) in self._kept.items()}
            for actor, ended in due.items():
                self._drop_if_unused(actor, ended)

    def _drop_if_unused(self, actor: bytes, ended: int) -> None:
        """Drop the handle of an actor that holds nothing, unless more calls have ended since it was asked."""
        try:
            if self._holds_anything(actor, Deadline(ASK_TIMEOUT_S)):
                return
        except Exception as error:  # stopped, or Ray's store does not answer: ask again, as nobody else would
            log.debug("could not ask actor %s what it holds: %s", actor.hex(), error)
            return
        with self._changed:
            dropped = self._kept.get(actor)
            if dropped is not None and dropped[1] == ended:
                del self._kept[actor]
        del dropped  # outside the lock: the last handle may go with it

    def __len__(self) -> int:
        with self._changed:
            return len(self._kept)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            kept = list(self._kept.values())
            self._kept.clear()
            self._changed.notify_all()
            thread = self._thread
        kept.clear()
        if thread is not None:
            thread.join(timeout=ASK_TIMEOUT_S + 1)


def keep_actor_alive(invocation: Callable[..., Any]) -> Callable[..., Any]:
    """Ray's invocation hook of every decorated method: stock Ray runs it in the caller. Pickled by name."""

    def submit(args: Any, kwargs: Any) -> Any:
        returned = invocation(args, kwargs)
        from raylane.transport.endpoint import endpoint  # it imports this module

        for ref in returned if isinstance(returned, list) else [returned]:
            if type(ref) is ray.ObjectRef and _ray.is_actor_call(ref):
                endpoint().keeper().watch(ref, invocation)
        return returned

    return submit
