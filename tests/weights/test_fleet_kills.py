"""Kills of readers and of the service at random moments of the switches of a fleet."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from tests.weights.fleet_actors import WAIT_S, Reader, Start, Trainer, answers, serving_version_1, started

from raylane import weights
from raylane.errors import WeightsError
from raylane.weights.service.actors import NAMESPACE, actor_names
from raylane.weights.service.client import CATALOGUE_NAME

KILLS = int(os.environ.get("RAYLANE_KILLS", "4"))
"""Number of kills: hundreds of them are for `make faults`, not for continuous integration."""
READERS = 3
SERVICE_EVERY = 8
"""One of so many kills is that of the service: what it knew of versions is lost."""
LATEST_KILL_S = 0.04
"""A switch of three readers takes about half of it."""


@pytest.fixture
def start(cluster: None) -> Iterator[Start]:
    """Return a function that starts an actor."""
    with started() as start_actor:
        yield start_actor


@pytest.mark.faults
@pytest.mark.timeout(60 + 20 * KILLS)
@pytest.mark.claim("weights", "the readers of a fleet switch together or not at all, whoever dies when")
def test_all_living_readers_answer_with_one_version(start: Start, eventually: Callable[..., None]) -> None:
    draw = random.Random(KILLS)
    trainer, readers = start(Trainer, "policy"), [start(Reader, "policy") for _ in range(READERS)]
    fleet, outcomes, value = weights.Fleet("policy"), Counter[str](), 1
    values = {}  # what the tensors of a version are full of: numbers go on when the service dies

    def publish() -> int:
        (number,) = ray.get(trainer.publish.remote(value), timeout=WAIT_S)
        values[number] = float(value)
        return int(number)

    fleet.switch(publish(), readers=READERS)
    for kill in range(KILLS):
        value += 1
        # One that has not joined would have to take a version that dies with the service.
        eventually(lambda: len(fleet.state()["readers"]) == READERS, within_s=30)
        number = publish()
        of_service = kill % SERVICE_EVERY == SERVICE_EVERY - 1
        victim = draw.randrange(READERS)
        pid = ray.get(readers[victim].pid.remote(), timeout=WAIT_S)
        if of_service:
            (name,) = actor_names(CATALOGUE_NAME)
            actor = ray.get_actor(name, NAMESPACE)
            killing = threading.Timer(draw.uniform(0, LATEST_KILL_S), ray.kill, [actor])
        else:
            killing = threading.Timer(draw.uniform(0, LATEST_KILL_S), os.kill, (pid, signal.SIGKILL))
        killing.start()
        try:
            fleet.switch(number, timeout=5 if of_service else 30)
            outcome = "switched"
        except WeightsError as error:
            outcome = type(error).__name__
        killing.join()
        outcomes[f"{'service' if of_service else 'reader'}: {outcome}"] += 1
        living = readers if of_service else [each for each in readers if each is not readers[victim]]
        labels = {label for each in living for label in ray.get([each.label.remote()], timeout=WAIT_S)}
        eventually(lambda labels=labels: fleet.state()["readers"].keys() == labels, within_s=30)
        committed = fleet.state()["versions"]
        # After an error the readers that were told late switch at their next step: ask again.
        found: list[Any] = ray.get([each.answer.remote() for each in living], timeout=WAIT_S)
        assert [versions for versions, _ in found] == [committed] * len(living), (kill, outcome, found, committed)
        assert [full for _, full in found] == [{values[committed["policy"]]}] * len(living), (kill, found)
        if outcome == "switched":
            assert committed == {"policy": number}
        if of_service:  # the versions died with it, so a reader that joins could not take what the others serve
            value += 1
            number = publish()
            assert fleet.switch(number, readers=READERS, timeout=60) == {"policy": number}
        else:
            readers[victim] = start(Reader, "policy")
    print(dict(outcomes))
    value += 1
    assert fleet.switch(publish(), readers=READERS, timeout=60)


@pytest.mark.faults
def test_a_fleet_outlives_its_service(start: Start, eventually: Callable[..., None]) -> None:
    trainer, readers, fleet = serving_version_1(start, 2)
    (name,) = actor_names(CATALOGUE_NAME)
    killed = ray.get_actor(name, NAMESPACE)
    ray.kill(killed)

    def has_ended() -> bool:  # while it ends it may still answer
        try:
            ray.get(killed.newest.remote("policy"), timeout=WAIT_S)
        except ray.exceptions.RayActorError:
            return True
        return False

    eventually(has_ended, within_s=WAIT_S)
    eventually(lambda: (fleet.state()["versions"], len(fleet.state()["readers"])) == ({"policy": 1}, 2))
    assert answers(readers) == [({"policy": 1}, {1.0})] * 2
    (number,) = ray.get(trainer.publish.remote(2))
    assert fleet.switch(number, readers=2) == {"policy": number}
    assert answers(readers) == [({"policy": number}, {2.0})] * 2
