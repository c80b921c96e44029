"""Every way to consume a value, on a real Ray: what arrives is what was returned, and nothing is left behind."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import pytest
import ray
import torch

import raylane

pytestmark = pytest.mark.usefixtures("tidy")
N = 100_000  # 400 KB: above what travels inline


def expected(seed: float = 0.0) -> torch.Tensor:
    return torch.arange(N, dtype=torch.float32) + seed


class Maker:
    """Returns tensors in every way an actor can."""

    def __init__(self) -> None:
        self.kept = expected()
        self.attempts = 0

    @raylane.method
    def make(self, seed: float = 0.0) -> torch.Tensor:
        return expected(seed)

    @raylane.method
    def hold(self) -> torch.Tensor:
        return self.kept

    @raylane.method
    def nested(self) -> dict[str, Any]:
        return {"layers": [self.kept, {"x": self.kept * 2}], "step": 7}

    @raylane.method(num_returns=2)
    def two(self) -> tuple[torch.Tensor, torch.Tensor]:
        return expected(1), expected(2)

    @raylane.method
    def stream(self, count: int) -> Any:
        for i in range(count):
            yield expected(i)

    @raylane.method
    def flaky(self) -> torch.Tensor:
        self.attempts += 1
        if self.attempts < 3:
            raise ConnectionError("not yet")
        return expected(self.attempts)

    @raylane.method
    def slow(self, gate: list[Any]) -> torch.Tensor:
        ray.get(gate[0].wait.remote())
        return expected()

    def is_kept(self, value: torch.Tensor) -> bool:
        return value is self.kept

    def warnings_of(self, maker: Maker | None = None) -> list[str]:
        """Call a decorated method of `maker`, or of this actor, twice; return the warnings."""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                (maker or self).make()
        return [str(warning.message) for warning in seen]

    @raylane.method
    def calls_itself(self) -> str:
        return f"{type(self.make(3)).__name__} {float(self.make(3)[0])}"

    def stats(self) -> dict[str, Any]:
        return raylane.stats()

    def pid(self) -> int:
        import os

        return os.getpid()


class AsyncMaker:
    @raylane.method
    async def make(self, seed: float = 0.0) -> torch.Tensor:
        await asyncio.sleep(0)
        return expected(seed)

    @raylane.method
    async def stream(self, count: int) -> Any:
        for i in range(count):
            yield expected(i)

    @raylane.method
    async def wait(self, gate: list[Any]) -> torch.Tensor:
        await gate[0].wait.remote()
        return expected()

    def stats(self) -> dict[str, Any]:
        return raylane.stats()


class User:
    def total(self, value: torch.Tensor, extra: torch.Tensor | None = None) -> float:
        return float(value.double().sum()) + (0.0 if extra is None else float(extra.double().sum()))

    def total_nested(self, values: dict[str, Any]) -> float:
        return float(raylane.get(values["refs"][0]).double().sum())

    def ray_get(self, refs: list[Any]) -> float:
        return float(ray.get(refs[0]).double().sum())

    def read_dict(self, value: dict[str, Any]) -> tuple[float, float, int]:
        return float(value["layers"][0].double().sum()), float(value["layers"][1]["x"].double().sum()), value["step"]

    @raylane.method
    def decorated_total(self, a: torch.Tensor, b: torch.Tensor, *, c: torch.Tensor) -> float:
        return float(a.double().sum() + b.double().sum() + c.double().sum())

    def write(self, value: torch.Tensor) -> float:
        value += 1
        return float(value.double().sum())

    warnings_of = Maker.warnings_of


class AsyncUser:
    async def total(self, value: torch.Tensor) -> float:
        return float(value.double().sum())

    async def awaits(self, refs: list[Any]) -> float:
        return float((await refs[0]).double().sum())

    async def get_async(self, refs: list[Any]) -> float:
        return float((await raylane.get_async(refs[0], timeout=30)).double().sum())

    @raylane.method
    async def decorated_total(self, a: torch.Tensor, b: torch.Tensor) -> float:
        return float(a.double().sum() + b.double().sum())

    @raylane.method
    async def decorated_awaits(self, refs: list[Any]) -> str:
        value = await refs[0]
        return f"{type(value).__name__} {float(value.double().sum())}"


class Gate:
    """Lets a waiting call go on."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.count = 0

    async def wait(self) -> None:
        self.count += 1
        await self.opened.wait()

    async def waiting(self) -> int:
        return self.count

    async def open(self) -> None:
        self.opened.set()


def actor(cls: type, **options: Any) -> Any:
    return ray.remote(num_cpus=0, **options)(cls).remote()


SUM = float(expected().double().sum())


