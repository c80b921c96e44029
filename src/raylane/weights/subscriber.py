"""`weights.Subscriber`: takes whole versions into the tensors of a reader of any layout."""

from __future__ import annotations

import asyncio
import enum
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
import torch
from torch.nn import Module

from raylane.core.deadline import Deadline
from raylane.errors import WeightsError, WeightsInvalidError, WeightsLostError, WeightsTimeoutError
from raylane.transport.link.endpoint import endpoint
from raylane.weights.catalogue import GenerationKey, VersionOffer
from raylane.weights.client import CatalogueClient
from raylane.weights.devices import PreparedCopy
from raylane.weights.plan import Plan, make_plans
from raylane.weights.readers import key_of_reader
from raylane.weights.slots import POLL_S, OpenSlot, StaleSlot
from raylane.weights.sources import Sources
from raylane.weights.tensors import (
    NamedTensors,
    Places,
    flat,
    layout_of,
    local,
    new_memory_like,
    refuse_training,
    target_regions,
)

APPLY = ("copy", "swap", "map")
MOST_COPIES = 8
"""Number of copies that are kept prepared: one for each version that `keep` permits."""


class ReaderState(enum.Enum):
    """State of a reader's tensors."""

    INITIAL = "initial"
    """As the reader made them."""
    VALID = "valid"
    """One whole version."""
    INVALID = "invalid"
    """Parts of two versions: an update broke off while it wrote."""


@dataclass(frozen=True)
class Update:
    """Result of an update."""

    version: int
    step: int
    changed: bool
    """False if the reader had this version already."""
    nbytes: int
    """Bytes that were copied."""
    seconds: float


class _HeldVersion(NamedTuple):
    """A version that cannot be overwritten."""

    offer: VersionOffer
    paths: dict[str, str]
    """Slot of each part."""
    slots: list[OpenSlot]


def _release(slots: list[OpenSlot]) -> None:
    for slot in slots:
        slot.release()


