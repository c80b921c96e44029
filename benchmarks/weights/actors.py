"""Actors of the benchmark `weights`: ranks that send their shards, and readers that take them into their parameters.

Each way to move weights is a pair of classes, a sender and a receiver, which live in these actors. Senders get the
shards of their rank, receivers the parameters of their reader, by name. `home` is a folder of the contender.
"""

from __future__ import annotations

import cProfile
import inspect
import os
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import measure
from benchmarks.weights.cases import MAPPED, RANKS, Case, Region, by_columns
from raylane import weights

BUCKET_BYTES = 256 << 20
"""Size of the buckets in which weights are broadcast or handed to Ray's direct transport."""
Tensors = dict[str, torch.Tensor]


def name_of(tensor: int) -> str:
    """Return the name of a matrix."""
    return f"layers.{tensor}.weight"


def matrix(case: Case, tensor: int, step: int) -> torch.Tensor:
    """Return a whole matrix as it is after a step of training. float32, [side, side]."""
    values = torch.arange(case.side**2, dtype=torch.float32).remainder_(251).add_(tensor + step)
    return values.view(case.side, case.side)


def shards_of(case: Case, rank: int) -> Tensors:
    """Return the shards of a rank before the first step."""
    rows = case.rows_of(rank, RANKS)
    whole = Region(0, 0, case.side, case.side)
    return {name_of(i): matrix(case, i, 0)[rows.within(whole)].clone() for i in range(case.tensors)}


def parameters_of(case: Case, part: int) -> Tensors:
    """Return the parameters of a reader. Those of a mapped model have no memory of their own."""
    parameters: Tensors = {}
    for first in range(0, case.tensors, 4):
        fused = [i for i in range(first, min(first + 4, case.tensors)) if not by_columns(i)]
        if case.parts > 1 and case.workload != MAPPED:
            rows = case.side // case.parts
            block = torch.ones(len(fused) * rows, case.side)
            parameters |= {name_of(i): view for i, view in zip(fused, torch.split(block, rows), strict=True)}
        for i in range(first, min(first + 4, case.tensors)):
            held = case.held(i, part)
            if case.workload == MAPPED:
                parameters[name_of(i)] = torch.ones(1).expand(held.rows, held.columns)
            elif name_of(i) not in parameters:
                parameters[name_of(i)] = torch.ones(held.rows, held.columns)
    return parameters


class RaylaneSender:
    """A rank's `weights.Publisher`."""

    digests = False

    def __init__(self, case: Case, rank: int, shards: Tensors, home: str) -> None:
        def place(_: str, tensor: torch.Tensor) -> weights.Part:
            return weights.Part.even(tensor, dim=0, rank=rank, size=RANKS)

        keep = 3 if case.workload == MAPPED else 2
        self.publisher = weights.Publisher(
            home, shards, rank=rank, world=RANKS, keep=keep, places=place, digests=self.digests
        )
        self.step = 0

    def send(self, _: int) -> None:
        """Publish the next version."""
        self.step += 1
        self.publisher.publish(self.step)


class DigestSender(RaylaneSender):
    """A rank that computes digests."""

    digests = True


class RaylaneReceiver:
    """A reader's `weights.Subscriber`."""

    verify: str | None = None

    def __init__(self, case: Case, part: int, parameters: Tensors, home: str) -> None:
        regions = {name_of(i): case.held(i, part) for i in range(case.tensors)}

        def place(name: str, _: torch.Tensor) -> weights.Part:
            region = regions[name]
            return weights.Part((case.side, case.side), (region.row, region.column))

        apply = "map" if case.workload == MAPPED else "copy"
        self.subscriber = weights.Subscriber(home, parameters, apply=apply, places=place, verify=self.verify)

    def receive(self, *_: Any) -> None:
        """Take the next version."""
        self.subscriber.wait_for(self.subscriber.version + 1)

    def prefetch(self) -> None:
        """Bring the next version to this host."""
        self.subscriber.prefetch(self.subscriber.version + 1)


class VerifyingReceiver(RaylaneReceiver):
    """A reader that verifies each update."""

    verify = "each"


