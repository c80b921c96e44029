"""A version that a reader holds in slots of its host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from raylane.core.memory.windows import StagedFile
from raylane.weights.memory.slots import OpenSlot
from raylane.weights.service.answers import VersionOffer


class HeldVersion(NamedTuple):
    """A version that cannot be overwritten."""

    offer: VersionOffer
    paths: dict[str, str]
    """Slot of each part."""
    slots: list[OpenSlot]
    """Slots that this reader holds."""
    read: Sequence[OpenSlot] = ()
    """Slots that have the version."""
    prepared: Any = None
    """New memory for which the tensors are exchanged, where the version has been copied already."""
    staged: dict[str, StagedFile] | None = None
    """Slots by part that windows are to show, where tensors are mapped and the version was prefetched."""

    def is_gone(self) -> bool:
        """Return True if the name of the version was dropped since it was held, or its memory is of another one."""
        is_read = self.prepared is None
        return any(slot.is_dropped() or (is_read and slot.is_replaced()) for slot in self.read)

    def check_present(self) -> None:
        """Raise WeightsLostError if the version is gone although it is held, as on a device whose process has died."""
        for slot in self.read:
            slot.check_present(self.offer.number)

    def by_part(self) -> dict[str, OpenSlot]:
        """Return the slot of each part."""
        return dict(zip(self.paths, self.slots, strict=True))
