"""Edges with a transport of their own: the writer publishes the tensors of a message, the channel carries a ticket.

    writer                                       ring or link                     each reader
    copy the leaves into the stage of the slot
    publish the copies  ── TICKET(payload, skeleton) ──────────────────────>  fetch the leaves by the transport
                                                                              build the value, call the method
    message `sequence + slots`: free the value

A free slot is the acknowledgement. The driver admits an execution when the one `max_inflight` before it has ended, and
then every reader has fetched its tensors (`ring`). So each edge holds at most one value for each slot, and no message
says that a value may be freed.

Values without tensors or arrays, and small ones, travel as over any other edge. An edge with `auto` between actors with
GPUs on one host publishes messages with large CUDA tensors only (`Edge.publishes_cuda`): where the device has no memory
for a copy, they too travel through host memory.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import ray

from raylane.core.deadline import Deadline
from raylane.errors import (
    GraphError,
    GraphPlanError,
    GraphTimeoutError,
    RaylaneError,
    SourceLostError,
    TransferTimeoutError,
)
from raylane.graph.channels.lease import SegmentGone
from raylane.graph.channels.peer_link import Writer
from raylane.graph.nodes import EDGE_TRANSPORTS
from raylane.graph.plan.ir import Edge, Plan
from raylane.graph.values import message as messages
from raylane.graph.values.message import TICKET, Encoder, Message


def staging() -> Any:
    """Return the module that publishes and fetches."""
    # Imports torch, which processes without such edges may not have loaded: that takes two seconds.
    from raylane.transport.produce import staging as module

    return module


def check_available(plan: Plan, member: int) -> None:
    """Raise GraphPlanError if this process, a member, lacks the transport of one of its edges."""
    for edge in (*plan.edges_from(member), *plan.edges_to(member)):
        why = None if edge.transport in EDGE_TRANSPORTS else staging().check_available(edge.transport)
        if why is not None:
            raise GraphPlanError(
                f"{plan.source_label(edge.value)} has the transport {edge.transport!r}, which {plan.members[member]} "
                f"cannot use: {why}"
            )


class PublishingWriter:
    """Writing end of an edge that publishes tensors. Used by one thread at a time, except `close`."""

    def __init__(self, under: Writer, edge: Edge, slots: int, label: str) -> None:
        """Send messages over `under`. `label` names the value for messages and for `raylane memory`."""
        self.under = under
        """Writing end of the channel that carries the tickets."""
        self._transport = edge.transport
        self._large_cuda_only = edge.publishes_cuda
        self._label = f"edge {label}"
        self._staging = staging()
        self._stages = [self._staging.EdgeStage() for _ in range(slots)]
        self._sequences = [-1] * slots
        """Message to which the value of each stage belongs."""
        self._encoder = Encoder()
        self._published_bytes = 0
        self._closed = False
        # A graph that was dropped without teardown: its memory must not stay in the store.
        weakref.finalize(self, _abandon, self._stages, os.getpid()).atexit = False

    @property
    def written_bytes(self) -> int:
        """Number of bytes sent in total, each tensor counted once for all readers."""
        return self.under.written_bytes + self._published_bytes

    def leased_bytes(self, message: Message) -> int:
        """Return the bytes that must be leased to send a message; those of tickets lie elsewhere."""
        return self.under.leased_bytes(message)

    def encode(self, value: Any) -> Message:
        """Return a value as a message. That of a value with large tensors is a TICKET, and `held` are its leaves."""
        encoder = self._encoder
        message: Message | None = None
        try:
            message = encoder.small(value)
        except ray.exceptions.RayError:  # a GraphResult inside has failed or has timed out
            encoder.renew()
            raise
        except Exception:  # a tensor, or a value for cloudpickle: `split` raises other errors again
            pass
        if message is not None:
            return message
        encoder.renew()
        if self._large_cuda_only and self._staging.is_cpu_tensor(value):
            return encoder.encode(value)
        skeleton, leaves = messages.split(value)
        if not self._staging.worth_publishing(leaves, self._transport):
            return encoder.encode(value)
        return Message(TICKET, skeleton, (), leaves)

    def published(self, sequence: int, message: Message) -> Message:
        """Return a message as it travels, in memory of its own; publish its leaves, if it has any.

        Frees what the slot of this message has published before. GraphError if there is no memory for the copies, or
        the tensors have none any more.
        """
        slot = sequence % len(self._stages)
        stage = self._stages[slot]
        if self._sequences[slot] != sequence:
            stage.free()
        if message.kind != TICKET:
            return message.copied()
        if message.held is None:  # it is published
            return message
        self._sequences[slot] = sequence
        try:
            payload, nbytes = stage.publish(message.held, self._transport, self._label)
        except (RaylaneError, RuntimeError, OSError, MemoryError) as error:  # torch raises RuntimeError without memory
            if self._large_cuda_only:
                return self._encoder.encode(messages.join(bytes(message.body), message.held)).copied()
            raise GraphError(f"{self._label} could not be published: {messages.error_text(error)}") from error
        self._published_bytes += nbytes
        if self._closed:  # by another thread meanwhile
            stage.abandon()
        return Message(TICKET, pickle.dumps((payload, bytes(message.body), nbytes), 5))

    def write(self, sequence: int, message: Message, flags: int = 0) -> None:
        """Send one message, like `RingWriter.write`."""
        slot = sequence % len(self._stages)
        if message.kind == TICKET:
            message = self.published(sequence, message)
        elif self._sequences[slot] != sequence:
            self._stages[slot].free()
        self.under.write(sequence, message, flags)

    def take_back(self) -> None:
        """Take the messages that readers have not read, like `RingWriter.take_back`."""
        self.under.take_back()

    def close(self) -> None:
        """Free everything that is published. Never waits for a lock; a second call does nothing."""
        self._closed = True
        _abandon(self._stages, os.getpid())


EdgeWriter: TypeAlias = Writer | PublishingWriter
"""Sending end of an edge."""


def _abandon(stages: list[Any], pid: int) -> None:
    if os.getpid() == pid:  # a forked child has a copy of the store, and shares memory with that of its parent
        for stage in stages:
            stage.abandon()


@dataclass(frozen=True)
class Fetched:
    """Edge over which a process fetches tensors, with names for messages."""

    transport: str
    label: str
    """Name of the value."""
    reader: str
    timeout_s: float | None


def fetched_edge(plan: Plan, edge: Edge, reader: int, timeout_s: float | None) -> Fetched | None:
    """Return the record of an edge into a member; None if its messages carry their tensors themselves."""
    if not edge.may_publish:
        return None
    return Fetched(edge.transport, plan.source_label(edge.value), plan.members[reader], timeout_s)


class Fetch:
    """Leaves of one message that are on their way into this process."""

    __slots__ = ("_edge", "_future", "_skeleton", "nbytes")

    def __init__(self, edge: Fetched, body: Any, notify: Callable[[], None]) -> None:
        """Start to fetch what the body of a TICKET names; `notify` is called at the end, on another thread.

        ValueError if the body was written by another version of raylane.
        """
        payload, self._skeleton, self.nbytes = pickle.loads(body)
        self._edge = edge
        self._future: Future[list[Any]] = staging().fetch(payload, edge.transport, Deadline(edge.timeout_s), notify)

    def done(self) -> bool:
        """Return True if `value` does not wait."""
        return self._future.done()

    def value(self) -> Any:
        """Return the value; call this once, on the thread that uses it, because it unpickles.

        SegmentGone if the writer's process has ended, GraphTimeoutError or GraphError if the transport has failed.
        """
        try:
            leaves = self._future.result()
        except SourceLostError as error:
            raise SegmentGone(str(error)) from error
        except TransferTimeoutError as error:
            raise GraphTimeoutError(self._failed(error)) from error
        except (RaylaneError, RuntimeError, OSError, MemoryError) as error:  # torch and NIXL raise RuntimeError
            raise GraphError(self._failed(error)) from error
        return messages.join(self._skeleton, leaves)

    def _failed(self, error: Exception) -> str:
        edge, cause = self._edge, messages.error_text(error)
        return (
            f"{edge.label} could not be brought to {edge.reader} over {edge.transport}: {cause}. The graph runs on; to "
            "use another transport, such as 'auto', compile it again"
        )
