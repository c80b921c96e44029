"""Advantages, rows, rewards, prompts, timeline and generation, without Ray."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.config_page import reference_markdown
from tests.rl import tiny
from transformers import AutoModelForCausalLM

from raylane.errors import ConfigError, DataError
from raylane.rl.advantages import group_advantages
from raylane.rl.config import GrpoRunConfig, load_config
from raylane.rl.generation import generate
from raylane.rl.prompts import PromptSet, load_tokenizer, read_rows, vocabulary_of
from raylane.rl.rewards import Reward, load_reward, score
from raylane.rl.rows import AnswerCounts, RowOptions, answer_rows, batch_of
from raylane.rl.sorting import is_held_out
from raylane.rl.timeline import Timeline, union


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo-parts")
    tiny.write_model(folder)
    return folder


# Advantages


def test_advantages_compare_samples_of_a_prompt() -> None:
    rewards = torch.tensor([[1.0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 4]])
    plain = group_advantages(rewards)
    assert plain[0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert plain[1].tolist() == [0, 0, 0, 0]
    assert group_advantages(rewards, baseline="leave_one_out")[2].tolist() == pytest.approx([-4 / 3, -4 / 3, -4 / 3, 4])
    scaled = group_advantages(rewards, scale="std")
    torch.testing.assert_close(scaled[0], plain[0] / 0.5, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("rewards", "options", "text"),
    [
        (torch.zeros(4), {}, r"shape \[prompts, samples\], got \[4\]"),
        (torch.zeros(1, 4), {"baseline": "median"}, "baseline must be mean or leave_one_out, got 'median'"),
        (torch.zeros(1, 4), {"scale": "max"}, "scale must be none or std, got 'max'"),
    ],
)
def test_advantages_refuse_other_options(rewards: torch.Tensor, options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        group_advantages(rewards, **options)


# Rows


def group(rewards: list[float], lengths: list[int], prompt: list[int]) -> dict[str, Any]:
    size, longest = len(rewards), max(lengths)
    return {
        "prompt": torch.tensor(prompt),
        "tokens": torch.arange(10, 10 + size * longest).reshape(size, longest),
        "logprobs": -torch.arange(1.0, 1 + size * longest).reshape(size, longest),
        "lengths": torch.tensor(lengths),
        "rewards": torch.tensor(rewards),
    }


def test_rows_hold_prompt_and_answer_shifted() -> None:
    options = RowOptions(tokens=8, pad_id=0)
    rows, counts = answer_rows([group([1, 0], [3, 2], [5, 6]), group([1, 1], [1, 1], [7])], options)
    assert counts == AnswerCounts(answers=4, tokens=7, kept=2, kept_tokens=5)
    batch = batch_of(rows, 3, counts, options)
    assert batch["input_ids"].tolist() == [[5, 6, 10, 11, 0, 0, 0, 0], [5, 6, 13, 0, 0, 0, 0, 0], [0] * 8]
    assert batch["labels"][:2].tolist() == [[-100, 10, 11, 12, *[-100] * 4], [-100, 13, 14, *[-100] * 5]]
    assert (batch["labels"][2] == -100).all()
    assert batch["document_ids"].tolist() == [[0] * 4 + [-1] * 4, [0] * 3 + [-1] * 5, [-1] * 8]
    assert batch["old_logprobs"][0].tolist() == [0, -1, -2, -3, 0, 0, 0, 0]
    assert batch["advantages"][1].tolist() == [0, -0.5, -0.5, 0, 0, 0, 0, 0]
    # 5 of 7 tokens are in the batch; the step divides by 5.
    assert batch["weights"][0].tolist() == pytest.approx([0, 5 / 7, 5 / 7, 5 / 7, 0, 0, 0, 0])


def test_answers_weigh_the_same_by_sequence() -> None:
    options = RowOptions(tokens=8, pad_id=0, average="sequence", keeps_all=True)
    rows, counts = answer_rows([group([1, 1], [3, 1], [5])], options)
    batch = batch_of(rows, 2, counts, options)
    weighed = batch["weights"].sum(dim=1) / counts.kept_tokens
    assert weighed.tolist() == pytest.approx([0.5, 0.5])


# Rewards


def test_rewards_are_found_by_name_and_weighted() -> None:
    reward = load_reward("tests.rl.tiny:closeness", 2.0)
    assert score([reward, Reward("length", -0.5, lambda answer, _: len(answer))], "", {"answer": "1"}) == (0.0, [0, 0])
    total, each = score([reward], "1", {"answer": "1"})
    assert total == 2 * each[0] > 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("exact", "must be named as module:function, got 'exact'"),
        ("no_such_module:f", "the reward no_such_module:f cannot be loaded: No module named 'no_such_module'"),
        ("json:no_such", "module 'json' has no attribute 'no_such'"),
        ("json:__name__", "the reward json:__name__ is a str; name a function"),
    ],
)
def test_unknown_rewards_are_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_reward(name)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda answer, row: 1 / 0, "the reward broken failed for the answer 'abc' .* ZeroDivisionError"),
        (lambda answer, row: math.nan, "the reward broken returned nan for the answer 'abc'"),
        (lambda answer, row: "much", "ValueError: could not convert string to float"),
    ],
)
def test_rewards_that_fail_are_named(function: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        score([Reward("broken", 1.0, function)], "abc", {"prompt": "p"})


# Prompts and configuration


def test_prompts_come_in_a_new_order_each_epoch(folder: Path) -> None:
    config = tiny.config_of(folder)
    prompts = PromptSet.read(config.data.train, config, load_tokenizer(config))
    count = len(prompts.rows)
    first, second = ([prompts.prompt(i).row["prompt"] for i in range(epoch, epoch + count)] for epoch in (0, count))
    assert sorted(first) == sorted(second) == sorted(row["prompt"] for row in prompts.rows)
    assert first != second
    prompt = prompts.prompt(3)
    assert bytes(token - 3 for token in prompt.tokens) != b""
    assert len(prompt.tokens) == 6
    assert [prompt.number for prompt in prompts.first(3)] == [0, 1, 2]
    assert not any(is_held_out(row["prompt"]) for row in prompts.rows)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("{", "line 1 is not JSON"),
        ('{"question": "a"}', "line 1 has no 'prompt'. Set data.prompt_key"),
        ("[1]", "line 1 has no 'prompt'"),
        ("\n\n", "has no prompts"),
    ],
)
def test_prompt_files_are_checked(tmp_path: Path, lines: str, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines, encoding="utf-8")
    with pytest.raises(DataError, match=text):
        read_rows(str(path), "prompt")
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(str(tmp_path / "missing.jsonl"), "prompt")


def test_long_prompt_is_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "1" * 30}), encoding="utf-8")
    config = tiny.config_of(folder)
    with pytest.raises(DataError, match=r"prompt 1 has 31 tokens, .* leaves room for 10"):
        PromptSet.read(str(path), config, load_tokenizer(config))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            [
                "policy.model_name=null",
                "policy.tokenizer.train_vocab_size=300",
                "+policy.hf_config_overrides.model_type=qwen3",
            ],
            "GRPO begins with a model that can answer",
        ),
        (["rollout.max_new_tokens=16"], "rollout.max_new_tokens=16 leaves no room"),
        (["policy.sequence_packing.enabled=true"], "answers are not packed"),
        (["grpo.mod=sync"], "unknown key 'grpo.mod'; did you mean 'grpo.mode'"),
        (["grpo.samples_per_prompt=1"], "greater than or equal to 2"),
        (["cluster.num_workers=3", "policy.train_global_batch_size=768"], "does not divide by the 3 workers"),
    ],
)
def test_configuration_is_checked(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(Path(__file__).parents[2] / "examples" / "grpo_sort.yaml", words)


def test_modes_differ_in_their_lag() -> None:
    path = Path(__file__).parents[2] / "examples" / "grpo_sort.yaml"
    lags = {
        mode: load_config(path, [f"grpo.mode={mode}", "grpo.max_lag=3"]).grpo.lag
        for mode in ("sync", "one_step", "async")
    }
    assert lags == {"sync": 0, "one_step": 1, "async": 3}
    config = load_config(path)
    assert (config.policy.publish_weights.name, config.policy.publish_weights.every) == ("policy", 1)


def test_example_with_two_rewards_loads() -> None:
    words = ["policy.model_name=models/qwen", "data.train=problems.jsonl"]
    config = load_config(Path(__file__).parents[2] / "examples" / "grpo_qwen.yaml", words)
    correct, boxed = (load_reward(*named) for named in config.grpo.named_rewards)
    row = {"answer": "1234"}
    assert score([correct, boxed], r"so \boxed{1,234}", row) == (1.1, [1, 1])
    assert score([correct, boxed], r"\boxed{7} or \boxed{8}", row) == (0, [0, 0])
    assert score([correct, boxed], "1234", row) == (0, [0, 0])


def test_reference_page_is_what_the_schema_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "grpo-config.md"
    assert page.read_text() == reference_markdown(GrpoRunConfig), "run: python tests/config_page.py grpo"


# Timeline


def test_timeline_counts_time_once() -> None:
    assert union([(0, 2), (1, 3), (5, 6), (7, 6)]) == 4
    timeline = Timeline()
    timeline.add("trainer", "step 1", 10.0, 12.0)
    timeline.add("engine 0", "sample", 11.0, 14.0)
    timeline.add("engine 0", "sample", 13.0, 15.0)
    assert timeline.busy("engine 0", 10, 15) == pytest.approx(0.8)
    assert timeline.busy("trainer", 10, 10) == 0
    events = timeline.trace()["traceEvents"]
    spans = [(event["tid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert spans == [(1, 0, 2e6), (2, 1e6, 3e6), (2, 3e6, 2e6)]


# Generation


def test_answers_are_those_of_transformers(folder: Path) -> None:
    """Greedy answers to prompts of different lengths, against transformers' own generation one by one."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    vocabulary = vocabulary_of(load_tokenizer(tiny.config_of(folder)), str(folder / "model"))
    prompts = [[51, 52, 53, 54], [51, 60], [70, 71, 72, 73, 74, 75, 76], [55]]
    found = generate(model, prompts, 6, vocabulary.end_ids, vocabulary.pad_id, temperature=0)
    for prompt, tokens, length in zip(prompts, found.tokens, found.lengths.tolist(), strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert tokens[:length].tolist() == theirs[0, len(prompt) :].tolist()[:length]


def test_logprobs_are_those_of_a_whole_pass(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    prompts = [[51, 52, 53], [60, 61, 62, 63, 64]] * 8
    generator = torch.Generator().manual_seed(5)
    found = generate(model, prompts, 6, (100, 101, 102), 0, temperature=0.8, generator=generator)
    again = generate(model, prompts, 6, (100, 101, 102), 0, temperature=0.8, generator=generator.manual_seed(5))
    assert torch.equal(found.tokens, again.tokens)
    for row, prompt in enumerate(prompts):
        length = int(found.lengths[row])
        whole = torch.tensor([[*prompt, *found.tokens[row, :length].tolist()]])
        with torch.no_grad():
            logits = model(whole).logits[0, len(prompt) - 1 : -1].double() / 0.8
        expected = torch.log_softmax(logits, -1).gather(1, found.tokens[row, :length, None])[:, 0]
        torch.testing.assert_close(found.logprobs[row, :length].double(), expected, rtol=0, atol=1e-5)
        assert (found.logprobs[row, length:] == 0).all()


def test_sampling_follows_the_distribution(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    prompt = [51, 52, 53]
    generator = torch.Generator().manual_seed(1)
    found = generate(model, [prompt] * 4000, 1, (), 0, generator=generator)
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([prompt])).logits[0, -1], -1)
    shares = torch.bincount(found.tokens[:, 0], minlength=len(expected)) / 4000
    assert float((shares - expected).abs().max()) < 0.05
