from __future__ import annotations

import ctypes

import torch

from raylane.transport.value.guards import counter_offsets, write_counters


def test_write_counter_of_pinned_torch_follows_writes() -> None:
    assert counter_offsets() is not None
    tensors = [torch.zeros(3), torch.nn.Parameter(torch.zeros(2)), torch.zeros(3)[1:]]
    found = write_counters(tensors)
    assert len(found) == 3
    for (address, nbytes), tensor in zip(found, tensors, strict=True):
        assert nbytes == 4
        before = ctypes.c_uint32.from_address(address).value
        assert before == tensor._version
        with torch.no_grad():
            tensor.add_(1)
        assert ctypes.c_uint32.from_address(address).value == tensor._version == before + 1


def test_views_of_one_storage_share_a_counter() -> None:
    base = torch.zeros(10)
    assert len(write_counters([base, base[2:], base.view(2, 5)])) == 1
