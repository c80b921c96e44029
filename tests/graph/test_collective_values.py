"""Values of collectives: arrays and tensors of every kind give what NumPy and torch give, or are refused by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from tests.graph.graph_actors import Worker

import raylane
from raylane import MultiOutputNode, bind
from raylane.graph import allgather, allreduce, reducescatter
from raylane.graph.collectives import Collective
from raylane.graph.values import operations, shares

Compile = Callable[..., Any]
NUMPY_OPS: dict[str, Any] = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def _run(kind: str, op: str, values: list[Any]) -> list[Any]:
    """Return the result of each member of a collective whose shares travel by pickle."""
    members = [Collective(kind, op, "share", rank, len(values)) for rank in range(len(values))]
    given = [shares.share(one, value) for one, value in zip(members, values, strict=True)]
    results = []
    for rank, one in enumerate(members):
        arrived = [share[rank] if type(share) is tuple else share for share in given]
        arrived = [
            share if source == rank else pickle.loads(pickle.dumps(share)) for source, share in enumerate(arrived)
        ]
        results.append(shares.combine(one, ["A", "B"], arrived))
    return results


def _arrays(folder: Path) -> list[tuple[Any, Any]]:
    """Return pairs of arrays for two members: every layout, byte order and dtype of numbers."""
    grid = np.arange(24.0).reshape(4, 6)
    mapped = np.memmap(folder / "values", dtype=np.float32, mode="w+", shape=(4,))
    mapped[:] = [1, 2, 3, 4]
    pairs = [
        (grid.astype(">f8"), grid.astype(">f8") + 1),
        (grid.astype(">f8"), grid + 1),
        (grid, grid.astype(">f8") + 1),
        (grid[:, ::2], grid[:, 1::2]),
        (grid[::-1], grid.T.copy().T),
        (np.asfortranarray(grid), grid[::-1, ::-1]),
        (mapped, np.ones(4, np.float32)),
    ]
    for dtype in (">i2", "<i2", "u1", ">u4", ">u8", "i8", ">f4", "f4", ">c8", "c16", np.longdouble):
        pairs.append((np.array([1, 2, 3, 4], dtype), np.array([5, 1, 3, 2], dtype)))
    return pairs


def test_collective_arrays_give_what_numpy_gives(tmp_path: Path) -> None:
    for one, other in _arrays(tmp_path):
        for op, function in NUMPY_OPS.items():
            if one.dtype.kind == "c" and op in ("min", "max"):
                continue
            wanted = function(one, other)
            for result in _run("allreduce", op, [one, other]):
                assert (type(result), result.dtype) == (np.ndarray, wanted.dtype)
                np.testing.assert_array_equal(result, wanted)
        joined = np.concatenate([one, other])
        for result in _run("allgather", "", [one, other]):
            assert result.dtype == joined.dtype
            np.testing.assert_array_equal(result, joined)
        parts = np.split(np.add(one, other), 2)
        for result, part in zip(_run("reducescatter", "sum", [one, other]), parts, strict=True):
            np.testing.assert_array_equal(result, part)


def test_collective_scalars_and_bools_give_what_numpy_gives() -> None:
    assert _run("allreduce", "sum", [np.array(1.5, ">f8"), np.array(2.0)]) == [3.5, 3.5]
    flags = np.array([True, False]), np.array([True, True])
    for op in ("min", "max"):
        for result in _run("allreduce", op, list(flags)):
            np.testing.assert_array_equal(result, NUMPY_OPS[op](*flags))


def test_collective_several_byte_orders_travel_in_one_array() -> None:
    values = [{"a": np.array([1.0, 2.0], order), "b": np.array([3.0], other)} for order, other in ((">f8", "<f8"),) * 2]
    for result in _run("allreduce", "sum", values):
        assert (result["a"].tolist(), result["b"].tolist()) == ([2, 4], [6])


def test_collective_tensors_give_what_torch_gives() -> None:
    real, complex_pair = torch.arange(12.0).reshape(3, 4), torch.tensor([1 + 2j, 3 - 1j])
    pairs = [
        (real.T, real.flip(1).T),
        (real[:, ::2], real[:, 1::2]),
        (real[:1, 2], real[1:2, 3]),  # one element, with a stride
        (complex_pair.conj(), complex_pair),
        (complex_pair.conj().imag, complex_pair.imag),
        (torch.nn.Parameter(real), real.clone().requires_grad_()),
        (real.to(torch.float8_e4m3fn), real.to(torch.float8_e4m3fn)),
        (real.to(torch.bfloat16), real.to(torch.bfloat16)),
    ]
    for one, other in pairs:
        wide = torch.complex64 if one.is_complex() else torch.float32
        for op, function in (("sum", torch.add), ("prod", torch.mul), ("min", torch.minimum), ("max", torch.maximum)):
            if one.is_complex() and op in ("min", "max"):
                continue
            wanted = function(one.detach().to(wide), other.detach().to(wide)).to(one.dtype)
            for result in _run("allreduce", op, [one, other]):
                assert (type(result), result.dtype, result.requires_grad) == (torch.Tensor, one.dtype, False)
                assert torch.equal(result.to(wide), wanted.to(wide))


class Length(np.ndarray):
    """Array whose unit is not part of its memory."""


class Wrapped(torch.Tensor):
    """Tensor whose meaning is not part of its memory."""


def _freed() -> torch.Tensor:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


def _quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "masked": (lambda: np.ma.array([1.0, 2.0], mask=[0, 1]), r"masked array.*filled\("),
    "subclass": (lambda: np.ones(2).view(Length), r"subclass .*Length.*asarray"),
    "matrix": (lambda: np.asmatrix(np.ones(2)), r"subclass .*matrix.*asarray"),
    "objects": (lambda: np.array([1, None]), "array of dtype object"),
    "dates": (lambda: np.zeros(2, "M8[s]"), r"array of dtype datetime64\[s\]"),
    "durations": (lambda: np.zeros(2, "m8[s]"), r"array of dtype timedelta64\[s\]"),
    "records": (lambda: np.zeros(2, "f4,i4"), "array of dtype"),
    "strings": (lambda: np.array(["a", "b"]), "array of dtype"),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"sparse_coo.*to_dense"),
    "quantised": (_quantised, r"quantised.*dequantize"),
    "meta": (lambda: torch.empty(2, device="meta"), "meta.*no data"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
    "tensor subclass": (lambda: torch.ones(2).as_subclass(Wrapped), "subclass .*Wrapped"),
    "freed": (_freed, "storage"),
    "unsigned": (lambda: torch.ones(2, dtype=torch.uint16), "torch has no sum of uint16"),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_collective_refuses_what_has_no_reduction(name: str) -> None:
    make, text = REFUSED[name]
    for wrapped in (make(), {"deep": [make()]}):
        with pytest.raises(TypeError, match=f"allreduce.sum of .*{text}"):
            _run("allreduce", "sum", [wrapped, wrapped])


# Values of `gather` and `mean`


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_arrays_of_every_kind_match_numpy(axis: int) -> None:
    grid = np.arange(6.0).reshape(2, 3)
    masked = np.ma.masked_greater(grid, 3)
    for one, other in [(masked, masked + 1), (masked, grid), (grid, masked)]:
        joined = operations.gather([one, other], axis)
        wanted = np.ma.concatenate([one, other], axis)
        assert type(joined) is np.ma.MaskedArray
        np.testing.assert_array_equal(joined.filled(-1), wanted.filled(-1))
    dates = np.array([["2026-01-01", "2026-01-02"]], "M8[D]")
    records = np.array([[(1, 2.0), (3, 4.0)]], "i4,>f8")
    for other in (grid.astype(">f8"), grid.T, np.asmatrix(grid), dates, records, grid > 2, grid.astype(object)):
        joined = operations.gather([other, other], axis)
        wanted = np.concatenate([other, other], axis)
        assert (type(joined), joined.dtype) == (type(wanted), wanted.dtype)
        np.testing.assert_array_equal(joined, wanted)


def test_mean_of_masked_arrays_is_refused() -> None:
    masked = np.ma.array([1.0, 2.0], mask=[0, 1])
    for values in ([masked, masked], [np.ones(2), masked], [{"a": np.ones(2)}, {"a": masked}]):
        with pytest.raises(TypeError, match=r"mean of .*MaskedArray.*filled"):
            operations.mean(values)
    big = np.array([1.0, 2.0], ">f8")
    assert operations.mean([big, big + 1]).tolist() == [1.5, 2.5]


# Process groups


@pytest.fixture(scope="module")
def pair(ray_session: None) -> Iterator[list[Any]]:
    actors = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def reduced_by(pair: list[Any]) -> Iterator[Compile]:
    """Return a function that compiles a graph with a collective of two actors over a transport."""
    graphs: list[Any] = []

    def compile(collective: Any, **options: Any) -> Any:
        with raylane.InputNode() as x:
            given = [bind(actor.echo, x[rank]) for rank, actor in enumerate(pair)]
            graphs.append(raylane.compile(MultiOutputNode(collective.bind(given, **options))))
        return graphs[-1]

    yield compile
    for g in graphs:
        g.teardown()


def test_collective_in_actors_gives_what_numpy_gives(reduced_by: Compile, tmp_path: Path) -> None:
    joined, scattered = reduced_by(allgather), reduced_by(reducescatter)
    graphs = {op: reduced_by(allreduce, op=op) for op in ("sum", "max")}
    for one, other in _arrays(tmp_path):
        for op, g in graphs.items():
            refused = one.dtype.kind == "c" and op == "max"
            if refused:
                with pytest.raises(TypeError, match=f"allreduce.{op} of .*numpy.{one.dtype.name}"):
                    g.execute(one, other).get()
                continue
            for result in g.execute(one, other).get():
                np.testing.assert_array_equal(result, NUMPY_OPS[op](one, other))
                assert result.dtype == NUMPY_OPS[op](one, other).dtype
        for result in joined.execute(one, other).get():
            np.testing.assert_array_equal(result, np.concatenate([one, other]))
        if not refused:
            for result, part in zip(scattered.execute(one, other).get(), np.split(one + other, 2), strict=True):
                np.testing.assert_array_equal(result, part)


def test_collective_in_actors_refuses_masked_arrays(reduced_by: Compile) -> None:
    masked = np.ma.array([1.0, 2.0], mask=[0, 1])
    for collective in (allreduce, allgather, reducescatter):
        g = reduced_by(collective)
        with pytest.raises(TypeError, match=rf"{collective.__class__.__name__.lower()}.* of a masked array.*filled"):
            g.execute(masked, masked).get()
        assert len(g.execute(np.ones(2), np.ones(2)).get()) == 2
