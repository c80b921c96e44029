"""Settings in environment variables that several parts of raylane read."""

from __future__ import annotations

import os


def bytes_in(variable: str) -> int | None:
    """Return the number of bytes in an environment variable, None if it is unset. ValueError for other text."""
    text = os.environ.get(variable)
    if not text:
        return None
    if not text.isdigit():
        raise ValueError(f"{variable} must be a number of bytes such as 1073741824, got {text!r}")
    return int(text)