class Subscriber:
    """Reader of the weights of a name. Its calls exclude each other; update between two calls of the model.

    Attributes:
        version: Number of the version in the reader's tensors; 0 before the first update.
        state: `ReaderState` of the tensors.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        *,
        apply: str = "copy",
        subset: bool = False,
        places: Places = None,
        detached: bool = False,
        timeout: float | None = None,
    ) -> None:
        """Register this reader. Does not wait for a version: the name may be published later.

        Args:
            name: Name of the weights.
            model: A module, or a dict of tensors by name, of any layout; floating-point tensors are converted to the
                dtype that they have here.
            apply: `copy` writes into the tensors. `swap` writes into new memory and exchanges the memory of the
                tensors at the end, so that an update that fails leaves the old version. `map` lets the tensors lie in
                the shared memory of the version, without a copy: for inference; of each tensor the whole region must be
                stored in one piece, with the dtype that it has here.
            subset: True if the model has only some of the published tensors, as a stage of a pipeline.
            places: As for `Publisher`.
            detached: As for `Publisher`.
            timeout: Seconds; None means RAYLANE_TIMEOUT_S (60 s).
        """
        if apply not in APPLY:
            raise ValueError(f"apply must be one of {', '.join(APPLY)}, got {apply!r}")
        self.name, self.apply, self._subset = name, apply, subset
        self.version = 0
        self.state = ReaderState.INITIAL
        self._tensors = NamedTensors(model)
        self._layout = layout_of(self._tensors.distinct(), places, None)
        self._catalogue = CatalogueClient(detached=detached)
        self._host = ray.get_runtime_context().get_node_id()
        self._key = key_of_reader(name, self._host, self)
        self._plan: Plan | None = None
        self._generation: GenerationKey | None = None
        self._chunks: dict[str, list[int]] = {}
        """Chunks that the plan needs of each part of another host."""
        self._sources = Sources(private=apply == "map")
        self._copies: dict[tuple[str, ...], PreparedCopy] = {}
        """Copies from the slots of these paths into the tensors, as long as these lie in `_memory`."""
        self._memory: tuple[list[Any], ...] = ()
        self._lock = threading.RLock()  # held during an update
        self._prefetched: _HeldVersion | None = None
        self._mapped: list[OpenSlot] = []
        """Slots in which the tensors lie; this reader holds them."""
        self._join(Deadline.of_call(timeout))
        self._leave = weakref.finalize(self, self._catalogue.tell, "leave", self._key)
        if apply == "map" and isinstance(model, Module):
            refuse_training(model)

    @property
    def plan(self) -> Plan:
        """Plan of this reader: what it reads from whom. Known when all ranks of a trainer have registered."""
        with self._lock:
            if self._plan is None:
                self._learn(self._offer(1, Deadline.of_call(None)))
            assert self._plan is not None
            return self._plan

    def newest(self) -> int | None:
        """Return the number of the newest version; None if there is none."""
        number: int | None = self._catalogue.call("newest", self.name, deadline=Deadline.of_call(None))
        return number

    def update(self, *, timeout: float | None = None) -> Update:
        """Take the newest version; wait for the first one if there is none yet. Returns what was done.

        Raises:
            WeightsTimeoutError: There is no version, or the ranks write faster than this reader reads.
            WeightsLayoutError: The tensors do not fit; nothing was written.
            WeightsLostError: The name is unknown, or its memory is gone; the reader keeps what it has.
        """
        return self.wait_for(1, timeout=timeout)

    def wait_for(self, version: int, *, timeout: float | None = None) -> Update:
        """Wait until a version from this number on is there, and take the newest. Errors as those of `update`."""
        deadline, began_ns = Deadline.of_call(timeout), time.perf_counter_ns()
        with self._lock:
            held = self._prefetched
            if held is None or held.offer.number < version:
                held = self._hold(version, deadline)
                self._let_go(held)
            self._prefetched, nbytes = None, 0
            number, step = held.offer.number, held.offer.step
            changed = number != self.version or self.state is not ReaderState.VALID
            if changed:
                nbytes = self._apply(held)
                self.version, self.state = number, ReaderState.VALID
                self._catalogue.tell("applied", self._key, number)
                endpoint().recorder.moved_weights("take weights", self.name, number, began_ns, nbytes)
        return Update(number, step, changed, nbytes, (time.perf_counter_ns() - began_ns) / 1e9)

    def prefetch(self, version: int = 1, *, timeout: float | None = None) -> int:
        """Wait until a version from this number on is there; bring the newest to this host, and return its number.

        The tensors are not touched, so a model may compute meanwhile. The next `update` takes this version at once.
        Until then it cannot be overwritten, which may make the trainer wait. Errors as those of `update`.
        """
        deadline = Deadline.of_call(timeout)
        with self._lock:
            held = self._hold(version, deadline)
            self._let_go(held)
            self._prefetched = held if held.slots else None
            return held.offer.number

    async def update_async(self, *, timeout: float | None = None) -> Update:
        """Do the same as `update` on a thread, without blocking the event loop.

        The tensors are written meanwhile: await this between two calls of the model.
        """
        return await asyncio.to_thread(self.update, timeout=timeout)

    def check(self) -> None:
        """Raise WeightsInvalidError if the tensors hold no whole version. A generation loop calls this."""
        if self.state is ReaderState.INVALID:
            raise WeightsInvalidError(
                f"an update of {self.name!r} broke off while it wrote: the tensors hold parts of two versions. Update "
                "again before the model is used"
            )

    def close(self) -> None:
        """Leave. The tensors stay as they are; but the memory of mapped ones may then be written by ranks."""
        self._leave()
        self._sources.close()
        self._copies.clear()
        self._prefetched = None
        self._mapped.clear()

    # Parts of the above

    def _join(self, deadline: Deadline) -> None:
        self._catalogue.call("join", self._key, deadline=deadline)

    def _offer(self, at_least: int, deadline: Deadline) -> VersionOffer:
        def ask() -> VersionOffer:
            arguments = self._key, self.version, at_least, self._generation, deadline.left_s()
            offer: VersionOffer = self._catalogue.call("offer", *arguments, deadline=deadline)
            return offer

        try:
            return ask()
        except WeightsLostError:  # a new catalogue: the name comes back with its publishers
            self._join(deadline)
            self._generation = None
            return ask()

    def _learn(self, offer: VersionOffer) -> None:
        """Make the plan for the layout of an offer, if it is a new one."""
        if offer.stored is None:
            return
        (self._plan,) = make_plans(offer.stored, [self._layout], subset=self._subset)
        self._chunks.clear()
        self._sources.forget_views()
        self._copies.clear()
        self._generation = offer.generation

    def _hold(self, version: int, deadline: Deadline) -> _HeldVersion:
        """Wait for a version from this number on; hold the newest in slots of this host (none if it is in use)."""
        while True:
            offer = self._offer(version, deadline)
            self._learn(offer)
            if offer.number == self.version and self.state is ReaderState.VALID:
                return _HeldVersion(offer, {}, [])
            slots: list[OpenSlot] = []
            try:
                paths = self._paths(offer, deadline)
                for part, path in paths.items():
                    slot = self._sources.slot(part, path, offer.ranks[part])
                    slot.hold(offer.number)
                    slots.append(slot)
                return _HeldVersion(offer, paths, slots)
            except (StaleSlot, FileNotFoundError):
                # The version was replaced, or its keeper has died, since the offer was made.
                _release(slots)
                if deadline.left_s() == 0:
                    raise WeightsTimeoutError(
                        f"version {offer.number} of {self.name!r} was replaced while it was read, again and again for "
                        f"{deadline.timeout_s} s. Publish less often, or with a larger keep"
                    ) from None
                time.sleep(POLL_S)
            except BaseException:
                _release(slots)
                raise

    def _let_go(self, held: _HeldVersion) -> None:
        """Release the version that was prefetched, except for slots of the version that is held in its place."""
        if self._prefetched is not None:
            _release([slot for slot in self._prefetched.slots if slot not in held.slots])

    def _apply(self, held: _HeldVersion) -> int:
        """Bring a version into the tensors; release it unless they are mapped. Return the bytes that were copied."""
        assert self._plan is not None
        try:
            if self.apply != "map":
                self._copy(held.paths)
                return self._plan.nbytes
            self._map(self._sources.pieces(self._plan, held.paths))
            self._mapped, held = held.slots, held._replace(slots=self._mapped)
            return 0
        finally:
            _release(held.slots)

    def _paths(self, offer: VersionOffer, deadline: Deadline) -> dict[str, str]:
        """Return the slot on this host of each part that the plan reads. Parts of other hosts are copied to this one.

        StaleSlot if the version was replaced meanwhile.
        """
        assert self._plan is not None
        needed = self._plan.bytes_by_host
        paths = {self._host: offer.path} if offer.path is not None and self._host in needed else {}
        wanted = {}
        for part in needed:
            if part not in paths:
                if part not in self._chunks:
                    self._chunks[part] = self._plan.chunks(part)
                wanted[part] = self._chunks[part]
        if wanted:
            arguments = self.name, offer.number, self._host, wanted, deadline.left_s()
            copied = self._catalogue.call("copy", *arguments, deadline=deadline)
            if copied is None:
                raise StaleSlot
            paths |= copied
        return paths

    def _copy(self, paths: dict[str, str]) -> None:
        """Write the version in these slots into the tensors, or into new memory that they get at the end."""
        assert self._plan is not None
        memory, key = self._tensors.memory(), tuple(paths.values())
        if memory != self._memory or len(self._copies) > MOST_COPIES:
            self._copies.clear()
            self._tensors.check()
            self._memory = memory
        if key not in self._copies:
            tensors = self._tensors.distinct()
            if self.apply == "swap" or any(tensor.is_meta for tensor in tensors.values()):
                self._exchange(paths, tensors)
                return
            self._copies[key] = self._prepare(paths, tensors)
        self.state = ReaderState.INVALID  # until the caller notes that all was written
        self._copies[key].run(self._tensors.distinct)

    def _exchange(self, paths: dict[str, str], tensors: dict[str, torch.Tensor]) -> None:
        """Write the version in these slots into new memory, which the tensors get at the end."""
        outputs = {name: new_memory_like(local(tensor), endpoint().pool.take) for name, tensor in tensors.items()}
        self._prepare(paths, outputs).run(lambda: outputs)
        for name, output in outputs.items():
            self._tensors.set_memory(name, output)

    def _prepare(self, paths: dict[str, str], tensors: dict[str, torch.Tensor]) -> PreparedCopy:
        assert self._plan is not None
        pieces = flat(self._sources.pieces(self._plan, paths))
        return PreparedCopy(target_regions(self._plan), tensors, pieces, to_slot=False)

    def _map(self, pieces: list[list[torch.Tensor]]) -> None:
        """Let the tensors lie in the memory of a version."""
        assert self._plan is not None
        views = {}
        tensors = self._tensors.distinct()
        for name, stored in zip((each.name for each in self._plan.pieces), pieces, strict=True):
            target, view = local(tensors[name]), stored[0]
            if target.is_cuda:
                raise WeightsError(f"{name!r} is on {target.device}, where nothing can be mapped. Use apply='copy'")
            if len(stored) > 1 or view.dtype != target.dtype or view.shape != target.shape:
                raise WeightsError(
                    f"{name!r} cannot be mapped: it is stored in {len(stored)} pieces as {view.dtype}, and the reader "
                    f"has {target.dtype}. Use apply='copy', or the publisher's layout and dtype"
                )
            views[name] = view
        for name, view in views.items():
            self._tensors.set_memory(name, view)
