"""Answers of the catalogue to trainers, readers and commands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from raylane.weights.layout.boxes import StoredLayout
from raylane.weights.memory.slots import SlotPlace
from raylane.weights.state.ledger import Ledger, Version, VersionState
from raylane.weights.state.readers import NamedReaders, VersionKey

GenerationKey = tuple[str, int]
"""Generation in messages: the life of the name, and a number."""


@dataclass(frozen=True)
class VersionInfo:
    """One version, as `weights.versions` reports it."""

    name: str
    number: int
    step: int
    state: str
    nbytes: int
    hosts: tuple[str, ...]
    """Ray's ids of the nodes that keep it."""
    readers: tuple[str, ...]
    """Readers that use it now."""
    age_s: float
    digest: str | None
    """SHA-256 of its bytes as they are stored, in hexadecimal, if somebody has asked for it."""
    missing_ranks: tuple[int, ...]
    copied_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes copied between hosts so far: `dense` as whole chunks, `delta` as patches of changed elements."""
    mismatches: int = 0
    """Number of transfers that were repeated whole, because patches did not make the bytes of the trainer's host."""
    held: bool = False
    """True if it is kept beyond `keep`, until it is released."""
    copies: int = 0
    """Least number of hosts that have one and the same part whole; 0 if it is not committed."""


def version_info(ledger: Ledger, version: Version, readers: NamedReaders, now_s: float) -> VersionInfo:
    """Return what is reported of a version; `now_s` is the present time of the clock of `Version.began_s`."""
    return VersionInfo(
        ledger.name,
        version.number,
        version.step,
        version.state.value,
        sum(version.generation.stored.nbytes),
        tuple(version.hosts()),
        tuple(readers.users(version.number, ledger.life)),
        now_s - version.began_s,
        version.digest,
        tuple(version.missing()),
        dict(version.copied_bytes),
        version.mismatches,
        ledger.is_held(version.number),
        version.copies() if version.state is VersionState.COMMITTED else 0,
    )


@dataclass(frozen=True)
class VersionOffer:
    """A committed version, and where each host's part of it lies."""

    number: int
    step: int
    generation: GenerationKey
    stored: StoredLayout | None
    """None if the reader has the layout of this generation."""
    ranks: dict[str, int]
    """Number of the ranks that wrote each part."""
    paths: dict[str, str]
    """Slots with the parts that were written on the reader's own host."""
    digests: bytes | None = None
    """Digest of each tensor, in the order of the stored layout, 8 bytes each; None if it was published without."""

    @property
    def key(self) -> VersionKey:
        """Identity of the version."""
        return VersionKey(self.generation[0], self.number)


class WriteOrder(NamedTuple):
    """Version and place that a rank writes for a step."""

    version: VersionKey
    place: SlotPlace
    generation: GenerationKey
    stored: StoredLayout | None
    """None if the rank has the layout of this generation."""
    paths: tuple[str, ...]
    """All slots of the rank's part."""
