"""The part of a queue on one host: an actor that holds shared memory, watches processes, and serves other hosts.

It decides nothing. The memory of a producer that has died lives on here, until all of its items have ended.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from raylane.core.memory.segment import Segment
from raylane.core.process import vm
from raylane.core.process.watcher import watcher
from raylane.rl.queue.blocks import PAGE_BYTES


class ItemRange(NamedTuple):
    """Bytes of an item in a segment."""

    path: str
    offset: int
    nbytes: int


class QueueHost:
    """Actor with the segments of the producers of one host."""

    def __init__(self) -> None:
        vm.allow_readers()  # other processes of this user open the segments through /proc
        self._segments: dict[str, Segment] = {}
        """Segments by the path of this process."""
        self._waits: dict[int, asyncio.Event] = {}
        """Event that ends each wait, by its number; also of a wait that has yet to arrive, as Ray keeps no order."""

    async def hold(self, path: str) -> str:
        """Hold a segment of another process of this host; return its path here. FileNotFoundError if it is gone."""
        segment = Segment.open(path, keep_fd=True)
        assert segment.fd is not None
        held = f"/proc/{os.getpid()}/fd/{segment.fd}#{path.partition('#')[2]}"
        # The key is that of the maker: it lies in the segment, and every reader compares it.
        self._segments[held] = segment
        return held

    async def forget(self, paths: Sequence[str]) -> None:
        """Give segments up that nobody may read any more. Readers that still map them read zeros."""
        for path in paths:
            segment = self._segments.pop(path, None)
            if segment is not None:
                segment.close_fd()
                segment.discard(PAGE_BYTES)  # now, not with the last mapping of a consumer

    async def read(self, ranges: Sequence[ItemRange]) -> list[Any]:
        """Return one ref of the bytes of these items, as a list of tensors: for consumers of other hosts.

        KeyError if a segment was given up.
        """
        # Loaded here: only hosts that serve others need the transports, and torch.
        import torch

        from raylane.transport.api import put

        tensors = [
            torch.frombuffer(self._segments[path].memory, dtype=torch.uint8, count=nbytes, offset=offset)
            for path, offset, nbytes in ranges
        ]
        # Other items of the same memory are written meanwhile.
        return [put(tensors, on_mutation="allow")]

    async def wait_for_end(self, wait: int, pid: int, ticks: int) -> None:
        """Return when a process of this host has ended, or after `end_wait`; `ticks` is the time of its start."""
        loop, ended = asyncio.get_running_loop(), self._waits.setdefault(wait, asyncio.Event())

        def note_end() -> None:
            loop.call_soon_threadsafe(ended.set)

        watch = watcher.watch_identified(pid, ticks, note_end)
        if watch is not None:
            try:
                await ended.wait()
            finally:
                watch.forget()
        del self._waits[wait]

    async def wait(self, wait: int) -> None:
        """Return after `end_wait` only: the caller learns of the end of this actor."""
        await self._waits.setdefault(wait, asyncio.Event()).wait()
        del self._waits[wait]

    async def end_wait(self, wait: int) -> None:
        """Let a wait return."""
        self._waits.setdefault(wait, asyncio.Event()).set()
