"""Tensors as messages and back: which take the short way, and which keep their memory shared."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import raylane
from graph.arrival import arrive
from raylane.errors import TensorFreedError
from raylane.graph.values.message import SMALL_TENSOR_BYTES, TENSORS, VALUE, Encoder, decode


@pytest.fixture
def encoder() -> Encoder:
    return Encoder()


@pytest.mark.claim("graphs", "edges carry CUDA tensors by NCCL, CUDA IPC or NIXL on request, else through host memory")
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.arange(6.0).reshape(2, 3), VALUE),
        (torch.tensor(5), VALUE),
        (torch.ones(3, dtype=torch.bool), VALUE),
        (torch.ones(3, dtype=torch.bfloat16), VALUE),
        (torch.ones(3, dtype=torch.complex64), VALUE),
        (torch.ones(2, 3, dtype=torch.float8_e4m3fn), VALUE),
        (torch.arange(10)[2:5], VALUE),
        (torch.ones(SMALL_TENSOR_BYTES // 4 - 1), VALUE),
        (torch.ones(SMALL_TENSOR_BYTES // 4), TENSORS),
        (torch.empty(0, 3), TENSORS),
        (torch.ones(2, 3).T, TENSORS),
        (torch.ones(3).expand(2, 3), TENSORS),
        (torch.ones(3, requires_grad=True), TENSORS),
        (torch.nn.Parameter(torch.ones(3)), TENSORS),
        (torch.tensor([1 + 2j]).conj(), TENSORS),
        (torch.eye(3).to_sparse(), TENSORS),
    ],
    ids=str,
)
def test_tensors_alone_and_inside(encoder: Encoder, value: torch.Tensor, kind: int) -> None:
    for wrapped in (value, {"t": [value, np.ones(2), "x"]}):
        message = encoder.encode(wrapped)
        assert message.kind == kind
        got = arrive(message)
        got = got if wrapped is value else got["t"][0]
        assert (got.dtype, got.shape, got.requires_grad) == (value.dtype, value.shape, value.requires_grad)
        assert got.layout == value.layout
        if value.layout == torch.strided:
            assert (got.stride(), type(got)) == (value.stride(), type(value))
            assert torch.equal(got.to(torch.complex64), value.to(torch.complex64))
            if value.numel() and 0 not in value.stride():
                with torch.no_grad():
                    got.copy_(torch.zeros_like(got))  # its own memory


def _shared(make: Callable[[], list[Any]]) -> Any:
    return pytest.param(make, TENSORS, id=f"shared-{make.__code__.co_firstlineno}")


def _apart(make: Callable[[], list[Any]]) -> Any:
    return pytest.param(make, VALUE, id=f"apart-{make.__code__.co_firstlineno}")


BASE, ARRAY = torch.zeros(10), np.zeros(10, np.float32)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        _shared(lambda: [BASE, BASE[2:4]]),
        _shared(lambda: [BASE[2:4], BASE]),
        _shared(lambda: [BASE[:5], BASE[5:], BASE]),
        _shared(lambda: [BASE[2:4], np.ones(3), BASE]),
        _shared(lambda: [BASE, np.ones(3), BASE.numpy()]),
        _shared(lambda: [ARRAY, torch.from_numpy(ARRAY)]),
        _shared(lambda: [ARRAY[:6], torch.from_numpy(ARRAY[5:])]),
        _shared(lambda: [torch.from_numpy(ARRAY[:6]), torch.from_numpy(ARRAY[5:])]),
        _apart(lambda: [torch.from_numpy(ARRAY[:5]), torch.from_numpy(ARRAY[5:])]),
        _apart(lambda: [ARRAY[:5], torch.from_numpy(ARRAY[5:]), ARRAY[1:3], np.ones(2)]),
        _apart(lambda: [BASE, torch.ones(3), np.ones(3), torch.ones(2)]),
    ],
)
def test_tensors_that_share_memory_stay_shared(encoder: Encoder, make: Callable[[], list[Any]], kind: int) -> None:
    for _ in range(3):  # the encoder is kept: nothing of one value says anything of the next one
        message = encoder.encode(make())
        assert message.kind == kind
        got = arrive(message)
        for item, sent in zip(got, make(), strict=True):
            assert (type(item), item.tolist()) == (type(sent), sent.tolist())
        got[-1][:] = 7
        assert any(7 in item.tolist() for item in got[:-1]) == (kind == TENSORS)
    again = arrive(encoder.encode([BASE, BASE]))
    assert again[0] is again[1]


def test_views_ties_parameters_and_modules(encoder: Encoder) -> None:
    base = torch.zeros(10)
    layer = torch.nn.Linear(2, 2)
    tied = torch.nn.Sequential(layer, layer)
    got = arrive(encoder.encode({"base": base, "view": base[2:4], "model": tied, "w": layer.weight}))
    got["base"][3] = 7
    assert got["view"].tolist() == [0, 7]
    assert got["model"][0] is got["model"][1]
    assert got["w"] is got["model"][0].weight
    assert isinstance(got["w"], torch.nn.Parameter)
    assert got["w"].requires_grad


def test_tensors_of_other_kinds(encoder: Encoder) -> None:
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(arrive(encoder.encode([sparse]))[0].to_dense(), torch.eye(3))
    buffer = torch.nn.Buffer(torch.ones(2)) if hasattr(torch.nn, "Buffer") else torch.ones(2)
    assert torch.equal(arrive(encoder.encode({"b": buffer}))["b"], torch.ones(2))
    assert arrive(encoder.encode([torch.float16, torch.Size([1, 2]), torch.device("cpu")])) == [
        torch.float16,
        torch.Size([1, 2]),
        torch.device("cpu"),
    ]
    conjugate = torch.tensor([1 + 2j]).conj()
    assert arrive(encoder.encode(conjugate)).tolist() == [1 - 2j]


@pytest.mark.parametrize("size", [3, SMALL_TENSOR_BYTES])
def test_attributes_of_tensors_travel(encoder: Encoder, size: int) -> None:
    tensor = torch.ones(size)
    tensor.tag = "layer.7"  # type: ignore[attr-defined]
    assert arrive(encoder.encode({"w": tensor}))["w"].tag == "layer.7"


def test_a_tensor_that_others_see_too_is_copied(encoder: Encoder) -> None:
    message = encoder.encode([torch.ones(3), np.ones(2)])
    held = [bytearray(memoryview(buffer).cast("B")) for buffer in message.buffers]
    got = decode(message.kind, message.body, [memoryview(buffer).toreadonly() for buffer in held], shared=True)
    got[0].zero_()
    assert sum(map(sum, held)) == sum(map(sum, [bytes(memoryview(buffer).cast("B")) for buffer in message.buffers]))


@pytest.mark.parametrize("size", [3, SMALL_TENSOR_BYTES])
def test_tensors_that_wrap_others_are_refused(encoder: Encoder, size: int) -> None:
    def encode(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(TensorFreedError, match=r"it is a torch\.Tensor that wraps other tensors, or none"):
            encoder.encode([tensor])
        return tensor.sum()

    encode(torch._to_functional_tensor(torch.ones(size)))  # its address is 0
    torch.func.grad(encode)(torch.ones(size))


class Watcher:
    """Maker and reader of tensors that knows which of those that it has read are still there."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[torch.Tensor]] = []

    def ones(self, count: int) -> torch.Tensor:
        return torch.ones(count)

    def total(self, tensor: torch.Tensor) -> float:
        self.seen.append(weakref.ref(tensor))
        return float(tensor.sum())

    def alive(self, *_: float) -> int:
        return sum(reference() is not None for reference in self.seen)


def test_tensors_are_dropped_after_their_last_reader() -> None:
    """Not at the end of the execution: an actor with many calls would hold all that it has received in it."""
    maker, reader = Watcher(), Watcher()
    with raylane.InputNode() as x:
        totals = [raylane.bind(reader.total, raylane.bind(maker.ones, x)) for _ in range(5)]
        count = raylane.bind(reader.alive, *totals)
    with raylane.compile(count, backend="inline") as graph:
        assert graph.execute(1000).get() == 0
