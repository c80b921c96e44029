"""`weights.Publisher`: one for each rank of a trainer, which copies the rank's own shards into shared memory."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import ray

from raylane.core.deadline import Deadline
from raylane.core.process.place import here
from raylane.errors import WeightsError, WeightsLostError, WeightsTimeoutError
from raylane.transport.link.endpoint import endpoint
from raylane.weights.chunks.delta import DeltaOptions
from raylane.weights.layout.boxes import StoredLayout
from raylane.weights.memory.buckets import OwnBucket, check_driver, device_of
from raylane.weights.memory.devices import Moment, PreparedCopy, lock_pages
from raylane.weights.memory.digests import WrittenDigests
from raylane.weights.memory.slots import OpenSlot, SlotPlace
from raylane.weights.memory.tensors import NamedTensors, Places, PublishedDtype, layout_of, published_dtypes, writes_of
from raylane.weights.service.answers import GenerationKey, WriteOrder
from raylane.weights.service.client import CatalogueClient, locked
from raylane.weights.state.options import MOST_KEEP, check_name, whole_number
from raylane.weights.state.starts import PublisherKey, RankKey, RankRegistration

TRANSPORTS = ("host", "cuda_ipc")


class _WriteSlot(NamedTuple):
    """A slot that is mapped; mapped once, so that its pages stay warm."""

    slot: OpenSlot
    lock_pages_again: Callable[[], None] | None
    """Page-locks the present pages, where CUDA tensors are copied to the host."""


class _Write(NamedTuple):
    """Copy of this rank's tensors to a slot, and its digests."""

    copy: PreparedCopy
    nbytes: int
    digests: WrittenDigests | None
    """Digests of it, if this rank computes them."""


