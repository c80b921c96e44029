"""Turns a returned or put value into a ticket, at the moment Ray pickles it.

That late moment is the point: Ray then knows which refs and handles the value contains, a result that is split by
`num_returns` is published piece by piece, and what Ray never pickles is never published. The unpickling side is
`reader.materialize`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pickle
import secrets
from collections.abc import Iterator
from typing import Any, SupportsIndex

import numpy as np
import torch

from raylane import _ray
from raylane.core import vm
from raylane.core.segment import bytes_at, write_segment
from raylane.core.spans import Span
from raylane.errors import TransportError
from raylane.transport import codec
from raylane.transport.endpoint import Endpoint, endpoint
from raylane.transport.guards import digest, footprint, guard_ranges, write_counters
from raylane.transport.options import PublishOptions
from raylane.transport.store import Entry
from raylane.transport.ticket import VERSION, Ticket, checksum, encode

INLINE_BYTES = 96 << 10
"""Up to here the tensors travel inside the ticket."""
REPLY_BYTES = 100_000
"""A ticket and its skeleton together stay below this where tensors travel inside: Ray carries a result in the reply
itself if it takes less than 102,400 bytes (`max_direct_call_object_size`), of which its own framing takes some."""
OUT_OF_BAND_BYTES = 1 << 16
"""Data from this size on is handed to Ray as a buffer of its own, which it does not copy twice."""


class Publication:
    """One call's results, or one put: under which keys its values are kept, and what frees them."""

    __slots__ = ("anchor", "anchored", "carried", "held", "keys", "options")

    def __init__(self, options: PublishOptions, *, anchored: bool, streams: bool = False) -> None:
        self.options = options
        self.anchored = anchored
        """Whether the tickets carry an anchor. A put needs none: the ref that it returns is this process's own."""
        self.carried = streams or options.tensor_transport == "object_store"
        """Whether Ray carries the bytes. A generator's items have no choice: in one of a hundred streamed items Ray
        2.60 loses count of the refs nested in it, and would have us free values that are still referenced."""
        self.held: list[codec.Layout] = []
        """Memory that Ray is about to copy."""
        self.anchor: Any = None
        """One for all results of a call: they are freed with the last of them."""
        self.keys: list[bytes] = []
        """What was published; empty as long as everything went inline."""

    def free_after(self, ref: Any) -> None:
        """Free what is published under this, now and later, when a ref of this process is out of scope everywhere.

        The callback holds the list of keys alone: holding this object it would hold the anchor, for ever."""
        _ray.on_out_of_scope(ref, functools.partial(_free, self.keys))


def _free(keys: list[bytes], _: object = None) -> None:
    if keys:
        endpoint().store.free(keys)


class Returned:
    """Stands for one value until Ray pickles it. With one return Ray pickles it whole; with `num_returns` it asks for
    its length and takes its items one by one, as from the value itself."""

    __slots__ = ("_publication", "_value")

    def __init__(self, value: Any, publication: Publication) -> None:
        self._value = value
        self._publication = publication

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Iterator[Any]:
        return (Returned(item, self._publication) for item in self._value)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return Returned(self._value[index], self._publication)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduce(self._value, self._publication)


def _reduce(value: Any, publication: Publication) -> tuple[Any, ...]:
    from raylane.transport.reader import materialize  # they name each other: a ticket says who redeems it

    skeleton, leaves = codec.encode(value)
    if not leaves:
        return pickle.loads, (_buffer(skeleton),)
    layout = codec.plan(leaves)
    size = sum(block.nbytes for block in layout.blocks)
    here = endpoint()
    options = publication.options
    if size <= INLINE_BYTES and options.tensor_transport in ("auto", "object_store") and not options.snapshot:
        inline = [ctypes.string_at(block.start, block.nbytes) for block in layout.blocks]
        ticket = Ticket(VERSION, options.tensor_transport, options.on_mutation, layout.specs, layout.blocks, inline)
        payload = encode(ticket)
        if len(payload) + len(skeleton) <= REPLY_BYTES:
            here.counts["inline"] += 1
            return materialize, (_buffer(payload), _buffer(skeleton))
    if publication.carried:
        here.counts["carried"] += 1
        publication.held.append(layout)
        ticket = Ticket(VERSION, options.tensor_transport, options.on_mutation, layout.specs, layout.blocks)
        return materialize, (encode(ticket), _buffer(skeleton), None, [_view(block) for block in layout.blocks])
    anchor = _anchor(here, publication) if publication.anchored else None  # first: what it cannot get is not published
    ticket = _publish(here, leaves, layout, publication)
    return materialize, (encode(ticket), _buffer(skeleton), anchor)


