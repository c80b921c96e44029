"""Futures of worker groups: results of plain Ray calls, and translation of Ray's errors.

Used by `WorkerGroup`. A gather ends at the first failure instead of waiting for the other workers: these may hang
because of the failure, for example in a collective with a dead member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from raylane.core.deadline import Deadline
from raylane.errors import WorkerCallError, WorkerGroupError, WorkerLostError

if TYPE_CHECKING:
    from ray import ObjectRef

    from raylane.workers.dispatch import DispatchPlan

_CAUSE_GRACE_S = 2.0
"""Seconds to wait, after a method raised, for the news of a dead worker, which is then reported as the cause.

A peer's "connection closed" arrives before Ray's notice of the death that closed the connection (measured: 0.03 s on a
quiet machine, 0.6 s on a busy one).
"""


class PendingCalls(Protocol):
    """Calls under way: by plain Ray calls (`RefCalls`) or through a compiled graph (`compiled.GraphCalls`)."""

    def done(self) -> bool:
        """Return True if every called worker has answered or failed. Does not wait."""
        ...

    def values(self, label: str, plan: DispatchPlan, deadline: Deadline) -> list[Any] | None:
        """Wait for all called workers, and return the results of the returning ones by rank; None after the deadline.

        WorkerLostError if a worker died, WorkerCallError if a method raised; both at once, without waiting for others.
        """
        ...

    def late_ranks(self, plan: DispatchPlan) -> list[int]:
        """Return the ranks that have not answered. Does not wait."""
        ...


@dataclass
class Failures:
    """Failures of a group's calls that the driver has read."""

    count: int = 0
    last: str = ""
    """Label of the call that failed last."""
    is_past: bool = False
    """True since the group was formed again: what fails of earlier calls is no failure of the present ones."""


@dataclass(eq=False)
class GroupFuture:
    """A call that was sent to some workers. `future.results()` waits for its results.

    The results are kept as long as the future exists, so they can be requested again, also after a timeout.
    """

    label: str
    """Name of the call in messages, as ClassName.method."""
    plan: DispatchPlan
    calls: PendingCalls
    failures: Failures
    """Failures of the group, to which this future adds its own when it is read for the first time."""
    generation: int = 0
    """Number of failures that had been read when the call was sent."""
    on_loss: Callable[[], None] | None = None
    """Called when a worker has died, once: others may wait for it in a collective."""
    _counted: bool = False

    @property
    def called_ranks(self) -> tuple[int, ...]:
        """Ranks of the called workers, ascending."""
        return self.plan.called_ranks

    @property
    def returning_ranks(self) -> tuple[int, ...]:
        """Ranks of the workers that send a result, ascending."""
        return self.plan.returning_ranks

    def done(self) -> bool:
        """Return True if every called worker has answered or failed. Does not wait."""
        return self.calls.done()

    def late_ranks(self) -> list[int]:
        """Return the ranks of called workers that have not answered. Does not wait."""
        return self.calls.late_ranks(self.plan)

    def results(self, timeout: float | None = None) -> list[Any]:
        """Wait for all called workers, and return the results of the returning ones by ascending rank.

        Raises WorkerLostError if a worker died (within about a second of its death), and WorkerCallError if a method
        raised (the remote traceback is the cause) or `timeout` seconds passed (None: no limit).
        """
        try:
            values = self.calls.values(self.label, self.plan, Deadline(timeout))
        except WorkerGroupError as error:
            if not self._counted:
                self._counted = True
                self.failures.count += 1
                self.failures.last = self.label
                if isinstance(error, WorkerLostError) and self.on_loss is not None:
                    self.on_loss()
            raise
        if values is None:
            late = self.late_ranks()
            raise WorkerCallError(
                f"{self.label}: ranks {late} have not answered within {timeout} s. Nothing is lost: ask again, "
                "or shut the group down",
                ranks=late,
                timeout_s=timeout,
            )
        return values


