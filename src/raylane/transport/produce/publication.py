"""Conversion of a returned or put value into a ticket, at the moment when Ray pickles it.

Publishing at pickling time has three effects: Ray counts the refs and handles inside the value; a result that is split
by `num_returns` is published piece by piece; and a value that Ray never pickles is never published. Unpickling a ticket
calls `reader.materialize`.

    method returns ── PublishOnPickle ──> Ray pickles ── reduce ──> small:    ticket with the bytes
                                                                    carried:  ticket + buffers for Ray's object store
                                                                    else:     entry in the store + ticket with its key
"""

from __future__ import annotations

import copy
import ctypes
import functools
import os
import pickle
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch

from raylane import _ray
from raylane.core import settings
from raylane.core.memory import regions
from raylane.core.memory.layout import bytes_at
from raylane.core.memory.sealed import write_segment
from raylane.core.process import vm
from raylane.core.process.gc_pauses import paused
from raylane.errors import TransportError
from raylane.transport.backends.base import AUTO
from raylane.transport.backends.registry import prepare_source
from raylane.transport.hold.device_memory import OnDevice, current_streams
from raylane.transport.hold.store import Entry
from raylane.transport.link.endpoint import Endpoint, endpoint
from raylane.transport.produce.options import PublishOptions
from raylane.transport.read.unpickling import materialize
from raylane.transport.value import codec
from raylane.transport.value.guards import digest, footprint, guard_ranges, write_counters
from raylane.transport.value.layout import Layout
from raylane.transport.value.ticket import VERSION, Ticket, checksum, encode_ticket

INLINE_BYTES = 96 << 10
"""Largest size of all tensors together that travels inside the ticket."""
REPLY_BYTES = 100_000
"""Largest size of an inline ticket with its skeleton.

Ray carries a result in the reply itself if it takes less than 102,400 bytes (`max_direct_call_object_size`), including
Ray's own framing.
"""
MAP_FROM_BYTES = 1 << 18
"""Size of all blocks in memory of `raylane.empty` from which readers map them: smaller ones are copied as fast."""
OUT_OF_BAND_BYTES = 1 << 16
"""Size from which data is passed to Ray as a separate buffer, which Ray copies only once."""


class Publication:
    """The results of one call, or the value of one put: their keys in the store, and the event that frees them."""

    __slots__ = ("anchor", "anchored", "carried", "held", "keys", "options", "origin", "streams")

    def __init__(self, options: PublishOptions, *, anchored: bool, origin: str = "", streams: bool = False) -> None:
        self.options = options
        self.origin = origin
        """Name of the method, or the line that called `put`, for `raylane memory`."""
        self.anchored = anchored
        """True if the tickets carry an anchor. A put needs none, because this process owns the ref it returns."""
        self.carried = streams or options.by_ray
        """True if Ray carries the bytes.

        Ray must carry the items of a generator: in about one of a hundred streamed items Ray 2.60 loses count of the
        nested refs, so this process would free values that are still referenced.
        """
        self.streams = current_streams()
        """Streams of the producer. Ray may pickle the value on another thread, which has streams of its own."""
        self.held: list[Layout] = []
        """Memory that Ray is about to copy."""
        self.anchor: Any = None
        """Ref within the ticket, whose end frees the value."""
        self.keys: list[bytes] = []
        """Keys of the published values; empty as long as every value is inline."""

    def of_item(self) -> Publication:
        """Return the publication of one of several returns of a call, with an anchor of its own.

        Ray 2.60 loses count of a ref that lies in two returns when the first of them is dropped before the call ends.
        """
        item = copy.copy(self)
        item.held, item.anchor, item.keys = [], None, []
        return item

    def free_after(self, ref: Any) -> None:
        """Free the values of this publication, present and future, when a ref of this process is out of scope."""
        # The callback gets the list of keys only. A reference to this object would keep its anchor alive for ever.
        _ray.on_out_of_scope(ref, functools.partial(_free, self.keys))


def _free(keys: list[bytes], _: object = None) -> None:
    if keys:
        endpoint().store.free(keys)


