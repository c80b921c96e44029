"""Verification of what a reader has taken: digests of its tensors, compared with those that were published.

Tensors that the reader has whole, in the published dtype, are compared with the digest of the version alone, so the
version may have been replaced meanwhile. All others (see `layout.comparison`) need its slots, which are held while they
are read. They are read through mappings of their own, as a reader that maps has written to its private ones.

Called by `subscriber`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from raylane.core.listing import listed
from raylane.errors import WeightsError, WeightsLostError, WeightsMismatchError
from raylane.weights.layout.boxes import StoredLayout
from raylane.weights.layout.comparison import Group, groups_of, whole_plan
from raylane.weights.layout.plan import Plan
from raylane.weights.layout.recording import Record
from raylane.weights.memory.digests import DigestPlace, PreparedDigests, Sums
from raylane.weights.memory.slots import OpenSlot, StaleSlot
from raylane.weights.memory.sources import MOST_SLOTS, Sources
from raylane.weights.memory.tensors import Regions, inner_of, view_of_box, views_of
from raylane.weights.service.answers import VersionOffer
from raylane.weights.state.options import VerifySchedule

Tensors = Mapping[str, torch.Tensor]
FindPaths = Callable[[Plan], Mapping[str, str]]
"""Returns the slot on this host of each part that a plan reads, and brings there what is missing."""
MOST_NAMES = 4
"""Number of tensors that an error names."""


class TakenVersion(NamedTuple):
    """A version, and how a reader takes it."""

    offer: VersionOffer
    plan: Plan
    regions: Regions
    """Regions of the reader's tensors into which the pieces of the plan go."""
    record: Record | None

    @property
    def stored(self) -> StoredLayout:
        """Layout of the version."""
        return self.plan.stored

    def digests(self) -> dict[str, int]:
        """Return the digests that were published, by name of the tensor."""
        values = np.frombuffer(self.offer.digests or b"", dtype="<u8").tolist()
        return dict(zip(self.stored.tensors, values, strict=True))


class _Comparison:
    """Comparison for one plan and one set of dtypes of the reader's tensors."""

    def __init__(self, taken: TakenVersion, dtypes: dict[str, torch.dtype]) -> None:
        self.plan, self.dtypes = taken.plan, dtypes
        names = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
        self.groups = groups_of(taken.plan, taken.regions, names)
        self.parts = [group for group in self.groups if not group.is_whole]
        self.slot_plan = whole_plan(taken.stored, dict.fromkeys(group.source for group in self.parts))
        """Plan of what is read from the slots: the whole tensors of which the reader has parts."""
        self._memory: list[Any] = []
        """Addresses and strides for which the digests of loaded tensors are prepared."""
        self._prepared: PreparedDigests | None = None
        self._in_slots: dict[Any, _SlotDigests] = {}
        """Digests by the addresses of the slots."""

    def loaded(self, tensors: Tensors) -> Sums:
        """Return the digests of the groups, from the reader's tensors."""
        regions = [(region.target, region.place) for group in self.groups for region in group.regions]
        memory = [(inner.data_ptr(), inner.stride()) for inner in (inner_of(tensors[name]) for name in self.dtypes)]
        if self._prepared is None or memory != self._memory:
            places = _places(self.plan.stored, self.groups, self.dtypes)
            self._prepared = PreparedDigests(places, views_of(tensors, regions), len(self.groups))
            self._memory = memory
        return self._prepared.run(lambda numbers: views_of(tensors, [regions[number] for number in numbers]))

    def in_slots(self, memories: Tensors) -> _SlotDigests:
        """Return the digests of what the slots with these memories have, by host."""
        key = tuple((host, memory.data_ptr()) for host, memory in memories.items())
        if key not in self._in_slots:
            # Views keep buckets of devices mapped, also those that were replaced.
            if len(self._in_slots) >= MOST_SLOTS or self.plan.stored.on_device:
                self._in_slots.clear()
            self._in_slots[key] = _SlotDigests(self.plan.stored, self.parts, self.dtypes, memories)
        return self._in_slots[key]


