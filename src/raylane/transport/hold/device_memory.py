"""Memory of CUDA devices in values: events, copies to the host, and blocks as tensors of bytes.

A published CUDA tensor stays where it is. `OnDevice` belongs to the entry of a value; it remembers an event of every
device's current stream at publication, and nobody reads before these events have happened. Copies run on streams of
their own, and a thread waits for its own copies only, never for a whole device.

    producer's stream   ... kernel ... | event ............ more kernels of the producer
    own stream                         └─> copy to the host, or to another process

Freeing needs no event: whoever reads holds the entry, and with it the tensors, until its copy has been waited for.

Written after the documentation of torch 2.13 and CUDA 12; run on one GPU (`tests/gpu`). Imports torch, so it is loaded
on first use.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from raylane.core.memory.layout import SMALL_BLOCK_BYTES, segment_offsets
from raylane.core.memory.spans import Span
from raylane.transport.value.layout import Layout, local_device

_T = TypeVar("_T")


class DeviceGroup(NamedTuple):
    """Blocks of one device that travel as one piece: many small ones, or a large one."""

    device: int
    """Number of the device in the source."""
    numbers: list[int]
    spans: list[Span]
    """Place of each block in the piece."""
    nbytes: int


def groups_of(devices: Mapping[int, int], sizes: Sequence[int]) -> list[DeviceGroup]:
    """Return the blocks on devices as they travel. Pure: source and reader compute the same.

    `devices` gives the device of a block (`Layout.devices`), `sizes` the sizes of all blocks in bytes.
    """
    groups, small = [], dict[int, list[int]]()
    for number, device in sorted(devices.items()):
        if sizes[number] < SMALL_BLOCK_BYTES:
            small.setdefault(device, []).append(number)
        else:
            groups.append(DeviceGroup(device, [number], [Span(0, sizes[number])], sizes[number]))
    for device, numbers in small.items():
        # Aligned to 64 bytes, as every dtype needs.
        offsets, total = segment_offsets([sizes[number] for number in numbers])
        if len(numbers) == 1:  # it travels as it is
            total = sizes[numbers[0]]
        spans = [Span(start, start + sizes[number]) for start, number in zip(offsets, numbers, strict=True)]
        groups.append(DeviceGroup(device, numbers, spans, total))
    return sorted(groups, key=lambda group: group.numbers[0])


def new_blocks(groups: Iterable[DeviceGroup]) -> dict[int, torch.Tensor]:
    """Return memory for the blocks of these groups, by number: tensors of bytes on this process's devices.

    A block lies on the device of the same number as in its source, or on the current one (`local_device`); in
    host memory if this process has no CUDA.
    """
    blocks = {}
    for group in groups:
        device = local_device(f"cuda:{group.device}") if torch.cuda.is_available() else torch.device("cpu")
        memory = torch.empty(group.nbytes, dtype=torch.uint8, device=device)
        blocks.update({number: memory[slice(*span)] for number, span in zip(group.numbers, group.spans, strict=True)})
    return blocks


def separated(blocks: Sequence[Any]) -> list[Any]:
    """Return received blocks, each with a storage of its own.

    torch takes tensors of one storage for views of each other: `torch.save` refuses two dtypes in it, and resizing the
    storage of one would free the others.
    """
    return [
        block.clone() if isinstance(block, torch.Tensor) and block.untyped_storage().nbytes() > block.numel() else block
        for block in blocks
    ]


def whole(block: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the group to which a block of `new_blocks` belongs."""
    storage = block.untyped_storage()
    return _bytes_in(storage, 0, storage.nbytes())


