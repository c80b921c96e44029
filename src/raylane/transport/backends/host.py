"""host: one-sided reads between processes of one machine; they need no Python code of the source.

A value in ordinary memory is read with process_vm_readv(2) into pooled memory. A snapshot lies in a sealed memfd, which
is mapped copy-on-write through /proc/<pid>/fd: nothing is copied until somebody writes. Memory of `raylane.empty` is
mapped in the same way, and locked against its owner for as long as it is mapped. The second reader of a large
value asks its source for a copy in shared memory, which all further readers map (`core.memory.shared_pool`); a source
that does not answer soon is read as before. Of CUDA tensors every reader asks for that copy.

Order of the reads, with no lock between the two processes:

    source, on free:   clear the nonce in the header slot  ->  release the memory
    reader:            read data  ->  read write counters and guards  ->  read the header, compare its nonce

A nonce that still matches was cleared after all earlier reads, so everything read before belongs to this value.
"""

from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import dataclasses
import errno
import struct
from collections.abc import Sequence
from typing import Any

from raylane.core import settings
from raylane.core.deadline import Deadline
from raylane.core.memory.header_slots import next_count
from raylane.core.memory.layout import address_of, blocks_in, segment_offsets
from raylane.core.memory.mappings import MOST_IDLE, Mappings
from raylane.core.memory.sealed import map_sealed
from raylane.core.memory.shared_pool import map_shared
from raylane.core.process import place, vm
from raylane.core.process.copying import copy_many
from raylane.core.process.gc_pauses import paused
from raylane.core.process.place import Place
from raylane.errors import SourceLostError, TransportError, TransportUnavailableError
from raylane.transport.backends.base import (
    Backend,
    Capability,
    FetchResult,
    Process,
    ProcessPart,
    UnavailableNowError,
)
from raylane.transport.hold.blocks import allocate, take_blocks
from raylane.transport.link import wire
from raylane.transport.value.guards import digest
from raylane.transport.value.parts import Part
from raylane.transport.value.source import Source
from raylane.transport.value.ticket import HEADER_BYTES, Ticket, freed_error, moved_error, receive_error, timeout_error

SHARED = "host, shared copy"
SHARED_WITHIN_S = 1.0
"""Seconds that a reader waits for a shared copy before it makes its own."""
_REMOTE_READ_OFFSET = 12
"""Offset of `remote_read` in a header slot; `HeaderSlots` draws the slot."""


