"""Command-line words and YAML files: what each sign may do, and how a typing error is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raylane.errors import ConfigError
from raylane.sft.config.load import load_config
from raylane.sft.config.schema import SftRunConfig
from raylane.training.config.keys import refuse_unknown
from raylane.training.config.overrides import apply_overrides, merge, parse_override, read_yaml

BASE: dict[str, Any] = {
    "policy": {"tokenizer": {"train_vocab_size": 400}, "hf_config_overrides": {"model_type": "llama"}},
    "data": {"train": "train.jsonl"},
}


def applied(*words: str) -> dict[str, Any]:
    return apply_overrides(BASE, words, SftRunConfig)


@pytest.mark.parametrize(
    ("word", "sign", "path", "value"),
    [
        ("a.b=1", "", ("a", "b"), 1),
        ("+a.b=1e-4", "+", ("a", "b"), 1e-4),
        ("++a=[1, two]", "++", ("a",), [1, "two"]),
        ("~a.b", "~", ("a", "b"), None),
        ("a.b=null", "", ("a", "b"), None),
        ("a.b=true", "", ("a", "b"), True),
        ("a.b={c: 1}", "", ("a", "b"), {"c": 1}),
        ("a.b=[{c:1e-4,d:{e:x:y}},{f: null}]", "", ("a", "b"), [{"c": 1e-4, "d": {"e": "x:y"}}, {"f": None}]),
        ("a.b=x=y", "", ("a", "b"), "x=y"),
        ("a.b=''", "", ("a", "b"), ""),
        ("a.b=3e-4", "", ("a", "b"), 3e-4),
        ("a.b=1.5E+3", "", ("a", "b"), 1500.0),
    ],
)
def test_words_are_taken_apart(word: str, sign: str, path: tuple[str, ...], value: Any) -> None:
    override = parse_override(word)
    assert (override.sign, override.path, override.value) == (sign, path, value)


@pytest.mark.parametrize("word", ["a b", "=1", "a", "+a", "a..b=1", ".a=1", "a=", "a={1b:1}", "a=[1", "", "+++a=1"])
def test_words_that_cannot_be_read_are_refused_by_name(word: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_override(word)
    assert repr(word) in str(error.value)


def test_plain_sets_a_declared_key_whether_or_not_the_file_does() -> None:
    result = applied("sft.seed=3", "policy.tokenizer.train_vocab_size=500")
    assert result["sft"] == {"seed": 3}
    assert result["policy"]["tokenizer"]["train_vocab_size"] == 500
    assert BASE["policy"]["tokenizer"]["train_vocab_size"] == 400


def test_plus_adds_to_an_open_mapping_only() -> None:
    result = applied("+policy.hf_config_overrides.rope_theta=1e6", "+policy.optimizer.kwargs.fused=true")
    assert result["policy"]["hf_config_overrides"]["rope_theta"] == 1e6
    assert result["policy"]["optimizer"]["kwargs"]["fused"] is True
    with pytest.raises(ConfigError, match="is a declared key, and \\+ only adds new ones"):
        applied("+sft.seed=3")
    with pytest.raises(ConfigError, match="is already 'llama'"):
        applied("+policy.hf_config_overrides.model_type=qwen3")
    with pytest.raises(ConfigError, match=r"did you mean 'sft\.seed'"):
        applied("+sft.sede=3")


def test_plain_does_not_add_to_an_open_mapping_but_says_how() -> None:
    with pytest.raises(ConfigError, match=r"write \+policy\.hf_config_overrides\.rope_theta=1e6"):
        applied("policy.hf_config_overrides.rope_theta=1e6")
    with pytest.raises(ConfigError, match="did you mean 'model_type'"):
        applied("policy.hf_config_overrides.model_tipe=qwen3")
    assert applied("policy.hf_config_overrides.model_type=qwen3")["policy"]["hf_config_overrides"] == {
        "model_type": "qwen3"
    }


def test_double_plus_does_either() -> None:
    result = applied("++policy.hf_config_overrides.a.b=1", "++sft.seed=4")
    assert result["policy"]["hf_config_overrides"]["a"] == {"b": 1}
    assert result["sft"]["seed"] == 4
    with pytest.raises(ConfigError, match="unknown key"):
        applied("++policy.lr=1")


def test_tilde_takes_away_what_the_file_set() -> None:
    assert "tokenizer" not in applied("~policy.tokenizer")["policy"]
    assert applied("~data.train=train.jsonl")["data"] == {}
    with pytest.raises(ConfigError, match=r"the value in the file is 'train\.jsonl', not 'other'"):
        applied("~data.train=other")
    with pytest.raises(ConfigError, match="is not set by the file"):
        applied("~sft.seed")
    with pytest.raises(ConfigError, match="unknown key"):
        applied("~sft.sede")


def test_later_words_win() -> None:
    assert applied("sft.seed=1", "sft.seed=2")["sft"]["seed"] == 2


def test_a_key_below_a_single_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="is a single value and has no keys below it"):
        applied("sft.seed.x=1")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("policy.max_grad_nrom=1", "policy.max_grad_norm"),
        ("lr=1", "policy.optimizer.kwargs.lr"),
        ("max_num_steps=1", "sft.max_num_steps"),
        ("polcy.precision=float32", "policy"),
    ],
)
def test_unknown_override_suggests_the_nearest_key(word: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        applied(word)
    assert meant in str(error.value)
    assert word in str(error.value)


@pytest.mark.claim("fine-tuning", "a misspelt key is an error that names the nearest known key")
def test_every_unknown_key_of_a_file_is_named_with_the_nearest() -> None:
    wrong = {"sft": {"max_steps": 3}, "policy": {"optimizer": {"kwarg": {}}}, "dta": {}}
    with pytest.raises(ConfigError) as error:
        refuse_unknown(wrong, SftRunConfig, "run.yaml")
    for words in ("run.yaml", "'sft.max_steps'", "sft.max_num_steps", "policy.optimizer.kwargs", "'dta'", "'data'"):
        assert words in str(error.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults_are_read_first_and_merged_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    write(tmp_path / "bases" / "root.yaml", "sft: {seed: 1, val_period: 2}\ndata: {train: [a, b]}\n")
    write(tmp_path / "bases" / "fast.yaml", "defaults: root.yaml\nsft: {seed: 2}\n")
    write(tmp_path / "other.yaml", "logger: {log_dir: x}\n")
    top = write(tmp_path / "top.yaml", "defaults: [bases/fast.yaml, other.yaml]\ndata: {train: c}\n")
    assert read_yaml(top) == {
        "sft": {"seed": 2, "val_period": 2},
        "data": {"train": "c"},
        "logger": {"log_dir": "x"},
    }


def test_defaults_that_go_round_in_a_circle_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "defaults: b.yaml")
    write(tmp_path / "b.yaml", "defaults: a.yaml")
    with pytest.raises(ConfigError, match="circle"):
        read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: missing.yaml", "missing.yaml"),
        ("defaults: {a: 1}", "must be a file name or a list"),
        ("- 1\n- 2", "got a list"),
        ("a: [1", "is not YAML"),
        ("sft: {seed: 1}\nsft: {seed: 2}", "'sft' is repeated"),
        ("a: " + "[" * 5000 + "]" * 5000, "is nested too deep"),
        ("? [a, b]\n: 1", "a key must be text"),
        ("a: 2024-99-99", "holds a value that cannot be read"),
        ("a: " + "9" * 5000, "holds a value that cannot be read"),
    ],
)
def test_files_that_cannot_be_used_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        read_yaml(write(tmp_path / "a.yaml", text))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"cannot read configuration .*a\.yaml: 'utf-8' codec"):
        read_yaml(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")


def test_open_mapping_parses_numbers_with_exponent(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "a: 1e-4\nb: 1e6\nc: -2E+3\nd: 1.5\ne: 12e\nf: '1e3'\n")
    assert read_yaml(path) == {"a": 1e-4, "b": 1e6, "c": -2000.0, "d": 1.5, "e": "12e", "f": "1e3"}


def test_merging_changes_neither_side() -> None:
    below, above = {"a": {"b": 1}}, {"a": {"c": [1]}}
    merged = merge(below, above)
    merged["a"]["c"].append(2)
    assert (below, above) == ({"a": {"b": 1}}, {"a": {"c": [1]}})
