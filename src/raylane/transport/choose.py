"""Choice of the transport between two places, with reasons. Pure: places and records in, names and reasons out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raylane.core.place import Place
from raylane.errors import TransportUnavailableError
from raylane.transport.backends.base import Backend
from raylane.transport.backends.registry import AUTO, AUTO_ORDER, ON_DEVICE
from raylane.transport.source import Source


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
    here: Place,
    wanted: str,
    backends: Mapping[str, Backend],
    blocked: Mapping[tuple[str, Place], str],
    *,
    may_call_ray: bool,
    on_device: bool = False,
) -> Choice:
    """Return the transports that can bring a value from `source` to `here`.

    `wanted` is `auto` or one name. Within one process nothing has to move, so every wish except `object_store` gives
    `local`. `on_device` says that the value has CUDA tensors which are wanted on a device. `blocked` holds the
    transports that failed between these two processes before, with the reason. TransportUnavailableError, with every
    reason, if no transport remains.
    """
    if source.place.same_process(here) and wanted != "object_store":
        return Choice(("local",), {})
    # Built-in transports from the closest to the most general; those of other packages before the object store,
    # which is the last resort because it copies twice.
    added = [name for name, one in backends.items() if name not in AUTO_ORDER and not one.capability.on_request]
    first = [ON_DEVICE] if on_device else []
    candidates = [*first, *AUTO_ORDER[:-1], *added, AUTO_ORDER[-1]] if wanted == AUTO else [wanted]
    names, refused = [], {}
    for name in candidates:
        backend = backends.get(name)
        if backend is None:
            refused[name] = "it is installed in the source's environment but not here; install its package here"
            continue
        # A failure in practice comes first: it says more than the theory in `refusal`.
        why = blocked.get((name, source.place)) or backend.refusal(source, here)
        if why is None and backend.capability.calls_ray and not may_call_ray:
            why = "it uses Ray, which cannot be called while Ray unpickles a value; use raylane.get"
        if why is None:
            names.append(name)
        else:
            refused[name] = why
    if not names:
        asked = "any transport" if wanted == AUTO else f"tensor_transport={wanted!r}"
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise TransportUnavailableError(f"{asked} cannot bring a value from {source} to {here}: {reasons}")
    return Choice(tuple(names), refused)
