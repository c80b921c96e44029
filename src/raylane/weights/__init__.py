"""Weights that trainers publish in versions, and that readers of any other layout take over.

    publisher = weights.Publisher("policy", model, rank=rank, world=8)     every rank of a trainer
    publisher.publish(step)

    subscriber = weights.Subscriber("policy", model)                       every reader
    subscriber.update()

A version lies in shared memory of an actor of its host, the keeper, and becomes visible when all ranks have written
their part of it. So readers get one whole version or the one before, and versions outlive the trainer.

Names that need torch are loaded on first use: the actors of the catalogue and the keepers import this package too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raylane.core.deadline import Deadline
from raylane.weights.service.answers import VersionInfo
from raylane.weights.service.client import CatalogueClient
from raylane.weights.state.readers import ReaderInfo

if TYPE_CHECKING:
    from raylane.weights.engines import attach
    from raylane.weights.engines.attachment import EngineUpdate
    from raylane.weights.fleet import Fleet, FleetReader
    from raylane.weights.layout.mapping import Mapping
    from raylane.weights.layout.plan import Plan
    from raylane.weights.memory.tensors import Part
    from raylane.weights.publisher import Publisher
    from raylane.weights.state.contents import ReaderState
    from raylane.weights.subscriber import Subscriber, Update

_HOME = {  # module of each name that is loaded on first use
    "EngineUpdate": "engines.attachment",
    "Fleet": "fleet",
    "FleetReader": "fleet",
    "Mapping": "layout.mapping",
    "Part": "memory.tensors",
    "Plan": "layout.plan",
    "Publisher": "publisher",
    "ReaderState": "state.contents",
    "Subscriber": "subscriber",
    "Update": "subscriber",
    "attach": "engines",
}

__all__ = [
    "EngineUpdate",
    "Fleet",
    "FleetReader",
    "Mapping",
    "Part",
    "Plan",
    "Publisher",
    "ReaderInfo",
    "ReaderState",
    "Subscriber",
    "Update",
    "VersionInfo",
    "attach",
    "drop",
    "readers",
    "versions",
]


def __getattr__(name: str) -> Any:
    """Load a public name on its first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'raylane.weights' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"raylane.weights.{_HOME[name]}"), name)


def versions(
    name: str | None = None, *, digests: bool = False, detached: bool = False, timeout: float | None = None
) -> list[VersionInfo]:
    """Return the versions of a name (None: of all names) that are in memory, the oldest first.

    With `digests`, the bytes of each committed version are read once (about 1 s for 1 GB), and the result is kept.

    WeightsLostError if the name is unknown.
    """
    client = CatalogueClient(detached=detached)
    infos: list[VersionInfo] = client.call("versions", name, digests=digests, deadline=Deadline.of_call(timeout))
    return infos


def readers(name: str | None = None, *, detached: bool = False, timeout: float | None = None) -> list[ReaderInfo]:
    """Return the readers of a name (None: of all names), those that are furthest behind first.

    Waits a few seconds if the catalogue was started again and a keeper does not answer.

    WeightsLostError if the name is unknown.
    """
    client = CatalogueClient(detached=detached)
    infos: list[ReaderInfo] = client.call("readers", name, deadline=Deadline.of_call(timeout))
    return infos


def drop(name: str, *, detached: bool = False, timeout: float | None = None) -> None:
    """Forget a name and free its versions; readers keep what they have. Unknown names are ignored."""
    CatalogueClient(detached=detached).call("drop", name, deadline=Deadline.of_call(timeout))
