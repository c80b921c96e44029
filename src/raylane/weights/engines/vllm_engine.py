"""Attachments of vLLM engines: `LLM` and `AsyncLLM`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import ray

from raylane.core.deadline import Deadline
from raylane.errors import (
    WeightsError,
    WeightsInvalidError,
    WeightsMismatchError,
    WeightsSwitchError,
    WeightsTimeoutError,
)
from raylane.weights.engines.attachment import EngineUpdate, WantedVersion, check_pause, replace_method
from raylane.weights.engines.vllm_plugin import WORKER_METHOD
from raylane.weights.engines.vllm_worker import raise_error
from raylane.weights.state.contents import ReaderState, check_initial, check_state
from raylane.weights.state.readers import VersionKey

_T = TypeVar("_T")
POLL_S = 0.005
"""Seconds between two looks whether the workers have prepared a version."""


class _LlmCalls:
    """Calls of an `LLM` in an update: they block, so requests are under way only if the user has queued them."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def workers(self, method: str, options: dict[str, Any]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = self._engine.collective_rpc(WORKER_METHOD, args=(method, options))
        return answers

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        inner = self._engine.llm_engine
        queued = inner.get_num_unfinished_requests()
        if queued and mode == "wait":
            raise WeightsError(f"{queued} requests are queued. Call wait_for_completion() before the update")
        if queued and mode == "abort":
            inner.abort_request(list(inner.output_processor.request_states), internal=True)
        if clear_cache and not inner.reset_prefix_cache(reset_running_requests=True):
            raise WeightsError("vLLM could not clear its prefix cache. Update again")

    async def set_version(self, version: int) -> None:
        self._engine.llm_engine.set_weight_version(str(version))

    async def resume(self) -> None:
        pass

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class _AsyncCalls:
    """The same calls of an `AsyncLLM`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def workers(self, method: str, options: dict[str, Any]) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = await self._engine.collective_rpc(WORKER_METHOD, args=(method, options))
        return answers

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        await self._engine.pause_generation(mode=mode, clear_cache=clear_cache)

    async def set_version(self, version: int) -> None:
        await self._engine.update_weight_version(str(version))

    async def resume(self) -> None:
        await self._engine.resume_generation()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class VllmReaders:
    """Readers in all workers of a vLLM engine. Base of attachments.

    Attributes:
        version: Number of the version that the engine has taken last; 0 before the first update.
    """

    def __init__(
        self, engine: Any, name: str, *, reader: str, detached: bool, timeout: float | None, **more: Any
    ) -> None:
        """Let the workers register under the key `reader`; `more` is passed on to them."""
        self.name, self.version = name, 0
        self._timeout, self._reader = timeout, reader
        self.is_async = hasattr(engine, "pause_generation")
        """True for an `AsyncLLM`."""
        self.is_closed = False
        """True after `close`."""
        self._calls: _AsyncCalls | _LlmCalls = _AsyncCalls(engine) if self.is_async else _LlmCalls(engine)
        self._attached = False
        self._pending_life = self._life = ""
        """Life of the name to which the version belongs that the workers have prepared last, and have taken last."""
        self._updating = asyncio.Lock()  # held during an update
        if not ray.is_initialized():
            raise WeightsError("this process is not connected to Ray. Call ray.init() first")
        context = ray.get_runtime_context()
        self._options = {
            "name": name,
            "address": context.gcs_address,
            "job": context.get_job_id(),
            "detached": detached,
            "timeout": timeout,
            **more,
        }
        if not self.is_async:
            run_now(self._attach())

    def update(self, *, at_least: int = 1, version: int | None = None, timeout: float | None = None) -> EngineUpdate:
        """Take the newest version, or the `version` of this number, into an `LLM`.

        For an `AsyncLLM`, await `update_async`. Waits for that version, or one of the number `at_least` or more, if it
        is not there yet. When it returns, all workers have the version.

        Raises:
            WeightsVersionError: The version of this number is gone.
            WeightsTimeoutError: There is no version; or it was not here within `timeout` seconds. The engine goes on.
            WeightsLayoutError: The published tensors do not fit the model; nothing was changed.
            WeightsMismatchError: With `verify`, tensors of a worker differ from those that were published. The engine
                keeps the version before, and accepts no requests until an update has succeeded.
            WeightsInvalidError: Only some of the workers have exchanged their weights. Start the engine again.
            WeightsError: The versions of adapters have begun anew. Attach again.
        """
        if self.is_async:
            raise TypeError("the engine is an AsyncLLM: await update_async()")
        return run_now(self.update_async(at_least=at_least, version=version, timeout=timeout))

    async def update_async(
        self, *, at_least: int = 1, version: int | None = None, timeout: float | None = None
    ) -> EngineUpdate:
        """Do the same as `update` for an `AsyncLLM` that answers requests. Errors as those of `update`."""
        wanted = WantedVersion.of(at_least, version)
        began_s, deadline = time.perf_counter(), Deadline.of_call(timeout or self._timeout)
        async with self._updating:
            if not self._attached:  # an AsyncLLM cannot be called while `attach` runs
                await self._attach()
            update = await self._take(wanted, deadline, began_s)
            self._life = self._pending_life
            return update

    @property
    def taken(self) -> VersionKey:
        """Identity of the version that the engine has taken last."""
        return VersionKey(self._life, self.version)

    async def prepare_async(self, version: int, deadline: Deadline) -> VersionKey:
        """Bring the version of this number to all workers, for an update that takes it; return its identity."""
        async with self._updating:
            if not self._attached:
                await self._attach()
            number = await self._prepared_version(WantedVersion(version, exact=True), deadline)
            return VersionKey(self._pending_life, number)

    async def forget_async(self) -> None:
        """Let go what was prepared and not taken."""
        async with self._updating:
            await self._call_workers("forget", {})

    async def _take(self, wanted: WantedVersion, deadline: Deadline, began_s: float) -> EngineUpdate:
        """Bring a version into all workers; `began_s` is when the update began."""
        raise NotImplementedError

    async def _attach(self) -> None:
        """Let the workers register."""
        try:
            raise_error(await self._call_workers("attach", self._options))
        except NotImplementedError as error:
            raise WeightsError(
                "this vLLM has not loaded raylane's plugin. Install raylane where vLLM is installed, and leave "
                "VLLM_PLUGINS unset or add raylane to it"
            ) from error
        self._attached = True

    async def _call_workers(self, method: str, options: dict[str, Any]) -> list[dict[str, Any]]:
        """Call a method of the readers."""
        return await self._calls.workers(method, {"reader": self._reader, **options})

    async def _prepared_version(self, wanted: WantedVersion, deadline: Deadline) -> int:
        """Let all workers prepare the wanted version, the same one; return its number."""
        while True:
            options = {"version": wanted.number, "exact": wanted.exact, "timeout": deadline.left_s()}
            raise_error(await self._call_workers("prepare", options))
            while True:
                answers = await self._call_workers("prepared", {})
                raise_error(answers)
                numbers = [each["version"] for each in answers]
                if None not in numbers:
                    break
                if deadline.left_s() == 0:
                    raise WeightsTimeoutError(
                        f"the workers did not prepare a version of {self.name!r} within {deadline.timeout_s} s. Raise "
                        "the timeout, or publish less often"
                    )
                await self._calls.sleep(POLL_S)
            if len(set(numbers)) == 1:
                self._pending_life = answers[0]["life"] or self._pending_life
                return int(numbers[0])
            wanted = WantedVersion(
                max(numbers), exact=False
            )  # a version was published meanwhile, and some workers have the one before

    async def invalidate_async(self) -> None:
        """Note that the engine lost its weights, as in a sleep of level 2: the next update loads all again."""
        raise_error(await self._call_workers("invalidate", {}))

    def invalidate(self) -> None:
        """Do the same for an `LLM`. For an `AsyncLLM`, await `invalidate_async`."""
        run_now(self.invalidate_async())

    async def close_async(self) -> None:
        """Leave; the engine keeps its weights."""
        self.is_closed = True
        await self._call_workers("close", {})

    def close(self) -> None:
        """Leave; the engine keeps its weights. For an `AsyncLLM`, await `close_async`."""
        run_now(self.close_async())


class VllmAttachment(VllmReaders):
    """A vLLM engine that reads weights. Made by `weights.attach`.

    A version is prepared while queued requests are computed, and exchanged between two steps. Requests are refused
    before the first update, and after a sleep of level 2, in which vLLM drops the weights, until the next one.

    Attributes:
        state: `ReaderState` of the engine's weights.
    """

    def __init__(
        self, engine: Any, name: str, *, pause: str, clear_cache: bool, initial: str = "refuse", **options: Any
    ) -> None:
        """Let the workers register. `options` as for `VllmReaders`."""
        check_pause(pause)
        check_initial(initial)
        self._pause, self._clear_cache, self._invalid, self._initial = pause, clear_cache, False, initial
        self.state = ReaderState.INITIAL
        self.check_fleet: Callable[[], None] | None = None
        """Raises WeightsSwitchError if the fleet of this engine does not permit requests; None without a fleet."""
        super().__init__(engine, name, reader="", **options)
        # Each request passes here right before it is counted as under way.
        processor = getattr(engine, "llm_engine", engine).output_processor
        sleep = self._sleep_async if self.is_async else self._sleep
        self._undo = [replace_method(processor, "add_request", self._check_and_add)]
        if hasattr(engine, "sleep"):
            self._undo.append(replace_method(engine, "sleep", sleep))

    def check(self, *, initial: str = "refuse") -> None:
        """Raise WeightsInvalidError if the engine holds no whole version, as `Subscriber.check`."""
        check_state(self.name, self.state, initial)

    def _check_and_add(self, add_request: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            if self._undo:  # else it was closed, and another gate has wrapped this one since
                self.check(initial=self._initial)
                if self.check_fleet is not None:
                    self.check_fleet()
        except (WeightsInvalidError, WeightsSwitchError) as error:
            from raylane.weights.engines.vllm_errors import EngineEmptyError, EngineSilentError

            kind = EngineEmptyError if isinstance(error, WeightsInvalidError) else EngineSilentError
            raise kind(str(error)) from None
        return add_request(*args, **kwargs)

    def _sleep(self, sleep: Callable[..., Any], level: int = 1, *args: Any, **kwargs: Any) -> Any:
        """Call vLLM's own `sleep`. From level 2 on it drops the weights."""
        if level > 1:
            self.invalidate()
        return sleep(level, *args, **kwargs)

    async def _sleep_async(self, sleep: Callable[..., Any], level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level > 1:
            await self.invalidate_async()
        return await sleep(level, *args, **kwargs)

    async def invalidate_async(self) -> None:
        """Note that the engine lost its weights: requests are refused until the next update, which loads all again."""
        self.state = ReaderState.INVALID
        if self._attached:
            await super().invalidate_async()

    async def close_async(self) -> None:
        """Leave; the engine keeps its weights, and accepts requests again."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        await super().close_async()

    async def _take(self, wanted: WantedVersion, deadline: Deadline, began_s: float) -> EngineUpdate:
        if self._invalid:
            raise WeightsInvalidError(f"the workers of this engine use different versions of {self.name!r}. Restart it")
        try:
            number = await self._prepared_version(wanted, deadline)
        except WeightsMismatchError:
            self.state = ReaderState.MISMATCH
            raise
        paused_s = time.perf_counter()
        try:
            await self._calls.pause(self._pause, clear_cache=self._clear_cache)
            paused_s = time.perf_counter() if self._pause == "wait" else paused_s
            answers = await self._call_workers("exchange", {})
            taken = {each.get("version") for each in answers}
            if taken != {number}:
                self._invalid = len(answers) > 1
                self.state = ReaderState.INVALID if self._invalid else self.state
                raise_error(answers)
                raise WeightsInvalidError(f"the workers of this engine took versions {taken}. Start it again")
            self.state = ReaderState.VALID
            await self._calls.set_version(number)
        finally:
            if not self._invalid:  # workers with different weights must not answer
                await self._calls.resume()
        ended_s = time.perf_counter()
        self.version = number
        nbytes = sum(each["nbytes"] for each in answers)
        return EngineUpdate(
            number, answers[0]["step"], answers[0]["changed"], nbytes, ended_s - paused_s, ended_s - began_s
        )


def run_now(work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of a coroutine that never waits for an event loop."""
    try:
        work.send(None)
    except StopIteration as ended:
        value: _T = ended.value
        return value
    raise RuntimeError("the coroutine waits for an event loop")