class PublishOnPickle:
    """Stand-in for one value until Ray pickles it.

    For one return Ray pickles the stand-in whole; for `num_returns` Ray asks for its length and takes its items one by
    one, so the stand-in behaves like the value itself.
    """

    __slots__ = ("_publication", "_value")

    def __init__(self, value: Any, publication: Publication) -> None:
        self._value = value
        self._publication = publication

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Iterator[Any]:
        return (PublishOnPickle(item, self._publication.of_item()) for item in self._value)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return PublishOnPickle(self._value[index], self._publication.of_item())

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduce(self._value, self._publication)


def _reduce(value: Any, publication: Publication) -> tuple[Any, ...]:
    """Publish a value, and return the function and arguments by which its reader restores it."""
    skeleton, leaves = codec.encode_value(value)
    if not leaves:  # no tensors: an ordinary pickle, which needs no raylane to unpickle
        return pickle.loads, (_buffer(skeleton),)
    process = endpoint()
    options = publication.options
    with paused(len(leaves)):
        layout = codec.plan_layout(leaves, in_place=not publication.carried and stays_on_device(leaves, options))
    size = sum(block.nbytes for block in layout.blocks)
    small = size <= INLINE_BYTES and not layout.devices
    if small and (options.tensor_transport == AUTO or options.by_ray) and not options.snapshot:
        # A copy, so that later writes of the producer do not reach the ticket before Ray sends it.
        inline = [ctypes.string_at(block.start, block.nbytes) for block in layout.blocks]
        ticket = Ticket(VERSION, options.tensor_transport, options.on_mutation, layout.specs, layout.blocks, inline)
        payload = encode_ticket(ticket)
        if len(payload) + len(skeleton) <= REPLY_BYTES:
            process.counts["inline"] += 1
            return materialize, (_buffer(payload), _buffer(skeleton))
    if publication.carried:
        # Ray copies the buffers after this function returns, so the layout keeps their memory alive until then.
        process.counts["carried"] += 1
        publication.held.append(layout)
        ticket = Ticket(VERSION, options.tensor_transport, options.on_mutation, layout.specs, layout.blocks)
        # As NumPy arrays, because Ray 2.60 crashes when it unpacks a buffer with the format that ctypes gives. Ray
        # copies each buffer once, straight into its object store.
        arrays: list[Any] = [np.frombuffer(bytes_at(b.start, b.nbytes), dtype=np.uint8) for b in layout.blocks]
        buffers = [pickle.PickleBuffer(array) for array in arrays]
        return materialize, (encode_ticket(ticket), _buffer(skeleton), None, buffers)
    if publication.anchored and publication.anchor is None:
        # Take the anchor first: on failure nothing is published.
        publication.anchor = process.anchors().take()
        publication.free_after(publication.anchor)
    ticket = publish_leaves(process, leaves, layout, publication)
    return materialize, (encode_ticket(ticket), _buffer(skeleton), publication.anchor)


def stays_on_device(leaves: Sequence[Any], options: PublishOptions) -> bool:
    """Return True if the CUDA tensors among these leaves are published where they are, and copied when they are read.

    False if their bytes are needed at publication: for a snapshot, a checksum, or to travel in the ticket.
    """
    if options.snapshot or options.on_mutation == "error" or settings.CHECKSUM.read():
        return False
    on_device = any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves)
    return on_device and (options.tensor_transport != AUTO or sum(leaf.nbytes for leaf in leaves) > INLINE_BYTES)


def publish_leaves(process: Endpoint, leaves: list[Any], layout: Layout, publication: Publication) -> Ticket:
    """Put a value into the store and return its ticket; waits for room in the budget of this process."""
    began_ns, nbytes = time.perf_counter_ns(), sum(block.nbytes for block in layout.blocks)
    # Paused when there is room, not while waiting for it.
    with process.budget.room(nbytes, publication.origin), paused(len(leaves)):
        ticket = store_leaves(process, leaves, layout, publication)
    process.recorder.published(publication.origin, nbytes, began_ns)
    return ticket


