from __future__ import annotations

import random
import subprocess
import sys
from collections import OrderedDict, defaultdict
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from raylane.graph.plan.ir import Build, Const, Join, Ref, Select
from raylane.graph.values.operations import evaluate, gather, mean, select, split
from raylane.workers.batch import BatchDict


def parts(value: Any, count: int, axis: int = 0) -> list[Any]:
    return [split(value, index, count, axis) for index in range(count)]


class Pair(NamedTuple):
    loss: Any
    count: Any


class Rows:
    """Cuts and joins itself."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def shard(self, index: int, count: int) -> Rows:
        return Rows(self.rows[index::count])

    @classmethod
    def from_batches(cls, batches: list[Rows]) -> Rows:
        return cls([row for batch in batches for row in batch.rows])


class Swapped(Rows):
    """As datasets.Dataset has it: the number first."""

    def shard(self, num_shards: int, index: int, contiguous: bool = True) -> Swapped:  # type: ignore[override]
        return Swapped(self.rows[index::num_shards])


class Unnamed(Rows):
    def shard(self, i: int, n: int) -> Unnamed:  # type: ignore[override]
        return Unnamed(self.rows[i::n])


# select


class Thing:
    loss = 0.5


@pytest.mark.parametrize(
    ("value", "steps", "expected"),
    [
        (7, (), 7),
        ([1, 2], (("item", 1),), 2),
        ({"a": {"b": 3}}, (("item", "a"), ("item", "b")), 3),
        (Thing(), (("attr", "loss"),), 0.5),
        ({"a": [1, 2, 3]}, (("item", "a"), ("part", 0, 2, 0)), [1, 2]),
        ({"a": 1}, (("done",),), None),
    ],
)
def test_select(value: Any, steps: Any, expected: Any) -> None:
    assert select(value, steps) == expected


@pytest.mark.parametrize(
    ("value", "step", "error", "says"),
    [
        ({"a": 1, "b": 2}, ("item", "c"), KeyError, r"\['c'\] of dict with the keys \['a', 'b'\]"),
        ([1, 2], ("item", 5), IndexError, r"\[5\] of list of length 2: list index out of range"),
        (None, ("item", 0), TypeError, r"\[0\] of None: 'NoneType' object is not subscriptable"),
        (5, ("item", "x"), TypeError, r"\['x'\] of int"),
        (np.zeros((2, 3)), ("item", 2), IndexError, r"numpy.ndarray of shape \(2, 3\) and dtype float64"),
        ({"loss": 1}, ("attr", "loss"), AttributeError, r"for its key write node\['loss'\]"),
        (Thing(), ("attr", "lost"), AttributeError, r"\.lost of .*Thing"),
    ],
)
def test_select_missing_part_names_the_value(value: Any, step: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        select(value, (step,))


# split


@pytest.mark.parametrize("length", [4, 5, 7, 8])
def test_parts_are_those_of_array_split(length: int) -> None:
    array = np.arange(length)
    expected = [part.tolist() for part in np.array_split(array, 4)]
    assert [part.tolist() for part in parts(array, 4)] == expected
    assert parts(list(range(length)), 4) == expected
    assert [list(part) for part in parts(tuple(range(length)), 4)] == expected
    assert [part.tolist() for part in parts(torch.arange(length), 4)] == expected
    assert [part["x"] for part in parts({"x": list(range(length))}, 4)] == expected
    assert [part["x"] for part in parts(BatchDict(x=list(range(length))), 4)] == expected


def test_strings_and_ranges_are_cut() -> None:
    assert parts("abcde", 2) == ["abc", "de"]
    assert parts(b"abcde", 2) == [b"abc", b"de"]
    assert parts(range(5), 2) == [range(3), range(3, 5)]


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor])
def test_arrays_are_cut_along_any_axis_as_views_and_joined_again(make: Any, axis: int) -> None:
    array = make(np.arange(4 * 5 * 6).reshape(4, 5, 6))
    cut = parts(array, 3, axis)
    for part, expected in zip(cut, np.array_split(np.asarray(array), 3, axis), strict=True):
        assert np.array_equal(part, expected)
        assert np.shares_memory(np.asarray(part), np.asarray(array))
    assert np.array_equal(gather(cut, axis), array)


def test_a_dict_keeps_its_type() -> None:
    ordered = split(OrderedDict(a=[1, 2], b=[3, 4]), 1, 2)
    assert type(ordered) is OrderedDict
    assert ordered == {"a": [2], "b": [4]}
    made = defaultdict(list, a=[1, 2])
    assert split(made, 0, 2)["not there"] == []
    assert made == {"a": [1, 2]}


def test_split_batch_shares_memory_and_gathers_again() -> None:
    batch = BatchDict(ids=torch.arange(14).reshape(7, 2), names=list("abcdefg"))
    cut = parts(batch, 3)
    assert [type(part) for part in cut] == [BatchDict] * 3
    assert [part.size for part in cut] == [3, 2, 2]
    assert [part["names"] for part in cut] == [part["names"] for part in batch.shard(3, allow_uneven=True)]
    assert cut[1]["ids"].untyped_storage().data_ptr() == batch["ids"].untyped_storage().data_ptr()
    joined = gather(cut, 0)
    assert type(joined) is BatchDict
    assert torch.equal(joined["ids"], batch["ids"])
    assert joined["names"] == batch["names"]


def test_a_batch_pads_what_it_joins() -> None:
    joined = gather([BatchDict(ids=torch.ones(1, 3)), BatchDict(ids=torch.ones(2, 2))], 0)
    assert joined["ids"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0]]


@pytest.mark.parametrize("kind", [Rows, Swapped, Unnamed])
def test_an_object_is_asked_for_its_shard(kind: type[Rows]) -> None:
    cut = parts(kind([0, 1, 2, 3, 4]), 2)
    assert [part.rows for part in cut] == [[0, 2, 4], [1, 3]]
    assert gather(cut, 0).rows == [0, 2, 4, 1, 3]


def test_a_tensordict_is_an_array() -> None:
    made = TensorDict({"a": torch.arange(5), "b": torch.zeros(5, 2)}, batch_size=[5])
    cut = parts(made, 2)
    assert [part["a"].tolist() for part in cut] == [[0, 1, 2], [3, 4]]
    assert gather(cut, 0)["a"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"TensorDict of shape \(5,\)"):
        split(made, 0, 6)


class Standard:
    """What follows the array API standard and is neither NumPy's nor torch's."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data, self.shape, self.dtype = data, data.shape, data.dtype

    def __getitem__(self, key: Any) -> Standard:
        return Standard(self.data[key])

    def __add__(self, other: Standard) -> Standard:
        return Standard(self.data + other.data)

    def __truediv__(self, other: int) -> Standard:
        return Standard(self.data / other)

    def __array_namespace__(self) -> Any:
        return Standard

    @staticmethod
    def concat(arrays: list[Standard], axis: int) -> Standard:
        return Standard(np.concatenate([array.data for array in arrays], axis))


