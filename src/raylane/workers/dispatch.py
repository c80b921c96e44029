"""Who is called with which slice of the arguments, and whose result comes back: decided here, on values alone.

Pure. `plan_sharded` turns axis lists into a `Plan`; `check_nesting` and `take` cut arguments along it. Every way to run
a worker group goes by the same plan, so that they cannot differ. Called by `WorkerGroup`.

The three roles that an axis can have in one call:

    sharded     each coordinate gets its own slice; arguments are nested once per sharded axis, in the list's order
    replicated  every coordinate gets the same slice
    free        (neither) only coordinate 0 is called; the rest are left out, or called with None when asked
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raylane.workers.sharding import NamedSharding

__all__ = ["Call", "Plan", "check_nesting", "plan_sharded", "plan_some", "take"]


@dataclass(frozen=True, slots=True)
class Call:
    """One worker's part in a call."""

    rank: int
    path: tuple[int, ...] | None
    """Index into the nested arguments, one coordinate per sharded axis; None: a dummy call, every argument is None."""
    returns: bool
    """Whether its result is wanted. If not, the worker drops it and only the news that it is done travels."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All calls of one dispatch, by ascending rank, and the axes that arguments are nested along."""

    calls: tuple[Call, ...]
    nesting: tuple[tuple[str, int], ...]
    """(axis, size) from the outermost level of the arguments inwards; empty: arguments are not nested."""

    @property
    def called_ranks(self) -> tuple[int, ...]:
        return tuple(call.rank for call in self.calls)

    @property
    def returning_ranks(self) -> tuple[int, ...]:
        return tuple(call.rank for call in self.calls if call.returns)


def plan_sharded(
    sharding: NamedSharding,
    in_sharded_axes: Sequence[str] = (),
    replicate_on_axes: Sequence[str] = (),
    output_is_replicated: Sequence[str] = (),
    make_dummy_calls_to_free_axes: bool = False,
) -> Plan:
    """Decide a call whose arguments are nested lists over `in_sharded_axes`.

    `output_is_replicated` names the axes along which results are equal, so that only coordinate 0 returns; it decides
    alone who returns, for dummy calls too. Raises ValueError for an unknown or repeated axis in any list (with the
    known axes), and for an axis that is both sharded and replicated.
    """
    in_sharded_axes, replicate_on_axes = _axes(in_sharded_axes), _axes(replicate_on_axes)
    output_is_replicated = _axes(output_is_replicated)
    sharding.check_axes(in_sharded_axes, "in_sharded_axes")
    sharding.check_axes(replicate_on_axes, "replicate_on_axes")
    sharding.check_axes(output_is_replicated, "output_is_replicated")
    both = [axis for axis in in_sharded_axes if axis in replicate_on_axes]
    if both:
        raise ValueError(
            f"axes {both} stand in in_sharded_axes and in replicate_on_axes; an axis is either cut or copied "
            f"(the axes are {list(sharding.names)})"
        )
    free = [axis for axis in sharding.names if axis not in (*in_sharded_axes, *replicate_on_axes)]
    calls = []
    for rank in sharding.ranks:
        coords = sharding.get_worker_coords(rank)
        fed = all(coords[axis] == 0 for axis in free)
        if fed or make_dummy_calls_to_free_axes:
            path = tuple(coords[axis] for axis in in_sharded_axes) if fed else None
            calls.append(Call(rank, path, returns=all(coords[axis] == 0 for axis in output_is_replicated)))
    return Plan(tuple(calls), tuple((axis, sharding.get_axis_size(axis)) for axis in in_sharded_axes))


def plan_some(sharding: NamedSharding, run_rank_0_only_axes: Sequence[str] = (), *, one_each: bool = False) -> Plan:
    """Call every rank, or on each of the given axes only coordinate 0; all that are called return.

    With `one_each` the arguments are lists with one entry per *called* worker, by ascending rank; else every called
    worker gets the same arguments. Raises ValueError for unknown or repeated axes.
    """
    run_rank_0_only_axes = _axes(run_rank_0_only_axes)
    sharding.check_axes(run_rank_0_only_axes, "run_rank_0_only_axes")
    ranks = [rank for rank in sharding.ranks if sharding.is_axis_zero(rank, run_rank_0_only_axes)]
    calls = tuple(Call(rank, (i,) if one_each else (), returns=True) for i, rank in enumerate(ranks))
    return Plan(calls, (("called workers", len(ranks)),) if one_each else ())


def check_nesting(argument: str, value: Any, nesting: Sequence[tuple[str, int]]) -> None:
    """Raise ValueError or TypeError unless `value` is lists or tuples, nested as deep and as long as `nesting` says."""
    _check_level(argument, value, nesting, ())


def _check_level(argument: str, value: Any, nesting: Sequence[tuple[str, int]], at: tuple[int, ...]) -> None:
    if not nesting:
        return
    (axis, size), inner = nesting[0], nesting[1:]
    place = argument + "".join(f"[{i}]" for i in at)
    if not isinstance(value, (list, tuple)):
        raise TypeError(
            f"{place}: expected a list with one entry for each of the {size} coordinates of {axis!r}, found "
            f"{type(value).__name__}; arguments are nested once per sharded axis, in the order of the list"
        )
    if len(value) != size:
        raise ValueError(f"{place}: expected {size} entries, one for each coordinate of {axis!r}, found {len(value)}")
    for i, part in enumerate(value):
        _check_level(argument, part, inner, (*at, i))


def take(value: Any, path: tuple[int, ...] | None) -> Any:
    """The slice of a nested argument that one call gets (None for a dummy call). `check_nesting` comes first."""
    if path is None:
        return None
    for i in path:
        value = value[i]
    return value


def _axes(axes: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(axes, str):
        raise TypeError(f"axes are given as a list of names; for one axis write [{axes!r}]")
    return tuple(axes or ())