def store_leaves(process: Endpoint, leaves: list[Any], layout: Layout, publication: Publication) -> Ticket:
    """Put a value into the store and return its ticket; does not wait for the budget."""
    options = publication.options
    prepare_source(process)  # first: a reader may come as soon as the first ticket exists
    source = process.source()
    on_device = None
    if layout.devices:
        try:
            on_device = OnDevice(layout, publication.streams)
        except ValueError:  # memory that torch did not allocate, seen through several storages
            layout = codec.plan_layout(leaves)
    entry = Entry(
        key=secrets.token_bytes(16),
        leaves=[],
        layout=layout,
        on_device=on_device,
        for_callers=publication.anchored,
        origin=publication.origin,
        transport=options.tensor_transport,
    )
    counters = b""
    guards: bytes | None = b""
    if options.snapshot and layout.blocks:
        _write_snapshot(entry)
        if settings.CHECKSUM.read():
            entry.checksum = checksum(view for view, _ in entry.views())
        layout.held.clear()  # readers use the copy only, so the producer's memory need not be kept
    else:
        entry.leaves = leaves
        # A leaf whose layout has other memory was copied (CUDA, sparse views). A copy cannot change, so the checks
        # below cover only the other leaves.
        entry.copies = frozenset(
            i
            for i, (leaf, held) in enumerate(zip(leaves, layout.held, strict=True))
            if leaf is not held and not (isinstance(leaf, torch.Tensor) and leaf.data_ptr() == held.data_ptr())
        )
        shared = [leaf for i, leaf in enumerate(leaves) if i not in entry.copies]
        # Inference tensors have no write counter, and reading it raises.
        entry.versions = [(t, t._version) for t in shared if isinstance(t, torch.Tensor) and not t.is_inference()]
        entry.footprints = [footprint(leaf) for leaf in leaves]
        ranges = guard_ranges(shared)
        guards = None if ranges is None else vm.pack_ranges(ranges)
        counters = vm.pack_ranges(write_counters(tensor for tensor, _ in entry.versions))
        content = (bytes_at(block.start, block.nbytes) for block in layout.blocks)
        entry.checksum = checksum(content) if options.on_mutation == "error" or settings.CHECKSUM.read() else None
    # Publish only after all of the above succeeded, and add the key at once: `free_after` frees the listed keys.
    process.store.publish(entry)
    publication.keys.append(entry.key)
    return Ticket(
        version=VERSION,
        transport=options.tensor_transport,
        on_mutation=options.on_mutation,
        specs=layout.specs,
        blocks=entry.spans(),
        key=entry.key,
        source=source,
        header_address=entry.header_address,
        nonce=entry.nonce,
        segment=entry.segment,
        devices=layout.devices,
        regions=_regions(layout) if entry.segment < 0 else {},
        counters=counters,
        counted=vm.gather(os.getpid(), counters),
        guards=guards,
        guarded=digest(vm.gather(os.getpid(), guards)) if guards else b"",
        checksum=entry.checksum,
        groups=[name for name, transport in process.groups().items() if transport == options.tensor_transport]
        if options.two_sided
        else [],
    )


def _regions(layout: Layout) -> dict[int, tuple[str, int]]:
    """Return the blocks that readers of this host can map, and let them; empty if these are small."""
    regions_by_block = {}
    for number, block in enumerate(layout.blocks):
        region = regions.region_at(block.start)
        if region is not None and block.stop <= region.end:
            regions_by_block[number] = (region, region.offset_of(block.start))
    if sum(layout.blocks[number].nbytes for number in regions_by_block) < MAP_FROM_BYTES:
        return {}
    # Before the ticket exists: from then on a reader may map them.
    for region, _ in regions_by_block.values():
        region.publish()
    return {number: (region.path, offset) for number, (region, offset) in regions_by_block.items()}


def _write_snapshot(entry: Entry) -> None:
    """Copy the blocks of an entry into a memfd. TransportError if this process has no descriptor or memory for it."""
    blocks = entry.layout.blocks
    try:
        entry.segment = write_segment([bytes_at(block.start, block.nbytes) for block in blocks])
        try:
            entry.views()  # maps it, for the readers that read it here
        except OSError:
            os.close(entry.segment)
            raise
    except OSError as error:
        raise TransportError(
            f"could not publish a snapshot of {entry.nbytes} bytes: {error.strerror}. Free memory or descriptors "
            "(ulimit -n) in the publishing process, or publish without snapshot=True"
        ) from error


def _buffer(data: bytes) -> bytes | pickle.PickleBuffer:
    return pickle.PickleBuffer(data) if len(data) >= OUT_OF_BAND_BYTES else data
