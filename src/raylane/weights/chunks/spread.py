"""Copies of one part of a version: which host fetches which chunk from which holder next. Pure.

A *part* is what the ranks of one host write. The keepers of other hosts fetch it in chunks, and pass chunks on as soon
as they have them:

    source ──chunk 0──> host 1 ──chunk 0──> host 2        so the source sends every chunk once,
    source ──chunk 1──> host 2 ──chunk 1──> host 1        however many hosts there are

A host gets the rarest of its missing chunks first, from the least busy of the hosts that have it. The source gives a
chunk only if no other host has it or is getting it. Called by `copies`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from raylane.weights.layout.boxes import MOST_CHUNKS, chunk_bytes

MOST_CALLS = 128
"""Number of transfers of a whole version to one host: a transfer has several chunks where there are many parts."""
PATCHED_BYTES = 48 << 20
"""Size of the chunks that a transfer of patches makes: one by one, their calls would cost more than their bytes."""
AT_ONCE = 2
"""Number of chunks that a host receives, and sends, at the same time: while one call ends the other uses the link."""
ATTEMPTS = 3
"""Number of failures of one holder towards one host before it is not asked again."""


class Transfer(NamedTuple):
    """Adjacent chunks on their way."""

    first: int
    amount: int
    holder: str
    """Host that sends them."""
    host: str
    """Host that receives them."""

    @property
    def chunks(self) -> range:
        """Numbers of the chunks."""
        return range(self.first, self.first + self.amount)


class Spread:
    """Chunks of one part, the hosts that have them, and those that want them."""

    def __init__(self, source: str, part_bytes: int, parts: int = 1) -> None:
        """Begin with a source that has all chunks. `parts` is the number of parts of the version."""
        self.source = source
        self.part_bytes = part_bytes
        self._together = max(1, parts * MOST_CHUNKS // MOST_CALLS)
        """Largest number of chunks of a transfer."""
        self.chunks = -(-part_bytes // chunk_bytes(part_bytes))
        self.holders: dict[str, set[int]] = {source: set(range(self.chunks))}
        """Chunks of each host that has some."""
        self.held: set[str] = set()
        """Hosts that keep the part from being overwritten."""
        self.under_way: set[Transfer] = set()
        self.preparing = 0
        """Number of hosts whose slots are being made ready."""
        self._wanted: dict[str, set[int]] = {}
        self._patched: dict[str, set[int]] = {}
        """Chunks by host that may come as patches."""
        self._failures: Counter[tuple[str, str]] = Counter()
        """Number of failures by host and holder."""
        self._reasons: dict[str, str] = {}
        """Last failure of each host."""
        self._silent: set[str] = set()
        """Hosts that do not answer."""
        self._sent: Counter[str] = Counter()

    def want(self, host: str, chunks: Iterable[int], patched: Iterable[int] = ()) -> None:
        """Note that a host needs chunks. Holders that have failed towards it may be asked again.

        `patched` has the chunks that may come as patches, because the host has them of an earlier version.
        """
        self._wanted.setdefault(host, set()).update(chunks)
        self._patched[host] = set(patched)
        self._silent.discard(host)
        for pair in [pair for pair in self._failures if pair[0] == host]:
            del self._failures[pair]

    def missing(self, host: str) -> set[int]:
        """Return the chunks that a host wants and has not got."""
        return self._wanted.get(host, set()) - self.holders.get(host, set())

    def place(self, chunks: range) -> tuple[int, int]:
        """Return the first byte of adjacent chunks in the part, and their size."""
        size = chunk_bytes(self.part_bytes)
        return chunks.start * size, min(len(chunks) * size, self.part_bytes - chunks.start * size)

    def is_whole(self) -> bool:
        """Return True if every chunk is on some host."""
        return len(set().union(*self.holders.values())) == self.chunks

    def is_finished(self) -> bool:
        """Return True if nothing is under way, and nobody misses a chunk that can be had."""
        waiting = any(self.missing(host) and not self.reason(host) for host in self._wanted)
        return not (self.preparing or self.under_way or waiting)

    def reason(self, host: str) -> str | None:
        """Return the reason why a host cannot get what it misses; None if it can, or misses nothing."""
        moving = {chunk for each in self.under_way for chunk in each.chunks}
        for chunk in self.missing(host) - moving:
            if not self._having(chunk, host):
                return self._reasons.get(host, "no host has it any more")
        return None

    def assign(self) -> list[Transfer]:
        """Return the transfers that begin now."""
        begun: list[Transfer] = []
        while True:
            hosts = [host for host in self._wanted if self._receiving(host) < AT_ONCE]
            choices = [choice for host in hosts if (choice := self._choice(host)) is not None]
            if not choices:
                return begun
            # One at a time, and the hosts with the fewest chunks first, so that they get different ones.
            transfer = min(choices, key=lambda each: self._progress(each.host))
            self.under_way.add(transfer)
            begun.append(transfer)

    def end(self, transfer: Transfer, failure: str | None = None) -> None:
        """Note the end of a transfer, and the reason if it has failed."""
        self.under_way.discard(transfer)
        if transfer.host not in self._wanted:  # removed meanwhile
            return
        if failure is None:
            self.holders.setdefault(transfer.host, set()).update(transfer.chunks)
            self._sent[transfer.holder] += transfer.amount
        else:
            self._failures[transfer.host, transfer.holder] += 1
            self._reasons[transfer.host] = failure

    def remove(self, host: str) -> None:
        """Forget a host whose keeper has died."""
        self.holders.pop(host, None)
        self._wanted.pop(host, None)
        self._patched.pop(host, None)
        self.held.discard(host)

    def give_up(self, host: str, reason: str) -> None:
        """Note that a host does not answer: nobody gets chunks from it, and it gets none until it asks again."""
        self.holders.pop(host, None)
        self._reasons[host] = reason
        self._silent.add(host)

    def _progress(self, host: str) -> tuple[int, int]:
        return len(self.holders.get(host, ())) + self._receiving(host), self._order(host)

    def _order(self, host: str) -> int:
        """Return the place of a host among equal ones: another one for each part, so that all hosts get work."""
        return zlib.crc32(f"{self.source} {host}".encode())

    def _receiving(self, host: str) -> int:
        return sum(transfer.host == host for transfer in self.under_way)

    def _sending(self, holder: str) -> int:
        return sum(transfer.holder == holder for transfer in self.under_way)

    def _having(self, chunk: int, host: str) -> list[str]:
        """Return the hosts from which a host may get a chunk."""
        silent = host in self._silent
        return [
            holder
            for holder, chunks in self.holders.items()
            if chunk in chunks and holder != host and self._failures[host, holder] < ATTEMPTS and not silent
        ]

    def _choice(self, host: str) -> Transfer | None:
        """Return the next transfer to a host; None if it has to wait, or needs nothing."""
        coming = {chunk for each in self.under_way if each.host == host for chunk in each.chunks}
        # Chunks that another host is getting, which will pass them on.
        relayed = {
            chunk for each in self.under_way if not self._failures[host, each.host] for chunk in each.chunks
        } - coming
        missing = self.missing(host) - coming
        idle = {holder for holder in self.holders if self._sending(holder) < AT_ONCE}
        best: tuple[tuple[int, int, int, int, int], str] | None = None
        givers = {}
        for chunk in missing:
            having = self._having(chunk, host)
            others = [holder for holder in having if holder != self.source]
            givers[chunk] = others or ([] if chunk in relayed else having)
            for holder in givers[chunk]:
                if holder in idle:
                    rank = len(having), self._sending(holder), self._sent[holder], self._order(holder), chunk
                    if best is None or rank < best[0]:
                        best = rank, holder
        if best is None:
            return None
        (*_, first), holder = best
        return Transfer(first, self._count(host, holder, first, givers), holder, host)

    def _count(self, host: str, holder: str, first: int, givers: Mapping[int, Sequence[str]]) -> int:
        """Return the number of chunks of a transfer that begins with this one."""
        patched = self._patched.get(host, set())
        most = self._together
        if first in patched:
            most = max(most, PATCHED_BYTES // chunk_bytes(self.part_bytes))
        count = 1
        # No chunk without a base beside those with one: they would all have to come whole.
        while (
            count < most
            and holder in givers.get(first + count, ())
            and (first in patched) == (first + count in patched)
        ):
            count += 1
        return count
