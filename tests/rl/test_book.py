"""The book of a queue: room, groups, order, freshness and deaths, without Ray."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest

from raylane.rl.queue.book import (
    AnnouncedItem,
    BlockKey,
    BlockPlace,
    QueueBook,
    QueueOptions,
    plain_group,
    plain_versions,
)

PLACE = BlockPlace("host", "path", 100)


def book(**options: Any) -> QueueBook:
    made = QueueBook(QueueOptions(**options))
    for producer in (1, 2):
        made.add_producer(producer, "host")
    return made


def entry(version: int = 0, group: Hashable = None, tokens: int = 3) -> AnnouncedItem:
    return AnnouncedItem(0, 10, group, ((version, tokens),))


def put(made: QueueBook, *entries: AnnouncedItem, producer: int = 1, block: int = 1, is_full: bool = False) -> None:
    made.add(BlockKey(producer, block), PLACE, entries, is_full=is_full)


def versions(made: QueueBook, count: int = 10, consumer: int = 7) -> list[int]:
    return [ticket.versions[0][0] for group in made.take(consumer, count) for ticket in group]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_items": 0}, "max_items must be an integer of at least 1, got 0"),
        ({"max_items": 2.5}, "max_items must be an integer of at least 1, got 2.5"),
        ({"max_bytes": None}, "max_bytes must be an integer of at least 1"),
        ({"group_size": True}, "group_size must be an integer of at least 1, got True"),
        ({"group_size": 8, "max_items": 4}, "max_items=4 must have room for a group of group_size=8"),
        ({"max_lag": -1}, "max_lag must be an integer of at least 0, got -1"),
        ({"order": "lifo"}, "order must be fifo or newest, got 'lifo'"),
        ({"delivery": "once"}, "delivery must be at_least_once or at_most_once, got 'once'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        QueueOptions(**options).check()


@pytest.mark.parametrize("value", [7, [7], (7, 8), (("a", 1),), ((None, 1),), ((1.5, 1),), ((1, 2, 3),), ((-1, 2),)])
def test_versions_of_another_kind_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="versions"):
        plain_versions(value)


def test_versions_and_groups_become_plain_values() -> None:
    assert plain_versions([[np.int64(7), 8]]) == ((7, 8),)
    assert plain_versions((7, 8), decides=False) == ((7, 8),)
    with pytest.raises(ValueError, match="must be pairs"):
        plain_versions((7, 8, 9), decides=False)
    assert plain_group(("a", b"b", (np.int32(3), None))) == ("a", b"b", (3, None))
    for value in ([1], {"a": 1}, 1.5, object(), ("a", [1])):
        with pytest.raises(ValueError, match="group must be a text, bytes, an integer, or a tuple of these"):
            plain_group(value)


@pytest.mark.parametrize("order", list(itertools.permutations(["take 1", "withdraw 1", "take 2"])), ids=", ".join)
@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_withdrawn_take_leases_nothing(order: tuple[str, ...], delivery: str) -> None:
    """The answer to take 1 is lost; calls arrive in any order. Items are with take 2 or can be taken again."""
    made = book(delivery=delivery)
    put(made, *map(entry, range(3)))
    held: dict[str, list[int]] = {}
    for event in order:
        if event == "withdraw 1":
            made.withdraw(7, 1)
        else:
            request = int(event[-1])
            held[event] = [ticket.number for group in made.take(7, 2, request) for ticket in group]
    if order.index("withdraw 1") < order.index("take 1"):
        assert held["take 1"] == []
    assert not made.is_withdrawn(7, 1)
    # The first two are leased by take 1 before take 2 comes, unless it was withdrawn by then.
    assert len(held["take 2"]) == (1 if order[:2] == ("take 1", "take 2") else 2)
    made.acknowledge(7, held["take 2"])
    stats = made.stats()
    assert (stats.done, stats.leased, stats.lost) == (len(held["take 2"]), 0, 0)
    assert stats.ready == 3 - stats.done


def test_withdrawn_takes_of_a_dead_consumer_are_forgotten() -> None:
    made = book()
    made.withdraw(7, 1)
    made.withdraw(7, 2)
    made.end_request(7, 2)
    assert (made.is_withdrawn(7, 1), made.is_withdrawn(7, 2), made.is_withdrawn(8, 1)) == (True, False, False)
    made.remove_consumer(7)
    assert not made.is_withdrawn(7, 1)


def test_items_come_in_the_order_of_the_queue() -> None:
    for order, expected in (("fifo", [3, 1, 2, 3]), ("newest", [3, 3, 2, 1])):
        made = book(order=order)
        put(made, *map(entry, (3, 1, 2, 3)))
        assert versions(made, 2) + versions(made, 9) == expected


def test_groups_are_complete_when_they_are_taken() -> None:
    made = book(group_size=3)
    put(made, entry(group="a"), entry(group="b"), entry(group="a"))
    assert made.ready() == 0
    put(made, entry(group="b"), entry(group="b"), producer=2)
    assert [[ticket.group for ticket in group] for group in made.take(7, 5)] == [["b", "b", "b"]]
    put(made, entry(group="a"))
    assert made.ready() == 1


def test_full_queue_takes_what_completes_groups() -> None:
    made = book(max_items=3, group_size=2)
    put(made, entry(group="a"), entry(group="b"), entry(group="c"))
    # Nothing can become free otherwise.
    assert made.room([entry(group="d"), entry(group="e")]) == 1
    put(made, entry(group="a"))
    assert made.room([entry(group="d")]) == 0
    assert made.room([entry(group="b"), entry(group="d")]) == 1
    (group,) = made.take(7, 1)
    made.acknowledge(7, [ticket.number for ticket in group])
    assert made.room([entry(group="d"), entry(group="e")]) == 1


def test_bytes_are_those_of_the_items() -> None:
    made = book(max_bytes=45)
    for block in (1, 2):
        put(made, entry(), entry(), block=block, is_full=True)
    assert made.stats().nbytes == 40
    assert made.room([entry()]) == 0
    tickets = [ticket for group in made.take(7, 3) for ticket in group]
    made.acknowledge(7, [ticket.number for ticket in tickets])
    assert made.take_free(1).numbers == [1]
    assert made.take_free(1).numbers == []
    assert made.stats().nbytes == 10
    assert made.room([entry() for _ in range(5)]) == 3


def test_blocks_of_a_producer_that_leaves_are_given_up() -> None:
    made = book()
    for block in (1, 2, 3):
        put(made, entry(), block=block, is_full=True)
    numbers = [ticket.number for group in made.take(7, 3) for ticket in group]
    made.acknowledge(7, numbers[:2])
    assert made.take_free(1).numbers == [1, 2]
    put(made, entry(), block=1)  # used again
    made.remove_producer(1)
    assert len(made.abandoned()) == 1
    made.acknowledge(7, numbers[2:])
    assert len(made.abandoned()) == 1
    assert made.abandoned() == []


def test_block_is_free_when_its_producer_has_filled_it() -> None:
    made = book()
    put(made, entry())
    ((ticket,),) = made.take(7, 1)
    made.acknowledge(7, [ticket.number])
    assert made.take_free(1).numbers == []
    put(made, is_full=True)
    assert made.take_free(1).numbers == [1]


@pytest.mark.claim("GRPO", "items that are too old for the trainer are dropped and counted")
def test_old_items_are_dropped_and_counted() -> None:
    made = book(max_lag=1)
    put(made, *map(entry, (1, 2, 3)))
    made.set_version(3)
    assert made.stats().stale == 1
    put(made, entry(1))
    assert made.stats().stale == 2
    (first, *_) = made.take(7, 1)
    made.set_version(9)
    made.give_back(7, [ticket.number for ticket in first])
    assert made.stats().stale == 4
    assert made.is_drained()
    made.set_version(4)
    assert made.version == 9


def test_group_is_as_old_as_its_oldest_token() -> None:
    made = book(group_size=2, max_lag=2)
    made.set_version(5)
    put(made, AnnouncedItem(0, 10, "a", ((2, 4), (5, 4))), entry(5, "a"), entry(3, "b"), entry(5, "b"))
    assert (made.stats().stale, made.stats().stale_groups) == (2, ("a",))
    assert versions(made) == [3, 5]


@pytest.mark.claim("GRPO", "a dead consumer of the queue loses nothing")
def test_dead_consumer_loses_nothing() -> None:
    made = book(group_size=2)
    put(made, *(entry(version, group) for group in "ab" for version in (1, 2)))
    taken = made.take(7, 1)
    made.remove_consumer(7)
    assert made.take(8, 2)[0] == taken[0]
    made.acknowledge(7, [ticket.number for ticket in taken[0]])  # too late
    assert (made.stats().returned, made.stats().leased, made.stats().done) == (2, 4, 0)


def test_at_most_once_hands_nothing_out_again() -> None:
    made = book(delivery="at_most_once")
    put(made, entry(1), entry(2))
    assert versions(made, 1) == [1]
    made.remove_consumer(7)
    assert versions(made, consumer=8) == [2]
    assert made.stats().lost == 1


def test_dead_producer_loses_only_groups_it_cannot_complete() -> None:
    made = book(group_size=2)
    put(made, entry(group="a"), entry(group="a"), entry(group="b"))
    put(made, entry(group="c"), producer=2)
    made.remove_producer(1)
    assert (made.stats().ready, made.stats().lost, made.stats().waiting) == (2, 1, 1)
    assert (made.stats().producers, made.stats().ended_producers) == (1, 1)
    assert made.abandoned() == []
    (group,) = made.take(7, 1)
    made.acknowledge(7, [ticket.number for ticket in group])
    assert made.abandoned() == [PLACE]
    assert made.abandoned() == []
    put(made, entry(group="b"), entry(group="b"), producer=2)  # the same group, made again
    assert made.ready() == 1


def test_dead_host_loses_its_items_and_their_groups() -> None:
    made = book(group_size=2)
    made.add_producer(3, "other")
    put(made, entry(group="a"), entry(group="b"), entry(group="c"), entry(group="c"))
    made.add(BlockKey(3, 1), BlockPlace("other", "path", 100), [entry(group="a"), entry(group="d")], is_full=False)
    (taken,) = made.take(7, 1)
    assert taken[0].group == "a"
    made.lose_host("other")
    assert (made.stats().lost, made.stats().waiting, made.stats().ready) == (3, 1, 2)
    made.lose([ticket.number for group in made.take(7, 1) for ticket in group])
    assert made.stats().lost == 5


def test_end_drops_incomplete_groups() -> None:
    made = book(group_size=2)
    put(made, entry(group="a"))
    made.break_groups()
    assert made.is_drained()
    assert made.stats().lost == 1


def test_tokens_are_counted_by_version() -> None:
    made = book()
    put(made, AnnouncedItem(0, 10, None, ((1, 4), (2, 6))), entry(2))
    for group in made.take(7, 2):
        made.acknowledge(7, [ticket.number for ticket in group])
    assert made.stats().tokens == {1: 4, 2: 9}


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_ends_every_item_once(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.choice([1, 2, 3])
    options = {"group_size": size, "max_lag": chance.choice([None, 3]), "order": chance.choice(["fifo", "newest"])}
    made = book(**options, delivery=chance.choice(["at_least_once", "at_most_once"]))
    held: dict[int, list[int]] = {7: [], 8: []}
    blocks = {1: 1, 2: 1}
    for number in range(400):
        producer, consumer = chance.choice([1, 2]), chance.choice([7, 8])
        match chance.choice(["put", "put", "take", "acknowledge", "give back", "version", "die"]):
            case "put":
                group = None if size == 1 else f"group {number // size}"
                full = chance.random() < 0.2
                put(made, entry(made.version, group), producer=producer, block=blocks[producer], is_full=full)
                blocks[producer] += full
            case "take":
                held[consumer] += [ticket.number for some in made.take(consumer, 2) for ticket in some]
            case "acknowledge":
                made.acknowledge(consumer, held[consumer])
                held[consumer] = []
            case "give back":
                made.give_back(consumer, held[consumer])
                held[consumer] = []
            case "version":
                made.set_version(made.version + 1)
            case "die":
                made.remove_consumer(consumer)
                held[consumer] = []
        stats = made.stats()
        assert stats.put == stats.waiting + stats.ready + stats.leased + stats.done + stats.stale + stats.lost
    for consumer in held:
        made.remove_consumer(consumer)
    for producer in (1, 2):
        made.remove_producer(producer)
    for group in made.take(9, 1000):
        made.acknowledge(9, [ticket.number for ticket in group])
    assert made.is_drained()
    assert made.stats().nbytes == 0
    assert len(made.abandoned()) + sum(len(made.take_free(producer).numbers) for producer in (1, 2)) <= sum(
        blocks.values()
    )


def test_producers_share_the_memory_of_free_blocks() -> None:
    made = book(max_bytes=1000)
    assert made.take_free(1).limit == 1000
    for producer in (1, 2):
        put(made, producer=producer)
    assert made.take_free(1).limit == 500
    made.remove_producer(2)
    assert made.take_free(1).limit == 1000