class Crew:
    """Actors that the tests of this file share: starting one costs seconds."""

    def __init__(self) -> None:
        self.maker, self.user = actor(Maker), actor(User)
        self.async_maker, self.async_user = actor(AsyncMaker), actor(AsyncUser)
        self.threaded_maker, self.threaded_user = actor(Maker, max_concurrency=4), actor(User, max_concurrency=4)
        ray.get([member.__ray_ready__.remote() for member in vars(self).values()])

    def makers(self) -> list[Any]:
        return [self.maker, self.async_maker, self.threaded_maker]


@pytest.mark.claim("transport", "values travel behind ordinary ObjectRefs of unmodified Ray")
def test_actor_positional_keyword_and_both(crew: Crew) -> None:
    maker, user = crew.maker, crew.user
    ref = maker.make.remote()
    assert ray.get(user.total.remote(ref)) == SUM
    assert ray.get(user.total.remote(value=ref)) == SUM
    assert ray.get(user.total.remote(ref, extra=maker.make.remote())) == 2 * SUM


@pytest.mark.claim("transport", "plain tasks produce and consume values")
def test_plain_task(crew: Crew) -> None:
    maker = crew.maker

    @ray.remote(num_cpus=0)
    def total(value: torch.Tensor, *, scale: float = 1) -> float:
        return float(value.double().sum()) * scale

    ref = maker.make.remote()
    assert ray.get([total.remote(ref), total.remote(value=ref, scale=2)]) == [SUM, 2 * SUM]


@pytest.mark.claim("transport", "refs may be nested in arguments, and be refs of unfinished calls")
def test_nested_in_arguments_and_taken_with_either_get(crew: Crew) -> None:
    maker, user = crew.maker, crew.user
    ref = maker.make.remote()
    assert ray.get(user.total_nested.remote({"refs": [ref]})) == SUM
    assert ray.get(user.ray_get.remote([ref])) == SUM


@pytest.mark.claim("transport", "refs may be nested in arguments, and be refs of unfinished calls")
def test_passed_before_the_producer_has_finished(crew: Crew) -> None:
    maker, user, gate = crew.maker, crew.user, actor(Gate)
    ref = maker.slow.remote([gate])
    results = [user.total.remote(ref), user.total.remote(value=ref), user.ray_get.remote([ref])]
    del ref
    assert ray.wait(results, num_returns=1, timeout=0)[0] == []
    ray.get(gate.open.remote())
    assert ray.get(results) == [SUM] * 3


def test_driver_gets_with_ray_get_and_raylane_get(crew: Crew) -> None:
    maker = crew.maker
    ref = maker.make.remote()
    assert torch.equal(ray.get(ref), expected())
    assert torch.equal(raylane.get(ref), expected())
    many = raylane.get([maker.make.remote(i) for i in range(5)], timeout=60)
    assert all(torch.equal(value, expected(i)) for i, value in enumerate(many))


@pytest.mark.claim("transport", "every transport brings the same values, `object_store` by Ray's own store")
def test_every_transport_brings_the_same(crew: Crew) -> None:
    maker = crew.maker
    ref = maker.nested.remote()
    for name in ("auto", "host", "tcp", "object_store"):
        value = raylane.get(ref, tensor_transport=name)
        assert torch.equal(value["layers"][0], expected()), name
        assert torch.equal(value["layers"][1]["x"], expected() * 2), name
        assert value["step"] == 7
    assert torch.equal(raylane.get(ref, _tensor_transport="OBJECT_STORE")["layers"][0], expected())
    counts = raylane.stats()
    assert {name: counts[name] for name in ("host", "tcp", "object_store")} == {"host": 2, "tcp": 1, "object_store": 2}


def test_task_gets_inside(crew: Crew) -> None:
    maker = crew.maker

    @ray.remote(num_cpus=0)
    def inside(refs: list[Any]) -> list[float]:
        return [
            float(ray.get(refs[0]).double().sum()),
            float(raylane.get(refs[0]).double().sum()),
            float(raylane.get(refs)[0].double().sum()),
        ]

    assert ray.get(inside.remote([maker.make.remote()])) == [SUM] * 3


@pytest.mark.claim("transport", "`await ref` and `raylane.get_async` wait in an event loop, each for its value alone")
def test_await_in_driver(crew: Crew) -> None:
    maker = crew.maker

    async def main() -> list[torch.Tensor]:
        ref = maker.make.remote()
        return [await ref, await raylane.get_async(maker.make.remote(1)), *(await raylane.get_async([ref, ref]))]

    values = asyncio.run(main())
    assert [float(value[0]) for value in values] == [0, 1, 0, 0]


