"""`weights.Subscriber`: takes whole versions into the tensors of a reader of any layout."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch.nn import Module

from raylane.core.deadline import Cancelled, Deadline
from raylane.core.memory.windows import StagedFile
from raylane.errors import WeightsError, WeightsLostError, WeightsMismatchError, WeightsTimeoutError
from raylane.transport.link.endpoint import endpoint
from raylane.weights.held import HeldVersion
from raylane.weights.layout.mapping import Mapping, layout_of_record
from raylane.weights.layout.plan import Plan, make_plans
from raylane.weights.layout.recording import Record
from raylane.weights.memory.buckets import check_host, check_reader, device_of
from raylane.weights.memory.devices import PreparedCopy
from raylane.weights.memory.slots import POLL_S, OpenSlot, StaleSlot
from raylane.weights.memory.sources import MappedParts, Sources, views_to_map
from raylane.weights.memory.tensors import (
    NamedTensors,
    Places,
    Regions,
    inner_of,
    layout_of,
    mapped_regions,
    refuse_training,
    target_regions,
)
from raylane.weights.service.answers import GenerationKey, VersionOffer
from raylane.weights.service.client import CatalogueClient, cancellable, locked
from raylane.weights.state.contents import ReaderState, check_state
from raylane.weights.state.options import check_name, whole_number
from raylane.weights.state.readers import NO_VERSION, ReaderKey, VersionKey, key_of_reader
from raylane.weights.verification import TakenVersion, Verification

APPLY = ("copy", "swap", "map")
MOST_COPIES = 8
"""Number of copies that are kept prepared: one for each version that `keep` permits."""


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


class Subscriber:
    """Reader of the weights of a name. Its calls exclude each other; update between two calls of the model.

    Attributes:
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
        mapping: Mapping | None = None,
        verify: str | int | None = None,
        detached: bool = False,
        job: str | None = None,
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
            mapping: For a model of other names or shapes than those published: how its tensors are made of these.
                Carried out here if there is a version already, else with the first one.
            verify: Updates that verify what they load, as `verify` does: `each`, the `first` one, or a number: every
                so many versions. None: none. The versions must be published with `digests=True`.
            detached: As for `Publisher`.
            job: Ray job (hexadecimal id) that the weights belong to; None: that of this process.
            timeout: Seconds; None means RAYLANE_TIMEOUT_S (60 s).
        """
        check_name(name)
        if apply not in APPLY:
            raise ValueError(f"apply must be one of {', '.join(APPLY)}, got {apply!r}")
        self.name, self.apply, self._subset = name, apply, subset
        self._taken: TakenVersion | None = None
        """Version in the tensors; None before the first update."""
        self._version = NO_VERSION
        self.state = ReaderState.INITIAL
        self._tensors = model if isinstance(model, NamedTensors) else NamedTensors(model)
        device = device_of(self._tensors.values())
        self._verification = Verification(name, verify, device)
        if mapping is not None and places is not None:
            raise ValueError("a mapping says itself what goes where: pass either `mapping` or `places`")
        self._mapping = mapping
        self._record: Record | None = None
        """Record of the mapping; None until the layout of the trainer is known, or without a mapping."""
        self._regions: Regions = ()
        """Regions of the tensors into which the pieces of the plan go."""
        self._layout = layout_of(self._tensors.distinct(), places) if mapping is None else {}
        self._catalogue = CatalogueClient(detached=detached, job=job)
        self._key = key_of_reader(name, ray.get_runtime_context().get_node_id())
        self._turn = 0
        """Number of updates that the catalogue was told of."""
        self._plan: Plan | None = None
        self._generation: GenerationKey | None = None
        self._sources = Sources(device)
        self._windows = MappedParts()
        self._placed: list[torch.Tensor] | None = None
        """Pieces of the windows in which the tensors lie."""
        self._memory: tuple[list[Any], ...] = ()
        """Memory for which the copies of `_sources` are prepared."""
        self._taken_memory: tuple[list[Any], ...] = ()
        """Memory in which the tensors lay after the last update."""
        self._lock = threading.RLock()  # held during an update
        self._closed = False
        self._prefetched: HeldVersion | None = None
        self._mapped: list[OpenSlot] = []
        """Slots in which the tensors lie; this reader holds them."""
        self._join(Deadline.of_call(timeout))
        self._leave = weakref.finalize(self, self._catalogue.tell, "leave", self._key)
        if mapping is not None and self.newest() is not None:
            self._learn(self._offer(1, Deadline.of_call(timeout)))
        if apply == "map" and isinstance(model, Module):
            refuse_training(model)

    @property
    def version(self) -> int:
        """Number of the version in the reader's tensors; 0 before the first update."""
        return self._version.number

    @property
    def plan(self) -> Plan:
        """Plan of this reader: what it reads from whom. Known when all ranks of a trainer have registered."""
        deadline = Deadline.of_call(None)
        with self._calling(deadline, "planned"):
            if self._plan is None:
                self._learn(self._offer(1, deadline))
            assert self._plan is not None
            return self._plan

    def newest(self) -> int | None:
        """Return the number of the newest version; None if there is none."""
        number: int | None = self._catalogue.call("newest", self.name, deadline=Deadline.of_call(None))
        return number

    def update(self, *, version: int | None = None, timeout: float | None = None) -> Update:
        """Take the newest version, or the `version` of this number; wait for it if it is not there yet.

        Raises:
            WeightsTimeoutError: There is no such version yet, or the ranks write faster than this reader reads.
            WeightsVersionError: The version of this number is gone; the message says which are there.
            WeightsLayoutError: The tensors do not fit; nothing was written.
            WeightsLostError: The name is unknown, or its memory is gone; the reader keeps what it has.
        """
        return self.wait_for(1 if version is None else version, exact=version is not None, timeout=timeout)

    def wait_for(self, version: int, *, exact: bool = False, timeout: float | None = None) -> Update:
        """Wait until a version from this number on is there, and take the newest, which may be a later one.

        With `exact`, take the version of this number, also where there are later ones. Errors as those of `update`.
        """
        return self.take(version, Deadline.of_call(timeout), exact=exact)

    def take(self, version: int, deadline: Deadline, *, exact: bool = False) -> Update:
        """Do the same as `wait_for` within a deadline. Nothing is written after its cancellation."""
        whole_number("version", version, 1 if exact else 0)
        began_ns = time.perf_counter_ns()
        with self._calling(deadline, "updated"):
            self._look_at_tensors()
            held = self._prefetched
            other = held is None or (held.offer.number != version if exact else held.offer.number < version)
            if held is None or other or held.is_gone():
                held = self._hold(version, exact, deadline)
                self._note_prefetched(held)
            self._prefetched, nbytes = None, 0
            number, step = held.offer.number, held.offer.step
            changed = not self._has(held.offer)
            if changed:
                try:
                    with deadline.writing():
                        nbytes = self._apply(held, deadline)
                        self._version, self.state = held.offer.key, ReaderState.VALID
                except Cancelled:
                    self._release(held.slots)
                    raise
                self._turn += 1
                self._catalogue.tell("applied", self._key, self._version, self._turn)
                endpoint().recorder.moved_weights("take weights", self.name, number, began_ns, nbytes)
        return Update(number, step, changed, nbytes, (time.perf_counter_ns() - began_ns) / 1e9)

    def prefetch(self, version: int = 1, *, exact: bool = False, timeout: float | None = None) -> int:
        """Wait until a version from this number on is there; bring the newest to this host, and return its number.

        With `exact`, bring the version of this number. The tensors are not touched, so a model may compute meanwhile.
        The next `update` takes this version at once. Until then it cannot be overwritten, which may make the trainer
        wait; with `swap` it is copied into new memory here already, and `update` only exchanges the memory. Errors as
        those of `update`.
        """
        return self.fetch(version, Deadline.of_call(timeout), exact=exact)

    def fetch(self, version: int, deadline: Deadline, *, exact: bool = False) -> int:
        """Do the same as `prefetch` within a deadline."""
        whole_number("version", version, 1 if exact else 0)
        with self._calling(deadline, "prefetched"):
            self._look_at_tensors()
            held = self._prefetched
            if exact and held is not None and held.offer.number == version and not held.is_gone():
                return version
            held = self._hold(version, exact, deadline)
            if deadline.cancellation is not None and deadline.cancellation.cancelled:
                self._release(held.slots)
                raise Cancelled
            if held.slots and self.apply == "map":
                try:
                    held = held._replace(staged=self._stage(held))
                except BaseException:
                    self._release(held.slots)
                    raise
            if held.slots and self.apply == "swap":
                self._prefetched = None  # its memory is free before more is taken
                try:
                    held = held._replace(slots=[], prepared=self._new_memory(held, deadline))
                finally:
                    self._release(held.read)
            self._note_prefetched(held if held.slots or held.prepared is not None else None)
            return held.offer.number

    async def update_async(self, *, timeout: float | None = None) -> Update:
        """Do the same as `update` on a thread, without blocking the event loop.

        The tensors are written meanwhile: await this between two calls of the model.
        """
        return await cancellable(lambda deadline: self.take(1, deadline), timeout)

    @property
    def pending(self) -> VersionKey | None:
        """Version that was prefetched and not taken yet; None if there is none."""
        held = self._prefetched
        return None if held is None else held.offer.key

    def forget_prefetched(self) -> None:
        """Let go what was prefetched and not taken."""
        with self._calling(Deadline.of_call(None), "changed"):
            self._note_prefetched(None)

    @property
    def key(self) -> ReaderKey:
        """Identity of this reader in the service."""
        return self._key

    @property
    def taken(self) -> VersionKey:
        """Identity of the version in the reader's tensors."""
        return self._version

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def verify(self, *, timeout: float | None = None) -> int:
        """Compare the tensors with the version that they hold, bit by bit; return its number.

        The version must be published with `digests=True`. Tensors that this reader has whole, in the published dtype,
        are compared with the digests alone. Of others, with which a part is loaded or elements are converted, the whole
        tensor in the shared memory is compared with its digest, and what was loaded with the same part there,
        converted in the same way. What nobody has published, as parameters that a mapping leaves alone, is not
        compared. Excludes updates, and waits only where other hosts have parts of such tensors.

        Raises:
            WeightsMismatchError: Tensors differ; `check` raises until an update has succeeded.
            WeightsInvalidError: The tensors hold no whole version.
            WeightsLostError: Newer versions have replaced this one, whose shared memory is needed.
            WeightsError: The version has no digests; or the engine has packed what was loaded.
            WeightsLayoutError: The tensors are not those that were loaded any more.
        """
        deadline = Deadline.of_call(timeout)
        with self._calling(deadline, "verified"):
            if self.state is not ReaderState.MISMATCH:
                self.check()
            if not self._tensors.keep_values:
                raise WeightsError(
                    f"{self.name!r} cannot be verified after the update: the engine has packed what was loaded. Pass "
                    "verify='each', which verifies before that"
                )
            assert self._taken is not None
            self._look_at_tensors()
            self._tensors.check(meta=False)
            self._verify(self._taken, self._tensors.distinct(), {}, deadline)
            self.state = ReaderState.VALID
            return self._taken.offer.number

    def check(self, *, initial: str = "refuse") -> None:
        """Raise WeightsInvalidError if the tensors hold no whole version. A generation loop calls this.

        `initial` is what it does before the first update: `refuse` raises, `allow` accepts the reader's own weights.
        """
        check_state(self.name, self.state, initial)

    def invalidate(self) -> None:
        """Note that the tensors lost their values, as in a sleep that drops memory: the next update loads all again."""
        with self._calling(Deadline.of_call(None), "invalidated"):
            self.state = ReaderState.INVALID
            self._sources.copies.clear()

    def reload(self, *, timeout: float | None = None) -> Update:
        """Load the version that the tensors have again, whatever they hold by now.

        WeightsVersionError if it is gone: `update` takes another one. Other errors as those of `update`.
        """
        self.invalidate()
        return self.update(version=max(self.version, 1), timeout=timeout)

    def close(self) -> None:
        """Leave, after a call under way. Later updates raise WeightsError; a second call does nothing.

        The tensors stay as they are; but the memory of mapped ones may then be written by ranks.
        """
        with locked(self._lock, Deadline.of_call(None), f"the reader of {self.name!r} cannot be closed"):
            self._closed = True
            self._leave()
            self._sources.forget()
            self._verification.forget()
            self._windows.forget()
            self._prefetched = None
            self._mapped.clear()

    # Parts of the above

    @contextlib.contextmanager
    def _calling(self, deadline: Deadline, done: str) -> Iterator[None]:
        """Exclude other calls; WeightsError if the reader is closed."""
        with locked(self._lock, deadline, f"{self.name!r} cannot be {done}"):
            if deadline.cancellation is not None and deadline.cancellation.cancelled:
                raise Cancelled
            if self._closed:
                raise WeightsError(f"the reader of {self.name!r} was closed. Make a new Subscriber")
            yield

    def _look_at_tensors(self) -> None:
        """Find the tensors anew. WeightsLayoutError if they are not those of this reader any more."""
        self._tensors.refresh()
        self._tensors.check_unmerged()
        if self._version == NO_VERSION and self.apply != "copy":  # later they lie in memory of this reader
            self._tensors.check_exchangeable()

    def _join(self, deadline: Deadline) -> None:
        self._catalogue.call("join", self._key, deadline=deadline)

    def _offer(self, version: int, deadline: Deadline, *, exact: bool = False) -> VersionOffer:
        def ask() -> VersionOffer:
            arguments = self._key, self._version, version, exact, self._generation, deadline.left_s()
            offer: VersionOffer = self._catalogue.call("offer", *arguments, deadline=deadline)
            return offer

        try:
            return ask()
        except WeightsLostError:  # dropped, or a new catalogue: the name comes back with its publishers
            self._join(deadline)
            self._generation = None
            return ask()

    def _learn(self, offer: VersionOffer) -> None:
        """Make the plan for the layout of an offer, if it is a new one."""
        if offer.stored is None:
            return
        self._note_prefetched(None)  # it would be taken with the new plan
        if offer.stored.on_device:
            check_reader(self.name, self.apply)
        self._tensors.learn(offer.stored)
        if self._mapping is None:
            (self._plan,) = make_plans(offer.stored, [self._layout], subset=self._subset)
            self._regions = target_regions(self._plan)
        else:
            record = self._mapping.recorded(offer.stored, self._tensors.distinct(), subset=self._subset)
            (self._plan,) = make_plans(offer.stored, [layout_of_record(record, offer.stored)], subset=True)
            self._record, self._regions = record, mapped_regions(self._plan, record)
        self._sources.forget(in_use=self._in_use())
        self._verification.forget()
        self._windows.forget()
        self._generation = offer.generation

    def _has(self, offer: VersionOffer) -> bool:
        """Return True if the tensors hold the version of an offer."""
        valid = offer.key == self._version and self.state is ReaderState.VALID
        return valid and self._tensors.memory() == self._taken_memory  # else tensors were replaced

    def _hold(self, version: int, exact: bool, deadline: Deadline) -> HeldVersion:
        """Wait for this version, or the newest from it on; hold it in slots of this host (none if it is in use)."""
        if self._prefetched is not None and self._prefetched.is_gone():
            self._note_prefetched(None)
        while True:
            offer = self._offer(version, deadline, exact=exact)
            self._learn(offer)
            if self._has(offer):
                return HeldVersion(offer, {}, [])
            if self._is_verified_next():
                self._verification.check_offer(offer)
            slots: list[OpenSlot] = []
            try:
                plan, *_ = plans = self._read_plans(offer)
                paths = self._paths(offer, plans, deadline)
                for part, path in paths.items():
                    in_use, on_device = [*self._in_use(), *slots], plan.stored.on_device
                    slot = self._sources.slot(part, path, offer.ranks[part], in_use=in_use, on_device=on_device)
                    slot.hold(offer.number)
                    slots.append(slot)
                return HeldVersion(offer, paths, slots, tuple(slots))
            except (StaleSlot, FileNotFoundError):
                # The version was replaced, or its keeper has died, since the offer was made.
                self._release(slots)
                if deadline.left_s() == 0:
                    raise WeightsTimeoutError(
                        f"version {offer.number} of {self.name!r} was replaced while it was read, again and again for "
                        f"{deadline.timeout_s} s. Publish less often, or with a larger keep"
                    ) from None
                time.sleep(POLL_S)
            except BaseException:
                self._release(slots)
                raise

    def _in_use(self) -> list[OpenSlot]:
        """Return the slots in which tensors lie, or what was prefetched: nobody may write to them."""
        return [*self._mapped, *(self._prefetched.slots if self._prefetched is not None else ())]

    def _release(self, slots: Sequence[OpenSlot]) -> None:
        """Permit ranks to write to slots, except for those in use."""
        in_use = self._in_use()
        for slot in slots:
            if slot not in in_use:
                slot.release()

    def _note_prefetched(self, held: HeldVersion | None) -> None:
        """Note what is prefetched from now on, and release what was before."""
        before, self._prefetched = self._prefetched, held
        if before is not None:
            self._release(before.slots)

    def _apply(self, held: HeldVersion, deadline: Deadline) -> int:
        """Bring a version into the tensors; release it unless they are mapped. Return the bytes that were copied."""
        assert self._plan is not None
        unused, nbytes = held.slots, self._plan.nbytes
        try:
            if self.apply == "map":
                self._map(held)
                unused, self._mapped, nbytes = self._mapped, held.slots, 0
            elif held.prepared is not None:
                self._tensors.exchange(held.prepared)
                self._taken_memory = self._tensors.memory()
            else:
                self._taken_memory = self._copy(held, deadline)
            self._taken = self._taken_of(held.offer)
            if self.apply != "swap" and self._is_verified_next():
                self._version, self.state = held.offer.key, ReaderState.INVALID
                self._verify(self._taken, self._tensors.distinct(), held.paths, deadline)
            return nbytes
        finally:
            self._release(unused)

    def _taken_of(self, offer: VersionOffer) -> TakenVersion:
        assert self._plan is not None
        return TakenVersion(offer, self._plan, self._regions, self._record)

    def _is_verified_next(self) -> bool:
        """Return True if the version that is taken next is verified."""
        return self._verification.schedule.is_due(self._turn + 1)

    def _read_plans(self, offer: VersionOffer) -> list[Plan]:
        """Return the plans of what is read of a version that is taken next."""
        taken = self._taken_of(offer)
        verified = self._is_verified_next()
        return [taken.plan, *([self._verification.slot_plan(taken, self._tensors.distinct())] if verified else [])]

    def _verify(
        self, taken: TakenVersion, tensors: dict[str, torch.Tensor], paths: dict[str, str], deadline: Deadline
    ) -> None:
        """Compare tensors with a version, whose slots have these paths if they are held already."""

        def find_paths(plan: Plan) -> dict[str, str]:
            if paths:
                return {part: paths[part] for part in plan.bytes_by_part}
            return self._paths(taken.offer, [plan], deadline)

        try:
            self._verification.verify(taken, tensors, find_paths)
        except WeightsMismatchError:
            self.state = ReaderState.MISMATCH
            raise

    def _paths(self, offer: VersionOffer, plans: Sequence[Plan], deadline: Deadline) -> dict[str, str]:
        """Return the slot on this host of each part that plans read. Parts of other hosts are copied to this one.

        StaleSlot if the version was replaced meanwhile.
        """
        needed = dict.fromkeys(part for plan in plans for part in plan.bytes_by_part)
        paths = {part: path for part, path in offer.paths.items() if part in needed}
        chunks_by_part = {
            part: sorted({chunk for plan in plans for chunk in plan.chunks(part)})
            for part in needed
            if part not in paths
        }
        if chunks_by_part:
            check_host(self.name, chunks_by_part, self._key.host)
            arguments = self.name, offer.number, self._key.host, chunks_by_part, deadline.left_s()
            copied = self._catalogue.call("copy", *arguments, deadline=deadline)
            if copied is None:
                raise StaleSlot
            paths |= copied
        return paths

    def _copy(self, held: HeldVersion, deadline: Deadline) -> tuple[list[Any], ...]:
        """Write a version into the tensors, or into new memory that they get at the end.

        Return the memory of the tensors afterwards.
        """
        memory, key = self._tensors.memory(), tuple(held.paths.values())
        copies = self._sources.copies
        if memory != self._memory or len(copies) > MOST_COPIES:
            copies.clear()
            self._tensors.check(meta=True)
            self._memory = memory
        if key not in copies:
            tensors = self._tensors.distinct()
            if self.apply == "swap" or any(tensor.is_meta for tensor in tensors.values()):
                self._tensors.exchange(self._new_memory(held, deadline))
                return self._tensors.memory()
            copies[key] = self._prepare(held.paths, tensors)
        held.check_present()  # before the tensors are touched
        self.state = ReaderState.INVALID  # until the caller notes that all was written
        copies[key].run(self._tensors.distinct)
        held.check_present()
        self._fill_constants(self._tensors.distinct())
        return memory

    def _new_memory(self, held: HeldVersion, deadline: Deadline) -> Any:
        """Write a version into new memory, verify it if it is time; return what the tensors are exchanged for."""
        # Tensors into which a mapping writes nothing keep their memory.
        names = list(self._tensors.distinct()) if self._record is None else self._record.targets()
        outputs = self._tensors.new(names, endpoint().pool.take)
        self._prepare(held.paths, outputs).run(lambda: outputs)
        held.check_present()
        self._fill_constants(outputs)
        if self.apply == "swap" and self._is_verified_next():
            self._verify(self._taken_of(held.offer), outputs, held.paths, deadline)
        return self._tensors.prepare(outputs)

    def _fill_constants(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write what a mapped loader fills with one value, as the padding of a vocabulary."""
        for name, view, value in () if self._record is None else self._record.constants:
            with torch.no_grad():
                view.of(inner_of(tensors[name])).fill_(value)

    def _prepare(self, paths: dict[str, str], tensors: dict[str, torch.Tensor]) -> PreparedCopy:
        assert self._plan is not None
        return PreparedCopy(self._regions, tensors, self._sources.pieces(self._plan, paths), to_slot=False)

    def _stage(self, held: HeldVersion) -> dict[str, StagedFile]:
        """Map the slots that the plan reads for windows; others are only there to be verified."""
        assert self._plan is not None
        return {part: slot.stage() for part, slot in held.by_part().items() if part in self._plan.bytes_by_part}

    def _map(self, held: HeldVersion) -> None:
        """Let the tensors lie in windows that show a version; those that lie there stay where they are."""
        assert self._plan is not None
        staged = self._stage(held) if held.staged is None else held.staged
        pieces = self._windows.pieces(
            self._plan, {part: slot for part, slot in held.by_part().items() if part in staged}
        )
        placed = pieces is self._placed and self._tensors.memory() == self._taken_memory
        views = {} if placed else views_to_map(self._regions, pieces, self._tensors.distinct())
        self.state = ReaderState.INVALID  # until the caller notes that all was shown
        self._windows.show(staged)
        if not placed:
            for name, view in views.items():
                self._tensors.set_memory(name, view)
            self._placed, self._taken_memory = pieces, self._tensors.memory()
