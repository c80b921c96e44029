"""Cases and goals of the benchmark `weights`. Pure; imports neither Ray nor torch.

A model has `tensors` square matrices. Each of two ranks has one half of the rows of each matrix. A reader has the whole
model, or one of two parts of it as tensor parallelism divides it: of four matrices the first three by rows, which lie
in one fused tensor of the reader, and the fourth by columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks import measure
from benchmarks.goals import Goal

RAYLANE, MEMCPY, STORE, NUMPY = "raylane", "memcpy", "ray:object_store", "ray:numpy"
DIGESTS = "raylane:digests"
"""raylane with digests: the ranks compute them, and the readers verify each update."""
RANKS = 2
"""Number of ranks that publish."""
MOVERS = (RAYLANE, STORE, NUMPY, "ray:rdt-gloo", "ray:rdt-nixl", "gloo:broadcast", "dcp:tmpfs", "torchstore")
FAST_MOVERS = (RAYLANE, STORE, NUMPY, "gloo:broadcast")
"""Contenders with 1 GB: each takes about 4 GB of memory."""
MANY_MOVERS = tuple(name for name in MOVERS if name != "dcp:tmpfs")
"""Contenders with 10,000 tensors, for which a checkpoint took 18 s."""
MOVED, BLOCKED, COPIED, MAPPED = "move", "publish", "copy", "map"
"""Workloads: publication until all readers have it; the trainer's pause; the pause of a reader that copies, or maps."""


class Region(NamedTuple):
    """Rows and columns of a matrix."""

    row: int
    column: int
    rows: int
    columns: int

    def common(self, other: Region) -> Region:
        """Return the elements that two regions share; no rows or no columns if there are none."""
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Region(row, column, max(rows, 0), max(columns, 0))

    def within(self, other: Region) -> tuple[slice, slice]:
        """Return the index of this region in the tensor that holds another one."""
        row, column = self.row - other.row, self.column - other.column
        return slice(row, row + self.rows), slice(column, column + self.columns)


@dataclass(frozen=True)
class Case:
    """One workload with its model, readers and contenders."""

    name: str
    workload: str
    tensors: int
    side: int
    """Rows and columns of each matrix of float32; even."""
    contenders: tuple[str, ...]
    readers: int = 1
    parts: int = 1
    """Number of readers that share a whole model: 1 or 2."""

    @property
    def nbytes(self) -> int:
        """Size of the whole model in bytes."""
        return self.tensors * self.side**2 * 4

    def rows_of(self, part: int, parts: int) -> Region:
        """Return one of so many equal parts of a matrix, by rows."""
        rows = self.side // parts
        return Region(part * rows, 0, rows, self.side)

    def held(self, tensor: int, part: int) -> Region:
        """Return the region of a matrix that a reader of a part has."""
        if self.parts == 1 or not by_columns(tensor):
            return self.rows_of(part, self.parts)
        columns = self.side // self.parts
        return Region(0, part * columns, self.side, columns)


def by_columns(tensor: int) -> bool:
    """Return True if tensor parallelism divides this matrix by columns."""
    return tensor % 4 == 3


def _known(*, large: bool) -> dict[str, Case]:
    sizes = {"100MB": (300, 288), "100MB-10000": (10_000, 50)} | ({"1GB": (300, 912)} if large else {})
    cases = []
    for size, (tensors, side) in sizes.items():
        cases += [
            Case(f"publish-{size}", BLOCKED, tensors, side, (RAYLANE, DIGESTS, MEMCPY), readers=1),
            Case(f"copy-{size}", COPIED, tensors, side, (RAYLANE, DIGESTS, MEMCPY), readers=1),
            Case(f"map-4-{size}", MAPPED, tensors, side, (RAYLANE,), readers=4, parts=2),
        ]
        movers = {"100MB": MOVERS, "1GB": FAST_MOVERS}.get(size, MANY_MOVERS)
        for readers in (1,) if size == "100MB-10000" else (1, 2) if size == "1GB" else (1, 2, 4):
            cases.append(Case(f"move-{readers}-{size}", MOVED, tensors, side, movers, readers, min(readers, 2)))
    return {case.name: case for case in cases}


