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
from raylane.core.segment import address_of, map_segment, segment_offsets
from raylane.errors import SourceLostError, TransportUnavailableError
from raylane.transport.backends.base import (
    Arrival,
    Backend,
    Capability,
    allocate,
    cannot_receive,
    freed,
    moved,
    timed_out,
)
from raylane.transport.guards import digest
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
        if ticket.guards is None:
            raise TransportUnavailableError(
                f"the memory of {source} cannot be read one-sidedly: its torch or NumPy lays objects out in a way that "
                "this raylane does not know, so a reader could not tell whether memory was freed; tcp works",
                source=source.label,
            )
        header = ctypes.create_string_buffer(HEADER_BYTES)
        header_range = (ticket.header_address, address_of(header), HEADER_BYTES)
        pid, counted, guarded = source.place.pid, b"", b""
        blocks = [] if ticket.segment >= 0 else allocate(ticket, endpoint)
        try:
            if ticket.segment >= 0:
                blocks = _map(ticket, source)
            else:
                ranges = [(b.start, address_of(mine), b.nbytes) for b, mine in zip(ticket.blocks, blocks, strict=True)]
                vm.read(pid, ranges, deadline)
                # Only what is read after the data says something of all of it.
                counted, guarded = vm.gather(pid, ticket.counters), vm.gather(pid, ticket.guards)
            vm.read(pid, [header_range])
        except TimeoutError as error:
            raise timed_out(ticket, deadline) from error
        except OSError as error:
            raise _translate(error, ticket) from error
        nonce, creator_read, remote_read = struct.unpack("<QII", header.raw)
        if nonce != ticket.nonce:
            # Another process by the same pid would hold another nonce, or none.
            raise freed(ticket) if place.alive(source.place) else _lost(source)
        if ticket.guards and digest(guarded) != ticket.guarded:
            raise moved(ticket)
        if not remote_read:
            _mark(ticket)
        return Arrival(blocks=blocks, mutated=counted != ticket.counted, creator_read=bool(creator_read))


def _map(ticket: Ticket, source: Source) -> list[Any]:
    sizes = [block.nbytes for block in ticket.blocks]
    # Not blocking: the descriptor may be something else by now, such as a pipe.
    fd = os.open(f"/proc/{source.place.pid}/fd/{ticket.segment}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.fstat(fd).st_size != segment_offsets(sizes)[1]:
            raise OSError(errno.EFAULT, "that descriptor is something else by now")
        return map_segment(fd, sizes)
    finally:
        os.close(fd)


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
    if struct.unpack("<QII", header.raw)[0] != ticket.nonce:
        return freed(ticket)
    if ticket.segment < 0:
        return moved(ticket)
    return TransportUnavailableError(
        f"the snapshot of {source} cannot be opened through /proc/{source.place.pid}/fd ({error.strerror}): is /proc "
        "mounted with hidepid? tcp works",
        source=source.label,
    )