def test_async_producer_and_consumer(crew: Crew) -> None:
    maker, user = crew.async_maker, crew.async_user
    ref = maker.make.remote()
    assert ray.get(user.total.remote(ref)) == SUM
    assert ray.get(user.awaits.remote([ref])) == SUM
    assert ray.get(user.get_async.remote([ref])) == SUM
    assert ray.get(user.decorated_total.remote(ref, b=maker.make.remote())) == 2 * SUM
    assert ray.get(user.decorated_awaits.remote([ref])) == f"Tensor {SUM}"


def test_concurrent_async_calls_get_their_own_values(crew: Crew) -> None:
    maker, user = crew.async_maker, crew.async_user
    refs = [maker.make.remote(i) for i in range(20)]
    found = ray.get([user.decorated_total.remote(ref, ref) for ref in refs])
    assert found == [2 * float(expected(i).double().sum()) for i in range(20)]


def test_threaded_actors(crew: Crew) -> None:
    maker, user = crew.threaded_maker, crew.threaded_user
    refs = [maker.make.remote(i) for i in range(16)]
    assert ray.get([user.total.remote(ref) for ref in refs]) == [float(expected(i).double().sum()) for i in range(16)]
    found = ray.get([user.decorated_total.remote(ref, ref, c=ref) for ref in refs])
    assert found == pytest.approx([3 * float(expected(i).double().sum()) for i in range(16)])


@pytest.mark.claim("transport", "a method may return several values, or be a generator, whose items Ray carries")
def test_num_returns(crew: Crew) -> None:
    maker, user = crew.maker, crew.user
    one, two = maker.two.remote()
    assert ray.get(user.total.remote(one)) == float(expected(1).double().sum())
    del one
    assert torch.equal(ray.get(two), expected(2))
    for dropped in [0, 1] * 10:  # before the call ends
        kept = maker.two.remote()[1 - dropped]
        assert torch.equal(ray.get(kept), expected(2 - dropped))
    whole = maker.two.options(num_returns=1).remote()
    assert [float(value[0]) for value in ray.get(whole)] == [1, 2]


@pytest.mark.claim("transport", "a method may return several values, or be a generator, whose items Ray carries")
def test_streaming_generators_sync_and_async(crew: Crew) -> None:
    for maker in (crew.maker, crew.async_maker):
        seeds = [
            ray.get(crew.user.total.remote(ref)) for ref in maker.stream.options(num_returns="streaming").remote(4)
        ]
        assert seeds == [float(expected(i).double().sum()) for i in range(4)]


def test_generator_dropped_half_way_frees_the_rest(crew: Crew, eventually: Any) -> None:
    maker = crew.maker
    stream = maker.stream.options(num_returns="streaming").remote(5)
    assert torch.equal(ray.get(next(stream)), expected())
    del stream
    eventually(lambda: ray.get(maker.stats.remote())["entries"] == 0, within_s=20)


def test_ref_handed_on_by_a_third_process(crew: Crew) -> None:
    maker, user = crew.maker, crew.user

    @ray.remote(num_cpus=0)
    def middle(refs: list[Any], user: Any) -> tuple[Any, float]:
        return refs, ray.get(user.total.remote(refs[0]))

    refs, total = ray.get(middle.remote([maker.make.remote()], user))
    assert total == SUM
    assert ray.get(user.total.remote(refs[0])) == SUM


@pytest.mark.claim("transport", "plain tasks produce and consume values")
def test_plain_task_produces(crew: Crew) -> None:
    user = crew.user

    @ray.remote(num_cpus=0)
    @raylane.method
    def produce(seed: float) -> torch.Tensor:
        return expected(seed)

    assert ray.get(user.total.remote(produce.remote(0))) == SUM
    assert torch.equal(raylane.get(produce.remote(4)), expected(4))


def test_task_and_actor_put(crew: Crew) -> None:
    user = crew.user

    @ray.remote(num_cpus=0)
    def publish() -> list[Any]:
        return [raylane.put(expected()), raylane.put({"a": expected(1)}, _tensor_transport="tcp")]

    refs = ray.get(publish.remote())
    assert ray.get(user.total.remote(refs[0])) == SUM
    assert torch.equal(ray.get(refs[1])["a"], expected(1))


@pytest.mark.claim("transport", "the driver is a source and a reader too")
def test_driver_put_is_read_by_others_and_by_itself(crew: Crew) -> None:
    user = crew.user
    mine = expected()
    ref = raylane.put(mine)
    assert ray.get(user.total.remote(ref)) == SUM
    with pytest.warns(UserWarning, match="passed both to the driver"):
        assert raylane.get(ref) is mine


