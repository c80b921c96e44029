"""Control channels of the driver: orders to the actors of one graph, and their reports.

    driver  --orders ring-->   actor   "stats", "trace", "close", `MembersDied`, `MembersRestarted`
    driver  <--reports ring--  actor   answers; and unasked: failed executions, defects, the exit of the actor

A report posts the driver's doorbell like any message of an edge. While a thread waits for an answer (`ask`), only that
thread reads the reports of that actor; reports of other actors are read by the collector (`poll`).
"""

from __future__ import annotations

import collections
import contextlib
import logging
import pickle
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from raylane.core.deadline import Deadline
from raylane.core.signals.semaphore import block, try_wait
from raylane.errors import GraphActorDiedError, GraphClosedError, GraphError, GraphTimeoutError
from raylane.graph.channels.layout import CONTROL_SLOTS
from raylane.graph.channels.peer_link import Writer
from raylane.graph.channels.ring import RingReader
from raylane.graph.lifecycle import Lifecycle, State
from raylane.graph.values import message as messages
from raylane.graph.worker.program import EXITED, TROUBLE

log = logging.getLogger("raylane.graph")

ANSWER_S = 5.0
"""Seconds to wait for an actor's answer; an actor that runs a method answers later."""
POLL_S = 0.05
"""Seconds between two checks, during a wait for an answer, whether the actor has died."""
RESERVED_SLOTS = 1
"""Slots of an orders ring that only "close" may use: it must get through to an actor that is busy."""


def _never() -> bool:
    return False


class _ControlChannel:
    """Control channel to one actor."""

    def __init__(self, writer: Writer, reader: RingReader) -> None:
        self.writer = writer
        self.reader = reader
        self.orders = 0
        """Number of orders sent."""
        self.answers = 0
        """Number of answers taken."""
        self.arrived: collections.deque[Any] = collections.deque()
        """Answers read and not yet taken."""


