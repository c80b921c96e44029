"""Deployment of a graph: from a plan to channels that are open in every member.

    driver                                                     actors, by ordinary calls in parallel
    1. only if it was not asked before: describe_actor  --->   facts about each actor
    2. only if the graph spans hosts: prepare_network   --->   rings and addresses of every process with a link
    3. join_graph, with a Program                       --->   channels open, graph loop serves the graph
    4. from then on no message goes through Ray

If a step fails, everything before it is undone: actors that have joined are told to leave. Facts about an actor that
has restarted are stale: they name memory of its old process, which cannot be opened. Then the actors are asked again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.errors import GraphActorDiedError, GraphClosedError, GraphError, GraphPlanError, GraphTimeoutError
from raylane.graph.channels.layout import GraphLayout, GraphOptions
from raylane.graph.driver.channel_setup import ChannelSetup
from raylane.graph.driver.connections import Connections
from raylane.graph.plan.ir import Plan
from raylane.graph.worker import bootstrap
from raylane.graph.worker.program import ActorInfo

CAUSE_S = 5.0
"""Seconds to wait for the actor whose failure was the cause, after another actor has reported a consequence."""


POLL_S = 0.05
"""Seconds between two calls to an actor that is restarting."""

MAX_DESCRIBED = 10_000
"""Number of actors whose facts are kept; more than one process ever uses."""

_described: dict[str, ActorInfo] = {}
"""Facts by actor id."""


def deploy(plan: Plan, actors: Sequence[Any], options: GraphOptions) -> tuple[Connections, ChannelSetup]:
    """Open every channel of the plan. Waits for the actors to start and to finish the calls that they are running.

    The setup opens channels anew where the graph is repaired.
    """
    ids = {member: _ray.actor_id_of(actor) for member, actor in enumerate(actors, 1)}

    def describe(members: Iterable[int]) -> dict[int, ActorInfo]:
        calls = dict.fromkeys(members, (bootstrap.describe_actor,))
        descriptions = _call_all(plan, actors, calls, Deadline(options.start_timeout_s))
        if len(_described) > MAX_DESCRIBED:
            _described.clear()
        _described.update((ids[member], info) for member, info in descriptions.items())
        return descriptions

    def attempt(infos: Mapping[int, ActorInfo]) -> tuple[Connections, ChannelSetup]:
        connections = Connections(plan, actors, [infos[member] for member in ids], repairs=options.repairs)
        setup = ChannelSetup(connections, options)
        if options.repairs:
            setup.check_repairable()
        _open_channels(connections, setup, Deadline(options.timeout_s))
        return connections, setup

    known = {member: _described[actor_id] for member, actor_id in ids.items() if actor_id in _described}
    infos = known | describe(member for member in ids if member not in known)
    try:
        return attempt(infos)
    except GraphPlanError:
        infos |= (fresh := describe(known))
        if fresh == known:  # no actor has restarted: the error has another cause
            raise
    return attempt(infos)


def _open_channels(connections: Connections, setup: ChannelSetup, deadline: Deadline) -> None:
    plan, actors = connections.plan, connections.actors
    peers: dict[int, GraphLayout] = {}
    try:
        # Rings first: layouts name their paths.
        setup.create_rings()
        peers = setup.peer_layouts()
        if peers:
            setup.prepare_own_network()
            calls = {member: (bootstrap.prepare_network, layout) for member, layout in peers.items()}
            setup.add_peers(_call_all(plan, actors, calls, deadline))
        # The driver's own links before the actors join: an actor's link to the driver needs the driver ready.
        setup.open_own_ends(deadline)
        joins = {member: (bootstrap.join_graph, *program) for member, program in enumerate(setup.programs(), 1)}
        answers = _call_all(plan, actors, joins, deadline)
        connections.wake_refused = next(filter(None, answers.values()), None)
        connections.wake_from_receivers()
        if setup.options.repairs:
            setup.keep_descriptors()
    except BaseException as error:
        connections.close(0.0)  # actors that have joined leave; no wait, because the caller wants the error
        for member in peers:
            actors[member - 1].__ray_call__.remote(bootstrap.abandon_network, setup.graph)
        if isinstance(error, OSError) and not isinstance(error, GraphError):
            raise GraphPlanError(
                f"cannot create the channels of {len(plan.edges)} edges with {setup.options.max_inflight} slots each: "
                f"{error}. Lower max_inflight, or raise the limits of this process (ulimit -n, ulimit -v, shared "
                "memory)"
            ) from error
        raise
    finally:
        setup.close_descriptors()


def _call_all(
    plan: Plan, actors: Sequence[Any], calls: Mapping[int, tuple[Any, ...]], deadline: Deadline
) -> dict[int, Any]:
    """Call a function in each of these members at the same time. Return the results by member."""
    # All calls are sent before the first answer is waited for: actors start and join at the same time.
    refs = {member: actors[member - 1].__ray_call__.remote(*call) for member, call in calls.items()}
    answers = {}
    secondary: GraphClosedError | None = None
    for member, ref in refs.items():
        try:
            answers[member] = answer_of(plan.members[member], actors[member - 1], ref, deadline)
        except GraphClosedError as error:
            # A secondary failure: the actor lost its link to another one. Prefer the other's own error, the cause.
            secondary = secondary or error
            remaining_s = deadline.left_s()
            deadline = Deadline(CAUSE_S if remaining_s is None else min(remaining_s, CAUSE_S))
        except GraphTimeoutError:
            if secondary is None:
                raise
    if secondary is not None:
        raise secondary
    return answers


def _get(name: str, actor: Any, ref: Any, deadline: Deadline) -> Any:
    """Wait for one answer. GraphTimeoutError, and before it the log, say why there is none yet."""

    def reason() -> str:
        state = _ray.state_of(_ray.actor_id_of(actor))
        return "it is running a long method" if state == "ALIVE" else f"it has not started (its state in Ray: {state})"

    for wait_s in deadline.rounds(lambda: f"{name} has not answered: {reason()}"):
        if ray.wait([ref], timeout=wait_s)[0]:
            return ray.get(ref)
    raise GraphTimeoutError(
        f"{name} did not answer within {deadline.timeout_s} s: {reason()}. Try again when it is free, or compile "
        "with a larger timeout"
    )


def answer_of(name: str, actor: Any, ref: Any, deadline: Deadline) -> Any:
    """Wait for one answer. Errors of Ray are translated into errors of graphs."""
    try:
        return _get(name, actor, ref, deadline)
    except ray.exceptions.ActorUnavailableError as error:
        raise GraphActorDiedError(
            f"{name} cannot be reached at the moment: Ray restarts it, or has lost it. Compile again later, or call "
            f"graph.recompile(), which waits for the restart: {error}",
            actor=_ray.actor_id_of(actor),
        ) from error
    except ray.exceptions.RayActorError as error:
        raise GraphActorDiedError(f"{name} is dead: {error}", actor=_ray.actor_id_of(actor)) from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, GraphError):
            raise error.cause from None
        raise GraphPlanError(f"{name} cannot take part: {error}") from error


def remember(actor: Any, info: ActorInfo) -> None:
    """Keep new facts about an actor that has restarted, for the next graph."""
    _described[_ray.actor_id_of(actor)] = info


# Waiting for actors that restart


def wait_until_alive(plan: Plan, actors: Sequence[Any], timeout_s: float | None) -> None:
    """Wait until every actor of an ended graph answers an ordinary call; Ray may be restarting it.

    A call that returns is the only proof that an actor is alive: for a moment after the death of a process, Ray still
    lists its actor as alive. Ray's list decides only that an actor is dead for good. Called by `recompile`.

    GraphActorDiedError if Ray will not restart an actor, GraphTimeoutError if one does not answer in time.
    """
    deadline = Deadline(timeout_s)
    waiting = dict(zip(plan.members[1:], actors, strict=True))
    while True:
        refs = {name: actor.__ray_call__.remote(bootstrap.describe_actor) for name, actor in waiting.items()}
        waiting = {
            name: waiting[name] for name, ref in refs.items() if not _answers(name, waiting[name], ref, deadline)
        }
        if not waiting:
            return
        remaining_s = deadline.left_s()
        if remaining_s is not None and remaining_s <= 0:
            raise GraphTimeoutError(
                f"{', '.join(waiting)} did not restart within {deadline.timeout_s} s: Ray restarts it still, or waits "
                "for resources (ray status). Call recompile again, or compile with a larger timeout"
            )
        time.sleep(POLL_S if remaining_s is None else min(remaining_s, POLL_S))


def _answers(name: str, actor: Any, ref: Any, deadline: Deadline) -> bool:
    """Return True if the call has returned, False if the actor is restarting."""
    try:
        _get(name, actor, ref, deadline)
    except ray.exceptions.RayActorError as error:
        actor_id = _ray.actor_id_of(actor)
        if _ray.state_of(actor_id) != "DEAD":
            return False
        raise GraphActorDiedError(
            f"{name} is dead, and Ray does not restart it (max_restarts): compile with a living actor. {error}",
            actor=actor_id,
        ) from error
    return True
