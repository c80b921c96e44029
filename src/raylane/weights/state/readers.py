"""Readers of one name: their leases, the versions that they use, and how far each is behind. Pure: no clock, no Ray.

    lease    UNSEEN ──its keeper answers──> HELD ──its keeper does not──> UNSEEN ──for LEASE_S──> EXPIRED
             any of them ──the reader leaves, its process or its host ends──> ENDED

The keeper of a reader's host watches its process and renews its lease. A lease that the keeper does not renew is
counted for LEASE_S more: a keeper that has died has a successor by then. Afterwards nobody waits for the reader, until
the keeper or the reader itself is heard from again. Called by `catalogue` and `leases`.
"""

from __future__ import annotations

import enum
import itertools
import math
import os
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from raylane.core.process.place import here
from raylane.core.state_table import StateTable, unchanged

LEASE_S = 20.0
"""Seconds for which a reader is waited for although its keeper does not answer."""
MOST_COMMITS = 1000
"""Number of versions whose times are kept, to tell since when a reader is behind."""
MOST_LEFT = 1000
"""Number of readers that are remembered after they have left: a call of theirs may arrive later."""
_numbers = itertools.count(1)
"""Numbers of the readers of this process."""


class ReaderKey(NamedTuple):
    """Identity of a reader, which it sends with its calls."""

    name: str
    """Name of the weights."""
    label: str
    """Text that names the reader to people: program, pid and a number."""
    host: str
    """Ray's id of its node."""
    pid: int
    start_ticks: int
    """Start of its process: the kernel gives the pids of processes that have ended to new ones."""


class VersionKey(NamedTuple):
    """Identity of a version: numbers begin anew when a name is dropped or its catalogue is started again."""

    life: str
    """Identity of the name's life, which the ledger has."""
    number: int


NO_VERSION = VersionKey("", 0)
"""Version of a reader before its first update."""


def key_of_reader(name: str, host: str) -> ReaderKey:
    """Return the key of a new reader of this process."""
    place, program = here(), os.path.basename(sys.argv[0]) or "python"
    return ReaderKey(name, f"{program} {place.pid} {next(_numbers)}", host, place.pid, place.start_ticks)


class LeaseState(enum.Enum):
    """State of the lease of a reader."""

    HELD = "held"
    """A keeper watches the process of the reader."""
    UNSEEN = "unseen"
    """No keeper has answered for it yet, or the last one does not answer any more."""
    EXPIRED = "expired"
    """Unseen for LEASE_S: nobody waits for the reader."""
    ENDED = "ended"
    """The reader is gone, and no longer listed."""


class LeaseEvent(enum.Enum):
    """Event of a lease."""

    RENEWED = enum.auto()
    """The keeper has seen the process alive."""
    CALLED = enum.auto()
    """The reader itself has called."""
    MISSED = enum.auto()
    """The keeper has not answered."""
    OVERDUE = enum.auto()
    """Unseen for LEASE_S."""
    LEFT = enum.auto()
    """The reader was closed, or is garbage."""
    PROCESS_ENDED = enum.auto()
    HOST_ENDED = enum.auto()
    """Ray has declared the host dead."""


ENDS = (LeaseEvent.LEFT, LeaseEvent.PROCESS_ENDED, LeaseEvent.HOST_ENDED)
TRANSITIONS = StateTable(
    {
        (LeaseState.HELD, LeaseEvent.MISSED): LeaseState.UNSEEN,
        **unchanged(LeaseState.HELD, (LeaseEvent.RENEWED, LeaseEvent.CALLED)),
        (LeaseState.UNSEEN, LeaseEvent.RENEWED): LeaseState.HELD,
        (LeaseState.UNSEEN, LeaseEvent.OVERDUE): LeaseState.EXPIRED,
        # A call is no answer of the keeper.
        **unchanged(LeaseState.UNSEEN, (LeaseEvent.CALLED, LeaseEvent.MISSED)),
        (LeaseState.EXPIRED, LeaseEvent.RENEWED): LeaseState.HELD,
        (LeaseState.EXPIRED, LeaseEvent.CALLED): LeaseState.UNSEEN,
        **unchanged(LeaseState.EXPIRED, (LeaseEvent.MISSED, LeaseEvent.OVERDUE)),
        **{(state, event): LeaseState.ENDED for state in LeaseState for event in ENDS},
    }
)


@dataclass(frozen=True)
class ReaderInfo:
    """One reader, as `weights.readers` reports it."""

    name: str
    """Name of the weights."""
    label: str
    host: str
    """Ray's id of its node."""
    version: int
    """Number of the version that it uses; 0 before its first update."""
    lag: int
    """Number of versions between that one and the newest; before the first update, since the reader has joined."""
    behind_s: float
    """Seconds since the first version that it has not taken; 0 if it has the newest."""
    lease: str
    """`held`, `unseen` or `expired`."""
    too_far: bool
    """True if it is more than `max_lag` versions behind."""


@dataclass
class Reader:
    """One reader."""

    key: ReaderKey
    seen_s: float
    """Time at which its keeper, or the reader itself, was heard from last."""
    joined_at: int
    """Number of the newest version when it joined."""
    version: VersionKey = NO_VERSION
    """Version that it uses."""
    turn: int = 0
    """Number of the call that has said so: Ray runs calls in any order."""
    lease: LeaseState = LeaseState.UNSEEN

    def has(self) -> int:
        """Return the number of the version from which its lag counts."""
        return self.version.number or self.joined_at


