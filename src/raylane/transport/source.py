"""Who holds something, and where it listens. Knows nothing of tensors: graphs need not import torch for it."""

from __future__ import annotations

import msgspec

from raylane.core.place import Place


class Source(msgspec.Struct, frozen=True, array_like=True):
    """The process that holds a value, and where it listens."""

    place: Place
    label: str
    """How messages name it: `Actor(Trainer, 1f...)`."""
    unix: str
    """Abstract Unix socket (without the leading NUL), for its host and network namespace."""
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.label}, {self.place}"
