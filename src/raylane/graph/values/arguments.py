"""What `execute` was called with, as the values that a plan sends: which argument is which, checked. Pure."""

from __future__ import annotations

from typing import Any

from raylane.graph.plan.ir import INPUT, Plan
from raylane.graph.values import operations as ops


class Arguments:
    """Knows from the plan which inputs there are. Made once a graph."""

    def __init__(self, plan: Plan) -> None:
        self._size = len(plan.values)
        self._wanted = [(v.index, v.steps) for v in plan.values if v.source == INPUT and v.steps[:1] != (("done",),)]
        named = [steps[0] for _, steps in self._wanted if steps and steps[0][0] == "argument"]
        self._count = max((key + 1 for _, how, key in named if isinstance(key, int)), default=0)
        self._keys = {key for _, _, key in named if isinstance(key, str)}
        self._whole = bool(self._wanted) and not named
        self._plain = [index for index, steps in self._wanted] if all(not s for _, s in self._wanted) else None

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """A list with every input value at its index. TypeError if these are not the graph's inputs."""
        values: list[Any] = [None] * self._size
        if self._whole:
            if len(args) != 1 or kwargs:
                raise TypeError(self._complaint("one positional argument, used whole", args, kwargs))
            if self._plain is not None:
                for index in self._plain:
                    values[index] = args[0]
                return values
            for index, steps in self._wanted:
                values[index] = ops.select(args[0], steps) if steps else args[0]
            return values
        if self._within(args, kwargs):
            self._take_from(args[0], values)
            return values
        self._check(args, kwargs)
        for index, steps in self._wanted:
            _, _, key = steps[0]
            values[index] = ops.select(args[key] if isinstance(key, int) else kwargs[key], steps[1:])
        return values

    def _within(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the names mean parts of the one argument."""
        return len(args) == 1 and not kwargs and (self._count > 1 or bool(self._keys))

    def _take_from(self, argument: Any, values: list[Any]) -> None:
        """All values, from the one argument that stands for all that the graph names."""
        try:
            for index, steps in self._wanted:
                values[index] = ops.select(argument, (steps[0][1:], *steps[1:]))
        except Exception as error:
            error.add_note(f"this graph takes {self._named()}; the one argument that execute got stands for all of it")
            raise

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) != self._count or set(kwargs) != self._keys:
            raise TypeError(self._complaint(self._named() if self._wanted else "no input", args, kwargs))

    def _named(self) -> str:
        return ", ".join([f"{self._count} positional", *(f"{key}=" for key in sorted(self._keys))])

    def _complaint(self, wanted: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        given = ", ".join([f"{len(args)} positional", *(f"{key}=" for key in kwargs)])
        return f"this graph takes {wanted}; execute got {given}"
