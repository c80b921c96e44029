"""Budget of published bytes: back-pressure, refusals, and that frees end the wait. Pure, and on a real Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch
from tests.transport.servers import entry_of

import raylane
from raylane.core.memory.shared_pool import SharedPool
from raylane.errors import BudgetExceededError, TensorMutatedError
from raylane.transport.hold.budget import Budget
from raylane.transport.hold.store import Entry, Store
from raylane.transport.link.memory_report import ask_everywhere

NUMEL = 50_000
NBYTES = 4 * NUMEL


class Layout:
    specs = ()

    def __init__(self, nbytes: int) -> None:
        self.blocks = [memoryview(bytes(nbytes))]


def entry(key: bytes, nbytes: int) -> Entry:
    layout: Any = Layout(nbytes)
    return Entry(key, [], layout, for_callers=True, origin="W.weights")


def test_budget_waits_for_a_free_and_counts_the_wait(eventually: Callable[..., None]) -> None:
    store = Store()
    budget = Budget(store, 100)
    with budget.room(60, "a"):
        store.publish(entry(b"1", 60))
    inside = threading.Event()

    def publish() -> None:
        with budget.room(50, "b"):
            inside.set()
            store.publish(entry(b"2", 50))

    thread = threading.Thread(target=publish)
    thread.start()
    eventually(lambda: budget.waiting == 1)
    assert not inside.is_set()
    store.free([b"1"])
    thread.join(10)
    assert store.nbytes == 50
    assert (budget.waits, budget.waiting) == (1, 0)
    assert budget.wait_s > 0


def test_budget_reserves_room_until_the_value_is_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLANE_TIMEOUT_S", "0")
    budget = Budget(Store(), 100)
    with budget.room(60, "a"), pytest.raises(BudgetExceededError), budget.room(60, "b"):
        pass
    with pytest.raises(KeyError), budget.room(60, "a"):
        raise KeyError
    with budget.room(100, "after a failure the room is free again"):
        pass


def test_budget_error_names_the_largest_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYLANE_TIMEOUT_S", "0")
    store = Store()
    budget = Budget(store, 1000)
    store.publish(entry(b"1", 900))
    match = r"200 bytes \(W.f\).*held 900 of .*900 bytes \(W.weights, 0\.\d s old"
    with pytest.raises(BudgetExceededError, match=match), budget.room(200, "W.f"):
        pass
    match = r"is 1,000, less than this one value\. Raise"
    with pytest.raises(BudgetExceededError, match=match), budget.room(1001, "W.f"):
        pass


@pytest.mark.claim("transport", "`RAYLANE_BUDGET_BYTES` limits published memory, shared copies included")
def test_copies_count_and_make_room_for_publications() -> None:
    store = Store(SharedPool(1 << 30))
    budget = Budget(store, 3 << 20)
    one, two, three = (entry_of(torch.ones(1 << 18)) for _ in range(3))  # 1 MiB each
    for published in (one, two):
        with budget.room(published.nbytes, "a"):
            store.publish(published)
    segment = store.share(one)
    assert segment is not None
    assert store.share(one) is segment
    assert store.share(two) is None, "there is no room for a second copy"
    needed = store.take_copy(1 << 20, needed=True)
    assert needed is not None
    store.shared.drop(needed)
    store.free([one.key])
    assert store.shared.idle_bytes == 1 << 20
    with budget.room(three.nbytes, "b"):
        store.publish(three)
    assert store.share(three) is not None
    # The segment may be the idle one, filled again; it belongs to a value now, and is dropped all the same.
    with budget.room(1 << 20, "c"):
        assert three.shared is None
        assert store.shared.nbytes == 0
    assert budget.waits == 0
    store.clear()


class Maker:
    @raylane.method
    def make(self, numel: int = NUMEL) -> torch.Tensor:
        return torch.ones(numel)

    @raylane.method
    def small(self) -> torch.Tensor:
        return torch.ones(10)

    def stats(self) -> dict[str, Any]:
        return raylane.stats()


class AsyncMaker:
    @raylane.method
    async def make(self, numel: int = NUMEL) -> torch.Tensor:
        return torch.ones(numel)

    async def stats(self) -> dict[str, Any]:
        return raylane.stats()


def with_budget(cls: type, nbytes: int, **more: str) -> Any:
    variables = {"RAYLANE_BUDGET_BYTES": str(nbytes), **more}
    return ray.remote(num_cpus=0)(cls).options(runtime_env={"env_vars": variables}).remote()


@pytest.mark.claim("transport", "`RAYLANE_BUDGET_BYTES` limits published memory, shared copies included")
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("cls", [Maker, AsyncMaker])
def test_calls_wait_until_readers_have_freed_enough(cls: type, eventually: Callable[..., None]) -> None:
    maker = with_budget(cls, 3 * NBYTES)
    refs = [maker.make.remote() for _ in range(10)]
    # The listener answers while the thread that publishes waits.
    eventually(lambda: [one for one in ask_everywhere(5, 1) if one.holdings and one.holdings.waiting == 1])
    # Each value is dropped before the next one is read, so that ten values pass through room for three.
    # In the order in which they are ready: an async actor does not publish in the order of the calls.
    while refs:
        ready, refs = ray.wait(refs, timeout=60)
        assert ray.get(ready.pop()).sum() == NUMEL
    stats = ray.get(maker.stats.remote())
    assert stats["budget_waits"] > 0
    assert stats["budget_wait_s"] > 0


@pytest.mark.usefixtures("cluster")
def test_call_beyond_the_budget_fails_with_a_typed_error() -> None:
    maker = with_budget(Maker, 2 * NBYTES, RAYLANE_TIMEOUT_S="0.2")
    with pytest.raises(BudgetExceededError, match="less than this one value"):
        ray.get(maker.make.remote(3 * NUMEL), timeout=60)
    held = [maker.make.remote() for _ in range(2)]
    ray.wait(held, num_returns=2, timeout=60)
    with pytest.raises(BudgetExceededError, match=r"200,000 bytes \(Maker.make, "):
        ray.get(maker.make.remote(), timeout=60)
    assert ray.get(maker.small.remote(), timeout=60).sum() == 10
    del held


class Corrupted:
    """Publishes a tensor and then changes a bit of it in a way that no counter shows."""

    def publish(self, snapshot: bool, change: bool) -> list[Any]:
        self.value = torch.ones(NUMEL)
        ref = raylane.put(self.value, snapshot=snapshot)
        if change:
            self.value.numpy()[7] = 3
        return [ref]


@pytest.mark.claim("transport", '`on_mutation="error"` and `RAYLANE_CHECKSUM=1` find changed bytes, by a checksum')
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("transport", ["host", "tcp"])
def test_checksum_variable_finds_changed_bytes(transport: str) -> None:
    variables = {"RAYLANE_CHECKSUM": "1"}
    owner = ray.remote(num_cpus=0)(Corrupted).options(runtime_env={"env_vars": variables}).remote()
    for snapshot in (False, True):
        intact = ray.get(owner.publish.remote(snapshot, False))[0]
        assert raylane.get(intact, tensor_transport=transport).sum() == NUMEL
    with pytest.raises(TensorMutatedError, match="changed on the way, or in the source"):
        raylane.get(ray.get(owner.publish.remote(False, True))[0], tensor_transport=transport)
    del intact
