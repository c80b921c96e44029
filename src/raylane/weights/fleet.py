"""`weights.Fleet` and `weights.FleetReader`: readers that switch from one version to another together, or not at all.

    driver                            reader, at each boundary of a step
    fleet = Fleet("policy")           reader = FleetReader([subscriber])
    fleet.switch(20)                  versions = reader.step()      {"policy": 20}
    fleet.rollback()                  ... one step with these versions ...

The protocol is that of `state.fleet`.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from raylane.core.deadline import Deadline
from raylane.core.listing import listed
from raylane.errors import WeightsError, WeightsSwitchError, WeightsTimeoutError, WeightsVersionError
from raylane.weights.engines.module import ModuleAttachment
from raylane.weights.engines.vllm_engine import VllmAttachment
from raylane.weights.engines.vllm_fleet import EngineReader
from raylane.weights.service.client import CatalogueClient
from raylane.weights.service.fleets import ANSWER_S
from raylane.weights.state.fleet import CONTACT_S, NO_TARGET, Order, Report, Target
from raylane.weights.state.options import check_name, whole_number
from raylane.weights.state.readers import ReaderKey
from raylane.weights.subscriber import Subscriber

PAUSE_S = 0.5
"""Seconds after which a reader that was not answered reports again."""


def _names(names: str | Iterable[str]) -> tuple[str, ...]:
    ordered = (names,) if isinstance(names, str) else tuple(sorted(names))
    for name in ordered:
        check_name(name)
    if not ordered or len(set(ordered)) < len(ordered):
        raise ValueError(f"a fleet has one name of weights or several different ones, got {names!r}")
    return ordered


class Fleet:
    """The readers of one or several names, which switch as one. Made by whoever decides what they serve."""

    def __init__(self, names: str | Iterable[str], *, detached: bool = False) -> None:
        """Find the fleet of these names, which all its readers read: those of `FleetReader`.

        ValueError if a name comes twice. WeightsError if this process is not connected to Ray.
        """
        self.names = _names(names)
        self._catalogue = CatalogueClient(detached=detached)

    def switch(
        self, versions: int | Mapping[str, int], *, readers: int = 1, timeout: float | None = None
    ) -> dict[str, int]:
        """Let all readers that have joined switch to these versions, or none; return the versions.

        Waits until `readers` readers have joined, until all have the versions on their hosts, and then until each has
        come to the boundary of its step. The versions, and those before, are held until two switches later.

        Args:
            versions: Number of the version; of several names a dict with the number of each.
            readers: Number of readers that must have joined.
            timeout: Seconds for all of it; None means RAYLANE_TIMEOUT_S (60 s).

        Raises:
            WeightsSwitchError: A reader has ended, could not prepare the versions or did not in time. None switches.
            WeightsVersionError: A version is gone. None switches.
            WeightsTimeoutError: Too few readers have joined, and none switches; or the switch is decided, and the
                readers that the message names switch at the end of their step.
        """
        by_name = {self.names[0]: versions} if not isinstance(versions, Mapping) else dict(versions)
        if sorted(by_name) != list(self.names):
            raise ValueError(f"a switch needs a version of each of {', '.join(self.names)}, got {versions!r}")
        numbers = {name: whole_number("version", number, 1) for name, number in by_name.items()}
        return self._switch(numbers, whole_number("readers", readers, 0), timeout)

    def rollback(self, *, timeout: float | None = None) -> dict[str, int]:
        """Switch to the versions before the last switch, as `switch` does; return them.

        WeightsSwitchError if there was no switch before; a second rollback goes forward again. Other errors as those
        of `switch`.
        """
        return self._switch(None, 0, timeout)

    def state(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return `versions` (by name, {} before the first switch), `before`, and `readers`: what each serves."""
        deadline = Deadline.of_call(timeout)
        committed, before, reports = self._catalogue.call("fleet", "state", self.names, deadline=deadline)
        return {
            "versions": committed.numbers,
            "before": None if before is None else before.numbers,
            "readers": {label: report.serving.numbers for label, report in reports.items()},
        }

    def _switch(self, versions: dict[str, int] | None, readers: int, timeout: float | None) -> dict[str, int]:
        deadline = Deadline.of_call(timeout)
        arguments = "switch", self.names, versions, readers, deadline.left_s()
        target: Target = self._catalogue.call("fleet", *arguments, deadline=deadline)
        return target.numbers


