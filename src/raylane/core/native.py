"""Operations on every message of a compiled graph, which are written in C (`_native.c`), and their memory layouts.

    page of a doorbell (4096 bytes)      0     semaphore: one post for each message
                                         48    1 while the process sleeps in an event loop: writers write its eventfd
                                         64    256 flags, one byte each: 1 if a ring with this flag has a message
    slot of a ring                       0     sequence u64 | body bytes u32 | kind u8 | flags u8 | buffers u16
                                         16    body (with buffers: sizes u64 each, buffers, body)

A writer fills the slot, posts the semaphore `full` of every reader, and then for each reader sets its flag and posts
its doorbell. Semaphores order memory; flags do not, so that on some processors a post may be seen before its flag.
A reader that consumes a post and finds no flag therefore polls all its rings.
"""

from __future__ import annotations

try:
    from raylane.core._native import (
        BUSY,
        BYTES,
        DESCRIPTOR_BYTES,
        FLAGS,
        LOGGED,
        NOTHING,
        PAGE_BYTES,
        SLOT_HEADER_BYTES,
        TEXT,
        VALUE,
        WAKE,
        DamagedRing,
        Doorbell,
        Encoder,
        Executions,
        Recorder,
        Result,
        Section,
        SlotReader,
        SlotWriter,
        add_digests,
        copy,
        copy_many,
        run_delay_ns,
    )
except ImportError as error:
    raise ImportError(
        f"raylane has no compiled module here: {error}. Install its wheel, or build it from source, for which it needs "
        "a C compiler and the headers of Python (apt install gcc python3-dev)"
    ) from error

__all__ = [
    "BUSY",
    "BYTES",
    "DESCRIPTOR_BYTES",
    "FLAGS",
    "LOGGED",
    "NOTHING",
    "PAGE_BYTES",
    "SLOT_HEADER_BYTES",
    "TEXT",
    "VALUE",
    "WAKE",
    "DamagedRing",
    "Doorbell",
    "Encoder",
    "Executions",
    "Recorder",
    "Result",
    "Section",
    "SlotReader",
    "SlotWriter",
    "add_digests",
    "copy",
    "copy_many",
    "run_delay_ns",
]
