"""vLLM engines that take versions while they answer, compared with fresh engines that load the same weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: run `make test-vllm`")

from tests.vllm import engines

from raylane import weights
from raylane.errors import (
    WeightsError,
    WeightsInvalidError,
    WeightsMismatchError,
    WeightsTimeoutError,
    WeightsVersionError,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(900)]


def trainer_and_folder(started: list[Any], path: Path, kind: str = "llama", **options: Any) -> tuple[Any, str]:
    trainer = engines.Trainer.remote(str(path), kind, **options)
    started.append(trainer)
    return trainer, ray.get(trainer.export.remote(0))


@pytest.mark.claim("weights", "vLLM takes versions while it answers, and answers like a fresh engine (0.32, on CPUs)")
@pytest.mark.parametrize("inside", [True, False], ids=["same process", "own process"])
def test_an_llm_answers_like_a_fresh_one(started: list[Any], tmp_path: Path, inside: bool) -> None:
    trainer, folder = trainer_and_folder(started, tmp_path)
    engine = engines.Engine.options(runtime_env=engines.INSIDE if inside else engines.OUTSIDE).remote(folder)
    fresh = engines.FreshEngines.remote()
    started += [engine, fresh]
    before = ray.get(engine.answers.remote())
    ray.get(engine.attach.remote())
    for _ in range(3):
        version, exported = ray.get(trainer.publish.remote())
        update = ray.get(engine.update.remote())
        assert (update.version, update.changed) == (version, True)
        after = ray.get(engine.answers.remote())
        assert after == ray.get(fresh.answers.remote(exported))
        assert after != before
        before = after
    assert not ray.get(engine.update.remote()).changed


@pytest.mark.claim("weights", "vLLM takes versions while it answers, and answers like a fresh engine (0.32, on CPUs)")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
        ("gemma2", {"head_dim": 32}),
        ("opt", {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_model_types_answer_like_fresh_ones(
    started: list[Any], tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    trainer, folder = trainer_and_folder(started, tmp_path, kind, **options)
    engine = engines.Engine.options(runtime_env=engines.INSIDE).remote(folder)
    fresh = engines.FreshEngines.remote()
    started += [engine, fresh]
    ray.get(engine.attach.remote())
    _, exported = ray.get(trainer.publish.remote())
    ray.get(engine.update.remote())
    assert ray.get(engine.answers.remote()) == ray.get(fresh.answers.remote(exported))


@pytest.mark.claim("weights", "vLLM takes versions while it answers, and answers like a fresh engine (0.32, on CPUs)")
def test_tensor_parallel_workers_take_the_same_version(started: list[Any], tmp_path: Path) -> None:
    trainer, folder = trainer_and_folder(started, tmp_path)
    engine = engines.Engine.options(runtime_env=engines.OUTSIDE).remote(folder, tensor_parallel_size=2)
    fresh = engines.FreshEngines.remote()
    started += [engine, fresh]
    ray.get(engine.attach.remote())
    for _ in range(2):
        version, exported = ray.get(trainer.publish.remote())
        assert ray.get(engine.update.remote()).version == version
        assert ray.get(engine.answers.remote()) == ray.get(fresh.answers.remote(exported))
    readers = [info.readers for info in weights.versions("policy") if info.number == version]
    assert len(readers[0]) == 2


@pytest.mark.claim("weights", "vLLM takes versions while it answers, and answers like a fresh engine (0.32, on CPUs)")
def test_twenty_updates_under_load(started: list[Any], tmp_path: Path) -> None:
    trainer, folder = trainer_and_folder(started, tmp_path)
    engine, fresh = engines.AsyncEngine.remote(folder), engines.FreshEngines.remote()
    started += [engine, fresh]
    ray.get(engine.attach.remote(pause="keep"))
    ray.get(engine.begin_load.remote(4))
    for _ in range(20):
        version, exported = ray.get(trainer.publish.remote())
        assert ray.get(engine.update.remote()).version == version
        answers = engine.answers.remote()
        assert ray.get(answers) == ray.get(fresh.answers.remote(exported))
    load = ray.get(engine.end_load.remote())
    assert all(len(each["tokens"]) == 24 and each["reason"] == "length" for each in load)  # none was lost
    assert any(len(each["versions"]) > 1 for each in load)  # some went on with new weights, and say so
    for each in load:
        starts = [start for _, start, _ in each["versions"]]
        assert (starts[0], each["versions"][-1][2]) == (0, 24)
        assert starts[1:] == [end for _, _, end in each["versions"][:-1]]
    ray.get(engine.shut_down.remote())


@pytest.mark.claim("weights", "requests under way finish, go on or end as asked, and know the versions of their tokens")
@pytest.mark.parametrize("pause", ["wait", "keep", "abort"])
def test_requests_under_way_end_as_asked(started: list[Any], tmp_path: Path, pause: str) -> None:
    trainer, folder = trainer_and_folder(started, tmp_path)
    engine = engines.AsyncEngine.remote(folder)
    started.append(engine)
    ray.get(engine.attach.remote(pause=pause, clear_cache=False))
    first, _ = ray.get(trainer.publish.remote())
    ray.get(engine.update.remote())
    long = engine.answer.remote([1, 2, 3], 400)
    ray.get(engine.answer.remote([1, 2], 4))  # the long one is under way by now
    second, _ = ray.get(trainer.publish.remote())
    assert ray.get(engine.update.remote()).version == second
    answer = ray.get(long)
    versions = [version for version, _, _ in answer["versions"]]
    assert (answer["reason"], versions) == {
        "wait": ("length", [first]),
        "keep": ("length", [first, second]),
        "abort": ("abort", [first]),
    }[pause]
    assert ray.get(engine.answer.remote([1, 2], 4))["versions"] == [(second, 0, 4)]
    ray.get(engine.shut_down.remote())


def test_an_exchange_takes_no_later_version(started: list[Any], tmp_path: Path) -> None:
    trainer, folder = trainer_and_folder(started, tmp_path)
    engine, fresh = engines.Engine.options(runtime_env=engines.INSIDE).remote(folder), engines.FreshEngines.remote()
    started += [engine, fresh]
    ray.get(engine.attach.remote())
    first, exported = ray.get(trainer.publish.remote())
    ray.get(engine.update.remote())

    def worker(method: str, **options: Any) -> dict[str, Any]:
        arguments = "raylane_weights", None, (method, {"reader": "", **options})
        answers: list[dict[str, Any]] = ray.get(engine.call.remote("collective_rpc", *arguments))
        return answers[0]

    worker("prepare", version=first, exact=False, timeout=60)
    while (prepared := worker("prepared"))["version"] is None:
        assert "error" not in prepared
    ray.get(trainer.publish.remote(export=False))
    assert worker("exchange")["version"] == first  # a worker beside it has prepared this one too
    assert ray.get(engine.answers.remote()) == ray.get(fresh.answers.remote(exported))
    assert ray.get(engine.update.remote()).version == first + 1


@pytest.mark.claim("weights", "an engine refuses requests until it has a version")
@pytest.mark.parametrize("kind", ["llm", "async"])
def test_an_engine_without_a_version_refuses_requests(started: list[Any], tmp_path: Path, kind: str) -> None:
    trainer, folder = trainer_and_folder(started, tmp_path)
    made = engines.Engine.options(runtime_env=engines.INSIDE) if kind == "llm" else engines.AsyncEngine
    engine, fresh = made.remote(folder), engines.FreshEngines.remote()
    started += [engine, fresh]
    before = ray.get(engine.answers.remote())
    ray.get(engine.attach.remote(initial="refuse"))
    with pytest.raises(WeightsInvalidError, match="no version of 'policy' yet"):
        ray.get(engine.answers.remote())
    first, exported = ray.get(trainer.publish.remote(hold=True))
    for _ in range(4):
        newest, _ = ray.get(trainer.publish.remote(export=False))
    assert ray.get(engine.update.remote()).version == newest
    assert ray.get(engine.update.remote(version=first)).version == first
    answers = ray.get(fresh.answers.remote(exported))
    assert ray.get(engine.answers.remote()) == answers != before
    with pytest.raises(WeightsVersionError, match="cannot be taken: there are 1, 3, 4, 5"):
        ray.get(engine.update.remote(version=2))
    assert ray.get(engine.answers.remote()) == answers, "nothing was changed"
    ray.get(engine.call.remote("sleep", 2))  # on CPUs vLLM keeps the weights, on GPUs it drops them
    ray.get(engine.call.remote("wake_up"))
    with pytest.raises(WeightsInvalidError, match="no whole version of 'policy'"):
        ray.get(engine.answers.remote())
    again = ray.get(engine.update.remote(version=first))
    assert (again.version, again.changed) == (first, True)
    assert ray.get(engine.answers.remote()) == answers
    if kind == "async":
        ray.get(engine.shut_down.remote())


@pytest.mark.claim("weights", "an engine that is killed and started again gets the newest version")
def test_a_killed_engine_joins_late(started: list[Any], tmp_path: Path) -> None:
    trainer, folder = trainer_and_folder(started, tmp_path)
    engine = engines.Engine.options(runtime_env=engines.INSIDE).remote(folder)
    ray.get(engine.attach.remote())
    ray.get(trainer.publish.remote())
    ray.get(engine.update.remote())
    os.kill(ray.get(engine.pid.remote()), 9)
    version, exported = ray.get(trainer.publish.remote())
    engine, fresh = engines.Engine.options(runtime_env=engines.INSIDE).remote(folder), engines.FreshEngines.remote()
    started += [engine, fresh]
    ray.get(engine.attach.remote())
    assert ray.get(engine.update.remote()).version == version
    assert ray.get(engine.answers.remote()) == ray.get(fresh.answers.remote(exported))


@pytest.mark.claim("weights", "a vLLM engine whose weights cannot be exchanged, such as a compiled one, is refused")
def test_unusable_engines_and_options_say_why(started: list[Any], tmp_path: Path) -> None:
    trainer, folder = trainer_and_folder(started, tmp_path)
    engine = engines.Engine.options(runtime_env=engines.INSIDE).remote(folder)
    started.append(engine)
    ray.get(engine.attach.remote())
    with pytest.raises(WeightsTimeoutError):
        ray.get(engine.update.remote(timeout=0.2))
    with pytest.raises(ValueError, match="pause must be one of wait, keep, abort, got 'stop'"):
        ray.get(engine.attach.remote(pause="stop"))
    ray.get(trainer.publish.remote(export=False))
    ray.get(engine.update.remote())
    compiled = engines.Engine.options(runtime_env=engines.INSIDE).remote(folder, enforce_eager=False)
    started.append(compiled)
    with pytest.raises(WeightsError, match="worker 0: weights cannot be brought into this vLLM engine while it runs"):
        ray.get(compiled.attach.remote())


@pytest.mark.claim("weights", "bits that differ from those published are found, and their tensors named")
@pytest.mark.parametrize("workers", [1, 2])
def test_changed_bits_are_found_before_they_are_packed(started: list[Any], tmp_path: Path, workers: int) -> None:
    trainer, folder = trainer_and_folder(started, tmp_path, digests=True)
    engine = engines.Engine.options(runtime_env=engines.OUTSIDE).remote(folder, tensor_parallel_size=workers)
    fresh = engines.FreshEngines.remote()
    started += [engine, fresh]
    ray.get(engine.attach.remote(verify="each"))
    version, exported = ray.get(trainer.publish.remote())
    assert ray.get(engine.update.remote()).version == version
    before = ray.get(engine.answers.remote())
    assert before == ray.get(fresh.answers.remote(exported))
    layer = "model.layers.0"
    for names in (
        [f"{layer}.self_attn.q_proj.weight"],
        [f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight"],  # the halves of a fused tensor
        [f"{layer}.self_attn.k_proj.weight", f"{layer}.self_attn.v_proj.weight"],
    ):
        version, exported = ray.get(trainer.publish.remote())
        ray.get(trainer.change.remote(version, *names))
        with pytest.raises(WeightsMismatchError, match=r"worker \d: version \d+ of .* is not what was") as caught:
            ray.get(engine.update.remote())
        assert all(repr(name) in str(caught.value) for name in names)
        with pytest.raises(WeightsInvalidError, match="verification of a version of 'policy' has failed"):
            ray.get(engine.answers.remote())
        ray.get(trainer.change.remote(version, *names))  # undone: the same version is loaded again
        assert ray.get(engine.update.remote()).version == version
        before = ray.get(engine.answers.remote())
        assert before == ray.get(fresh.answers.remote(exported))
