"""Actors of the benchmark `transfer`. Each contender has a producer and consumers of its own."""

from __future__ import annotations

import functools
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch

import raylane
from benchmarks import measure


def ones(nbytes: int, count: int, device: str) -> Any:
    """Return one tensor of ones, or a list of `count` tensors."""
    tensors = [torch.ones(nbytes // 4, device=device) for _ in range(count)]
    return tensors[0] if count == 1 else tensors


def producer_class(decorate: Callable[[Any], Any]) -> Any:
    """Return a producer class whose methods have the decorator of one transport."""

    class Producer:
        def __init__(self, device: str = "cpu", start_s: float = 0.0) -> None:
            time.sleep(start_s)
            self.device = device
            self.held_tensors: Any = None

        def pid(self) -> int:
            return os.getpid()

        def hold(self, nbytes: int, count: int, mapped: bool = False) -> None:
            tensors = ones(nbytes, count, self.device) if nbytes else None
            self.held_tensors = raylane.to_shared(tensors) if mapped else tensors

        @decorate
        def held(self) -> Any:
            return self.held_tensors

        @decorate
        def fresh(self, nbytes: int, count: int) -> Any:
            return ones(nbytes, count, self.device)

        @raylane.method(snapshot=True)
        def snapshot(self) -> Any:
            return self.held_tensors

    return Producer


class Consumer:
    """Actor that takes values as arguments, or reads them itself."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def pid(self) -> int:
        """Return the process ID."""
        return os.getpid()

    def total(self, value: Any) -> float:
        """Sum a tensor, or the first elements of a list of tensors."""
        if isinstance(value, list):
            return float(sum(float(tensor[0]) for tensor in value))
        return float(value.sum())

    def hold(self, nbytes: int) -> None:
        """Keep a tensor of ones, and memory for a copy."""
        self.own_tensor, self.own_copy = ones(nbytes, 1, self.device), ones(nbytes, 1, self.device)

    def total_of_own(self, _: Any, copied: bool) -> float:
        """Sum the tensor of this process, or a copy that is made of it now."""
        return self.total(self.own_copy.copy_(self.own_tensor) if copied else self.own_tensor)

    def ends(self, value: torch.Tensor) -> float:
        """Add the first and the last element."""
        return float(value[0] + value[-1])

    def read(self, refs: list[Any], nbytes: int, into: bool, library: str, samples: int) -> list[float]:
        """Return the microseconds of each of several reads of one value."""
        self.target = torch.zeros(nbytes // 4) if into else None
        return [self._read(refs[0], library) for _ in range(samples)]

    def _read(self, ref: Any, library: str) -> float:
        target = self.target
        if library == "raylane":
            return measure.timed(lambda: self._keep(raylane.get(ref, into=target)))
        if library == "rdt" and target is not None:
            from ray.experimental import set_target_for_ref

            set_target_for_ref(ref, [target])
        if library == "object_store" and target is not None:
            return measure.timed(lambda: target.copy_(ray.get(ref)))
        return measure.timed(lambda: self._keep(ray.get(ref)))

    def _keep(self, value: Any) -> None:
        # Kept until the next read: a value that is freed within the measurement would be part of it.
        self.kept = value


class Copier:
    """Bare copy of warm memory in one process: as a producer it holds, as a consumer it copies."""

    def pid(self) -> int:
        """Return the process ID."""
        return os.getpid()

    def prepare(self, nbytes: int, shared: bool) -> None:
        """Allocate and touch source and target."""
        self.target = np.ones(nbytes, dtype=np.uint8)
        if not shared:
            self.source: Any = np.ones(nbytes, dtype=np.uint8)
            return
        descriptor = os.memfd_create("bench")
        os.ftruncate(descriptor, nbytes)
        mapped = mmap.mmap(descriptor, nbytes)
        os.close(descriptor)
        self.source = np.frombuffer(mapped, dtype=np.uint8)
        self.source[:] = 1

    def copy(self, samples: int) -> list[float]:
        """Return the microseconds of several copies."""
        return [measure.timed(functools.partial(np.copyto, self.target, self.source)) for _ in range(samples)]


class RawSocket:
    """One end of a bare TCP connection: what the network allows."""

    def pid(self) -> int:
        """Return the process ID."""
        return os.getpid()

    def serve(self, nbytes: int) -> tuple[str, int]:
        """Send `nbytes` for every byte that a client sends; return the address."""
        memory = np.ones(nbytes, dtype=np.uint8).data
        server = socket.create_server(("127.0.0.1", 0))

        def run() -> None:
            connection, _ = server.accept()
            with connection:
                while connection.recv(1):
                    connection.sendall(memory)

        threading.Thread(target=run, daemon=True).start()
        address: tuple[str, int] = server.getsockname()[:2]
        return address

    def connect(self, address: tuple[str, int], nbytes: int) -> None:
        """Connect, and touch the memory that receives."""
        self.connection = socket.create_connection(address)
        self.memory = np.ones(nbytes, dtype=np.uint8).data

    def read(self, samples: int) -> list[float]:
        """Return the microseconds of several transfers."""
        return [measure.timed(self._receive) for _ in range(samples)]

    def _receive(self) -> None:
        self.connection.sendall(b"x")
        remaining = self.memory
        while remaining.nbytes:
            remaining = remaining[self.connection.recv_into(remaining, min(remaining.nbytes, 1 << 24)) :]


class RawNixl:
    """One end of a bare NIXL transfer of registered memory."""

    def __init__(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.agent = nixl_agent(f"bench-{os.getpid()}", nixl_agent_config(backends=["UCX"]))

    def pid(self) -> int:
        """Return the process ID."""
        return os.getpid()

    def prepare(self, nbytes: int) -> tuple[bytes, int]:
        """Allocate, touch and register memory; return the agent's metadata and the address."""
        self.memory = np.ones(nbytes, dtype=np.uint8)
        self.registered = self.agent.register_memory([(self.memory.ctypes.data, nbytes, 0, "")], mem_type="DRAM")
        return self.agent.get_agent_metadata(), self.memory.ctypes.data

    def connect(self, metadata: bytes, address: int) -> None:
        """Prepare reads of another agent's memory."""
        name = self.agent.add_remote_agent(metadata)
        nbytes = self.memory.nbytes
        local = self.agent.get_xfer_descs([(self.memory.ctypes.data, nbytes, 0)], mem_type="DRAM")
        there = self.agent.get_xfer_descs([(address, nbytes, 0)], mem_type="DRAM")
        self.transfer = self.agent.initialize_xfer("READ", local, there, name)

    def read(self, samples: int) -> list[float]:
        """Return the microseconds of several transfers."""
        return [measure.timed(self._receive) for _ in range(samples)]

    def _receive(self) -> None:
        state = self.agent.transfer(self.transfer)
        while state not in ("DONE", "ERR"):
            state = self.agent.check_xfer_state(self.transfer)
        if state == "ERR":
            raise RuntimeError("the transfer failed")