class StoreSender:
    """Shards for Ray's object store, as tensors."""

    def __init__(self, case: Case, rank: int, shards: Tensors, home: str) -> None:
        self.shards: dict[str, Any] = dict(shards)

    def send(self, _: int) -> Any:
        """Return the shards by name."""
        return self.shards


class NumpySender(StoreSender):
    """Shards for Ray's object store, as NumPy arrays: readers map these without a copy."""

    def __init__(self, case: Case, rank: int, shards: Tensors, home: str) -> None:
        self.shards = {name: tensor.numpy() for name, tensor in shards.items()}


class StoreReceiver:
    """Copies from shards in the object store."""

    def __init__(self, case: Case, part: int, parameters: Tensors, home: str) -> None:
        self.targets: list[list[tuple[str, Any, Any]]] = []
        for rank in range(RANKS):
            rows = case.rows_of(rank, RANKS)
            commons = [(i, case.held(i, part), case.held(i, part).common(rows)) for i in range(case.tensors)]
            self.targets.append(
                [
                    (name_of(i), parameters[name_of(i)].numpy()[common.within(held)], common.within(rows))
                    for i, held, common in commons
                    if common.rows and common.columns
                ]
            )

    def receive(self, *sent: Any) -> None:
        """Copy the shards of all ranks."""
        for arrays, targets in zip(sent, self.targets, strict=True):
            for name, target, index in targets:
                np.copyto(target, np.asarray(arrays[name])[index])


class Packed(NamedTuple):
    """Region of a matrix in a bucket."""

    tensor: int
    region: Region
    offset: int
    """First element in the bucket."""

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return the region, [rows, columns], as it lies in a bucket."""
        _, _, rows, columns = self.region
        return bucket[self.offset : self.offset + rows * columns].view(rows, columns)


def buckets_of(case: Case, rank: int, part: int | None) -> Iterator[tuple[int, list[Packed]]]:
    """Yield the buckets of a rank, for the readers of a part or (None) for all: number of elements, and regions."""
    rows, size, packed = case.rows_of(rank, RANKS), 0, list[Packed]()
    for i in range(case.tensors):
        region = rows if part is None else rows.common(case.held(i, part))
        count = region.rows * region.columns
        if packed and (size + count) * 4 > BUCKET_BYTES:
            yield size, packed
            size, packed = 0, []
        if count:
            packed.append(Packed(i, region, size))
            size += count
    if packed:
        yield size, packed


def _sources(packed: Sequence[Packed], shards: Tensors, rows: Region) -> list[torch.Tensor]:
    return [shards[name_of(item.tensor)][item.region.within(rows)] for item in packed]


def _copy(bucket: torch.Tensor, packed: Sequence[Packed], case: Case, part: int, parameters: Tensors) -> None:
    """Copy from a bucket into the parameters of a reader."""
    targets, sources = [], []
    for item in packed:
        held = case.held(item.tensor, part)
        common = held.common(item.region)
        if common.rows and common.columns:
            targets.append(parameters[name_of(item.tensor)][common.within(held)])
            sources.append(item.view(bucket)[common.within(item.region)])
    torch._foreach_copy_(targets, sources)


class BucketSender:
    """Buckets for Ray's direct transport, with only what the readers of one part need."""

    def __init__(self, case: Case, rank: int, shards: Tensors, home: str) -> None:
        rows = case.rows_of(rank, RANKS)
        self.buckets: list[list[torch.Tensor]] = []
        self.copies: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        for part in range(case.parts):
            self.buckets.append([])
            targets, sources = list[torch.Tensor](), list[torch.Tensor]()
            for size, packed in buckets_of(case, rank, part):
                self.buckets[part].append(bucket := torch.ones(size))
                targets += [item.view(bucket) for item in packed]
                sources += _sources(packed, shards, rows)
            self.copies.append((targets, sources))

    def send(self, part: int) -> Any:
        """Return the buckets for the readers of a part."""
        torch._foreach_copy_(*self.copies[part])
        return self.buckets[part]


