"""Cases of the benchmark `transfer`: what is moved, how, and by whom. Pure; imports neither Ray nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import measure
from benchmarks.goals import Ratio, at_most, faster

BASELINE = "ray:object_store"
SIZES = {
    "4B": 4,
    "4KB": 4000,
    "96KB": 96 << 10,
    "150KB": 150_000,
    "1MB": 1_000_000,
    "100MB": 100_000_000,
}
_LARGEST_IN_REPLY = ("96KB", "150KB")
"""Sizes below and above the largest tensor that travels inside Ray's reply."""
GIGABYTE = 1_000_000_000
MIB_64 = 64 << 20
OURS = "raylane:auto"
RDT = ("ray:rdt-gloo", "ray:rdt-nixl")
PASS = (OURS, "raylane:tcp", "raylane:gloo", "raylane:nixl", BASELINE, *RDT)
OWN_MEMORY, OWN_COPY = "own-memory", "own-copy"
"""The same two calls without a transfer: the consumer sums a tensor of its own, or copies that first."""
COPIED = (*PASS, OWN_COPY)
TWO_CALLS = (*PASS, OWN_MEMORY)
MAPPED = (OURS, BASELINE, *RDT, OWN_MEMORY)
GET = (OURS, BASELINE, "ray:rdt-nixl", "memcpy")
CUDA = (OURS, "raylane:host", "raylane:nixl", BASELINE, "ray:rdt-cuda_ipc", "ray:rdt-nixl")
"""Between processes on one GPU; NCCL refuses these."""

FLOORS = {
    OWN_COPY: "calls and copy",
    OWN_MEMORY: "two calls",
    "memcpy": "a copy",
    "nixl:raw": "bare NIXL",
    "socket:raw": "bare socket",
    "ray:plain": "plain .remote()",
}
"""Contenders that show what the machine can do, with their texts; the first in a case stands beside its goals."""
_STORE, _RDT = "faster than the object store", "faster than the better RDT"
_SMALL = ("4B", "4B-new", "4KB", "4KB-new")
_WITH_FLOOR = dict.fromkeys(_SMALL, TWO_CALLS) | dict.fromkeys(("1MB", "100MB"), COPIED)
GOALS = [
    *(at_most(case, "of the object store", OURS, BASELINE, 1.05) for case in _SMALL),
    *(faster(case, "faster than RDT gloo", "ray:rdt-gloo", OURS, 3) for case in _SMALL),
    at_most("1MB", "of two calls and a copy", OURS, OWN_COPY, 1.3),
    faster("1MB", _STORE, BASELINE, OURS, 3),
    faster("1MB", _RDT, RDT, OURS, 2),
    *(faster("100MB", _STORE, BASELINE, OURS, factor) for factor in (11, 20)),
    faster("100MB", _RDT, RDT, OURS, 5),
    faster("100MB-new", _STORE, BASELINE, OURS, 5),
    faster("100MB-new", _RDT, RDT, OURS, 2),
    *(
        faster(case, f"{name}, faster than RDT's", f"ray:rdt-{name}", f"raylane:{name}", 1)
        for case in ("1MB", "100MB")
        for name in ("gloo", "nixl")
    ),
    *(
        goal
        for case in ("100MB-mapped", "1GB-mapped")
        for goal in (
            faster(case, _STORE, BASELINE, OURS, 25),
            faster(case, _RDT, RDT, OURS, 8),
            at_most(case, "of the consumer's own memory", OURS, OWN_MEMORY, 1.3),
        )
    ),
    faster("small-10000x4KB", _RDT, RDT, OURS, 10),
    at_most("get-64MiB", "of a copy", OURS, "memcpy", 3),
    at_most("get-into-64MiB", "of a copy", OURS, "memcpy", 2),
    at_most("get-into-64MiB-shared", "of a copy", OURS, "memcpy", 1.3),
    at_most("nixl-100MB", "of bare NIXL", "raylane:nixl", "nixl:raw", 1.5),
    Ratio("fanout-8-64MiB", "8 readers, of one", (OURS,), OURS, 2, under_case="fanout-1-64MiB"),
    *(at_most(case, "of a plain .remote()", OURS, "ray:plain", 1.15) for case in ("submit", "submit-starting")),
    at_most("tcp-1GB", "of a bare socket", "raylane:tcp", "socket:raw", 1.25),
]


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
    cuda: bool = False
    """True if the tensors lie on a GPU, which the actors share."""

    @property
    def total(self) -> int:
        """Bytes of all tensors of the value."""
        return self.nbytes * (self.count if self.workload == "pass" else 1)


