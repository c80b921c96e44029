"""Copies between devices and slots. CUDA tensors go by page-locked memory, on a stream of their own.

trainer's stream   ... step ──┬─────── next step ───────────>
raylane's stream              └─ wait ── copy into the slot ─┘ done: the optimizer may write again
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raylane.core.process.copying import copy_many
from raylane.weights.layout.boxes import Box, View
from raylane.weights.memory.tensors import Regions, views_of

ROW_BYTES = 1 << 20
"""Longest piece that one thread copies at a time."""


class Moment:
    """Point in the work of the present CUDA streams, taken on the thread that has queued this work."""

    def __init__(self, find_tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Take the point on the device of each of the tensors found; none for those in host memory."""
        # 10,000 tensors are looked through only in processes that use CUDA.
        tensors = find_tensors() if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self.events = {device: torch.cuda.current_stream(device).record_event() for device in devices}


def _are_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return True if a copy of a source into a target is one of bytes of the host."""
    contiguous = target.is_contiguous() and source.is_contiguous()
    lazy = source.is_neg() or source.is_conj()
    return contiguous and not lazy and target.dtype == source.dtype and target.is_cpu and source.is_cpu


class PreparedCopy:
    """Copy between the tensors of this process and a slot, which can be run while the tensors stay where they are.

    Of the tensors it keeps addresses only, so that it does not keep them alive.
    """

    def __init__(
        self, own: Regions, tensors: Mapping[str, torch.Tensor], stored: Sequence[torch.Tensor], *, to_slot: bool
    ) -> None:
        """Prepare the copy of regions of tensors to (`to_slot`) or from the same number of regions of a slot."""
        self._to_slot = to_slot
        self._own_regions: list[tuple[str, Box | View]] = []
        self._stored: list[torch.Tensor] = []
        """Regions that torch copies, as they are strided, converted, or on a device."""
        rows: list[tuple[int, int, int]] = []
        for region, view, room in zip(own, views_of(tensors, own), stored, strict=True):
            target, source = (room, view) if to_slot else (view, room)
            if _are_bytes(target, source):
                to, at, nbytes = target.data_ptr(), source.data_ptr(), target.nbytes
                rows += [(to + i, at + i, min(ROW_BYTES, nbytes - i)) for i in range(0, nbytes, ROW_BYTES)]
            else:
                self._own_regions.append(region)
                self._stored.append(room)
        self._rows = np.array(rows, dtype=np.uint64)
        self._row_bytes = sum(nbytes for _, _, nbytes in rows)

    def run(self, find_tensors: Callable[[], Mapping[str, torch.Tensor]], moment: Moment | None = None) -> None:
        """Copy; returns when all is copied. `find_tensors` returns the tensors, which lie where they lay before.

        Copies from and to a CUDA device begin at `moment` (None: now), and run beside the work that is queued later.
        """
        views = views_of(find_tensors(), self._own_regions) if self._own_regions else []
        targets, sources = (self._stored, views) if self._to_slot else (views, self._stored)
        moment = Moment(lambda: views) if moment is None else moment
        plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        streams: dict[torch.device, Any] = {}
        with torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                device = target.device if target.is_cuda else source.device
                if device.type == "cpu":
                    plain.append((target, source))
                    continue
                if device not in streams:
                    streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                    for event in moment.events.values():  # also those of other devices, from which it may copy
                        streams[device].wait_event(event)
                with torch.cuda.stream(streams[device]):
                    target.copy_(source, non_blocking=True)
            copy_many(self._rows, self._row_bytes)
            if plain:
                torch._foreach_copy_([target for target, _ in plain], [source for _, source in plain])
        for stream in streams.values():
            stream.synchronize()


def lock_pages(memory: torch.Tensor, owner: Any) -> Callable[[], None]:
    """Page-lock a slot's memory as long as `owner` exists, so that CUDA copies run beside other work.

    Return a function that locks the present pages instead: a slot that was emptied has others, and CUDA would go on to
    write to those that it had locked, which nobody reads.
    """
    locked: list[Any] = []

    def lock() -> None:
        while locked:
            locked.pop()()
        locked.extend(_lock(memory.data_ptr(), memory.nbytes, owner))

    lock()
    return lock


def _lock(address: int, nbytes: int, owner: Any) -> list[Any]:
    """Page-lock memory; return the finalizer that ends it, if that has worked."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cudart.cudaHostRegister(address, nbytes, 0)) != 0:  # copies are slower, but right
        return []
    unlock = weakref.finalize(owner, cudart.cudaHostUnregister, address)
    unlock.atexit = False
    return [unlock]
