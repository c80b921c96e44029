"""Transports by name: built-in ones and those of other packages.

Other packages register a Backend class as an entry point in the group `raylane.backends`.
"""

from __future__ import annotations

import difflib
import functools
from importlib.metadata import entry_points

from raylane.errors import TransportUnavailableError
from raylane.transport import managers
from raylane.transport.backends.adapter import AdapterBackend
from raylane.transport.backends.base import Backend
from raylane.transport.backends.device import CudaIpcBackend, NcclBackend
from raylane.transport.backends.gloo import GlooBackend
from raylane.transport.backends.host import HostBackend
from raylane.transport.backends.local import LocalBackend
from raylane.transport.backends.nixl import NixlBackend
from raylane.transport.backends.object_store import ObjectStoreBackend
from raylane.transport.backends.tcp import TcpBackend

AUTO = "auto"
AUTO_ORDER = ("local", "host", "tcp", "object_store")
ON_DEVICE = "cuda_ipc"
"""Transport that `auto` tries first for CUDA tensors of the same host."""
TWO_SIDED = ("gloo", "nccl")
"""Transports in which the source takes part in every transfer; collective groups are made of these."""


@functools.lru_cache(maxsize=1)
def backends() -> dict[str, Backend]:
    """Return all transports of this environment by name. TransportUnavailableError for a broken entry point."""
    one_sided = (LocalBackend(), HostBackend(), TcpBackend(), ObjectStoreBackend())
    by_channel = (CudaIpcBackend(), GlooBackend(), NcclBackend(), NixlBackend())
    found: dict[str, Backend] = {backend.name: backend for backend in (*one_sided, *by_channel)}
    for point in entry_points(group="raylane.backends"):
        # A broken entry point is an error: skipping it would silently change the choice of `auto`.
        try:
            backend = point.load()()
        except Exception as error:
            raise TransportUnavailableError(
                f"transport {point.name!r} of {point.value} cannot be loaded: {error!r}. Repair or uninstall it"
            ) from error
        found[backend.name] = backend
    return found


def adopt(name: str) -> bool:
    """Add the transport of this name that somebody in the cluster has registered; return True if there is one."""
    known = backends()
    if name not in known and name != AUTO and managers.find(name) is not None:
        known[name] = AdapterBackend(name)
    return name in known


def check_name(name: object) -> str:
    """Return a transport's name in lower case. ValueError for an unknown name."""
    known = [AUTO, *backends()]
    if not isinstance(name, str):
        raise TypeError(f"tensor_transport must be a string, one of {', '.join(known)}, got {name!r}")
    lower = name.lower()
    if lower in known or adopt(lower):
        return lower
    close = difflib.get_close_matches(lower, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    raise ValueError(f"tensor_transport={name!r} is unknown{hint} Known transports: {', '.join(known)}")
