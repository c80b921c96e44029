"""When values are freed, what mutation does, and what is left after thousands of values. On a real Ray."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raylane
from raylane.errors import TransferTimeoutError
from raylane.testing.leaks import descriptors, leaks, snapshot

pytestmark = pytest.mark.usefixtures("cluster")


class Sender:
    """The producer of the guide's programs on mutability."""

    @raylane.method
    def random_tensor(self) -> torch.Tensor:
        self.tensor = torch.randn(1000, 1000)
        return self.tensor

    @raylane.method(snapshot=True)
    def snapshot_tensor(self) -> torch.Tensor:
        self.tensor = torch.randn(1000, 1000)
        return self.tensor

    @raylane.method(on_mutation="error")
    def strict_tensor(self) -> torch.Tensor:
        self.tensor = torch.randn(1000, 1000)
        return self.tensor

    def increment_and_sum_stored_tensor(self, wait: bool = False, timeout: float | None = None) -> torch.Tensor:
        if wait:
            raylane.wait_tensor_freed(self.tensor, timeout)
        self.tensor += 1
        return torch.sum(self.tensor)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.sum(tensor)

    def increment_and_sum(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
        tensor += 1
        return torch.sum(tensor), self.seen()

    @raylane.method
    def numbered(self, i: int) -> torch.Tensor:
        return torch.full((30_000,), float(i))

    def watch_warnings(self) -> None:
        self.caught: list[str] = []

        def note(message: Any, *_: Any, **__: Any) -> None:
            self.caught.append(str(message))

        warnings.showwarning = note
        warnings.simplefilter("always")

    def seen(self) -> list[str]:
        return list(getattr(self, "caught", []))

    def resources(self) -> dict[str, Any]:
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return {
            "entries": raylane.stats()["entries"],
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "segments": len(descriptors()),
            "resident": resident,
        }


class Receiver(Sender):
    def increment_and_sum_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.sum(tensor + 1)


@pytest.fixture(scope="module")
def pair(ray_session: None) -> Iterator[list[Any]]:
    before = snapshot()
    pair = [ray.remote(num_cpus=0)(Sender).remote(), ray.remote(num_cpus=0)(Receiver).remote()]
    ray.get([member.__ray_ready__.remote() for member in pair])
    ray.get([member.watch_warnings.remote() for member in pair])
    yield pair
    pair.clear()
    assert not leaks(before, within_s=20)


def test_guide_program_that_goes_wrong(pair: list[Any]) -> None:
    """The producer writes before the consumer reads: the consumer sees the later content."""
    sender, receiver = pair
    tensor = sender.random_tensor.remote()
    ray.wait([tensor])
    original = float(ray.get(sender.sum.remote(tensor)))
    tensor1 = ray.get(sender.increment_and_sum_stored_tensor.remote())
    tensor2 = ray.get(receiver.increment_and_sum_copy.remote(tensor))
    assert not torch.allclose(tensor1, tensor2)
    assert float(tensor1) == pytest.approx(original + 1e6, rel=1e-3)
    assert float(tensor2) == pytest.approx(original + 2e6, rel=1e-3)


def test_guide_program_that_waits(pair: list[Any]) -> None:
    """The producer waits until the refs are gone: both sums are of the same content."""
    sender, receiver = pair
    tensor = sender.random_tensor.remote()
    tensor1 = sender.increment_and_sum_stored_tensor.remote(wait=True)
    tensor2 = receiver.increment_and_sum_copy.remote(tensor)
    del tensor
    assert torch.allclose(*ray.get([tensor1, tensor2], timeout=60))


def test_guide_program_that_shares_with_its_creator_warns(pair: list[Any]) -> None:
    sender, receiver = pair
    tensor = sender.random_tensor.remote()
    ray.wait([tensor])
    _, in_sender = ray.get(sender.increment_and_sum.remote(tensor))
    _, in_receiver = ray.get(receiver.increment_and_sum.remote(tensor))
    found = [text for text in in_sender + in_receiver if "passed both to Actor(Sender" in text]
    assert found, (in_sender, in_receiver)


def test_sharing_warns_as_well_when_the_other_reads_first(pair: list[Any]) -> None:
    sender, receiver = pair
    before = ray.get(sender.seen.remote())
    tensor = sender.random_tensor.remote()
    ray.get(receiver.increment_and_sum_copy.remote(tensor))
    _, in_sender = ray.get(sender.increment_and_sum.remote(tensor))
    assert any("passed both to" in text for text in in_sender[len(before) :])


def test_wait_tensor_freed_times_out_and_says_what_to_do(pair: list[Any]) -> None:
    sender, _ = pair
    ref = sender.random_tensor.remote()
    with pytest.raises(TransferTimeoutError, match="del ref"):
        ray.get(sender.increment_and_sum_stored_tensor.remote(wait=True, timeout=0.2))
    del ref
    ray.get(sender.increment_and_sum_stored_tensor.remote(wait=True, timeout=30))


def test_wait_tensor_freed_of_unpublished_tensor_returns() -> None:
    raylane.wait_tensor_freed(torch.ones(3))
    raylane.wait_tensor_freed(torch.ones(3), timeout=0)
    with pytest.raises(TypeError, match="list"):
        raylane.wait_tensor_freed([1, 2])


def test_a_view_of_a_published_tensor_is_waited_for() -> None:
    tensor = torch.zeros(100_000)
    ref = raylane.put(tensor)
    with pytest.raises(TransferTimeoutError):
        raylane.wait_tensor_freed(tensor[5:6], timeout=0)
    del ref
    raylane.wait_tensor_freed(tensor[5:6], timeout=30)


@pytest.mark.parametrize("transport", ["host", "tcp", "object_store"])
def test_a_write_after_publication_is_noticed(pair: list[Any], transport: str) -> None:
    sender, _ = pair
    ref = sender.random_tensor.remote()
    raylane.get(ref, tensor_transport=transport)
    ray.get(sender.increment_and_sum_stored_tensor.remote())
    with pytest.warns(UserWarning, match="written to in place"):
        raylane.get(ref, tensor_transport=transport)
    strict = sender.strict_tensor.remote()
    ray.wait([strict])
    ray.get(sender.increment_and_sum_stored_tensor.remote())
    with pytest.raises(raylane.errors.TensorMutatedError, match="snapshot=True"):
        raylane.get(strict, tensor_transport=transport)


@pytest.mark.claim("transport", "a snapshot keeps the content that it had")
@pytest.mark.parametrize("transport", ["auto", "host", "tcp", "object_store"])
def test_a_snapshot_is_what_it_was(pair: list[Any], transport: str) -> None:
    sender, receiver = pair
    ref = sender.snapshot_tensor.remote()
    ray.wait([ref])
    before = raylane.get(ref, tensor_transport=transport)
    ray.get(sender.increment_and_sum_stored_tensor.remote())
    raylane.get(ref, tensor_transport=transport).add_(5)
    assert torch.equal(raylane.get(ref, tensor_transport=transport), before)
    assert ray.get(sender.sum.remote(ref)) == ray.get(receiver.sum.remote(ref))
    raylane.wait_tensor_freed(before)


@pytest.mark.slow
def test_ten_thousand_values_leave_nothing_and_memory_flat(pair: list[Any], eventually: Any) -> None:
    sender, receiver = pair

    def burst(count: int) -> None:
        for _ in range(count // 50):
            refs = [sender.numbered.remote(i) for i in range(50)]
            ray.get([receiver.sum.remote(ref) for ref in refs])
            del refs

    burst(500)
    eventually(lambda: ray.get(sender.resources.remote())["entries"] == 0)
    before = ray.get([member.resources.remote() for member in pair])
    burst(10_000)
    eventually(lambda: ray.get(sender.resources.remote())["entries"] == 0)
    after = ray.get([member.resources.remote() for member in pair])
    for was, now in zip(before, after, strict=True):
        assert now["threads"] <= was["threads"] + 1
        assert now["descriptors"] <= was["descriptors"] + 4  # Ray opens a few of its own
        assert now["segments"] == 0
        assert now["resident"] <= was["resident"] + (64 << 20)  # the values moved amount to 1.2 GB


def test_freed_with_the_last_borrower(pair: list[Any], eventually: Any) -> None:
    sender, _ = pair

    class Borrower:
        def keep(self, refs: list[Any]) -> None:
            self.refs = refs

        def drop(self) -> None:
            del self.refs

    borrower = ray.remote(num_cpus=0)(Borrower).remote()
    ref = sender.numbered.remote(3)
    ray.get(borrower.keep.remote([ref]))
    del ref
    assert ray.get(sender.resources.remote())["entries"] == 1
    ray.get(borrower.drop.remote())
    eventually(lambda: ray.get(sender.resources.remote())["entries"] == 0)


def test_freed_when_a_borrower_is_killed(pair: list[Any], eventually: Any) -> None:
    sender, _ = pair

    class Borrower:
        def keep(self, refs: list[Any]) -> None:
            self.refs = refs

    borrower = ray.remote(num_cpus=0)(Borrower).remote()
    ref = sender.numbered.remote(3)
    ray.get(borrower.keep.remote([ref]))
    del ref
    ray.kill(borrower)
    eventually(lambda: ray.get(sender.resources.remote())["entries"] == 0, within_s=30)


@pytest.mark.slow
def test_refs_nested_in_a_value_live_with_it(pair: list[Any]) -> None:
    class Wrapper:
        @raylane.method
        def wrap(self) -> dict[str, Any]:
            return {"tensor": torch.ones(50_000), "ref": ray.put("inner"), "put": raylane.put(torch.ones(60_000))}

    wrapper = ray.remote(num_cpus=0)(Wrapper).remote()
    ref = wrapper.wrap.remote()
    value = ray.get(ref)
    del ref
    assert ray.get(value["ref"]) == "inner"
    assert ray.get(value["put"]).sum() == 60_000


def test_put_in_the_driver_is_freed(eventually: Any) -> None:
    refs = [raylane.put(torch.ones(30_000)) for _ in range(20)]
    assert raylane.stats()["entries"] == 20
    del refs
    eventually(lambda: raylane.stats()["entries"] == 0)
    bad = {"tensor": torch.ones(30_000), "lock": threading.Lock()}
    with pytest.raises(TypeError, match="lock"):
        raylane.put(bad)
    assert raylane.stats()["entries"] == 0
