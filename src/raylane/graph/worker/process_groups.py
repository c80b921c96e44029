"""Collectives over torch's process groups: gloo for tensors in host memory, NCCL for those of GPUs.

A process group belongs to one set of actors in one graph, and to no one else: it is not torch's default group. It opens
when it is first used. By then every member has told the others what it gives (`values.shares`), so no member waits for
one that has failed before; and what rank 0 tells includes the address of the store through which the members meet.

Each group has a thread, which alone uses the process group: gloo cannot be interrupted, so the graph loop waits for the
thread instead, and leaves it behind when the graph ends. The thread ends when its peers close their connections.

A member whose part fails leaves the group: it writes its error into the store and closes its connections, so that the
others raise the same error at once. Each share says how often its member has left. When a number has changed, all
members open a new group:

    ProcessGroup (graph loop)                                thread
    State: (address, times that each member left)
    other than before? a new thread           --->    open: keys of this state in the store, then connections
    task                                      --->    run; on an error write it, drop the process group
    result or error                           <---

NCCL was run between two processes on one GPU only, which it took for two hosts (`tests/gpu`).

Imports torch, so it is loaded on first use.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from raylane import _ray
from raylane.core.deadline import Deadline
from raylane.errors import GraphError, GraphPlanError
from raylane.graph.collectives import Collective
from raylane.graph.values import message as messages
from raylane.graph.values.shares import Spec, cut, native_dtype, part_shape, plain, wide_dtype
from raylane.transport.link.tls import cleartext_refusal

Address = tuple[str, int]
"""Host and port of the store through which the members of a group find each other."""
Meeting = tuple[Address | None, int]
"""Content of a share: the address (rank 0 only), and how often the member has left the group."""
State = tuple[Address, tuple[int, ...]]
"""Identity of an open group: the address, and how often each member had left."""
_LEFT = "left"
"""Key in the store: the pickled error because of which a member has left the group of this state."""
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


class ProcessGroup:
    """One member of a process group. `ended` says, and is asked while this waits, whether the graph has ended."""

    def __init__(
        self, transport: str, rank: int, size: int, timeout_s: float | None, ended: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._size = size
        self._timeout = timedelta(seconds=NO_LIMIT_S if timeout_s is None else max(timeout_s, 1.0))
        self._ended = ended
        self._address: Address | None = None
        """Address of the store, which rank 0 keeps."""
        self._departures = 0
        """Number of times that this member has left."""
        self._state: State | None = None
        """State for which the thread runs."""
        self._broken: State | None = None
        """State in which a member has failed; its keys in the store are used up."""
        self._store: Any = None
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[_Member], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def meeting(self) -> Meeting:
        """Return what the share of this member tells the others. Rank 0 creates the store first."""
        # A port that the system chooses: several graphs of an actor have groups at the same time.
        if self._rank == 0 and self._store is None:
            host = _ray.node_ip()
            self._store = TCPStore(host, 0, self._size, True, self._timeout, wait_for_workers=False)
            self._address = host, self._store.port
        return self._address, self._departures

    def exchange(
        self, meetings: Sequence[Meeting], collective: Collective, spec: Spec, tensors: Sequence[Any]
    ) -> list[Any]:
        """Return the results for tensors of one dtype; wait for all other members, whose `meetings` the shares had.

        GraphError if a member or the graph has ended, or after the time limit.
        """
        # The others may have left while this actor was in another method: then nobody answers.
        if self._ended():
            raise GraphError(f"{collective.name}: the graph has ended")
        address = meetings[0][0]
        assert address is not None
        state = address, tuple(departures for _, departures in meetings)
        if state == self._broken:  # another collective of the same execution
            raise GraphError(f"{collective.name}: the members have left their group after an error in this execution")
        if self._thread is None or state != self._state:
            self._start(state)
        # What the calls of this actor have started on the GPU comes before the collective.
        ready = torch.cuda.current_stream().record_event() if self._transport == "nccl" else None
        future = self._submit(lambda member: self._run(member.group(), collective, spec, tensors, ready))
        results: list[Any] = self._finish(future, collective)
        return results

    def leave(self, error: BaseException) -> None:
        """Take no further part in the group that is open, because of an error, which the others raise at once too."""
        if self._thread is not None:
            self._submit(lambda member: member.leave(error))
        self._broken = self._state
        self._departures += 1
        self.close()

    def close(self) -> None:
        """Let the thread end after what it does. A second call does nothing."""
        thread, self._thread = self._thread, None
        self._state = None
        if thread is not None:
            self._closed.set()
            self._work.put(None)
            thread.join(LOOK_S)

    def end(self) -> None:
        """Close the group for good, with the store that rank 0 keeps."""
        self.close()
        self._store = self._address = None

    # Waiting

    def _start(self, state: State) -> None:
        self.close()
        self._state = state
        self._work, self._closed = queue.SimpleQueue(), threading.Event()
        member = _Member(self._transport, self._rank, self._size, self._timeout, state, self._store, self._closed)
        self._thread = threading.Thread(
            target=_serve, args=(member, self._work), name="raylane-collective", daemon=True
        )
        self._thread.start()

    def _submit(self, function: Callable[[_Member], Any]) -> Future[Any]:
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
        # The members are no longer in step: all open a new group in the next execution.
        self._broken = self._state
        self._departures += 1
        self.close()
        if not _is_of_network(error):
            raise error
        # Usually a member has died, and the driver is about to end the graph with the name of the actor.
        still = threading.Event()
        for _ in range(int(GRACE_S / LOOK_S)):
            if self._ended() or still.wait(LOOK_S):
                break
        raise GraphError(f"{collective.name}: a member has left the collective, or was late: {error}") from error

    # On the thread

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
        inputs = [_as_torch(tensor, self._transport) for tensor in tensors]
        shapes = [part_shape(collective, tuple(tensor.shape)) for tensor in inputs]
        size, dtype = self._size, inputs[0].dtype
        flat = _flat(inputs, size if collective.kind == "reducescatter" else 1)
        if collective.kind == "allgather":
            out = torch.empty(size * flat.numel(), dtype=dtype, device=flat.device)
            # As bytes: gloo knows fewer dtypes than torch.
            group._allgather_base(out.view(torch.uint8), flat.view(torch.uint8)).wait()
            parts = [cut(chunk, shapes) for chunk in out.chunk(size)] if out.numel() else [cut(out, shapes)] * size
            return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
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


class _Member:
    """The process group of one state, and the store behind it. Used by the thread of the group alone."""

    def __init__(
        self,
        transport: str,
        rank: int,
        size: int,
        timeout: timedelta,
        state: State,
        store: Any,
        closed: threading.Event,
    ) -> None:
        self._transport, self._rank, self._size, self._timeout = transport, rank, size, timeout
        (self._host, self._port), departures = state
        self._server = store
        """Store of rank 0 itself; None in the others, which connect to it."""
        self._prefix = ".".join(map(str, departures))
        self._closed = closed
        self._keys: Any = None
        """Keys of this state in the store."""
        self._group: Any = None

    def run(self, function: Callable[[_Member], Any]) -> Any:
        """Return what a function of this member returns. After an error the group is closed.

        The others are told an error that is not of the network, and raise the same one: here too it is raised instead
        of the broken connection that follows from it.
        """
        try:
            return function(self)
        except BaseException as error:
            # The frames of the error hold the process group, and with it the connections.
            self._group = None
            traceback.clear_frames(error.__traceback__)
            if not _is_of_network(error):
                self.leave(error)
                raise
            cause: BaseException | None = None
            with contextlib.suppress(RuntimeError):  # rank 0, and with it the store, has ended
                keys = self._open_keys()
                # Raise the error because of which another member has left, if there is one.
                if keys.check([_LEFT]):
                    cause = messages.decode(messages.ERROR, keys.get(_LEFT), ())
            if cause is None:
                raise
            raise cause from None

    def group(self) -> Any:
        """Return the process group; open it when all members are here.

        RuntimeError if not all come, or if one of them has left.
        """
        if self._group is not None:
            return self._group
        keys = self._open_keys()
        # Ask until all are here: a wait of torch's own would go on after the graph has ended.
        ready_keys = [f"here/{rank}" for rank in range(self._size)]
        keys.set(ready_keys[self._rank], b"")
        deadline = Deadline(self._timeout.total_seconds())
        while True:
            if keys.check([_LEFT]):
                raise RuntimeError("a member has left before all had come")
            if keys.check(ready_keys):
                break
            if self._closed.wait(ASK_S) or deadline.left_s() == 0:
                raise RuntimeError("not all members came")
        if self._transport == "gloo":
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            # By address: gloo would otherwise resolve the name of the host, which need not lead to this node.
            options._devices = [gloo.create_device(hostname=_ray.node_ip())]
            options._threads = 1  # one collective at a time; more threads would only sleep
            group_class = gloo
        else:
            group_class = dist.ProcessGroupNCCL
            options = group_class.Options()
        options._timeout = self._timeout
        self._group = group_class(keys, self._rank, self._size, options)
        return self._group

    def leave(self, error: BaseException) -> None:
        """Tell the others that this member takes no further part, because of an error."""
        with contextlib.suppress(RuntimeError):  # rank 0, and with it the store, has ended
            self._open_keys().set(_LEFT, bytes(messages.encode_error(error).body))

    def _open_keys(self) -> Any:
        if self._keys is None:
            store = self._server
            if store is None:
                store = TCPStore(self._host, self._port, self._size, False, self._timeout, wait_for_workers=False)
            self._keys = PrefixStore(self._prefix, store)
        return self._keys


def _serve(member: _Member, work: queue.SimpleQueue[Any]) -> None:
    """Do what is asked for, until None."""
    while (task := work.get()) is not None:
        future, function = task
        try:
            future.set_result(member.run(function))
        except BaseException as error:
            future.set_exception(error)
        del task, future, function  # the thread must not keep tensors while it waits


def _is_of_network(error: BaseException) -> bool:
    """Return True for the error of a broken connection or of a time limit. torch has no class of its own for gloo's."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _as_torch(tensor: Any, transport: str) -> Any:
    if isinstance(tensor, torch.Tensor):
        tensor_or_array = plain(tensor)
    else:
        tensor_or_array = torch.from_numpy(
            tensor.astype(native_dtype(tensor), order="C")
        )  # a copy: arrays may be read-only
    return tensor_or_array.cuda() if transport == "nccl" else tensor_or_array.cpu()


def _flat(tensors: Sequence[Any], parts: int) -> Any:
    """Return new flat memory with part 0 of each tensor, then part 1 of each, and so on."""
    pieces = [
        piece.reshape(-1)
        for part in range(parts)
        for tensor in tensors
        for piece in [tensor if parts == 1 else tensor[part * len(tensor) // parts : (part + 1) * len(tensor) // parts]]
    ]
    return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces)
