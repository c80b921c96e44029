"""Names in the text of an error: the first ones, and the number of the others."""

from __future__ import annotations

from collections.abc import Iterable

MOST_NAMES = 8


def listed(names: Iterable[object]) -> str:
    """Return at most MOST_NAMES names as Python shows them, such as `'a', 'b' and 3 more`; `none` for no name."""
    known = list(names)
    more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
    return ", ".join(map(repr, known[:MOST_NAMES])) + more if known else "none"
