"""Fleets: three readers in actors of a real Ray that switch as one, go back, and lose members."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest
import ray
import torch
from tests.weights.fleet_actors import WAIT_S, Reader, Start, Trainer, answers, serving_version_1, started
from torch.nn import Linear

from raylane import weights
from raylane.errors import WeightsError, WeightsSwitchError, WeightsTimeoutError, WeightsVersionError
from raylane.weights import fleet as fleet_module
from raylane.weights.engines.vllm_engine import VllmAttachment

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("weights_service")]


@pytest.fixture
def start(cluster: None) -> Iterator[Start]:
    """Return a function that starts an actor."""
    with started() as start_actor:
        yield start_actor


@pytest.mark.claim("weights", "a fleet switches to a version as one, and goes back to the one before")
def test_readers_switch_together_and_go_back(start: Start) -> None:
    trainer, readers = start(Trainer, "policy"), [start(Reader, "policy") for _ in range(3)]
    assert answers(readers) == [({}, {0.0})] * 3, "what each has"
    ray.get(trainer.publish.remote(1))
    fleet = weights.Fleet("policy")
    with pytest.raises(WeightsSwitchError, match="'policy' cannot go back: no target before what each has is held"):
        fleet.rollback()
    assert fleet.switch(1, readers=3) == {"policy": 1}
    assert answers(readers) == [({"policy": 1}, {1.0})] * 3
    for value in range(2, 7):
        ray.get(trainer.publish.remote(value))
    assert answers(readers) == [({"policy": 1}, {1.0})] * 3, "nobody switches by itself"
    assert fleet.switch(6) == {"policy": 6}
    assert answers(readers) == [({"policy": 6}, {6.0})] * 3
    assert [info.number for info in weights.versions("policy") if info.held] == [1, 6]
    assert fleet.rollback() == {"policy": 1}
    assert answers(readers) == [({"policy": 1}, {1.0})] * 3
    assert fleet.state()["versions"] == {"policy": 1}
    assert fleet.state()["before"] == {"policy": 6}
    assert sorted(map(str, fleet.state()["readers"].values())) == ["{'policy': 1}"] * 3
    with pytest.raises(WeightsVersionError, match="version 2 of 'policy' cannot be taken: there are 1, 4, 5, 6"):
        fleet.switch(2)
    with pytest.raises(WeightsTimeoutError, match=r"3 of 4 readers of 'policy' have joined the fleet within 0\.3 s"):
        fleet.switch(6, readers=4, timeout=0.3)
    late = start(Reader, "policy")
    assert answers([late]) == [({"policy": 1}, {1.0})], "a reader that joins takes what is served"
    ray.get(readers[0].close.remote(), timeout=WAIT_S)
    assert fleet.switch(6, readers=3) == {"policy": 6}
    assert answers([*readers[1:], late]) == [({"policy": 6}, {6.0})] * 3


@pytest.mark.claim("weights", "a reader of a fleet that dies, fails or is late means that none switches")
def test_none_switches_when_one_cannot(start: Start, eventually: Callable[..., None]) -> None:
    trainer, readers, fleet = serving_version_1(start, 3)
    ray.get(trainer.publish.remote(2))
    ray.get(readers[2].fail_to_prepare.remote())
    with pytest.raises(WeightsSwitchError, match=r"did not switch to version 2 of 'policy': .*no memory for it\. All"):
        fleet.switch(2)
    assert answers(readers) == [({"policy": 1}, {1.0})] * 3
    os.kill(ray.get(readers[2].pid.remote()), signal.SIGKILL)
    eventually(lambda: len(fleet.state()["readers"]) == 2)
    stopped = ray.get(readers[1].pid.remote())
    dying = threading.Timer(0.5, os.kill, (stopped, signal.SIGKILL))
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(WeightsSwitchError, match=rf" {stopped} \d+ was not ready in time\. All readers go on with"):
            fleet.switch(2, timeout=2)
        assert answers(readers[:1]) == [({"policy": 1}, {1.0})]
        dying.start()
        with pytest.raises(WeightsSwitchError, match=rf" {stopped} \d+ has ended\. All readers go on with"):
            fleet.switch(2, timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
    dying.join()
    assert fleet.switch(2) == {"policy": 2}
    assert answers(readers[:1]) == [({"policy": 2}, {2.0})]


def test_a_reader_reports_while_it_prepares(start: Start, eventually: Callable[..., None]) -> None:
    """Else it would count as silent, and serve nothing, when a version takes long to come."""
    trainer, (reader,), fleet = serving_version_1(start, 1)
    ray.get(trainer.publish.remote(2))
    ray.get(reader.prepare_slowly.remote())
    before = ray.get(reader.answered_s.remote())
    with pytest.raises(WeightsSwitchError, match="was not ready in time"):
        fleet.switch(2, timeout=3)
    eventually(lambda: ray.get(reader.answered_s.remote()) > before + 1, within_s=30)
    assert answers([reader]) == [({"policy": 1}, {1.0})]
    ray.get(reader.end_preparation.remote())
    assert fleet.switch(2) == {"policy": 2}
    assert answers([reader]) == [({"policy": 2}, {2.0})]


def test_an_async_engine_has_a_reader_of_its_own(cluster: None) -> None:
    engine = VllmAttachment.__new__(VllmAttachment)
    engine.name, engine.is_async = "policy", True
    draft = weights.Subscriber("draft", {"w": torch.zeros(4)})

    async def join() -> None:
        weights.FleetReader([engine, draft])

    with pytest.raises(RuntimeError, match="in a coroutine, on the engine's loop"):
        weights.FleetReader([engine])
    with pytest.raises(TypeError, match="switches by itself, and the readers of 'draft' at step"):
        asyncio.run(join())
    draft.close()
    weights.drop("draft")


def test_a_reader_in_a_long_step_switches_at_its_end(start: Start) -> None:
    trainer, readers, fleet = serving_version_1(start, 2)
    ray.get(trainer.publish.remote(2))
    ray.get(readers[0].begin_long_step.remote())
    with pytest.raises(WeightsTimeoutError, match=r"'policy' switched to version 2 .* readers have not come"):
        fleet.switch(2, timeout=1)
    assert answers(readers[1:]) == [({"policy": 2}, {2.0})]
    ray.get(readers[0].end_long_step.remote())
    assert fleet.switch(2) == {"policy": 2}, "waits for the rest of it"
    assert answers(readers) == [({"policy": 2}, {2.0})] * 2


@pytest.mark.claim("weights", "a switch over several names is one switch")
def test_two_names_are_one_switch(start: Start) -> None:
    trainer, readers = start(Trainer, "policy", "draft"), [start(Reader, "policy", "draft") for _ in range(2)]
    fleet = weights.Fleet(["policy", "draft"])
    ray.get(trainer.publish.remote(1))
    assert fleet.switch({"draft": 1, "policy": 1}, readers=2) == {"draft": 1, "policy": 1}
    ray.get(trainer.publish.remote(2))
    with pytest.raises(WeightsTimeoutError, match="version 3 of 'policy' is not there"):
        fleet.switch({"draft": 2, "policy": 3}, timeout=0.5)
    assert answers(readers) == [({"draft": 1, "policy": 1}, {1.0})] * 2
    assert not [info for info in weights.versions() if info.held and info.number != 1], "nothing is held for it"
    assert fleet.switch({"draft": 2, "policy": 2}) == {"draft": 2, "policy": 2}
    assert answers(readers) == [({"draft": 2, "policy": 2}, {2.0})] * 2
    weights.drop("draft")
    assert not [info for info in weights.versions() if info.held], "nor for a fleet that lost a name"
    for wrong in (2, {"draft": 1}, {"draft": 1, "policy": 1, "x": 1}):
        with pytest.raises(ValueError, match="a switch needs a version of each of draft, policy"):
            fleet.switch(wrong)
    with pytest.raises(ValueError, match="several different ones"):
        weights.Fleet(["policy", "policy"])
    with pytest.raises(
        TypeError, match="a reader of a fleet is a Subscriber, or an attachment of a torch module or of vLLM"
    ):
        weights.FleetReader([object()])  # type: ignore[list-item]


def test_a_dropped_name_begins_anew(start: Start) -> None:
    fleet = weights.Fleet("policy")
    for value in (1, 2):
        trainer, readers = start(Trainer, "policy"), [start(Reader, "policy") for _ in range(2)]
        assert ray.get(trainer.publish.remote(value)) == [1]
        assert fleet.switch(1, readers=2) == {"policy": 1}
        assert answers(readers) == [({"policy": 1}, {float(value)})] * 2
        if value == 1:
            weights.drop("policy")
            assert answers(readers) == [({"policy": 1}, {1.0})] * 2, "they keep what they have"
            assert fleet.state()["versions"] == {}
            for each in (trainer, *readers):
                ray.kill(each)


def test_a_reader_that_is_cut_off_serves_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, model = start(Trainer, "policy"), Linear(1000, 1, bias=False)
    mapping = weights.Mapping.record(lambda tensors: [model.weight.data.view(-1).copy_(each) for _, each in tensors])
    attachment = weights.attach(model, "policy", mapping=mapping)
    reader, fleet = weights.FleetReader([attachment], timeout=20), weights.Fleet("policy")
    ray.get(trainer.publish.remote(1))
    serving, ended = threading.Event(), threading.Event()

    def serve() -> None:
        while not ended.is_set():
            serving.set()
            reader.idle(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    assert serving.wait(WAIT_S)
    assert fleet.switch(1) == {"policy": 1}
    ended.set()
    thread.join()
    assert attachment.version == 1
    with attachment.answer() as answer:
        model(torch.ones(1, 1000))
        answer.note_token()
    assert answer.weight_versions == [(1, 0, 1)]
    monkeypatch.setattr(fleet_module, "CONTACT_S", 0.0)  # as after a stop of the process
    reader._timeout = 0.1
    with pytest.raises(WeightsSwitchError, match=r"did not answer within 0\.1 s: others may serve other versions"):
        reader.step()
    monkeypatch.undo()
    assert reader.step() == {"policy": 1}
    reader.close()
    with pytest.raises(WeightsError, match="was closed"):
        reader.step()
    attachment.close()


class Stepping:
    """A fleet reader of this process whose steps are begun by a thread."""

    def __init__(self, *readers: weights.Subscriber) -> None:
        self.reader = weights.FleetReader(readers, timeout=20)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._step, daemon=True)
        self._thread.start()

    def _step(self) -> None:
        while not self._ended.wait(0.002):
            self.reader.idle(0.02)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


def test_readers_that_are_replaced_or_closed_hold_nobody_up(start: Start, eventually: Callable[..., None]) -> None:
    trainer, fleet = start(Trainer, "policy"), weights.Fleet("policy")
    tensors = {"w": torch.zeros(1000)}
    subscriber = weights.Subscriber("policy", tensors, apply="swap")
    ray.get(trainer.publish.remote(1))
    for _ in range(2):  # the second one has the same subscriber
        stepping = Stepping(subscriber)
        assert fleet.switch(1) == {"policy": 1}
        stepping.end()
        del stepping  # garbage, without close()
        gc.collect()
        eventually(lambda: fleet.state()["readers"] == {}, within_s=20)
    stepping = Stepping(subscriber)
    ray.get(trainer.publish.remote(2))
    loads = []
    new_memory = subscriber._new_memory
    subscriber._new_memory = lambda *args: loads.append(1) or new_memory(*args)  # type: ignore[method-assign]
    assert fleet.switch(2) == {"policy": 2}
    assert len(loads) == 1, "a version is loaded before the step, and not again"
    stepping.end()
    subscriber.close()
    eventually(lambda: fleet.state()["readers"] == {}, within_s=20)
    assert weights.readers("policy") == []


def test_failed_preparation_lets_go_of_the_other_names(start: Start) -> None:
    trainer, fleet = start(Trainer, "policy", "draft"), weights.Fleet(["draft", "policy"])
    readers = [weights.Subscriber(name, {"w": torch.zeros(1000)}) for name in ("draft", "policy")]
    stepping = Stepping(*readers)
    ray.get(trainer.publish.remote(1))

    def fetch(*_: object, **__: object) -> int:
        raise OSError("no address space")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers[1], "fetch", fetch)
        with pytest.raises(WeightsSwitchError, match="OSError: no address space"):
            fleet.switch({"draft": 1, "policy": 1})
    assert readers[0].pending is None
    for value in range(2, 6):
        ray.get(trainer.publish.remote(value))
    assert fleet.switch({"draft": 5, "policy": 5}) == {"draft": 5, "policy": 5}
    stepping.end()
    stepping.reader.close()
    for reader in readers:
        reader.close()