class RefCalls:
    """Plain Ray calls under way: one ref for each call of the plan, in its order."""

    def __init__(self, refs: Sequence[ObjectRef]) -> None:
        self._refs = tuple(refs)

    def done(self) -> bool:
        """Return True if every called worker has answered or failed. Does not wait."""
        return not self._late()

    def late_ranks(self, plan: DispatchPlan) -> list[int]:
        """Return the ranks that have not answered. Does not wait."""
        late = set(self._late())
        return [rank for rank, ref in zip(plan.called_ranks, self._refs, strict=True) if ref in late]

    def _late(self) -> list[ObjectRef]:
        # fetch_local=False: the question must not transfer results to this node.
        _, late = ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0, fetch_local=False)
        return list(late)

    def values(self, label: str, plan: DispatchPlan, deadline: Deadline) -> list[Any] | None:
        """Wait for all called workers, and return the results of the returning ones by rank; None after the deadline.

        WorkerLostError if a worker died, WorkerCallError if a method raised.
        """
        ranks = dict(zip(self._refs, plan.called_ranks, strict=True))
        values: dict[int, Any] = {}
        pending = list(self._refs)
        while pending:
            # Wait for any single result: a failure is then seen at once, whatever the other workers do.
            done, pending = ray.wait(pending, num_returns=1, timeout=deadline.left_s())
            if not done:
                return None
            for ref in done:
                try:
                    values[ranks[ref]] = ray.get(ref)
                except RayError as error:
                    raise _cause(label, ranks, ref, error, pending, deadline) from error
        return [values[rank] for rank in plan.returning_ranks]


def _cause(
    label: str, ranks: dict[ObjectRef, int], ref: ObjectRef, error: RayError, pending: list[ObjectRef], limit: Deadline
) -> WorkerGroupError:
    """Return the error to raise: the death of a worker if one follows soon, else the first failure itself."""
    # Also read the results of the others meanwhile, because each of them may carry the death of a worker.
    first = translated(error, ranks[ref], label)
    remaining_s = limit.left_s()
    grace = Deadline(_CAUSE_GRACE_S if remaining_s is None else min(_CAUSE_GRACE_S, remaining_s))
    while pending and not isinstance(first, WorkerLostError):
        done, pending = ray.wait(pending, num_returns=1, timeout=grace.left_s())
        if not done:
            break
        try:
            ray.get(done[0])
        except RayError as other:
            cause = translated(other, ranks[done[0]], label)
            if isinstance(cause, WorkerLostError):
                return cause
    return first


def translated(error: RayError, rank: int, label: str) -> WorkerGroupError:
    """Return Ray's error as an error of raylane that names rank and call, with the remote traceback in its text."""
    if isinstance(error, WorkerGroupError):
        return error
    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        # Raised by WorkerHost itself, not by a group that the worker uses: the process was restarted, or refuses calls.
        if isinstance(cause, WorkerGroupError) and "from_host" in cause.fields:
            return cause
        kind = f"{type(cause).__name__}: {cause}" if cause is not None else "an exception"
        text = str(getattr(error, "traceback_str", error)).strip()
        return WorkerCallError(f"{label} raised on rank {rank}: {kind}\n{text}", rank=rank, call=label)
    if isinstance(error, RayActorError):
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return lost(rank, label, lines[0])
    return WorkerCallError(
        f"{label} got no result from rank {rank}: {type(error).__name__}: {error}", rank=rank, call=label
    )


def lost(rank: int | None, label: str, why: str) -> WorkerLostError:
    """Return the error for a worker that has died (rank None: one of those called); `why` is one sentence."""
    reason = f"{'a worker' if rank is None else f'rank {rank}'} died during {label}, or before it: {why.rstrip('.')}."
    return WorkerLostError(
        f"{reason} The other workers are still alive. Call recover(), or shut the group down and start a new one; then "
        "load the last checkpoint",
        rank=rank,
        call=label,
        reason=reason,
    )
