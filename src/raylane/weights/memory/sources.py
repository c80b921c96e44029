"""Slots that a reader has mapped, with the views through which its plan reads them: made once, for many versions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from raylane.core.memory.windows import StagedFile, Window
from raylane.errors import WeightsError
from raylane.weights.layout.boxes import View
from raylane.weights.layout.plan import Plan
from raylane.weights.memory.buckets import BucketSlot
from raylane.weights.memory.devices import PreparedCopy
from raylane.weights.memory.slots import OpenSlot
from raylane.weights.memory.tensors import Regions, inner_of, stored_pieces

MOST_SLOTS = 8
"""Number of slots of one part that stay mapped: `keep` of a name, and those of its next generation."""


class Sources:
    """Slots of all parts that a reader has read, the last ones of each part."""

    def __init__(self, device: int = 0) -> None:
        """Begin without slots; `device` is that of the reader, for buckets on devices that it does not see."""
        self._device = device
        self._slots: dict[str, dict[str, OpenSlot]] = {}
        """Slots by part and path, the last used one at the end."""
        self._views: dict[tuple[str, ...], list[torch.Tensor]] = {}
        """Pieces of the plan, by the paths of the slots in which they lie."""
        self.copies: dict[tuple[str, ...], PreparedCopy] = {}
        """Copies into the reader's tensors, by the same paths: they have addresses within the slots."""

    def slot(
        self, part: str, path: str, ranks: int, *, in_use: Collection[OpenSlot], on_device: bool = False
    ) -> OpenSlot:
        """Return a slot of a part with so many ranks, which is `on_device` or in shared memory.

        Too many slots end the one that was used longest ago, and is not `in_use`.
        """
        slots = self._slots.setdefault(part, {})
        if path in slots and slots[path].is_replaced() and slots[path] not in in_use:
            self._close(slots, path)
        slot = slots.pop(path, None)
        if slot is None:
            oldest = next((path for path, each in slots.items() if each not in in_use), None)
            if len(slots) >= MOST_SLOTS and oldest is not None:
                self._close(slots, oldest)
            slot = BucketSlot(path, ranks, self._device) if on_device else OpenSlot(path, ranks)
        slots[path] = slot
        return slot

    def _close(self, slots: dict[str, OpenSlot], path: str) -> None:
        """Close a slot of a part, and forget what has addresses in it."""
        slots.pop(path).close()
        self._views = {paths: views for paths, views in self._views.items() if path not in paths}
        self.copies = {paths: copy for paths, copy in self.copies.items() if path not in paths}

    def pieces(self, plan: Plan, paths: Mapping[str, str]) -> list[torch.Tensor]:
        """Return the pieces of a plan in the slots of these paths, by part, which are open."""
        key = tuple(paths.values())
        if key not in self._views:
            memories = {part: self._slots[part][path].memory() for part, path in paths.items()}
            self._views[key] = stored_pieces(plan, memories)
        return self._views[key]

    def forget(self, *, in_use: Collection[OpenSlot] = ()) -> None:
        """Close all slots but these, and forget the views and copies of the plan. Tensors over the slots stay valid."""
        for slots in self._slots.values():
            for path in [path for path, slot in slots.items() if slot not in in_use]:
                self._close(slots, path)
        self._views.clear()
        self.copies.clear()


class MappedParts:
    """Windows in which the tensors of a reader lie: one for each part, which shows the slots of a version."""

    def __init__(self) -> None:
        self._windows: dict[str, Window] = {}
        self._pieces: list[torch.Tensor] = []
        """Pieces of the plan in the windows; none before the first version of a plan."""

    def pieces(self, plan: Plan, slots: Mapping[str, OpenSlot]) -> list[torch.Tensor]:
        """Return the pieces of a plan in the windows: the same list until `forget`. To be read after `show`."""
        if not self._pieces:
            self._windows = {part: slot.window() for part, slot in slots.items()}
            memories = {part: slot.memory(self._windows[part]) for part, slot in slots.items()}
            self._pieces = stored_pieces(plan, memories)
        return self._pieces

    def show(self, staged: Mapping[str, StagedFile]) -> None:
        """Let the windows show the slots of a version. If that fails, some may show it, and some the one before."""
        for part, file in staged.items():
            self._windows[part].show(file)

    def forget(self) -> None:
        """Forget the windows of a plan that was replaced. Tensors in them keep what they show."""
        self._windows, self._pieces = {}, []


def views_to_map(
    regions: Regions, pieces: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the memory in which each tensor is to lie. WeightsError for tensors that cannot be mapped."""
    stored_of: dict[str, list[torch.Tensor]] = {}
    for (name, place), view in zip(regions, pieces, strict=True):
        if isinstance(place, View) and place.strides != view.stride():
            raise WeightsError(f"{name!r} cannot be mapped: it is stored transposed. Use apply='copy'")
        stored_of.setdefault(name, []).append(view)
    for name, stored in stored_of.items():
        target, view = inner_of(tensors[name]), stored[0]
        if target.is_cuda:
            raise WeightsError(f"{name!r} is on {target.device}, where nothing can be mapped. Use apply='copy'")
        if len(stored) > 1 or view.dtype != target.dtype or view.shape != target.shape:
            raise WeightsError(
                f"{name!r} cannot be mapped: it is stored in {len(stored)} pieces as {view.dtype}, and the reader "
                f"has {target.dtype}. Use apply='copy', or the publisher's layout and dtype"
            )
    return {name: stored[0] for name, stored in stored_of.items()}
