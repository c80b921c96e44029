"""All error classes of raylane.

    RaylaneError
    ├── TransportError (also ray.exceptions.RayError, for the reason below)
    │   ├── SourceLostError            the process that held the tensors is gone
    │   ├── TransferTimeoutError       a transfer or a wait passed its deadline (also a TimeoutError)
    │   ├── TransportUnavailableError  no transport, or not the requested one, connects these two processes
    │   ├── TensorFreedError           the source has already freed the value
    │   ├── BudgetExceededError        a process holds too many bytes for readers to publish one more value
    │   ├── TensorMutatedError         a published tensor was written to before it was read
    │   └── ProtocolError              the peer broke the protocol, or does not belong to this cluster
    ├── GraphError (also ray.exceptions.RayError)
    │   ├── GraphPlanError             these nodes form no valid graph (also a ValueError)
    │   ├── GraphDeadlockError         the graph could block itself; the cycle is named (also a ValueError)
    │   ├── GraphValueError            a value cannot travel: it cannot be pickled, or is too large
    │   ├── GraphTimeoutError          a wait passed its deadline (also a TimeoutError)
    │   ├── GraphFullError             `execute_nowait` was called while `max_inflight` executions were running
    │   ├── GraphCancelledError        `cancel` was called for an execution
    │   ├── GraphClosedError           the graph was torn down, or broke; compile it again
    │   └── GraphActorDiedError        an actor of the graph died, which closed the graph or is repaired
    ├── WorkerGroupError
    │   ├── WorkerLostError            a worker of a group died
    │   └── WorkerCallError            a worker's method raised, or did not answer in time
    ├── WeightsError
    │   ├── WeightsLayoutError         tensors of publisher and reader do not fit together (also a ValueError)
    │   ├── WeightsTimeoutError        a wait for ranks, versions or readers passed its deadline (also a TimeoutError)
    │   ├── WeightsLostError           a version, or the process that kept it, is gone; publish again
    │   ├── WeightsSwitchError         a fleet did not switch, or a reader was cut off from it
    │   ├── WeightsVersionError        the version that was asked for is not there (any more)
    │   ├── WeightsInvalidError        an update broke off in the middle: the reader has no whole version
    │   └── WeightsMismatchError       tensors of a version differ from those that were published
    ├── QueueError
    │   ├── QueueTimeoutError          a wait for room or for items passed its deadline (also a TimeoutError)
    │   ├── QueueClosedError           the queue was closed: nothing can be put any more
    │   └── QueueLostError             the queue's actor, or the host that kept an item, is gone
    ├── ConfigError (also a ValueError)   the configuration cannot be used as written
    ├── DataError (also a ValueError)     the training data cannot be used as it is
    ├── CheckpointError                   a checkpoint cannot be written, read or trusted
    │   └── CheckpointDamagedError         files of a checkpoint are incomplete or altered; an earlier one may be intact
    └── StepNotFiniteError                loss or gradients of a step are not finite (also a FloatingPointError)

Wrong arguments raise ValueError or TypeError; an AssertionError is a bug in raylane.

Transport errors derive from RayError for one reason: the function that unpickles a ticket *returns* such an error
instead of raising it. Ray then raises that object from ray.get, from await and inside the consumer, without a traceback
of its own. Raising the error in that function would give an untyped RaySystemError. Every package uses this module.
"""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayError

__all__ = [
    "BudgetExceededError",
    "CheckpointDamagedError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "GraphActorDiedError",
    "GraphCancelledError",
    "GraphClosedError",
    "GraphDeadlockError",
    "GraphError",
    "GraphFullError",
    "GraphPlanError",
    "GraphTimeoutError",
    "GraphValueError",
    "ProtocolError",
    "QueueClosedError",
    "QueueError",
    "QueueLostError",
    "QueueTimeoutError",
    "RaylaneError",
    "SourceLostError",
    "StepNotFiniteError",
    "TensorFreedError",
    "TensorMutatedError",
    "TransferTimeoutError",
    "TransportError",
    "TransportUnavailableError",
    "WeightsError",
    "WeightsInvalidError",
    "WeightsLayoutError",
    "WeightsLostError",
    "WeightsMismatchError",
    "WeightsSwitchError",
    "WeightsTimeoutError",
    "WeightsVersionError",
    "WorkerCallError",
    "WorkerGroupError",
    "WorkerLostError",
]