def _known(*, large: bool) -> dict[str, Case]:
    cases_by_name = {}
    for name, nbytes in (SIZES | ({"1GB": GIGABYTE} if large else {})).items():
        cases_by_name[name] = Case(name, "pass", nbytes, _WITH_FLOOR.get(name, PASS))
        if name not in _LARGEST_IN_REPLY:
            new = f"{name}-new"
            cases_by_name[new] = Case(new, "pass", nbytes, _WITH_FLOOR.get(new, PASS), fresh=True)
        if nbytes >= SIZES["100MB"]:
            cases_by_name[f"{name}-mapped"] = Case(f"{name}-mapped", "pass", nbytes, MAPPED, mapped=True)
    more = [
        Case("small-10000x4KB", "pass", 4096, PASS, count=10_000),
        Case("get-64MiB", "get", MIB_64, GET),
        Case("get-into-64MiB", "get", MIB_64, GET, into=True),
        Case("get-into-64MiB-shared", "get", MIB_64, (OURS, "memcpy"), into=True, shared=True),
        Case("nixl-100MB", "get", 100_000_000, ("raylane:nixl", "nixl:raw", "ray:rdt-nixl")),
        Case("fanout-1-64MiB", "fanout", MIB_64, (OURS, BASELINE)),
        Case("fanout-8-64MiB", "fanout", MIB_64, (OURS, BASELINE), count=8),
        Case("submit", "submit", 4, (OURS, "ray:plain", "ray:rdt-nixl")),
        Case("submit-starting", "submit", 4, (OURS, "ray:plain"), starting=True),
    ]
    if large:
        more.append(Case("tcp-1GB", "get", GIGABYTE, ("raylane:tcp", "socket:raw"), into=True))
    return cases_by_name | {case.name: case for case in more}


def _known_on_gpus(*, large: bool) -> dict[str, Case]:
    sizes = {name: SIZES[name] for name in ("4KB", "1MB", "100MB")} | ({"1GB": GIGABYTE} if large else {})
    known = []
    for size, nbytes in sizes.items():
        known.append(Case(f"{size}-cuda", "pass", nbytes, (*CUDA, OWN_MEMORY), cuda=True))
        known.append(Case(f"{size}-cuda-new", "pass", nbytes, CUDA, fresh=True, cuda=True))
    return {case.name: case for case in known}


def cases(*, large: bool, only: str | None, cuda: bool = False) -> list[Case]:
    """Return the cases to run: those of CPU tensors, or those of CUDA tensors.

    ValueError names unknown cases and the known ones.
    """
    if cuda:
        return measure.choose(_known_on_gpus(large=large), only, "" if large else " (1GB with --large)")
    return measure.choose(_known(large=large), only, "" if large else " (1GB and tcp-1GB with --large)")


def grouped(selected: Sequence[Case]) -> list[list[Case]]:
    """Return the cases in groups that use the same actors."""
    groups: dict[tuple[str, int, bool, bool, tuple[str, ...]], list[Case]] = {}
    for case in selected:
        readers = case.count if case.workload == "fanout" else 1
        groups.setdefault((case.workload, readers, case.starting, case.cuda, case.contenders), []).append(case)
    return list(groups.values())


def blocks_of(case: Case, *, quick: bool) -> tuple[int, int]:
    """Return (rounds, samples per round)."""
    if case.starting:
        return (2, 1) if quick else (15, 1)
    # Ray's transports take seconds for thousands of tensors.
    if case.total >= GIGABYTE or (case.workload == "pass" and case.count >= 1000):
        return (2, 1) if quick else (8, 1)
    if case.total >= 10_000_000:
        if quick:
            return 3, 1
        # Ray's object store takes half a second for 100 MB of a GPU.
        return (10, 1) if case.cuda else (20, 2)
    return (4, 5) if quick else (30, 10)
