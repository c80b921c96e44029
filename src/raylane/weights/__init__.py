"""Weights that trainers publish in versions, and that readers of any other layout take over.

    publisher = weights.Publisher("policy", model, rank=rank, world=8)     every rank of a trainer
    publisher.publish(step)

    subscriber = weights.Subscriber("policy", model)                       every reader
    subscriber.update()

A version lies in shared memory of an actor of its host, the keeper, and becomes visible when all ranks have written
their part of it. So readers get one whole version or the one before, and versions outlive the trainer.
"""

from __future__ import annotations

from raylane.core.deadline import Deadline
from raylane.weights.catalogue import VersionInfo
from raylane.weights.client import CatalogueClient
from raylane.weights.plan import Plan
from raylane.weights.publisher import Publisher
from raylane.weights.subscriber import ReaderState, Subscriber, Update
from raylane.weights.tensors import Part

__all__ = ["Part", "Plan", "Publisher", "ReaderState", "Subscriber", "Update", "VersionInfo", "drop", "versions"]


def versions(name: str | None = None, *, detached: bool = False, timeout: float | None = None) -> list[VersionInfo]:
    """Return the versions of a name (None: of all names) that are in memory, the oldest first.

    WeightsLostError if the name is unknown.
    """
    infos: list[VersionInfo] = CatalogueClient(detached=detached).call(
        "versions", name, deadline=Deadline.of_call(timeout)
    )
    return infos


def drop(name: str, *, detached: bool = False, timeout: float | None = None) -> None:
    """Forget a name and free its versions; readers keep what they have. Unknown names are ignored."""
    CatalogueClient(detached=detached).call("drop", name, deadline=Deadline.of_call(timeout))
