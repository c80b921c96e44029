"""The one future type of a worker group, and how its results are gathered and its failures told.

Called by `WorkerGroup`. A gather ends at the first failure instead of waiting for workers that may hang because of it,
e.g. in a collective whose other member is gone.
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

    from raylane.workers.dispatch import Plan

__all__ = ["GroupFuture", "translated"]

_CAUSE_GRACE_S = 2.0
"""After a method raised: how long to look for a worker that died, which is then the cause worth telling. A peer's
"connection closed" arrives before Ray's notice of the death that closed it
(measured: 0.03 s on a quiet machine, 0.6 s on a busy one)."""


@dataclass(frozen=True)
class GroupFuture:
    """A call on some workers, sent and not waited for. `group.get_all_worker_results(future)` waits.

    Results stay with Ray as long as the future is kept: it can be asked again, also after a timeout.
    """

    label: str
    """ClassName.method, for messages."""
    plan: Plan
    refs: tuple[ObjectRef, ...]
    """One per call of the plan, in its order; those of calls that do not return hold None."""

    @property
    def called_ranks(self) -> tuple[int, ...]:
        return self.plan.called_ranks

    @property
    def returning_ranks(self) -> tuple[int, ...]:
        return self.plan.returning_ranks

    def done(self) -> bool:
        """Whether every called worker has answered or failed. Does not wait."""
        ready, _ = ray.wait(list(self.refs), num_returns=len(self.refs), timeout=0, fetch_local=False)
        return len(ready) == len(self.refs)

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """The results of the returning workers, by ascending rank; waits for all called ones.

        Raises WorkerLostError (a worker died; told within a second or so of its death), WorkerCallError (a method
        raised, its remote traceback is the cause; or `timeout_s` seconds passed).
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        ranks = dict(zip(self.refs, self.plan.called_ranks, strict=True))
        values: dict[int, Any] = {}
        pending = list(self.refs)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=_left(deadline))
            if not done:
                raise self._late(timeout_s, [ranks[ref] for ref in pending])
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

    def _late(self, timeout_s: float | None, ranks: list[int]) -> WorkerCallError:
        return WorkerCallError(
            f"{self.label}: ranks {ranks} have not answered within {timeout_s} s; nothing is lost, ask again or "
            "shut the group down",
            ranks=ranks,
            timeout_s=timeout_s,
        )


def translated(error: RayError, rank: int, label: str) -> WorkerGroupError:
    """Ray's error as ours: who, what, and the remote traceback in the text."""
    if isinstance(error, WorkerGroupError):
        return error
    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, WorkerLostError):
            return cause
        kind = f"{type(cause).__name__}: {cause}" if cause is not None else "an exception"
        return WorkerCallError(f"{label} raised on rank {rank}: {kind}\n{_traceback(error)}", rank=rank, call=label)
    if isinstance(error, RayActorError):
        reason = f"rank {rank} died during {label}, or before it: {_first_line(error)}"
        return WorkerLostError(
            f"{reason} The other workers are still there; shut the group down and start a new one from the last "
            "checkpoint",
            rank=rank,
            call=label,
            reason=reason,
        )
    return WorkerCallError(
        f"{label} got no result from rank {rank}: {type(error).__name__}: {error}", rank=rank, call=label
    )


def _traceback(error: RayTaskError) -> str:
    return str(getattr(error, "traceback_str", error)).strip()


def _first_line(error: RayError) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") + "." if lines else type(error).__name__ + "."


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
