"""The gradients of a GRPO step, on every axis of parallelism, equal those of an independent loop."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import Ranks
from tests.rl import tiny
from transformers import AutoModelForCausalLM

from raylane.rl.config import GrpoRunConfig
from raylane.rl.prompts import load_tokenizer, vocabulary_of
from raylane.training.vocabulary import Vocabulary

pytestmark = pytest.mark.ranks

Group = dict[str, Any]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp": (2, {}),
    "fsdp2": (2, {"shard_parameters": "always"}),
    "tp": (2, {"tensor_parallel_size": 2}),
    "cp": (2, {"context_parallel_size": 2}),
    "pp": (2, {"pipeline_parallel_size": 2}),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "clip": {},
    "sequence-ratio": {"grpo.ratio": "sequence", "grpo.average": "sequence", "grpo.scale_advantages": "std"},
    "truncate": {"grpo.importance": "truncate", "grpo.baseline": "leave_one_out", "rollout.temperature": 0.7},
    "divergence": {"grpo.kl_coef": 0.3},
}
CASES = [("one", name) for name in OPTIONS] + [
    (layout, "divergence" if layout in ("tp", "cp", "pp") else "clip") for layout in LAYOUTS if layout != "one"
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo-gradients")
    tiny.write_model(folder)
    return folder


def make_groups() -> list[Group]:
    """Return answers of several lengths, one group of equal rewards, and log-probabilities unlike the model's."""
    generator = torch.Generator().manual_seed(7)
    groups = []
    for number in range(4):
        lengths = torch.randint(1, 7, (4,), generator=generator)
        rewards = torch.ones(4) if number == 2 else torch.rand(4, generator=generator)
        groups.append(
            {
                "prompt": torch.randint(3, 259, (3 + number,), generator=generator),
                "tokens": torch.randint(3, 259, (4, 6), generator=generator),
                "logprobs": -5.5 - torch.rand(4, 6, generator=generator),
                "lengths": lengths,
                "rewards": rewards,
                "step": 0,
            }
        )
    return groups


def grpo_worker() -> Any:
    from raylane.rl.worker import GrpoWorker

    return GrpoWorker("cpu", 1, None)  # type: ignore[arg-type]


def gradients(worker: Any, config: GrpoRunConfig, vocabulary: Vocabulary, groups: list[Group]) -> Any:
    # Without Ray nothing can be published.
    policy = config.policy
    quiet = policy.model_copy(update={"publish_weights": policy.publish_weights.model_copy(update={"name": None})})
    worker.setup(config.model_copy(update={"policy": quiet}), vocabulary, 8)
    if worker._reference is not None:
        with torch.no_grad():
            for parameter in worker._reference.parameters():  # so that there is a divergence
                parameter.mul_(0.9)
    share = len(groups) // worker.mesh.dims.readers
    own = groups[worker.mesh.reader * share : (worker.mesh.reader + 1) * share]
    batch = worker._batch(own, 0)
    if worker._reference is not None:
        batch["reference_logprobs"] = worker._logprobs(worker._reference, batch)
    return worker.gradients(batch, config.policy.train_micro_batch_size)


def independent(folder: Path, config: GrpoRunConfig, groups: list[Group]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of a loop over single answers, without raylane: formulas of the papers, one by one."""
    grpo, temperature = config.grpo, config.rollout.temperature
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    for parameter in reference.parameters():
        parameter.data.mul_(0.9)

    def logprobs(of: Any, prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
        logits = of(torch.cat([prompt, answer])[None]).logits[0].double() / temperature
        chosen = [torch.log_softmax(logits[len(prompt) - 1 + i], -1)[token] for i, token in enumerate(answer.tolist())]
        return torch.stack(chosen)

    total = torch.zeros((), dtype=torch.float64)
    count = sum(int(group["lengths"].sum()) for group in groups)
    answers = sum(len(group["lengths"]) for group in groups)
    for group in groups:
        rewards = group["rewards"].double()
        for i, length in enumerate(group["lengths"].tolist()):
            others = torch.cat([rewards[:i], rewards[i + 1 :]])
            advantage = rewards[i] - (others if grpo.baseline == "leave_one_out" else rewards).mean()
            if grpo.scale_advantages == "std":
                advantage = advantage / (((rewards - rewards.mean()) ** 2).mean().sqrt() + 1e-4)
            answer, old = group["tokens"][i, :length], group["logprobs"][i, :length].double()
            new = logprobs(model, group["prompt"], answer)
            ratio = (new - old).exp()
            if grpo.ratio == "sequence":
                ratio = (new - old).mean().exp().expand(length)
            if grpo.importance == "truncate":
                terms = -torch.clamp(ratio.detach(), max=grpo.importance_cap) * advantage * new
                terms = terms - terms.detach() - torch.clamp(ratio.detach(), max=grpo.importance_cap) * advantage
            else:
                bounded = torch.clamp(ratio, 1 - grpo.clip_low, 1 + grpo.clip_high)
                terms = -torch.minimum(ratio * advantage, bounded * advantage)
            if grpo.kl_coef:
                difference = logprobs(reference, group["prompt"], answer).detach() - new
                terms = terms + grpo.kl_coef * (difference.exp() - difference - 1)
            total = total + (terms.sum() / count if grpo.average == "token" else terms.mean() / answers)
    total.backward()
    return float(total.detach()), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.claim("GRPO", "gradients equal those of an independent loop, on several layouts")
@pytest.mark.parametrize(("layout", "options"), CASES, ids=lambda value: str(value))
def test_gradients_equal_an_independent_loop(folder: Path, layout: str, options: str) -> None:
    world, sizes = LAYOUTS[layout]
    changes: Mapping[str, Any] = {
        "cluster.num_workers": world,
        **OPTIONS[options],
        **{f"policy.dtensor_cfg.{key}": value for key, value in sizes.items()},
    }
    config, groups = tiny.config_of(folder, changes), make_groups()
    vocabulary = vocabulary_of(load_tokenizer(config), str(folder / "model"))
    loss, expected = independent(folder, config, groups)
    with Ranks(world, grpo_worker) as ranks:
        for found_loss, found in ranks.run(gradients, config, vocabulary, groups):
            assert found_loss == pytest.approx(loss, abs=1e-6)
            assert found.keys() == expected.keys()
            largest = max(float(value.abs().max()) for value in expected.values())
            for name, value in found.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5 * largest, msg=name)


def test_log_probabilities_have_no_dropout(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "attention_dropout": 0.5}))
    config, groups = tiny.config_of(tmp_path), make_groups()
    vocabulary = vocabulary_of(load_tokenizer(config), str(tmp_path / "model"))
    loss, _ = independent(tmp_path, config, groups)
    with Ranks(1, grpo_worker) as ranks:
        ((found, _),) = ranks.run(gradients, config, vocabulary, groups)
    assert found == pytest.approx(loss, abs=1e-6)
