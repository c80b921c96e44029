"""Readers of other names and shapes, on real parts: copied, exchanged, mapped, brought beforehand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import Parameter, ParameterDict

from raylane import weights
from raylane.core.deadline import Cancellation, Cancelled, Deadline
from raylane.errors import WeightsError, WeightsLayoutError, WeightsTimeoutError
from raylane.weights.memory.sources import MOST_SLOTS

pytestmark = pytest.mark.usefixtures("ray_session", "weights_service")


@pytest.fixture(autouse=True)
def dropped() -> Iterator[None]:
    yield
    weights.drop("policy")


def published(value: float) -> dict[str, torch.Tensor]:
    return {
        "a.q": torch.full((4, 8), float(value)),
        "a.k": torch.full((2, 8), value + 0.25),
        "a.w": torch.arange(12.0).view(3, 4) + value,
        "a.n": torch.full((8,), value + 0.5),
    }


def reader(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    shapes = {"qk": (6, 8), "w": (4, 3), "n": (8,)}
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


RULES = weights.Mapping().rename(r"^a\.", "").fuse(["q", "k"], "qk").transpose("w")


def check(tensors: dict[str, torch.Tensor], value: float) -> None:
    source = published(value)
    assert torch.equal(tensors["qk"].float(), torch.cat([source["a.q"], source["a.k"]]))
    assert torch.equal(tensors["w"].float(), source["a.w"].t())
    assert torch.equal(tensors["n"].float(), source["a.n"])


@pytest.mark.claim("weights", "other names and shapes are read by the reader's own loader or by rules")
@pytest.mark.parametrize("apply", ["copy", "swap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "prefetched"])
def test_versions_reach_fused_and_transposed_tensors(apply: str, dtype: torch.dtype, ahead: bool) -> None:
    tensors, trainer = reader(dtype), published(0)
    publisher = weights.Publisher("policy", trainer, keep=3)
    subscriber = weights.Subscriber("policy", tensors, apply=apply, mapping=RULES)
    for step in (1, 2, 3):
        for name, tensor in published(step).items():
            trainer[name].copy_(tensor)
        publisher.publish(step)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        if ahead:
            assert subscriber.prefetch() == step
            assert all(torch.equal(tensors[name], before[name]) for name in tensors)  # not touched yet
        update = subscriber.update()
        assert (update.version, update.nbytes) == (step, 4 * (32 + 16 + 12 + 8))
        check(tensors, step)
    publisher.close()
    subscriber.close()


def test_tensors_as_published_can_be_mapped() -> None:
    source = published(1)
    publisher = weights.Publisher("policy", source)
    publisher.publish(0)
    tensors = {"x.q": torch.zeros(4, 8), "x.n": torch.zeros(8)}
    rules = weights.Mapping().rename(r"^a\.", "x.")
    subscriber = weights.Subscriber("policy", tensors, apply="map", mapping=rules, subset=True)
    assert subscriber.update().nbytes == 0
    assert torch.equal(tensors["x.q"], source["a.q"])
    assert torch.equal(tensors["x.n"], source["a.n"])
    subscriber.close()
    fused = weights.Mapping().rename(r"^a\.", "").fuse(["q", "k"], "qk")
    for rules, name, cause in ((fused, "qk", "it is stored in 2 pieces"), (RULES, "w", "it is stored transposed")):
        tensors = {name: reader()[name]}
        with pytest.raises(WeightsError, match=f"'{name}' cannot be mapped: {cause}"):
            weights.Subscriber("policy", tensors, apply="map", mapping=rules, subset=True).update()


def test_parts_of_several_ranks_reach_fused_tensors() -> None:
    whole, tensors = published(3), reader()
    ranks = [{name: tensor.chunk(2)[rank].clone() for name, tensor in whole.items()} for rank in range(2)]
    places = [
        {name: weights.Part(tuple(whole[name].shape), (start, *(0,) * (whole[name].dim() - 1))) for name, start in each}
        for each in (
            [(name, 0) for name in whole],
            [(name, len(whole[name].chunk(2)[0])) for name in whole],
        )
    ]
    publishers = [
        weights.Publisher("policy", ranks[rank], rank=rank, world=2, places=places[rank]) for rank in range(2)
    ]
    for publisher in publishers:
        publisher.publish(0)
    weights.Subscriber("policy", tensors, mapping=RULES).update()
    check(tensors, 3)


def test_a_mapping_that_does_not_fit_is_refused_at_the_start() -> None:
    weights.Publisher("policy", published(0)).publish(0)
    tensors = reader()
    with pytest.raises(WeightsLayoutError, match="makes 4 tensors that the reader does not have"):
        weights.Subscriber("policy", tensors, mapping=weights.Mapping())
    assert all(not tensor.any() for tensor in tensors.values())
    with pytest.raises(ValueError, match="pass either `mapping` or `places`"):
        weights.Subscriber("policy", tensors, mapping=RULES, places={})


def test_failed_load_keeps_the_mapped_version() -> None:
    published = {"a": torch.ones(1000), "b": torch.ones(1000)}
    publisher = weights.Publisher("policy", published, keep=2)
    model = ParameterDict({name: torch.zeros(1000) for name in published})
    subscriber = weights.Subscriber("policy", model, apply="map")
    publisher.publish(1)
    subscriber.update()
    model["b"] = Parameter(model["b"].detach().half(), requires_grad=False)
    with pytest.raises(WeightsError, match="'b' cannot be mapped"):
        subscriber.update()
    published["a"].fill_(2)
    publisher.publish(2)
    with pytest.raises(WeightsTimeoutError, match="a reader still holds the version"):
        publisher.publish(3, timeout=0.5)
    assert model["a"].eq(1).all()
    subscriber.close()
    publisher.close()


@pytest.mark.parametrize("apply", ["copy", "map"])
def test_many_prefetched_versions_leave_the_own_one(apply: str) -> None:
    keep = MOST_SLOTS + 2
    published, target = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    publisher = weights.Publisher("policy", published, keep=keep)
    subscriber = weights.Subscriber("policy", target, apply=apply)

    def publish_next(number: int) -> None:
        published["w"].fill_(number)
        publisher.publish(number, timeout=1)

    publish_next(1)
    subscriber.update()
    for number in range(2, keep + 1):
        publish_next(number)
        assert subscriber.prefetch() == number
    assert target["w"].eq(1).all()
    if apply == "map":
        with pytest.raises(WeightsTimeoutError, match="a reader still holds the version"):
            publish_next(keep + 1)
        assert target["w"].eq(1).all()
    subscriber.update()
    assert target["w"].eq(keep).all()
    for number in range(keep + 1, keep + 3):  # in the slots of the first versions again
        publish_next(number)
        subscriber.update()
        assert target["w"].eq(number).all()
    subscriber.close()
    publisher.close()


def no_memory(*_: object) -> None:
    raise MemoryError


def test_prefetches_that_break_off_neither_hold_nor_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    published = {"w": torch.zeros(1000)}
    copying, swapping = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    publisher = weights.Publisher("policy", published)
    first = weights.Subscriber("policy", copying)
    second = weights.Subscriber("policy", swapping, apply="swap")

    def publish_next(number: int) -> None:
        published["w"].fill_(number)
        publisher.publish(number, timeout=1)

    publish_next(1)
    assert first.prefetch() == 1
    deadline, hold = Deadline(20, Cancellation()), first._hold
    monkeypatch.setattr(first, "_hold", lambda *args: (hold(*args), deadline.cancellation.cancel())[0])
    with pytest.raises(Cancelled):
        first.fetch(1, deadline)
    publish_next(2)
    with pytest.raises(WeightsTimeoutError, match="a reader still holds the version"):
        publish_next(3)
    assert first.update().version == 1
    assert copying["w"].eq(1).all()

    with monkeypatch.context() as failing:
        failing.setattr(second, "_new_memory", no_memory)
        with pytest.raises(MemoryError):
            second.prefetch()
    assert second.pending is None
    for number in (3, 4, 5):
        publish_next(number)
    second.update()
    assert swapping["w"].eq(5).all()
    for each in (first, second, publisher):
        each.close()


def test_a_prefetched_version_is_not_taken_with_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = {"a": torch.zeros(4), "b": torch.zeros(4)}
    subscriber = weights.Subscriber("policy", reader)
    first = weights.Publisher("policy", {"a": torch.full((4,), 1.0), "b": torch.full((4,), -1.0)})
    first.publish(1)
    assert subscriber.prefetch() == 1
    first.close()
    # Another order of the tensors in memory.
    second = weights.Publisher("policy", {"b": torch.full((4,), -2.0), "a": torch.full((4,), 2.0), "c": torch.ones(1)})
    second.publish(2)
    with monkeypatch.context() as failing:
        failing.setattr(subscriber, "_paths", no_memory)
        with pytest.raises((MemoryError, WeightsLayoutError)):
            subscriber.update(version=2)
    with pytest.raises(WeightsLayoutError):
        subscriber.update(timeout=5)
    assert not reader["a"].any()
    second.close()
    third = weights.Publisher("policy", {"b": torch.full((4,), -3.0), "a": torch.full((4,), 3.0)})
    third.publish(3)
    assert subscriber.update(timeout=5).version == 3
    assert reader["a"].eq(3).all()
    assert reader["b"].eq(-3).all()
    third.close()
    subscriber.close()
