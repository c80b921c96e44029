"""vLLM engines in a fleet: an `LLM` and an `AsyncLLM` that switch together, and go back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: run `make test-vllm`")

from tests.vllm import engines

from raylane import weights
from raylane.errors import WeightsInvalidError, WeightsSwitchError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(900)]


@pytest.mark.claim("weights", "vLLM engines switch together or not at all, go back, and answers carry the version")
def test_two_engines_switch_together_and_go_back(started: list[Any], tmp_path: Path) -> None:
    trainer = engines.Trainer.remote(str(tmp_path))
    started.append(trainer)
    folder = ray.get(trainer.export.remote(0))
    sync = engines.Engine.options(runtime_env=engines.OUTSIDE).remote(folder)
    loop, fresh = engines.AsyncEngine.remote(folder), engines.FreshEngines.remote()
    started += [sync, loop, fresh]
    for engine in (sync, loop):
        ray.get(engine.attach.remote(initial="refuse"))
        ray.get(engine.join.remote())
    with pytest.raises(WeightsInvalidError):
        ray.get(loop.answers.remote())
    folders = dict(ray.get(trainer.publish.remote()) for _ in range(2))
    fleet = weights.Fleet("policy")

    def switch(version: int | None) -> None:
        idle = sync.idle.remote(60)
        served = fleet.rollback(timeout=60) if version is None else fleet.switch(version, readers=2, timeout=60)
        assert ray.get([idle, loop.versions.remote()]) == [served, served]
        expected = ray.get(fresh.answers.remote(folders[served["policy"]]))
        assert ray.get(sync.answers.remote()) == ray.get(loop.answers.remote()) == expected
        answer = ray.get(loop.answer.remote([1, 2, 3]))
        assert {number for number, *_ in answer["versions"]} == {served["policy"]}

    switch(1)
    switch(2)
    switch(None)
    assert fleet.state()["versions"] == {"policy": 1}
    # The engine that nobody lets prepare holds the switch up, and none switches.
    with pytest.raises(WeightsSwitchError, match="did not switch to version 2"):
        fleet.switch(2, readers=2, timeout=3)
    assert ray.get(loop.versions.remote()) == {"policy": 1}
    assert fleet.state()["versions"] == {"policy": 1}
    ray.get(loop.shut_down.remote())
