"""This process's agent of NIXL: creation on first use, registered memory, known peers, and reads from them.

The agent runs without NIXL's progress thread, which keeps a core busy even when nothing is transferred (nixl 1.5.1,
UCX). Progress is made by the two threads that take part in a transfer, and only while it lasts: the reader's checks of
its state, and `progress` of the source. NIXL offers nothing to wait on (see docs/design/log.md).

Nothing here may be used after a fork: the child keeps the object, and never closes it.
"""

from __future__ import annotations

import collections
import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from raylane.core.deadline import Deadline
from raylane.core.memory.spans import Span
from raylane.core.process.environment import variables
from raylane.errors import TransportUnavailableError
from raylane.transport.backends.base import ChannelError
from raylane.transport.backends.nixl.memory import Registration, Registrations
from raylane.transport.backends.pieces import HOST

log = logging.getLogger("raylane.transport")

INSTALL = "pip install --no-deps nixl nixl-cu12"
"""Command that installs NIXL for the CPU and for CUDA 12.

`pip install nixl` also downloads the build for CUDA 13 (nixl 1.5.1 requires both). Neither needs a GPU.
"""
_UCX_SETTINGS = {"UCX_KEEPALIVE_INTERVAL": "inf"}
"""Without this, UCX keeps a TCP socket of every connection that was dropped, also where it moves data otherwise.

A dead peer is noticed by the connection that controls the channel.
"""
MAX_PEERS = 64
"""Number of sources whose metadata are kept; those used longest ago are dropped first."""
MAX_READ_BYTES = 64 << 20
"""Size of one request to NIXL. UCX copies within the call on one host, so the deadline is checked between requests."""
MAX_RANGES = 4096
FIRST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 1e-3
"""Longest time between two checks of a transfer. Over TCP the checks move the data: longer pauses cost bandwidth."""
QUARANTINE_S = 10.0
"""Seconds for which the memory of an abandoned read is kept: NIXL does not report when it stops writing."""


class Range(NamedTuple):
    """Part of a read: addresses in the source and here, and the devices that have this memory."""

    theirs: int
    mine: int
    nbytes: int
    their_device: int = HOST
    my_device: int = HOST


class NixlError(ChannelError):
    """NIXL refused a call or lost its peer, or a read was abandoned. The channel must then be closed."""


def missing() -> str | None:
    """Return why this process has no NIXL, None if it has; loads nothing of NIXL."""
    if importlib.util.find_spec("nixl") is None:
        return f"it has no NIXL ({INSTALL}; no GPU is needed), or use tensor_transport='tcp'"
    # The package `nixl` imports the build for torch's version of CUDA, and fails where only another one is installed.
    import torch  # not at the top: graphs import this module through the endpoint, and must not load torch

    cuda = torch.version.cuda
    builds = [f"nixl_cu{cuda.partition('.')[0]}"] if cuda else ["nixl_cu13", "nixl_cu12", "nixl_rocm"]
    if not any(importlib.util.find_spec(build) for build in builds):
        return (
            f"its NIXL does not fit its torch (CUDA {cuda}): pip install {builds[0].replace('_', '-')}, or use "
            "tensor_transport='tcp'"
        )
    return None


def _load() -> Any:
    """Return NIXL's module for Python. TransportUnavailableError if it is not installed or cannot be loaded."""
    if (reason := missing()) is not None:
        raise TransportUnavailableError(f"tensor_transport='nixl' does not work in this process: {reason}")
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise TransportUnavailableError(
            f"NIXL is installed here but cannot be loaded: {error}. Install it again ({INSTALL})"
        ) from error
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # else every process prints how it created its agent
    return api


