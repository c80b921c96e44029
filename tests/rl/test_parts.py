"""Advantages, rows, rewards, prompts, timeline and generation, without Ray."""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.rl import tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

import raylane
from raylane.errors import ConfigError, DataError
from raylane.rl.advantages import group_advantages
from raylane.rl.config import UNUSED_KEYS, GrpoRunConfig, check_config, load_config
from raylane.rl.generation import generate
from raylane.rl.prompts import PromptSet, load_tokenizer, read_lines, stored_vocabulary, vocabulary_of
from raylane.rl.rewards import Reward, load_reward, score, try_rewards
from raylane.rl.rollout import RolloutActor
from raylane.rl.rows import AnswerCounts, RowOptions, answer_rows, batch_of
from raylane.rl.sorting import is_held_out
from raylane.rl.timeline import Timeline, union
from raylane.training.checkpoint.export import Companions, write_beside
from raylane.training.config.policy import Section
from raylane.training.text.tokenizer import end_ids
from raylane.workers.host import WorkerHost


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


@pytest.mark.parametrize("samples", [2, 3, 7, 8, 10])
@pytest.mark.parametrize("options", [{}, {"baseline": "leave_one_out"}, {"scale": "std"}])
def test_equal_rewards_have_no_advantage(samples: int, options: Any) -> None:
    values = torch.tensor([0.1, 1000.1, 1 / 3, -2.7, 1.7e9, 1e12], dtype=torch.float64)
    assert not group_advantages(values[:, None].expand(-1, samples), **options).any()


def test_advantages_keep_small_differences_of_large_rewards() -> None:
    rewards = 1.7e9 + torch.tensor([[0.0, 10, 20]], dtype=torch.float64)
    assert group_advantages(rewards).tolist() == [[-10, 0, 10]]


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


# Names of actors, which begin each line of their output


def test_actors_are_shown_by_name_and_number() -> None:
    assert repr(RolloutActor(2, *[None] * 5)) == "Engine 2"  # type: ignore[arg-type]
    assert repr(WorkerHost(1, "Trainer")) == "Trainer rank 1"


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
        ("tests.rl.test_parts:judged", "is asynchronous"),
        ("tests.rl.test_parts:JUDGE", "is asynchronous"),
        ("tests.rl.test_parts:Judge", "is a class; name a function, or an object of the class"),
        ("tests.rl.test_parts:partial", "is asynchronous"),
        ("tests.rl.test_parts:yielding", "is a generator"),
        ("tests.rl.test_parts:three", r"must be called as reward\(answer, row\), and cannot: missing .* three\(answer"),
        ("./json:dumps", r"the reward ./json:dumps cannot be loaded: "),
        ("no_such_module:f", "the reward no_such_module:f cannot be loaded: No module named 'no_such_module'"),
        ("json:no_such", "module 'json' has no attribute 'no_such'"),
        ("json:__name__", "the reward json:__name__ is a str; name a function"),
    ],
)
def test_unusable_rewards_are_refused(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_reward(name)


async def judged(answer: str, row: Any) -> float:
    return 1.0


class Judge:
    async def __call__(self, answer: str, row: Any) -> float:
        return 1.0

    @staticmethod
    def inner(answer: str, row: Any, extra: int = 0) -> float:
        return float(row.pop("value", -1))


JUDGE, partial = Judge(), functools.partial(judged)


def yielding(answer: str, row: Any) -> Iterator[float]:
    yield 1.0


def three(answer: str, row: Any, extra: int) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("def fn(answer, row)", r"SyntaxError: expected ':' \(bad_reward.py, line 1\)"),
        ("x = undefined", "NameError"),
        ("import sys; sys.exit('set JUDGE_KEY')", "SystemExit: set JUDGE_KEY"),
    ],
)
def test_module_of_a_reward_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, error: str
) -> None:
    (tmp_path / "bad_reward.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"the reward bad_reward:fn cannot be loaded: {error}"):
        load_reward("bad_reward:fn")


def test_each_sample_has_its_own_row() -> None:
    reward, row = load_reward("tests.rl.test_parts:Judge.inner"), {"value": 3}
    assert [score([reward, reward], "", row) for _ in range(2)] == [(6, [3, 3])] * 2


def test_rewards_are_called_once_before_anything_starts() -> None:
    for function, text in (
        (lambda answer, row: sys.exit("no key"), "the reward broken failed for the answer '' .* SystemExit: no key"),
        (lambda answer, row: [1.0], "TypeError"),
        (
            lambda answer, row: threading.Event().wait(),
            "the reward broken did not return within grpo.step_timeout_s=0.2 s",
        ),
    ):
        with pytest.raises(DataError, match=text):
            try_rewards([Reward("broken", 1.0, function)], {}, 0.2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda answer, row: 1 / 0, "the reward broken failed for the answer 'abc' .* ZeroDivisionError"),
        (
            lambda answer, row: math.nan,
            "the reward broken returned nan for the answer 'abc' to the line",
        ),
        (lambda answer, row: 1e39, r"the reward broken returned 1e\+39 .* from -1e\+12 to 1e\+12. Scale it"),
        (lambda answer, row: 10**400, "OverflowError"),
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
        ("{", "prompts.jsonl:1: not JSON"),
        ('{"question": "a"}', "prompts.jsonl:1: no 'prompt', which must be a text or messages. Set data.prompt_key"),
        ("[1]", "prompts.jsonl:1: a line must be a JSON object"),
        ("\n\n", "has no prompts"),
        (
            '\n{"prompt": [{"role": "usr", "content": "a"}]}',
            "jsonl:2, message 0: unknown role 'usr'; did you",
        ),
        ('{"prompt": [{"role": "user"}]}', "message 0: role 'user' without content"),
        ('{"prompt": [{"role": "assistant", "content": "a"}]}', "'prompt' ends with a message of the assistant"),
        ('{"prompt": 3}', "'prompt' is a int, and must be a text or a list of messages"),
        ('{"prompt": "a", "tools": 3}', "'tools' must be a list"),
        ('{"prompt": "\\ud800"}', "half of a character"),
        ('{"prompt": "a", "deep": ' + "[" * 200 + "]" * 200 + "}", "nested more than 100 deep"),
    ],
)
def test_prompt_files_are_checked(tmp_path: Path, lines: str, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines, encoding="utf-8")
    with pytest.raises(DataError, match=text):
        read_lines(str(path), "prompt")
    with pytest.raises(DataError, match="cannot be read"):
        read_lines(str(tmp_path / "missing.jsonl"), "prompt")


