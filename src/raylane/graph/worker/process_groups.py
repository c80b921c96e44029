"""Collectives over torch's process groups: gloo for tensors in host memory, NCCL for those of GPUs.

A process group belongs to one set of actors in one graph, and to no one else: it is not torch's default group. It opens
when it is first used. By then every member has told the others what it gives (`values.shares`), so no member waits for
one that has failed before; and what rank 0 tells includes the address at which the members meet.

Each group has a thread, which alone uses the process group: gloo cannot be interrupted, so the graph loop waits for the
thread instead, and leaves it behind when the graph ends. The thread ends when its peers close their connections.

NCCL is written after torch's documentation and was never run: the machines of this project's tests have no GPU.

Imports torch, so it is loaded on first use.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.errors import GraphError, GraphPlanError
from raylane.graph.collectives import Collective
from raylane.graph.values.shares import Spec, cut, native_dtype, part_shape, plain, wide_dtype
from raylane.transport.tls import cleartext_refusal

__all__ = ["Group", "check_available"]

Meeting = tuple[str, int]
"""Address of the store through which the members of a group find each other."""
NO_LIMIT_S = 10 * 365 * 86400.0
"""Limit in seconds that stands for none: torch takes no infinite time."""
LOOK_S = 0.02
"""Interval in seconds at which a member that waits looks whether the graph has ended."""
ASK_S = 0.002
"""Interval in seconds at which a member asks whether the others have come, when a group opens."""
GRACE_S = 3.0
"""Seconds after an error in which the end of the graph, its likely cause, may become known."""
_GLOO_WIDE = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Dtypes that gloo does not reduce, with the dtype that is reduced instead: overflow drops the same high bits."""
_OPS = {"sum": "SUM", "avg": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}


def check_available(transport: str) -> None:
    """Raise GraphPlanError if this process cannot take part in a group of this kind."""
    if transport == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise GraphPlanError(
            f"transport 'nccl': {_ray.describe_self()} sees no GPU, or its torch has no NCCL. Give the actor a GPU "
            "(num_gpus=1), or use 'gloo' or 'auto'"
        )
    if transport == "gloo" and not dist.is_gloo_available():
        raise GraphPlanError("transport 'gloo': this torch is built without gloo; use 'auto'")
    why = cleartext_refusal(transport)
    if why is not None:
        raise GraphPlanError(f"transport {transport!r}: {why}")


