"""Tables of states and events, with one law for all: a pair that is not in a table is a defect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn, TypeVar

_State = TypeVar("_State")
_Event = TypeVar("_Event")


class StateTable(dict[tuple[_State, _Event], _State]):
    """Next state by state and event. KeyError for a pair that is missing."""

    def __missing__(self, pair: tuple[_State, _Event]) -> NoReturn:
        raise KeyError(f"{pair[1]} cannot happen in {pair[0]}. This is a defect of raylane")


def unchanged(state: _State, events: Iterable[_Event]) -> dict[tuple[_State, _Event], _State]:
    """Return the entries of a table for events that do not change a state."""
    return {(state, event): state for event in events}