def test_prompt_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    texts = ["a\u2028b", "c\u2029d\u0085e", "f"]
    lines = [json.dumps({"prompt": text, "answer": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\r\n".join(["", *lines, ""]).encode("utf-8-sig"))
    read = read_lines(str(path), "prompt")
    assert [line.row["answer"] for line in read] == [line.prompt.messages[0]["content"] for line in read] == texts
    assert read[0].prompt.where.endswith("prompts.jsonl:2")


def test_tools_and_calls_of_a_prompt_reach_the_template(folder: Path, tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    row = {
        "prompt": [{"role": "user", "content": "2"}, {"role": "assistant", "tool_calls": [call]}, user("3")],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(row))
    template = (
        "{{ tools[0].function.name }}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{{ shout }}"
    )
    kwargs = {"policy.tokenizer": {"chat_template": template, "chat_template_kwargs": {"shout": "9"}}}
    config = tiny.config_of(folder, {**kwargs, "policy.max_total_sequence_length": 64})
    tokenizer = load_tokenizer(config)
    prompts = PromptSet.read(str(path), config, tokenizer)
    assert tokenizer.decode(prompts.tokens[0]) == 'f2{"x": 1}39'


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"chat_template": "no_such_file"}, "policy.tokenizer.chat_template must be null"),
        (
            {"chat_template_kwargs": {"tokenize": False}},
            "chat_template_kwargs sets tokenize, which",
        ),
        (
            {"chat_template": "{{ raise_exception('no') }}"},
            "jsonl:1: the chat template refuses this prompt: no",
        ),
        ({"chat_template": "{{ '' }}"}, r"prompts.jsonl:1: the prompt has no tokens"),
        ({"chat_template": "llama3"}, "llama3 needs the tokens"),
        ({"name": "no_such_folder"}, "there is no tokenizer folder 'no_such_folder'"),
    ],
)
def test_tokenizer_settings_are_used_or_refused(folder: Path, tmp_path: Path, changes: Any, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "2"}))
    config = tiny.config_of(folder, {"policy.tokenizer": changes})
    with pytest.raises((ConfigError, DataError), match=text):
        PromptSet.read(str(path), config, load_tokenizer(config))


def test_template_without_generation_prompt_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_tokenizer(tiny.config_of(folder))
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        "the chat template writes nothing between a prompt and its answer"
    ]
    load_tokenizer(tiny.config_of(folder, {"policy.tokenizer.chat_template": "chatml"}))
    assert len(caplog.messages) == 1


def test_model_without_chat_template_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    config = tiny.config_of(folder, {"policy.model_name": str(tmp_path / "model")})
    with pytest.raises(ConfigError, match=r"has no chat template, .* Set policy.tokenizer.chat_template to chatml"):
        load_tokenizer(config)