def test_producer_passes_to_itself_the_very_same_objects(crew: Crew) -> None:
    maker = crew.maker
    ref = maker.hold.remote()
    assert ray.get(maker.is_kept.remote(ref))
    assert ray.get(maker.is_kept.remote(value=ref))


def test_own_decorated_method_called_in_python_is_plain(crew: Crew) -> None:
    maker = crew.maker
    assert ray.get(maker.calls_itself.remote()) == "Tensor 3.0"
    assert torch.equal(Maker().make(2), expected(2))


def test_decorated_method_inside_another_actor_warns_once(crew: Crew) -> None:
    """As in Ray Serve, whose replica holds the user's object; a subclass and the class itself are no other actor."""
    (warning,) = ray.get(crew.user.warnings_of.remote(Maker()))
    assert "warnings_of called Maker.make, a method with raylane.method" in warning
    assert ray.get(actor(type("Special", (Maker,), {})).warnings_of.remote()) == []


@pytest.mark.claim("transport", "named and detached actors produce values too")
@pytest.mark.slow
def test_named_and_detached_actors(crew: Crew) -> None:
    ray.remote(num_cpus=0)(Maker).options(name="maker", lifetime="detached").remote()
    maker, user = ray.get_actor("maker"), crew.user
    assert ray.get(user.total.remote(maker.make.remote())) == SUM

    @ray.remote(num_cpus=0)
    def elsewhere() -> float:
        return float(ray.get(ray.get_actor("maker").make.remote()).double().sum())

    assert ray.get(elsewhere.remote()) == SUM
    ray.kill(maker)


@pytest.mark.slow
def test_task_retries_publish_the_last_attempt(crew: Crew) -> None:
    maker = actor(Maker, max_task_retries=5)
    ref = maker.flaky.options(retry_exceptions=True).remote()
    assert torch.equal(ray.get(ref), expected(3))
    del ref


@pytest.mark.slow
def test_cancelled_calls_publish_nothing(crew: Crew, eventually: Any) -> None:
    maker, gate = crew.async_maker, actor(Gate)
    refs = [maker.wait.remote([gate]) for _ in range(5)]
    eventually(lambda: ray.get(gate.waiting.remote()) == 5)
    for ref in refs:
        ray.cancel(ref)
    ray.get(gate.open.remote())
    for ref in refs:
        with pytest.raises(ray.exceptions.TaskCancelledError):
            ray.get(ref, timeout=30)
    assert torch.equal(ray.get(maker.make.remote()), expected())
    # `tidy` sees that the actor holds nothing.


@pytest.mark.slow
def test_actor_handle_dropped_while_its_ref_is_kept(crew: Crew) -> None:
    ref = actor(Maker).make.remote()
    assert torch.equal(ray.get(ref), expected())
    user = crew.user
    assert ray.get(user.total.remote(ref)) == SUM


@pytest.mark.slow
def test_handle_and_ref_dropped_while_a_consumer_is_queued(crew: Crew) -> None:
    user, gate = actor(Holder), actor(Gate)
    busy = user.wait.remote([gate])
    queued = user.total.remote(actor(Maker).make.remote())
    # A second one goes all the way meanwhile: by then the first value exists, with no ref but the queued call's.
    assert ray.get(crew.user.total.remote(actor(Maker).make.remote())) == SUM
    ray.get(gate.open.remote())
    ray.get(busy)
    assert ray.get(queued) == SUM


class Holder:
    def wait(self, gate: list[Any]) -> None:
        ray.get(gate[0].wait.remote())

    def total(self, value: torch.Tensor) -> float:
        return float(value.double().sum())


def test_received_tensors_belong_to_the_consumer(crew: Crew) -> None:
    maker, user = crew.maker, crew.user
    ref = maker.hold.remote()
    assert ray.get(user.write.remote(ref)) == float((expected() + 1).double().sum())
    assert torch.equal(ray.get(ref), expected())


def test_decorated_consumer_fetches_its_arguments_before_it_runs(crew: Crew) -> None:
    maker, user = crew.maker, crew.user
    a, b, c = (maker.make.remote(i) for i in range(3))
    total = sum(float(expected(i).double().sum()) for i in range(3))
    assert ray.get(user.decorated_total.remote(a, b, c=c)) == pytest.approx(total)


@pytest.mark.slow
def test_both_decorators_in_either_order(crew: Crew) -> None:
    class Stacked:
        @ray.method(num_returns=2)
        @raylane.method
        def above(self) -> Any:
            return expected(1), expected(2)

        @raylane.method
        @ray.method(num_returns=2)
        def below(self) -> Any:
            return expected(1), expected(2)

    stacked = actor(Stacked)
    for refs in (stacked.above.remote(), stacked.below.remote()):
        assert [float(value[0]) for value in ray.get(refs)] == [1, 2]