def _bytes_in(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """Return a tensor of bytes over a part of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))


class OnDevice:
    """The blocks of a published value that lie on devices. Thread-safe."""

    def __init__(self, layout: Layout, streams: Mapping[int, Any] | None = None) -> None:
        """Remember what these streams (by device; else the current ones) have to finish before the blocks may be read.

        ValueError if a block belongs to several storages; such a value has to be copied to the host.
        """
        self.devices = layout.devices
        self.blocks: dict[int, torch.Tensor] = {}
        """Bytes of each block, in the producer's own memory."""
        for spec, leaf in zip(layout.specs, layout.held, strict=True):
            if spec.block in self.devices and spec.block not in self.blocks:
                storage, block = leaf.untyped_storage(), layout.blocks[spec.block]
                start = block.start - storage.data_ptr()
                if start < 0 or start + block.nbytes > storage.nbytes():
                    raise ValueError(f"block {spec.block} does not lie in one storage")
                self.blocks[spec.block] = _bytes_in(storage, start, block.nbytes)
        self._events = []
        """One event for each device, which happens when the work on the producer's stream so far is done."""
        for device in sorted(set(self.devices.values())):
            with torch.cuda.device(device):
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record((streams or {}).get(device))
                self._events.append(event)
        _published.append(min(self.devices.values()))
        self._lock = threading.Lock()  # guards the copy
        self._staged: dict[int, Any] | None = None

    def wait(self) -> None:
        """Wait until the producer's kernels have written the blocks; without the GIL, and without a busy loop."""
        for event in self._events:
            event.synchronize()

    def copy_to(self, targets: Mapping[int, Any]) -> None:
        """Copy blocks into buffers of the host, by number of the block, and wait for the copies."""
        pairs = [(self.blocks[n], torch.frombuffer(target, dtype=torch.uint8)) for n, target in targets.items()]
        self._copy(pairs)

    @property
    def is_staged(self) -> bool:
        """True if `staged` has its copy already."""
        return self._staged is not None

    def staged(self) -> dict[int, Any]:
        """Return all blocks in host memory, as ctypes arrays by number; copied once, and kept as long as the value."""
        with self._lock:
            if self._staged is None:
                # Pinned, because a device copies to other memory at a fraction of the speed. torch keeps such memory
                # for later use.
                pairs = [
                    (block, torch.empty_like(block, device="cpu", pin_memory=True)) for block in self.blocks.values()
                ]
                self._copy(pairs)
                self._staged = {n: _bytes_of(copy) for n, (_, copy) in zip(self.blocks, pairs, strict=True)}
            return self._staged

    def pieces(self) -> list[torch.Tensor]:
        """Return the bytes of each group of blocks (`groups_of`) on its device, written and ready to be read.

        Small blocks are copied together. Keep this object until the bytes have been read. Call `wait` before, and check
        then that the owner still has the memory.
        """
        sizes = [0] * (max(self.blocks) + 1)
        for number, block in self.blocks.items():
            sizes[number] = block.numel()
        pieces = []
        for group in groups_of(self.devices, sizes):
            blocks = [self.blocks[number] for number in group.numbers]
            if len(blocks) == 1:
                pieces.append(blocks[0])
                continue
            with on_own_stream(blocks[0].device):
                memory = torch.empty(group.nbytes, dtype=torch.uint8, device=blocks[0].device)
                for span, block in zip(group.spans, blocks, strict=True):
                    # One by one: if the owner frees the memory now, CUDA refuses such a copy. A kernel for all blocks
                    # would read from a wrong address, and end the process's use of the device.
                    memory[slice(*span)].copy_(block)
            pieces.append(memory)
        return pieces

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy from devices to the host, after the producer's kernels; wait for the copies."""
        for device in {block.device for block, _ in pairs}:
            with on_own_stream(device) as stream:
                for event in self._events:
                    stream.wait_event(event)
                for block, target in pairs:
                    if block.device == device:
                        target.copy_(block, non_blocking=True)


_published: collections.deque[int] = collections.deque([0], maxlen=1)


def publishing_device() -> int:
    """Return the device of the value that this process has published last; 0 before the first."""
    return _published[0]


def current_streams() -> dict[int, Any]:
    """Return the current stream of each device, as this thread sees it; empty if this process does not use CUDA yet."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {number: torch.cuda.current_stream(number) for number in range(torch.cuda.device_count())}


def as_here(call: Callable[[], _T]) -> Callable[[], _T]:
    """Return a function that calls `call` with the current device and streams of this thread, on another one."""
    streams = current_streams()
    if not streams:
        return call
    device = torch.cuda.current_device()

    def called() -> _T:
        with contextlib.ExitStack() as entered:
            for stream in streams.values():
                entered.enter_context(torch.cuda.stream(stream))
            entered.enter_context(torch.cuda.device(device))
            return call()

    return called


_thread_state = threading.local()


@contextlib.contextmanager
def on_own_stream(device: torch.device, *, after_current: bool = False) -> Iterator[Any]:
    """Run the block on this thread's own stream of a device; at its end, wait for that stream.

    Pass `after_current=True` if the block writes to memory that was allocated on the current stream: kernels before may
    still use it.
    """
    streams: dict[torch.device, Any] = _thread_state.__dict__.setdefault("streams", {})
    with torch.cuda.device(device):
        stream = streams.get(device)
        if stream is None:
            stream = streams[device] = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if after_current:
            stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                yield stream
        finally:
            # An event, because waiting for a stream keeps a core busy.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(stream)
            done.synchronize()


def _bytes_of(tensor: torch.Tensor) -> Any:
    """Return the memory of a tensor of bytes in the host as a ctypes array that keeps the tensor."""
    memory: Any = tensor.numpy()
    return (ctypes.c_char * tensor.numel()).from_buffer(memory)
