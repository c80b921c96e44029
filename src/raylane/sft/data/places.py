"""Places of rows: the file and the line that a row of training data was read from. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class FilePlace(NamedTuple):
    """Place of the rows of one file among the rows of all sources."""

    name: str
    first: int
    """Number of its first row."""
    has_lines: bool
    """True if row n is line n of the file."""

    def of_row(self, row: int) -> str:
        """Return the place of a row of this file, counted among all rows, for messages."""
        number = row - self.first + 1
        return f"{self.name}:{number}" if self.has_lines else f"{self.name}, row {number}"


def place_of(places: Sequence[FilePlace], row: int) -> str:
    """Return the place of a row, for messages. `places` are those of all files, in their order."""
    if not places:
        return f"row {row + 1}"
    return places[bisect_right(places, row, key=lambda place: place.first) - 1].of_row(row)