class BucketReceiver:
    """Copies from the buckets of all ranks."""

    def __init__(self, case: Case, part: int, parameters: Tensors, home: str) -> None:
        self.case, self.part, self.parameters = case, part, parameters
        self.packed = [[packed for _, packed in buckets_of(case, rank, part)] for rank in range(RANKS)]

    def receive(self, *sent: Any) -> None:
        """Copy the buckets of all ranks."""
        for buckets, several in zip(sent, self.packed, strict=True):
            for bucket, packed in zip(buckets, several, strict=True):
                _copy(bucket, packed, self.case, self.part, self.parameters)


class Broadcast:
    """Member of a gloo group for each rank, in which that rank broadcasts its shards in buckets to all readers."""

    def __init__(self, case: Case, member: int, home: str) -> None:
        from torch import distributed

        distributed.init_process_group(
            "gloo", init_method=f"file://{home}/group", rank=member, world_size=RANKS + case.readers
        )
        readers = range(RANKS, RANKS + case.readers)
        self.groups = [distributed.new_group([rank, *readers]) for rank in range(RANKS)]
        self.buckets = [list(buckets_of(case, rank, None)) for rank in range(RANKS)]
        self.memory = torch.ones(max(size for buckets in self.buckets for size, _ in buckets))

    def broadcast(self, rank: int, size: int) -> torch.Tensor:
        """Send or receive a bucket of a rank; return it."""
        from torch import distributed

        bucket = self.memory[:size]
        distributed.broadcast(bucket, src=rank, group=self.groups[rank])
        return bucket


class BroadcastSender:
    """A rank that broadcasts."""

    def __init__(self, case: Case, rank: int, shards: Tensors, home: str) -> None:
        self.rank, self.group = rank, Broadcast(case, rank, home)
        rows, memory = case.rows_of(rank, RANKS), self.group.memory
        self.copies = [
            (size, [item.view(memory) for item in packed], _sources(packed, shards, rows))
            for size, packed in self.group.buckets[rank]
        ]

    def send(self, _: int) -> None:
        """Broadcast all buckets."""
        for size, targets, sources in self.copies:
            torch._foreach_copy_(targets, sources)
            self.group.broadcast(self.rank, size)


class BroadcastReceiver:
    """A reader in the groups of all ranks."""

    def __init__(self, case: Case, part: int, parameters: Tensors, home: str, reader: int) -> None:
        self.case, self.part, self.parameters = case, part, parameters
        self.group = Broadcast(case, RANKS + reader, home)

    def receive(self, *_: Any) -> None:
        """Take the buckets of one rank after the other."""
        for rank, buckets in enumerate(self.group.buckets):
            for size, packed in buckets:
                _copy(self.group.broadcast(rank, size), packed, self.case, self.part, self.parameters)


class CheckpointSender:
    """A rank that saves its shards as DTensors with torch's distributed checkpoints (DCP)."""

    def __init__(self, case: Case, rank: int, shards: Tensors, home: str) -> None:
        mesh = _mesh(f"{home}/ranks", rank, RANKS)
        self.folder = f"{home}/checkpoint"
        self.state = {name: _sharded(tensor, mesh, 0) for name, tensor in shards.items()}

    def send(self, _: int) -> None:
        """Save the shards."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = FileSystemWriter(self.folder, sync_files=False)
        save(self.state, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))


class CheckpointReceiver:
    """A reader that loads its part; the readers of all parts of a model load together."""

    def __init__(self, case: Case, part: int, parameters: Tensors, home: str, reader: int) -> None:
        mesh = _mesh(f"{home}/readers-{reader // case.parts}", part, case.parts)
        self.folder = f"{home}/checkpoint"
        self.state = {
            name_of(i): _sharded(parameters[name_of(i)], mesh, int(by_columns(i))) for i in range(case.tensors)
        }

    def receive(self, *_: Any) -> None:
        """Load the newest checkpoint into the parameters."""
        from torch.distributed.checkpoint.state_dict_loader import load

        load(self.state, checkpoint_id=self.folder)


def _mesh(file: str, member: int, size: int) -> Any:
    """Return the mesh of the processes that meet at a file."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=member, world_size=size)
    return init_device_mesh("cpu", (size,))