class FleetReader:
    """A member of a fleet: the readers of one process, one for each name. Switches at `step`, and nowhere else.

    A thread prepares versions beside the steps; those of an `LLM` of vLLM are prepared by `step` or `idle`. Do not
    update the readers otherwise. Where several threads call `step`, the first one switches, so their steps must not
    overlap.

    An `AsyncLLM` of vLLM needs no `step`: it switches between two steps of its own, and refuses requests with
    WeightsSwitchError where `step` would raise it. Requests under way go on as the attachment's `pause` says.
    """

    def __init__(
        self,
        readers: Sequence[Subscriber | ModuleAttachment | VllmAttachment],
        *,
        detached: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Join the fleet of the names of these readers. Does not wait for a switch.

        Args:
            readers: `Subscriber` or attachments, of different names.
            detached: As for the readers.
            timeout: Seconds in which `step` must be answered where it has to ask; None means RAYLANE_TIMEOUT_S (60 s).

        Raises:
            TypeError: A reader is none of these, such as an attachment of LoRA adapters.
            RuntimeError: The engine is an `AsyncLLM`, and this is not called in a coroutine of its event loop.
        """
        self._taking = threading.Lock()  # held while versions are taken
        self._changed = threading.Condition()
        """Guards what follows, and is notified when an order has come."""
        self._timeout = timeout
        self._catalogue = CatalogueClient(detached=detached)
        self._engines: list[EngineReader] = []
        self._subscribers: dict[str, Subscriber | EngineReader] = {}
        self._readers: dict[str, Subscriber | ModuleAttachment | EngineReader] = {}
        for reader in readers:
            if isinstance(reader, VllmAttachment):
                self._engines.append(EngineReader(reader, self._catalogue, self._notify))
                self._readers[reader.name] = self._subscribers[reader.name] = self._engines[-1]
                continue
            if not isinstance(reader, Subscriber | ModuleAttachment):
                raise TypeError(
                    "a reader of a fleet is a Subscriber, or an attachment of a torch module or of vLLM without lora, "
                    f"got {type(reader).__name__}"
                )
            self._readers[reader.name] = reader
            self._subscribers[reader.name] = reader if isinstance(reader, Subscriber) else reader.subscriber
        self.names = _names([reader.name for reader in readers])
        self._is_async = any(map(_is_async, self._subscribers.values()))
        """True if this reader switches on its own thread, beside the steps of an `AsyncLLM`."""
        others = [name for name, each in self._subscribers.items() if not _is_async(each)]
        if self._is_async and others:
            raise TypeError(
                f"an AsyncLLM switches by itself, and the readers of {listed(others)} at step(): make a FleetReader of "
                "each kind"
            )
        self._key = self._subscribers[self.names[0]].key
        self._order: Order | None = None
        self._answered_s = float("-inf")
        """Time at which the report was sent that was answered last."""
        self._serving = self._ready = NO_TARGET
        self._failed: tuple[int, str] = (0, "")
        self._turn = time.time_ns()
        self._wasted = False
        """True if what was prepared is to be let go."""
        self._working = False
        """True while a thread prepares versions, or switches an `AsyncLLM`: the other one goes on to report."""
        self._closed = False
        own_keys = [engine.key for engine in self._engines]
        self._leave = weakref.finalize(self, _leave, self._catalogue, self.names, self._key, own_keys)
        self._error: Exception | None = None
        self._take_error: Exception | None = None
        """Why an `AsyncLLM` could not switch."""
        self._thread = threading.Thread(target=_run, args=(weakref.ref(self),), name="raylane-fleet", daemon=True)
        self._gate = functools.partial(_check, weakref.ref(self))
        """Check that the engines make before they accept a request."""
        for engine in self._engines:
            engine.attachment.check_fleet = self._gate
        self._thread.start()

    @property
    def versions(self) -> dict[str, int]:
        """Versions that this reader serves, by name; {} before the first switch."""
        return self._serving.numbers

    def step(self) -> dict[str, int]:
        """Say that a step begins; return the versions with which it computes.

        Switches here if a switch was decided since the last step. Takes microseconds otherwise; waits only after the
        fleet was not heard of for seconds, as after a stop of the process.

        Raises:
            WeightsSwitchError: The fleet does not answer, so that others may serve other versions by now: this reader
                must not serve. Call again.
            WeightsError: A version could not be taken, or the reader was closed.
            TypeError: The engine is an `AsyncLLM`, which switches by itself.
        """
        if self._is_async:
            raise TypeError("an AsyncLLM switches by itself: ask `versions` what it serves")
        self._run_jobs()
        return self._step(Deadline.of_call(self._timeout))

    def idle(self, timeout: float) -> dict[str, int]:
        """Wait so many seconds between two steps, and switch meanwhile; return the versions as `step`.

        Returns earlier after a switch. A reader that waits elsewhere holds up each switch until its next step.
        """
        before, deadline = self.step(), Deadline(timeout)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._behind() or self._closed or self._has_jobs(), deadline.left_s())
            if not self._has_jobs():
                break
            self._run_jobs()
        return before if not self._behind() else self._step(Deadline.of_call(self._timeout))

    def close(self) -> None:
        """Leave the fleet: nobody waits for this reader. The readers stay open, with what they have."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        for engine in self._engines:
            engine.close(self._gate)
        self._leave()

    # Parts of the above

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _has_jobs(self) -> bool:
        return any(engine.has_jobs() for engine in self._engines)

    def _run_jobs(self) -> None:
        for engine in self._engines:
            engine.run_jobs()

    def _check(self) -> None:
        """Raise WeightsSwitchError if an engine must not accept requests now."""
        error = self._error or self._take_error
        if not self._may_serve() or (self._behind() and self._take_error is not None):
            cause = f" ({error})" if error else ""
            raise self._silent(f"in time{cause}")

    def _silent(self, when: str) -> WeightsSwitchError:
        return WeightsSwitchError(
            f"the fleet of {', '.join(self.names)} did not answer {when}: others may serve other versions by now. "
            "Serve nothing, and try again"
        )

    def _behind(self) -> bool:
        order = self._order
        return order is not None and order.committed.number > self._serving.number

    def _may_serve(self) -> bool:
        order = self._order
        return order is not None and not order.undecided and time.monotonic() - self._answered_s < CONTACT_S

    def _step(self, deadline: Deadline) -> dict[str, int]:
        with self._changed:
            if not self._may_serve():
                self._changed.wait_for(lambda: self._may_serve() or self._closed, deadline.left_s())
            if self._closed:
                raise WeightsError("the reader of the fleet was closed. Make a new one")
            if not self._may_serve():
                cause = f" ({self._error})" if self._error else ""
                raise self._silent(f"within {deadline.timeout_s} s{cause}")
            assert self._order is not None
            target = self._order.committed if self._behind() else None
        if target is not None:
            self._take(target, deadline)
        return self.versions

    def _take(self, target: Target, deadline: Deadline) -> None:
        """Take the versions of a target, which were prefetched unless this reader has joined since."""
        with self._taking:
            if target.number > self._serving.number:
                self._take_alone(target, deadline)

    def _take_alone(self, target: Target, deadline: Deadline) -> None:
        for name, version in target.versions:
            number = version.number
            try:
                self._readers[name].update(version=number, timeout=deadline.left_s())
            except (WeightsVersionError, WeightsTimeoutError) as error:
                raise _not_taken(name, number, str(error)) from error
            if self._subscribers[name].taken != version:
                raise _not_taken(name, number, "there is another one of this number")
        with self._changed:
            self._serving = self._ready = target
            self._take_error = None
            report = self._report()
        self._catalogue.tell("fleet", "tell", self.names, self._key, report)

    def _report(self) -> Report:
        self._turn += 1
        return Report(self._turn, self._serving, self._ready, *self._failed)

    def _ask(self) -> None:
        """Report, wait for an order, and prepare what it proposes. Called on the thread of the reader."""
        with self._changed:
            report, seen = self._report(), self._order
        sent_s = time.monotonic()
        arguments = "report", self.names, self._key, report, seen
        order: Order = self._catalogue.call("fleet", *arguments, deadline=Deadline(CONTACT_S + ANSWER_S))
        with self._changed:
            self._order, self._answered_s, self._error = order, sent_s, None
            if self._ready not in (self._serving, order.committed, order.proposed) and not order.undecided:
                self._ready, self._wasted = self._serving, True
            self._changed.notify_all()
            begins = not self._working and self._next_work() is not None
            self._working = self._working or begins
        if begins:
            threading.Thread(target=self._work, name="raylane-fleet-work", daemon=True).start()

    def _next_work(self) -> Callable[[], None] | None:
        """Return what is to be done beside the reports; None if there is nothing. Call it with `_changed`."""
        order = self._order
        if order is None or self._closed:
            return None
        proposed = order.proposed
        if self._wasted:
            return self._forget_prefetched
        if proposed is not None and self._ready != proposed and self._failed[0] != proposed.number:
            return functools.partial(self._prepare, proposed, order.timeout_s)
        if self._is_async and self._behind() and self._may_serve():
            return functools.partial(self._take, order.committed, Deadline.of_call(self._timeout))
        return None

    def _work(self) -> None:
        """Do what is to be done, until there is nothing or it fails: then the next answer begins it again."""
        while True:
            with self._changed:
                work = self._next_work()
                self._working = work is not None
            if work is None:
                return
            try:
                work()
            except Exception as error:
                with self._changed:
                    self._take_error, self._working = error, False
                return

    def _prepare(self, target: Target, timeout_s: float) -> None:
        deadline, failed = Deadline(timeout_s), (0, "")
        try:
            for name, version in target.versions:
                subscriber = self._subscribers[name]
                subscriber.fetch(version.number, deadline, exact=True)
                if (subscriber.pending or subscriber.taken) != version:
                    raise _not_taken(name, version.number, "there is another one of this number")
        except Exception as error:  # also of Ray or of the system: whatever it is, the fleet must learn of it
            failed = target.number, f"{type(error).__name__}: {error}"
        if failed[0]:  # what others have prefetched would hold their trainers up
            self._forget_prefetched()
        with self._changed:
            self._failed = failed
            if not failed[0]:
                self._ready = target
            report = self._report()
        self._catalogue.tell("fleet", "tell", self.names, self._key, report)

    def _forget_prefetched(self) -> None:
        with self._changed:
            self._wasted = False
        for subscriber in self._subscribers.values():
            if not subscriber.is_closed:
                subscriber.forget_prefetched()


def _leave(catalogue: CatalogueClient, names: tuple[str, ...], key: ReaderKey, own_keys: list[ReaderKey]) -> None:
    catalogue.tell("fleet", "leave", names, key, time.time_ns())
    for own in own_keys:  # those of engines, which nobody else closes
        catalogue.tell("leave", own)


def _not_taken(name: str, number: int, cause: str) -> WeightsSwitchError:
    return WeightsSwitchError(
        f"the fleet serves version {number} of {name!r}, which this reader cannot take: {cause}. Let it switch to one "
        "that is there: Fleet.switch(version)"
    )


def _is_async(reader: Subscriber | EngineReader) -> bool:
    return isinstance(reader, EngineReader) and reader.attachment.is_async


def _check(reference: weakref.ref[FleetReader]) -> None:
    """Let a reader that is not garbage say whether its engine may accept a request."""
    reader = reference()
    if reader is not None:
        reader._check()


def _run(reference: weakref.ref[FleetReader]) -> None:
    """Report for a reader until it is closed or garbage."""
    while True:
        reader = reference()
        if reader is None:
            return
        if reader._closed or any(subscriber.is_closed for subscriber in reader._subscribers.values()):
            reader.close()
            reader._forget_prefetched()
            return
        try:
            reader._ask()
        except Exception as error:
            with reader._changed:
                reader._error = error
                reader._changed.wait_for(functools.partial(getattr, reader, "_closed"), PAUSE_S)
        del reader
