"""The keeper: one Ray actor on each host that publishes or reads. It owns the slots and watches readers.

It decides nothing. Slots live in a process of their own so that a version outlives the trainer that wrote it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from raylane.core import vm
from raylane.core.semaphore import Segment
from raylane.core.watcher import watcher
from raylane.weights.slots import make_slot, words_of


class Keeper:
    """Actor with the slots of one host."""

    def __init__(self) -> None:
        vm.allow_readers()  # other processes of this user open the slots through /proc
        self._slots: dict[tuple[str, tuple[int, ...]], list[Segment]] = {}
        """Slots by name of the weights and sizes of their areas."""

    async def wait(self) -> None:
        """Never return: the caller learns of the end of this actor."""
        await asyncio.get_running_loop().create_future()

    async def wait_for_end(self, pid: int) -> None:
        """Return when a process of this host has ended."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def note_end() -> None:
            loop.call_soon_threadsafe(ended.set)

        try:
            watch = watcher.watch(pid, note_end)
        except ProcessLookupError:
            return
        try:
            await ended.wait()
        finally:
            watch.forget()

    async def make(self, name: str, area_bytes: Sequence[int], count: int) -> tuple[list[str], int]:
        """Return the paths of `count` slots, which the first call makes, and the largest number of a version in them.

        Pages take memory when they are written.
        """
        at = name, tuple(area_bytes)
        slots = self._slots.get(at, [])
        while len(slots) < count:
            slots.append(make_slot(area_bytes))
        self._slots[at] = slots
        numbers = [number for slot in slots for number in words_of(slot, len(area_bytes))]
        return [slot.path for slot in slots[:count]], max(numbers)

    async def drop(self, name: str, spared: Sequence[Sequence[int]] = ()) -> None:
        """Give up the slots of a name, except those with areas of these sizes. Readers keep what they map."""
        spared_sizes = {tuple(area_bytes) for area_bytes in spared}
        for at in [at for at in self._slots if at[0] == name and at[1] not in spared_sizes]:
            for slot in self._slots.pop(at):
                slot.close_fd()
