"""Every error that raylane raises on its own account.

RaylaneError
├── TransportError (also ray.exceptions.RayError: see below)
│   ├── SourceLostError            the process that held the tensors is gone
│   ├── TransferTimeoutError       it took longer than the deadline (also a TimeoutError)
│   ├── TransportUnavailableError  no way, or not the way asked for, between these two places
│   ├── TensorFreedError           the source has already let go of the value
│   ├── TensorMutatedError         a published tensor was written to before it was read
│   └── ProtocolError              the other end broke the protocol, or is not one of ours
├── GraphError (also ray.exceptions.RayError)
│   ├── GraphPlanError             these nodes make no graph (also a ValueError)
│   ├── GraphDeadlockError         the graph could block itself; the cycle is named (also a ValueError)
│   ├── GraphValueError            a value cannot travel: it cannot be pickled, or is too large
│   ├── GraphTimeoutError          it took longer than the deadline (also a TimeoutError)
│   ├── GraphFullError             `execute_nowait` while `max_inflight` executions are under way
│   ├── GraphClosedError           the graph was torn down, or broke; compile it again
│   └── GraphActorDiedError        an actor of the graph died, and the graph with it
├── WorkerGroupError
│   ├── WorkerLostError            a worker of a group died
│   └── WorkerCallError            a worker's method raised, or did not answer in time
├── ConfigError (also a ValueError)   the configuration cannot be used as written
├── DataError (also a ValueError)     the training data cannot be used as it is
└── CheckpointError                   a checkpoint cannot be written, read or trusted
    └── CheckpointDamagedError         its files are incomplete or altered; an earlier one may be whole

The caller's mistakes in plain arguments are ValueError and TypeError; an AssertionError is our own bug.

Transport errors derive from RayError for one reason: the function that unpickles a ticket *returns* such an error
instead of raising it, and Ray then raises that very object from ray.get, from await and inside the consumer, with no
traceback of its own (raising there would give an untyped RaySystemError). Who uses this module: everybody.
"""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayError

__all__ = [
    "CheckpointDamagedError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "GraphActorDiedError",
    "GraphClosedError",
    "GraphDeadlockError",
    "GraphError",
    "GraphFullError",
    "GraphPlanError",
    "GraphTimeoutError",
    "GraphValueError",
    "ProtocolError",
    "RaylaneError",
    "SourceLostError",
    "TensorFreedError",
    "TensorMutatedError",
    "TransferTimeoutError",
    "TransportError",
    "TransportUnavailableError",
    "WorkerCallError",
    "WorkerGroupError",
    "WorkerLostError",
]


class RaylaneError(Exception):
    """Root of the tree. `fields` holds what the message names (actor, rank, step, key ...), and survives pickling."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.fields)


def _rebuild(cls: type[RaylaneError], message: str, fields: dict[str, Any]) -> RaylaneError:
    return cls(message, **fields)


class TransportError(RaylaneError, RayError):  # type: ignore[misc]  # Ray gives mypy no types
    """A value could not be moved."""


class SourceLostError(TransportError):
    """The process that held the tensors died, was killed, or broke the connection half way."""


class TransferTimeoutError(TransportError, TimeoutError):
    """A transfer or a wait passed its deadline. The source may still be alive; a later attempt can succeed."""


class TransportUnavailableError(TransportError):
    """The transport asked for, or any at all, cannot connect these two places; the reason is in the message."""


class TensorFreedError(TransportError):
    """The source has released the value: every ref was gone, or the process that owned the ref died."""


class TensorMutatedError(TransportError):
    """A tensor was written to in place between its publication and this read, under `on_mutation="error"`."""


class ProtocolError(TransportError):
    """The other end sent something that is not our protocol, or could not prove that it belongs to this cluster."""


class GraphError(RaylaneError, RayError):  # type: ignore[misc]  # Ray gives mypy no types
    """A compiled graph could not be made or run. What a method raises is not one of these: it arrives as Ray's own
    RayTaskError, which is also an instance of the class that the method raised."""


class GraphPlanError(GraphError, ValueError):
    """These nodes, or these options, make no graph that can run; the message names the node."""


class GraphDeadlockError(GraphPlanError):
    """In this order of calls the graph would wait for itself; the message names the cycle."""


class GraphValueError(GraphError, ValueError):
    """A value cannot travel along an edge: it cannot be pickled or unpickled, or is larger than the limit."""


class GraphTimeoutError(GraphError, TimeoutError):
    """An answer, a free place or a buffer did not come before the deadline. Nothing is lost: ask again."""


class GraphFullError(GraphError):
    """`execute_nowait` while `max_inflight` executions are under way, no memory is left for the input, or another
    thread is handing one over. Get a result, drop arrays that are kept, or call `execute`, which waits."""


class GraphClosedError(GraphError):
    """The graph was torn down, or could not go on after an interruption. Compile it again."""


class GraphActorDiedError(GraphError):
    """An actor of the graph died or exited; the graph is closed and its other actors live on."""


class WorkerGroupError(RaylaneError):
    """A group of workers could not do what was asked of it as a whole."""


class WorkerLostError(WorkerGroupError):
    """A worker of the group died; the others are still there."""


class WorkerCallError(WorkerGroupError):
    """A worker's method raised, or did not answer before the deadline."""


class ConfigError(RaylaneError, ValueError):
    """The configuration cannot be used as written; the message names the key, the value and what would do."""


class DataError(RaylaneError, ValueError):
    """The training data cannot be used as it is; the message names the file, the line and what would do."""


class CheckpointError(RaylaneError):
    """A checkpoint could not be written, was not complete, or does not fit this run."""


class CheckpointDamagedError(CheckpointError):
    """Files of a checkpoint are missing, shorter than when they were written, or hold no checkpoint."""