def cases(*, large: bool, only: str | None) -> list[Case]:
    """Return the cases to run. ValueError names unknown cases and the known ones."""
    return measure.choose(_known(large=large), only, "" if large else " (those of 1GB with --large)")


def grouped(selected: Sequence[Case]) -> list[list[Case]]:
    """Return the cases in groups whose contenders take turns: 10,000 tensors beside 300 where memory permits."""
    groups: dict[str, list[Case]] = {}
    for case in selected:
        alone = case.workload == MOVED or case.nbytes > 500_000_000
        groups.setdefault(case.name if alone else case.workload, []).append(case)
    return list(groups.values())


def rounds_of(group: Sequence[Case], *, quick: bool) -> int:
    """Return the number of samples of each contender."""
    if group[0].nbytes > 500_000_000:
        return 2 if quick else 10
    return 3 if quick else 20 if group[0].workload == MOVED else 40


def goals(records: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Return the goals for which there are records."""
    rows = {(row["case"], row["contender"]): row for row in records}
    medians = {key: float(row["p50_us"]) for key, row in rows.items()}
    reached: list[Goal] = []
    for (case, contender), row in rows.items():
        if contender == DIGESTS and {(case, RAYLANE), (case, MEMCPY)} <= medians.keys():
            more_us, floor_us = row["p50_us"] - medians[case, RAYLANE], medians[case, MEMCPY]
            reached.append(Goal(case, "digests, of a memcpy of the same bytes", more_us / floor_us, 2, "x"))
        if contender == RAYLANE:
            others = {name: us for (other, name), us in medians.items() if other == case and name != RAYLANE}
            reached += _GOALS[case.partition("-")[0]](case, row, others)
            few = medians.get((case.removesuffix("-10000"), RAYLANE))
            if case.endswith("-10000") and few is not None and not case.startswith(MAPPED):
                reached.append(Goal(case, "of the time of 300 tensors", row["p50_us"] / few, 2, "x"))
    return reached


def _of_memcpy(case: str, text: str, row: Mapping[str, Any], others: Mapping[str, float]) -> Goal:
    floor_us = others[MEMCPY]
    return Goal(case, text, row["p50_us"] / floor_us, 1.5, "x", floor="memcpy", floor_us=floor_us)


def _blocked(case: str, row: Mapping[str, Any], others: Mapping[str, float]) -> list[Goal]:
    return [_of_memcpy(case, "trainer blocked, of a memcpy of the rank's bytes", row, others)]


def _copied(case: str, row: Mapping[str, Any], others: Mapping[str, float]) -> list[Goal]:
    return [
        _of_memcpy(case, "update, of a memcpy of the reader's bytes", row, others),
        Goal(case, "planning, of later updates", row["planning_share"] * 100, 1, "%"),
    ]


def _mapped(case: str, row: Mapping[str, Any], _: Mapping[str, float]) -> list[Goal]:
    return [
        Goal(case, "pause of a reader", row["p50_us"] / 1000, 5, "ms"),
        Goal(case, "own memory that a reader gains, of its bytes", row["gained_share"] * 100, 5, "%"),
    ]


def _moved(case: str, row: Mapping[str, Any], others: Mapping[str, float]) -> list[Goal]:
    faster = []
    if others:
        best = min(others, key=lambda name: others[name])
        faster.append(Goal(case, f"faster than the best other, {best}", others[best] / row["p50_us"], 3, "x", True))
    if STORE in others:
        faster.append(Goal(case, "faster than the object store", others[STORE] / row["p50_us"], 10, "x", True))
    return faster


_GOALS: dict[str, Callable[[str, Mapping[str, Any], Mapping[str, float]], list[Goal]]] = {
    BLOCKED: _blocked,
    COPIED: _copied,
    MAPPED: _mapped,
    MOVED: _moved,
}
