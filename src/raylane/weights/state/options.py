"""Options of publishers and readers, checked before anything is done. Pure."""

from __future__ import annotations

import operator
from typing import Any

MOST_KEEP = 64
"""Largest number of versions that are kept: each takes a descriptor of the keeper, which serves all names of a host."""


def check_name(name: Any) -> None:
    """Raise TypeError or ValueError for a name of weights that is no text."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a text, got {name!r}")
    if not name:
        raise ValueError("name must not be empty. Pass a name such as 'policy'")


def whole_number(option: str, value: Any, least: int | None, most: int | None = None, why: str = "") -> int:
    """Return a whole number of an option. ValueError names the option and what it accepts."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{option} must be a whole number, got {value!r}")
    if least is not None and number < least:
        raise ValueError(f"{option} must be at least {least}{why}, got {value}")
    if most is not None and number > most:
        raise ValueError(f"{option} must be at most {most}, got {value}")
    return number


class VerifySchedule:
    """Schedule by which a reader verifies what it has taken, without being asked."""

    def __init__(self, option: Any) -> None:
        """Accept None (never), `each`, `first`, or a number: every so many versions. ValueError for another value."""
        self._every = 0
        """Verify versions whose turn is a multiple of this; 0: none."""
        self._is_first_only = option == "first"
        if option in ("each", "first"):
            self._every = 1
        elif isinstance(option, str):
            raise ValueError(f"verify must be 'each', 'first', a whole number or None, got {option!r}")
        elif option is not None:
            self._every = whole_number("verify", option, 1)

    def is_due(self, turn: int) -> bool:
        """Return True if the version that is taken as number `turn`, from 1, is to be verified."""
        return self._every > 0 and turn % self._every == 0 and not (self._is_first_only and turn > 1)