def _publish(here: Endpoint, leaves: list[Any], layout: codec.Layout, publication: Publication) -> Ticket:
    options = publication.options
    source = here.source()
    blocks = [bytes_at(block.start, block.nbytes) for block in layout.blocks]
    entry = Entry(key=secrets.token_bytes(16), leaves=[], layout=layout, for_callers=publication.anchored)
    counters = b""
    guards: bytes | None = b""
    if options.snapshot and blocks:
        entry.segment = _write_segment(layout, blocks)
        layout.held.clear()  # the copy is what counts from here on; the producer's memory is its own again
    else:
        entry.leaves = leaves
        entry.copies = frozenset(i for i, leaf in enumerate(leaves) if not _shares(leaf, layout.held[i]))
        shared = [leaf for i, leaf in enumerate(leaves) if i not in entry.copies]
        entry.versions = [(t, t._version) for t in shared if isinstance(t, torch.Tensor) and not t.is_inference()]
        entry.footprints = [footprint(leaf) for leaf in leaves]
        ranges = guard_ranges(shared)
        guards = None if ranges is None else vm.packed(ranges)
        counters = vm.packed(write_counters(tensor for tensor, _ in entry.versions))
        entry.checksum = checksum(blocks) if options.on_mutation == "error" else None
    here.store.publish(entry)
    publication.keys.append(entry.key)
    return Ticket(
        version=VERSION,
        wanted=options.tensor_transport,
        on_mutation=options.on_mutation,
        specs=layout.specs,
        blocks=layout.blocks,
        key=entry.key,
        source=source,
        header_address=entry.header_address,
        nonce=entry.nonce,
        segment=entry.segment,
        counters=counters,
        counted=vm.gather(os.getpid(), counters),
        guards=guards,
        guarded=digest(vm.gather(os.getpid(), guards)) if guards else b"",
        checksum=entry.checksum,
    )


def _write_segment(layout: codec.Layout, blocks: list[memoryview]) -> int:
    """A snapshot's memfd. TransportError if this process has no descriptor or memory for it."""
    try:
        return write_segment(blocks)
    except OSError as error:
        raise TransportError(
            f"could not publish a snapshot of {sum(block.nbytes for block in layout.blocks)} bytes: {error.strerror}. "
            "Free memory or descriptors (ulimit -n) in the publishing process, or publish without snapshot=True"
        ) from error


def _shares(leaf: Any, held: Any) -> bool:
    """Return True if the producer's own memory is published for this leaf, False if a copy of it is."""
    return leaf is held or bool(isinstance(leaf, torch.Tensor) and leaf.data_ptr() == held.data_ptr())


def _view(block: Span) -> pickle.PickleBuffer:
    """A block's bytes, for Ray to copy once, straight into its object store. By way of NumPy: Ray 2.60 crashes on
    unpacking the buffer format that ctypes gives."""
    array: Any = np.frombuffer(bytes_at(block.start, block.nbytes), dtype=np.uint8)
    return pickle.PickleBuffer(array)


def _buffer(data: bytes) -> bytes | pickle.PickleBuffer:
    return pickle.PickleBuffer(data) if len(data) >= OUT_OF_BAND_BYTES else data


def _anchor(here: Endpoint, publication: Publication) -> Any:
    """The ref that is nested in this call's tickets: Ray frees it after the last of them, and then so do we."""
    if publication.anchor is None:
        publication.anchor = here.anchors().take()
        publication.free_after(publication.anchor)
    return publication.anchor
