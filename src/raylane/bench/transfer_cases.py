"""Cases of `raylane bench transfer`: what is moved, how, and by whom. Pure; imports neither Ray nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raylane.bench import measure

BASELINE = "ray:object_store"
SIZES = {
    "4B": 4,
    "4KB": 4000,
    "80KB": 80 << 10,
    "96KB": 96 << 10,
    "150KB": 150_000,
    "1MB": 1_000_000,
    "100MB": 100_000_000,
}
GIGABYTE = 1_000_000_000
MIB_64 = 64 << 20
PASS = (
    "raylane:auto",
    "raylane:host",
    "raylane:tcp",
    "raylane:gloo",
    "raylane:nixl",
    BASELINE,
    "ray:rdt-gloo",
    "ray:rdt-nixl",
)
OWN_MEMORY, OWN_COPY = "own-memory", "own-copy"
"""The same two calls without a transfer: the consumer sums a tensor of its own, or copies that first."""
COPIED = (*PASS, OWN_COPY)
MAPPED = ("raylane:auto", BASELINE, "ray:rdt-gloo", "ray:rdt-nixl", OWN_MEMORY)
GET = ("raylane:auto", BASELINE, "ray:rdt-nixl", "memcpy")


@dataclass(frozen=True)
class Case:
    """One workload with its sizes and contenders."""

    name: str
    workload: str
    """`pass`: a producer returns, a consumer sums, one call after the other. `get`: one process reads a held value.
    `fanout`: one value goes to several consumers at once. `submit`: calls are submitted.
    """
    nbytes: int
    """Size of each tensor."""
    contenders: tuple[str, ...]
    count: int = 1
    """Number of tensors (`pass`) or of consumers (`fanout`)."""
    fresh: bool = False
    """True if the producer makes a new tensor in every call, False if it returns one that it keeps."""
    into: bool = False
    """True if the reader has a tensor for the value."""
    shared: bool = False
    """True if the value lies in a shared segment (a snapshot)."""
    mapped: bool = False
    """True if raylane's producer keeps the tensor in memory of `raylane.empty`."""
    starting: bool = False
    """True if the actor is still starting."""

    @property
    def total(self) -> int:
        """Bytes of all tensors of the value."""
        return self.nbytes * (self.count if self.workload == "pass" else 1)


def _known(*, large: bool) -> dict[str, Case]:
    cases_by_name = {}
    for name, nbytes in (SIZES | ({"1GB": GIGABYTE} if large else {})).items():
        cases_by_name[name] = Case(name, "pass", nbytes, COPIED if name == "1MB" else PASS)
        cases_by_name[f"{name}-new"] = Case(f"{name}-new", "pass", nbytes, PASS, fresh=True)
        if nbytes >= SIZES["100MB"]:
            cases_by_name[f"{name}-mapped"] = Case(f"{name}-mapped", "pass", nbytes, MAPPED, mapped=True)
    more = [
        Case("small-10000x4KB", "pass", 4096, PASS, count=10_000),
        Case("get-64MiB", "get", MIB_64, GET),
        Case("get-into-64MiB", "get", MIB_64, GET, into=True),
        Case("get-into-64MiB-shared", "get", MIB_64, ("raylane:auto", "memcpy"), into=True, shared=True),
        Case("nixl-100MB", "get", 100_000_000, ("raylane:nixl", "nixl:raw", "ray:rdt-nixl")),
        Case("fanout-1-64MiB", "fanout", MIB_64, ("raylane:auto", BASELINE)),
        Case("fanout-8-64MiB", "fanout", MIB_64, ("raylane:auto", BASELINE), count=8),
        Case("submit", "submit", 4, ("raylane:auto", "ray:plain", "ray:rdt-nixl")),
        Case("submit-starting", "submit", 4, ("raylane:auto", "ray:plain"), starting=True),
    ]
    if large:
        more.append(Case("tcp-1GB", "get", GIGABYTE, ("raylane:tcp", "socket:raw"), into=True))
    return cases_by_name | {case.name: case for case in more}


def cases(*, large: bool, only: str | None) -> list[Case]:
    """Return the cases to run. ValueError names unknown cases and the known ones."""
    return measure.choose(_known(large=large), only, "" if large else " (1GB and tcp-1GB with --large)")


def grouped(selected: Sequence[Case]) -> list[list[Case]]:
    """Return the cases in groups that use the same actors."""
    groups: dict[tuple[str, int, bool, tuple[str, ...]], list[Case]] = {}
    for case in selected:
        readers = case.count if case.workload == "fanout" else 1
        groups.setdefault((case.workload, readers, case.starting, case.contenders), []).append(case)
    return list(groups.values())


def blocks_of(case: Case, *, quick: bool) -> tuple[int, int]:
    """Return (rounds, samples per round)."""
    if case.starting:
        return (2, 1) if quick else (5, 1)
    # Ray's transports take seconds for thousands of tensors.
    if case.total >= GIGABYTE or (case.workload == "pass" and case.count >= 1000):
        return (2, 1) if quick else (8, 1)
    if case.total >= 10_000_000:
        return (3, 1) if quick else (20, 2)
    return (4, 5) if quick else (30, 10)
