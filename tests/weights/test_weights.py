"""Publishers and readers in actors of a real Ray."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tests.weights.weights_actors import Reader, Start, Trainer, model, publish, started

from raylane import weights
from raylane.cli.weights import render
from raylane.errors import (
    WeightsError,
    WeightsInvalidError,
    WeightsLayoutError,
    WeightsLostError,
    WeightsTimeoutError,
)
from raylane.weights.service.client import all_memory, all_versions

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("weights_service")]


@pytest.fixture
def start(cluster: None) -> Iterator[Start]:
    """Return a function that starts an actor."""
    with started() as start_actor:
        yield start_actor


@pytest.mark.claim("weights", "readers may have another floating-point dtype, and strided tensors")
def test_readers_of_every_kind_get_whole_versions(start: Start) -> None:
    trainers = [start(Trainer, rank, 2) for rank in range(2)]
    readers = [start(Reader, *kind) for kind in (("copy",), ("swap",), ("copy", "bfloat16"))]
    for step in range(1, 5):
        assert publish(trainers, step) == step
        assert ray.get([reader.update.remote() for reader in readers]) == [(step, {step})] * 3
    newest, again = (weights.versions("policy", digests=True)[-1] for _ in range(2))
    assert newest.digest == again.digest is not None
    assert {name: nbytes > newest.nbytes for _, name, nbytes in all_memory(10)} == {"policy": True}
    table = render(all_versions(10))
    assert "policy  4        4     committed" in table
    assert (newest.number, newest.step, newest.state, len(newest.readers)) == (4, 4, "committed", 3)
    ray.get(trainers[0].wait.remote(4, 5))
    # A reader that has died holds nobody up.
    os.kill(ray.get(readers[0].pid.remote()), signal.SIGKILL)
    publish(trainers, 5)
    ray.get([reader.update.remote() for reader in readers[1:]])
    ray.get(trainers[0].wait.remote(5, 10))


@pytest.mark.claim("weights", "versions outlive their trainer, and another trainer of any world size goes on")
def test_versions_outlive_their_trainer_and_go_on_with_another(start: Start) -> None:
    trainers = [start(Trainer, rank, 2) for rank in range(2)]
    publish(trainers, 7)
    # One rank alone completes no version.
    lone = trainers[0].publish.remote(8)
    assert ray.get(lone) == 2
    for trainer in trainers:
        os.kill(ray.get(trainer.pid.remote()), signal.SIGKILL)
    reader = start(Reader)
    assert ray.get(reader.update.remote()) == (1, {7})
    others = [start(Trainer, rank, 3) for rank in range(3)]
    assert publish(others, 9) == 3
    assert ray.get(reader.update.remote()) == (3, {9})


@pytest.mark.claim("weights", "a slot is written again only when no living reader holds it, forked children included")
def test_prefetched_version_is_held_until_the_update(start: Start) -> None:
    trainer, target = start(Trainer, 0, 1), model()
    subscriber = weights.Subscriber("policy", target)
    publish([trainer], 1)
    assert subscriber.prefetch(timeout=20) == 1
    assert not subscriber.update().version > 1
    publish([trainer], 2)
    assert subscriber.prefetch(2) == 2
    assert {float(value) for value in target[0].weight.detach().unique()} == {1}
    publish([trainer], 3)
    with pytest.raises(WeightsTimeoutError, match="a reader still holds the version"):
        ray.get(trainer.publish.remote(4, 0.3))
    assert subscriber.update().version == 2
    assert {float(value) for value in target[0].weight.detach().unique()} == {2}
    newest = publish([trainer], 5)
    assert subscriber.prefetch() == newest  # in place of another one
    assert subscriber.prefetch() == newest
    assert subscriber.update().step == 5
    assert subscriber.prefetch() == newest  # which is in use, so the next one is not missed
    for _ in range(3):  # a version that was prefetched and passed over holds nobody up
        newest = publish([trainer], 5)
        assert subscriber.prefetch() == newest
        assert subscriber.wait_for(publish([trainer], 5)).version == newest + 1
    newest = publish([trainer], 6)
    assert subscriber.update().version == newest
    subscriber.close()


@pytest.mark.claim("weights", "replicas share the work of publication")
def test_replicas_that_write_nothing_publish_too(start: Start) -> None:
    trainers = [start(Replica, rank) for rank in range(3)]
    reader = {"w": torch.zeros(4)}
    subscriber = weights.Subscriber("policy", reader)
    for step in (1, 2):
        assert publish(trainers, step) == step
        subscriber.update()
        assert reader["w"].eq(step).all()
    subscriber.close()


class Replica(Trainer):
    def __init__(self, rank: int) -> None:
        self.tensors = {"w": torch.zeros(4)}
        self.publisher = weights.Publisher("policy", self.tensors, rank=rank, world=3)


@pytest.mark.claim("weights", "mapped weights need no copy and no memory on one host and CPU; training is refused")
def test_mapped_weights_share_memory_and_refuse_training(start: Start) -> None:
    trainer, reader = start(Trainer, 0, 1), start(MappedReader)
    publish([trainer], 1)
    assert ray.get(reader.update.remote()) == (1, {1})
    publish([trainer], 2)
    # The reader holds version 1, in the only slot that could be written.
    label = rf"a reader still holds .* Readers that use version 1: \['\S+ {ray.get(reader.pid.remote())} "
    with pytest.raises(WeightsTimeoutError, match=label):
        ray.get(trainer.publish.remote(3, 0.3))
    assert ray.get(reader.values.remote()) == {1}
    assert ray.get(reader.update.remote()) == (2, {2})
    assert publish([trainer], 4) > 2
    assert ray.get(reader.values.remote()) == {2}
    ray.get(reader.train.remote())
    ray.get(reader.forget.remote())
    publish([trainer], 5)
    with pytest.raises(WeightsTimeoutError, match="none that is known, so perhaps tensors that outlive a reader"):
        ray.get(trainer.publish.remote(6, 0.3))


class MappedReader(Reader):
    def __init__(self) -> None:
        super().__init__("map")

    def forget(self) -> None:
        del self.subscriber  # the model keeps the memory of the version
        gc.collect()

    def train(self) -> None:
        assert not any(parameter.requires_grad for parameter in self.model.parameters())
        self.model(torch.ones(24))
        self.model.train()
        with pytest.raises(WeightsError, match="apply='map'"):
            self.model(torch.ones(24))
        # A write stays in this process, and is gone with the next update.
        self.model[0].weight.data.fill_(-1)
        assert self.values() == {-1, 2}
        self.subscriber.update()
        assert self.values() == {4}


class Large:
    """Rank or reader of 64 MB, which measures the memory of its own process."""

    NBYTES = 64_000_000

    def __init__(self, apply: str = "", rank: int = 0) -> None:
        rows = 1000 if apply else 500
        self.tensors = {f"w{i}": torch.ones(rows, 1000) for i in range(16)}
        if apply:
            self.subscriber = weights.Subscriber("policy", self.tensors, apply=apply)
        else:
            self.publisher = weights.Publisher(
                "policy", self.tensors, rank=rank, world=2, places=lambda _, part: weights.Part.even(part, 0, rank, 2)
            )

    def publish(self, step: int) -> int:
        for tensor in self.tensors.values():
            tensor.fill_(step)
        return self.publisher.publish(step, timeout=20)

    def update(self, at_least: int) -> tuple[float, float]:
        """Return the own memory that an update takes at its peak, and afterwards, in parts of the weights."""
        before, peaks, done = own_bytes(), [0], threading.Event()

        def watch() -> None:
            while not done.wait(0.0005):
                peaks.append(own_bytes())

        watching = threading.Thread(target=watch)
        watching.start()
        step = self.subscriber.wait_for(at_least, timeout=20).step
        done.set()
        watching.join()
        assert all(bool(tensor.eq(step).all()) for tensor in self.tensors.values())
        return (max(peaks) - before) / self.NBYTES, (own_bytes() - before) / self.NBYTES


def own_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.claim("weights", "readers need no memory beside the `keep` slots of their host")
def test_readers_need_no_memory_beside_that_of_the_host(start: Start) -> None:
    ranks = [start(Large, "", rank) for rank in range(2)]
    readers = {apply: start(Large, apply) for apply in ("copy", "map", "swap")}
    for step in range(1, 5):
        publish(ranks, step)
        found = dict(zip(readers, ray.get([reader.update.remote(step) for reader in readers.values()]), strict=True))
        if step > 1:  # the first update loads code, and frees the memory of tensors that are mapped then
            assert found["copy"][0] < 0.1, found
            assert found["map"][0] < 0.1, found
            assert found["swap"][0] < 1.2, found
    assert found["swap"][1] < 0.1, found  # the C library keeps the memory of one set for the next
    (kept,) = (nbytes for _, _, nbytes in all_memory(10))
    assert 2 * Large.NBYTES <= kept < 2.01 * Large.NBYTES


def test_dropped_name_can_be_published_again_at_once(cluster: None) -> None:
    publisher = weights.Publisher("policy", {"w": torch.ones(3)})
    tensors = {"w": torch.zeros(3)}
    for step in (1, 2):
        assert publisher.publish(step) == 1
        assert weights.Subscriber("policy", tensors).update().step == step
        weights.drop("policy")
    weights.drop("policy")  # unknown by now
    publisher.close()


@pytest.mark.claim("weights", "no reader keeps bytes of a dropped name")
def test_dropped_name_leaves_no_old_bytes(start: Start) -> None:
    other = weights.Publisher("other", {"x": torch.zeros(1)})  # keeps the catalogue and the keeper alive
    publisher = weights.Publisher("policy", {"a": torch.full((8,), 1.0), "b": torch.full((8,), 2.0)})
    targets = [{"a": torch.zeros(8), "b": torch.zeros(8)} for _ in range(3)]
    subscribers = [
        weights.Subscriber("policy", target, apply=apply)
        for target, apply in zip(targets, ("copy", "swap", "map"), strict=True)
    ]
    publisher.publish(1)
    assert {subscriber.update().version for subscriber in subscribers} == {1}
    publisher.publish(2)
    assert {subscriber.prefetch() for subscriber in subscribers} == {2}
    weights.drop("policy")
    # Another order of the tensors: an old plan would exchange them.
    second = weights.Publisher("policy", {"b": torch.full((8,), 12.0), "a": torch.full((8,), 11.0)})
    assert second.publish(1) == 1
    with pytest.raises(WeightsTimeoutError, match="of 0 readers"):  # those of the dropped name do not count
        second.wait(1, readers=1, timeout=0.2)
    for target, subscriber in zip(targets, subscribers, strict=True):
        assert subscriber.update().changed
        assert (target["a"].unique().tolist(), target["b"].unique().tolist()) == ([11], [12])
    second.wait(1, readers=3, timeout=10)
    with pytest.raises(WeightsError, match="its trainer was replaced by one of 1 ranks that registered later"):
        publisher.publish(3)
    assert not subscribers[0].update().changed
    for each in (*subscribers, publisher, second, other):
        each.close()
    weights.drop("other")


@pytest.mark.claim("weights", "with `detached=True` a name outlives its job")
def test_another_job_reads_a_detached_name(start: Start, tmp_path: Path) -> None:
    tensors = {"w": torch.full((3,), 5.0)}
    publisher = weights.Publisher("policy", tensors, detached=True)
    publisher.publish(1)
    code = """if True:
        import sys, ray, torch
        ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
        from raylane import weights
        tensors = {"w": torch.zeros(3)}
        assert weights.versions() == []  # of this job
        print(weights.Subscriber("policy", tensors, detached=True).update().step, tensors["w"].tolist())
        """
    words = [sys.executable, "-c", code, ray.get_runtime_context().gcs_address]
    environment = {**os.environ, "RAYLANE_TRACE": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.stdout == "1 [5.0, 5.0, 5.0]\n", done.stderr
    (trace,) = tmp_path.iterdir()
    assert '"name": "take weights"' in trace.read_text()
    publisher.close()
    weights.drop("policy", detached=True)


@pytest.mark.claim("weights", "publications and updates run beside the next step and beside generation")
def test_publication_and_update_run_beside_other_work(start: Start) -> None:
    trainers, reader = [start(Trainer, rank, 2) for rank in range(2)], start(Reader)
    for step in (1, 2):
        assert ray.get([trainer.publish_beside.remote(step) for trainer in trainers]) == [step] * 2
        assert ray.get(reader.update_async.remote()) == (step, {step})


@pytest.mark.claim("weights", "every wait has a deadline and names the ranks and readers that are missing")
def test_waits_name_what_is_missing(start: Start) -> None:
    trainer = start(Trainer, 0, 2)
    with pytest.raises(WeightsTimeoutError, match=r"ranks \[1\] of 2 have not registered for 'policy'"):
        ray.get(trainer.publish.remote(1, 0.3))
    other = start(Trainer, 1, 2)
    reader = start(Reader)
    with pytest.raises(WeightsTimeoutError, match="version 1 of 'policy' is not there: no rank has begun it"):
        ray.get(reader.update.remote(1, 0.3))
    mistaken = start(Reader, "copy", "float32", "polcy")
    with pytest.raises(WeightsTimeoutError, match=r"after 0\.\d+ s version 1 of 'polcy' .*; published are 'policy'"):
        ray.get(mistaken.update.remote(1, 0.3))
    ray.get(trainer.publish.remote(1))
    with pytest.raises(WeightsTimeoutError, match=r"ranks \[1\] have not published step 1"):
        ray.get(trainer.publish.remote(2, 0.3))
    with pytest.raises(WeightsError, match="rank 1 publishes step 0 of 'policy', but rank 0 publishes step 1"):
        ray.get(other.publish.remote(0))
    assert ray.get(other.publish.remote(1)) == 1
    with pytest.raises(WeightsTimeoutError, match=r"of 1 readers of 'policy', \[.*\] have not taken version 1"):
        ray.get(trainer.wait.remote(1, 0.3))
    alone = weights.Publisher("alone", {"w": torch.zeros(1)}, world=2)
    waiting = alone.publish_async(1, timeout=600)
    alone.close(cancel=True)
    with pytest.raises(WeightsError, match=r"the publisher of .* was closed"):
        waiting.result(60)
    weights.drop("alone")


@pytest.mark.claim("weights", "missing, surplus and misshapen tensors are named before anything is written")
def test_options_and_layouts_that_do_not_fit_are_refused(start: Start) -> None:
    tensors = {"w": torch.zeros(2, 2)}
    for options, text in (
        ({"rank": 2, "world": 2}, "rank must be from 0 to world - 1"),
        ({"keep": 1}, "keep must be at least 2"),
        ({"dtype": torch.int8}, "dtype must be a floating-point dtype"),
        ({"dtype": torch.float8_e4m3fn}, "two bytes or more, .* quantise weights with their scales"),
        ({"dtype": "bf16"}, "floating-point dtype such as torch.bfloat16, got 'bf16'"),
        ({"keep": 2.5}, "keep must be a whole number, got 2.5"),
        ({"keep": 10**9}, "keep must be at most 64, got 1000000000"),
        ({"anchor_every": "5"}, "anchor_every must be a whole number, got '5'"),
        ({"places": {"z": weights.Part((2, 2), (0, 0))}}, "places has no tensors of the names 'z'; there are 'w'"),
        ({"timeout": "5"}, "timeout must be a number of seconds >= 0, or None for no limit, got '5'"),
    ):
        with pytest.raises(ValueError, match=text):
            weights.Publisher("policy", tensors, **options)
    with pytest.raises(TypeError, match="'w' is no tensor but int"):
        weights.Publisher("policy", {"w": 3})
    with pytest.raises(ValueError, match="apply must be one of copy, swap, map, got 'move'"):
        weights.Subscriber("policy", tensors, apply="move")
    with pytest.raises(WeightsLostError, match="no weights of the name 'policy'; there are: 'kept by the module'"):
        weights.versions("policy")
    with pytest.raises(ValueError, match="has no tensors"):
        weights.Publisher("policy", {})
    publisher = weights.Publisher("policy", tensors)
    publisher.publish(1)
    with pytest.raises(ValueError, match=r"step must be a whole number, got 1\.5"):
        publisher.publish(1.5)  # type: ignore[arg-type]
    quantised = weights.Subscriber("policy", {"w": torch.zeros(2, 2, dtype=torch.float8_e4m3fn)})
    with pytest.raises(WeightsLayoutError, match="float8_e4m3fn, which needs a scale"):
        quantised.update()
    target = {"w": torch.ones(2, 2), "v": torch.ones(2)}
    subscriber = weights.Subscriber("policy", target)
    with pytest.raises(WeightsLayoutError, match="1 tensors of the reader are not published: 'v'"):
        subscriber.update()
    assert target["w"].eq(1).all()
    # Tensors that were replaced by others since.
    target.pop("v")
    subscriber = weights.Subscriber("policy", target)
    for rows in (1, 3):
        target["w"] = torch.ones(rows, 2)
        with pytest.raises(WeightsLayoutError, match=rf"'w' is of shape \({rows}, 2\) now, and was of shape \(2, 2\)"):
            subscriber.update()
        assert target["w"].eq(1).all()
        tensors["w"] = torch.zeros(rows, 2)
        with pytest.raises(WeightsLayoutError, match=rf"'w' is of shape \({rows}, 2\) now, and was of shape \(2, 2\)"):
            publisher.publish(2)
    target["w"], tensors["w"] = torch.ones(2, 2), torch.full((2, 2), 5.0)
    publisher.publish(3)
    assert subscriber.update().step == 3
    assert target["w"].eq(5).all()
    publisher.close()
    subscriber.close()


@pytest.mark.claim("weights", "whole versions go where a delta does not pay, after a missed one, and on one host")
@pytest.mark.parametrize("delta", ["auto", "always"])
def test_readers_of_the_trainers_host_copy_no_deltas(start: Start, delta: str) -> None:
    trainer, reader = start(Trainer, 0, 1, "policy", 2, delta), start(Reader)
    for step in range(1, 4):
        number = publish([trainer], step)
        assert ray.get(reader.update.remote(number)) == (number, {step})
    assert not any(version.copied_bytes for version in weights.versions("policy"))


@pytest.mark.claim("weights", "each tensor may be published with a dtype of its own")
def test_tensors_are_published_with_the_dtypes_of_their_names(cluster: None) -> None:
    numbers = torch.tensor([1 / 3, 1.0, -2.7])
    own = {"norm.weight": numbers, "mlp.weight": numbers.clone(), "head.weight": numbers.clone()}
    dtypes = {"norm": None, "^mlp": torch.float8_e4m3fn, "": torch.bfloat16}
    publisher = weights.Publisher("policy", own, dtype=dtypes)
    publisher.publish(1)
    asked = {"norm.weight": torch.float32, "mlp.weight": torch.float8_e4m3fn, "head.weight": torch.bfloat16}
    read = {name: torch.zeros(3, dtype=dtype) for name, dtype in asked.items()}
    reader = weights.Subscriber("policy", read)
    reader.update()
    for name, tensor in read.items():
        assert torch.equal(tensor.view(torch.uint8), numbers.to(asked[name]).view(torch.uint8)), name
    reader.close()
    publisher.close()
    weights.drop("policy")


def test_delta_options_are_checked() -> None:
    tensors = {"w": torch.zeros(3)}
    with pytest.raises(ValueError, match="delta must be one of auto, never, always, got 'often'"):
        weights.Publisher("policy", tensors, delta="often")
    with pytest.raises(ValueError, match="anchor_every must be at least 1"):
        weights.Publisher("policy", tensors, anchor_every=0)


@pytest.mark.claim("weights", "tensors that lost a version take it again")
@pytest.mark.parametrize("apply", ["copy", "swap", "map"])
def test_tensors_that_lost_a_version_take_it_again(start: Start, apply: str) -> None:
    publisher, target = weights.Publisher("policy", {"w": torch.ones(3)}), {"w": torch.zeros(3)}
    subscriber = weights.Subscriber("policy", target, apply=apply)
    with pytest.raises(WeightsInvalidError, match=r"no version of 'policy' yet. .* initial='allow'"):
        subscriber.check()
    subscriber.check(initial="allow")
    publisher.publish(1)
    assert subscriber.update().changed
    subscriber.check()
    assert not subscriber.update().changed
    target["w"] = torch.zeros(3)  # replaced
    assert subscriber.update().changed
    assert target["w"].eq(1).all()
    target["w"].detach().zero_()  # as memory that was dropped and mapped again
    subscriber.invalidate()
    with pytest.raises(WeightsInvalidError, match="no whole version"):
        subscriber.check(initial="allow")
    assert subscriber.prefetch() == 1
    assert subscriber.update().changed
    assert target["w"].eq(1).all()
    subscriber.close()
    subscriber.close()
    publisher.close()
    with pytest.raises(WeightsError, match=r"reader of .policy. was closed\. Make a new Subscriber"):
        subscriber.update()
    with pytest.raises(WeightsError, match=r"publisher of .policy. was closed\. Make a new one"):
        publisher.publish(2)


@pytest.mark.claim("weights", "every wait has a deadline and names the ranks and readers that are missing")
def test_calls_wait_for_each_other_within_their_deadline(start: Start) -> None:
    publisher, target = weights.Publisher("policy", {"w": torch.ones(3)}), {"w": torch.zeros(3)}
    subscriber = weights.Subscriber("policy", target)
    begun = threading.Event()

    def wait(lock: Any, ended: threading.Event) -> None:
        with lock:
            begun.set()
            ended.wait(60)

    for owner, call in (
        (publisher, lambda: publisher.publish(1, timeout=0.1)),
        (subscriber, lambda: subscriber.update(timeout=0.1)),
    ):
        ended = threading.Event()
        begun.clear()
        other = threading.Thread(target=wait, args=(owner._lock, ended))
        other.start()
        assert begun.wait(60)
        with pytest.raises(WeightsTimeoutError, match=r"another call of the same object did not end within 0\.1 s"):
            call()
        ended.set()
        other.join(60)
    publisher.publish(1)

    async def cancel() -> None:
        with subscriber._lock:  # this update waits until it was cancelled
            update = asyncio.ensure_future(subscriber.update_async(timeout=60))
            await asyncio.sleep(0)
            update.cancel()
            with pytest.raises(asyncio.CancelledError):
                await update

    asyncio.run(cancel())  # ends when the thread has ended
    assert (subscriber.version, target["w"].tolist()) == (0, [0, 0, 0])
    assert subscriber.update().version == 1
    publisher.close()
    subscriber.close()
