"""vLLM engines that take versions of LoRA adapters, compared with fresh engines that load them from folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: run `make test-vllm`")

from tests.vllm import engines, lora_engines

from raylane.errors import WeightsError, WeightsLayoutError, WeightsLostError, WeightsTimeoutError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(900)]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Folder of the base model."""
    engines.new_model().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def new_trainer(started: list[Any], path: Path, **options: Any) -> Any:
    started.append(lora_engines.AdapterTrainer.remote(str(path), **options))
    return started[-1]


def new_engine(started: list[Any], model: str, environment: dict[str, Any] = engines.INSIDE, **options: Any) -> Any:
    started.append(lora_engines.LoraEngine.options(runtime_env=environment).remote(model, **options))
    return started[-1]


def fresh_answers(started: list[Any], model: str, folders: list[str]) -> list[list[list[int]]]:
    fresh = lora_engines.FreshEngines.remote()
    started.append(fresh)
    return [ray.get(fresh.answers.remote(model, folder)) for folder in folders]


@pytest.mark.claim("weights", "vLLM takes LoRA adapters as versions of their own, from memory")
@pytest.mark.parametrize("inside", [True, False], ids=["same process", "own process"])
def test_versions_answer_like_folders_at_once(started: list[Any], tmp_path: Path, model: str, inside: bool) -> None:
    trainer = new_trainer(started, tmp_path)
    # One slot stays empty: for requests without an adapter beside others, vLLM's CPU kernels compute with the last slot
    # (0.32, also with adapters of folders).
    engine = new_engine(started, model, engines.INSIDE if inside else engines.OUTSIDE, max_loras=4)
    base = ray.get(engine.answers.remote(0))
    ray.get(engine.attach.remote())
    folders, answers = [], []
    for number in (1, 2, 3):
        version, folder = ray.get(trainer.publish.remote())
        update = ray.get(engine.update.remote())
        assert (update.version, update.changed, version) == (number, True, number)
        answers.append(ray.get(engine.answers.remote(None)))
        folders.append(folder)
    assert not ray.get(engine.update.remote()).changed
    expected = fresh_answers(started, model, folders)
    assert answers == expected
    assert base not in expected
    assert expected[0] != expected[1]
    mixed = ray.get(engine.answers.remote(1, 3, 0))  # one batch
    assert mixed == [expected[0][0], expected[2][1], base[2]]
    assert ray.get(engine.answers.remote(0)) == base
    names, usable = ray.get(engine.names.remote())
    assert (names, usable) == (["policy-lora@1", "policy-lora@2", "policy-lora@3"], (1, 2, 3))


def test_evicted_versions_reload_without_a_disk(started: list[Any], tmp_path: Path, model: str) -> None:
    trainer, engine = new_trainer(started, tmp_path), new_engine(started, model, max_loras=1)
    ray.get(engine.attach.remote(keep=3))
    ray.get(engine.answers.remote(0))
    ray.get(engine.watch_files.remote())
    folders, answers = [], []
    for _ in range(3):
        folders.append(ray.get(trainer.publish.remote())[1])
        ray.get(engine.update.remote())
        answers.append(ray.get(engine.answers.remote(None)))
    for version in (1, 2, 1, 3, 1):  # vLLM scales what it loads in place, and must not get that again
        assert ray.get(engine.answers.remote(version)) == answers[version - 1]
        assert ray.get(engine.loaded.remote()) == 1
    assert ray.get(engine.written.remote()) == []
    assert answers == fresh_answers(started, model, folders)


def test_versions_that_are_gone_are_refused(started: list[Any], tmp_path: Path, model: str) -> None:
    trainer, engine = new_trainer(started, tmp_path), new_engine(started, model)
    ray.get(engine.attach.remote())
    with pytest.raises(WeightsLostError, match="does not have version 0 of 'policy-lora': it has none"):
        ray.get(engine.answers.remote(None))
    with pytest.raises(WeightsTimeoutError):
        ray.get(engine.update.remote(timeout=0.2))
    for _ in range(3):
        ray.get(trainer.publish.remote())
        ray.get(engine.update.remote())
    with pytest.raises(WeightsLostError, match="does not have version 1 of 'policy-lora': it has 2, 3"):
        ray.get(engine.answers.remote(1))
    with pytest.raises(WeightsLostError, match="does not have policy-lora@1: it has policy-lora@2, policy-lora@3"):
        ray.get(engine.answers.remote(1, old=True))
    newest = ray.get(engine.answers.remote(3))
    assert ray.get(engine.answers.remote(3, old=True)) == newest
    ray.get(engine.close.remote())
    with pytest.raises(WeightsLostError, match="does not have policy-lora@3: it has none"):
        ray.get(engine.answers.remote(3, old=True))
    ray.get(engine.attach.remote())
    assert ray.get(engine.update.remote()).version == 3
    assert ray.get(engine.answers.remote(None)) == newest


