"""Values in and out of the codec, without Ray: what comes back is equal, shares what it shared, and keeps its kind."""

from __future__ import annotations

import ctypes
import dataclasses
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from raylane.errors import TensorFreedError
from raylane.transport.value import codec


def travel(value: Any) -> Any:
    """Encode, copy the blocks as a transport would, decode."""
    skeleton, leaves = codec.encode_value(value)
    layout = codec.plan_layout(leaves)
    blocks = [bytearray(ctypes.string_at(block.start, block.nbytes)) for block in layout.blocks]
    return codec.decode_value(skeleton, codec.build_leaves(layout.specs, blocks))


def moved_bytes(value: Any) -> int:
    return sum(block.nbytes for block in codec.plan_layout(codec.encode_value(value)[1]).blocks)


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def plain_dtype(dtype: torch.dtype) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # complex32 calls itself experimental
            return not torch.empty(1, dtype=dtype).is_quantized
    except (RuntimeError, TypeError):
        return False


@pytest.mark.claim("transport", "one value may hold CPU and CUDA tensors, of every dtype of torch")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [d for d in DTYPES if plain_dtype(d)], ids=str)
def test_every_torch_dtype(dtype: torch.dtype) -> None:
    raw = torch.arange(64, dtype=torch.uint8) % 2  # valid bit patterns for bool as well
    tensor = raw.clone().view(dtype) if dtype.itemsize <= 16 else raw
    back = travel(tensor)
    assert back.dtype == dtype
    assert bytes(back.view(torch.uint8).numpy()) == bytes(raw.numpy())


def test_there_are_as_many_dtypes_as_torch_has() -> None:
    assert len([d for d in DTYPES if plain_dtype(d)]) >= 20


@pytest.mark.claim("transport", "NumPy arrays of every kind of dtype arrive as they were")
@pytest.mark.parametrize(
    "dtype",
    ["?", "i1", "<u2", ">i4", "f2", "f8", "c16", "S7", "U5", "M8[ns]", "m8[s]", [("a", "<i4"), ("b", "f8", (2,))]],
)
def test_numpy_dtypes(dtype: Any) -> None:
    array = np.zeros(12, dtype=dtype)
    back = travel(array)
    assert type(back) is np.ndarray
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


@pytest.mark.claim("transport", "tensors of any shape and strides arrive with their strides")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24.0).reshape(4, 6).t(),
        lambda: torch.arange(24.0)[::2],
        lambda: torch.arange(6.0).expand(5, 6),
        lambda: torch.tensor(3.5),
        lambda: torch.empty(0, 3),
        lambda: torch.arange(24.0).reshape(2, 3, 4)[:, 1],
        lambda: torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "expanded", "0-dim", "empty", "selected", "channels-last"],
)
def test_shapes_and_strides(make: Any) -> None:
    tensor = make()
    back = travel({"x": tensor})["x"]
    assert torch.equal(back, tensor)
    assert back.shape == tensor.shape
    assert back.stride() == tensor.stride()


@pytest.mark.parametrize("index", [np.s_[::-1], np.s_[:, ::2], np.s_[1:3, 1:3], np.s_[0, 0, None]])
def test_numpy_views(index: Any) -> None:
    array = np.arange(24).reshape(4, 6)[index]
    assert np.array_equal(travel(array), array)


def test_array_without_a_dtype_description_is_pickled() -> None:
    overlapping = np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2], "itemsize": 8})
    array = np.zeros(3, overlapping)
    array["a"] = 7
    _, leaves = codec.encode_value(array)
    assert leaves == []
    found = travel(array)
    assert found.dtype == overlapping
    assert np.array_equal(found["a"], array["a"])


def test_conjugate_and_negative_bits_are_resolved() -> None:
    tensor = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(travel(tensor.conj()), tensor.conj())
    assert torch.equal(travel(tensor.conj().imag), tensor.conj().imag)


@pytest.mark.claim("transport", "views and tied weights stay tied by every transport, also after `dtype=`")
def test_views_of_one_storage_move_once_and_stay_tied() -> None:
    base = torch.zeros(1000)
    value = {"base": base, "head": base[:10], "again": base}
    assert moved_bytes(value) == 4000
    back = travel(value)
    back["head"] += 1
    assert back["base"][:10].tolist() == [1.0] * 10
    assert back["again"] is back["base"]


def test_torch_and_numpy_over_the_same_memory_stay_tied() -> None:
    array = np.zeros(100, dtype=np.float32)
    back = travel((array, torch.from_numpy(array)[50:]))
    back[1].fill_(2)
    assert back[0][49:51].tolist() == [0, 2]


@pytest.mark.claim("transport", "views and tied weights stay tied by every transport, also after `dtype=`")
def test_tied_parameters_stay_tied_and_parameters() -> None:
    embedding = torch.nn.Embedding(10, 4)
    head = torch.nn.Linear(4, 10, bias=False)
    head.weight = embedding.weight
    model = torch.nn.ModuleDict({"embedding": embedding, "head": head})
    assert moved_bytes(model) == 160
    back = travel(model)
    assert back["head"].weight is back["embedding"].weight
    assert type(back["head"].weight) is Parameter
    alias = travel([embedding.weight, Parameter(embedding.weight.data)])
    with torch.no_grad():
        alias[0].fill_(7)
    assert alias[1].flatten()[0] == 7


def test_requires_grad_is_kept() -> None:
    values = [torch.ones(2, requires_grad=True), torch.ones(2), Parameter(torch.ones(2), requires_grad=False)]
    assert [v.requires_grad for v in travel(values)] == [True, False, False]
    computed = values[0] * 2
    assert travel(computed).requires_grad
    assert travel(computed).is_leaf


