"""Comparison of what a reader holds with what was published: what is compared with what. Pure.

The digest of a published tensor is that of the whole tensor in its published dtype. So the tensors of a reader are
divided into *groups*, by the published tensor from which they come:

    group                                       is compared with
    whole tensor, in the published dtype        the digest of the version
    part of a tensor, or converted elements     the same regions of the slot, converted in the same way; and the whole
                                                tensor in the slot with the digest of the version

Called by `verification`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from raylane.core.listing import listed
from raylane.weights.layout.boxes import (
    Box,
    HeldBox,
    StoredBox,
    StoredLayout,
    StoredTensor,
    TensorLayout,
    View,
    have_overlap,
)
from raylane.weights.layout.plan import Plan, make_plans


class LoadedRegion(NamedTuple):
    """Region of a published tensor, where it is stored, and where it lies in a reader's tensor."""

    target: str
    """Name of the reader's tensor."""
    box: Box
    room: StoredBox
    """Stored box in which it lies."""
    place: Box | View
    """Region of the reader's tensor."""


class Group(NamedTuple):
    """Regions whose digests are added up and compared."""

    source: str
    """Name of the published tensor."""
    regions: tuple[LoadedRegion, ...]
    is_whole: bool
    """True if the regions are the whole tensor, once, in the published dtype."""

    @property
    def text(self) -> str:
        """Name of the published tensor, and names of the reader's tensors where they are others."""
        targets = list(dict.fromkeys(region.target for region in self.regions))
        return repr(self.source) + ("" if targets == [self.source] else f" (in {listed(targets)})")


def groups_of(plan: Plan, regions: Iterable[tuple[str, Box | View]], dtypes: Mapping[str, str]) -> list[Group]:
    """Return the groups of a plan, whose pieces go into `regions` of the reader's tensors of these dtypes."""
    by_source: defaultdict[str, list[LoadedRegion]] = defaultdict(list)
    places = iter(regions)
    for pieces in plan.pieces:
        source = plan.stored.name_of(pieces.name)
        boxes = plan.stored.tensors[source].boxes
        for number, within, _, _ in pieces.rows():
            target, place = next(places)
            room = boxes[number]
            start = tuple(a + b for a, b in zip(room.box.start, within.start, strict=True))
            by_source[source].append(LoadedRegion(target, Box(start, within.size), room, place))
    groups: list[Group] = []
    for source, loaded in by_source.items():
        groups += _groups_of_tensor(source, plan.stored.tensors[source], loaded, dtypes)
    return groups


def _groups_of_tensor(
    source: str, published: StoredTensor, loaded: Sequence[LoadedRegion], dtypes: Mapping[str, str]
) -> Iterator[Group]:
    """Yield one group if all regions together are the published tensor; else one for each tensor of the reader."""
    if all(dtypes[region.target] == published.dtype for region in loaded) and _are_whole(published, loaded):
        yield Group(source, tuple(loaded), is_whole=True)
        return
    by_target: defaultdict[str, list[LoadedRegion]] = defaultdict(list)
    for region in loaded:
        by_target[region.target].append(region)
    for target, regions in by_target.items():
        is_whole = dtypes[target] == published.dtype and _are_whole(published, regions)
        yield Group(source, tuple(regions), is_whole)


def _are_whole(published: StoredTensor, regions: Sequence[LoadedRegion]) -> bool:
    boxes = [region.box for region in regions]
    if sum(box.elements for box in boxes) != sum(room.box.elements for room in published.boxes):
        return False
    return len(boxes) == 1 or not have_overlap(boxes)


def whole_plan(stored: StoredLayout, sources: Iterable[str]) -> Plan:
    """Return the plan of a reader that has published tensors of these names, whole."""
    layout = {}
    for source in sources:
        tensor = stored.tensors[source]
        origin = (0,) * len(tensor.shape)
        held = (HeldBox(Box(origin, tensor.shape), origin),)
        layout[source] = TensorLayout(tensor.shape, tensor.dtype, tensor.itemsize, held)
    (plan,) = make_plans(stored, [layout], subset=True)
    return plan
