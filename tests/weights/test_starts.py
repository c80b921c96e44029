"""Identity of trainers and names: every order of registrations, publications, drops and restarts, without Ray."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from raylane.errors import WeightsError, WeightsLostError
from raylane.weights.layout.boxes import Box, HeldBox, TensorLayout
from raylane.weights.state.ledger import Ledger
from raylane.weights.state.readers import NamedReaders, ReaderKey, VersionKey
from raylane.weights.state.starts import DECISIONS, Age, Place, PublisherKey, RankKey, RankRegistration, StartKey

WORLD = 2
RANKS = [(trainer, rank) for trainer in "AB" for rank in range(WORLD)]
EVENTS = [
    *(("register", *each) for each in RANKS),
    *(("publish", *each) for each in RANKS),
    ("publish all", "A", 0),
    ("publish all", "B", 0),
    ("drop", "", 0),
    ("restart", "", 0),
]


@dataclass
class Publisher:
    """One rank, which does with its calls what `weights.Publisher` does."""

    trainer: str
    rank: int
    explicit: bool
    start: StartKey | None = None

    def registration(self) -> RankRegistration:
        held = HeldBox(Box((self.rank * 2,), (2,)), (0,))
        layout = {"w": TensorLayout((2 * WORLD,), "float32", 4, (held,))}
        key = PublisherKey(f"{self.trainer}{self.rank}", "a", 1, 1)
        trainer = self.trainer if self.explicit else None
        return RankRegistration(self.rank, WORLD, layout, {}, key, 2, trainer=trainer, start=self.start)


class World:
    """A catalogue with one name, two trainers that live on, and all bytes that were ever committed."""

    def __init__(self, *, explicit: bool) -> None:
        self.ledger = Ledger("policy")
        self.publishers = {each: Publisher(*each, explicit) for each in RANKS}
        self.clock = 0
        self.step = 0
        self.written: dict[VersionKey, dict[int, str]] = {}
        self.committed: set[VersionKey] = set()

    def play(self, event: str, trainer: str, rank: int) -> None:
        self.clock += 1
        if event in ("drop", "restart"):  # both leave the publishers with what they know
            self.ledger = Ledger("policy")
        elif event == "register":
            self.register(self.publishers[trainer, rank])
        elif event == "publish":
            self.step += 1
            self.publish(self.publishers[trainer, rank])
        else:
            self.step += 1
            for each in range(WORLD):
                self.publish(self.publishers[trainer, each])

    def register(self, publisher: Publisher) -> bool:
        try:
            publisher.start = self.ledger.register(publisher.registration(), [], self.clock).key
        except WeightsError:
            return False
        return True

    def publish(self, publisher: Publisher) -> None:
        if publisher.start is None:  # it was not made yet
            return
        key = RankKey(publisher.start, publisher.rank, f"{publisher.trainer}{publisher.rank}")
        try:
            start = self.ledger.current(key)
        except WeightsLostError:
            if self.register(publisher):
                self.publish(publisher)
            return
        version = self.ledger.begin(start, publisher.rank, self.step)
        if version is None:
            return
        identity = VersionKey(self.ledger.life, version.number)
        assert identity not in self.committed, "a committed version is written again"
        self.written.setdefault(identity, {})[publisher.rank] = publisher.trainer
        if self.ledger.done(version.number, publisher.rank):
            self.committed.add(identity)

    def mixed(self) -> list[VersionKey]:
        return [key for key in self.committed if len(set(self.written[key].values())) > 1]


def orders(length: int) -> Iterator[tuple[tuple[str, str, int], ...]]:
    # The first event that does anything is a registration, of rank 0 or 1 of A without loss of generality.
    for first in EVENTS[:WORLD]:
        for others in itertools.product(EVENTS, repeat=length - 1):
            yield first, *others


@pytest.mark.claim("weights", "no version has ranks of two trainers with `trainer=` of their own, in any event order")
def test_every_order_of_events_mixes_no_trainers() -> None:
    mixed = 0
    for order in orders(5):
        world = World(explicit=True)
        for event in order:
            world.play(*event)
        assert world.mixed() == [], order
        mixed += len(world.committed)
    assert mixed > 100  # the walk publishes


def test_whole_registrations_mix_no_trainers() -> None:
    starts = [("register all", "A", 0), ("register all", "B", 0)]
    singles = [event for event in EVENTS if event[0] != "register"]
    for order in itertools.product(starts + singles, repeat=4):
        world = World(explicit=False)
        for event, trainer, rank in [*starts[:1], *order]:
            if event == "register all":
                for each in (rank, 1 - rank):
                    world.publishers[trainer, each] = Publisher(trainer, each, explicit=False)
                    world.play("register", trainer, each)
            else:
                world.play(event, trainer, rank)
        assert world.mixed() == [], order


def test_later_trainer_replaces_the_earlier_as_a_whole() -> None:
    world = World(explicit=False)
    for each in RANKS:
        world.play("register", *each)
    world.play("publish all", "A", 0)
    assert world.committed == set()
    assert not world.register(world.publishers["A", 0])
    with pytest.raises(WeightsError, match=r"replaced by one of 2 ranks that registered later.* under another name"):
        world.ledger.register(world.publishers["A", 1].registration(), [], 9)
    world.play("publish all", "B", 0)
    assert len(world.committed) == 1


def test_every_registration_has_a_decision() -> None:
    assert DECISIONS.keys() == set(itertools.product(Age, Place))


def test_versions_of_another_life_do_not_count() -> None:
    readers, key = NamedReaders(), ReaderKey("policy", "one", "a", 1, 1)
    readers.life = "second"
    readers.commit(1, 0)
    readers.commit(2, 0)
    readers.join(key, 0, VersionKey("first", 1))
    assert readers.behind(VersionKey("second", 1)) == ["one"]
    assert readers.users(1, "second") == []
    assert readers.users(1) == ["one"]
    readers.apply(key, VersionKey("second", 1), 1, 0)
    assert readers.behind(VersionKey("second", 1)) == []


def test_ranks_with_keys_of_two_catalogues_are_one_trainer() -> None:
    """The catalogue was started again between the registrations of rank 1 and rank 0."""
    zero, one = (Publisher("A", rank, explicit=True) for rank in range(WORLD))
    one.start = Ledger("policy").register(one.registration(), (), 1).key
    ledger = Ledger("policy")
    zero.start = ledger.register(zero.registration(), (), 2).key
    start = ledger.register(one.registration(), (), 3)
    assert start.key == zero.start
    assert not start.missing()