def _sharded(tensor: torch.Tensor, mesh: Any, dim: int) -> Any:
    """Return a DTensor over an equal part of a dimension."""
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(tensor, mesh, [Shard(dim)], run_check=False)


class Member:
    """Actor with tensors: a rank or a reader. It measures by itself, so Ray's calls are not part of the time."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def pid(self) -> int:
        """Return the process ID."""
        return os.getpid()

    def act(self) -> None:
        """Do what is measured: send, or update."""
        raise NotImplementedError

    def timed(self, begin_s: float) -> float:
        """Return the microseconds of `act`, which begins at a time of the host's monotonic clock."""
        time.sleep(max(0.0, begin_s - time.monotonic()))
        return measure.timed(self.act)

    def prepare_memcpy(self) -> None:
        """Allocate memory of the size of all tensors twice, and touch it."""
        nbytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.bare = np.zeros(nbytes, dtype=np.uint8), np.ones(nbytes, dtype=np.uint8)
        np.copyto(*self.bare)

    def memcpy(self, begin_s: float) -> float:
        """Return the microseconds of one copy of as many bytes, which begins as `timed`."""
        time.sleep(max(0.0, begin_s - time.monotonic()))
        return measure.timed(lambda: np.copyto(*self.bare))


class Rank(Member):
    """One of the ranks that publish."""

    def __init__(self, sender: Callable[..., Any], case: Case, rank: int, home: str) -> None:
        super().__init__(shards_of(case, rank))
        self.sender = sender(case, rank, self.tensors, home)

    def train(self) -> None:
        """Change all weights."""
        torch._foreach_add_(list(self.tensors.values()), 1)

    def send(self, part: int) -> Any:
        """Send the shards for the readers of a part."""
        return self.sender.send(part)

    def act(self) -> None:
        """Send the shards."""
        self.sender.send(0)


class Reader(Member):
    """One of the readers."""

    def __init__(self, receiver: Callable[..., Any], case: Case, reader: int, home: str) -> None:
        self.case, self.part = case, reader % case.parts
        super().__init__(parameters_of(case, self.part))
        more = {"reader": reader} if receiver in NUMBERED else {}
        self.receiver = receiver(case, self.part, self.tensors, home, **more)

    def receive(self, *sent: Any) -> None:
        """Take the next weights."""
        self.receiver.receive(*sent)

    def prefetch(self) -> None:
        """Let raylane prepare the next update, beside the work of the model."""
        self.receiver.prefetch()

    def act(self) -> None:
        """Take the next weights of raylane."""
        self.receiver.receive()

    def check(self, step: int) -> None:
        """Raise RuntimeError unless all parameters are those of a step."""
        whole = Region(0, 0, self.case.side, self.case.side)
        for i in range(self.case.tensors):
            expected = matrix(self.case, i, step)[self.case.held(i, self.part).within(whole)]
            if not torch.equal(self.tensors[name_of(i)], expected):
                raise RuntimeError(f"reader of part {self.part}: {name_of(i)} differs from that of step {step}")

    def planning_share(self) -> float:
        """Update once under a profiler; return the share of time in the module of `weights.Plan`, and called from it.

        An upper bound: the profiler slows functions of Python down, but not copies.
        """
        profile = cProfile.Profile()
        profile.runcall(self.receiver.receive)
        functions: Any = getattr(pstats.Stats(profile), "stats")  # noqa: B009 - not in the type stubs
        file, planning_s = inspect.getfile(weights.Plan), 0.0
        for (where, _, _), (_, _, inner_s, _, callers) in functions.items():
            if where == file:
                planning_s += inner_s
            elif where == "~":  # built in
                planning_s += sum(times[2] for caller, times in callers.items() if caller[0] == file)
        return float(planning_s / max(times[3] for times in functions.values()))


NUMBERED = (BroadcastReceiver, CheckpointReceiver)
"""Receivers that need the number of their reader."""