def test_arrays_of_the_standard_are_cut_joined_and_averaged() -> None:
    array = Standard(np.arange(12.0).reshape(3, 4))
    cut = parts(array, 2, 1)
    assert [part.shape for part in cut] == [(3, 2), (3, 2)]
    assert np.array_equal(gather(cut, 1).data, array.data)
    assert np.array_equal(mean([array, array]).data, array.data)


def batch_with(batch: BatchDict, **more: Any) -> BatchDict:
    batch.update(more)  # which nothing checks
    return batch


@pytest.mark.parametrize(
    ("value", "count", "axis", "error", "says"),
    [
        ([1, 2], 3, 0, ValueError, "scatter of list of length 2: its length along axis 0 is 2, but 3 parts are wanted"),
        (np.zeros((4, 2)), 3, 1, ValueError, r"shape \(4, 2\) and dtype float64: its length along axis 1 is 2"),
        (torch.zeros(2), 3, 0, ValueError, r"torch.Tensor of shape \(2,\) and dtype torch.float32"),
        (np.zeros((4, 2)), 2, 2, ValueError, "its axes are 0 to 1"),
        (torch.tensor(1.0), 1, 0, ValueError, "it has no dimensions"),
        ([1, 2], 2, 1, ValueError, "only arrays and tensors have other axes than 0"),
        (BatchDict(x=[1, 2]), 2, 1, ValueError, "only arrays and tensors have other axes than 0"),
        (BatchDict(x=[1, 2]), 3, 0, ValueError, "BatchDict with the keys .*but 3 parts are wanted"),
        (batch_with(BatchDict(x=[1, 2]), y=[1]), 1, 0, ValueError, "the same number of rows"),
        (None, 2, 0, TypeError, r"scatter of None: cannot split it into 2 parts.*shard\(index, count\)"),
        (7, 2, 0, TypeError, "scatter of int: cannot split it"),
        ({1, 2}, 2, 0, TypeError, "scatter of set: cannot split it"),
    ],
)
def test_split_refuses_values_that_cannot_be_split(
    value: Any, count: int, axis: int, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        split(value, 0, count, axis)


def test_an_error_inside_a_dict_names_the_item() -> None:
    with pytest.raises(TypeError, match="scatter of int") as caught:
        split({"batch": {"ids": [1, 2], "step": 3}}, 0, 2)
    assert caught.value.__notes__ == ["in the item ['step'] of the value", "in the item ['batch'] of the value"]


# gather


@pytest.mark.parametrize(
    ("values", "axis", "expected"),
    [
        ([1, None, "x"], None, [1, None, "x"]),
        ([[1], [2, 3]], None, [[1], [2, 3]]),
        ([[1], [], [2, 3]], 0, [1, 2, 3]),
        ([(1,), (2, 3)], 0, (1, 2, 3)),
        (["ab", "c"], 0, "abc"),
        ([b"ab", b"c"], 0, b"abc"),
        ([{"x": [1], "y": (1,)}, {"y": (2,), "x": [2]}], 0, {"x": [1, 2], "y": (1, 2)}),
    ],
)
def test_gather(values: list[Any], axis: int | None, expected: Any) -> None:
    assert gather(values, axis) == expected


@pytest.mark.parametrize(
    ("values", "axis", "error", "says"),
    [
        ([1, 2], 0, TypeError, "gather along axis 0 of int: .* axis=None gives a list"),
        ([[1], (2,)], 0, TypeError, "gather of list and tuple: the values must be of one kind"),
        ([np.zeros(2), torch.zeros(2)], 0, TypeError, "gather of numpy.ndarray and torch.Tensor"),
        ([{"a": [1]}, {"b": [1]}], 0, ValueError, r"value 0 has \['a'\], value 1 has \['b'\]"),
        ([[1], [2]], 1, ValueError, "only arrays and tensors have other axes than 0"),
        ([np.zeros((2, 3)), np.zeros((2, 4))], 0, ValueError, r"of shape \(2, 3\) .*, numpy.ndarray of shape \(2, 4\)"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], 0, ValueError, r"of shape \(2, 3\) .* of shape \(2, 4\)"),
        ([np.zeros(3)], 1, ValueError, "its axes are 0 to 0"),
        ([np.array(3.0)], 0, ValueError, "it has no dimensions"),
    ],
)
def test_gather_refuses_values_that_cannot_be_joined(values: Any, axis: int, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        gather(values, axis)


def test_parameters_and_tensors_are_joined() -> None:
    assert gather([torch.nn.Parameter(torch.zeros(1)), torch.ones(1)], 0).tolist() == [0, 1]


@pytest.mark.claim("graphs", "edges scatter and gather lists, arrays, tensors, dicts and `BatchDict`, or take a mean")
@pytest.mark.parametrize("seed", range(10))
def test_gather_is_the_inverse_of_split(seed: int) -> None:
    rng = random.Random(seed)

    def value(depth: int) -> Any:
        kind = rng.randrange(5 if depth else 4)
        length = rng.randint(3, 9)
        if kind == 4:
            return {key: value(depth - 1) for key in "abc"[: rng.randint(1, 3)]}
        items = [rng.randrange(100) for _ in range(length)]
        return [items, tuple(items), np.asarray(items), torch.tensor(items)][kind]

    for _ in range(20):
        made = value(2)
        assert repr(gather(parts(made, rng.randint(1, 3)), 0)) == repr(made)


# mean


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], 1.5),
        ([1.0, 2.0, 6.0], 3.0),
        ([True, False], 0.5),
        ([1 + 1j, 1 - 1j], 1 + 0j),
        ([Fraction(1, 2), Fraction(1, 4)], Fraction(3, 8)),
        ([Decimal(1), Decimal(2)], Decimal("1.5")),
        ([[1, 2.0], [3, 4.0]], [2.0, 3.0]),
        ([(1,), (2,)], (1.5,)),
        ([Pair(1, 2), Pair(3, 2)], Pair(2.0, 2.0)),
        ([{"loss": 1.0, "n": [1, 2]}, {"n": [3, 4], "loss": 2.0}], {"loss": 1.5, "n": [2.0, 3.0]}),
    ],
)
def test_mean(values: list[Any], expected: Any) -> None:
    found = mean(values)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float16, np.float16),
        (np.float32, np.float32),
        (np.float64, np.float64),
        (np.complex64, np.complex64),
        (np.int8, np.float64),
        (np.uint8, np.float64),
        (np.bool_, np.float64),
    ],
)
def test_arrays_keep_the_dtype_of_floats(dtype: Any, expected: Any) -> None:
    values = [np.array([[0, 1]], dtype), np.array([[1, 1]], dtype)]
    found = mean(values)
    assert found.dtype == expected
    assert found.tolist() == [[0.5, 1]]
    assert values[0].tolist() == [[0, 1]]  # left alone
    scalar = mean([dtype(0), dtype(1)])
    assert isinstance(scalar, np.generic)
    assert (scalar.dtype, scalar) == (expected, 0.5)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float32),
        (torch.uint8, torch.float32),
        (torch.bool, torch.float32),
    ],
)
def test_tensors_keep_the_dtype_of_floats(dtype: torch.dtype, expected: torch.dtype) -> None:
    values = [torch.tensor([0, 1], dtype=dtype), torch.tensor([1, 1], dtype=dtype)]
    found = mean(values)
    assert found.dtype == expected
    assert found.tolist() == [0.5, 1]
    assert values[0].tolist() == [0, 1]


