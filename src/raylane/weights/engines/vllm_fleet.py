"""A vLLM engine as a reader of a fleet.

The workers of an engine are called by the thread that uses an `LLM`, or on the event loop of an `AsyncLLM`. What the
thread of a `FleetReader` asks for is done there:

    thread of FleetReader     fetch ──job──>  LLM: the next `step` or `idle`        prepared in all workers
                                    ──────>   AsyncLLM: the loop, beside requests
"""

from __future__ import annotations

import asyncio
import collections
import functools
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import ray

from raylane.core.deadline import Deadline
from raylane.errors import WeightsTimeoutError
from raylane.weights.engines.vllm_engine import VllmAttachment, run_now
from raylane.weights.service.client import CatalogueClient
from raylane.weights.state.readers import NO_VERSION, VersionKey, key_of_reader

Work = Callable[[], Coroutine[Any, Any, Any]]


class EngineReader:
    """Reader of a fleet that stands for all workers of an engine."""

    def __init__(self, attachment: VllmAttachment, catalogue: CatalogueClient, notify: Callable[[], None]) -> None:
        """Use an attachment. `notify` is called when `run_jobs` has something to do.

        RuntimeError if the engine is an `AsyncLLM` and this is not called on its event loop.
        """
        self.name = attachment.name
        self.key = key_of_reader(self.name, ray.get_runtime_context().get_node_id())
        self.pending: VersionKey | None = None
        """Version that is prepared and not taken yet."""
        self.taken = NO_VERSION
        self.attachment = attachment
        self._catalogue, self._notify = catalogue, notify
        self._turn = 0
        self._has_begun = False
        """True if the workers may have prepared something that they were not told to take or to forget."""
        self._jobs: collections.deque[tuple[Future[Any], Work]] = collections.deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        if attachment.is_async:
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                raise RuntimeError("make the FleetReader of an AsyncLLM in a coroutine, on the engine's loop") from None

    @property
    def is_closed(self) -> bool:
        """True after the attachment was closed."""
        return self.attachment.is_closed

    def fetch(self, number: int, deadline: Deadline, *, exact: bool) -> None:
        """Let all workers prepare the version of this number."""
        assert exact, "a fleet names its versions"
        self._has_begun = True
        work = functools.partial(self.attachment.prepare_async, number, deadline)
        self.pending = self._done(work, number, deadline, is_preparation=True)

    def update(self, *, version: int, timeout: float | None) -> None:
        """Let the engine use a version; an `LLM` on its own thread."""
        if self._loop is None:
            self.attachment.update(version=version, timeout=timeout)
        else:
            update = functools.partial(self.attachment.update_async, version=version, timeout=timeout)
            self._done(update, version, Deadline.of_call(timeout), is_preparation=False)
        self._has_begun, self.pending, self.taken = False, None, self.attachment.taken
        self._turn += 1
        self._catalogue.tell("applied", self.key, self.taken, self._turn)

    def forget_prefetched(self) -> None:
        """Let the workers forget what they have prepared, soon."""
        if self._has_begun:
            self._has_begun, self.pending = False, None
            self._begin(self.attachment.forget_async)

    def close(self, gate: Callable[[], None]) -> None:
        """End what was asked for and not begun, and let requests pass this gate no more."""
        if self.attachment.check_fleet is gate:
            self.attachment.check_fleet = None
        while self._jobs:
            self._jobs.popleft()[0].cancel()

    def has_jobs(self) -> bool:
        """Return True if `run_jobs` has something to do."""
        return bool(self._jobs)

    def run_jobs(self) -> None:
        """Do what the thread of the `FleetReader` has asked for. Called by the thread that uses an `LLM`."""
        while self._jobs:
            future, work = self._jobs.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(run_now(work()))
                except Exception as error:  # raised where the future is read
                    future.set_exception(error)

    def _done(self, work: Work, version: int, deadline: Deadline, *, is_preparation: bool) -> Any:
        """Return the result of work that is done where the engine is used. WeightsTimeoutError if that is late."""
        future = self._begin(work)
        try:
            return future.result(deadline.left_s())
        except TimeoutError:
            if future.done():
                raise
            if is_preparation:  # an exchange goes on to its end, so that all workers have the same version
                future.cancel()
            raise WeightsTimeoutError(
                f"the engine did not take version {version} of {self.name!r} within {deadline.timeout_s} s: nobody has "
                "called step() or idle() of its FleetReader, or its event loop was busy"
            ) from None

    def _begin(self, work: Work) -> Future[Any]:
        if self._loop is not None:
            return asyncio.run_coroutine_threadsafe(work(), self._loop)
        future: Future[Any] = Future()
        self._jobs.append((future, work))
        self._notify()
        return future