def test_end_tokens_are_those_of_tokenizer_and_folder(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    for name, ids in (("generation_config.json", [2, 100]), ("config.json", [1, 101])):
        path = tmp_path / "model" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ids}))
    changes = {"policy.model_name": str(tmp_path / "model"), "data.cache_dir": str(tmp_path / "cache")}
    config = tiny.config_of(folder, changes)
    vocabulary = stored_vocabulary(load_tokenizer(config), config)
    # 101 is a word: config.json may hold the default of its class.
    assert vocabulary.end_ids == (2, 100, 1)
    assert vocabulary == stored_vocabulary(load_tokenizer(config), config)
    # What the export and `inspect-data` load has the same ends, and nothing else of the model's folder.
    assert end_ids(AutoTokenizer.from_pretrained(vocabulary.tokenizer_dir), vocabulary.tokenizer_dir) == (2, 100, 1)
    names = {path.name for path in vocabulary.tokenizer_dir.iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}


def test_tokenizer_of_links_is_stored_with_all_its_templates(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "blobs")
    templates = tmp_path / "blobs" / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ tools }}")
    (tmp_path / "blobs" / "pytorch_model.bin").write_bytes(b"old")
    (tmp_path / "model").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "model" / path.name).symlink_to(path)
    changes = {"policy.model_name": str(tmp_path / "model"), "data.cache_dir": str(tmp_path / "cache")}
    config = tiny.config_of(folder, changes)
    stored = stored_vocabulary(load_tokenizer(config), config).tokenizer_dir
    (stored / "stray.bin").write_bytes(b"old")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    (tmp_path / "out").mkdir()
    write_beside(tmp_path / "out", model, Companions(stored, (2, 1), tmp_path / "model", torch.float32))
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    own = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"}
    assert files == {*own, "config.json", "generation_config.json"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [2, 1]


def test_long_prompt_is_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "1" * 30}), encoding="utf-8")
    config = tiny.config_of(folder)
    with pytest.raises(DataError, match=r"prompts.jsonl:1: the prompt has 31 tokens, .* leaves room for 10"):
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
        (["grpo.rewards=[{function: json:dumps, weight: .nan}]"], "finite number"),
        (["policy.dtensor_cfg.lora_cfg={enabled: true, dropout: 0.1}"], "lora_cfg.dropout=0.1: GRPO computes without"),
        (["+policy.hf_config_overrides.attention_dropout=0.1"], "attention_dropout=0.1: GRPO computes without dropout"),
        (["grpo.samples_per_prompt=1"], "greater than or equal to 2"),
        (["cluster.num_workers=3", "policy.train_global_batch_size=768"], "does not divide by the 3 workers"),
    ],
)
def test_configuration_is_checked(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(Path(__file__).parents[2] / "examples" / "grpo_sort.yaml", words)


def leaves(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key of a section with its default."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.get_default(call_default_factory=True)


READ_ELSEWHERE = {
    "policy.tokenizer.train_vocab_size": "refused beside a model",
    "policy.train_global_batch_size": "a warning, see the next test",
    "policy.optimizer.kwargs.betas": "all keyword arguments of the optimizer together",
    "policy.optimizer.kwargs.eps": "all keyword arguments of the optimizer together",
    "policy.dtensor_cfg.pipeline_stages_per_worker": "stages_per_worker",
    "policy.dtensor_cfg.lora_cfg.match_all_linear": "needed where target_modules is empty",
    "logger.log_level": "by the command",
    "grpo.max_lag": "lag",
    "grpo.rewards": "named_rewards",
}
"""Keys that no module of a GRPO run names, and what reads or refuses them."""


def attributes_read() -> set[str]:
    """Return the names of all attributes that modules of GRPO read, without the checks of the configuration."""
    source = Path(raylane.__file__).parent
    paths = [*source.glob("rl/*.py"), *source.glob("training/**/*.py")]
    trees = [ast.parse(path.read_text()) for path in paths if "config" not in path.relative_to(source).as_posix()]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_key_is_read_or_refused(folder: Path) -> None:
    read = attributes_read()
    for key, default in leaves(GrpoRunConfig):
        if key not in UNUSED_KEYS:
            assert key.rpartition(".")[2] in read or key in READ_ELSEWHERE, f"{key} changes nothing and is not refused"
            continue
        values = {bool: not default, str: "best_fit_decreasing"}
        value = values.get(type(default), 16)
        with pytest.raises(ConfigError, match=re.escape(f"{key}={value} has no effect in GRPO")):
            check_config(tiny.config_of(folder, {"policy.publish_weights.name": "w", key: value}))


def test_size_of_a_step_that_is_not_used_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_config(tiny.config_of(folder))
    assert not caplog.messages
    check_config(tiny.config_of(folder, {"policy.train_global_batch_size": 8}))
    (message,) = caplog.messages
    assert message.startswith(
        "policy.train_global_batch_size=8 has no effect in GRPO: a step has grpo.prompts_per_step x"
    )


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