class HostBackend(Backend):
    """One-sided access to the memory of another process on this host."""

    name = "host"
    capability = Capability(
        summary="one-sided reads of the source's memory, or copy-on-write mapping of a snapshot",
        rank=30,
        same_host=True,
        parts=True,
        into=True,
        snapshots=True,
        remedy="nothing if tcp works. For host, run both processes on one host, in one PID namespace and as one user.",
    )

    def refusal(self, source: Source, place: Place) -> str | None:
        """Return why the source's memory cannot be addressed from here: other host, pid namespace or user."""
        there = source.place
        if (refusal := super().refusal(source, place)) is not None:
            return refusal
        if there.pid_namespace != place.pid_namespace:
            return "source and reader are in different pid namespaces (containers); run them with a shared one"
        if there.uid != place.uid and place.uid != 0:
            return f"the source runs as user {there.uid}, this process as {place.uid}"
        return None

    def fetch(self, ticket: Ticket, process: Process, deadline: Deadline) -> FetchResult:
        """Read the blocks out of the source's memory, or map its snapshot."""
        if ticket.segment >= 0:
            return _read(ticket, [], deadline, blocks_of_segment=True)
        if ticket.devices:
            # Twice, because a publication in the source may drop the copy before it is mapped here.
            copied = _ask_for_copy(ticket, process, deadline) or _ask_for_copy(ticket, process, deadline)
            result = _read(ticket, [], deadline)
            if copied is None:
                raise UnavailableNowError(
                    f"{ticket.origin()} could not copy CUDA tensors to shared memory. Free memory of its host, or use "
                    "tensor_transport='tcp'",
                    source=ticket.origin().label,
                )
            return dataclasses.replace(result, blocks=copied)
        if (mapped := _map_regions(ticket, process)) is not None:
            blocks, ranges = mapped
            process.counts["mapped"] += 1
            return dataclasses.replace(_read(ticket, ranges, deadline), blocks=blocks)
        shared, counted = _shared_copy(ticket, process)
        if shared is not None:
            # Checks everything that is checked after a read of the memory itself.
            result, counted = _read(ticket, [], deadline), True
            if not result.mutated:  # otherwise the copy may be older than the tensors
                return dataclasses.replace(result, blocks=shared)
        # Before the read: a lack of memory in this process must not be translated into an error of the source.
        blocks = allocate(ticket, process.pool)
        with paused(len(blocks)):
            ranges = [(b.start, address_of(mine), b.nbytes) for b, mine in zip(ticket.blocks, blocks, strict=True)]
            return dataclasses.replace(_read(ticket, ranges, deadline, count=not counted), blocks=blocks)

    def fetch_parts(self, ticket: Ticket, parts: Sequence[Part], process: Process, deadline: Deadline) -> FetchResult:
        """Read only these parts.

        The first read of a snapshot reads it where the source has mapped it: its pages are in place there, and a new
        mapping here would take a page fault for each of them (64 MiB: 7 ms instead of 16). Further reads map it.
        """
        if ticket.devices:
            return super().fetch_parts(ticket, parts, process, deadline)
        starts = [block.start for block in ticket.blocks]
        with deadline.writing():
            if _copy_from_snapshot(ticket, parts, process, deadline):
                return _read(ticket, [], deadline)
            return _read(ticket, [(starts[p.block] + p.offset, p.address, p.nbytes) for p in parts], deadline)


def _read(
    ticket: Ticket,
    ranges: list[vm.Range],
    deadline: Deadline,
    *,
    blocks_of_segment: bool = False,
    count: bool = True,
) -> FetchResult:
    """Read ranges of the source's memory, or map the blocks of its snapshot; then check that they were valid.

    `count` is False if the source's count of reads contains this one already.
    """
    source = ticket.origin()
    if ticket.guards is None:
        raise TransportUnavailableError(
            f"the memory of {source} cannot be read one-sidedly: its torch or NumPy lays out objects in a way that "
            "this raylane does not know, so a reader could not tell whether memory was freed. Use tcp",
            source=source.label,
        )
    pid, counted, guarded, blocks = source.place.pid, b"", b"", []
    try:
        if blocks_of_segment:
            path, sizes, offsets, total = _snapshot(ticket)
            # The nonce, which is read last, tells whether the descriptor was still that of the snapshot.
            blocks = blocks_in(map_sealed(path, total), offsets, sizes)
        else:
            vm.read(pid, ranges, deadline)
            # Read counters and guards after the data: only then does an unchanged value cover all of the data.
            counted, guarded = vm.gather(pid, ticket.counters), vm.gather(pid, ticket.guards)
        # Read the header last, for the same reason (see the order at the head of this module).
        nonce, creator_read, remote_read = _header(ticket)
    except TimeoutError as error:
        raise timeout_error(ticket, deadline) from error
    except OSError as error:
        raise _translate(error, ticket) from error
    if nonce != ticket.nonce:
        # The pid may have been reused by another process: that process has another nonce here, or none.
        raise freed_error(ticket) if place.alive(source.place) else _lost(source)
    if ticket.guards and digest(guarded) != ticket.guarded:
        raise moved_error(ticket)
    # A system call for each read (7 us), so that `raylane memory` can tell how often a value was read.
    if count:
        _mark_read(ticket, next_count(remote_read))
    return FetchResult(blocks=blocks, mutated=counted != ticket.counted, creator_read=bool(creator_read))


