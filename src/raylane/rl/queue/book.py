"""Items of a queue: room, groups, order, freshness, and what a death leaves behind. Pure: no clock, no Ray.

    WAITING ──the group is complete──> READY ──taken──> LEASED ──acknowledged──> DONE
                                         ^                 │
                                         └── given back, ──┘    (at most once: LOST)
                                             or the consumer died
    STALE: older than max_lag versions when it would have been handed out
    LOST: its memory is gone, or its group lost a member

Items lie in blocks of shared memory. A block is free again when its producer has filled it and all of its items have
ended.

A consumer numbers its takes, because the answer to one can be lost (a timeout, a cancellation, Ctrl-C). It then
withdraws the number, before or after the take arrives here: what the take has leased returns, or it leases nothing.
Called by `actor`.
"""

from __future__ import annotations

import contextlib
import enum
import heapq
import operator
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raylane.core.state_table import StateTable

ORDERS = ("fifo", "newest")
DELIVERIES = ("at_least_once", "at_most_once")

Versions = tuple[tuple[int, int], ...]
"""Versions of the weights that made an item, each with the number of tokens that it made."""


class ItemState(enum.Enum):
    """State of an item."""

    WAITING = "waiting"
    """Other items of its group have not come yet."""
    READY = "ready"
    LEASED = "leased"
    """A consumer has it."""
    DONE = "done"
    STALE = "stale"
    LOST = "lost"


class ItemEvent(enum.Enum):
    """Event of an item."""

    GROUP_COMPLETE = enum.auto()
    TAKEN = enum.auto()
    ACKNOWLEDGED = enum.auto()
    RETURNED = enum.auto()
    """The consumer has given it back, or has died."""
    TOO_OLD = enum.auto()
    MEMORY_LOST = enum.auto()
    """Its host has died, or its memory cannot be read."""
    GROUP_BROKEN = enum.auto()
    """A member of its group cannot come any more."""


TRANSITIONS = StateTable(
    {
        (ItemState.WAITING, ItemEvent.GROUP_COMPLETE): ItemState.READY,
        (ItemState.READY, ItemEvent.TAKEN): ItemState.LEASED,
        (ItemState.LEASED, ItemEvent.ACKNOWLEDGED): ItemState.DONE,
        (ItemState.LEASED, ItemEvent.RETURNED): ItemState.READY,
        (ItemState.READY, ItemEvent.TOO_OLD): ItemState.STALE,
        **{
            (state, event): ItemState.LOST
            for state in (ItemState.WAITING, ItemState.READY, ItemState.LEASED)
            for event in (ItemEvent.MEMORY_LOST, ItemEvent.GROUP_BROKEN)
        },
    }
)
ENDED = (ItemState.DONE, ItemState.STALE, ItemState.LOST)


@dataclass(frozen=True)
class QueueOptions:
    """Limits and promises of a queue."""

    max_items: int = 4096
    """Largest number of items that have been put and not acknowledged."""
    max_bytes: int = 1 << 30
    """Largest size of the shared memory that these take, in bytes."""
    group_size: int = 1
    """Number of items with the same `group` that are handed out together; 1 for items without a group."""
    order: str = "fifo"
    """`fifo`, or `newest`: items of the newest weights first."""
    max_lag: int | None = None
    """Items whose weights are more versions behind than this are dropped; None: none are."""
    delivery: str = "at_least_once"
    """`at_least_once`: what a dead consumer had goes to another one; `at_most_once`: it is lost."""

    def check(self) -> None:
        """Raise ValueError for a value that is not accepted."""
        for name in ("max_items", "max_bytes", "group_size"):
            check_count(name, getattr(self, name), 1)
        if self.max_items < self.group_size:
            raise ValueError(f"max_items={self.max_items} must have room for a group of group_size={self.group_size}")
        if self.max_lag is not None:
            check_count("max_lag", self.max_lag, 0)
        for name, accepted in (("order", ORDERS), ("delivery", DELIVERIES)):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be {' or '.join(accepted)}, got {getattr(self, name)!r}")


