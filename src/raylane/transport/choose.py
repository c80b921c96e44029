"""Which transport brings a value from there to here, and why. Pure: places and records in, names and reasons out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raylane.core.place import Place
from raylane.errors import TransportUnavailableError
from raylane.transport.backends.base import Backend
from raylane.transport.backends.registry import AUTO, AUTO_ORDER
from raylane.transport.source import Source


@dataclass(frozen=True)
class Choice:
    """Transports that can do it, best first, and for every other one why not."""

    names: tuple[str, ...]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        because = "; ".join(f"not {name}: {why}" for name, why in self.refused.items())
        return f"{self.names[0] if self.names else 'none'}{f' ({because})' if because else ''}"


def order(backends: Mapping[str, Backend]) -> Sequence[str]:
    """Ours from the closest to the most general, then what other packages added."""
    return [*AUTO_ORDER[:-1], *(name for name in backends if name not in AUTO_ORDER), AUTO_ORDER[-1]]


def choose(
    source: Source,
    here: Place,
    wanted: str,
    backends: Mapping[str, Backend],
    blocked: Mapping[tuple[str, Place], str],
    *,
    may_call_ray: bool,
) -> Choice:
    """`wanted` is `auto` or one name; within one process `auto` and every explicit wish but `object_store` are `local`,
    as nothing has to move. `blocked` holds what was tried on that process and failed. TransportUnavailableError, with
    every reason, when nothing is left."""
    if source.place.same_process(here) and wanted != "object_store":
        return Choice(("local",), {})
    names, refused = [], {}
    for name in order(backends) if wanted == AUTO else [wanted]:
        backend = backends.get(name)
        if backend is None:
            refused[name] = "the source's environment has it, this one does not: install its package here"
            continue
        why = blocked.get((name, source.place)) or backend.refusal(source, here)
        if why is None and backend.capability.calls_ray and not may_call_ray:
            why = "it uses Ray, which cannot be called while Ray unpickles a value; use raylane.get"
        if why is None:
            names.append(name)
        else:
            refused[name] = why
    choice = Choice(tuple(names), refused)
    if not names:
        asked = "any transport" if wanted == AUTO else f"tensor_transport={wanted!r}"
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise TransportUnavailableError(f"{asked} cannot bring a value from {source} to {here}: {reasons}")
    return choice
