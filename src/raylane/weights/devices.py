"""Copies between devices and slots. CUDA tensors go by page-locked memory, on a stream of their own; never run on one.

trainer's stream   ... step ──┬─────── next step ───────────>
raylane's stream              └─ wait ── copy into the slot ─┘ done: the optimizer may write again
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from raylane.core.native import copy_many

SMALL_BYTES = 1 << 17
"""Tensors below this size are copied in one list: torch takes 1.5 us for each, and uses one thread as well."""


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
    """Copy of each source into its target, which can be run again while all of them stay where they are."""

    def __init__(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        """Prepare a copy; dtypes are converted. Keeps the tensors alive."""
        small: list[tuple[torch.Tensor, torch.Tensor]] = []
        rest: list[tuple[torch.Tensor, torch.Tensor]] = []
        for pair in zip(targets, sources, strict=True):
            (small if pair[0].nbytes < SMALL_BYTES and _are_bytes(*pair) else rest).append(pair)
        self._targets, self._sources = [target for target, _ in rest], [source for _, source in rest]
        self._small = small
        rows = [(target.data_ptr(), source.data_ptr(), target.nbytes) for target, source in small]
        self._rows = np.array(rows, dtype=np.uint64)

    def run(self, moment: Moment | None = None) -> None:
        """Copy; returns when all is copied.

        Copies from and to a CUDA device begin at `moment` (None: now), and run beside the work that is queued later.
        """
        targets, sources = self._targets, self._sources
        moment = Moment(lambda: itertools.chain(targets, sources)) if moment is None else moment
        streams: list[Any] = []
        with torch.no_grad():
            for device, event in moment.events.items():
                stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(event)
                streams.append(stream)
                with torch.cuda.stream(stream):
                    for target, source in zip(targets, sources, strict=True):
                        if device in (target.device, source.device):
                            target.copy_(source, non_blocking=True)
            if streams:
                plain = [pair for pair in zip(targets, sources, strict=True) if pair[0].is_cpu and pair[1].is_cpu]
                targets, sources = [target for target, _ in plain], [source for _, source in plain]
            copy_many(self._rows)
            if targets:
                torch._foreach_copy_(targets, sources)
        for stream in streams:
            stream.synchronize()


def lock_pages(memory: torch.Tensor, owner: Any) -> None:
    """Page-lock a slot's memory as long as `owner` exists, so that CUDA copies run beside other work."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(code) == 0:  # else copies are slower, but right
        weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