def test_sums_do_not_overflow_in_small_dtypes() -> None:
    assert mean([np.full(1, 60000, np.float16)] * 4).tolist() == [60000]
    assert mean([torch.full((1,), 60000, dtype=torch.float16)] * 4).tolist() == [60000]
    assert mean([np.float16(60000)] * 4) == 60000
    assert mean([np.full(1, 200, np.uint8)] * 4).tolist() == [200]
    assert mean([torch.full((1,), 200, dtype=torch.uint8)] * 4).tolist() == [200]


def test_different_floats_give_the_wider() -> None:
    assert mean([np.zeros(1, np.float16), np.zeros(1, np.float32)]).dtype == np.float32
    assert mean([torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)]).dtype == torch.float32
    assert mean([np.float32(1), 2.0]) == 1.5


def test_the_mean_of_batches_is_a_batch() -> None:
    found = mean([BatchDict(x=torch.zeros(2)), BatchDict(x=torch.ones(2))])
    assert type(found) is BatchDict
    assert found["x"].tolist() == [0.5, 0.5]


def test_gradients_flow_through_a_mean() -> None:
    weight = torch.ones(2, requires_grad=True)
    mean([weight, torch.zeros(2)]).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        (["a", "b"], TypeError, "mean of str of length 1: such values have no mean"),
        ([None, None], TypeError, "mean of None"),
        ([1, [1]], TypeError, "mean of int and list: the values must be of one kind"),
        ([1, None], TypeError, "mean of int and NoneType"),
        ([[1], [1, 2]], ValueError, r"mean of lists of the lengths \[1, 2\]"),
        ([np.zeros(2), np.zeros((1, 2))], ValueError, r"of the shapes \(2,\), \(1, 2\): they must be equal"),
        ([torch.zeros(2), torch.zeros(1)], ValueError, r"of the shapes \(2,\), \(1,\)"),
        ([{"a": 1}, {"b": 1}], ValueError, "different keys"),
        ([np.array(["x"])] * 2, TypeError, "only numbers have a mean"),
        ([np.array(["2020-01-01"], "datetime64[D]")] * 2, TypeError, "only numbers have a mean"),
    ],
)
def test_mean_refuses_values_without_a_mean(values: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        mean(values)


def test_an_error_inside_names_the_item() -> None:
    with pytest.raises(TypeError) as caught:
        mean([{"loss": [1.0, "x"]}, {"loss": [1.0, "y"]}])
    assert caught.value.__notes__ == ["in the item [1] of the value", "in the item ['loss'] of the value"]


# evaluate


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (Const(5), 5),
        (Ref(1), "b"),
        (Build("list", (Ref(0), Const(1))), [[1, 2, 3], 1]),
        (Build("tuple", (Ref(1),)), ("b",)),
        (Build("tuple", ()), ()),
        (Build("dict", (Ref(1), Build("list", (Ref(1),))), ("x", 3)), {"x": "b", 3: ["b"]}),
        (Select(Ref(0), (("item", 2),)), 3),
        (Select(Join("gather", (Ref(0), Ref(0)), 0), (("part", 1, 3, 0),)), [3, 1]),
        (Join("gather", (Ref(0), Ref(1)), None), [[1, 2, 3], "b"]),
        (Join("gather", (Ref(0), Ref(0)), 0), [1, 2, 3, 1, 2, 3]),
        (Join("first", (Ref(1), Ref(7)), None), "b"),
        (Join("mean", (Const(1), Const(2)), None), 1.5),
    ],
)
def test_evaluate(expression: Any, expected: Any) -> None:
    assert evaluate(expression, [[1, 2, 3], "b"]) == expected


def test_a_value_and_a_constant_are_given_as_they_are() -> None:
    value: list[int] = []
    assert evaluate(Ref(0), {0: value}) is value
    assert evaluate(Const(value), ()) is value


@pytest.mark.processes
def test_nothing_is_imported_for_values_of_others() -> None:
    code = """
import sys
from raylane.graph.values.operations import gather, mean, split
before = {name for name in ("numpy", "torch") if name in sys.modules}
for value in ([1, 2], {"a": (1, 2)}):
    gather([split(value, i, 2) for i in range(2)], 0), mean([value, value])
print({name for name in ("numpy", "torch") if name in sys.modules} - before, "torch" in before)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["set()", "False"], told.stderr