class Group:
    """One member of a process group. `ended` says, and is asked while this waits, whether the graph has ended."""

    def __init__(
        self, transport: str, rank: int, size: int, timeout_s: float | None, ended: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._size = size
        self._timeout = timedelta(seconds=NO_LIMIT_S if timeout_s is None else max(timeout_s, 1.0))
        self._ended = ended
        self._meeting: Meeting | None = None
        self._store: Any = None
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def meeting(self) -> Meeting | None:
        """Return the address for the share of rank 0, which creates the store; None for any other rank."""
        # A port that the system chooses: several graphs of an actor have groups at the same time.
        if self._rank == 0 and self._meeting is None:
            host = _ray.node_ip()
            self._store = TCPStore(host, 0, self._size, True, self._timeout, wait_for_workers=False)
            self._meeting = host, self._store.port
        return self._meeting if self._rank == 0 else None

    def exchange(self, meeting: Meeting, collective: Collective, spec: Spec, tensors: Sequence[Any]) -> list[Any]:
        """Return the results for tensors of one dtype; wait for all other members.

        GraphError if a member or the graph has ended, or after the time limit.
        """
        # The others may have left while this actor was in another method: then nobody answers.
        if self._ended():
            raise GraphError(f"{collective.name}: the graph has ended")
        if self._thread is None or meeting != self._meeting:
            self._start(meeting)
        # What the calls of this actor have started on the GPU comes before the collective.
        ready = torch.cuda.current_stream().record_event() if self._transport == "nccl" else None
        future = self._submit(lambda group: self._run(group, collective, spec, tensors, ready))
        found: list[Any] = self._finish(future, collective)
        return found

    def close(self) -> None:
        """Let the thread end after what it does. A second call does nothing."""
        thread, self._thread = self._thread, None
        self._meeting = self._store = None
        if thread is not None:
            self._closed.set()
            self._work.put(None)
            thread.join(LOOK_S)

    # Waiting

    def _start(self, meeting: Meeting) -> None:
        store = self._store  # rank 0 has made it already, and told the others its address
        self.close()
        self._meeting, self._store = meeting, store
        self._work, self._closed = queue.SimpleQueue(), threading.Event()
        self._thread = threading.Thread(
            target=_serve,
            args=(functools.partial(self._open, self._closed), self._work),
            name="raylane-collective",
            daemon=True,
        )
        self._thread.start()

    def _submit(self, function: Callable[[Any], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((future, function))
        return future

    def _finish(self, future: Future[Any], collective: Collective) -> Any:
        """Wait for the thread, and meanwhile for the end of the graph."""
        while True:
            with contextlib.suppress(TimeoutError):
                error = future.exception(LOOK_S)
                break
            if self._ended():
                self.close()
                raise GraphError(f"{collective.name}: the graph has ended during the collective")
        if error is None:
            return future.result()
        # After an error the members may no longer be in step: the next execution opens a new group.
        self.close()
        if not isinstance(error, RuntimeError):
            raise error
        # Usually a member has died, and the driver is about to end the graph with the name of the actor.
        still = threading.Event()
        for _ in range(int(GRACE_S / LOOK_S)):
            if self._ended() or still.wait(LOOK_S):
                break
        raise GraphError(f"{collective.name}: a member has left the collective, or was late: {error}") from error

    # On the thread

    def _open(self, closed: threading.Event) -> Any:
        assert self._meeting is not None
        host, port = self._meeting
        store = self._store
        if store is None:
            store = TCPStore(host, port, self._size, False, self._timeout, wait_for_workers=False)
        # Ask until all are here: a wait of torch's own would go on after the graph has ended.
        here = [f"here/{rank}" for rank in range(self._size)]
        store.set(here[self._rank], b"")
        deadline = Deadline(self._timeout.total_seconds())
        while not store.check(here):
            if closed.wait(ASK_S) or deadline.left_s() == 0:
                raise RuntimeError("not all members came")
        if self._transport == "gloo":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            # By address: gloo would otherwise resolve the name of the host, which need not lead to this node.
            options._devices = [gloo.create_device(hostname=_ray.node_ip())]
            options._timeout = self._timeout
            options._threads = 1  # one collective at a time; more threads would only sleep
            return gloo(store, self._rank, self._size, options)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = self._timeout
        return nccl(store, self._rank, self._size, options)

    def _run(self, group: Any, collective: Collective, spec: Spec, tensors: Sequence[Any], ready: Any) -> list[Any]:
        if self._transport == "gloo":
            results = self._collect(group, collective, tensors)
        else:
            # A stream of its own: kernels of the actor's other work go on meanwhile. This thread alone waits for it.
            device = tensors[0].device if spec.module == "torch" and tensors[0].is_cuda else None
            with torch.cuda.device(device):
                stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                stream.wait_event(ready)
                with torch.cuda.stream(stream):
                    results = self._collect(group, collective, tensors)
                stream.synchronize()
        return [result.cpu().numpy() for result in results] if spec.module == "numpy" else results

    def _collect(self, group: Any, collective: Collective, tensors: Sequence[Any]) -> list[Any]:
        given = [_as_torch(tensor, self._transport) for tensor in tensors]
        shapes = [part_shape(collective, tuple(tensor.shape)) for tensor in given]
        size, dtype = self._size, given[0].dtype
        flat = _flat(given, size if collective.kind == "reducescatter" else 1)
        if collective.kind == "allgather":
            out = torch.empty(size * flat.numel(), dtype=dtype, device=flat.device)
            # As bytes: gloo knows fewer dtypes than torch.
            group._allgather_base(out.view(torch.uint8), flat.view(torch.uint8)).wait()
            parts = [cut(one, shapes) for one in out.chunk(size)] if out.numel() else [cut(out, shapes)] * size
            return [torch.cat(found) for found in zip(*parts, strict=True)]
        # Sums of halves in single precision, as over the graph's own channels.
        wide = wide_dtype(torch, dtype, collective.op)
        flat = flat.to(_GLOO_WIDE.get(wide, wide) if self._transport == "gloo" else wide)
        options: Any = dist.AllreduceOptions() if collective.kind == "allreduce" else dist.ReduceScatterOptions()
        options.reduceOp = getattr(dist.ReduceOp, _OPS[collective.op])
        if collective.kind == "allreduce":
            out = flat
            group.allreduce([out], options).wait()
        else:
            out = torch.empty(flat.numel() // size, dtype=flat.dtype, device=flat.device)
            group._reduce_scatter_base(out, flat, options).wait()
        if collective.op == "avg":
            out /= size
        return cut(out.to(dtype), shapes)


def _serve(open_group: Callable[[], Any], work: queue.SimpleQueue[Any]) -> None:
    """Open the group and do what is asked for, until None."""
    group: Any = None
    while (task := work.get()) is not None:
        future, function = task
        try:
            group = open_group() if group is None else group
            future.set_result(function(group))
        except BaseException as error:
            future.set_exception(error)
        del task, future, function  # the thread must not keep tensors while it waits


def _as_torch(tensor: Any, transport: str) -> Any:
    if isinstance(tensor, torch.Tensor):
        found = plain(tensor)
    else:
        found = torch.from_numpy(tensor.astype(native_dtype(tensor), order="C"))  # a copy: arrays may be read-only
    return found.cuda() if transport == "nccl" else found.cpu()


def _flat(tensors: Sequence[Any], parts: int) -> Any:
    """Return new flat memory with part 0 of each tensor, then part 1 of each, and so on."""
    pieces = [
        piece.reshape(-1)
        for part in range(parts)
        for tensor in tensors
        for piece in [tensor if parts == 1 else tensor[part * len(tensor) // parts : (part + 1) * len(tensor) // parts]]
    ]
    return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces)
