"""The commands of the data side, called as a user calls them; none of them starts Ray."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import yaml

from raylane.cli import main
from sft.conversations import document, question, write_jsonl

ASK = "import sys; from raylane.cli import main; sys.exit(main())"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "train.jsonl", [question(seed) for seed in range(20)])
    path = tmp_path / "run.yaml"
    shape = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    path.write_text(yaml.safe_dump(document(tmp_path, policy={"hf_config_overrides": {**shape, **heads}})))
    return path


def test_inspect_data_marks_spans_in_plain_text(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect-data", "--show", "2", str(run_file)]) == 0
    out = capsys.readouterr().out
    assert out.count("[[Answer") == 2
    assert "\x1b[" not in out
    for words in ("supervised    ", "%", "end token     supervised: yes", "dropped       0", "% full"):
        assert words in out


def test_inspect_data_takes_overrides(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["policy.max_total_sequence_length=32", "data.overlong=drop", "data.allow_unsupervised=true"]
    assert main(["inspect-data", "--show", "0", str(run_file), *words]) == 1
    assert "no train documents are left of 20" in capsys.readouterr().err
    assert main(["inspect-data", "--show", "0", str(run_file), "policy.sequence_packing.enabled=false"]) == 0
    out = capsys.readouterr().out
    assert "one document a row" in out
    assert "[[" not in out


@pytest.mark.slow
@pytest.mark.processes
def test_inspect_data_colours_spans_on_a_terminal(run_file: Path) -> None:
    leader, follower = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", ASK, "inspect-data", "--show", "1", str(run_file)], stdout=follower)
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # the other end is closed (EIO on Linux)
            break
        if not part:
            break
        shown += part
    os.close(leader)
    assert child.wait(60) == 0
    assert b"\x1b[32mAnswer" in shown


def test_plan_command_prints_forecast_and_starts_nothing(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = ray.is_initialized()
    assert main(["plan", str(run_file), "cluster.num_workers=2"]) == 0
    out = capsys.readouterr().out
    for words in ("dp_shard=2: 2 workers", "epochs of", "positions", "memory     at most about", "compute"):
        assert words in out
    assert ray.is_initialized() == before


@pytest.mark.parametrize("command", ["plan", "inspect-data", "sft"])
def test_a_typing_error_is_one_line_with_a_suggestion(
    run_file: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(run_file), "policy.max_grad_nrom=1"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"raylane {command}: ConfigError: override 'policy.max_grad_nrom=1'")
    assert "did you mean 'policy.max_grad_norm'?" in err
    assert len(err.splitlines()) == 1


def test_sizes_that_do_not_divide_are_refused_before_start(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", str(run_file), "cluster.num_workers=3"]) == 1
    assert "train_global_batch_size=2" in capsys.readouterr().err


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_data_docstrings_writes_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "docstrings", "--out", str(tmp_path / "d"), "--packages", "msgspec,pydantic"]) == 0
    lines = [line for side in ("train", "validation") for line in read_lines(tmp_path / "d" / f"{side}.jsonl")]
    assert f"{len(lines)} pairs" in capsys.readouterr().out
    assert len(lines) > 100
    assert main(["data", "docstrings", "--out", str(tmp_path / "e"), "--packages", "no_such_package"]) == 1
    assert "no_such_package" in capsys.readouterr().err


def test_data_docstrings_refuses_a_fraction_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"must be at least 0 and less than 1, got 1\.5"):
        main(["data", "docstrings", "--out", str(tmp_path), "--validation-fraction", "1.5"])


def test_run_summary_lists_only_existing_files(tmp_path: Path) -> None:
    from raylane.cli.sft import summary
    from raylane.sft.run.trainer import RunResult
    from raylane.training.run.record import Sample

    nothing = RunResult(3, True, None, None, None, None, None, None)
    assert summary(nothing) == "ended         on SIGTERM after 3 steps"
    sample = Sample("user\nWhat is `abc`?\nassistant\n", "A module.")
    whole = RunResult(1200, False, 4.5, 4.75, tmp_path / "c", tmp_path / "hf", sample, tmp_path / "report.html")
    assert summary(whole).splitlines() == [
        "ended         after 1,200 steps",
        "last step     loss 4.5000",
        "held-out loss 4.7500",
        f"checkpoint    {tmp_path}/c",
        f"model         {tmp_path}/hf",
        f"report        {tmp_path}/report.html",
        "asked         user What is `abc`? assistant",
        "answered      A module.",
    ]
