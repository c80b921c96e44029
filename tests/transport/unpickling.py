"""A value whose unpickling fetches another value."""

from __future__ import annotations

from typing import Any

import ray

import raylane


class FetchedWhileUnpickled:
    """A ref when it is pickled, the ref's value after unpickling: by `ray.get`, or over the given transport."""

    value: Any

    def __init__(self, ref: Any, *, transport: str | None = None) -> None:
        self.ref = ref
        self.transport = transport

    def __getstate__(self) -> dict[str, Any]:
        return {"ref": self.ref, "transport": self.transport}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ref, transport = state["ref"], state["transport"]
        self.value = ray.get(ref) if transport is None else raylane.get(ref, tensor_transport=transport)
