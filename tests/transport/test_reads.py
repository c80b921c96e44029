"""`raylane.get` into existing memory, to a device and a dtype, and `raylane.open`, on a real Ray."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from tests.transport.crews import OneMaker

import raylane
from raylane.errors import SourceLostError, TensorMutatedError, TransferTimeoutError

pytestmark = pytest.mark.usefixtures("tidy")
ROWS, COLUMNS = 300, 512  # 600 KB: above what travels inline


def matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float64).reshape(ROWS, COLUMNS).to(dtype)


@dataclasses.dataclass
class Shard:
    weight: torch.Tensor
    name: str


class Trainer:
    """Holds weights, and returns them in several forms."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS), torch.nn.Linear(ROWS, 4))
        with torch.no_grad():
            self.model[0].weight.copy_(matrix())
        self.large = torch.arange(4_000_000, dtype=torch.float32).reshape(1000, 4000)

    @raylane.method
    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    @raylane.method
    def one(self) -> torch.Tensor:
        return self.large

    @raylane.method
    def small(self) -> dict[str, Any]:
        return {"x": torch.arange(4.0), "step": 3}

    @raylane.method
    def shard(self) -> list[Any]:
        return [Shard(matrix(), "a"), {"ids": np.arange(50_000)}]

    @raylane.method(on_mutation="error")
    def checked(self) -> torch.Tensor:
        return self.large

    @raylane.method(snapshot=True)
    def frozen(self) -> torch.Tensor:
        return self.large

    def plain(self) -> dict[str, Any]:
        return {"a": self.large, "b": [np.arange(10)], "ref": "text"}

    def write(self, difference: float) -> None:
        self.large.data.numpy()[0, 0] += difference

    def pid(self) -> int:
        return os.getpid()

    def stats(self) -> dict[str, Any]:
        return raylane.stats()

    def read_own(self, refs: list[Any]) -> tuple[bool, float]:
        target = torch.empty_like(self.large)
        found = raylane.get(refs[0], into=target)
        with raylane.open(refs[0]) as opened:
            part = opened.read(slices=(1, slice(0, 3)), dtype=torch.float64)
            part += 1
        return found is target and torch.equal(target, self.large), float(part.sum())


class Crew(OneMaker):
    maker_class = Trainer


@pytest.fixture
def trainer(crew: Crew) -> Any:
    return crew.maker


def moved() -> int:
    """Return the bytes that this process has read so far with any transport."""
    stats = raylane.stats()
    return sum(stats.get(f"{name}_bytes", 0) for name in ("host", "tcp", "gloo", "object_store"))


TRANSPORTS = ["host", "tcp", "gloo", "object_store"]


@pytest.mark.claim("transport", "`into=` fills tensors of any strides; after an error nothing writes there")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_arrive_in_the_tensors_of_a_model(trainer: Any, transport: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, ROWS), torch.nn.Linear(ROWS, 4))
    targets = model.state_dict()
    found = raylane.get(trainer.weights.remote(), into=targets, tensor_transport=transport)
    assert torch.equal(model[0].weight, matrix())
    assert all(found[name] is target for name, target in targets.items())


@pytest.mark.claim("transport", "a slice of a value is read into a part of a larger tensor")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_columns_arrive_in_a_part_of_a_larger_tensor(trainer: Any, transport: str) -> None:
    large = torch.full((1000, 6000), -1.0)
    raylane.get(trainer.one.remote(), into=large[:, 1000:5000], tensor_transport=transport)
    expected = torch.arange(4_000_000, dtype=torch.float32).reshape(1000, 4000)
    assert torch.equal(large[:, 1000:5000], expected)
    assert (large[:, :1000] == -1).all()
    assert (large[:, 5000:] == -1).all()


def test_targets_in_order_may_be_left_out(trainer: Any) -> None:
    target = torch.empty(ROWS, COLUMNS)
    ids = np.zeros(50_000, dtype=np.int64)
    value = raylane.get(trainer.shard.remote(), into=[{"weight": target}, {"ids": ids}])
    assert value[0].weight is target
    assert value[0].name == "a"
    assert value[1]["ids"] is ids
    assert ids[-1] == 49_999
    value = raylane.get(trainer.shard.remote(), into=[None, {"ids": ids}])
    assert torch.equal(value[0].weight, matrix())


def test_values_in_rays_reply_arrive_in_targets_as_well(trainer: Any) -> None:
    target, large = torch.zeros(4), torch.zeros(1000, 4000)
    value = raylane.get(trainer.small.remote(), into={"x": target})
    assert value["x"] is target
    assert value["step"] == 3
    assert target.tolist() == [0, 1, 2, 3]
    plain = raylane.get(trainer.plain.remote(), into={"a": large})
    assert plain["a"] is large
    assert large[999, 3999] == 3_999_999
    assert plain["b"][0].tolist() == list(range(10))
    assert plain["ref"] == "text"


