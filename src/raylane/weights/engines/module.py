"""Attachments of torch modules: Hugging Face models with `generate`, and models of a loop of one's own.

A model may answer on some threads of a process while another one updates it. Each forward pass holds the step lock, and
the exchange of weights too, so a pass has the weights of one version.

    thread of requests      generate:  pass | pass | pass | pass      answer: tokens 0 to 1 of version 7, 2 to 3 of 8
    thread of updates       prepare ............... exchange
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.nn import Module

from raylane.core.deadline import Deadline
from raylane.errors import WeightsError, WeightsTimeoutError
from raylane.weights.engines.attachment import EngineUpdate, WantedVersion, check_pause, replace_method
from raylane.weights.layout.mapping import Mapping
from raylane.weights.service.client import cancellable, locked
from raylane.weights.state.contents import check_initial
from raylane.weights.subscriber import Subscriber


class VersionSpan(NamedTuple):
    """New tokens `start` to `end` (exclusive) of an answer, which were computed with one version."""

    version: int
    start: int
    end: int


class Answer:
    """One answer under way. Made by `ModuleAttachment.answer`.

    Attributes:
        aborted: True if an update wants the answer to end; a loop of one's own looks at it after each token.
    """

    def __init__(self) -> None:
        self.aborted = False
        self.version = 0
        """Version of the last forward pass."""
        self._spans: list[VersionSpan] = []

    def note_token(self) -> None:
        """Note one more token (for each row of a batch) of the last forward pass."""
        end = self._spans[-1].end if self._spans else 0
        if self._spans and self._spans[-1].version == self.version:
            self._spans[-1] = self._spans[-1]._replace(end=end + 1)
        else:
            self._spans.append(VersionSpan(self.version, end, end + 1))

    @property
    def weight_versions(self) -> list[VersionSpan]:
        """Versions of the tokens so far."""
        return list(self._spans)


class ModuleAttachment:
    """A torch module that reads weights. Made by `weights.attach`.

    `generate` of a Hugging Face model is wrapped: what it returns has the attribute `weight_versions`, a list of
    `VersionSpan`. A loop of one's own computes within `with attachment.answer() as answer:`.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        *,
        pause: str = "keep",
        mapping: Mapping | None = None,
        subset: bool = False,
        initial: str = "refuse",
        verify: str | int | None = None,
        detached: bool = False,
        timeout: float | None = None,
    ) -> None:
        check_pause(pause)
        check_initial(initial)
        model = getattr(model, "_orig_mod", model)  # torch.compile has wrapped it
        self.name, self._model, self._pause, self._timeout = name, model, pause, timeout
        self._initial = initial
        # By name, so that transformers is not loaded for other modules.
        if mapping is None and any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
            mapping = Mapping.record(functools.partial(_load, model))
        options: dict[str, Any] = {"subset": subset, "verify": verify, "detached": detached, "timeout": timeout}
        self._subscriber = Subscriber(name, model, apply="swap", mapping=mapping, **options)
        self._step = threading.RLock()  # held during a forward pass, and while weights are exchanged
        self._changed = threading.Condition()
        self._answers: set[Answer] = set()
        """Answers under way; guarded by `_changed`."""
        self._closed = False
        """True while an update waits for answers to end, and no new one may begin; guarded by `_changed`."""
        self._current = threading.local()
        # `generate` of a PeftModel calls the model within it.
        passing = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
        # No hooks: torch does not call them after Ctrl-C.
        self._undo: list[Callable[[], Any]] = [replace_method(passing, "forward", self._pass)]
        if callable(getattr(model, "generate", None)):
            self._undo.append(replace_method(model, "generate", self._generate))

    @property
    def subscriber(self) -> Subscriber:
        """Reader of the model's tensors."""
        return self._subscriber

    @property
    def version(self) -> int:
        """Number of the version in the model; 0 before the first update."""
        return self._subscriber.version

    @contextlib.contextmanager
    def answer(self) -> Iterator[Answer]:
        """Count an answer as under way. Waits while an update lets others end."""
        answer = Answer()
        with self._changed:
            # An update that waits for answers to end would never see the last one if others could begin.
            while self._closed:
                self._changed.wait()
            self._answers.add(answer)
        self._current.answer = answer
        try:
            yield answer
        finally:
            self._current.answer = None
            with self._changed:
                self._answers.discard(answer)
                self._changed.notify_all()

    def update(self, *, at_least: int = 1, version: int | None = None, timeout: float | None = None) -> EngineUpdate:
        """Take the newest version, or the `version` of this number. May be called while other threads compute answers.

        Waits for that version, or one of the number `at_least` or more, if it is not there yet.

        Raises:
            WeightsVersionError: The version of this number is gone.
            WeightsTimeoutError: There is no version; or, with `wait` and `abort`, answers did not end in time. The
                model keeps what it has.
            WeightsLayoutError: The published tensors do not fit the model; nothing was changed.
            WeightsMismatchError: With `verify`, tensors differ from those that were published. The model keeps what it
                has, and computes nothing until an update has succeeded.
        """
        return self._update(WantedVersion.of(at_least, version), Deadline.of_call(self._timeout_of(timeout)))

    def _update(self, wanted: WantedVersion, deadline: Deadline) -> EngineUpdate:
        began_s = time.perf_counter()
        number = self._subscriber.fetch(wanted.number, deadline, exact=wanted.exact)
        with self._nobody_answers(deadline) if self._pause != "keep" else contextlib.nullcontext():
            paused_s = time.perf_counter()
            with locked(self._step, deadline, f"the model was not updated to version {number} of {self.name!r}"):
                update = self._subscriber.take(number, deadline, exact=wanted.exact)
            ended_s = time.perf_counter()
        return EngineUpdate(
            update.version, update.step, update.changed, update.nbytes, ended_s - paused_s, ended_s - began_s
        )

    async def update_async(
        self, *, at_least: int = 1, version: int | None = None, timeout: float | None = None
    ) -> EngineUpdate:
        """Do the same as `update` on a thread, without blocking the event loop."""
        wanted = WantedVersion.of(at_least, version)
        return await cancellable(lambda deadline: self._update(wanted, deadline), self._timeout_of(timeout))

    def _timeout_of(self, timeout: float | None) -> float | None:
        return self._timeout if timeout is None else timeout

    def verify(self, *, timeout: float | None = None) -> int:
        """Compare the model with the version that it holds, as `Subscriber.verify`; return its number.

        May be called while other threads compute answers. After WeightsMismatchError the model computes nothing until
        an update has succeeded.
        """
        return self._subscriber.verify(timeout=self._timeout_of(timeout))

    def check(self, *, initial: str = "refuse") -> None:
        """Raise WeightsInvalidError if the model holds no whole version, as `Subscriber.check`."""
        self._subscriber.check(initial=initial)

    def invalidate(self) -> None:
        """Note that the model lost its weights, as in a sleep that drops memory; it computes nothing until it has some.

        The next update loads all again.
        """
        self._subscriber.invalidate()

    def reload(self, *, timeout: float | None = None) -> EngineUpdate:
        """Load the version that the model has again. WeightsVersionError if it is gone: update instead."""
        self.invalidate()
        return self.update(version=max(self.version, 1), timeout=timeout)

    def __deepcopy__(self, memo: Any) -> ModuleAttachment:
        raise WeightsError(
            f"the model reads {self.name!r}, and a copy of it would call the same passes. Copy it before "
            "weights.attach, or after close() of the attachment"
        )

    def close(self) -> None:
        """Leave; the model keeps its weights, and its own `forward` and `generate`."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._subscriber.close()

    @contextlib.contextmanager
    def _nobody_answers(self, deadline: Deadline) -> Iterator[None]:
        """Let the answers end, and no other begin."""
        with self._changed:
            self._closed = True
            for answer in self._answers if self._pause == "abort" else ():
                answer.aborted = True
            try:
                if not self._changed.wait_for(lambda: not self._answers, deadline.left_s()):
                    raise WeightsTimeoutError(
                        f"{len(self._answers)} answers did not end within {deadline.timeout_s} s, so {self.name!r} was "
                        "not updated. Raise the timeout, or attach with pause='keep'"
                    )
                yield
            finally:
                self._closed = False
                self._changed.notify_all()

    def _pass(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a model's own `forward` while no weights are exchanged."""
        # Reentrant: a pass may call the module again, as for a backward pass with checkpoints.
        with self._step:
            if self._undo:  # else it was closed, and another library has wrapped this since
                self._subscriber.check(initial=self._initial)
            answer = getattr(self._current, "answer", None)
            if answer is not None:
                answer.version = self.version
            return forward(*args, **kwargs)

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a model's own `generate`, and note the version of each token."""
        from transformers import StoppingCriteriaList

        with self.answer() as answer:

            def after_token(tokens: Any, *_: Any, **__: Any) -> Any:  # each row: whether it ends here
                answer.note_token()
                return tokens.new_full((tokens.shape[0],), answer.aborted, dtype=bool)

            # The criteria of the user first: they may hold the answer, and then it has a further token.
            kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or ()), after_token])
            output = generate(*args, **kwargs)
        output.weight_versions = answer.weight_versions
        return output


def _load(model: Any, tensors: Any) -> Module:
    """Load tensors of the names of a Hugging Face folder into a new model of the same kind."""
    loaded: Module = type(model).from_pretrained(None, config=model.config, state_dict=dict(tensors), dtype=model.dtype)
    return loaded