class _SlotDigests:
    """Digests of what slots have of the tensors of which a reader has parts, prepared for the memory of these slots."""

    def __init__(
        self, stored: StoredLayout, parts: Sequence[Group], dtypes: Mapping[str, torch.dtype], memories: Tensors
    ) -> None:
        self._views: list[torch.Tensor] = []
        """Regions in the slots, of all groups."""
        for group in parts:
            dtype = stored.tensors[group.source].dtype
            for region in group.regions:
                room = view_of_box(memories[stored.parts[region.room.part]], region.room, dtype)
                self._views.append(region.box.within(region.room.box).of(room))
        self._parts = PreparedDigests(_places(stored, parts, dtypes), self._views, len(parts))
        self._whole = _WholeDigests(stored, dict.fromkeys(group.source for group in parts), memories)

    def differing(self, published: Mapping[str, int]) -> list[str]:
        """Return the tensors whose elements in the slots do not have the published digest."""
        return self._whole.differing(published)

    def parts(self) -> list[int]:
        """Return the digests of the groups, with elements converted as the reader converts them."""
        digests: list[int] = self._parts.run(lambda numbers: [self._views[number] for number in numbers]).tolist()
        return digests


class _WholeDigests:
    """Digests of whole published tensors in slots."""

    def __init__(self, stored: StoredLayout, sources: Collection[str], memories: Tensors) -> None:
        self._sources = list(sources)
        self._views: list[torch.Tensor] = []
        places = []
        for number, source in enumerate(sources):
            tensor = stored.tensors[source]
            for room in tensor.boxes:
                view = view_of_box(memories[stored.parts[room.part]], room, tensor.dtype)
                self._views.append(view)
                places.append(DigestPlace(number, tensor.shape, room.box.start, view.dtype))
        self._prepared = PreparedDigests(places, self._views, len(sources))

    def differing(self, published: Mapping[str, int]) -> list[str]:
        """Return the tensors that do not have the published digest."""
        digests = self._prepared.run(lambda numbers: [self._views[number] for number in numbers])
        return [
            source
            for source, digest in zip(self._sources, digests.tolist(), strict=True)
            if digest != published[source]
        ]


def _places(stored: StoredLayout, groups: Sequence[Group], dtypes: Mapping[str, torch.dtype]) -> list[DigestPlace]:
    return [
        DigestPlace(number, stored.tensors[group.source].shape, region.box.start, dtypes[region.target])
        for number, group in enumerate(groups)
        for region in group.regions
    ]


def _differing_constants(record: Record | None, tensors: Tensors) -> list[str]:
    """Return the reader's tensors in which padding, which a loader fills with one value, has another value."""
    differing = []
    for name, view, value in () if record is None else record.constants:
        region = view.of(inner_of(tensors[name]).detach())
        expected = torch.full((), value, dtype=region.dtype, device=region.device)
        if not bool((region.isnan() if math.isnan(value) else region == expected).all()):
            differing.append(name)
    return differing


