"""cuda_ipc and nccl: CUDA tensors go from device to device; neither process copies them to the host.

    cuda_ipc    one host: the reader maps the source's memory and copies it on the GPU, or between two GPUs
    nccl        any hosts: the source sends through NCCL; every process needs a GPU of its own

`auto` takes cuda_ipc for CUDA tensors within a host. Written without a GPU at hand, and never run on one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raylane.core.deadline import Deadline
from raylane.core.place import Place
from raylane.transport.backends.base import Backend, Capability, FetchResult
from raylane.transport.backends.gloo import fetch_by_channel
from raylane.transport.source import Source
from raylane.transport.ticket import Ticket
from raylane.transport.tls import cleartext_refusal

if TYPE_CHECKING:
    from raylane.transport.endpoint import Endpoint

NEEDS_DEVICE = ("cuda_ipc", "nccl")
"""Transports that work between processes with CUDA devices only."""


class CudaIpcBackend(Backend):
    """Copies between processes on one host, of memory that the source lets the reader map."""

    name = "cuda_ipc"
    capability = Capability(
        summary="copied on the GPU from the source's mapped memory", on_request=True, same_host=True, on_device=True
    )

    def refusal(self, source: Source, here: Place) -> str | None:
        """Return that the source is on another host, or that this process has no CUDA device, or None."""
        there = source.place
        if not there.same_host(here):
            return f"the value is on another host ({there.hostname}; this is {here.hostname})"
        return None if has_cuda() else "this process has no CUDA device"

    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> FetchResult:
        """Ask the source where the tensors lie, and copy them; the first time, open a channel."""
        return fetch_by_channel(self.name, ticket, endpoint, deadline)


class NcclBackend(Backend):
    """Transfer through a NCCL process group of source and reader."""

    name = "nccl"
    capability = Capability(
        summary="sent by the source through NCCL, from GPU to GPU",
        on_request=True,
        same_host=True,
        across_hosts=True,
        on_device=True,
    )

    def refusal(self, source: Source, here: Place) -> str | None:
        """Return that this process has no CUDA device, or may not send in the clear, or None."""
        if not has_cuda():
            return "this process has no CUDA device"
        return cleartext_refusal(self.name)

    def fetch(self, ticket: Ticket, endpoint: Endpoint, deadline: Deadline) -> FetchResult:
        """Request the tensors and receive them on the device; the first time, open a channel."""
        return fetch_by_channel(self.name, ticket, endpoint, deadline)


def has_cuda() -> bool:
    """Return True if torch sees a CUDA device in this process."""
    import torch

    return torch.cuda.is_available()
