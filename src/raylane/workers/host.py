"""The actor that holds one worker: it sets the worker's environment, builds it, and runs its methods.

The worker itself stays a plain class that knows nothing of Ray. Runs in the worker's process; `WorkerGroup` is its only
caller. torch is imported here, at the top, so that all workers of a group load it at the same time while they start.
"""

from __future__ import annotations

import inspect
import os
import pickle
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raylane import _ray
from raylane.errors import WorkerLostError

__all__ = ["Seat", "WorkerHost"]


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a worker's process runs."""

    node_id: str
    address: str
    """IP address of the node."""
    pid: int
    store_port: int | None
    """Port of the rendezvous store, in the process that opened it (rank 0)."""


class WorkerHost:
    """One per rank. `take_seat` comes first, then `build`, then any number of `call`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._worker: Any = None
        """The user's object; None until `build`, and again after Ray has restarted this process."""
        self._store: TCPStore | None = None
        """The group's rendezvous (rank 0 only); lives as long as this process."""

    def take_seat(self, opens_store: bool) -> Seat:
        """Say where this process runs; on rank 0 also open the store that MASTER_PORT names.

        The system picks a free port and the store listens on it from then on, so nobody can take it in between (as
        they can when a port is looked up, let go and bound again later).
        """
        address = ray.util.get_node_ip_address()
        if opens_store and self._store is None:
            self._store = _open_store(address)
        port = self._store.port if self._store else None
        return Seat(ray.get_runtime_context().get_node_id(), address, os.getpid(), port)

    def build(self, worker_class: type, args: tuple[Any, ...], kwargs: dict[str, Any], env: Mapping[str, str]) -> None:
        """Set the rank variables in this process and construct the worker."""
        os.environ.update(env)
        with _raised_as_sendable():
            self._worker = worker_class(*args, **kwargs)

    def call(self, method: str, returns: bool, own: tuple[tuple[Any, ...], dict[str, Any]], common: Any) -> Any:
        """Run a method with this worker's own arguments and the common ones; a result that nobody wants stays here.

        An argument that is an ObjectRef arrives as the value it stands for, as in any call of Ray's.
        """
        if self._worker is None:
            raise WorkerLostError(
                f"rank {self._rank} was started again by Ray and is empty; call rebuild_worker({self._rank})",
                rank=self._rank,
            )
        args, kwargs = own
        named = {name: _value(value) for name, value in {**kwargs, **common}.items()}
        with _raised_as_sendable():
            result = getattr(self._worker, method)(*map(_value, args), **named)
            if inspect.isgenerator(result):  # Ray would take its first item for the result (2.60)
                raise TypeError(f"{method} returned a generator; return a list instead")
        return result if returns else None


def _open_store(address: str) -> TCPStore:
    """Return a store that listens on a free port of this node's address alone.

    Left to itself, TCPStore listens on every interface, and it asks nobody who connects for a proof. torch takes the
    socket over, so it is detached here (torch 2.13, TCPStore's master_listen_fd).
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=512) as listening:
        port: int = listening.getsockname()[1]
        return TCPStore(
            address,
            port,
            None,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listening.detach(),
        )


@contextmanager
def _raised_as_sendable() -> Iterator[None]:
    """Raise a RuntimeError with the same text in place of an exception that cannot be pickled and unpickled.

    Ray 2.60 ends the actor when an exception raises in its own `__reduce__`, and the group would be told of a death.
    """
    try:
        yield
    except Exception as error:
        try:
            pickle.loads(_ray.dumps(error))
        except Exception as obstacle:
            text = (
                f"{type(error).__module__}.{type(error).__qualname__}: {error} (which cannot be pickled: {obstacle!r})"
            )
            raise RuntimeError(text) from error
        raise


def _value(argument: Any) -> Any:
    return ray.get(argument) if isinstance(argument, ray.ObjectRef) else argument