def check_count(name: str, value: Any, least: int) -> int:
    """Return an integer of at least `least`; ValueError for another value."""
    # True would count as 1. `index` accepts integers of numpy and torch too.
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
            if number >= least:
                return number
    raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def plain_versions(value: Any, *, decides: bool = True) -> Versions:
    """Return versions as pairs of plain integers; ValueError for another value.

    One pair that is not in a list is taken as it was meant where no version `decides` about an item. Elsewhere it is
    refused, because it may be two versions.
    """
    if not decides and isinstance(value, tuple) and list(map(type, value)) == [int, int]:
        value = (value,)
    try:
        pairs = tuple((version, tokens) for version, tokens in value)
    except (TypeError, ValueError):
        raise ValueError(
            f"versions must be pairs of a version and its number of tokens, such as [(7, 8)], got {value!r}"
        ) from None
    return tuple(
        (check_count("a version in versions", version, 0), check_count("the number of tokens in versions", tokens, 0))
        for version, tokens in pairs
    )


def plain_group(value: Any) -> Hashable:
    """Return the name of a group as plain values, which the queue's actor can read; ValueError for another value.

    Objects of other classes would be unpickled in the actor, and NaN is not equal to itself.
    """
    if value is None or isinstance(value, str | bytes):
        return value
    if isinstance(value, tuple):
        return tuple(plain_group(part) for part in value)
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(
            f"group must be a text, bytes, an integer, or a tuple of these, got {value!r}. Name it by such a value"
        ) from None


class BlockKey(NamedTuple):
    """Identity of a block."""

    producer: int
    number: int


class AnnouncedItem(NamedTuple):
    """Item as its producer announces it."""

    offset: int
    """First byte in its block."""
    nbytes: int
    group: Hashable
    """None outside groups."""
    versions: Versions


class ItemTicket(NamedTuple):
    """Item as consumers get it: where its bytes lie, and which weights made it."""

    number: int
    host: str
    """Ray's id of the node in whose shared memory it lies."""
    path: str
    """Segment of that node."""
    offset: int
    nbytes: int
    group: Any
    """As the producer named it; hashable."""
    versions: Versions


class BlockPlace(NamedTuple):
    """Block of shared memory."""

    host: str
    path: str
    nbytes: int


@dataclass
class _Item:
    ticket: ItemTicket
    block: BlockKey
    state: ItemState = ItemState.WAITING
    consumer: int | None = None
    request: int = 0
    """Number of the consumer's take that has leased it."""
    unit: int = 0
    """Number of the first item of its group, once that is complete: the same group may come again."""

    @property
    def oldest(self) -> int | None:
        """Oldest version that made a token of it; None if no version is known."""
        return min((version for version, _ in self.ticket.versions), default=None)

    def advance(self, event: ItemEvent) -> None:
        self.state = TRANSITIONS[self.state, event]


@dataclass
class _Block:
    place: BlockPlace
    live: int = 0
    """Number of its items that have not ended."""
    is_full: bool = False
    """True if its producer puts nothing more into it."""


@dataclass
class QueueStats:
    """Figures of a queue."""

    put: int = 0
    """Items accepted."""
    waiting: int = 0
    """Items of groups that are not complete."""
    ready: int = 0
    leased: int = 0
    """Items that consumers have."""
    done: int = 0
    """Items acknowledged."""
    stale: int = 0
    """Items dropped because they were more than `max_lag` versions old."""
    lost: int = 0
    """Items lost by a death."""
    returned: int = 0
    """Times that an item was handed out again."""
    nbytes: int = 0
    """Bytes of the items in shared memory."""
    version: int = 0
    """Newest version of the weights."""
    producers: int = 0
    """Processes that have put items and are still there."""
    ended_producers: int = 0
    """Processes that have put items and have left or died."""
    stale_groups: tuple[Any, ...] = ()
    """Names of the groups that were dropped last as stale, at most 16."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Tokens of the acknowledged items by the version that made them."""


class FreeBlocks(NamedTuple):
    """Blocks that a producer may use again."""

    numbers: list[int]
    limit: int
    """Bytes of all its blocks above which it gives free ones up: its share of the queue."""