def _header(ticket: Ticket) -> tuple[int, int, int]:
    """Return nonce and counts of reads (by the creator, by others) in the value's slot. OSError if it is unmapped."""
    header = ctypes.create_string_buffer(HEADER_BYTES)
    vm.read(ticket.origin().place.pid, [(ticket.header_address, address_of(header), HEADER_BYTES)])
    nonce, creator, others = struct.unpack("<QII", header.raw)
    return nonce, creator, others


def _shared_copy(ticket: Ticket, process: Process) -> tuple[list[Any] | None, bool]:
    """Return the blocks of a large value from the copy that all further readers of this host share.

    None for the first reader, and if there is no such copy; the reader then makes its own. The second result is True
    if this read has been counted.
    """
    least, source = settings.SHARE_FROM_BYTES.read(), ticket.origin()
    if least is None or ticket.nbytes < least or (SHARED, source.place) in process.blocked:
        return None, False
    if not ticket.may_be_shared:
        return None, False
    try:
        if not _header(ticket)[2]:
            _mark_read(ticket, 1)  # now, so that readers that come during this read ask for a copy
            return None, True
    except OSError:
        return None, False  # the read of the value itself will find out why
    try:
        return _ask_for_copy(ticket, process, Deadline(SHARED_WITHIN_S)), False
    except TransportError as error:
        # The source may be busy for long, and a one-sided read does not need it.
        process.blocked[SHARED, source.place] = error.message
        return None, False


def _ask_for_copy(ticket: Ticket, process: Process, deadline: Deadline) -> list[Any] | None:
    """Return the blocks from the copy in shared memory that the source makes or has; None if there is none.

    A TransportError if the source does not answer.
    """
    source = ticket.origin()
    with process.links().borrow(process.address_of(source), source, deadline) as link:
        link.send(wire.ShareRequest(ticket.key))
        answer = link.receive()
    if not isinstance(answer, wire.Shared) or not answer.path.startswith(_files_of(source)):
        return None
    with contextlib.suppress(OSError):  # no descriptor or memory left here, or the value was freed
        blocks = map_shared(answer.path, [block.nbytes for block in ticket.blocks])
        process.counts["shared"] += blocks is not None
        return blocks
    return None


def _files_of(source: Source) -> str:
    """Return the folder with the open files of a source: a path outside of it is not the source's."""
    return f"/proc/{source.place.pid}/fd/"


def _snapshot(ticket: Ticket) -> tuple[str, list[int], list[int], int]:
    """Return path, sizes of the blocks, their offsets, and size of the segment of a snapshot."""
    sizes = [block.nbytes for block in ticket.blocks]
    return f"{_files_of(ticket.origin())}{ticket.segment}", sizes, *segment_offsets(sizes)


class _Mappings(Mappings, ProcessPart):
    """Memory of other processes that this process has mapped."""

    def __init__(self, idle_s: float, max_idle_bytes: int) -> None:
        super().__init__(idle_s, max_idle_bytes)
        self._read_before: collections.deque[int] = collections.deque(maxlen=MOST_IDLE)
        """Nonces of snapshots that were read last."""

    def is_read_again(self, nonce: int) -> bool:
        """Return True if a snapshot was read before, and remember it."""
        again = nonce in self._read_before
        if not again:
            self._read_before.append(nonce)
        return again


def _mappings(process: Process) -> _Mappings:
    return process.part(_Mappings, lambda: _Mappings(process.pool.idle_s, process.pool.max_idle_bytes))


def _copy_from_snapshot(ticket: Ticket, parts: Sequence[Part], process: Process, deadline: Deadline) -> bool:
    """Copy parts of a snapshot that is read again, from its mapping. Return False if it has to be read in another way.

    The caller finds out afterwards whether the value was still published.
    """
    if ticket.segment < 0 or not _mappings(process).is_read_again(ticket.nonce):
        return False
    path, _, offsets, total = _snapshot(ticket)
    try:
        memory = _mappings(process).take_sealed(path, total, ticket.nonce)
    except OSError:
        return False
    # Nobody can write to the segment any more, so it needs no check of its content afterwards.
    base = address_of(memory)
    ranges = [(base + offsets[part.block] + part.offset, part.address, part.nbytes) for part in parts]
    for some in vm.split(ranges):
        if deadline.left_s() == 0:
            raise timeout_error(ticket, deadline)
        rows = array.array("Q", [number for there, here, nbytes in some for number in (here, there, nbytes)])
        copy_many(rows, sum(nbytes for *_, nbytes in some))
    return True


