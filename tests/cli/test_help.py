"""The help of every command: a one-line description, and examples that the parser accepts."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import raylane
from raylane.cli import COMMANDS, EXTRAS, build_parser, grpo, main
from raylane.cli.usage import config_problem, other_command
from raylane.rl.config import load_config

ROOT = Path(__file__).parents[2]


def subparsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from subparsers_of(child)


def all_parsers() -> dict[str, argparse.ArgumentParser]:
    return {parser.prog: parser for name in COMMANDS for parser in subparsers_of(build_parser([name]))}


def examples_of(parser: argparse.ArgumentParser) -> list[str]:
    section = (parser.epilog or "").rpartition("examples:\n")[2]
    return [line.strip().partition("  # ")[0] for line in section.splitlines()]


EXAMPLES = sorted({example for parser in all_parsers().values() for example in examples_of(parser)})


@pytest.mark.parametrize("prog", sorted(all_parsers()))
def test_help_has_description_and_examples(prog: str) -> None:
    parser = all_parsers()[prog]
    description = parser.description or ""
    assert description.endswith(".")
    assert "\n" not in description
    examples = examples_of(parser)
    assert examples
    assert all(prog in example for example in examples if prog != "raylane")
    assert "examples:\n  " in parser.format_help()


@pytest.mark.parametrize("example", EXAMPLES)
def test_help_example_is_accepted(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(example)
    while "=" in words[0]:  # environment variables
        words.pop(0)
    assert words.pop(0) == "raylane"
    if words[-1] == "--help":
        with pytest.raises(SystemExit) as end:
            build_parser(words).parse_args(words)
        assert end.value.code == 0
        return
    args = build_parser(words).parse_args(words)
    assert args.command == words[0]
    if hasattr(args, "config"):
        if args.command == "grpo":
            from raylane.rl.config import load_config
        else:
            from raylane.sft.config.load import load_config

        load_config(ROOT / args.config, args.overrides)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"raylane {raylane.__version__}\n"


@pytest.mark.processes
def test_version_loads_no_torch() -> None:
    code = "import sys; from raylane.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("package", "extra"), [("safetensors", "sft"), ("yaml", "sft"), ("datasets", "sft")])
def test_missing_package_names_the_extra_that_has_it(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ModuleNotFoundError(f"No module named '{package}.inner'", name=f"{package}.inner")

    monkeypatch.setattr("raylane.cli.report.run", run)
    assert main(["report", "runs/logs"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"raylane report: the package '{package}.inner' is not installed")
    assert line.endswith(f"pip install 'raylane[{extra}]'")


def test_packages_of_the_extra_sft_are_known_to_commands() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in project["optional-dependencies"]["sft"]}  # type: ignore[index]
    assert {"yaml" if name == "pyyaml" else name for name in names} <= set(EXTRAS)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("sfft run.yaml", "there is no command sfft. Did you mean sft?"),
        ("xyz", "there is no command xyz. `raylane --help` lists all"),
        ("sft run.yaml --dryrun", "raylane sft does not know --dryrun. Did you mean --dry-run?"),
        ("sft run.yaml --zzz", "raylane sft does not know --zzz. `raylane sft --help` lists all options"),
    ],
)
def test_unknown_word_is_answered_with_the_nearest(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "path", "told"),
    [
        ("sft", "tinny", "there is no file or model folder tinny. Did you mean tiny?"),
        ("inspect-data", "data.jsonl", "data.jsonl is data, not a configuration: name the model before it"),
        ("grpo", "data.jsonl.gz", "data.jsonl.gz is data, not a configuration: name a YAML file"),
        (
            "plan",
            "empty",
            "empty is no model, because it has no config.json, and no YAML file. Use raylane plan CONFIG",
        ),
        ("grpo", "tiny", "tiny is a folder, and no YAML file. Use raylane grpo CONFIG"),
        ("sft", "zz/zz", "there is no file or model folder zz/zz. Use raylane sft CONFIG or raylane sft MODEL DATA..."),
        ("sft", "run.yaml", None),
    ],
)
def test_word_that_is_no_configuration_has_a_remedy(
    command: str, path: str, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("tiny", "empty"):
        (tmp_path / folder).mkdir()
    for file in ("data.jsonl", "run.yaml"):
        (tmp_path / file).touch()
    problem = config_problem(command, path)
    assert problem is None if told is None else (problem or "").startswith(told)


@pytest.mark.parametrize(
    ("command", "sections", "told"),
    [
        (
            "plan",
            {"grpo"},
            "run.yaml has a section grpo: raylane plan is for fine-tuning. Use raylane grpo run.yaml, which",
        ),
        (
            "grpo",
            {"sft"},
            "run.yaml has a section sft and no section grpo: it is for fine-tuning. Use raylane sft run.yaml",
        ),
        ("plan", {"sft", "grpo"}, None),
        ("grpo", {"grpo"}, None),
        ("sft", {"policy"}, None),
    ],
)
def test_file_of_another_training_names_its_command(command: str, sections: set[str], told: str | None) -> None:
    problem = other_command(command, "run.yaml", sections)
    assert problem is None if told is None else (problem or "").startswith(told)


def test_plan_of_grpo_names_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = grpo.plan(load_config("examples/grpo_sort.yaml", ["rollout.gpus=0.5"]))
    assert [line.split()[0] for line in text.splitlines()] == [
        *("model", "steps", "answers", "engines", "workers", "validate", "save")
    ]
    for words in (
        "100 of 64 prompts x 8 answers",
        "512 a step, at most 1 step old (mode async)",
        "1 CPU and 0.5 GPUs",
    ):
        assert words in text


def test_command_without_words_names_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft"]) == 1
    assert "raylane sft CONFIG, or a model and data: raylane sft MODEL DATA..." in capsys.readouterr().err
