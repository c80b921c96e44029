"""Identity and addresses of a process that holds values. Imports no torch, because graphs use this module too."""

from __future__ import annotations

import msgspec

from raylane.core.process.place import Place


class Source(msgspec.Struct, frozen=True, array_like=True):
    """A process that holds published values, and the addresses of its listener."""

    place: Place
    label: str
    """Name of the process in messages, such as `Actor(Trainer, 1f...)`."""
    unix: str
    """Name of the listener's abstract Unix socket (without the leading NUL); valid in its network namespace."""
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.label}, {self.place}"
