from __future__ import annotations

import pytest

from raylane.errors import WeightsError, WeightsLayoutError, WeightsLostError
from raylane.weights.delta import DeltaOptions
from raylane.weights.layout import Box, HeldBox, Layout, TensorLayout
from raylane.weights.ledger import Generation, Ledger, RankRegistration, Version, VersionState


def layout(rank: int, world: int, rows: int = 12) -> Layout:
    held = HeldBox(Box((rank * rows // world, 0), (rows // world, 2)), (0, 0))
    return {"w": TensorLayout((rows, 2), "float32", 4, (held,))}


def register(ledger: Ledger, world: int, keep: int = 2, host: str = "a") -> Generation:
    for rank in range(world):
        generation = ledger.register(RankRegistration(rank, world, layout(rank, world), {}, host, keep))
    return generation


def begin(ledger: Ledger, generation: Generation, rank: int, step: int) -> Version:
    version = ledger.begin(generation, rank, step)
    assert version is not None
    return version


def publish(ledger: Ledger, generation: Generation, step: int) -> int:
    numbers = {begin(ledger, generation, rank, step).number for rank in range(generation.world)}
    (number,) = numbers
    committed = [ledger.done(number, rank) for rank in range(generation.world)]
    assert committed == [False] * (generation.world - 1) + [True]
    return number


def newest(ledger: Ledger) -> int | None:
    version = ledger.newest()
    return None if version is None else version.number


def test_version_is_visible_when_all_ranks_are_done() -> None:
    ledger = Ledger("policy")
    generation = register(ledger, 3)
    assert generation.stored is not None
    assert newest(ledger) is None
    version = begin(ledger, generation, 0, 10)
    assert ledger.begin(generation, 1, 10) is version
    assert not ledger.done(version.number, 0)
    assert not ledger.done(version.number, 1)
    assert version.missing() == [2]
    assert newest(ledger) is None
    assert ledger.begin(generation, 2, 10) is version
    assert ledger.done(version.number, 2)
    assert newest(ledger) == version.number == 1


@pytest.mark.parametrize("keep", [2, 3, 5])
def test_committed_versions_keep_their_slots(keep: int) -> None:
    ledger = Ledger("policy")
    generation = register(ledger, 2, keep)
    for step in range(1, 20):
        publish(ledger, generation, step)
        kept = [version for version in ledger.versions if version.state is VersionState.COMMITTED]
        assert [version.number for version in kept] == list(range(max(1, step - keep + 1), step + 1))
        assert len({version.slot for version in kept}) == len(kept)
        opened = begin(ledger, generation, 0, step + 1)
        still = [version.slot for version in ledger.versions if version.state is VersionState.COMMITTED]
        assert opened.slot not in still
        assert len(still) == min(step, keep - 1)


def test_rank_that_comes_back_goes_on_in_the_open_version() -> None:
    ledger = Ledger("policy")
    generation = register(ledger, 2)
    publish(ledger, generation, 1)
    opened = begin(ledger, generation, 0, 2)
    ledger.done(opened.number, 0)
    assert ledger.register(RankRegistration(1, 2, layout(1, 2), {}, "a", 2)) is generation
    assert begin(ledger, generation, 1, 2) is opened
    assert ledger.done(opened.number, 1)


def test_trainer_that_starts_again_gives_up_what_is_open() -> None:
    ledger = Ledger("policy")
    generation = register(ledger, 2)
    opened = begin(ledger, generation, 0, 7)
    ledger.done(opened.number, 0)
    assert register(ledger, 2) is generation
    with pytest.raises(WeightsLostError, match="version 1 of 'policy' was given up by another rank while rank 1"):
        ledger.done(opened.number, 1)
    assert publish(ledger, generation, 5) == 2


def test_rank_back_at_a_later_step_gives_up_what_is_open() -> None:
    ledger = Ledger("policy")
    generation = register(ledger, 2)
    opened = begin(ledger, generation, 0, 10)
    ledger.done(opened.number, 0)
    assert ledger.begin(generation, 0, 12) is None
    ledger.register(RankRegistration(1, 2, layout(1, 2), {}, "a", 2))
    later = begin(ledger, generation, 1, 12)
    assert opened.state is VersionState.SUPERSEDED
    assert begin(ledger, generation, 0, 12) is later


def test_rank_that_is_ahead_waits_for_the_others() -> None:
    ledger = Ledger("policy")
    generation = register(ledger, 2)
    opened = begin(ledger, generation, 0, 1)
    ledger.done(opened.number, 0)
    assert ledger.begin(generation, 0, 2) is None
    assert opened.missing() == [1]
    assert begin(ledger, generation, 1, 1) is opened
    assert ledger.done(opened.number, 1)
    assert begin(ledger, generation, 0, 2).number == 2


def test_trainer_of_another_size_takes_the_name_over() -> None:
    ledger = Ledger("policy")
    first = register(ledger, 2)
    publish(ledger, first, 1)
    opened = begin(ledger, first, 0, 2)
    second = register(ledger, 4)
    assert second.number == first.number + 1
    assert newest(ledger) == 1
    with pytest.raises(WeightsError, match="trainer of 2 ranks that was replaced by one of 4"):
        ledger.begin(first, 1, 2)
    assert publish(ledger, second, 1) > opened.number
    publish(ledger, second, 2)
    publish(ledger, second, 3)
    assert ledger.generations == [second]


def test_rank_that_publishes_an_earlier_step_is_told() -> None:
    ledger = Ledger("policy")
    generation = register(ledger, 2)
    begin(ledger, generation, 0, 3)
    with pytest.raises(WeightsError, match="rank 1 publishes step 2 of 'policy', but rank 0 publishes step 3"):
        ledger.begin(generation, 1, 2)
    assert publish(ledger, generation, 3) == 1


def test_rank_whose_publication_failed_goes_on_with_a_later_step() -> None:
    ledger = Ledger("policy")
    generation = register(ledger, 2)
    opened = begin(ledger, generation, 0, 1)
    ledger.done(opened.number, 0)
    later = begin(ledger, generation, 1, 2)
    assert opened.state is VersionState.SUPERSEDED
    assert begin(ledger, generation, 0, 2) is later
    last = begin(ledger, generation, 0, 3)  # the writer itself has given step 2 up
    assert (later.state, last.writers) == (VersionState.SUPERSEDED, {0})


def test_dead_keeper_loses_what_it_kept() -> None:
    ledger = Ledger("policy")
    generation = register(ledger, 2)
    generation.slots["a", "a"] = ["path 0", "path 1"]
    publish(ledger, generation, 1)
    opened = begin(ledger, generation, 0, 2)
    ledger.keeper_died("a")
    assert newest(ledger) is None
    with pytest.raises(WeightsLostError, match="is lost while rank 0 wrote it"):
        ledger.done(opened.number, 0)
    generation.slots["a", "a"] = ["path 2", "path 3"]
    assert publish(ledger, generation, 3) == 3


def test_ranks_that_do_not_fit_are_refused_and_may_try_again() -> None:
    ledger = Ledger("policy")
    ledger.register(RankRegistration(0, 2, layout(0, 2), {}, "a", 2))
    with pytest.raises(WeightsLayoutError, match="do not agree on 'w'"):
        ledger.register(RankRegistration(1, 2, layout(1, 2, rows=14), {}, "a", 2))
    assert register(ledger, 2).stored is not None


def test_part_lives_on_in_whole_copies() -> None:
    ledger = Ledger("policy")
    generation = register(ledger, 2)
    generation.slots["a", "a"] = ["path 0", "path 1"]
    publish(ledger, generation, 1)
    version = ledger.committed(1)
    assert version is not None
    spread = version.spread("a")
    spread.want("b", range(spread.chunks))
    for transfer in spread.assign():
        spread.end(transfer)
    assert version.hosts() == ["a", "b"]
    ledger.keeper_died("a")
    assert (newest(ledger), version.hosts(), version.has_own_part("a")) == (1, ["b"], False)
    ledger.keeper_died("b")
    assert newest(ledger) is None


def test_slots_that_are_being_made_are_in_use() -> None:
    ledger = Ledger("policy")
    generation = register(ledger, 1)
    generation.being_made.add(("b", "a"))
    assert ledger.parts_in_use("b") == [(generation, "a")]
    generation.slots["b", "a"] = ["one", "two"]
    generation.slots["a", "a"] = ["one", "two"]
    generation.being_made.clear()
    assert ledger.parts_in_use("b") == [(generation, "a")]
    ledger.keeper_died("b")
    assert ledger.parts_in_use("b") == []


def test_base_is_the_newest_version_that_another_host_has() -> None:
    ledger = Ledger("policy")
    delta = DeltaOptions("auto", 6)
    generation = ledger.register(RankRegistration(0, 1, layout(0, 1), {}, "a", 3, delta))

    def publish_one(copied: bool) -> Version:
        version = ledger.committed(publish(ledger, generation, len(versions)))
        assert version is not None
        if copied:
            version.spread("a").holders["b"] = {0}
        versions.append(version)
        return version

    versions: list[Version] = []
    assert publish_one(copied=False).base is None
    assert publish_one(copied=True).base is None  # no other host has the one before
    assert publish_one(copied=False).base is versions[1]
    versions[1].spreads.clear()
    assert publish_one(copied=True).base is None
    assert publish_one(copied=True).base is versions[3]
    assert publish_one(copied=True).base is None  # number 6 is an anchor
    assert publish_one(copied=True).base is versions[5]
    assert publish_one(copied=True).base is versions[6]
    assert versions[4].base is versions[3]
    assert versions[6].base is versions[5]
    assert publish_one(copied=True).base is versions[7]
    assert versions[6].base is None  # so that no chain of old versions stays in memory


def test_another_delta_option_begins_a_generation() -> None:
    ledger = Ledger("policy")
    first = ledger.register(RankRegistration(0, 1, layout(0, 1), {}, "a", 2, DeltaOptions("auto")))
    publish(ledger, first, 1)
    second = ledger.register(RankRegistration(0, 1, layout(0, 1), {}, "a", 2, DeltaOptions("never")))
    assert second is not first
    version = ledger.committed(publish(ledger, second, 2))
    assert version is not None
    assert version.base is None
