"""The actor that holds one worker: it sets the worker's environment, constructs the worker, and runs its methods.

The worker itself is an object of a plain class, independent of Ray. This module runs in the worker's process and is
called only by `WorkerGroup`. It imports torch at the top, so that all workers of a group load torch at the same time
while they start.
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
    """Location of a worker's process."""

    node_id: str
    address: str
    """IP address of the node."""
    pid: int
    store_port: int | None
    """Port of the rendezvous store in the process that opened it (rank 0); None in the other processes."""


class WorkerHost:
    """Actor of one rank. Call `take_seat` first, then `build`, then `call` any number of times."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._worker: Any = None
        """The user's object; None before `build`, and again after Ray has restarted this process."""
        self._store: TCPStore | None = None
        """Rendezvous store of the group (rank 0 only), open as long as this process runs."""

    def take_seat(self, opens_store: bool) -> Seat:
        """Return the location of this process; on rank 0 also open the store that MASTER_PORT names."""
        # The store listens on a port from the moment the system chooses it. A port that is looked up, closed and bound
        # again later can be taken by another process in between.
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
        """Run a method with this worker's own arguments and the common ones; return its result only if `returns`.

        An ObjectRef among the arguments is replaced by its value, as in any call of Ray.
        """
        if self._worker is None:
            raise WorkerLostError(
                f"rank {self._rank} has no worker: Ray restarted its process. Call rebuild_worker({self._rank})",
                rank=self._rank,
            )
        args, kwargs = own
        named = {name: _value(value) for name, value in {**kwargs, **common}.items()}
        with _raised_as_sendable():
            result = getattr(self._worker, method)(*map(_value, args), **named)
            if inspect.isgenerator(result):  # Ray 2.60 would use its first item as the result
                raise TypeError(f"{method} returned a generator; return a list instead")
        return result if returns else None


def _open_store(address: str) -> TCPStore:
    """Return a rendezvous store that listens on a free port of this node's address only."""
    # By default TCPStore listens on every interface, and it does not authenticate its clients. torch owns the socket
    # from here on, so it is detached (torch 2.13, TCPStore's master_listen_fd).
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
    """Replace an exception that cannot be pickled and unpickled by a RuntimeError with the same text."""
    # Ray 2.60 ends the actor when an exception's own `__reduce__` raises, and the group would report a dead worker.
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
