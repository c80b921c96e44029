"""Sharing of memory among the tensors of a value arrives as it was, by every transport and in every form of reading."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
import torch
from tests.transport.crews import OneMaker

import raylane
from raylane.core.deadline import Deadline
from raylane.transport.read.deliver import Present, delivery
from raylane.transport.read.unpickling import fit
from raylane.transport.value import codec
from raylane.transport.value.leaf_memory import tied

TRANSPORTS = ["host", "tcp", "gloo", "object_store"]
ROWS, COLUMNS = 60, 700  # 168 kB: above what travels inline


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Record:
    first: Any
    second: Any


class Named(dict):  # type: ignore[type-arg]  # users subclass dict without parameters
    """A dict with an attribute, as state dicts are."""


CONTAINERS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: {"first": a, "second": b},
    lambda a, b: [a, {"second": b}],
    lambda a, b: Pair(a, b),
    lambda a, b: Record(a, b),
    lambda a, b: collections.OrderedDict(first=a, second=b),
    lambda a, b: Named(first=a, second=b),
    lambda a, b: types.SimpleNamespace(first=a, second=b),
    lambda a, b: argparse.Namespace(first=a, second=b),
    lambda a, b: collections.UserDict(first=a, second=b),
]


def views(seed: int) -> list[Any]:
    """Return tensors and arrays that share memory in some random way; deterministic."""
    draw = random.Random(seed)
    base = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) * 0.5
    other = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) - 7
    forms: list[Callable[[torch.Tensor], Any]] = [
        lambda t: t,
        lambda t: t.detach(),
        lambda t: t[:, draw.randrange(COLUMNS)],
        lambda t: t[draw.randrange(ROWS)],
        lambda t: t[5:40, 100:300],
        lambda t: t[::7, ::3],
        lambda t: t.T,
        lambda t: t.flatten()[draw.randrange(1000) :],
        lambda t: t.diagonal(),
        lambda t: t[3:9, 650:],
    ]
    return [draw.choice(forms)(draw.choice([base, base, other])) for _ in range(draw.randrange(2, 7))]


def nested(seed: int, tensors: list[Any]) -> Any:
    """Return a value with these tensors, and one of them twice."""
    draw = random.Random(seed)
    value: Any = draw.choice(tensors)
    for tensor in tensors:
        value = draw.choice(CONTAINERS)(value, tensor)
    return value


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors of a value in a fixed order, each place once."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return [value]
    if isinstance(value, collections.UserDict | dict):
        parts: Any = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    else:
        parts = vars(value).values()
    return [tensor for part in parts for tensor in tensors_in(part)]


def sharing(tensors: list[Any]) -> list[tuple[bool, bool]]:
    """Return for each pair of tensors if they are one object, and if NumPy finds an element in common."""
    arrays = [t.detach().numpy() if isinstance(t, torch.Tensor) else t for t in tensors]
    return [
        (tensors[i] is tensors[j], bool(np.shares_memory(arrays[i], arrays[j])))
        for i in range(len(tensors))
        for j in range(i)
    ]


class OneShot:
    """Can be pickled once: what arrives holds a lock."""

    def __reduce__(self) -> Any:
        return threading.Lock, ()


class Maker:
    @raylane.method
    def direct(self, seed: int) -> Any:
        return nested(seed, views(seed))

    def plain(self, seed: int) -> Any:
        return nested(seed, views(seed))

    @raylane.method
    def tied(self) -> Any:
        weight = torch.arange(50_000.0)
        return {"a": weight, "b": weight}

    def module(self, scale: float) -> Any:
        model = torch.nn.Linear(300, 200)
        torch.nn.init.constant_(model.weight, scale)
        return collections.OrderedDict(model=model, state=torch.nn.Linear(300, 200).state_dict(), ref=ray.put(3))

    def one_shot(self) -> Any:
        return {"lock": OneShot(), "t": torch.ones(3), "list": [np.zeros(2)]}

    @raylane.method
    def windows(self) -> Any:
        return np.lib.stride_tricks.sliding_window_view(np.arange(60_000.0), 20)

    @raylane.method
    def masked(self) -> Any:
        return np.ma.masked_array(np.arange(50_000.0), mask=np.arange(50_000) % 3 == 0)

    @raylane.method
    def mixed(self) -> Any:
        whole = torch.arange(50_000.0)
        return {"values": whole, "bits": whole.view(torch.int32), "array": whole.numpy()}

    def stats(self) -> dict[str, Any]:
        return raylane.stats()


class Crew(OneMaker):
    maker_class = Maker


@pytest.fixture
def maker(crew: Crew, tidy: None) -> Any:
    return crew.maker


@pytest.mark.claim("transport", "views and tied weights stay tied by every transport, also after `dtype=`")
@pytest.mark.parametrize("method", ["direct", "plain"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sharing_arrives_by_every_transport(maker: Any, transport: str, method: str) -> None:
    refs = [getattr(maker, method).remote(seed) for seed in range(25)]
    for seed, value in enumerate(raylane.get(refs, tensor_transport=transport)):
        expected = tensors_in(nested(seed, views(seed)))
        arrived = tensors_in(value)
        assert [torch.equal(a, b) for a, b in zip(expected, arrived, strict=True)] == [True] * len(expected), seed
        if method == "direct":  # Ray's own pickles untie views
            assert sharing(arrived) == sharing(expected), seed


@pytest.mark.claim("transport", "views and tied weights stay tied by every transport, also after `dtype=`")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sharing_survives_conversion(maker: Any, transport: str) -> None:
    for seed in range(12):
        expected = tensors_in(nested(seed, views(seed)))
        value = raylane.get(maker.direct.remote(seed), dtype=torch.float64, device="cpu", tensor_transport=transport)
        arrived = tensors_in(value)
        assert [torch.equal(a.double(), b) for a, b in zip(expected, arrived, strict=True)] == [True] * len(expected)
        assert {tensor.dtype for tensor in arrived} == {torch.float64}
        assert sharing(arrived) == sharing(expected), seed


@pytest.mark.parametrize("method", ["direct", "plain"])
def test_targets_of_every_place_are_filled(maker: Any, method: str) -> None:
    for seed in range(25):
        model = nested(seed, views(seed))
        expected = tensors_in(model)
        into = nested_like(model)
        value = raylane.get(getattr(maker, method).remote(seed), into=into)
        targets = tensors_in(into)
        assert [torch.equal(a, b) for a, b in zip(expected, targets, strict=True)] == [True] * len(expected), seed
        assert [a is b for a, b in zip(targets, tensors_in(value), strict=True)] == [True] * len(targets), seed


def nested_like(value: Any) -> Any:
    """Return the containers of a value with new tensors, one for each place."""
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape)
    if isinstance(value, collections.UserDict | dict):
        return type(value)({key: nested_like(part) for key, part in value.items()})
    if isinstance(value, Pair):
        return Pair(*map(nested_like, value))
    if isinstance(value, list):
        return [nested_like(part) for part in value]
    return type(value)(**{name: nested_like(part) for name, part in vars(value).items()})


@pytest.mark.claim("transport", "`into=` fills tensors of any strides; after an error nothing writes there")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tied_weights_are_read_into_untied_ones(maker: Any, transport: str) -> None:
    into = {"a": torch.zeros(50_000), "b": torch.zeros(50_000)}
    ref = maker.tied.remote()
    value = raylane.get(ref, into=into, tensor_transport=transport)
    assert value["a"] is into["a"]
    assert value["b"] is into["b"]
    assert torch.equal(into["a"], torch.arange(50_000.0))
    assert torch.equal(into["b"], torch.arange(50_000.0))
    opened = raylane.open(ref)
    assert opened.tensors[0].paths == (("a",), ("b",))
    assert float(opened.read("a", slices=7)) == float(opened.read("b", slices=7)) == 7


@pytest.mark.claim("transport", "readers may take any value in another floating-point dtype")
def test_ordinary_values_with_modules_are_converted(maker: Any) -> None:
    value = raylane.get(maker.module.remote(2.0), dtype=torch.bfloat16)
    assert {p.dtype for p in value["model"].parameters()} == {torch.bfloat16}
    assert {p.dtype for p in value["state"].values()} == {torch.bfloat16}
    assert isinstance(value["model"].weight, torch.nn.Parameter)
    assert ray.get(value["ref"]) == 3
    reader = torch.nn.Linear(300, 200)
    state = reader.state_dict()
    raylane.get(maker.module.remote(4.0), into={"state": state})
    opened = raylane.open(maker.module.remote(2.0))
    assert len(opened.tensors) == 4
    assert float(opened.read(("state", "weight")).abs().sum()) > 0


def test_values_that_cannot_be_pickled_again_can_be_opened(maker: Any) -> None:
    opened = raylane.open(maker.one_shot.remote())
    assert [info.path for info in opened.tensors] == [("t",), ("list", 0)]
    assert opened.read("t").tolist() == [1, 1, 1]
    into = {"a": torch.zeros(50_000)}
    lists = raylane.get([maker.tied.remote(), maker.one_shot.remote()], into=[into, None])
    assert lists[1]["t"].tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match="could not look for tensors in a value of dict"):
        raylane.get(maker.one_shot.remote(), dtype=torch.float64)


def test_windows_arrive_read_only_and_masks_keep_their_meaning(maker: Any) -> None:
    for transport in TRANSPORTS:
        windows = raylane.get(maker.windows.remote(), tensor_transport=transport)
        assert windows[100, 5] == 105
        with pytest.raises(ValueError, match="read-only"):
            windows[100, 5] = 0
        masked = raylane.get(maker.masked.remote(), tensor_transport=transport)
        assert masked.mask.sum() == 16_667
        assert masked.sum() == sum(i for i in range(50_000) if i % 3)


def overlapping() -> list[tuple[Any, str]]:
    one, wide = torch.zeros(50_000), torch.zeros(60_000)
    freed = torch.zeros(50_000)
    freed.untyped_storage().resize_(0)
    return [
        ({"a": one, "b": one}, "different tensors"),
        ({"a": wide[:50_000], "b": wide[10_000:]}, "share memory"),
        ({"a": torch.zeros(1).expand(50_000)}, "elements share memory"),
        ({"a": torch.zeros(50_000).as_strided((50_000,), (0,))}, "elements share memory"),
        ({"a": freed}, "without its memory"),
    ]


@pytest.mark.parametrize("number", range(5))
def test_targets_that_cannot_take_the_value_are_refused(cluster: None, number: int) -> None:
    into, text = overlapping()[number]
    ref = raylane.put({"a": torch.ones(50_000), "b": torch.zeros(50_000)})
    for target in into.values():
        if target.untyped_storage().nbytes():
            assert not target.any()
    with pytest.raises(ValueError, match=text):
        raylane.get(ref, into=into)
    with pytest.raises(ValueError, match=text):
        raylane.get([ref, ref], into=[{"a": into["a"]}, {"b": into.get("b", into["a"])}])
    with pytest.raises(TypeError, match="masked array"):
        raylane.get(raylane.put(np.zeros(50_000)), into=np.ma.masked_array(np.zeros(50_000)))


def test_tied_targets_take_tied_leaves(maker: Any, cluster: None) -> None:
    """`state_dict()` gives tied weights as two tensors over one memory, in the value and in the targets."""
    weight, target = torch.arange(50_000.0), torch.zeros(50_000)
    ref = raylane.put({"a": weight.detach(), "b": weight.detach(), "row": weight[100:200]}, snapshot=True)
    raylane.get(ref, into={"a": target, "b": target.detach(), "row": target[100:200]})
    assert torch.equal(target, weight)
    raylane.get(maker.tied.remote(), into={"a": target, "b": target})
    with pytest.raises(ValueError, match="share memory"):
        raylane.get(ref, into={"a": target, "row": target[101:201]})


def test_conversion_that_would_untie_is_refused(maker: Any) -> None:
    ref = maker.mixed.remote()
    with pytest.raises(ValueError, match=r"torch.float32, torch.int32.*share memory"):
        raylane.get(ref, dtype=torch.float64)
    value = raylane.get(ref, dtype=torch.float32)  # nothing to convert
    assert np.shares_memory(value["values"].numpy(), value["array"])


def test_slices_with_negative_steps_are_refused_for_tensors(maker: Any) -> None:
    opened = raylane.open(maker.tied.remote())
    with pytest.raises(ValueError, match="step"):
        opened.read("a", slices=slice(None, None, -1))
    array = raylane.open(maker.windows.remote())
    assert array.read(slices=(slice(None, None, -1), 0))[0] == 59_980


def present(value: Any, into: Any = None, **options: Any) -> Any:
    """Return a value that this process has published, as `raylane.get` would deliver it."""
    own = Present(*codec.encode_value(value), own_objects=True)
    (wish,) = fit([own], [delivery(into, options.get("device"), options.get("dtype"), where="test")])
    return own.deliver(wish, Deadline(None))


def test_own_tensors_as_targets_in_another_order_swap() -> None:
    a, b, row = torch.zeros(4), torch.ones(4), np.arange(8.0)
    present({"a": a, "b": b, "c": row[:4], "d": row[4:]}, {"a": b, "b": a, "c": row[4:], "d": row[:4]})
    assert (a.tolist(), b.tolist(), row.tolist()) == ([1] * 4, [0] * 4, [4, 5, 6, 7, 0, 1, 2, 3])


def test_interleaved_tensors_are_converted_each() -> None:
    matrix = np.arange(600.0).reshape(20, 30)
    value = {"tensor": torch.from_numpy(matrix[:, :10]), "array": matrix[:, 10:]}
    converted = present(value, dtype=torch.float32)
    assert torch.equal(converted["tensor"], torch.from_numpy(matrix[:, :10]).float())
    assert converted["array"].dtype == np.float64


def test_negated_views_are_converted_alone() -> None:
    base = torch.complex(torch.ones(5), torch.arange(5.0))
    value = {"base": base, "imag": base.conj().imag}
    assert value["imag"].is_neg()
    assert present(value, dtype=torch.float64)["imag"].tolist() == [0, -1, -2, -3, -4]


def test_tied_leaves_are_those_that_share_memory_for_numpy() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        base = np.zeros((12, 30), np.int16)
        views = []
        for _ in range(draw.randrange(3, 9)):
            view = base[draw.randrange(4) :: draw.randrange(1, 4), draw.randrange(29) :: draw.randrange(1, 9)]
            view = draw.choice([view, view, view.T, view[:, : draw.randrange(1, 4)], view[0]])
            views.append(view)
        group = {i: number for number, members in enumerate(tied(views)) for i in members}
        shared = {(i, j) for i in range(len(views)) for j in range(i) if np.shares_memory(views[i], views[j])}
        assert all(group[i] == group[j] for i, j in shared), seed
        for members in tied(views):  # and nobody is there without a reason
            assert len(members) == 1 or all(any({(i, j), (j, i)} & shared for j in members) for i in members), seed


def test_many_columns_of_a_wide_matrix_are_packed_each() -> None:
    matrix = torch.zeros(500, 4000)
    layout = codec.plan_layout([matrix[:, 20 * i] for i in range(200)])
    assert [block.nbytes for block in layout.blocks] == [2000] * 200


@pytest.mark.parametrize("columns", [2, 300])
def test_columns_of_one_matrix_cost_no_more_than_the_matrix(columns: int) -> None:
    matrix = torch.zeros(400, 300)
    leaves = [matrix[:, i] for i in range(columns)]
    layout = codec.plan_layout(leaves)
    assert sum(block.nbytes for block in layout.blocks) <= 2 * columns * 400 * 4


def test_equal_views_are_packed_once() -> None:
    matrix = torch.rand(400, 300)
    layout = codec.plan_layout([matrix[:, 3], matrix[:, 3], matrix[:, 5]])
    assert [spec.block for spec in layout.specs].count(layout.specs[0].block) == 2
    assert sum(block.nbytes for block in layout.blocks) == 2 * 400 * 4