@pytest.mark.claim("transport", "readers may take any value in another floating-point dtype")
def test_dtype_converts_floating_point_tensors_only(trainer: Any) -> None:
    value = raylane.get(trainer.shard.remote(), dtype=torch.bfloat16, device="cpu")
    assert value[0].weight.dtype == torch.bfloat16
    assert torch.equal(value[0].weight, matrix(torch.bfloat16))
    assert value[1]["ids"].dtype == np.int64
    small = raylane.get(trainer.small.remote(), dtype=torch.float64)
    assert small["x"].dtype == torch.float64


def test_several_values_have_targets_of_their_own(trainer: Any) -> None:
    a, b = torch.zeros(1000, 4000), torch.zeros(4)
    refs = [trainer.one.remote(), trainer.small.remote(), trainer.one.remote()]
    one, small, other = raylane.get(refs, into=[a, [b], None])
    assert one is a
    assert small["x"] is b
    assert torch.equal(other, a)
    awaited = asyncio.run(raylane.get_async(refs[:2], into=[a, None]))
    assert awaited[0] is a


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"into": torch.zeros(3)}, ValueError, r"shape \(3,\), the value \(1000, 4000\)"),
        ({"into": torch.zeros(1000, 4000, dtype=torch.int32)}, ValueError, "dtype torch.int32"),
        ({"into": {"x": torch.zeros(1)}}, TypeError, "into must be a tensor, an array or None, got dict"),
        ({"into": torch.zeros(1), "dtype": torch.float16}, ValueError, "into has a device and a dtype of its own"),
        ({"dtype": torch.int64}, ValueError, "floating-point torch dtype"),
        ({"dtype": "float16"}, ValueError, "'float16'"),
        ({"device": "moon"}, ValueError, "'moon'"),
        ({"device": "meta"}, ValueError, "'cpu' or 'cuda'"),
        ({"device": "cuda:99"}, raylane.errors.TransportUnavailableError, "sees"),
    ],
)
def test_wishes_that_cannot_be_met_are_named(
    trainer: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    ref = trainer.one.remote()
    with pytest.raises(error, match=text):
        raylane.get(ref, **options)
    with pytest.raises(ValueError, match="for 2 refs, into must be a list"):
        raylane.get([ref, ref], into=torch.zeros(1))


def test_open_shows_tensors_without_moving_them(trainer: Any) -> None:
    ref = trainer.shard.remote()
    ray.wait([ref])
    before = moved()
    with raylane.open(ref) as opened:
        weight, ids = opened.tensors
        assert (weight.path, weight.shape, weight.dtype) == ((0, "weight"), (ROWS, COLUMNS), torch.float32)
        assert (ids.path, ids.dtype, ids.nbytes, ids.device) == ((1, "ids"), np.dtype("int64"), 400_000, "cpu")
        assert opened.nbytes == ROWS * COLUMNS * 4 + 400_000
        assert "actor" in opened.source.lower()
        assert moved() == before
    with pytest.raises(ValueError, match="closed"):
        opened.read(0)


@pytest.mark.claim("transport", "`read` moves only the slice that is asked for")
@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_read_moves_only_what_is_asked_for(trainer: Any, transport: str) -> None:
    expected = torch.arange(4_000_000, dtype=torch.float32).reshape(1000, 4000)
    opened = raylane.open(trainer.one.remote())
    before = moved()
    rows = opened.read(slices=slice(10, 20), tensor_transport=transport)
    assert torch.equal(rows, expected[10:20])
    columns = opened.read(slices=(..., slice(1000, 2000)), tensor_transport=transport)
    assert torch.equal(columns, expected[:, 1000:2000])
    assert moved() - before == 10 * 4000 * 4 + 1000 * 1000 * 4
    column = opened.read(slices=(slice(None), 7), tensor_transport=transport, dtype=torch.float64)
    assert torch.equal(column, expected[:, 7].double())
    assert moved() - before < 10 * 4000 * 4 + 1000 * 1000 * 4 + 5000
    target = torch.zeros(1000, 3)
    assert opened.read(0, slices=(slice(None), slice(0, 6, 2)), into=target) is target
    assert torch.equal(target, expected[:, 0:6:2])
    rows += 1  # the caller owns it
    assert torch.equal(opened.read(slices=slice(10, 20)), expected[10:20])


def test_slices_of_gloo_values_take_the_way_that_moves_less(trainer: Any) -> None:
    opened = raylane.open(raylane.options(trainer.plain, tensor_transport="gloo").remote())
    before = moved()
    row = opened.read("a", slices=3)
    assert row.shape == (4000,)
    assert moved() - before == 4000 * 4


@pytest.mark.parametrize("transport", ["gloo", "object_store"])
def test_other_transports_read_slices_too(trainer: Any, transport: str) -> None:
    opened = raylane.open(trainer.weights.remote())
    part = opened.read("0.weight", slices=(slice(5, 7), slice(0, 8)), tensor_transport=transport)
    assert torch.equal(part, matrix()[5:7, 0:8])


def test_read_names_what_it_does_not_find(trainer: Any) -> None:
    opened = raylane.open(trainer.weights.remote())
    assert opened.read("1.bias").shape == (4,)
    assert opened.read(-1).shape == (4,)
    with pytest.raises(KeyError, match=r"no tensor at 'bias'; it has '0.weight', '0.bias'"):
        opened.read("bias")
    with pytest.raises(KeyError, match="no tensor 9; it has 4"):
        opened.read(9)
    with pytest.raises(KeyError, match="name one by index or path"):
        opened.read()
    with pytest.raises(IndexError, match="1 dimensions"):
        opened.read("1.bias", slices=(0, 0))
    with pytest.raises(TransferTimeoutError, match="timeout of 0"):
        opened.read("0.weight", timeout=0)
    with pytest.raises(TypeError, match="one ObjectRef"):
        raylane.open([1])  # type: ignore[arg-type]


def test_open_of_values_that_ray_carries(trainer: Any) -> None:
    opened = raylane.open(trainer.small.remote())
    assert opened.tensors[0].path == ("x",)
    assert opened.read("x", slices=slice(1, 3)).tolist() == [1, 2]
    opened = raylane.open(trainer.plain.remote())
    assert [one.path for one in opened.tensors] == [("a",), ("b", 0)]
    assert opened.read("a", slices=(999, -1)) == 3_999_999
    assert raylane.open(ray.put(3)).tensors == ()


def test_snapshots_and_checked_values_are_read_in_parts(trainer: Any) -> None:
    for call in (trainer.frozen, trainer.checked):
        opened = raylane.open(call.remote())
        assert opened.read(slices=(3, 5)) == 12_005
        target = torch.empty(1000, 4000)
        raylane.get(opened._ref, into=target)
        assert target[999, 3999] == 3_999_999
    fresh = raylane.open(trainer.checked.remote())  # never read before, so no copy of it exists
    ray.get(trainer.write.remote(1))
    with pytest.raises(TensorMutatedError):
        fresh.read(slices=(3, 5))
    ray.get(trainer.write.remote(-1))


def test_a_snapshot_that_is_read_again_is_mapped_once(trainer: Any) -> None:
    def mappings() -> set[str]:
        # Of one size only, so that values of other tests do not count.
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = [[int(at, 16) for at in line.split()[0].split("-")] for line in lines if "memfd:raylane" in line]
        return {f"{start:x}" for start, stop in spans if stop - start == 16_003_072}

    ref, large = trainer.frozen.remote(), torch.arange(4_000_000, dtype=torch.float32).reshape(1000, 4000)
    ray.get(trainer.write.remote(5))
    try:
        seen = []
        for _ in range(4):
            target = torch.zeros(1000, 4000)
            raylane.get(ref, into=target, tensor_transport="host")
            assert torch.equal(target, large)
            assert (
                raylane.open(ref).read(slices=(slice(7, 9), slice(None, None, 2))).tolist() == large[7:9, ::2].tolist()
            )
            seen.append(mappings())
        assert len(seen[-1]) == 1
        assert seen[-1] == seen[-2]
        other = torch.zeros(1000, 4000)
        raylane.get(trainer.frozen.remote(), into=other, tensor_transport="host")
        assert other[0, 0] == 5
    finally:
        ray.get(trainer.write.remote(-5))


def test_the_producer_itself_gets_copies_in_its_targets(ray_session: None) -> None:
    actor: Any = ray.remote(num_cpus=0)(Trainer).remote()
    equal, total = ray.get(actor.read_own.remote([actor.one.remote()]))
    assert equal
    assert total == 4000 + 4001 + 4002 + 3


def test_reads_of_a_lost_source_are_typed(ray_session: None, eventually: Any) -> None:
    actor: Any = ray.remote(num_cpus=0)(Trainer).remote()
    ref = actor.one.remote()
    opened = raylane.open(ref)
    assert opened.read(slices=(0, 1)) == 1
    pid = ray.get(actor.pid.remote())
    ray.kill(actor)
    eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    with pytest.raises(SourceLostError):
        opened.read(slices=(0, 1))
    with pytest.raises(SourceLostError):
        raylane.get(ref, into=torch.empty(1000, 4000))