class Peer:
    """The agent of one source, as this process knows it. Used with `lock` held."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        """Held during a transfer: metadata must not change meanwhile, and the data come over one connection."""
        self.epoch = 0
        self.number = 0
        """Epoch, and number of the last registration in it, of which this process has the metadata."""


class Agent:
    """NIXL in this process, from construction to `close`. Thread-safe."""

    def __init__(self) -> None:
        """Create the agent; takes half a second. TransportUnavailableError if that fails."""
        api = _load()
        # Random, because readers know an agent by its name: a process that opens a second one is another peer to them.
        self.name = f"raylane-{secrets.token_hex(12)}"
        # STRICT: several threads use the agent. UCX alone: it is the backend that both memory and networks have.
        config = api.nixl_agent_config(
            enable_prog_thread=False, backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        try:
            with variables(_UCX_SETTINGS, keep=True):
                self._nixl: Any = api.nixl_agent(self.name, config)
        except Exception as error:  # classes of the extension module, without a common base
            raise TransportUnavailableError(
                f"NIXL cannot start in this process: {error}. Use tensor_transport='tcp'"
            ) from error
        self.counts: collections.Counter[str] = collections.Counter()
        self.forgotten = 0
        """Number of connections that were dropped; UCX may still have their sockets (`nixl_agents`)."""
        self.offered = Registrations(self._register, self._deregister)
        """Memory of published values."""
        self.receiving = Registrations(self._register, self._deregister)
        """Memory into which this process reads."""
        self._lock = threading.Lock()  # guards the peers and the quarantine
        self._peers: collections.OrderedDict[str, Peer] = collections.OrderedDict()
        self.quarantine: collections.deque[tuple[float, object]] = collections.deque()
        """Memory of reads that were given up, with the time at which it may go."""
        _agents.add(self)

    def peer(self, name: str) -> Peer:
        """Return the peer with this name."""
        with self._lock:
            peer = self._peers.setdefault(name, Peer(name))
            self._peers.move_to_end(name)
            # A peer with a running transfer stays, even if that leaves more than MAX_PEERS.
            idle = [other for other in self._peers.values() if not other.lock.locked()]
            for other in idle[: max(0, len(self._peers) - MAX_PEERS)]:
                if other is not peer:
                    del self._peers[other.name]
                    self.forget(other)
            return peer

    def forget(self, peer: Peer) -> None:
        """Drop the metadata of a peer, which ends the connection to it."""
        # Epoch 0: NIXL was never told of this peer, and would print an error.
        if peer.epoch:
            self.forgotten += 1
            try:
                self._nixl.remove_remote_agent(peer.name)
            except Exception as error:
                log.debug("forgetting %s: %s", peer.name, error)
        peer.epoch = peer.number = 0

    def drop(self, peer: Peer) -> None:
        """Forget a peer that is lost."""
        with self._lock:
            self._peers.pop(peer.name, None)
        self.forget(peer)

    def learn(self, peer: Peer, epoch: int, number: int, metadata: Sequence[bytes]) -> None:
        """Take up the metadata of a peer; those of another epoch replace all others."""
        if peer.epoch and peer.epoch != epoch:
            self.forget(peer)
        try:
            for data in metadata:
                # Adds to what is known of the agent; the first of an epoch also says how to reach it.
                agent_name = self._nixl.add_remote_agent(data)
                agent_name = agent_name.decode() if isinstance(agent_name, bytes) else agent_name
                # The source could otherwise replace what is known of another one.
                if agent_name != peer.name:
                    raise NixlError(f"the metadata of {peer.name} are those of {agent_name}")
        except NixlError:
            raise
        except Exception as error:
            raise NixlError(f"NIXL refused the metadata of {peer.name}: {error!r}") from error
        peer.epoch, peer.number = epoch, number
        self.counts["nixl_metadata"] += len(metadata)

    def describe(self, registrations: Sequence[Registration]) -> bytes:
        """Return the metadata of registrations, which are all on one device or all in host memory.

        Without registrations, those of the connection to this agent.
        """
        spans = [registration.span for registration in registrations] or [Span(0, 0)]
        device = registrations[0].device if registrations else HOST
        descs = self._nixl.get_reg_descs([(s.start, s.nbytes, max(device, 0), "") for s in spans], _kind(device))
        if not registrations:
            descs.clear()  # an empty list cannot be made directly
        data: bytes = self._nixl.get_partial_agent_metadata(descs, inc_conn_info=not registrations)
        return data

    def progress(self) -> None:
        """Let NIXL do its part of the transfers in which others read from this process."""
        # The one call in NIXL's Python interface that drives the worker outside of an own transfer.
        self._nixl.get_new_notifs()

    def read(self, peer: Peer, ranges: Sequence[Range], watched: socket.socket, deadline: Deadline) -> None:
        """Read ranges of registered memory from a peer; wait until the deadline, or until `watched` is readable.

        NixlError if the peer, the connection or the deadline ends.
        """
        for batch in _batches(ranges):
            self._read(peer, batch, watched, deadline)

    def _read(self, peer: Peer, batch: Sequence[Range], watched: socket.socket, deadline: Deadline) -> None:
        nixl = self._nixl
        mine = [(item.mine, item.nbytes, max(item.my_device, 0)) for item in batch]
        theirs = [(item.theirs, item.nbytes, max(item.their_device, 0)) for item in batch]
        local = nixl.get_xfer_descs(mine, mem_type=_kind(batch[0].my_device))
        there = nixl.get_xfer_descs(theirs, mem_type=_kind(batch[0].their_device))
        handle = None
        try:
            handle = nixl.initialize_xfer("READ", local, there, peer.name)
            # On one host this call copies everything, without the GIL, and returns DONE.
            state = nixl.transfer(handle)
            self.counts["nixl_requests"] += 1
            poll = select.poll()
            poll.register(watched, select.POLLIN | select.POLLRDHUP)
            pause_s = FIRST_PAUSE_S
            while state == "PROC":
                if deadline.left_s() == 0:
                    raise NixlError("the deadline passed")
                # poll(2) has a resolution of 1 ms, so short pauses sleep without watching the connection.
                if pause_s < LONGEST_PAUSE_S:
                    time.sleep(pause_s)
                elif poll.poll(1):
                    raise NixlError("the source closed the connection")
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                state = nixl.check_xfer_state(handle)
            if state != "DONE":
                raise NixlError(f"NIXL reports {state}")
        except NixlError:
            raise
        except Exception as error:  # classes of the extension module, without a common base
            raise NixlError(f"NIXL could not read from {peer.name}: {error!r}") from error
        finally:
            if handle is not None:
                # Also for a transfer in progress: NIXL returns at once, and `abandon` ends the connection.
                _quietly(handle.release)

    def abandon(self, peer: Peer, memory: object) -> None:
        """Give up a read that may still be in progress: end the connection, and keep its target for a while."""
        self.drop(peer)
        with self._lock:
            self.quarantine.append((time.monotonic() + QUARANTINE_S, memory))

    def sweep(self) -> None:
        """Release the memory of reads that were abandoned long ago."""
        with self._lock:
            while self.quarantine and self.quarantine[0][0] <= time.monotonic():
                self.quarantine.popleft()

    def close(self) -> None:
        """Drop all registrations and peers, and end the agent with the last transfer that still runs."""
        _agents.discard(self)
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
            self.quarantine.clear()
        for peer in peers:
            self.forget(peer)
        self.offered.clear()
        self.receiving.clear()
        # A transfer that still runs holds the agent itself, which ends with it.
        self._nixl = _Closed()

    def stats(self) -> dict[str, int]:
        """Return the counters of this agent."""
        return {
            **self.counts,
            "nixl_registrations": self.offered.made,
            "nixl_registered": len(self.offered),
            "nixl_receiving": len(self.receiving),
            "nixl_peers": len(self._peers),
        }

    def _register(self, span: Span, device: int) -> Any:
        memory = [(span.start, span.nbytes, max(device, 0), "")]
        try:
            return self._nixl.register_memory(memory, mem_type=_kind(device))
        except Exception as error:
            where = "host memory" if device == HOST else f"memory of CUDA device {device}"
            raise NixlError(f"NIXL could not register {span.nbytes} bytes of {where}: {error!r}") from error

    def _deregister(self, handle: Any) -> None:
        _quietly(lambda: self._nixl.deregister_memory(handle))


def _kind(device: int) -> str:
    """Return NIXL's name for memory of a device of this number."""
    return "DRAM" if device == HOST else "VRAM"