class Verification:
    """Comparisons of one reader. Not thread-safe: its caller holds the reader's lock."""

    def __init__(self, name: str, option: Any, device: int = 0) -> None:
        """Verify weights of a name; `option` as for `VerifySchedule`, `device` as for `Sources`."""
        self.schedule = VerifySchedule(option)
        self._name = name
        self._sources = Sources(device)
        self._comparison: _Comparison | None = None
        """Comparison that was used last."""

    def check_offer(self, offer: VersionOffer) -> None:
        """Raise WeightsError if a version has no digests."""
        if offer.digests is None:
            raise WeightsError(
                f"version {offer.number} of {self._name!r} cannot be verified: it was published without digests. Pass "
                "digests=True to weights.Publisher, on all ranks"
            )

    def slot_plan(self, taken: TakenVersion, tensors: Tensors) -> Plan:
        """Return the plan of what `verify` reads from the slots of a version."""
        return self._comparison_of(taken, tensors).slot_plan

    def _comparison_of(self, taken: TakenVersion, tensors: Tensors) -> _Comparison:
        last = self._comparison
        dtypes = {name: tensors[name].dtype for name in dict.fromkeys(target for target, _ in taken.regions)}
        if last is None or last.plan is not taken.plan or last.dtypes != dtypes:
            last = self._comparison = _Comparison(taken, dtypes)
        return last

    def verify(self, taken: TakenVersion, tensors: Tensors, find_paths: FindPaths) -> None:
        """Compare the reader's tensors with a version.

        Raises:
            WeightsMismatchError: Some differ.
            WeightsLostError: The version was replaced, and the reader has parts of tensors, or converted elements,
                which cannot be compared without it.
            WeightsError: The version has no digests.
        """
        self.check_offer(taken.offer)
        comparison, published = self._comparison_of(taken, tensors), taken.digests()
        loaded = dict(zip(range(len(comparison.groups)), comparison.loaded(tensors).tolist(), strict=True))
        differing = [
            group
            for number, group in enumerate(comparison.groups)
            if group.is_whole and loaded[number] != published[group.source]
        ]
        slots: list[str] = []
        cause = ""
        if comparison.parts:
            with self._held(taken, comparison.slot_plan, find_paths) as memories:
                slots = comparison.in_slots(memories).differing(published)
                expected = comparison.in_slots(memories).parts()
            numbers = [number for number, group in enumerate(comparison.groups) if not group.is_whole]
            both = zip(numbers, comparison.parts, expected, strict=True)
            differing += [group for number, group, digest in both if loaded[number] != digest]
        if any(group.is_whole for group in differing):
            more, cause = self._differing_sources(taken, differing, published, find_paths)
            slots += more
        constants = _differing_constants(taken.record, tensors)
        if differing or slots or constants:
            raise self._mismatch(taken, differing, list(dict.fromkeys(slots)), constants, cause)

    def _differing_sources(
        self, taken: TakenVersion, groups: Sequence[Group], published: Mapping[str, int], find_paths: FindPaths
    ) -> tuple[list[str], str]:
        """Return those of the tensors of whole groups that differ in the slot too, and a text if that is not known."""
        sources = list(dict.fromkeys(group.source for group in groups if group.is_whole))
        try:
            with self._held(taken, whole_plan(taken.stored, sources), find_paths) as memories:
                return _WholeDigests(taken.stored, sources, memories).differing(published), ""
        except WeightsError:
            return [], " (perhaps in the shared memory too, which has another version by now)"

    @contextlib.contextmanager
    def _held(self, taken: TakenVersion, plan: Plan, find_paths: FindPaths) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the parts of a version that a plan reads, by host. Nobody writes to them within the block."""
        offer = taken.offer
        slots: list[OpenSlot] = []
        memories: dict[str, torch.Tensor] = {}
        try:
            try:
                for part, path in find_paths(plan).items():
                    on_device = taken.stored.on_device
                    slot = self._sources.slot(part, path, offer.ranks[part], in_use=slots, on_device=on_device)
                    slot.hold(offer.number)
                    slots.append(slot)
                    memories[part] = slot.memory()
            except (StaleSlot, FileNotFoundError) as error:
                raise WeightsLostError(
                    f"version {offer.number} of {self._name!r} cannot be verified any more: newer versions have "
                    "replaced it, and parts of tensors and converted elements are compared with its shared memory. "
                    "Verify right after the update, with verify='each', or publish with a larger keep"
                ) from error
            yield memories
            for slot in slots:
                slot.check_present(offer.number)
        finally:
            for slot in slots:
                slot.release()

    def _mismatch(
        self, taken: TakenVersion, groups: Sequence[Group], slots: list[str], constants: Sequence[str], cause: str
    ) -> WeightsMismatchError:
        number, count = taken.offer.number, len(taken.stored.tensors)
        # What differs in the slot differs where it was loaded from there, which is no error of its own.
        loaded = {group.source: group.text for group in groups if group.source not in slots}
        texts = []
        if slots:
            texts.append(f"in shared memory {len(slots)} of {count} tensors: {_first(map(repr, slots))}")
        if loaded:
            texts.append(f"where they were loaded {len(loaded)} of {count} tensors: {_first(loaded.values())}{cause}")
        if constants:
            texts.append(f"padding of {listed(constants)}")
        remedy = "Publish again, and update" if slots else "Update again, which loads the version anew"
        return WeightsMismatchError(
            f"version {number} of {self._name!r} is not what was published, {'; '.join(texts)}. {remedy}",
            version=number,
            loaded=list(loaded),
            slots=slots,
        )

    def forget(self) -> None:
        """Close the slots, and forget what was prepared for them."""
        self._comparison = None
        self._sources.forget()


def _first(texts: Any) -> str:
    """Return the first texts, and the number of the others."""
    known = list(texts)
    more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
    return ", ".join(known[:MOST_NAMES]) + more
