"""Copies between devices and slots. CUDA tensors go by page-locked memory, on a stream of their own; never run on one.

trainer's stream   ... step ──┬─────── next step ───────────>
raylane's stream              └─ wait ── copy into the slot ─┘ done: the optimizer may write again
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


class Moment:
    """Point in the work of the present CUDA streams, taken on the thread that has queued this work."""

    def __init__(self, find_tensors: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Take the point on the device of each of the tensors found; none for those in host memory."""
        # 10,000 tensors are looked through only in processes that use CUDA.
        tensors = find_tensors() if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self.events = {device: torch.cuda.current_stream(device).record_event() for device in devices}


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor], moment: Moment | None = None) -> None:
    """Copy each source into its target; dtypes are converted. Returns when all is copied.

    Copies from and to a CUDA device begin at `moment` (None: now), and run beside the work that is queued later.
    """
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
            plain = [pair for pair in zip(targets, sources, strict=True) if not (pair[0].is_cuda or pair[1].is_cuda)]
            targets, sources = [target for target, _ in plain], [source for _, source in plain]
        torch._foreach_copy_(targets, sources)
    for stream in streams:
        stream.synchronize()


def lock_pages(memory: torch.Tensor, owner: Any) -> None:
    """Page-lock a slot's memory as long as `owner` exists, so that CUDA copies run beside other work."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(code) == 0:  # else copies are slower, but right
        weakref.finalize(owner, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
