from __future__ import annotations

from array import array

import pytest

from raylane.errors import WeightsError, WeightsLayoutError, WeightsLostError, WeightsVersionError
from raylane.weights.chunks.delta import DeltaOptions
from raylane.weights.layout.boxes import Box, HeldBox, Layout, TensorLayout
from raylane.weights.state.ledger import Generation, Ledger, Version, VersionState
from raylane.weights.state.starts import PublisherKey, RankRegistration, Start

DELTA = DeltaOptions()


def layout(rank: int, world: int, rows: int = 12) -> Layout:
    held = HeldBox(Box((rank * rows // world, 0), (rows // world, 2)), (0, 0))
    return {"w": TensorLayout((rows, 2), "float32", 4, (held,))}


def registration(
    rank: int, world: int, trainer: str = "first", rows: int = 12, host: str = "a", delta: DeltaOptions = DELTA
) -> RankRegistration:
    publisher = PublisherKey(f"{trainer} {rank}", host, 1, 1)
    return RankRegistration(rank, world, layout(rank, world, rows), {}, publisher, 2, delta)


def register(ledger: Ledger, world: int, keep: int = 2, trainer: str = "first") -> Start:
    """Register all ranks of a trainer; those of the one before have ended."""
    ended = [] if ledger.start is None else [each.publisher.token for each in ledger.start.members.values()]
    for rank in range(world):
        start = ledger.register(registration(rank, world, trainer)._replace(keep=keep), ended, 1)
        ended = []
    return start


def back(ledger: Ledger, rank: int, world: int, rows: int = 12, host: str = "a") -> Start:
    """Register a rank whose publisher has ended, beside others that live."""
    assert ledger.start is not None
    ended = [ledger.start.members[rank].publisher.token]
    return ledger.register(registration(rank, world, "back", rows, host), ended, 2)


def generation(ledger: Ledger) -> Generation:
    return ledger.generations[-1]


def begin(ledger: Ledger, start: Start, rank: int, step: int) -> Version:
    version = ledger.begin(start, rank, step)
    assert version is not None
    return version


def publish(ledger: Ledger, start: Start, step: int) -> int:
    numbers = {begin(ledger, start, rank, step).number for rank in range(start.world)}
    (number,) = numbers
    committed = [ledger.done(number, rank) for rank in range(start.world)]
    assert committed == [False] * (start.world - 1) + [True]
    return number


def newest(ledger: Ledger) -> int | None:
    version = ledger.newest()
    return None if version is None else version.number


@pytest.mark.claim("weights", "a version is visible when all ranks have written it")
def test_version_is_visible_when_all_ranks_are_done() -> None:
    ledger = Ledger("policy")
    start = register(ledger, 3)
    assert newest(ledger) is None
    version = begin(ledger, start, 0, 10)
    assert ledger.begin(start, 1, 10) is version
    assert not ledger.done(version.number, 0)
    assert not ledger.done(version.number, 1)
    assert version.missing() == [2]
    assert newest(ledger) is None
    assert ledger.begin(start, 2, 10) is version
    assert ledger.done(version.number, 2)
    assert newest(ledger) == version.number == 1


def test_digests_of_ranks_are_added_up_modulo_2_64() -> None:
    ledger = Ledger("policy")
    start = register(ledger, 3)
    version = begin(ledger, start, 0, 10)
    for rank in range(1, 3):
        assert begin(ledger, start, rank, 10) is version
    for sums in ((0, 2**64 - 1, 0), (1, 5, 10), (2, 0, 0)):
        ledger.done(version.number, sums[0], array("Q", sums[1:]).tobytes())
    ledger.done(version.number, 1, array("Q", [7, 7]).tobytes())  # a call that is repeated
    digests = version.tensor_digests()
    assert digests == version.tensor_digests() == array("Q", [4, 10]).tobytes()
    publish(ledger, start, 11)
    assert ledger.versions[-1].tensor_digests() is None


@pytest.mark.parametrize("keep", [2, 3, 5])
def test_committed_versions_keep_their_slots(keep: int) -> None:
    ledger = Ledger("policy")
    start = register(ledger, 2, keep)
    for step in range(1, 20):
        publish(ledger, start, step)
        kept = [version for version in ledger.versions if version.state is VersionState.COMMITTED]
        assert [version.number for version in kept] == list(range(max(1, step - keep + 1), step + 1))
        assert len({version.slot for version in kept}) == len(kept)
        opened = begin(ledger, start, 0, step + 1)
        still = [version.slot for version in ledger.versions if version.state is VersionState.COMMITTED]
        assert opened.slot not in still
        assert len(still) == min(step, keep - 1)


def test_rank_that_comes_back_goes_on_in_the_open_version() -> None:
    ledger = Ledger("policy")
    start = register(ledger, 2)
    publish(ledger, start, 1)
    opened = begin(ledger, start, 0, 2)
    ledger.done(opened.number, 0)
    assert back(ledger, 1, 2) is start
    assert begin(ledger, start, 1, 2) is opened
    assert ledger.done(opened.number, 1)


def test_trainer_that_starts_again_gives_up_what_is_open() -> None:
    ledger = Ledger("policy")
    start = register(ledger, 2)
    opened = begin(ledger, start, 0, 7)
    ledger.done(opened.number, 0)
    again, before = register(ledger, 2, trainer="again"), generation(ledger)
    with pytest.raises(WeightsLostError, match="version 1 of 'policy' was given up by another rank while rank 1"):
        ledger.done(opened.number, 1)
    assert publish(ledger, again, 5) == 2
    assert generation(ledger) is before  # its layouts are those of the first start


def test_rank_back_at_a_later_step_gives_up_what_is_open() -> None:
    ledger = Ledger("policy")
    start = register(ledger, 2)
    opened = begin(ledger, start, 0, 10)
    ledger.done(opened.number, 0)
    assert ledger.begin(start, 0, 12) is None
    back(ledger, 1, 2)
    later = begin(ledger, start, 1, 12)
    assert opened.state is VersionState.SUPERSEDED
    assert begin(ledger, start, 0, 12) is later


def test_rank_that_is_ahead_waits_for_the_others() -> None:
    ledger = Ledger("policy")
    start = register(ledger, 2)
    opened = begin(ledger, start, 0, 1)
    ledger.done(opened.number, 0)
    assert ledger.begin(start, 0, 2) is None
    assert opened.missing() == [1]
    assert begin(ledger, start, 1, 1) is opened
    assert ledger.done(opened.number, 1)
    assert begin(ledger, start, 0, 2).number == 2


def test_trainer_of_another_size_takes_the_name_over() -> None:
    ledger = Ledger("policy")
    first = register(ledger, 2)
    publish(ledger, first, 1)
    opened = begin(ledger, first, 0, 2)
    old = generation(ledger)
    second = register(ledger, 4, trainer="second")
    assert generation(ledger).number == old.number + 1
    assert newest(ledger) == 1
    with pytest.raises(WeightsError, match="its trainer was replaced by one of 4 ranks that registered later"):
        ledger.begin(first, 1, 2)
    assert publish(ledger, second, 1) > opened.number
    publish(ledger, second, 2)
    publish(ledger, second, 3)
    assert old not in ledger.generations


def test_rank_that_publishes_an_earlier_step_is_told() -> None:
    ledger = Ledger("policy")
    start = register(ledger, 2)
    begin(ledger, start, 0, 3)
    with pytest.raises(WeightsError, match="rank 1 publishes step 2 of 'policy', but rank 0 publishes step 3"):
        ledger.begin(start, 1, 2)
    assert publish(ledger, start, 3) == 1


def test_rank_whose_publication_failed_goes_on_with_a_later_step() -> None:
    ledger = Ledger("policy")
    start = register(ledger, 2)
    opened = begin(ledger, start, 0, 1)
    ledger.done(opened.number, 0)
    later = begin(ledger, start, 1, 2)
    assert opened.state is VersionState.SUPERSEDED
    assert begin(ledger, start, 0, 2) is later
    last = begin(ledger, start, 0, 3)  # the writer itself has given step 2 up
    assert (later.state, last.writers) == (VersionState.SUPERSEDED, {0})


def test_dead_keeper_loses_what_it_kept() -> None:
    ledger = Ledger("policy")
    start = register(ledger, 2)
    generation(ledger).slots["a", "a"] = ["path 0", "path 1"]
    publish(ledger, start, 1)
    opened = begin(ledger, start, 0, 2)
    ledger.keeper_died("a")
    assert newest(ledger) is None
    with pytest.raises(WeightsLostError, match="is lost while rank 0 wrote it"):
        ledger.done(opened.number, 0)
    generation(ledger).slots["a", "a"] = ["path 2", "path 3"]
    assert publish(ledger, start, 3) == 3


def test_ranks_that_do_not_fit_are_refused_and_may_try_again() -> None:
    ledger = Ledger("policy")
    waiting = ledger.register(registration(0, 2), [], 1)
    assert ledger.begin(waiting, 0, 1) is None
    with pytest.raises(WeightsLayoutError, match="do not agree on 'w'"):
        ledger.register(registration(1, 2, rows=14), [], 1)
    with pytest.raises(WeightsError, match="do not fit together; the error is that of another rank"):
        ledger.begin(waiting, 0, 1)
    assert publish(ledger, register(ledger, 2, trainer="second"), 1) == 1


def test_part_lives_on_in_whole_copies() -> None:
    ledger = Ledger("policy")
    start = register(ledger, 2)
    generation(ledger).slots["a", "a"] = ["path 0", "path 1"]
    publish(ledger, start, 1)
    version = ledger.find(1)
    assert version is not None
    spread = version.spread("a")
    spread.want("b", range(spread.chunks))
    for transfer in spread.assign():
        spread.end(transfer)
    assert version.hosts() == ["a", "b"]
    ledger.keeper_died("a")
    assert (newest(ledger), version.hosts(), bool(version.own_paths("a"))) == (1, ["b"], False)
    ledger.keeper_died("b")
    assert newest(ledger) is None


def test_slots_that_are_being_made_are_in_use() -> None:
    ledger = Ledger("policy")
    register(ledger, 1)
    made = generation(ledger)
    made.being_made.add(("b", "a"))
    assert ledger.parts_in_use("b") == [(made, "a")]
    made.slots["b", "a"] = ["one", "two"]
    made.slots["a", "a"] = ["one", "two"]
    made.being_made.clear()
    assert ledger.parts_in_use("b") == [(made, "a")]
    ledger.keeper_died("b")
    assert ledger.parts_in_use("b") == []


@pytest.mark.claim("weights", "whole versions go where a delta does not pay, after a missed one, and on one host")
def test_base_is_the_newest_version_that_another_host_has() -> None:
    ledger = Ledger("policy")
    start = ledger.register(registration(0, 1, delta=DeltaOptions("auto", 6))._replace(keep=3), [], 1)

    def publish_one(copied: bool) -> Version:
        version = ledger.find(publish(ledger, start, len(versions)))
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
    first = ledger.register(registration(0, 1), [], 1)
    publish(ledger, first, 1)
    old = generation(ledger)
    second = ledger.register(registration(0, 1, "second", delta=DeltaOptions("never")), [], 1)
    assert generation(ledger) is not old
    version = ledger.find(publish(ledger, second, 2))
    assert version is not None
    assert version.base is None


def test_generations_of_the_same_slots_do_not_overwrite() -> None:
    ledger = Ledger("policy")
    publish(ledger, register(ledger, 1, keep=3), 1)
    second = register(ledger, 1, keep=2, trainer="second")
    opened = begin(ledger, second, 0, 2)
    assert [version.number for version in ledger.versions] == [1, 2]
    assert len({version.slot for version in ledger.versions}) == 2
    assert opened.slot < 2


@pytest.mark.claim("weights", "no version has ranks of two trainers with `trainer=` of their own, in any event order")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("old_state", ["living", "ended"])
def test_trainer_starts_again_with_one_changed_rank(order: tuple[int, int], old_state: str) -> None:
    ledger = Ledger("policy")
    first = register(ledger, 2)
    publish(ledger, first, 1)
    for rank in order:
        holder = ledger.start.members.get(rank) if ledger.start else None
        ended = [] if holder is None or old_state == "living" else [f"first {rank}", f"first {1 - rank}"]
        second = ledger.register(registration(rank, 2, "second", host="b" if rank else "a"), ended, 2)
    assert publish(ledger, second, 2) == 2
    assert generation(ledger).parts == ("a", "b")
    with pytest.raises(WeightsError, match="was replaced"):
        ledger.begin(first, 0, 3)


def test_slots_are_those_of_ranks_that_write_the_same_bytes() -> None:
    def digest(*boxes: Box) -> str:
        ledger = Ledger("policy")
        for rank, box in enumerate(boxes):
            held = {"w": TensorLayout((4, 4), "float32", 4, (HeldBox(box, (0, 0)),))}
            ledger.register(registration(rank, len(boxes))._replace(layout=held), [], 1)
        return generation(ledger).boxes_digest("a")

    rows = Box((0, 0), (2, 4)), Box((2, 0), (2, 4))
    columns = Box((0, 0), (4, 2)), Box((0, 2), (4, 2))
    assert digest(*rows) == digest(*rows)
    assert len({digest(*rows), digest(*columns), digest(*reversed(rows))}) == 3


def test_rank_back_on_another_host_keeps_the_survivors() -> None:
    ledger = Ledger("policy")
    start = register(ledger, 2)
    publish(ledger, start, 1)
    opened = begin(ledger, start, 0, 2)
    assert back(ledger, 1, 2, host="b") is start
    assert opened.state is VersionState.SUPERSEDED
    assert publish(ledger, start, 3) == 3
    with pytest.raises(WeightsLayoutError):
        back(ledger, 1, 2, rows=14)
    assert publish(ledger, start, 4) == 4  # nothing was changed


@pytest.mark.parametrize(
    ("hosts", "copies", "further"),
    [
        ("aabb", 1, {}),
        ("aabb", 2, {"b": ["a"], "a": ["b"]}),
        ("abcc", 2, {"b": ["a"], "c": ["b"], "a": ["c"]}),
        ("abc", 3, {"b": ["a", "c"], "c": ["a", "b"], "a": ["b", "c"]}),
        ("abc", 9, {"b": ["a", "c"], "c": ["a", "b"], "a": ["b", "c"]}),
        ("aa", 2, {}),
    ],
)
def test_next_hosts_get_further_copies(hosts: str, copies: int, further: dict[str, list[str]]) -> None:
    ledger = Ledger("policy")
    for rank, host in enumerate(hosts):
        start = ledger.register(registration(rank, len(hosts), host=host)._replace(copies=copies), [], 1)
    assert generation(ledger).further_parts() == further
    for host in set(hosts):
        generation(ledger).slots[host, host] = ["slot 0", "slot 1"]
    version = ledger.find(publish(ledger, start, 1))
    assert version is not None
    assert version.copies() == 1
    for host, parts in further.items():
        for part in parts:
            spread = version.spread(part)
            spread.holders[host] = set(range(spread.chunks))
    assert version.copies() == min(copies, len(set(hosts)))
    ledger.keeper_died(hosts[0])
    alive = copies > 1 and len(set(hosts)) > 1
    assert version.state is (VersionState.COMMITTED if alive else VersionState.LOST)


def numbers(ledger: Ledger) -> list[int]:
    return [version.number for version in ledger.committed()]


def test_held_versions_come_on_top_of_keep() -> None:
    ledger = Ledger("policy")
    start = register(ledger, 2)
    publish(ledger, start, 1)
    publish(ledger, start, 2)
    ledger.hold(2, "publisher")
    ledger.hold(2, "fleet")
    for step in range(3, 6):
        publish(ledger, start, step)
        assert numbers(ledger) == ([1, 2, 3] if step == 3 else [2, step - 1, step])
        assert sorted(version.slot for version in ledger.committed()) == [0, 1, 2]
    held = ledger.find(2)
    assert held is not None
    ledger.release(2, "publisher")
    publish(ledger, start, 6)
    assert numbers(ledger) == [2, 5, 6], "the fleet holds it"
    ledger.release(2, "fleet")
    ledger.release(2, "fleet")
    assert numbers(ledger) == [2, 5, 6], "until the next publication"
    publish(ledger, start, 7)
    assert numbers(ledger) == [6, 7]
    assert held.state is VersionState.RETIRED
    assert ledger.surplus(generation(ledger), 3) == [({0, 1, 2} - {each.slot for each in ledger.versions}).pop()]


def test_exact_version_is_that_one_or_an_error() -> None:
    ledger = Ledger("policy")
    start = register(ledger, 1, keep=3)
    for step in range(1, 5):
        publish(ledger, start, step)
    assert ledger.exactly(3) is ledger.find(3) is not None
    assert ledger.exactly(5) is None, "it may come yet"
    opened = begin(ledger, start, 0, 5)
    assert ledger.exactly(opened.number) is None
    with pytest.raises(WeightsVersionError, match=r"version 1 of 'policy' cannot be taken: there are 3, 4\."):
        ledger.exactly(1)
    begin(ledger, start, 0, 6)  # the rank has given 5 up
    with pytest.raises(WeightsVersionError, match=r"version 5 .* there are 3, 4"):
        ledger.exactly(5)
    with pytest.raises(WeightsVersionError, match="version 9 of 'policy' cannot be held: there are 3, 4"):
        ledger.hold(9, "publisher")
    ledger.hold(4, "publisher")
    generation(ledger).slots["a", "a"] = ["0", "1", "2", "3"]
    ledger.keeper_died("a")
    with pytest.raises(WeightsVersionError, match="there is none; 3, 4, 6 died with a keeper"):
        ledger.exactly(4)


def test_number_of_kept_versions_has_a_limit() -> None:
    ledger = Ledger("policy")
    start = register(ledger, 1, keep=60)
    for step in range(1, 10):
        publish(ledger, start, step)
    for number in range(1, 5):
        ledger.hold(number, "publisher")
    ledger.hold(4, "fleet")
    with pytest.raises(
        WeightsError, match=r"version 5 .* at most 64 .* keep=60 and those that are held: \[1, 2, 3, 4\]"
    ):
        ledger.hold(5, "publisher")
    ledger.release(1, "publisher")
    ledger.hold(5, "publisher")