class ControlChannels:
    """Control channels to all actors of a graph. Thread-safe."""

    def __init__(
        self, names: Sequence[str], actor_ids: Sequence[str], lifecycle: Lifecycle, *, repairs: bool = False
    ) -> None:
        """Create without channels; `names` and `actor_ids` are those of members 1, 2, ...

        With `repairs` the graph continues after the death of an actor.
        """
        self._names = list(names)
        self._actor_ids = list(actor_ids)
        self._repairs = repairs
        self._lifecycle = lifecycle
        self._channels: list[_ControlChannel] = []
        self._asking = threading.Lock()  # held during one order and its answer
        self._asked: Collection[int] = ()
        """Members whose answers are waited for."""
        self._reading = threading.Lock()  # guards the readers of all channels and _trouble; held briefly
        self._trouble: GraphError | None = None
        """Reason for the end of the graph, as reported by an actor."""
        self.on_failure: Callable[[int, Any], None] = lambda execution, error: None
        """Called with the number of a failed execution and its pickled error."""
        self.on_exit: Callable[[int], None] | None = None
        """Called with a member whose method has exited its actor. None if that ends the graph."""
        self.dead: set[int] = set()
        """Members whose process has ended."""

    def replace(self, member: int, name: str, actor_id: str, reopen: Callable[[], tuple[Writer, RingReader]]) -> None:
        """Use the control channel that `reopen` returns, to the process which takes the place of a member's dead one.

        No order is sent and no report is read while `reopen` runs.
        """
        with self._asking, self._reading:
            self._names[member - 1], self._actor_ids[member - 1] = name, actor_id
            self._channels[member - 1] = _ControlChannel(*reopen())
            self.dead.discard(member)

    def add(self, writer: Writer, reader: RingReader) -> None:
        """Add the control channel of the next member."""
        self._channels.append(_ControlChannel(writer, reader))

    def ask(self, member: int, order: str, *, timeout_s: float | None = ANSWER_S) -> Any:
        """Send an order to an actor and wait for its answer.

        GraphTimeoutError if the actor is busy, GraphActorDiedError if it has died, GraphClosedError after teardown.
        """
        deadline = Deadline(timeout_s)
        with self._lock_orders(deadline):
            if self._lifecycle.state in (State.CLOSED, State.FORKED):
                raise GraphClosedError("the graph was torn down, and its actors have left it")
            # From now on `poll` leaves this channel to this thread, which would else find its answer only after POLL_S.
            self._asked = (member,)
            try:
                self._wait_for_room(member, deadline)
                self._send(member, order)
                return self._last_answer(member, deadline)
            finally:
                self._asked = ()

    def tell(self, member: int, order: Any, cancelled: Callable[[], bool]) -> None:
        """Send an order to a member without waiting for the answer. Waits for room in its channel, until `cancelled()`.

        Does nothing if the member is dead.
        """
        with contextlib.suppress(GraphError), self._lock_orders(Deadline(None), cancelled):
            self._wait_for_room(member, Deadline(None), cancelled)
            self._send(member, order)

    def has_room(self, member: int) -> bool:
        """Return True if `tell` would not wait for answers of the member."""
        channel = self._channels[member - 1]
        return channel.orders - channel.answers < CONTROL_SLOTS - RESERVED_SLOTS

    def ask_each(self, orders: Mapping[int, Any], cancelled: Callable[[], bool]) -> dict[int, Any] | None:
        """Send each of these members its order, and wait for all answers without a limit, until `cancelled()`.

        Return the answers by member; None if the wait was cancelled, or a member has died.
        """
        with contextlib.suppress(GraphError), self._lock_orders(Deadline(None), cancelled):
            self._asked = orders.keys()
            try:
                for member, order in orders.items():
                    self._wait_for_room(member, Deadline(None), cancelled)
                    self._send(member, order)
                return {member: self._last_answer(member, Deadline(None), cancelled) for member in orders}
            finally:
                self._asked = ()
        return None

    def ask_all(self, order: str, members: Collection[int] | None = None) -> tuple[dict[int, Any], list[str]]:
        """Send an order to these members, or to all. Return (member to answer, names of those that were too late)."""
        answers, silent = {}, []
        for member, name in enumerate(self._names, 1):
            if members is not None and member not in members:
                continue
            try:
                answers[member] = self.ask(member, order)
            except GraphError:
                silent.append(name)
        return answers, silent

    @contextlib.contextmanager
    def _lock_orders(self, deadline: Deadline, cancelled: Callable[[], bool] = _never) -> Iterator[None]:
        """Hold `_asking`. The wait ends like one for an answer: a repair holds the lock while a neighbour is busy."""
        asking = self._asking  # a forked child gets another one
        while not asking.acquire(timeout=POLL_S):
            if cancelled():
                raise GraphClosedError("the wait for another order was cancelled")
            if deadline.left_s() == 0:
                raise GraphTimeoutError(
                    f"an actor of the graph did not answer an earlier order within {deadline.timeout_s} s: it is "
                    "running a method"
                )
        try:
            yield
        finally:
            asking.release()

    def _wait_for_room(self, member: int, deadline: Deadline, cancelled: Callable[[], bool] = _never) -> None:
        """Wait until the orders ring has room: orders whose answer was not waited for take slots too."""
        while not self.has_room(member):
            self._next_answer(member, deadline, cancelled)

    def _last_answer(self, member: int, deadline: Deadline, cancelled: Callable[[], bool] = _never) -> Any:
        """Wait for the answer to the last order; earlier answers are dropped."""
        channel = self._channels[member - 1]
        while True:
            answer = self._next_answer(member, deadline, cancelled)
            if channel.answers == channel.orders:
                return answer

    def _send(self, member: int, order: Any) -> None:
        """Send an order. GraphActorDiedError if the member is dead: its orders ring is emptied for the new process."""
        if member in self.dead:
            raise self.died(member)
        channel = self._channels[member - 1]
        channel.writer.write(channel.orders, messages.Message(messages.VALUE, pickle.dumps((order,), 5)))
        channel.orders += 1

    def _next_answer(self, member: int, deadline: Deadline, cancelled: Callable[[], bool] = _never) -> Any:
        channel = self._channels[member - 1]
        while True:
            remaining_s = deadline.left_s()
            # `poll` may have read answers before this thread began to wait.
            if not channel.arrived and block(
                channel.reader.full, POLL_S if remaining_s is None else min(remaining_s, POLL_S)
            ):
                with self._reading:
                    self._read(member)
            if channel.arrived:
                channel.answers += 1
                return channel.arrived.popleft()
            trouble = self._trouble
            if trouble is not None:  # a new object: the traceback of a kept one would keep this object alive
                raise type(trouble)(trouble.message, **trouble.fields)
            if member in self.dead:
                raise self.died(member)
            if cancelled():
                raise GraphClosedError("the wait for an answer was cancelled")
            if remaining_s is not None and remaining_s <= 0:
                raise GraphTimeoutError(
                    f"{self._names[member - 1]} did not answer within {deadline.timeout_s} s: it is running a method"
                )

    def _read(self, member: int) -> None:
        """Read one report of a member, after a successful wait for its semaphore. Call with `_reading` held."""
        channel = self._channels[member - 1]
        received = channel.reader.receive()
        if received.kind == messages.ERROR:
            self.on_failure(*pickle.loads(received.body))
            return
        name, answer = messages.decode(received.kind, received.body, received.buffers)
        if name == TROUBLE:
            self._trouble = self._trouble or GraphClosedError(answer)
        elif name == EXITED and member in self.dead:  # it was noticed before; `infos` may have the new process
            return
        elif name == EXITED and self.on_exit is not None:
            self.on_exit(member)
        elif name == EXITED:
            self._trouble = self._trouble or self.died(member)
        else:
            channel.arrived.append(answer)

    def poll(self, *, all_channels: bool = False) -> GraphError | None:
        """Read the reports that have arrived. Return the reason if an actor has reported the end of the graph.

        Does not wait. The channel of an actor that is being asked is left to the asking thread, except with
        `all_channels`.
        """
        for member in range(1, len(self._channels) + 1):
            while all_channels or member not in self._asked:
                # The wait too, because `replace` must not come between the two.
                with self._reading:
                    if try_wait(self._channels[member - 1].reader.full):
                        break
                    self._read(member)
        return self._trouble

    def died(self, member: int) -> GraphActorDiedError:
        """Return the error for the end of a member's process."""
        if self._repairs:
            return GraphActorDiedError(
                f"{self._names[member - 1]} ended during this execution. The graph continues when Ray has restarted "
                "the actor (max_restarts): execute again, which waits for it. If Ray does not restart it, call "
                "graph.replace(old_actor, new_actor)",
                actor=self._actor_ids[member - 1],
            )
        return GraphActorDiedError(
            f"{self._names[member - 1]} ended, and with it the graph; its other actors keep running. If Ray restarts "
            "the actor (max_restarts), call graph.recompile(). Otherwise ask Ray why it ended (ray list actors "
            "--detail) and compile with a living actor",
            actor=self._actor_ids[member - 1],
        )

    def close(self, timeout_s: float) -> None:
        """Order all actors to leave the graph, and wait for their answers at most `timeout_s` seconds (0: not at all).

        An actor that is busy leaves after its present method.
        """
        deadline = Deadline(timeout_s)
        living = [member for member in range(1, len(self._channels) + 1) if member not in self.dead]
        with self._asking:
            for member in living:
                with contextlib.suppress(GraphError):  # no connection: the actor notices the driver's end by itself
                    self._send(member, "close")
            for member in living if timeout_s else ():
                channel = self._channels[member - 1]
                try:
                    while channel.answers < channel.orders:
                        self._next_answer(member, deadline)
                except GraphTimeoutError:
                    log.warning("%s is busy; it leaves the graph after its method", self._names[member - 1])
                except GraphError:  # dead, or has left the graph by itself
                    continue

    def disown(self) -> None:
        """Replace the locks in a forked child: a thread of the parent may hold the old ones."""
        self._asking, self._reading = threading.Lock(), threading.Lock()