class NamedReaders:
    """Readers of one name. Times are those of any one clock, in seconds."""

    def __init__(self) -> None:
        self.life = ""
        """Life of the name, to which the numbers of `commit` belong."""
        self.max_lag: int | None = None
        """Largest lag that is not reported; None: none is."""
        self._readers: dict[ReaderKey, Reader] = {}
        self._newest = 0
        """Number of the newest committed version."""
        self._commits: deque[tuple[int, float]] = deque(maxlen=MOST_COMMITS)
        """Numbers and times of the last commits."""
        self._departed: deque[ReaderKey] = deque(maxlen=MOST_LEFT)
        """Readers that have left."""

    def __len__(self) -> int:
        return len(self._readers)

    def join(self, key: ReaderKey, now_s: float, version: VersionKey | None = None) -> bool:
        """Take a reader in, or note that it has called. Return True if it, or the version that it uses, is new here.

        A reader that had joined an earlier catalogue brings a version of an earlier life. Its lag is that of the
        numbers where these go on. A number beyond the newest one does not count: its name was dropped.
        """
        new = key not in self._readers
        if new:
            self._readers[key] = Reader(key, now_s, self._newest)
        reader = self._readers[key]
        reader.seen_s = now_s
        reader.lease = TRANSITIONS[reader.lease, LeaseEvent.CALLED]
        if version is not None and self._is_newer(version, reader.version):
            reader.version, new = version, True
        return new

    def _is_newer(self, version: VersionKey, known: VersionKey) -> bool:
        """Return True if a version that a reader has brought counts instead of the one that is known of it."""
        if version.life == self.life and known.life != self.life:
            return version.number > 0
        usable = version.life == self.life or (known.life != self.life and version.number < (self._newest or math.inf))
        return usable and version.number > known.number

    def apply(self, key: ReaderKey, version: VersionKey, turn: int, now_s: float) -> bool:
        """Note that a reader uses a version, as its call of this turn says. Return True if the reader is new."""
        if key in self._departed:
            return False
        new = self.join(key, now_s)
        reader = self._readers[key]
        if turn > reader.turn:
            reader.version, reader.turn = version, turn
        return new

    def has_left(self, key: ReaderKey) -> bool:
        """Return True if a reader was closed."""
        return key in self._departed

    def commit(self, number: int, now_s: float) -> None:
        """Note a new version."""
        if not self._newest:  # the first one that this catalogue sees: it may have a successor's number
            for reader in self._readers.values():
                reader.joined_at = number - 1
        self._newest = number
        self._commits.append((number, now_s))

    def advance(self, keys: Iterable[ReaderKey], event: LeaseEvent, now_s: float) -> bool:
        """Change the leases of these readers as the table says; forget those that end. Return True if one changed."""
        changed = False
        for key in list(keys):
            reader = self._readers.get(key)
            if reader is None:
                continue
            before = reader.lease
            reader.lease = TRANSITIONS[before, event]
            if event is LeaseEvent.RENEWED:
                reader.seen_s = now_s
            elif event is LeaseEvent.MISSED and now_s - reader.seen_s >= LEASE_S:
                reader.lease = TRANSITIONS[reader.lease, LeaseEvent.OVERDUE]
            if reader.lease is LeaseState.ENDED:
                del self._readers[key]
                if event is LeaseEvent.LEFT:
                    self._departed.append(key)
            changed |= reader.lease is not before
        return changed

    def keys(self, host: str | None = None) -> list[ReaderKey]:
        """Return the readers of a host (None: of all hosts)."""
        return [key for key in self._readers if host in (None, key.host)]

    def counted(self) -> list[Reader]:
        """Return the readers that are waited for."""
        return [reader for reader in self._readers.values() if reader.lease is not LeaseState.EXPIRED]

    def behind(self, version: VersionKey) -> list[str]:
        """Return the labels of the readers that are waited for, and have not taken this version or a later one."""
        return [
            reader.key.label
            for reader in self.counted()
            if reader.version.life != version.life or reader.version.number < version.number
        ]

    def users(self, number: int, life: str | None = None) -> list[str]:
        """Return the labels of the readers that use a version of this number, and of this life if it is not None."""
        return [
            reader.key.label
            for reader in self._readers.values()
            if reader.version.number == number and life in (None, reader.version.life)
        ]

    def infos(self, now_s: float) -> list[ReaderInfo]:
        """Return all readers as they are reported, those that are furthest behind first."""
        return sorted(
            (self._info(reader, now_s) for reader in self._readers.values()), key=lambda info: (-info.lag, info.label)
        )

    def _info(self, reader: Reader, now_s: float) -> ReaderInfo:
        has = reader.has()
        lag = max(0, self._newest - has)
        since_s = next((time_s for number, time_s in self._commits if number > has), now_s)
        too_far = self.max_lag is not None and lag > self.max_lag
        key = reader.key
        behind_s = now_s - since_s
        return ReaderInfo(
            key.name, key.label, key.host, reader.version.number, lag, behind_s, reader.lease.value, too_far
        )
