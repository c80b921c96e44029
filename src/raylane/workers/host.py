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
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import ray
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raylane import _ray
from raylane.errors import WorkerCallError, WorkerLostError
from raylane.graph.values import references
from raylane.workers.collectives import end_collectives, leave_process_groups

CONSTRUCT = "__init__"
"""Method of a call that constructs the worker, with the arguments of `WorkerHost._construct`."""
REGROUP = "on_regroup"
"""Method of a call by which a group is formed again: it constructs a worker that is not there, and calls this method of
the others."""

Head: TypeAlias = tuple[int, str]
"""(generation, method). The generation is the number of failures that the driver had read when it sent the call."""
Arguments: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
"""(positional arguments, keyword arguments)."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Location of a worker's process."""

    node_id: str
    address: str
    """IP address of the node."""
    pid: int
    devices: tuple[int, ...]
    """GPUs that Ray assigned to the process, by their numbers on the node."""
    niceness: int
    store_port: int | None
    """Port of the rendezvous store in the process that opened it (rank 0); None in the other processes."""


class WorkerHost:
    """Actor of one rank. Call `take_seat` first, then the method `CONSTRUCT`, then any methods of the worker.

    Calls come by `call` (plain Ray calls, on Ray's thread) or by the methods `run*` (compiled graphs, on the thread of
    the graph loop). A group uses one of the two ways only, so all methods of its worker run on one thread.
    """

    def __init__(self, rank: int, name: str = "worker") -> None:
        """Take a rank; `name` is that of the worker's class."""
        self._rank, self._name = rank, name
        self._worker: Any = None
        """The user's object; None before it is constructed, and again after Ray has restarted this process."""
        self._store: TCPStore | None = None
        """Rendezvous store of the group (rank 0 only), open as long as this process runs."""
        self._failed: tuple[int, str] | None = None
        """(generation, method) of the last call that raised here."""
        self._oldest_accepted = 0
        """Generation of the oldest calls that may still run (`fence`)."""
        self._held: list[Any] = []
        """References in the arguments of the constructor, until it runs."""
        self._idle = threading.Event()
        """Set while no method of the worker runs."""
        self._idle.set()

    def __repr__(self) -> str:
        # Ray begins each line of an actor's output with it.
        return f"{self._name} rank {self._rank}"

    def take_seat(self, rank: int, *, again: bool = False) -> Seat:
        """Take a rank and return the location of this process; on rank 0 also open the store that MASTER_PORT names.

        With `again` that is a new store: the keys of process groups that have ended would mislead new ones.
        """
        if again:
            self._store = None
        if rank != self._rank:
            self._rank, self._store = rank, None
            for stream in (sys.stdout, sys.stderr):  # so Ray 2.60 learns how the lines of this actor begin
                print(f":actor_name:{self!r}", file=stream, flush=True)
        # The store listens on a port from the moment the system chooses it. A port that is looked up, closed and bound
        # again later can be taken by another process in between.
        address = ray.util.get_node_ip_address()
        if rank == 0 and self._store is None:
            # By default TCPStore listens on every interface, and it does not authenticate its clients: listen on this
            # node's address only. torch owns the socket from here on, so it is detached (torch 2.13, TCPStore's
            # master_listen_fd).
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.create_server((address, 0), family=family, backlog=512) as listening:
                self._store = TCPStore(
                    address,
                    listening.getsockname()[1],
                    None,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=60),
                    master_listen_fd=listening.detach(),
                )
        return Seat(
            ray.get_runtime_context().get_node_id(),
            address,
            os.getpid(),
            tuple(int(number) for number in ray.get_gpu_ids()),
            os.getpriority(os.PRIO_PROCESS, 0),
            self._store.port if self._store else None,
        )

    def hold(self, references: list[Any]) -> None:
        """Keep the references in the arguments of the constructor, which runs next."""
        self._held = references

    def call(self, head: Head, returns: bool, own_arguments: Arguments, common: Mapping[str, Any]) -> Any:
        """Run a method with this worker's own arguments and the common ones; return its result only if `returns`.

        An ObjectRef among the arguments is replaced by its value, as in any call of Ray.
        """
        args, kwargs = own_arguments
        named = {name: _value(value) for name, value in {**kwargs, **common}.items()}
        result = self._run(head, tuple(map(_value, args)), named)
        return result if returns else None

    def fence(self, generation: int, within_s: float) -> bool:
        """Refuse calls of older generations from now on; return False if a method still runs after `within_s` seconds.

        Runs on Ray's thread, beside the graph thread: calls of a graph that has ended may still wait in its rings.
        """
        self._oldest_accepted = max(self._oldest_accepted, generation)
        return self._idle.wait(within_s)

    def free(self, generation: int, within_s: float) -> bool:
        """Do as `fence`, and end the collectives in which the method waits: a rank of the group is gone.

        Process groups of a worker that runs no method stay as they are.
        """
        self._oldest_accepted = max(self._oldest_accepted, generation)
        if not self._idle.is_set():
            end_collectives()
        return self._idle.wait(within_s)

    def run(self, shared: Any, own_arguments: Arguments | None = None) -> Any:
        """Run a method with this worker's own arguments and the common ones.

        `shared` is (head, common arguments). Without `own_arguments` it is a pair of that and the arguments, which then
        are equal for all workers of the call.
        """
        if own_arguments is None:
            shared, own_arguments = shared
        (head, common), (args, kwargs) = shared, own_arguments
        return self._run(head, args, {**kwargs, **common})

    def run_quietly(self, shared: Any, own_arguments: Arguments | None = None) -> None:
        """Do as `run`, but drop the result."""
        self.run(shared, own_arguments)

    def _run(self, head: Head, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        generation, method = head
        self._idle.clear()
        try:
            # The driver sends calls before it has read the results of earlier ones. After a failure such calls must not
            # run here: this rank would take part in the collectives of one step while its peers wait in another.
            refused = None
            if generation < self._oldest_accepted:
                refused = "it was sent before the group lost a graph"
            elif self._failed is not None and generation <= self._failed[0] and method not in (CONSTRUCT, REGROUP):
                refused = f"an earlier call, {self._failed[1]}, raised here. Read its result first, then call again"
            if refused is not None:
                raise WorkerCallError(f"rank {self._rank} refused {method}: {refused}", rank=self._rank, from_host=True)
            if method == CONSTRUCT or (method == REGROUP and self._worker is None):
                self._construct(*args, **kwargs)
                return True
            if method == REGROUP:
                self._regroup(**kwargs)
                return False
            if self._worker is None:
                raise WorkerLostError(
                    f"rank {self._rank} has no worker: Ray restarted its process. Call rebuild_worker({self._rank})",
                    rank=self._rank,
                    from_host=True,
                )
            try:
                with _raised_as_sendable():
                    result = getattr(self._worker, method)(*args, **kwargs)
                    if inspect.isgenerator(result):  # Ray 2.60 would use its first item as the result
                        raise TypeError(f"{method} returned a generator; return a list instead")
            except BaseException:
                self._failed = generation, method
                raise
            return result
        finally:
            self._idle.set()

    def _construct(self, env: Mapping[str, str], packed: bytes) -> None:
        """Set the rank variables in this process and construct the worker.

        `packed` holds class and arguments, packed by `graph.values.references`; `hold` has brought the references.
        """
        os.environ.update(env)
        self._rank, self._failed = int(env["RANK"]), None  # Ray starts a process again with the rank that it first had
        with _raised_as_sendable():
            held, self._held = self._held, []
            worker_class, args, kwargs = references.unpack(packed, held)
            self._worker = worker_class(*args, **kwargs)

    def _regroup(self, env: Mapping[str, str], packed: bytes) -> None:
        """Leave the process groups, set the rank variables, and let the worker make its process groups anew."""
        del packed  # for ranks without a worker
        self._failed, self._held = None, []
        leave_process_groups()
        os.environ.update(env)
        with _raised_as_sendable():
            self._worker.on_regroup(int(env["RANK"]), int(env["WORLD_SIZE"]))


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