def test_attributes_of_a_tensor_are_kept() -> None:
    tensor = torch.ones(3)
    tensor.axes = ("batch",)  # type: ignore[attr-defined]
    assert travel(tensor).axes == ("batch",)
    assert travel([tensor])[0].axes == ("batch",)


def test_a_small_view_of_a_large_storage_moves_only_itself() -> None:
    base = torch.zeros(1_000_000)
    assert moved_bytes(base[10:20]) <= 40 + 16
    assert moved_bytes([base[:10], base[-10:]]) <= 80 + 32
    column = torch.zeros(1000, 1000)[:, 3]
    assert moved_bytes(column) == 4000
    assert torch.equal(travel(column), column)
    assert moved_bytes(np.zeros((1000, 1000))[:, 3]) == 8000


def test_views_of_other_dtypes_at_odd_offsets() -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    value = [raw[3:40], raw[4:36].view(torch.float32), raw.numpy()[5:9]]
    back = travel(value)
    assert torch.equal(back[0], value[0])
    assert torch.equal(back[1].view(torch.uint8), value[1].view(torch.uint8))
    back[0][1] = 99
    assert back[1].view(torch.uint8)[0] == 99


@dataclasses.dataclass
class Batch:
    tokens: torch.Tensor
    lengths: np.ndarray[Any, Any]
    name: str
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@pytest.mark.claim("transport", "a value may be a nested container, a dataclass or a TensorDict")
def test_containers() -> None:
    value = Batch(torch.arange(6), np.arange(3), "b", {"nested": [(torch.ones(2), {"deep": torch.zeros(1)}, None)]})
    back = travel(value)
    assert type(back) is Batch
    assert torch.equal(back.tokens, value.tokens)
    assert np.array_equal(back.lengths, value.lengths)
    assert torch.equal(back.extra["nested"][0][1]["deep"], torch.zeros(1))


@pytest.mark.claim("transport", "a value may be a nested container, a dataclass or a TensorDict")
def test_tensordict() -> None:
    from tensordict import TensorDict

    value = TensorDict({"a": torch.arange(6).reshape(2, 3), "b": {"c": torch.ones(2, 1)}}, batch_size=[2])
    back = travel(value)
    assert type(back) is TensorDict
    assert back.batch_size == torch.Size([2])
    assert torch.equal(back["b", "c"], torch.ones(2, 1))
    assert len(codec.encode_value(value)[1]) == 2


def test_encode_value_pickles_containers_around_leaves() -> None:
    sparse = torch.eye(4).to_sparse()
    assert torch.equal(travel(sparse).to_dense(), torch.eye(4))
    objects = np.array([{"a": 1}, None], dtype=object)
    assert travel([objects])[0][0] == {"a": 1}
    assert travel(torch.empty(3, device="meta")).device.type == "meta"


def test_values_without_tensors() -> None:
    for value in (None, 5, "text", {"a": [1, 2.5]}, b"bytes" * 1000):
        assert travel(value) == value
        assert codec.encode_value(value)[1] == []


def test_two_thousand_small_tensors() -> None:
    value = [torch.full((7,), float(i)) for i in range(2000)]
    back = travel(value)
    assert all(torch.equal(a, b) for a, b in zip(back, value, strict=True))


def test_a_closure_and_a_local_class_travel() -> None:
    class Local:
        def __init__(self) -> None:
            self.weight = torch.ones(3)

    back = travel((Local(), lambda x: x + 1))
    assert back[0].weight.tolist() == [1, 1, 1]
    assert back[1](1) == 2


def test_nothing_unpickles_a_skeleton_but_decode() -> None:
    skeleton, _ = codec.encode_value([torch.ones(2)])
    with pytest.raises(pickle.UnpicklingError, match="by raylane only"):
        pickle.loads(skeleton)


def test_decode_value_ignores_the_default_device() -> None:
    value = [torch.arange(3.0), torch.empty(0, 2), Parameter(torch.ones(2))]
    skeleton, leaves = codec.encode_value(value)
    layout = codec.plan_layout(leaves)
    blocks = [ctypes.create_string_buffer(ctypes.string_at(span.start, span.nbytes)) for span in layout.blocks]
    with torch.device("meta"):
        back = codec.decode_value(skeleton, codec.build_leaves(layout.specs, blocks))
    assert [tensor.device.type for tensor in back] == ["cpu"] * 3
    assert [tensor.tolist() for tensor in back] == [[0, 1, 2], [], [1, 1]]


@pytest.mark.claim("security", "a tensor over freed or shrunk storage is never published")
@pytest.mark.parametrize("left", [0, 40])
@pytest.mark.parametrize("numel", [1_000, 200_000])
def test_tensor_without_its_memory_is_not_published(left: int, numel: int) -> None:
    tensor = torch.ones(numel)
    values = tensor, tensor[::4], tensor.expand(2, numel)
    tensor.untyped_storage().resize_(left)
    for value in values:
        with pytest.raises(TensorFreedError, match=f"storage holds {left} bytes"):
            codec.plan_layout([value])
    codec.plan_layout([tensor[:0]])


def test_fake_tensors_are_not_published() -> None:
    with FakeTensorMode():
        fake = torch.ones(3, 4)
    for value in (fake, {"a": [fake]}):
        with pytest.raises(TypeError, match=r"could not publish a tensor of shape \(3, 4\): it is a .*FakeTensor that"):
            travel(value)


def test_tensor_within_a_shrunk_storage_is_published() -> None:
    tensor = torch.arange(1_000.0)
    first = tensor[:10]
    tensor.untyped_storage().resize_(40)
    assert torch.equal(travel(first), torch.arange(10.0))
