"""Transports by name: built-in ones and those of other packages.

Other packages register a Backend class as an entry point in the group `raylane.backends`.
"""

from __future__ import annotations

import difflib
import functools
from importlib import import_module
from importlib.metadata import entry_points

from raylane.errors import TransportUnavailableError
from raylane.transport.backends.base import AUTO, Backend, Process, ProcessPart
from raylane.transport.backends.ray_managers import registered

BUILT_IN = (
    "local:LocalBackend",
    "host:HostBackend",
    "tcp.backend:TcpBackend",
    "object_store:ObjectStoreBackend",
    "cuda.backend:CudaIpcBackend",
    "gloo:GlooBackend",
    "nccl:NcclBackend",
    "nixl.backend:NixlBackend",
)
"""Module in this folder and class of each built-in transport. Loaded on first use: some import torch."""
MANAGED = "ray_managers.backend:ManagedBackend"
"""Class of the transports that programs register while they run."""


def _load(place: str) -> type[Backend]:
    module, _, name = place.partition(":")
    backend_class: type[Backend] = getattr(import_module(f"raylane.transport.backends.{module}"), name)
    return backend_class


@functools.lru_cache(maxsize=1)
def backends() -> dict[str, Backend]:
    """Return all transports of this environment by name. TransportUnavailableError for a broken entry point."""
    known = {backend.name: backend for backend in (_load(place)() for place in BUILT_IN)}
    for point in entry_points(group="raylane.backends"):
        # A broken entry point is an error: skipping it would silently change the choice of `auto`.
        try:
            backend = point.load()()
        except Exception as error:
            raise TransportUnavailableError(
                f"transport {point.name!r} of {point.value} cannot be loaded: {error!r}. Repair or uninstall it"
            ) from error
        known[backend.name] = backend
    return known


def find(name: str) -> Backend | None:
    """Return the transport of this name, registered by anybody in the cluster; None if there is none."""
    known = backends()
    if name not in known and name != AUTO and registered.find(name) is not None:
        known[name] = _load(MANAGED)(name)  # type: ignore[call-arg]
    return known.get(name)


class _PreparedSource(ProcessPart):
    """State of a process from which all transports can read."""

    def __init__(self, process: Process) -> None:
        for backend in backends().values():
            backend.prepare_source(process, find)


def prepare_source(process: Process) -> None:
    """Let all transports prepare a process to be read from, unless that has been done."""
    process.part(_PreparedSource, functools.partial(_PreparedSource, process))


def check_name(name: object) -> str:
    """Return a transport's name in lower case. ValueError for an unknown name."""
    known = [AUTO, *backends()]
    if not isinstance(name, str):
        raise TypeError(f"tensor_transport must be a string, one of {', '.join(known)}, got {name!r}")
    lower = name.lower()
    if lower == AUTO or find(lower) is not None:
        return lower
    close = difflib.get_close_matches(lower, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise ValueError(f"tensor_transport={name!r} is unknown{hint} Known transports: {', '.join(known)}")