class Publisher:
    """Weights of one rank under a name. Thread-safe: one publication follows the other.

    Every rank of the trainer makes one, and all publish the same steps in the same order. What a rank holds is read off
    its tensors: DTensors say which part of a tensor they are, plain tensors are whole, and `places` names the parts.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        *,
        rank: int = 0,
        world: int = 1,
        dtype: PublishedDtype = None,
        keep: int = 2,
        delta: str = "auto",
        anchor_every: int = 50,
        digests: bool = False,
        places: Places = None,
        detached: bool = False,
        transport: str = "host",
        copies: int = 1,
        max_lag: int | None = None,
        trainer: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Register this rank. Does not wait for the other ranks.

        A rank whose process has ended, or whose publisher was closed, may be started again alone. If the publisher of
        the same rank still lives, this one belongs to another trainer, which replaces that one with all its ranks: they
        get WeightsError at their next `publish`.

        Args:
            name: Name under which readers find the weights.
            model: A module, or a dict of tensors by name. Tied tensors are stored once.
            rank: Number of this rank.
            world: Number of ranks.
            dtype: Floating-point dtype to which floating-point tensors are converted; None: as they are. Or a dict of
                dtypes by regular expression: of those found in the name of a tensor the first counts, None leaves it as
                it is, and so are tensors without one. Dtypes of one byte, such as float8, are accepted in a dict only:
                values are converted without a scale.
            keep: Number of versions in memory, the one being written included; at least 2. Readers that map weights
                use a version until their next update, so give them one more. Versions that are held come on top.
            delta: Copies to other hosts. `auto` sends only the elements that have changed where that is quicker by the
                measured speed of the link, `always` wherever it is less, `never` whole versions. Same for all ranks.
            anchor_every: Every so many versions, one is sent whole. Same for all ranks.
            digests: True to compute a digest of each tensor with each version, with which readers verify what they
                have taken. Computed from the tensors themselves, in the published dtype: converted a second time where
                `dtype` asks for it. Those of CUDA tensors are computed from the copy in the version, so that errors on
                the way to it are not found; with `cuda_ipc` that is copied to the host. Same for all ranks.
            places: For plain tensors that are a part of a whole one: `Part` by name, or a function (name, tensor) that
                returns one or None.
            detached: Keep the versions when this Ray job ends, until `drop`.
            transport: `host` keeps versions in shared memory. `cuda_ipc` keeps them on the CUDA device of each rank, in
                `keep` buckets of the size of its part. Readers of the same host copy from there on the device, with
                `apply="copy"` or `"swap"`. Such versions, also held ones, end with the process of the rank, with
                `close`, and when the ranks or the shapes of their tensors change; RAYLANE_BUDGET_BYTES does not count
                them, and deltas are not used. Same for all ranks.
            copies: Number of hosts that have each part of a version, so that `copies - 1` of them may die: the hosts of
                other ranks copy it after it was published, while the trainer goes on. On fewer hosts, one for each.
                Not with `cuda_ipc`. Same for all ranks.
            max_lag: Readers that are more versions behind than this are named in metrics, and marked by `readers` and
                `raylane weights`; None: none are. The same for all ranks.
            trainer: Text that is the same for all ranks of one start of the trainer, and never used again. It tells two
                trainers apart that register under one name at the same moment.
            timeout: Seconds; None means RAYLANE_TIMEOUT_S (60 s).

        Raises:
            ValueError: An option has a value that is not accepted.
            WeightsError: `cuda_ipc` was asked for in a process without a CUDA device.
            WeightsLayoutError: The ranks do not agree; the last rank to register gets this error.
        """
        check_name(name)
        world = whole_number("world", world, 1)
        if not 0 <= whole_number("rank", rank, 0) < world:
            raise ValueError(f"rank must be from 0 to world - 1 ({world - 1}), got {rank}")
        whole_number("keep", keep, 2, MOST_KEEP, " (one version to read, one to write)")
        whole_number("anchor_every", anchor_every, 1)
        whole_number("copies", copies, 1)
        if max_lag is not None:
            whole_number("max_lag", max_lag, 0)
        options = DeltaOptions(delta, anchor_every)
        options.check()
        if transport not in TRANSPORTS:
            raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
        if transport == "cuda_ipc":
            check_driver(name)
            if copies > 1:
                raise ValueError(
                    f"copies={copies}: versions of transport='cuda_ipc' are not copied. Use transport='host'"
                )
            if detached:
                raise ValueError("detached=True: versions of transport='cuda_ipc' end with the process of their rank")
        self.name = name
        self.rank, self.world, self._max_lag = rank, world, max_lag
        self._tensors = NamedTensors(model)
        tensors = self._tensors.distinct()
        layout = layout_of(tensors, places, published_dtypes(tensors, dtype, whole=world == 1))
        if not layout:
            raise ValueError(f"the model published as {name!r} has no tensors. Pass a module or a dict that has some")
        self._catalogue = CatalogueClient(detached=detached)
        self._stored: StoredLayout | None = None
        self._generation: GenerationKey | None = None
        """Generation of `_stored`."""
        self._life: str | None = None
        """Life of the name in which this rank published last."""
        place = here()
        node = ray.get_runtime_context().get_node_id()
        key = PublisherKey(secrets.token_hex(8), node, place.pid, place.start_ticks)
        self._registration = RankRegistration(
            rank,
            world,
            layout,
            self._tensors.same,
            key,
            keep,
            options,
            bool(digests),
            transport == "cuda_ipc",
            copies,
            trainer,
        )
        """Registration of this rank; the start of the trainer in it stays when the name is dropped."""
        self._device = device_of(tensors.values())
        """Device of the buckets of `cuda_ipc`."""
        self._slots: dict[str, _WriteSlot] = {}
        """Slots of the current generation by path."""
        self._writes: dict[str, _Write] = {}
        """Writes to these slots, by path."""
        self._memory: tuple[list[Any], ...] = ()
        """Memory of the tensors for which the writes are prepared."""
        self._lock = threading.RLock()  # held during a publication
        self._closed = False
        self._starting = threading.Lock()  # guards the next one
        self._executor: ThreadPoolExecutor | None = None
        """Thread of `publish_async`, which the first call starts."""
        deadline = Deadline.of_call(timeout)
        # First: a registration whose answer does not come in time must not keep the place of this rank.
        self._leave = weakref.finalize(self, self._catalogue.tell, "close_publisher", name, key.token)
        self._register(deadline)

    def publish(self, step: int, *, timeout: float | None = None) -> int:
        """Publish the present tensors as the next version; return its number.

        Returns when they are safe: the trainer may write to its tensors, and may die unless they are on its device
        (`transport`). Readers see the version when all
        ranks have published it. Waits until the other ranks have registered and have published the version before, and
        until no reader holds the oldest version.

        Raises:
            WeightsTimeoutError: One of these waits has passed the timeout; the message names the ranks or the reader.
            WeightsLostError: Another rank has given this version up, or the keeper of this host died. Publish again.
            WeightsError: The ranks publish different steps, or this trainer was replaced by another one.
        """
        whole_number("step", step, None)
        return self._publish(step, Deadline.of_call(timeout), Moment(self._tensors.values))

    def _publish(self, step: int, deadline: Deadline, moment: Moment) -> int:
        began_ns = time.perf_counter_ns()
        with locked(self._lock, deadline, f"rank {self.rank} cannot publish step {step} of {self.name!r}"):
            if self._closed:
                raise WeightsError(f"the publisher of {self.name!r} was closed. Make a new one")
            self._look_at_tensors()
            try:
                order = self._begin(step, deadline)
            except WeightsLostError:  # the name was dropped, or a new catalogue does not know it
                self._register(deadline)
                order = self._begin(step, deadline)
            number, place = order.version.number, order.place
            slot, lock_pages_again = self._slot(place, order.paths)
            copy, nbytes, digests = self._write(place.path, slot)
            if not self._begin_writing(slot, place, step, number, deadline) and lock_pages_again is not None:
                lock_pages_again()  # the slot was emptied, perhaps
            written, sums = 0, None
            try:
                copy.run(self._tensors.distinct, moment)
                sums = None if digests is None else digests.run(self._tensors.distinct).tobytes()
                written = number
            finally:
                slot.end_writing(place.number, written)
            self._catalogue.call("done", self.name, order.version, self.rank, sums, deadline=deadline)
            self._life = order.version.life
            endpoint().recorder.moved_weights("publish weights", self.name, number, began_ns, nbytes)
            return number

    def _begin_writing(self, slot: OpenSlot, place: SlotPlace, step: int, number: int, deadline: Deadline) -> int:
        """Lock the slot for this rank; return the version that it had. WeightsTimeoutError names the readers of it."""
        before = slot.numbers()[place.number]
        try:
            waiting = f"rank {self.rank} cannot publish step {step} of {self.name!r}"
            return slot.begin_writing(place.number, deadline, waiting, number)
        except WeightsTimeoutError as error:
            users = self._catalogue.call("users", self.name, before, deadline=Deadline.of_call(None))
            unknown = "none that is known, so perhaps tensors that outlive a reader that had mapped them"
            raise WeightsTimeoutError(f"{error}. Readers that use version {before}: {users or unknown}") from error

    def publish_async(self, step: int, *, timeout: float | None = None) -> Future[int]:
        """Publish on a thread, beside the next step; return a future of what `publish` returns and raises.

        The tensors are read meanwhile: wait for the future before the optimizer writes to them. CUDA tensors are read
        as they are when the work is done that this thread has queued so far.
        """
        whole_number("step", step, None)
        deadline, moment = Deadline.of_call(timeout), Moment(self._tensors.values)
        with self._starting:
            if self._closed:
                raise WeightsError(f"the publisher of {self.name!r} was closed. Make a new one")
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, "raylane-publish")
            return self._executor.submit(self._publish, step, deadline, moment)

    def wait(self, version: int, *, readers: str | int = "all", timeout: float | None = None) -> None:
        """Wait until readers use a version or a later one: `"all"` that hold a lease, or a number of them.

        A reader holds a lease from its first call until it is closed or garbage, or until its process or its host ends;
        if its host cannot be reached, for 20 seconds more.

        WeightsTimeoutError names the readers that do not use the version.
        """
        if readers != "all":
            whole_number('readers (or "all")', readers, 0)
        whole_number("version", version, 1)
        deadline = Deadline.of_call(timeout)
        count = None if isinstance(readers, str) else readers
        arguments = self.name, version, self._life, count, deadline.left_s()
        self._catalogue.call("wait_for_readers", *arguments, deadline=deadline)

    def hold(self, version: int, *, timeout: float | None = None) -> None:
        """Keep a version beyond `keep`, as the best checkpoint or a reference model, until `release` or `drop`.

        Any rank may call it, for all of them; it stays held when the trainer ends. A held version takes memory of its
        own from the next publication on: `RAYLANE_BUDGET_BYTES` counts it.

        WeightsVersionError if the version is not there any more. WeightsError if 64 are kept already.
        """
        self._hold("hold", version, timeout)

    def release(self, version: int, *, timeout: float | None = None) -> None:
        """Let a version go that was held, by whichever rank. Ignores versions that are not held."""
        self._hold("release", version, timeout)

    def _hold(self, method: str, version: int, timeout: float | None) -> None:
        whole_number("version", version, 1)
        self._catalogue.call(method, self.name, version, self._life, "publisher", deadline=Deadline.of_call(timeout))

    def close(self, *, cancel: bool = False) -> None:
        """Close this rank's end, after publications under way. Its versions stay, unless they are on a device.

        With `cancel`, a publication that waits for other ranks ends with WeightsError: one of them has died, perhaps.
        """
        with self._starting:
            self._closed = True
        if cancel:
            self._leave()
        if self._executor is not None:
            self._executor.shutdown()  # its publications have deadlines of their own
        with locked(self._lock, Deadline.of_call(None), f"the publisher of {self.name!r} cannot be closed"):
            self._forget_slots()
            self._leave()

    def _forget_slots(self) -> None:
        for slot, _ in self._slots.values():
            slot.close()
        self._slots.clear()
        self._writes.clear()

    def _begin(self, step: int, deadline: Deadline) -> WriteOrder:
        """Return the version for a step, and where this rank writes it."""
        assert self._registration.start is not None
        key = RankKey(self._registration.start, self.rank, self._registration.publisher.token)
        arguments = self.name, key, self._generation, step, deadline.left_s()
        order: WriteOrder = self._catalogue.call("begin", *arguments, deadline=deadline)
        if order.stored is not None:
            self._forget_slots()
            self._generation, self._stored = order.generation, order.stored
        return order

    def _register(self, deadline: Deadline) -> None:
        start = self._catalogue.call("register", self.name, self._registration, self._max_lag, deadline=deadline)
        self._registration = self._registration._replace(start=start)

    def _look_at_tensors(self) -> None:
        """Find the tensors anew, before a version is begun. WeightsLayoutError if they are others."""
        self._tensors.refresh()
        memory = self._tensors.memory()
        if memory != self._memory:  # the copies have the addresses
            self._tensors.check(meta=False)
            if self._stored is not None and self._stored.on_device:
                self._writes.clear()  # the buckets have the versions
            else:
                self._forget_slots()
            self._memory = memory

    def _slot(self, place: SlotPlace, paths: Collection[str]) -> _WriteSlot:
        """Return a slot; opened once. Close those of a keeper that has died, whose paths are not among these."""
        assert self._stored is not None
        for path in [path for path, (slot, _) in self._slots.items() if path != place.path]:
            if path not in paths or self._slots[path].slot.is_surplus():
                self._slots.pop(path).slot.close()
                self._writes.pop(path, None)
        if place.path not in self._slots:
            tensors = self._tensors.distinct().values()
            if self._stored.on_device:
                nbytes = self._stored.nbytes[self._stored.parts.index(self._registration.part)]
                bucket = OwnBucket(place.path, place.ranks, nbytes, self._device)
                self._slots[place.path] = _WriteSlot(bucket, None)
            else:
                slot = OpenSlot(place.path, place.ranks)
                on_device = any(tensor.is_cuda for tensor in tensors)
                self._slots[place.path] = _WriteSlot(slot, lock_pages(slot.memory(), slot) if on_device else None)
        return self._slots[place.path]

    def _write(self, path: str, slot: OpenSlot) -> _Write:
        """Return what this rank writes to the slot at a path; prepared once, while the tensors stay where they are."""
        assert self._stored is not None
        if path not in self._writes:
            tensors = self._tensors.distinct()
            regions, places = writes_of(self._stored, self.rank, self._registration.layout, slot.memory())
            copy = PreparedCopy(regions, tensors, places, to_slot=True)
            has_digests = self._registration.digests
            digests = WrittenDigests(self._stored, self.rank, regions, tensors, places) if has_digests else None
            self._writes[path] = _Write(copy, sum(each.nbytes for each in places), digests)
        return self._writes[path]
