"""Functions that `compile` runs in an actor, by ordinary calls on the actor's own thread.

describe_actor     -->  facts for the plan of channels
prepare_network    -->  only if the graph spans hosts: rings and an address for peers
join_graph         -->  channels opened, session handed to the graph loop
abandon_network    -->  only if the compilation failed: undo prepare_network
"""

from __future__ import annotations

import contextlib
from typing import Any

from raylane import _ray
from raylane.core import settings
from raylane.core.process.place import here
from raylane.errors import GraphPlanError
from raylane.graph.channels.layout import GraphLayout
from raylane.graph.channels.peer_network import PeerNetwork
from raylane.graph.channels.ring import RingSpec
from raylane.graph.values import references
from raylane.graph.worker import exclusive, thread_state
from raylane.graph.worker.loop import graph_loop
from raylane.graph.worker.program import ActorInfo, Program
from raylane.graph.worker.session import Session
from raylane.transport.link import endpoint as endpoints
from raylane.transport.value.source import Source


def describe_actor(instance: Any) -> ActorInfo:
    """Return facts about this actor. Creates its graph loop, whose thread does not run yet."""
    # torch is not imported for this question: that would cost the actor 2 s and 200 MB.
    torch = thread_state.loaded("torch")
    return ActorInfo(
        place=here(),
        name=_ray.describe_self(),
        doorbell=graph_loop().doorbell.segment.path,
        host=settings.HOST.read(),
        sees_gpu=torch is not None and torch.cuda.is_available(),
    )


_prepared: dict[str, PeerNetwork] = {}
"""Networks by graph, between `prepare_network` and `join_graph`. Only ordinary calls of the actor use this."""


def prepare_network(instance: Any, layout: GraphLayout) -> tuple[Source, dict[tuple[int, int], RingSpec]]:
    """Create the rings that this actor writes and accept connections of a graph that spans hosts.

    Return the actor's address and the new rings.
    """
    # A driver that died between the two steps can no longer abandon its networks.
    for old, network in list(_prepared.items()):
        if network.stale():
            abandon_network(instance, old)
    network = PeerNetwork(layout)
    try:
        rings = network.prepare()
        source = endpoints.endpoint().source()
    except BaseException:
        network.close()
        raise
    _prepared[layout.graph] = network
    return source, rings


def abandon_network(instance: Any, graph: str) -> None:
    """Undo `prepare_network` after a failed compilation, unless `join_graph` was reached."""
    network = _prepared.pop(graph, None)
    if network is not None:
        network.close()


def join_graph(instance: Any, packed: bytes, held: list[Any]) -> str | None:
    """Run a share of a graph from now on.

    Return the reason why this process cannot wake the driver's asyncio loop; None if it can. `packed` and `held` are a
    `Program`, packed by `values.references`. GraphPlanError if a method is missing or cannot be used.
    """
    program: Program = references.unpack(packed, held)
    loop = _ray.actor_loop()
    if program.layout.options.exclusive and loop is not None:
        raise GraphPlanError(
            f"cannot compile with exclusive=True: {_ray.describe_self()} is an asyncio actor, whose calls interleave "
            "by design. Use an asyncio.Lock in its methods"
        )
    network = _prepared.pop(program.layout.graph, None)
    if program.layout.links and network is None:
        raise GraphPlanError(
            f"{_ray.describe_self()} cannot join the graph: the compilation has ended before. Compile again"
        )
    with contextlib.ExitStack() as undo:
        if network is not None:
            undo.callback(network.close)
        # Before the session opens channels: from then on the driver may start executions.
        if program.layout.options.exclusive:
            exclusive.add_graph(instance, graph_loop().exclusive)
            undo.callback(exclusive.remove_graph, instance)
        session = Session(program, instance, loop, network, graph_loop().doorbell, graph_loop().exclusive)
        undo.pop_all()  # the session owns both from now on
    # Captured here, on the actor's own thread: its `__init__` and earlier calls have set these settings.
    graph_loop().add(session, thread_state.capture())
    return session.wake_refused
