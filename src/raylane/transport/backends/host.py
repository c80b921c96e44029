"""host: one-sided reads between processes of one machine; the source's Python takes no part.

A value in ordinary memory is read with process_vm_readv into pooled memory. A snapshot lies in sealed memfds, which are
mapped copy-on-write through /proc/<pid>/fd: nothing is copied until somebody writes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import TYPE_CHECKING, Any

from raylane.core import place, vm
from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.core.segment import address_of, map_segment
from raylane.errors import SourceLostError, TransportUnavailableError
from raylane.transport.backends.base import Arrival, Backend, Capability, allocate, cannot_receive, freed
from raylane.transport.source import Source
from raylane.transport.ticket import HEADER_BYTES, Ticket

if TYPE_CHECKING:
    from raylane.transport.endpoint import Endpoint

_REMOTE_READ_OFFSET = 12


class HostBackend(Backend):
    name = "host"
    capability = Capability(
        summary="one-sided reads of the source's memory, or copy-on-write mapping of a snapshot",
        same_host=True,
    )

    def refusal(self, source: Source, here: Place) -> str | None:
        there = source.place
        if there.same_process(here):
            return "source and reader are one process"
        if not there.same_host(here):
            return f"the value is on another host ({there.hostname}; this is {here.hostname})"
        if there.pid_namespace != here.pid_namespace:
            return "source and reader are in different pid namespaces (containers); run them with a shared one"
        if there.uid != here.uid and here.uid != 0:
            return f"the source runs as user {there.uid}, this process as {here.uid}"
        return None

    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> Arrival:
        source = ticket.origin()
        header = ctypes.create_string_buffer(HEADER_BYTES)
        header_range = (ticket.header_address, address_of(header), HEADER_BYTES)
        counts = (ctypes.c_uint32 * len(ticket.counters))()
        blocks = [] if ticket.segments else allocate(ticket, endpoint)
        try:
            if ticket.segments:
                blocks = _map(ticket, source)
                vm.read(source.place.pid, [header_range])
            else:
                ranges = [(b.start, address_of(mine), b.nbytes) for b, mine in zip(ticket.blocks, blocks, strict=True)]
                words = [(there, address_of(counts) + 4 * i, 4) for i, (there, _) in enumerate(ticket.counters)]
                vm.read(source.place.pid, [*ranges, *words, header_range])
        except OSError as error:
            raise _translate(error, ticket) from error
        nonce, creator_read, remote_read = struct.unpack("<QII", header.raw)
        if nonce != ticket.nonce:
            # Another process by the same pid would hold another nonce, or none.
            raise freed(ticket) if place.alive(source.place) else _lost(source)
        if not remote_read:
            _mark(ticket)
        mutated = any(now != then for now, (_, then) in zip(counts, ticket.counters, strict=True))
        return Arrival(blocks=blocks, mutated=mutated, creator_read=bool(creator_read))


def _map(ticket: Ticket, source: Source) -> list[Any]:
    blocks = []
    for fd, block in zip(ticket.segments, ticket.blocks, strict=True):
        mine = os.open(f"/proc/{source.place.pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(mine).st_size != block.nbytes:
                raise OSError(errno.EFAULT, "that descriptor is something else by now")
            blocks.append(map_segment(mine, block.nbytes))
        finally:
            os.close(mine)
    return blocks


def _mark(ticket: Ticket) -> None:
    """Tell the producer that another process has read this. Lost if the value goes at this moment; then nobody asks.

    The slot could be reused between the read and this write only after the value was freed, which its reader's own ref
    forbids but for the death of its owner; a wrong mark costs one needless warning.
    """
    one = ctypes.c_uint32(1)
    try:
        vm.write(ticket.origin().place.pid, ticket.header_address + _REMOTE_READ_OFFSET, address_of(one), 4)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EFAULT):
            raise


def _lost(source: Source) -> SourceLostError:
    return SourceLostError(
        f"{source} died; the tensors it held died with it. Make them again, or keep a copy elsewhere",
        source=source.label,
    )


def _translate(error: OSError, ticket: Ticket) -> Exception:
    """What a failed read means. A dying process loses its memory before its entry in /proc, so that is asked last."""
    source = ticket.origin()
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return cannot_receive(ticket, error)
    if error.errno == errno.ESRCH or not place.alive(source.place):
        return _lost(source)
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return TransportUnavailableError(
            f"the kernel forbids reading the memory of {source} ({error.strerror}): containers need CAP_SYS_PTRACE or "
            "kernel.yama.ptrace_scope=0; tcp works without either",
            source=source.label,
        )
    header = ctypes.create_string_buffer(HEADER_BYTES)  # a descriptor or a page is gone: with the value, or all of it?
    try:
        vm.read(source.place.pid, [(ticket.header_address, address_of(header), HEADER_BYTES)])
    except OSError:
        return _lost(source)
    return freed(ticket)
