"""Arguments of `execute`: checks them and maps them to the input values of a plan. Pure."""

from __future__ import annotations

from typing import Any

from raylane.graph.plan.ir import INPUT, Plan
from raylane.graph.values import operations


class Arguments:
    """Inputs of one graph, found in its plan once."""

    def __init__(self, plan: Plan) -> None:
        self._size = len(plan.values)
        self._wanted = [(v.index, v.steps) for v in plan.values if v.source == INPUT and v.steps[:1] != (("done",),)]
        # A plan selects arguments either by name and number, or takes the one argument whole; never both.
        named = [steps[0] for _, steps in self._wanted if steps and steps[0][0] == "argument"]
        self._count = max((key + 1 for _, how, key in named if isinstance(key, int)), default=0)
        self._keys = {key for _, _, key in named if isinstance(key, str)}
        self._whole = bool(self._wanted) and not named
        self._whole_values = [index for index, steps in self._wanted] if all(not s for _, s in self._wanted) else None

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return a list with every input value at its index. TypeError if the arguments are not the graph's inputs."""
        values: list[Any] = [None] * self._size
        if self._whole:
            if len(args) != 1 or kwargs:
                raise TypeError(self._mismatch("one positional argument, used whole", args, kwargs))
            if self._whole_values is not None:
                for index in self._whole_values:
                    values[index] = args[0]
                return values
            for index, steps in self._wanted:
                values[index] = operations.select(args[0], steps) if steps else args[0]
            return values
        if len(args) == 1 and not kwargs and (self._count > 1 or self._keys):
            # One argument where the graph names several inputs: it holds all of them as items or attributes.
            try:
                for index, steps in self._wanted:
                    values[index] = operations.select(args[0], (steps[0][1:], *steps[1:]))
            except Exception as error:
                error.add_note(
                    f"this graph takes {self._named()}; the one argument that execute got must hold all of them"
                )
                raise
            return values
        if len(args) != self._count or set(kwargs) != self._keys:
            raise TypeError(self._mismatch(self._named() if self._wanted else "no input", args, kwargs))
        for index, steps in self._wanted:
            _, _, key = steps[0]
            values[index] = operations.select(args[key] if isinstance(key, int) else kwargs[key], steps[1:])
        return values

    def _named(self) -> str:
        return ", ".join([f"{self._count} positional", *(f"{key}=" for key in sorted(self._keys))])

    def _mismatch(self, expected: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        received = ", ".join([f"{len(args)} positional", *(f"{key}=" for key in kwargs)])
        return f"this graph takes {expected}; execute got {received}"
