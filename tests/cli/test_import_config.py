"""`raylane import-config` as a user calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.nemo.upstream_file import NEMO_FILE

from raylane.cli import main
from raylane.sft.config.load import load_config

OWN = ["data.train=t.jsonl", "data.validation=v.jsonl", "policy.tokenizer.chat_template=llama3"]


@pytest.fixture
def their_file(tmp_path: Path) -> str:
    path = tmp_path / "theirs.yaml"
    path.write_text(NEMO_FILE)
    return str(path)


def test_complete_import_is_status_0_and_loads(
    their_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ours.yaml"
    assert main(["import-config", their_file, *OWN, f"policy.model_name={tmp_path}", "-o", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "  policy.megatron_cfg " in shown.err
    assert shown.err.endswith("The configuration is complete.\n")
    assert load_config(out).data.train == ("t.jsonl",)


def test_incomplete_import_is_status_1_and_printed(their_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-config", their_file]) == 1
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["data"]["train"] == "???"
    assert "To do before `raylane sft` can run this:" in shown.err


def test_config_option_of_nemo_rl_is_understood(
    their_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words are those of NeMo-RL's tests/functional/sft.sh."""
    words = ["cluster.gpus_per_node=2", "sft.max_num_steps=3", "sft.val_batches=1", "sft.val_period=3"]
    words += ["logger.tensorboard_enabled=true", "logger.wandb_enabled=false", "logger.monitor_gpus=true"]
    words += ["checkpointing.enabled=true", "checkpointing.save_period=3", f"policy.model_name={tmp_path}"]
    words += [f"data.cache_dir={tmp_path}/cache", *OWN]
    assert main(["plan", "--config", their_file, *words]) == 1
    told = capsys.readouterr().err.splitlines()
    assert "cannot read data file t.jsonl" in told[-1]  # the configuration itself was accepted
    assert "NeMo-RL keys ignored or replaced: " in told[0]
    assert main(["plan"]) == 1
    assert "no configuration is named. Give CONFIG" in capsys.readouterr().err


def test_import_never_overwrites_a_file(their_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-config", their_file, "-o", their_file]) == 1
    assert f"cannot write {their_file}: File exists. Choose another name" in capsys.readouterr().err
    assert Path(their_file).read_text() == NEMO_FILE
