"""Choice of the transport between two places, with reasons. Pure: places and records in, names and reasons out.

Called by `redeem`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raylane.core.process.place import Place
from raylane.errors import TransportUnavailableError
from raylane.transport.backends.base import AUTO, Backend
from raylane.transport.value.source import Source


@dataclass(frozen=True)
class Choice:
    """Usable transports, best first, and for every other transport the reason why it is not usable."""

    names: tuple[str, ...]
    refused: Mapping[str, str]

    def __str__(self) -> str:
        because = "; ".join(f"not {name}: {why}" for name, why in self.refused.items())
        return f"{self.names[0] if self.names else 'none'}{f' ({because})' if because else ''}"


def choose(
    source: Source,
    place: Place,
    transport: str,
    backends: Mapping[str, Backend],
    blocked: Mapping[tuple[str, Place], str],
    *,
    may_call_ray: bool,
    on_device: bool = False,
) -> Choice:
    """Return the transports that can bring a value from `source` to `place`.

    `transport` is `auto` or one name. Within one process nothing has to move, so every wish gives the transport of own
    objects, unless Ray shall carry the value. `on_device` says that the value has CUDA tensors which are wanted on a
    device. `blocked` holds the transports that failed between these two processes before, with the reason.
    TransportUnavailableError, with every reason, if no transport remains.
    """
    if source.place.same_process(place) and not (transport in backends and backends[transport].capability.by_ray):
        return Choice(tuple(name for name, backend in backends.items() if backend.capability.own_objects), {})
    candidates = by_rank(backends, on_device=on_device) if transport == AUTO else [transport]
    names, refused = [], {}
    for name in candidates:
        backend = backends.get(name)
        if backend is None:
            refused[name] = "it is installed in the source's environment but not here; install its package here"
            continue
        # A failure in practice comes first: it says more than the theory in `refusal`.
        why = blocked.get((name, source.place)) or backend.refusal(source, place)
        if why is None and backend.capability.by_ray and not may_call_ray:
            why = "it uses Ray, which cannot be called while Ray unpickles a value; use raylane.get"
        if why is None:
            names.append(name)
        else:
            refused[name] = why
    if not names:
        asked = "any transport" if transport == AUTO else f"tensor_transport={transport!r}"
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise TransportUnavailableError(f"{asked} cannot bring a value from {source} to {place}: {reasons}")
    return Choice(tuple(names), refused)


def by_rank(backends: Mapping[str, Backend], *, on_device: bool) -> list[str]:
    """Return the transports that `auto` tries, in this order; those between devices only for values on one."""
    capabilities = {name: backend.capability for name, backend in backends.items()}
    ranks = {
        name: capability.rank
        for name, capability in capabilities.items()
        if capability.rank is not None and (on_device or not capability.needs_device)
    }
    return sorted(ranks, key=lambda name: ranks[name])
