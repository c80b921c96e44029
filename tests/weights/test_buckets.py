"""Versions on devices: actors of a real Ray, with stand-ins for the calls of NVIDIA's driver."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch
from tests.weights import device_stand_ins

from raylane import weights
from raylane.core.process.place import start_ticks
from raylane.errors import WeightsError, WeightsLostError, WeightsMismatchError
from raylane.weights.layout.boxes import Box, HeldBox, StoredLayout, TensorLayout, store
from raylane.weights.memory.buckets import Label, check_host
from raylane.weights.service.actors import NAMESPACE, actor_names
from raylane.weights.service.client import all_memory

WAIT_S = 60
ROWS = 8
Start = Callable[..., Any]


def whole(step: int) -> torch.Tensor:
    return torch.arange(ROWS * 1000.0).reshape(ROWS, 1000) + step


class Trainer:
    """One of several ranks, each with its rows of `w`, and all with the same `norm`."""

    def __init__(self, rank: int, world: int, **options: Any) -> None:
        device_stand_ins.install()
        self.rank, self.world = rank, world
        self.tensors = {"w": self.rows(0), "norm": torch.zeros(1000)}

        def places(name: str, tensor: torch.Tensor) -> weights.Part | None:
            return weights.Part.even(tensor, 0, rank, world) if name == "w" else None

        options = {"transport": "cuda_ipc", **options}
        self.publisher = weights.Publisher(
            "policy", self.tensors, rank=rank, world=world, places=places if world > 1 else None, **options
        )

    def rows(self, step: int) -> torch.Tensor:
        return whole(step).chunk(self.world)[self.rank].clone()

    def publish(self, step: int, *, elsewhere: bool = False) -> int:
        if elsewhere:
            self.tensors["w"] = self.tensors["w"].clone()
        self.tensors["w"].copy_(self.rows(step))
        self.tensors["norm"].fill_(step)
        return self.publisher.publish(step, timeout=20)

    def buckets(self) -> int:
        return len(self.publisher._slots)

    def call(self, method: str, *args: Any) -> None:
        getattr(self.publisher, method)(*args)

    def pid(self) -> int:
        return os.getpid()


class Reader:
    def __init__(self, apply: str = "copy", dtype: torch.dtype = torch.float32, **options: Any) -> None:
        device_stand_ins.install()
        self.tensors = {"w": torch.zeros(ROWS, 1000, dtype=dtype), "norm": torch.zeros(1000)}
        self.subscriber = weights.Subscriber("policy", self.tensors, apply=apply, **options)

    def update(self, version: int | None = None) -> tuple[int, bool]:
        """Return the version, and whether all tensors are those of its step."""
        update = self.subscriber.update(version=version, timeout=10)
        return update.version, self.has(update.step)

    def has(self, step: int) -> bool:
        norm = bool((self.tensors["norm"] == step).all())
        return norm and torch.equal(self.tensors["w"], whole(step).to(self.tensors["w"].dtype))

    def spoil(self, name: str) -> None:
        self.tensors[name].view(-1)[7] += 1

    def call(self, method: str) -> Any:
        return getattr(self.subscriber, method)()

    def state(self) -> str:
        return str(self.subscriber.state.value)

    def opened(self) -> int:
        return device_stand_ins.opened()


@pytest.fixture
def start(cluster: None) -> Iterator[Start]:
    """Return a function that starts an actor. Afterwards all actors end, and the name is dropped."""
    actors = []

    def start_actor(kind: type, *args: Any, **options: Any) -> Any:
        actors.append(ray.remote(num_cpus=0)(kind).remote(*args, **options))
        return actors[-1]

    yield start_actor
    for actor in actors:
        ray.kill(actor)
    weights.drop("policy")


def publish(ranks: list[Any], step: int, **options: Any) -> int:
    numbers = ray.get([rank.publish.remote(step, **options) for rank in ranks], timeout=WAIT_S)
    assert len(set(numbers)) == 1
    return int(numbers[0])


@pytest.mark.claim("weights", "with transport='cuda_ipc' versions go from device to device, whole or not at all")
def test_versions_go_from_the_buckets_of_two_ranks_to_readers(start: Start) -> None:
    ranks = [start(Trainer, rank, 2, digests=True, keep=3) for rank in range(2)]
    readers = [start(Reader), start(Reader, "swap", verify="each"), start(Reader, dtype=torch.bfloat16, verify="each")]
    for step in range(1, 6):
        # Tensors that were replaced do not end the versions before.
        number = publish(ranks, step, elsewhere=step == 4)
        for reader in readers:
            assert ray.get(reader.update.remote(), timeout=WAIT_S) == (number, True)
    assert ray.get(readers[0].update.remote(4), timeout=WAIT_S) == (4, True)  # exactly the one before
    assert ray.get(readers[0].call.remote("verify"), timeout=WAIT_S) == 4
    ray.get(readers[0].spoil.remote("w"), timeout=WAIT_S)
    with pytest.raises(WeightsMismatchError, match="'w'"):
        ray.get(readers[0].call.remote("verify"), timeout=WAIT_S)
    # Of three slots of two ranks each is mapped once, by the copies and by the verification; the keeper has no bytes.
    assert ray.get(readers[0].opened.remote(), timeout=WAIT_S) <= 2 * 2 * 3
    assert sum(nbytes for *_, nbytes in all_memory(10)) < 8 * 4096 * 2


def test_versions_end_with_their_rank_until_it_comes_back(start: Start, eventually: Callable[..., None]) -> None:
    ranks = [start(Trainer, rank, 2) for rank in range(2)]
    copying, swapping = start(Reader), start(Reader, "swap")
    publish(ranks, 1)
    assert ray.get([each.update.remote() for each in (copying, swapping)], timeout=WAIT_S) == [(1, True)] * 2
    assert publish(ranks, 2) == 2
    pid = ray.get(ranks[1].pid.remote(), timeout=WAIT_S)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: start_ticks(pid) is None)  # else a reader may still take the version

    def is_lost(reader: Any) -> bool:
        try:
            ray.get(reader.update.remote(), timeout=WAIT_S)
        except WeightsLostError as error:
            return "which has ended" in str(error)
        return False

    late = start(Reader)
    assert all(is_lost(reader) for reader in (copying, swapping, late))
    assert ray.get(swapping.has.remote(1), timeout=WAIT_S)  # the version before stays
    ranks[1] = start(Trainer, 1, 2)
    number = publish(ranks, 3)
    for reader in (copying, swapping, late):
        assert ray.get(reader.update.remote(), timeout=WAIT_S) == (number, True)


def test_buckets_end_with_released_versions_and_publishers(start: Start) -> None:
    trainer, reader = start(Trainer, 0, 1), start(Reader)
    publish([trainer], 1)
    ray.get(trainer.call.remote("hold", 1), timeout=WAIT_S)
    for step in range(2, 5):
        publish([trainer], step)
    assert ray.get(trainer.buckets.remote(), timeout=WAIT_S) == 3
    assert ray.get(reader.update.remote(1), timeout=WAIT_S) == (1, True)
    ray.get(trainer.call.remote("release", 1), timeout=WAIT_S)
    for step in range(5, 9):
        publish([trainer], step)
    assert ray.get(reader.update.remote(), timeout=WAIT_S)[1]
    ray.get(trainer.call.remote("close"), timeout=WAIT_S)
    with pytest.raises(WeightsLostError, match=r"closed its publisher.*transport='host'"):
        ray.get(start(Reader).update.remote(), timeout=WAIT_S)


def test_prefetched_versions_of_closed_publishers_spoil_nothing(start: Start) -> None:
    trainer, reader = start(Trainer, 0, 1), start(Reader)
    publish([trainer], 1)
    assert ray.get(reader.update.remote(), timeout=WAIT_S) == (1, True)
    publish([trainer], 2)
    assert ray.get(reader.call.remote("prefetch"), timeout=WAIT_S) == 2
    ray.get(trainer.call.remote("close"), timeout=WAIT_S)
    for method in ("update", "prefetch", "update"):
        with pytest.raises(WeightsLostError, match="closed its publisher"):
            ray.get(reader.call.remote(method), timeout=WAIT_S)
    assert ray.get([reader.state.remote(), reader.has.remote(1)], timeout=WAIT_S) == ["valid", True]


def test_versions_after_the_death_of_a_keeper_stay(start: Start, eventually: Callable[..., None]) -> None:
    trainer, reader = start(Trainer, 0, 1, keep=3), start(Reader)
    for step in (1, 2):
        publish([trainer], step)
    (keeper,) = actor_names("keeper of ")
    ray.kill(ray.get_actor(keeper, NAMESPACE))
    eventually(lambda: {version.state for version in weights.versions("policy")} == {"lost"})
    numbers = [publish([trainer], step) for step in (3, 4)]
    for number in numbers:
        assert ray.get(reader.update.remote(number), timeout=WAIT_S) == (number, True)
    assert ray.get(trainer.buckets.remote(), timeout=WAIT_S) == 2


def test_readers_unmap_what_a_change_of_ranks_has_ended(start: Start) -> None:
    ranks, reader = [start(Trainer, rank, 2, digests=True) for rank in range(2)], start(Reader, verify="each")
    for step in (1, 2):
        publish(ranks, step)
        ray.get(reader.update.remote(), timeout=WAIT_S)
    for rank in ranks:
        ray.get(rank.call.remote("close"), timeout=WAIT_S)
    alone = start(Trainer, 0, 1, digests=True)
    for step in (3, 4):
        number = publish([alone], step)
        assert ray.get(reader.update.remote(), timeout=WAIT_S) == (number, True)
    assert ray.get(reader.opened.remote(), timeout=WAIT_S) <= 2 * 2  # by copies, and by the verification


def test_readers_that_cannot_take_from_a_device_are_told_so(start: Start) -> None:
    with pytest.raises(WeightsError, match=r"needs a CUDA device .*transport='host'"):
        weights.Publisher("policy", {"w": torch.zeros(4)}, transport="cuda_ipc")
    with pytest.raises(ValueError, match=r"transport must be one of host, cuda_ipc, got 'rdma'"):
        weights.Publisher("policy", {"w": torch.zeros(4)}, transport="rdma")
    publish([start(Trainer, 0, 1)], 1)
    with pytest.raises(WeightsError, match=r"cannot be mapped.*'swap'"):
        ray.get(start(Reader, "map").update.remote(), timeout=WAIT_S)
    reader = weights.Subscriber("policy", {"w": torch.zeros(ROWS, 1000), "norm": torch.zeros(1000)})
    with pytest.raises(WeightsError, match=r"needs a CUDA device"):
        reader.update(timeout=10)
    reader.close()
    check_host("policy", ["a"], "b")
    with pytest.raises(WeightsError, match=r"on nodes a, and this reader is on node b"):
        check_host("policy", ["a/0", "a/1"], "b")


def test_each_rank_stores_what_it_holds_on_its_own_device() -> None:
    half = [Box((4 * rank,), (4,)) for rank in range(2)]
    layouts = [
        {
            "w": TensorLayout((8,), "float32", 4, (HeldBox(half[rank], (0,)),)),
            "norm": TensorLayout((16,), "float32", 4, (HeldBox(Box((0,), (16,)), (0,)),)),
        }
        for rank in range(2)
    ]
    stored: StoredLayout = store(layouts, ["a/0", "a/1"], on_device=True)
    assert stored.parts == ("a/0", "a/1")
    assert [(box.part, box.box, box.writes) for box in stored.tensors["w"].boxes] == [
        (rank, half[rank], ((rank, half[rank]),)) for rank in range(2)
    ]
    assert len(stored.tensors["norm"].boxes) == 1


def test_a_label_of_a_process_that_has_ended_is_not_there() -> None:
    label = Label(1, 2**22 + 1, 5, 0, 8, b"", b"")
    assert not label.is_there()
    assert not label._replace(token=0, pid=os.getpid()).is_there()
