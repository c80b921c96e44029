"""Futures of worker groups: gathering of results, and translation of Ray's errors.

Used by `WorkerGroup`. A gather ends at the first failure instead of waiting for the other workers: these may hang
because of the failure, for example in a collective with a dead member.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from raylane.errors import WorkerCallError, WorkerGroupError, WorkerLostError

if TYPE_CHECKING:
    from ray import ObjectRef

    from raylane.workers.dispatch import DispatchPlan

__all__ = ["GroupFuture", "translated"]

_CAUSE_GRACE_S = 2.0
"""Seconds to wait, after a method raised, for the news of a dead worker, which is then reported as the cause.

A peer's "connection closed" arrives before Ray's notice of the death that closed the connection (measured: 0.03 s on a
quiet machine, 0.6 s on a busy one).
"""


@dataclass(frozen=True)
class GroupFuture:
    """A call that was sent to some workers. `group.get_all_worker_results(future)` waits for its results.

    Ray keeps the results as long as the future exists, so they can be requested again, also after a timeout.
    """

    label: str
    """Name of the call in messages, as ClassName.method."""
    plan: DispatchPlan
    refs: tuple[ObjectRef, ...]
    """One ref for each call of the plan, in its order; a call that returns no result has None as its value."""

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
        # fetch_local=False: the question must not transfer results to this node.
        ready, _ = ray.wait(list(self.refs), num_returns=len(self.refs), timeout=0, fetch_local=False)
        return len(ready) == len(self.refs)

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for all called workers, and return the results of the returning ones by ascending rank.

        Raises WorkerLostError if a worker died (within about a second of its death), and WorkerCallError if a method
        raised (the remote traceback is the cause) or `timeout_s` seconds passed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ranks = dict(zip(self.refs, self.plan.called_ranks, strict=True))
        values: dict[int, Any] = {}
        pending = list(self.refs)
        while pending:
            # Wait for any single result: a failure is then seen at once, whatever the other workers do.
            done, pending = ray.wait(pending, num_returns=1, timeout=_left(deadline))
            if not done:
                late = [ranks[ref] for ref in pending]
                raise WorkerCallError(
                    f"{self.label}: ranks {late} have not answered within {timeout_s} s. Nothing is lost: ask again, "
                    "or shut the group down",
                    ranks=late,
                    timeout_s=timeout_s,
                )
            for ref in done:
                try:
                    values[ranks[ref]] = ray.get(ref)
                except RayError as error:
                    raise self._cause(ranks, ref, error, pending, deadline) from error
        return [values[rank] for rank in self.returning_ranks]

    def _cause(
        self,
        ranks: dict[ObjectRef, int],
        ref: ObjectRef,
        error: RayError,
        pending: list[ObjectRef],
        deadline: float | None,
    ) -> WorkerGroupError:
        """Return the error to raise: the death of a worker if one follows soon, else the first failure itself."""
        # Also read the results of the others meanwhile, because each of them may carry the death of a worker.
        first = translated(error, ranks[ref], self.label)
        grace = min(time.monotonic() + _CAUSE_GRACE_S, deadline or float("inf"))
        while pending and not isinstance(first, WorkerLostError):
            done, pending = ray.wait(pending, num_returns=1, timeout=_left(grace))
            if not done:
                break
            try:
                ray.get(done[0])
            except RayError as other:
                found = translated(other, ranks[done[0]], self.label)
                if isinstance(found, WorkerLostError):
                    return found
        return first


def translated(error: RayError, rank: int, label: str) -> WorkerGroupError:
    """Return Ray's error as an error of raylane that names rank and call, with the remote traceback in its text."""
    if isinstance(error, WorkerGroupError):
        return error
    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, WorkerLostError):
            return cause  # raised by WorkerHost in a restarted process, which has lost its worker
        kind = f"{type(cause).__name__}: {cause}" if cause is not None else "an exception"
        text = str(getattr(error, "traceback_str", error)).strip()
        return WorkerCallError(f"{label} raised on rank {rank}: {kind}\n{text}", rank=rank, call=label)
    if isinstance(error, RayActorError):
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = f"rank {rank} died during {label}, or before it: {lines[0].rstrip('.')}."
        return WorkerLostError(
            f"{reason} The other workers are still alive. Shut the group down and start a new one from the last "
            "checkpoint",
            rank=rank,
            call=label,
            reason=reason,
        )
    return WorkerCallError(
        f"{label} got no result from rank {rank}: {type(error).__name__}: {error}", rank=rank, call=label
    )


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