class QueueBook:
    """All items of one queue that have not ended."""

    def __init__(self, options: QueueOptions) -> None:
        self.options = options
        self.version = 0
        """Newest version of the weights, from which lags count."""
        self.nbytes = 0
        """Size of all items. Not of their blocks: a producer keeps one, however little is in it."""
        self._items: dict[int, _Item] = {}
        self._blocks: dict[BlockKey, _Block] = {}
        self._waiting: dict[Hashable, list[_Item]] = {}
        """Items of groups that are not complete, by group."""
        self._ready: list[tuple[int, int, list[_Item]]] = []
        """Heap of complete groups by rank and number of their first items."""
        self._free: dict[int, list[int]] = {}
        """Numbers of the blocks that a producer may use again and was not told of yet, by producer."""
        self._idle: dict[int, dict[int, BlockPlace]] = {}
        """Blocks without items that a producer keeps for its next ones, by producer and number."""
        self._putting: set[int] = set()
        """Producers that have put items, and are still there."""
        self._ended_producers = 0
        self._stale_groups: deque[Hashable] = deque(maxlen=16)
        self._abandoned: list[BlockPlace] = []
        """Blocks of producers that are gone, which nobody needs any more."""
        self._producers: dict[int, str] = {}
        """Host of each producer."""
        self._withdrawn: set[tuple[int, int]] = set()
        """Consumer and number of takes that were withdrawn before they leased anything."""
        self._numbers = 0
        self._counts: Counter[str] = Counter()
        self._tokens: Counter[int] = Counter()

    # Producers

    def add_producer(self, producer: int, host: str) -> None:
        """Note a producer on a host."""
        self._producers[producer] = host
        self._free[producer] = []
        self._idle[producer] = {}

    def room(self, entries: Sequence[AnnouncedItem]) -> int:
        """Return the number of these items, from the first one on, that may be accepted now."""
        free, added = self.options.max_items - len(self._items), self.nbytes
        count = 0
        for entry in entries:
            added += entry.nbytes
            # Items of a group that others wait for are accepted: it could not be completed otherwise.
            if (count >= free or added > self.options.max_bytes) and entry.group not in self._waiting:
                break
            count += 1
        if count == 0 and not any(item.state in (ItemState.READY, ItemState.LEASED) for item in self._items.values()):
            # Nothing would ever become free: the item is larger than the limit, or all others wait for groups.
            return 1
        return count

    def add(self, key: BlockKey, place: BlockPlace, entries: Iterable[AnnouncedItem], *, is_full: bool) -> None:
        """Accept items that lie in a block; `is_full` if nothing more comes into it."""
        # Items are never refused here: `room` has decided, and the actor runs nothing in between.
        if key not in self._blocks:
            self._blocks[key] = _Block(place)
            self._putting.add(key.producer)
            self._idle.get(key.producer, {}).pop(key.number, None)
        block = self._blocks[key]
        block.is_full |= is_full
        for entry in entries:
            self._numbers += 1
            ticket = ItemTicket(self._numbers, place.host, place.path, *entry)
            item = self._items[self._numbers] = _Item(ticket, key)
            block.live += 1
            self.nbytes += entry.nbytes
            self._counts["put"] += 1
            self._collect(item)
        self._free_if_unused(key)

    def _collect(self, item: _Item) -> None:
        """Put an item to its group; hand the group on if that is complete."""
        group, size = item.ticket.group, self.options.group_size
        members = [item]
        # Without groups an item is a group of its own, whatever its label.
        if size > 1:
            members = self._waiting.setdefault(group, [])
            members.append(item)
            if len(members) < size:
                return
            del self._waiting[group]
        for member in members:
            member.advance(ItemEvent.GROUP_COMPLETE)
            member.unit = members[0].ticket.number
        if self._is_stale(members):
            self._end(members, ItemEvent.TOO_OLD)
        else:
            self._push(members)

    def take_free(self, producer: int) -> FreeBlocks:
        """Return the blocks that a producer may use again, once."""
        free = self._free.get(producer, [])
        self._free[producer] = []
        return FreeBlocks(free, self.options.max_bytes // max(1, len(self._putting)))

    def remove_producer(self, producer: int) -> None:
        """Note that a producer has left or died. Its complete groups stay, the others cannot be completed."""
        self._producers.pop(producer, None)
        self._free.pop(producer, None)
        self._abandoned += self._idle.pop(producer, {}).values()
        self._ended_producers += producer in self._putting
        self._putting.discard(producer)
        broken = [
            members
            for members in self._waiting.values()
            if any(member.block.producer == producer for member in members)
        ]
        for members in broken:
            del self._waiting[members[0].ticket.group]
            self._end(members, ItemEvent.GROUP_BROKEN)
        for key in [key for key in self._blocks if key.producer == producer]:
            # Nobody writes to it any more, so it ends with its last item.
            self._blocks[key].is_full = True
            self._free_if_unused(key)

    def break_groups(self) -> None:
        """Drop all groups that are not complete: nothing more comes."""
        for members in self._waiting.values():
            self._end(members, ItemEvent.GROUP_BROKEN)
        self._waiting.clear()

    # Consumers

    def ready(self) -> int:
        """Return the number of groups that can be taken."""
        return len(self._ready)

    def is_drained(self) -> bool:
        """Return True if no item is left, neither here nor with consumers."""
        return not self._items

    def take(self, consumer: int, count: int, request: int = 0) -> list[list[ItemTicket]]:
        """Hand out up to so many groups, in the order of the queue; none if the request was withdrawn."""
        taken: list[list[ItemTicket]] = []
        if self.is_withdrawn(consumer, request):
            self._withdrawn.discard((consumer, request))
            return taken
        while self._ready and len(taken) < count:
            *_, members = heapq.heappop(self._ready)
            for member in members:
                member.advance(ItemEvent.TAKEN)
                member.consumer, member.request = consumer, request
            taken.append([member.ticket for member in members])
        return taken

    def withdraw(self, consumer: int, request: int) -> None:
        """Take a request back whose answer the consumer has not received, before or after it has leased items."""
        # Also with at_most_once: nobody has seen these items.
        leased = [item for item in self._items.values() if (item.consumer, item.request) == (consumer, request)]
        self._return(leased)
        if not leased:
            self._withdrawn.add((consumer, request))

    def is_withdrawn(self, consumer: int, request: int) -> bool:
        """Return True if a request was withdrawn and must lease nothing."""
        return (consumer, request) in self._withdrawn

    def end_request(self, consumer: int, request: int) -> None:
        """Note that a request has ended without a lease."""
        self._withdrawn.discard((consumer, request))

    def acknowledge(self, consumer: int, numbers: Iterable[int]) -> None:
        """Note that a consumer needs items no more. Items that were taken from it are ignored."""
        for item in self._leased(consumer, numbers):
            for version, tokens in item.ticket.versions:
                self._tokens[version] += tokens
            self._end([item], ItemEvent.ACKNOWLEDGED)

    def give_back(self, consumer: int, numbers: Iterable[int]) -> None:
        """Note that a consumer will not use items; whole groups must be given back."""
        self._return(self._leased(consumer, numbers))

    def remove_consumer(self, consumer: int) -> None:
        """Note that a consumer has left or died: what it had goes to others, or is lost with at_most_once."""
        # A consumer that has left normally has acknowledged or given back what it had; this is for the others.
        held = [item for item in self._items.values() if item.consumer == consumer]
        self._withdrawn = {pair for pair in self._withdrawn if pair[0] != consumer}
        if self.options.delivery == "at_most_once":
            self._end(held, ItemEvent.MEMORY_LOST)
        else:
            self._return(held)

    def lose(self, numbers: Iterable[int]) -> None:
        """Note that the memory of items is gone; the others of their groups are lost with them."""
        # First a list: ending one item may end others of it.
        gone = [self._items[number] for number in numbers if number in self._items]
        for item in gone:
            if item.ticket.number in self._items:  # not ended with another one of its group
                self._end(self._members(item), ItemEvent.MEMORY_LOST)

    def lose_host(self, host: str) -> None:
        """Note that the shared memory of a host is gone."""
        self.lose([number for number, item in self._items.items() if item.ticket.host == host])
        for producer in [number for number, place in self._producers.items() if place == host]:
            self.remove_producer(producer)

    def set_version(self, version: int) -> None:
        """Note a new version of the weights; drop what is too old now."""
        self.version = max(self.version, version)
        if self.options.max_lag is None:
            return
        # All of them: the order of the queue may be another one than that of versions.
        groups, self._ready = self._ready, []
        for _, _, members in groups:
            if self._is_stale(members):
                self._end(members, ItemEvent.TOO_OLD)
            else:
                self._push(members)

    def abandoned(self) -> list[BlockPlace]:
        """Return the blocks of producers that are gone, which can be given up; each once."""
        places, self._abandoned = self._abandoned, []
        return places

    def stats(self) -> QueueStats:
        """Return the figures of the queue."""
        states = Counter(item.state.value for item in self._items.values())
        counts = {name: self._counts[name] for name in ("put", "done", "stale", "lost", "returned")}
        return QueueStats(
            **counts,
            waiting=states["waiting"],
            ready=states["ready"],
            leased=states["leased"],
            nbytes=self.nbytes,
            version=self.version,
            producers=len(self._putting),
            ended_producers=self._ended_producers,
            stale_groups=tuple(self._stale_groups),
            tokens=dict(sorted(self._tokens.items())),
        )

    def state_of_producers(self) -> str:
        """Return a sentence about the processes that have put items, for errors of waits."""
        if self._putting or not self._ended_producers:
            return f"{len(self._putting)} processes that have put items are there"
        return f"all {self._ended_producers} processes that have put items have left or died"

    # Parts of the above

    def _is_stale(self, members: Iterable[_Item]) -> bool:
        if self.options.max_lag is None:
            return False
        oldest = [item.oldest for item in members]
        return any(version is not None and self.version - version > self.options.max_lag for version in oldest)

    def _push(self, members: list[_Item]) -> None:
        # The number breaks ties, so equal ranks come in the order in which they were put.
        number = members[0].ticket.number
        rank = 0
        if self.options.order == "newest":
            rank = -min((item.oldest or 0 for item in members), default=0)
        heapq.heappush(self._ready, (rank, number, members))

    def _leased(self, consumer: int, numbers: Iterable[int]) -> list[_Item]:
        items = (self._items.get(number) for number in numbers)
        return [item for item in items if item is not None and item.consumer == consumer]

    def _return(self, items: Iterable[_Item]) -> None:
        groups: dict[int, list[_Item]] = {}
        for item in items:
            item.advance(ItemEvent.RETURNED)
            item.consumer = None
            self._counts["returned"] += 1
            groups.setdefault(item.unit, []).append(item)
        for members in groups.values():
            if self._is_stale(members):
                self._end(members, ItemEvent.TOO_OLD)
            # The others were acknowledged: a part of a group is of no use to anybody.
            elif len(members) < self.options.group_size:
                self._end(members, ItemEvent.GROUP_BROKEN)
            else:
                self._push(members)

    def _members(self, item: _Item) -> list[_Item]:
        """Return the items of the group of one of them, and take them out of where they wait."""
        if item.state is ItemState.WAITING:
            return self._waiting.pop(item.ticket.group)
        if item.state is ItemState.READY:
            place = next(place for place in self._ready if item in place[2])
            self._ready.remove(place)
            heapq.heapify(self._ready)
            return place[2]
        if self.options.group_size == 1:
            return [item]
        return [other for other in self._items.values() if other.unit == item.unit]

    def _end(self, items: Iterable[_Item], event: ItemEvent) -> None:
        items = list(items)
        if event is ItemEvent.TOO_OLD and items:
            self._stale_groups.append(items[0].ticket.group)
        for item in items:
            item.advance(event)
            assert item.state in ENDED
            self._counts[item.state.value] += 1
            del self._items[item.ticket.number]
            self.nbytes -= item.ticket.nbytes
            self._blocks[item.block].live -= 1
            self._free_if_unused(item.block)

    def _free_if_unused(self, key: BlockKey) -> None:
        block = self._blocks[key]
        if block.live or not block.is_full:
            return
        del self._blocks[key]
        # A producer keeps its mapping of the block; without a producer, its host gives the memory up.
        if key.producer in self._producers:
            self._free[key.producer].append(key.number)
            self._idle[key.producer][key.number] = block.place
        else:
            self._abandoned.append(block.place)