class _Closed:
    """Stand-in for an agent that was closed."""

    def __getattr__(self, name: str) -> Any:
        raise NixlError("this process closed its NIXL agent")


def _quietly(call: Any) -> None:
    """Call a function of NIXL that releases something; a peer that died makes it fail."""
    try:
        call()
    except Exception as error:
        log.debug("NIXL: %s", error)


def merge_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Return the same read with neighbours joined: ranges that follow each other both in the source and here."""
    merged: list[Range] = []
    for item in ranges:
        if merged:
            last = merged[-1]
            follows = last.theirs + last.nbytes == item.theirs and last.mine + last.nbytes == item.mine
            if follows and last[3:] == item[3:]:
                merged[-1] = last._replace(nbytes=last.nbytes + item.nbytes)
                continue
        merged.append(item)
    return merged


def _batches(ranges: Sequence[Range]) -> Iterator[list[Range]]:
    """Yield the ranges in portions of at most MAX_READ_BYTES and MAX_RANGES; cut ranges that are larger.

    All ranges of a portion lead from one kind of memory (host or devices) to one kind.
    """
    batch: list[Range] = []
    room = MAX_READ_BYTES
    for item in ranges:
        if batch and (_kind(item.their_device), _kind(item.my_device)) != (
            _kind(batch[0].their_device),
            _kind(batch[0].my_device),
        ):
            yield batch
            batch, room = [], MAX_READ_BYTES
        done = 0
        while done < item.nbytes:
            part = min(item.nbytes - done, room)  # a large block continues in the next request
            batch.append(item._replace(theirs=item.theirs + done, mine=item.mine + done, nbytes=part))
            done += part
            room -= part
            if not room or len(batch) == MAX_RANGES:
                yield batch
                batch, room = [], MAX_READ_BYTES
    if batch:
        yield batch


_agents: set[Agent] = set()
"""Agents of this process that are not closed."""


def _keep_in_child() -> None:
    """Keep the parent's agents alive in a forked child: their destructor waits for threads that the child lacks."""
    for agent in _agents:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent._nixl))


os.register_at_fork(after_in_child=_keep_in_child)
