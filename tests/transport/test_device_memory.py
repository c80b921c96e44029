"""CUDA tensors in values, as far as that can be tested without a GPU: what is decided, and what a reader builds."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import ray
import torch

import raylane
from raylane.core.deadline import Deadline
from raylane.core.memory.layout import SMALL_BLOCK_BYTES
from raylane.core.memory.receive_pool import BufferPool
from raylane.core.memory.spans import Span
from raylane.core.process.place import Place
from raylane.errors import ProtocolError, TransportUnavailableError
from raylane.transport.backends import base
from raylane.transport.backends.cuda import driver as cuda_driver
from raylane.transport.backends.cuda.backend import NEVER, CudaIpcBackend, IpcChannel
from raylane.transport.backends.nixl.agent import Range, _batches, merge_ranges
from raylane.transport.backends.pieces import OwnedMemory, Piece, pieces_of_target
from raylane.transport.backends.registry import backends
from raylane.transport.hold.device_memory import DeviceGroup, groups_of, new_blocks, separated, whole
from raylane.transport.link import wire
from raylane.transport.link.connection import Connection
from raylane.transport.read.choose import choose
from raylane.transport.value.codec import build_leaves, plan_layout
from raylane.transport.value.layout import TENSOR, LeafSpec, local_device
from raylane.transport.value.source import Source
from raylane.transport.value.ticket import VERSION, Ticket, decode_ticket, encode_ticket

BIG = SMALL_BLOCK_BYTES
HERE = Place("boot", 1, 1, 1000, 10, 5, "here")


def test_small_blocks_of_one_device_travel_together() -> None:
    sizes = [100, 7, BIG, 30, 40, 50]
    # Block 1 is in host memory; blocks 4 and 5 are on another device.
    found = groups_of({0: 0, 2: 0, 3: 0, 4: 1, 5: 1}, sizes)
    assert found == [
        DeviceGroup(0, [0, 3], [Span(0, 100), Span(128, 158)], 192),
        DeviceGroup(0, [2], [Span(0, BIG)], BIG),
        DeviceGroup(1, [4, 5], [Span(0, 40), Span(64, 114)], 128),
    ]
    assert groups_of({}, sizes) == []


def test_blocks_of_a_group_lie_in_one_memory() -> None:
    groups = groups_of({0: 0, 2: 0, 3: 0}, [100, 7, BIG, 30])
    blocks = new_blocks(groups)
    assert [blocks[number].numel() for number in (0, 2, 3)] == [100, BIG, 30]
    shared = whole(blocks[3])
    assert shared.numel() == groups[0].nbytes
    shared[128:158] = 1
    assert int(blocks[3].sum()) == 30
    assert int(blocks[0].sum()) == 0 or blocks[0].data_ptr() == shared.data_ptr()


def test_pieces_of_a_target_follow_the_groups() -> None:
    pool = BufferPool(1 << 30)
    sizes, devices = [100, 7, BIG, 30], {0: 0, 2: 0, 3: 0}
    blocks: list[Any] = [None, pool.take(7), None, None]
    for number, block in new_blocks(groups_of(devices, sizes)).items():
        blocks[number] = block
    pieces = pieces_of_target(blocks, sizes, devices)
    # First the host's small blocks together, which take 64 bytes, then those of the device.
    assert [piece.memory.block.nbytes for piece in pieces] == [64, 192, BIG]
    assert pieces[1].memory.block.start == blocks[0].data_ptr()
    pool.close()


def test_leaves_of_one_device_block_share_memory() -> None:
    def spec(offset: int, count: int) -> LeafSpec:
        return LeafSpec(TENSOR, "float32", (count,), (4,), 0, offset, False, "cpu")

    # A reader without CUDA gets device blocks in host memory, as slices of their group.
    memory = torch.arange(100.0).view(torch.uint8)
    first, second = build_leaves([spec(0, 50), spec(80, 10)], [memory[40:]])
    assert torch.equal(first, torch.arange(10.0, 60.0))
    assert torch.equal(second, torch.arange(30.0, 40.0))
    second.zero_()
    assert float(first[20]) == 0


def test_layout_of_host_tensors_names_no_devices() -> None:
    assert plan_layout([torch.ones(10)], in_place=True).devices == {}
    ticket = Ticket(VERSION, "auto", "warn", [], [Span(0, 8)], devices={0: 3})
    assert decode_ticket(encode_ticket(ticket)).devices == {0: 3}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process has CUDA devices")
def test_processes_without_cuda() -> None:
    assert local_device("cuda:3") == torch.device("cuda")
    with pytest.raises(cuda_driver.CudaError, match=r"libcuda\.so\.1"):
        cuda_driver.driver()
    with pytest.raises(TransportUnavailableError, match="needs a CUDA device in both"):
        CudaIpcBackend().open_channel(None, 0, None)  # type: ignore[arg-type]
    for name in [name for name, backend in backends().items() if backend.capability.needs_device]:
        there = Source(HERE, "Actor(A, 1)", "u", "10.0.0.1", 1)
        assert backends()[name].refusal(there, HERE) == "this process has no CUDA device"


@pytest.mark.claim("transport", "CUDA tensors go by CUDA IPC between processes of one GPU")
def test_auto_takes_cuda_ipc_for_device_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "has_cuda", lambda: True)
    there = Source(msgspec.structs.replace(HERE, pid=11), "Actor(A, 1)", "u", "10.0.0.1", 1)

    def names(*, on_device: bool, source: Source = there) -> tuple[str, ...]:
        return choose(source, HERE, "auto", backends(), {}, may_call_ray=False, on_device=on_device).names

    assert names(on_device=True) == ("cuda_ipc", "host", "tcp")
    assert names(on_device=False) == ("host", "tcp")
    far = msgspec.structs.replace(there, place=msgspec.structs.replace(HERE, boot_id="b2", hostname="far"))
    assert names(on_device=True, source=far) == ("tcp",)


@pytest.mark.claim("transport", "CUDA memory of another GPU is opened where it is, if possible (never run)")
def test_memory_is_opened_where_it_is_if_possible() -> None:
    a, b, c = b"a" * 16, b"b" * 16, b"c" * 16
    assert cuda_driver.pick_device(b, [a, b], target=0) == 1
    assert cuda_driver.pick_device(c, [a, b], target=1) == 1


def test_reads_by_nixl_keep_devices_apart() -> None:
    host, first, second = Range(0, 100, 10), Range(10, 110, 10, 0, 0), Range(20, 120, 10, 0, 0)
    other = Range(30, 130, 10, 1, 0)
    merged = merge_ranges([host, first, second, other])
    assert merged == [host, Range(10, 110, 20, 0, 0), other]
    # One request has memory of one kind on each side; several devices are of one kind.
    assert list(_batches(merged)) == [[host], [Range(10, 110, 20, 0, 0), other]]


class Maker:
    @raylane.method(tensor_transport="nccl")
    def values(self) -> torch.Tensor:
        return torch.arange(50_000.0)


@pytest.mark.processes
@pytest.mark.usefixtures("cluster")
@pytest.mark.skipif(torch.cuda.is_available(), reason="this process has CUDA devices")
def test_readers_without_a_device_get_the_value_another_way() -> None:
    maker = ray.remote(Maker).remote()
    before = raylane.stats().get("without_device", 0)
    ref = maker.values.remote()
    assert torch.equal(ray.get(ref), torch.arange(50_000.0))
    assert raylane.stats()["without_device"] == before + 1
    with pytest.raises(TransportUnavailableError, match="no CUDA device"):
        raylane.get(ref, tensor_transport="nccl")
    ray.kill(maker)


def test_one_small_block_travels_as_it_is() -> None:
    # The source sends its 100 bytes, so the reader must not expect more.
    found = groups_of({0: 0, 1: 0}, [100, BIG])
    assert found == [DeviceGroup(0, [0], [Span(0, 100)], 100), DeviceGroup(0, [1], [Span(0, BIG)], BIG)]


def test_received_blocks_have_storages_of_their_own() -> None:
    blocks: list[Any] = [*new_blocks(groups_of({0: 0, 1: 0}, [100, 50])).values(), bytearray(4)]
    blocks[0].fill_(1)
    blocks[1].fill_(2)
    first, second, host = separated(blocks)
    first.untyped_storage().resize_(0)
    assert second.tolist() == [2] * 50
    assert second.untyped_storage().nbytes() == 50
    assert host is blocks[2]


def test_cuda_ipc_sends_host_memory_over_its_connection() -> None:
    ends = [Connection(sock, Deadline(10), peer="the other end") for sock in socket.socketpair()]
    given = torch.arange(1 << 20, dtype=torch.int32)
    target = torch.zeros_like(given)
    there, here = [
        [Piece(None, OwnedMemory(None, span, span))]
        for span in (Span(one.data_ptr(), one.data_ptr() + one.nbytes) for one in (given, target))
    ]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(IpcChannel(ends[0]).send, there, Deadline(10))
        IpcChannel(ends[1]).expect(here)(Deadline(10))
        sent.result(10)
    assert torch.equal(given, target)
    for end in ends:
        end.close()


def test_sizes_are_compared_before_memory_of_devices_is_copied() -> None:
    ends = [Connection(sock, Deadline(10), peer="the other end") for sock in socket.socketpair()]
    ends[0].send(wire.Allocations([(b"h" * 64, 0, 8, b"u" * 16)], True))
    ends[0].send(wire.Allocations([], False))
    with pytest.raises(ProtocolError, match="other sizes"):
        IpcChannel(ends[1]).expect([])(Deadline(10))
    ends[0].send(wire.RendezvousEntry(NEVER, b"no such memory"))
    with pytest.raises(TransportUnavailableError, match="no such memory"):
        IpcChannel(ends[1]).expect([])(Deadline(10))
    ends[0].send(wire.Refusal("out of memory"))
    with pytest.raises(cuda_driver.CudaError, match="out of memory") as caught:
        IpcChannel(ends[1]).expect([])(Deadline(10))
    assert not caught.value.permanent
    for end in ends:
        end.close()