class RaylaneError(Exception):
    """Base class of all errors. `fields` has the values named in the message (actor, rank, ...), pickled with it."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own __reduce__ passes positional arguments only, and would lose `fields`.
        return _rebuild, (type(self), self.message, self.fields)


def _rebuild(cls: type[RaylaneError], message: str, fields: dict[str, Any]) -> RaylaneError:
    return cls(message, **fields)


class TransportError(RaylaneError, RayError):  # type: ignore[misc]  # Ray gives mypy no types
    """A value could not be transferred."""


class SourceLostError(TransportError):
    """The process that held the tensors died, was killed, or broke the connection during a transfer."""


class TransferTimeoutError(TransportError, TimeoutError):
    """A transfer or a wait passed its deadline. The source may still be alive; a later attempt can succeed."""


class TransportUnavailableError(TransportError):
    """The requested transport, or every transport, cannot connect these two processes; the message has the reason."""


class TensorFreedError(TransportError):
    """The source has freed the value, because every ref was gone or the process that owned the ref died."""


class BudgetExceededError(TransportError):
    """A value could not be published within RAYLANE_BUDGET_BYTES; the message names the largest values held."""


class TensorMutatedError(TransportError):
    """A tensor was written to in place between its publication and this read, under `on_mutation="error"`."""


class ProtocolError(TransportError):
    """The peer sent bytes that violate the protocol, or could not prove that it belongs to this cluster."""


class GraphError(RaylaneError, RayError):  # type: ignore[misc]  # Ray gives mypy no types
    """A compiled graph could not be built or run.

    An exception of a method is not a GraphError: it arrives as Ray's own RayTaskError, which is also an instance of the
    class that the method raised.
    """


class GraphPlanError(GraphError, ValueError):
    """The nodes or options do not form a graph that can run; the message names the node."""


class GraphDeadlockError(GraphPlanError):
    """The order of calls would make the graph wait for itself; the message names the cycle."""


class GraphValueError(GraphError, ValueError):
    """A value cannot travel along an edge: it cannot be pickled or unpickled, or is larger than the limit."""


class GraphTimeoutError(GraphError, TimeoutError):
    """A result, a free slot or a buffer was not available before the deadline. Nothing is lost; try again."""


class GraphFullError(GraphError):
    """`execute_nowait` would have to wait.

    The reason is that `max_inflight` executions are running, that no memory is left for the input, or that another
    thread is submitting an input. Get a result, drop arrays that are kept, or call `execute`, which waits.
    """


class GraphCancelledError(GraphError):
    """`GraphResult.cancel` was called before the execution had ended. The field `execution` is its number."""


class GraphClosedError(GraphError):
    """The graph was torn down, or could not continue after an interruption. Compile it again."""


class GraphActorDiedError(GraphError):
    """An actor of the graph died or exited; its other actors stay alive.

    The graph is closed, unless it was compiled with `on_death="repair"`. The field `actor` is the id of the dead actor.
    """


class WorkerGroupError(RaylaneError):
    """A group of workers could not complete an operation."""


class WorkerLostError(WorkerGroupError):
    """A worker of the group died; the other workers are still alive."""


class WorkerCallError(WorkerGroupError):
    """A worker's method raised, or did not answer before the deadline."""


class WeightsError(RaylaneError):
    """Weights could not be published, read or applied."""


class WeightsLayoutError(WeightsError, ValueError):
    """Tensors of publisher and reader do not fit together; the message names them. Nothing was written."""


class WeightsTimeoutError(WeightsError, TimeoutError):
    """A wait passed its deadline; the message names the ranks, readers or versions. Nothing is lost; try again."""


class WeightsLostError(WeightsError):
    """A version is gone, or the process that kept it has died. The next published version works again."""


class WeightsVersionError(WeightsError):
    """The version of this number is gone, or never was; the message says which ones are there. Nothing was written."""


class WeightsSwitchError(WeightsError):
    """A fleet did not switch, and all its readers go on with what they had; or a reader may not serve at present."""


class WeightsInvalidError(WeightsError):
    """An update broke off while it wrote: the reader holds parts of two versions until the next whole update."""


class WeightsMismatchError(WeightsError):
    """Tensors differ from those that were published; the message names the first ones, and where they differ.

    `check()` of the reader raises until an update has succeeded. `fields` has `version`, `loaded` (published names of
    tensors whose loaded elements differ) and `slots` (those that differ in the shared memory of the version already).
    """


class QueueError(RaylaneError):
    """An item could not be put into a queue, or taken from it."""


class QueueTimeoutError(QueueError, TimeoutError):
    """A wait passed its deadline; the message says for what. Nothing is lost; try again."""


class QueueClosedError(QueueError):
    """The queue was closed, and takes no more items."""


class QueueLostError(QueueError):
    """The actor of the queue has died, or the shared memory of an item is gone; the message says which."""


class ConfigError(RaylaneError, ValueError):
    """The configuration cannot be used as written; the message names the key, the value and accepted values."""


class DataError(RaylaneError, ValueError):
    """The training data cannot be used as it is; the message names the file, the line and the remedy."""


class CheckpointError(RaylaneError):
    """A checkpoint could not be written, was incomplete, or does not match this run."""


class CheckpointDamagedError(CheckpointError):
    """Files of a checkpoint are missing, are shorter than when they were written, or contain no checkpoint."""


class StepNotFiniteError(RaylaneError, FloatingPointError):
    """Loss or gradient norm of a training step is NaN or infinite; the step has changed no weight.

    Fields: `step` (counted from 1), `loss`, `grad_norm`.
    """
