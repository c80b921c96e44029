"""Planning of calls: the workers to call, the slice of the arguments for each, and the workers that return a result.

Pure. `plan_call` turns axis lists into a `DispatchPlan`; `check_nesting` and `take` slice arguments along the plan.
All methods that run a worker group use the same kind of plan, so that they behave alike. Called by `WorkerGroup`.

An axis has one of three roles in a call:

    sharded     each coordinate gets its own slice; arguments are nested once per sharded axis, in the list's order
    replicated  every coordinate gets the same slice
    free        (neither) only coordinate 0 is called; the others are skipped, or called with None on request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raylane.workers.sharding import NamedSharding


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """The part of one worker in a dispatched call."""

    rank: int
    path: tuple[int, ...] | None
    """Index into the nested arguments, one coordinate per sharded axis; None for a dummy call, with None arguments."""
    returns: bool
    """True if the worker sends its result; False if it drops the result and only reports that the call is done."""


@dataclass(frozen=True)
class DispatchPlan:
    """All calls of one dispatch by ascending rank, and the axes along which arguments are nested."""

    calls: tuple[WorkerCall, ...]
    nesting: tuple[tuple[str, int], ...]
    """Pairs (axis, size) from the outermost level of the arguments inwards; empty if arguments are not nested."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.calls, self.nesting))

    def __hash__(self) -> int:
        return self._hash  # computed once: a plan of a large group is looked up for every call

    @property
    def called_ranks(self) -> tuple[int, ...]:
        """Ranks of the called workers, ascending."""
        return tuple(call.rank for call in self.calls)

    @property
    def returning_ranks(self) -> tuple[int, ...]:
        """Ranks of the workers that send a result, ascending."""
        return tuple(call.rank for call in self.calls if call.returns)


def plan_call(
    sharding: NamedSharding,
    shard: Sequence[str] = (),
    replicate: Sequence[str] | None = None,
    one_result: Sequence[str] = (),
    call_free_axes: bool = False,
) -> DispatchPlan:
    """Return the plan of a call whose arguments are lists nested once for each axis of `shard`.

    `replicate` of None means all other axes. `one_result` names the axes along which results are equal, so that only
    coordinate 0 returns; it alone decides which workers return, also for calls with None. Raises ValueError for an
    unknown or repeated axis in any list (with the known axes), and for an axis that is both sharded and replicated.
    """
    shard, one_result = axis_names(shard), axis_names(one_result)
    replicate = tuple(n for n in sharding.names if n not in shard) if replicate is None else axis_names(replicate)
    sharding.check_axes(shard, "shard")
    sharding.check_axes(replicate, "replicate")
    sharding.check_axes(one_result, "one_result")
    both = [axis for axis in shard if axis in replicate]
    if both:
        raise ValueError(
            f"axes {both} are in both shard and replicate; an axis is either sharded or replicated (the axes are "
            f"{list(sharding.names)})"
        )
    free = [axis for axis in sharding.names if axis not in (*shard, *replicate)]
    calls = []
    for rank in sharding.ranks:
        coords = sharding.get_worker_coords(rank)
        gets_data = all(coords[axis] == 0 for axis in free)
        if gets_data or call_free_axes:
            path = tuple(coords[axis] for axis in shard) if gets_data else None
            calls.append(WorkerCall(rank, path, returns=all(coords[axis] == 0 for axis in one_result)))
    nesting = tuple((axis, sharding.get_axis_size(axis)) for axis in shard)
    return DispatchPlan(tuple(calls), nesting)


def plan_ranks(sharding: NamedSharding, ranks: Sequence[int]) -> DispatchPlan:
    """Return the plan of a call to these ranks with the same arguments. ValueError for unknown ranks and for none."""
    if not ranks:
        raise ValueError(f"ranks must name at least one worker, got {ranks!r}")
    for rank in ranks:
        sharding.get_index(rank)
    return DispatchPlan(tuple(WorkerCall(rank, (), returns=True) for rank in sorted(set(ranks))), ())


def check_nesting(argument: str, value: Any, nesting: Sequence[tuple[str, int]], at: tuple[int, ...] = ()) -> None:
    """Raise ValueError or TypeError unless `value` is lists or tuples with the depth and lengths of `nesting`.

    `at` is the place of the value in the argument.
    """
    if not nesting:
        return
    (axis, size), inner = nesting[0], nesting[1:]
    place = argument + "".join(f"[{i}]" for i in at)
    if not isinstance(value, (list, tuple)):
        raise TypeError(
            f"{place}: expected a list with one entry for each of the {size} coordinates of {axis!r}, found "
            f"{type(value).__name__}. Nest arguments once per sharded axis, in the order of `shard`"
        )
    if len(value) != size:
        raise ValueError(f"{place}: expected {size} entries, one for each coordinate of {axis!r}, found {len(value)}")
    for i, part in enumerate(value):
        check_nesting(argument, part, inner, (*at, i))


def take(value: Any, path: tuple[int, ...] | None) -> Any:
    """Return one call's slice of a nested argument that `check_nesting` has checked; None for a dummy call."""
    if path is None:
        return None
    for i in path:
        value = value[i]
    return value


def axis_names(axes: Sequence[str] | None) -> tuple[str, ...]:
    """Return names of axes; none for None. TypeError for a string: it would pass for a list of one-letter axes."""
    if isinstance(axes, str):
        raise TypeError(f"axes must be a list of names. For one axis write [{axes!r}]")
    return tuple(axes or ())
