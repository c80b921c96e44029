"""Calls of the catalogue from trainers, readers and commands: they wait within a deadline, and raise typed errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylane import _ray
from raylane.core.deadline import Cancellation, Deadline
from raylane.errors import WeightsError, WeightsLostError, WeightsTimeoutError
from raylane.weights.service.actors import NAMESPACE, actor_names, own_error, start_actor
from raylane.weights.service.answers import VersionInfo
from raylane.weights.service.catalogue import Catalogue
from raylane.weights.service.reader_watch import CatalogueEnded
from raylane.weights.state.readers import ReaderInfo

_T = TypeVar("_T")
CATALOGUE_NAME = "catalogue of "
"""Beginning of the name of a catalogue's actor; the rest is its job, or "all"."""
RETRY_S = 0.1
"""Seconds between two attempts to reach a catalogue that Ray starts again."""
MARGIN_S = 5.0
"""Seconds that a caller waits beyond the deadline for the catalogue's own error, which says more."""


class CatalogueClient:
    """Handle of the catalogue of this job, or of the one for names that outlive their job."""

    def __init__(self, *, detached: bool, job: str | None = None) -> None:
        """Start the catalogue if nobody has. WeightsError if this process is not connected to Ray.

        `job` is the Ray job (hexadecimal id) whose catalogue it is; None: that of this process.
        """
        if not ray.is_initialized():
            raise WeightsError("this process is not connected to Ray. Call ray.init() first")
        self._job = None if detached else job or ray.get_runtime_context().get_job_id()
        self._actor: Any = self._start()
        self._pid = os.getpid()
        self._session = weakref.ref(_ray.session())

    def _start(self) -> Any:
        name = f"{CATALOGUE_NAME}{self._job or 'all'}"
        with contextlib.suppress(ValueError):
            return ray.get_actor(name, NAMESPACE)
        # Beside the driver, with which all ends: the end of another host must not take the list of versions along.
        node = None if self._job is None else _ray.driver_node(self._job)
        place = None if node is None else NodeAffinitySchedulingStrategy(node, soft=True)
        # The concurrency is that of callers that wait.
        return start_actor(Catalogue, name, self._job, max_concurrency=10_000, scheduling_strategy=place)

    def call(self, method: str, *args: Any, deadline: Deadline, **options: Any) -> Any:
        """Return the answer of a method of the catalogue. A catalogue that has died is started again, without names.

        WeightsTimeoutError if it does not answer within the deadline. WeightsError in a forked child, and after the end
        of the Ray session.
        """
        if os.getpid() != self._pid:
            raise WeightsError("this object belongs to the process that was forked. Make a new one in the child")
        if _ray.session() is None or _ray.session() is not self._session():
            raise WeightsError("this object belongs to a Ray session that has ended. Make a new one in this session")
        while True:
            remaining_s = deadline.left_s()
            try:
                ref = getattr(self._actor, method).remote(*args, **options)
                return ray.get(ref, timeout=None if remaining_s is None else remaining_s + MARGIN_S)
            except ray.exceptions.GetTimeoutError as error:
                raise WeightsTimeoutError(
                    f"the catalogue of weights did not answer within {deadline.timeout_s} s. Raise the timeout"
                ) from error
            except ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, CatalogueEnded):
                    raise own_error(error) from None
                ended: Exception = error
            except ray.exceptions.RayActorError as error:
                ended = error
            if deadline.left_s() == 0:
                raise WeightsLostError(f"the catalogue of weights has ended: {ended}. Try again") from ended
            time.sleep(RETRY_S)
            self._actor = self._start()

    def tell(self, method: str, *args: Any) -> None:
        """Call a method without waiting for it; errors are ignored. Does nothing in a forked child.

        Finalizers call this, and those of objects that a child has inherited belong to its parent.
        """
        # A call after the end of the session would start another Ray.
        if ray.is_initialized() and os.getpid() == self._pid:
            with contextlib.suppress(Exception):  # Ray's, of no type of its own, if the session ends now
                getattr(self._actor, method).remote(*args)


@contextlib.contextmanager
def locked(lock: threading.RLock, deadline: Deadline, attempt: str) -> Iterator[None]:
    """Hold a lock within the block. WeightsTimeoutError, which begins with `attempt`, if that takes too long."""
    remaining_s = deadline.left_s()
    if not lock.acquire(timeout=-1 if remaining_s is None else min(remaining_s, threading.TIMEOUT_MAX)):
        raise WeightsTimeoutError(
            f"{attempt}: another call of the same object did not end within {deadline.timeout_s} s. Wait for that "
            "call, or raise the timeout"
        )
    try:
        yield
    finally:
        lock.release()


async def cancellable(work: Callable[[Deadline], _T], timeout: float | None) -> _T:
    """Run a call on a thread without blocking the event loop. After a cancellation it writes nothing."""
    cancellation = Cancellation()
    deadline = Deadline.of_call(timeout)
    deadline.cancellation = cancellation
    try:
        return await asyncio.to_thread(work, deadline)
    except asyncio.CancelledError:
        cancellation.cancel()  # waits for a thread that copies at this moment
        raise


def all_versions(timeout_s: float) -> list[VersionInfo]:
    """Return the versions of all names of all jobs of the cluster, by name. Catalogues that end are left out."""
    versions: list[VersionInfo] = _ask_all("versions", None, timeout_s=timeout_s)
    return sorted(versions, key=lambda version: (version.name, version.number))


def all_readers(timeout_s: float) -> list[ReaderInfo]:
    """Return the readers of all names of all jobs of the cluster, by name, those that are furthest behind first."""
    readers: list[ReaderInfo] = _ask_all("readers", None, timeout_s=timeout_s)
    return sorted(readers, key=lambda reader: (reader.name, -reader.lag, reader.label))


def all_memory(timeout_s: float) -> list[tuple[str, str, int]]:
    """Return the host, name and bytes of all shared memory that keeps weights, those that take most first."""
    taken: list[tuple[str, str, int]] = _ask_all("memory", timeout_s=timeout_s)
    return sorted(taken, key=lambda entry: -entry[2])


def _ask_all(method: str, *args: Any, timeout_s: float) -> list[Any]:
    answers: list[Any] = []
    for name in actor_names(CATALOGUE_NAME):
        with contextlib.suppress(ValueError, ray.exceptions.RayActorError):
            actor = ray.get_actor(name, NAMESPACE)
            answers += ray.get(getattr(actor, method).remote(*args), timeout=timeout_s)
    return answers
