"""Calls of a queue's actor, with deadlines. A call whose answer is lost is taken back. Called by `handle`, `reader`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import ray

from raylane.core.deadline import Deadline
from raylane.errors import QueueError, QueueLostError, QueueTimeoutError

MARGIN_S = 5.0
"""Seconds that a caller waits beyond the deadline for the actor's own error, which says more."""
_TAKEN_BACK_BY = {"take": ("withdraw", 2), "join": ("leave", 1)}
"""Method that takes a call back whose answer is lost, and the number of the call's arguments that it needs.

Other calls wait on behalf of a thread that does not end before them (`commit`), or change nothing by a second time.
"""


def _take_back(actor: Any, method: str, args: tuple[Any, ...]) -> None:
    if method in _TAKEN_BACK_BY:
        undo, count = _TAKEN_BACK_BY[method]
        getattr(actor, undo).remote(*args[:count])


def limit_s(deadline: Deadline) -> float | None:
    """Return the seconds to wait for the answer to a call within a deadline."""
    remaining_s = deadline.left_s()
    return None if remaining_s is None else remaining_s + MARGIN_S


@contextlib.contextmanager
def _translating(actor: Any, method: str, args: tuple[Any, ...], deadline: Deadline) -> Iterator[None]:
    """Raise the queue's own errors for those of a call of its actor, and take the call back if there is no answer."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, QueueError):
            raise error.cause from None
        raise QueueError(f"the queue's actor failed in {method}: {error}. This is a defect of raylane") from error
    except ray.exceptions.RayActorError as error:
        raise QueueLostError(f"the actor of the queue has ended: {error}. Make a new queue") from error
    except (ray.exceptions.GetTimeoutError, TimeoutError) as error:
        _take_back(actor, method, args)
        raise QueueTimeoutError(f"the queue did not answer within {deadline.timeout_s} s. Raise the timeout") from error
    except BaseException:  # Ctrl-C, or a cancellation
        _take_back(actor, method, args)
        raise


def call(actor: Any, method: str, *args: Any, deadline: Deadline) -> Any:
    """Return the answer of a method of a queue's actor, or raise its error."""
    with _translating(actor, method, args, deadline):
        return ray.get(getattr(actor, method).remote(*args), timeout=limit_s(deadline))


async def call_async(actor: Any, method: str, *args: Any, deadline: Deadline) -> Any:
    """Return the answer as `call` does, without a thread that waits: a cancellation ends the wait at once."""
    with _translating(actor, method, args, deadline):
        return await asyncio.wait_for(getattr(actor, method).remote(*args), limit_s(deadline))
