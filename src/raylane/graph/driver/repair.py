"""Repair of a running graph after the death of an actor (`on_death="repair"`), as `repair_states` decides.

    watcher thread:  died()  -->  RepairPlan  -->  starts the repair thread, which runs one step for each state

    SETTLING   no execution starts any more; the neighbours of the dead actor treat its missing messages as failures,
               so that every execution in flight ends as it does after the failure of a call
    AWAITING   calls the actor until a new process answers
    OPENING    the neighbours, each after its last task of the executions that have ended, take back what the dead
               process has not read and notify the new process from then on; the driver empties the rings that the dead
               process wrote; the new process joins, and begins with the next execution

Rings and semaphores stay where they are, and messages keep the numbers of their executions. When a ring changes hands
it is empty, because no execution is in flight: so no message of one execution can reach another one.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import ray

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.core.process.place import Place, alive
from raylane.errors import GraphActorDiedError, GraphClosedError, GraphError, GraphPlanError, GraphTimeoutError
from raylane.graph.channels.layout import GraphOptions
from raylane.graph.driver import forks
from raylane.graph.driver.channel_setup import ChannelSetup
from raylane.graph.driver.collect import Collector
from raylane.graph.driver.connections import EXIT_S, Connections
from raylane.graph.driver.deploy import answer_of, remember
from raylane.graph.driver.repair_states import WORKING, RepairEvent, RepairPlan, RepairState
from raylane.graph.driver.submit import Pause, Submitter
from raylane.graph.values import message as messages
from raylane.graph.worker import bootstrap
from raylane.graph.worker.program import ActorInfo, MembersDied, MembersRestarted

log = logging.getLogger("raylane.graph")

POLL_S = 0.01
"""Seconds between two checks of a condition that notifies nobody."""
ANSWER_POLL_S = 0.05
"""Seconds between two checks, during a wait for a call of an actor, whether the step was overtaken."""


class Repairer:
    """Repair of one graph. Thread-safe. Its thread runs only while an actor is dead."""

    def __init__(
        self,
        owner: Any,
        connections: Connections,
        setup: ChannelSetup,
        collector: Collector,
        submitter: Submitter,
        options: GraphOptions,
    ) -> None:
        """Repair the graph `owner` from now on, which is held weakly: nothing is repaired for a dropped graph."""
        self._owner = weakref.ref(owner)
        self._connections = connections
        self._setup = setup
        self._executions = collector.executions
        self._collector = collector
        self._submitter = submitter
        self._timeout_s = options.start_timeout_s
        self._changed = threading.Condition()  # guards _plan, _ended and _thread; notifies of changes of the state
        self._plan = RepairPlan()
        self._ended: dict[int, Place] = {}
        """Last process of each member whose death was noted: it may be reported by several threads."""
        self._thread: threading.Thread | None = None
        self._members = {_ray.actor_id_of(actor): member for member, actor in enumerate(connections.actors, 1)}
        """Member in whose place an actor is, or was until it died, by actor id."""
        self._joining: set[int] = set()
        """Members whose channels are being opened: no other actor can take their place. Guarded by `_changed`."""
        self._new_processes: dict[int, ActorInfo] = {}
        """Processes that take the place of dead ones. For the thread only."""
        self._steps: dict[RepairState, Callable[[int, dict[int, int]], None]] = {
            RepairState.SETTLING: self._settle,
            RepairState.AWAITING: self._await_processes,
            RepairState.OPENING: self._open,
        }
        weak = weakref.ref(self)  # the connections must not keep this object, nor the graph

        def on_death(member: int, place: Place) -> bool:
            repairer = weak()
            return repairer is not None and repairer.died(member, place)

        def on_exit(member: int) -> None:
            repairer = weak()
            if repairer is not None:
                repairer._connections.ended(member)

        connections.on_death, connections.control.on_exit = on_death, on_exit
        forks.register(self)
        for member in tuple(connections.control.dead):  # it has died since the channels were opened
            self.died(member, connections.infos[member - 1].place)

    def died(self, member: int, place: Place) -> bool:
        """Note that a member's process has ended. Return False if the graph is not repaired any more. Does not wait."""
        with self._changed:
            if self._plan.state is RepairState.ENDED:
                return False
            if self._ended.get(member) == place:
                return True
            self._ended[member] = place
            self._plan.died(member)
            return self._start()

    def replace(self, old_actor: Any, new_actor: Any) -> None:
        """Let another actor take the place of a dead one. Waits until its channels are open; see `CompiledGraph`."""
        old_id, new_id = _ray.actor_id_of(old_actor), _ray.actor_id_of(new_actor)
        member, name = self._member_of(old_id), self._connections.plan.members[self._member_of(old_id)]
        present_ids = [_ray.actor_id_of(actor) for actor in self._connections.actors]
        if new_id in present_ids and present_ids.index(new_id) != member - 1:
            raise GraphPlanError(
                f"replace: {_ray.class_name_of(new_actor)} is in the graph already, in another place. Start a new actor"
            )
        with self._changed:
            # The user may know of the death before this process does.
            self._changed.wait_for(lambda: self._is_replaceable(member) or not self._is_running(), EXIT_S)
            self._raise_if_ended()
            if not self._is_replaceable(member):
                raise GraphError(f"replace: {name} runs, or Ray has restarted it. Only a dead actor can be replaced")
            self._connections.actors[member - 1] = new_actor
            self._members[new_id] = member
            self._plan.replaced(member)
            self._start()
            ended = self._changed.wait_for(lambda: self._plan.state not in WORKING, self._timeout_s)
            self._raise_if_ended()
            reason = self._plan.reason
        if not ended:
            raise GraphTimeoutError(
                f"replace: the new actor for {name} did not join within {self._timeout_s} s. The graph continues to "
                "wait for it: execute later"
            )
        # The reason may be another dead actor, which the next call replaces.
        if reason is not None and reason.fields.get("actor", new_id) == new_id:
            raise type(reason)(reason.message, **reason.fields)

    def _is_replaceable(self, member: int) -> bool:
        opens = self._plan.state is RepairState.OPENING or member in self._joining
        return member in self._plan.dead and not opens

    def _member_of(self, actor_id: str) -> int:
        try:
            return self._members[actor_id]
        except KeyError:
            raise GraphPlanError("replace: the old actor is not in the graph. Pass the handle that was bound") from None

    def _is_running(self) -> bool:
        return self._connections.lifecycle.running and self._plan.state is not RepairState.ENDED

    def _raise_if_ended(self) -> None:
        if not self._is_running():
            error = self._connections.lifecycle.error or GraphClosedError("the graph has ended; compile it again")
            raise type(error)(error.message, **error.fields)

    def close(self, timeout_s: float) -> None:
        """Stop: nothing is repaired from now on. Waits at most `timeout_s` seconds for the thread to end."""
        with self._changed:
            self._plan.end()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def disown(self) -> None:
        """Repair nothing in a forked child, where the thread does not exist and may have left the lock held."""
        self._changed = threading.Condition()
        self._plan.end()
        self._thread = None

    @property
    def state(self) -> RepairState:
        """State of the repair at present."""
        return self._plan.state

    def _start(self) -> bool:
        """Begin a round. Return False if its thread cannot be started. Call with the lock held."""
        names = self._names(self._plan.dead)
        self._submitter.pause(Pause(f"{names} ended, and the executions in flight have not ended yet"))
        self._changed.notify_all()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="raylane-repair", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down
                return False
            self._thread = thread
        return True

    # The repair thread

    def _run(self) -> None:
        try:
            while self._run_step():
                continue
        except BaseException as error:  # a defect must not leave callers waiting
            log.exception("the repair of a graph has failed")
            reason = messages.error_text(error, repr)
            self._collector.fail(GraphClosedError(f"the graph could not be repaired: {reason}. Call recompile()"))
            self._run_step()

    def _run_step(self) -> bool:
        """Run the step of the present state. Return False if there is none: then the thread ends."""
        with self._changed:
            if self._is_abandoned():
                self._plan.end()
            if self._plan.state not in WORKING:
                self._thread = None
                self._changed.notify_all()
                return False
            step, began, dead = self._steps[self._plan.state], self._plan.round, dict(self._plan.dead)
            # Until the step has ended, even if a death overtakes it: the new processes may join the rings.
            self._joining.update(dead if self._plan.state is RepairState.OPENING else ())
        step(began, dead)
        self._set_joined(dead)
        return True

    def _set_joined(self, members: Iterable[int]) -> None:
        """Note that no process of these members joins any more, so that other actors can take their place."""
        with self._changed:
            self._joining.difference_update(members)
            self._changed.notify_all()

    def _is_abandoned(self) -> bool:
        """Return True if nobody needs the graph any more, or if it has ended."""
        dropped = self._owner() is None and not self._executions.pending
        return dropped or not self._connections.lifecycle.running

    def _overtaken(self, began: int) -> bool:
        return self._plan.round != began or self._is_abandoned()

    def _finish(self, event: RepairEvent, began: int) -> None:
        with self._changed:
            self._plan.finish_step(event, began)

    def _halt(self, began: int, error: GraphError) -> None:
        with self._changed:
            if self._plan.finish_step(RepairEvent.LOST, began, error):
                self._submitter.pause(Pause(error.message, error))

    def _names(self, members: dict[int, int]) -> str:
        return ", ".join(self._connections.plan.members[member] for member in members)

    # Steps

    def _settle(self, began: int, dead: dict[int, int]) -> None:
        """Let the executions in flight end."""
        connections = self._connections
        connections.control.dead.update(dead)
        assert connections.pool is not None
        for member in dead:
            connections.pool.drop_reader(self._setup.name_of(member))
        self._collector.mark_dead(dead)
        # First: from then on the number of the next execution stays as it is.
        while not self._submitter.is_quiet():
            if self._overtaken(began):
                return
            time.sleep(POLL_S)
        execution = self._executions.submitted
        by_neighbour = self._by_neighbour(dead)
        # Those that can be told at once first: another one may be busy for long.
        for neighbour, members in sorted(
            by_neighbour.items(), key=lambda each: not connections.control.has_room(each[0])
        ):
            connections.control.tell(neighbour, MembersDied(members, execution), lambda: self._overtaken(began))
        pending = self._executions.pending
        while pending and not self._overtaken(began):
            self._collector.collect_until(lambda: not pending, Deadline(POLL_S))
        self._finish(RepairEvent.SETTLED, began)

    def _by_neighbour(self, dead: dict[int, int]) -> dict[int, tuple[int, ...]]:
        """Return the dead members next to each living actor that has some."""
        by_neighbour: dict[int, tuple[int, ...]] = {}
        for member in dead:
            for neighbour in self._setup.neighbours(member) - dead.keys():
                by_neighbour[neighbour] = (*by_neighbour.get(neighbour, ()), member)
        return by_neighbour

    def _await_processes(self, began: int, dead: dict[int, int]) -> None:
        """Wait until every dead member has a new process."""
        self._submitter.pause(Pause(f"{self._names(dead)} ended and has not been restarted by Ray yet"))
        deadline = Deadline(self._timeout_s)
        self._new_processes.clear()
        for member in dead:
            try:
                info = self._new_process(member, deadline, began)
            except GraphError as error:
                self._halt(began, error)
                return
            if info is None:
                return
            self._new_processes[member] = info
        self._finish(RepairEvent.RESTARTED, began)

    def _new_process(self, member: int, deadline: Deadline, began: int) -> ActorInfo | None:
        """Return facts about the process that takes the place of a member's dead one; None if the step is overtaken.

        GraphActorDiedError if there is none in time, or never will be.
        """
        name, actor = self._connections.plan.members[member], self._connections.actors[member - 1]
        ended = self._ended[member]
        actor_id = _ray.actor_id_of(actor)
        remedy = "Call graph.replace(old_actor, new_actor), or compile with living actors"
        while True:
            ref = actor.__ray_call__.remote(bootstrap.describe_actor)
            while not ray.wait([ref], timeout=ANSWER_POLL_S)[0]:
                if self._overtaken(began):
                    return None
                if deadline.left_s() == 0:
                    break
            else:
                try:
                    info: ActorInfo = answer_of(name, actor, ref, deadline)
                except GraphActorDiedError as error:
                    if _ray.state_of(actor_id) == "DEAD":
                        raise GraphActorDiedError(
                            f"{name} is dead, and Ray does not restart it (max_restarts). {remedy}", actor=actor_id
                        ) from error
                else:
                    if not info.place.same_process(ended):
                        return self._checked(name, info)
            if self._overtaken(began):
                return None
            if deadline.left_s() == 0:
                raise GraphActorDiedError(
                    f"{name} was not restarted by Ray within {deadline.timeout_s} s (ray status). {remedy}",
                    actor=actor_id,
                )
            time.sleep(POLL_S)

    def _checked(self, name: str, info: ActorInfo) -> ActorInfo:
        """Return the facts of a new process. GraphPlanError if it cannot share memory with the driver."""
        if self._setup.shares_memory(info):
            return info
        raise GraphPlanError(
            f"{name} now runs on another host, and a graph is repaired within one host only. Call recompile()"
        )

    def _open(self, began: int, dead: dict[int, int]) -> None:
        """Open the channels of the new processes."""
        connections, setup, new = self._connections, self._setup, self._new_processes
        self._submitter.pause(Pause(f"{self._names(dead)} was restarted, and its channels are not open yet"))
        ended_pids = tuple(connections.infos[member - 1].place.pid for member in dead)
        for member in dead:
            setup.replace_member(member, new[member])
            remember(connections.actors[member - 1], new[member])
            connections.watch_member(member)
        execution = self._executions.submitted
        orders = {
            neighbour: MembersRestarted(execution, {m: setup.doorbell_of(m) for m in members}, ended_pids)
            for neighbour, members in self._by_neighbour(dead).items()
        }
        answers = connections.control.ask_each(orders, lambda: self._overtaken(began))
        if answers is None:
            self._wait_for_cause(began)
            return
        try:
            for error in filter(None, answers.values()):
                raise error
            setup.reopen_own_ends(dead)
            programs = {member: setup.program(member, execution) for member in dead}
        except GraphError as error:
            self._halt_unless_dead(began, dead, error)
            return
        for pid in ended_pids:
            connections.leases.forget_process(pid)
        self._collector.mark_alive(dead)
        refs = {
            member: connections.actors[member - 1].__ray_call__.remote(bootstrap.join_graph, *program)
            for member, program in programs.items()
        }
        for member, ref in refs.items():
            self._join(began, member, dead, ref)
        with self._changed:
            if self._plan.admits:
                self._submitter.resume()

    def _join(self, began: int, member: int, dead: dict[int, int], ref: Any) -> None:
        """Wait until a new process has joined the graph, however long it runs another call before."""
        name, actor = self._connections.plan.members[member], self._connections.actors[member - 1]
        while not ray.wait([ref], timeout=ANSWER_POLL_S)[0]:
            if self._is_abandoned():
                return
        try:
            answer_of(name, actor, ref, Deadline(None))
        except GraphError as error:
            self._set_joined([member])
            self._connections.control.dead.add(member)
            self._halt_unless_dead(began, dead, error)
        else:
            with self._changed:
                self._plan.opened(member, dead[member])

    def _halt_unless_dead(self, began: int, dead: dict[int, int], error: GraphError) -> None:
        """Halt because channels cannot be opened, unless a new process has ended: then the repair begins anew."""
        places = {member: self._connections.infos[member - 1].place for member in dead}
        ended = [member for member, place in places.items() if not alive(place)]
        for member in ended:
            self.died(member, places[member])
        if not ended:
            self._halt(began, error)

    def _wait_for_cause(self, began: int) -> None:
        """Wait until the death of an actor that did not answer is noted, or the defect that it has reported."""
        trouble = self._connections.control.poll()
        if trouble is not None:
            self._collector.fail(trouble)
        if not self._overtaken(began):
            time.sleep(POLL_S)