def _map_regions(ticket: Ticket, process: Process) -> tuple[list[Any], list[vm.Range]] | None:
    """Map the blocks that lie in regions of the source, each region once; return all blocks and what is left to read.

    None if there are no such blocks, or if they cannot be mapped: they can be read like other memory.
    """
    own_files = _files_of(ticket.origin())
    if not ticket.regions or not all(path.startswith(own_files) for path, _ in ticket.regions.values()):
        return None
    mappings = _mappings(process)
    mapped: dict[str, Any] = {}
    blocks: dict[int, Any] = {}
    try:
        for number, (path, offset) in ticket.regions.items():
            if path not in mapped:
                mapped[path] = mappings.take_region(path)
            blocks[number] = (ctypes.c_char * ticket.blocks[number].nbytes).from_buffer(mapped[path], offset)
    except (OSError, ValueError):  # ValueError: the block does not lie in the file
        return None
    others = [number for number in range(len(ticket.blocks)) if number not in blocks]
    try:
        taken = take_blocks([ticket.blocks[number].nbytes for number in others], process.pool, {})
    except OSError as error:
        raise receive_error(ticket, error) from error
    blocks.update(zip(others, taken, strict=True))
    ranges = [(ticket.blocks[n].start, address_of(blocks[n]), ticket.blocks[n].nbytes) for n in others]
    return [blocks[number] for number in range(len(ticket.blocks))], ranges


def _mark_read(ticket: Ticket, count: int) -> None:
    """Record in the source's header slot how often other processes have read the value.

    If the value is freed at this moment the mark is lost, which is harmless because nobody asks for it any more. The
    slot can be reused between the read and this write only after the value was freed. The reader's own ref prevents
    that unless the owner of the ref dies; a wrong mark costs one needless warning.
    """
    reads = ctypes.c_uint32(count)
    try:
        vm.write(ticket.origin().place.pid, ticket.header_address + _REMOTE_READ_OFFSET, address_of(reads), 4)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EFAULT):
            raise


def _lost(source: Source) -> SourceLostError:
    return SourceLostError(
        f"{source} died, and the tensors it held are lost. Compute them again, or keep a copy elsewhere",
        source=source.label,
    )


def _translate(error: OSError, ticket: Ticket) -> Exception:
    """Return the typed error for a failed read.

    A dying process loses its memory before its entry in /proc, so a source that looks alive may still be dying; the
    header is read once more before the error blames the value.
    """
    source = ticket.origin()
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return receive_error(ticket, error)
    if error.errno == errno.ESRCH or not place.alive(source.place):
        return _lost(source)
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return TransportUnavailableError(
            f"the kernel forbids reading the memory of {source} ({error.strerror}). Containers need CAP_SYS_PTRACE or "
            "kernel.yama.ptrace_scope=0; tcp works without either",
            source=source.label,
        )
    # A page or a descriptor is gone. If the header is unreadable too, the whole process is gone.
    # If the header is readable, its nonce tells a freed value from moved memory.
    try:
        nonce, _, _ = _header(ticket)
    except OSError:
        return _lost(source)
    if nonce != ticket.nonce:
        return freed_error(ticket)
    if ticket.segment < 0:
        return moved_error(ticket)
    return TransportUnavailableError(
        f"the snapshot of {source} cannot be opened through /proc/{source.place.pid}/fd ({error.strerror}). Check "
        "whether /proc is mounted with hidepid; tcp works all the same",
        source=source.label,
    )