def test_requests_under_way_keep_their_version(started: list[Any], tmp_path: Path, model: str) -> None:
    trainer, engine = new_trainer(started, tmp_path), lora_engines.AsyncLoraEngine.remote(model, max_loras=1)
    started.append(engine)
    ray.get(engine.attach.remote(keep=1))
    ray.get(trainer.publish.remote())
    ray.get(engine.update.remote())
    alone = ray.get(engine.answer.remote("alone", [1, 2, 3], 1, 400))
    long = engine.answer.remote("long", [1, 2, 3], 1, 400)
    ray.get(engine.begun.remote("long"))
    for version in (2, 3, 4):
        ray.get(trainer.publish.remote())
        assert ray.get(engine.update.remote()).version == version  # each evicts version 1 from vLLM
    with pytest.raises(WeightsError, match="requests under way use 1 versions of 'policy-lora'"):
        ray.get(engine.close.remote())
    with pytest.raises(WeightsLostError, match="does not have policy-lora@1: it has policy-lora@4"):
        ray.get(engine.answer.remote("late", [1, 2, 3], 1, 400))
    assert ray.get(long) == alone
    assert ray.get(engine.answer.remote("other", [1, 2, 3], 4, 8)) != alone[:8]
    ray.get(engine.close.remote())
    ray.get(engine.shut_down.remote())


def test_tensor_parallel_workers_load_a_version(started: list[Any], tmp_path: Path, model: str) -> None:
    trainer, engine = (
        new_trainer(started, tmp_path),
        new_engine(started, model, engines.OUTSIDE, tensor_parallel_size=2),
    )
    ray.get(engine.attach.remote())
    folders, answers = [], []
    for _ in range(2):
        folders.append(ray.get(trainer.publish.remote())[1])
        ray.get(engine.update.remote())
        answers.append(ray.get(engine.answers.remote(None)))
    assert answers == fresh_answers(started, model, folders)


def test_weights_and_adapters_update_in_one_engine(started: list[Any], tmp_path: Path, model: str) -> None:
    trainer, base_trainer = new_trainer(started, tmp_path), engines.Trainer.remote(str(tmp_path))
    engine = new_engine(started, model)
    started.append(base_trainer)
    ray.get([engine.attach.remote(), engine.attach_weights.remote()])
    _, folder = ray.get(trainer.publish.remote())
    ray.get(engine.update.remote())
    before = ray.get(engine.answers.remote(None))
    _, new_model = ray.get(base_trainer.publish.remote())
    assert ray.get(engine.update_weights.remote()).changed
    after = ray.get(engine.answers.remote(None))
    assert [before] == fresh_answers(started, model, [folder])
    assert [after] == fresh_answers(started, new_model, [folder])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2}, "has the rank 2, and the configuration says 4"),
        (
            {"module": "self_attn.other_proj"},
            "the model takes no adapters for 'model.layers.0.self_attn.other_proj', 'model.layers.1.self_attn.other_",
        ),
        ({"module": "self_attn.k_proj"}, "worker 0 of vLLM: "),
    ],
    ids=["rank", "module", "shape"],
)
def test_unfit_adapters_leave_the_engine(
    started: list[Any], tmp_path: Path, model: str, options: dict[str, Any], message: str
) -> None:
    trainer, engine = new_trainer(started, tmp_path, **options), new_engine(started, model)
    ray.get(engine.attach.remote())
    base = ray.get(engine.answers.remote(0))
    ray.get(trainer.publish.remote())
    for _ in range(2):
        with pytest.raises(WeightsLayoutError, match=message):
            ray.get(engine.update.remote())
    assert (ray.get(engine.answers.remote(0)), ray.get(engine.loaded.remote())) == (base, 0)


def test_unusable_configurations_say_why(started: list[Any], model: str) -> None:
    engine = new_engine(started, model)
    for lora, error, message in (
        ({"r": 4, "lora_alpha": 8}, ValueError, "lora has no target_modules"),
        ({**lora_engines.LORA, "r": "4"}, TypeError, r"lora\['r'\] cannot be '4'"),
        ({**lora_engines.LORA, "r": 0}, ValueError, r"lora\['r'\] must be at least 1, got 0"),
        ({**lora_engines.LORA, "r": 64}, ValueError, "LoRA rank 64 is greater than max_lora_rank 8"),
        ({**lora_engines.LORA, "use_dora": True}, ValueError, "vLLM cannot use these adapters"),
        ("adapters", TypeError, "lora must be PEFT's configuration as a dict, got str"),
    ):
        with pytest.raises(error, match=message):
            ray.get(engine.attach.remote(lora))
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        ray.get(engine.attach.remote(keep=0))
    ray.get(engine.attach.remote())
    with pytest.raises(WeightsError, match="attached to 'policy-lora' already"):
        ray.get(engine.attach.remote())
    plain = new_engine(started, model, enable_lora=False)
    with pytest.raises(WeightsError, match="this vLLM engine takes no adapters"):
        ray.get(plain.attach.remote())
