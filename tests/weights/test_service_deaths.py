"""Deaths of the actors of `raylane.weights`, which the other tests of weights keep for a whole file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import ray
from tests.weights.weights_actors import Reader, Trainer, publish, started

from raylane import weights
from raylane.errors import WeightsLostError, WeightsTimeoutError


@pytest.mark.claim("weights", "the death of a keeper or of the catalogue loses versions only")
def test_death_of_keeper_or_catalogue_loses_versions_only(cluster: None, eventually: Callable[..., None]) -> None:
    with started() as start:
        trainers, reader = [start(Trainer, rank, 2) for rank in range(2)], start(Reader)
        publish(trainers, 1)
        ray.get(reader.update.remote())
        kill("keeper")
        with pytest.raises((WeightsLostError, WeightsTimeoutError)):
            ray.get(reader.update.remote(2, 1))
        # A version that is begun before the death is known is lost with it, and the trainer has to publish it again.
        eventually(lambda: [version.state for version in weights.versions("policy")] == ["lost"], within_s=30)
        number = publish(trainers, 2)
        assert ray.get(reader.update.remote(number)) == (number, {2})
        kill("catalogue")
        later = publish(trainers, 3)
        assert later > number
        assert ray.get(reader.update.remote(later)) == (later, {3})


def kill(kind: str) -> None:
    """Kill actors, and wait until they have ended: until then a catalogue would still take a version."""
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["name"].startswith(kind):
            actor = ray.get_actor(named["name"], named["namespace"])
            ray.kill(actor)
            with contextlib.suppress(ray.exceptions.RayActorError):
                while True:  # ends by the error of a dead actor, or by GetTimeoutError
                    ray.get(actor.__ray_ready__.remote(), timeout=30)
