"""Checkpoint folders as files and decisions: what is complete, what is kept, where a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from raylane.errors import CheckpointError
from raylane.sft import checkpoint
from raylane.sft.checkpoint import Saved
from raylane.sft.config import CheckpointingConfig


def write(folder: Path, step: int, **metrics: float) -> Saved:
    partial = checkpoint.begin(folder, step)
    (partial / "payload").write_text(str(step))
    return checkpoint.commit(partial, step, metrics, {"sft": {"seed": 1}})


def saved(step: int, loss: float | None = None) -> Saved:
    return Saved(step, Path(f"step_{step}"), {} if loss is None else {"val:loss": loss}, {})


def settings(**fields) -> CheckpointingConfig:
    return CheckpointingConfig(**fields)


def test_only_complete_checkpoints_are_listed_by_number_not_by_name(tmp_path):
    for step in (100, 20, 3):
        write(tmp_path, step)
    checkpoint.begin(tmp_path, 200)  # killed while writing
    (tmp_path / "step_300").mkdir()  # no marker
    (tmp_path / "notes").mkdir()
    assert [one.step for one in checkpoint.list_saved(tmp_path)] == [3, 20, 100]
    assert checkpoint.find(settings(checkpoint_dir=str(tmp_path))).step == 100
    assert checkpoint.list_saved(tmp_path / "nowhere") == []


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    write(tmp_path, 3)
    left = checkpoint.begin(tmp_path, 4)
    assert checkpoint.discard_partial(tmp_path) == [left]
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


def test_a_second_save_of_a_step_replaces_the_first(tmp_path):
    write(tmp_path, 3, **{"val:loss": 2.0})
    again = write(tmp_path, 3, **{"val:loss": 1.0})
    assert again.metrics == {"val:loss": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


def test_resume_never_and_by_name(tmp_path):
    write(tmp_path, 3)
    write(tmp_path, 5)
    assert checkpoint.find(settings(checkpoint_dir=str(tmp_path), resume="never")) is None
    assert checkpoint.find(settings(checkpoint_dir="elsewhere", resume=str(tmp_path / "step_3"))).step == 3
    with pytest.raises(CheckpointError, match="there is no checkpoint folder"):
        checkpoint.find(settings(resume=str(tmp_path / "step_4")))
    with pytest.raises(CheckpointError, match="was not finished: it has no COMPLETE file"):
        checkpoint.read(checkpoint.begin(tmp_path, 9))


def test_a_run_does_not_start_among_the_later_checkpoints_of_another(tmp_path):
    """They would be taken for the latest: this run's own would be dropped, and resume would go to theirs."""
    write(tmp_path, 3)
    write(tmp_path, 5)
    here = settings(checkpoint_dir=str(tmp_path), resume="never")
    with pytest.raises(CheckpointError, match=r"holds step_3, step_5, and this run starts at step 0"):
        checkpoint.refuse_later(here, 0)
    with pytest.raises(CheckpointError, match=r"holds step_5, and"):
        checkpoint.refuse_later(here, 3)
    checkpoint.refuse_later(here, 5)


def test_a_damaged_description_is_told(tmp_path):
    one = write(tmp_path, 3)
    (one.path / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read"):
        checkpoint.list_saved(tmp_path)


def test_the_latest_and_the_best_are_kept():
    history = [saved(1, 3.0), saved(2, 1.0), saved(3, 2.0), saved(4), saved(5, 4.0)]
    kept, removed = checkpoint.keep(history, settings(keep_latest_k=1, keep_top_k=2))
    assert [one.step for one in kept] == [2, 3, 5]
    assert [one.step for one in removed] == [1, 4]
    kept, _ = checkpoint.keep(history, settings(keep_latest_k=2, keep_top_k=1, higher_is_better=True))
    assert [one.step for one in kept] == [4, 5]
    kept, _ = checkpoint.keep([saved(1, 1.0), saved(2, 1.0), saved(3, 9.0)], settings(keep_latest_k=1, keep_top_k=1))
    assert [one.step for one in kept] == [2, 3], "of equals the later"
    kept, _ = checkpoint.keep(
        [saved(1, 1.0), saved(2, float("nan")), saved(3)], settings(keep_latest_k=1, keep_top_k=1)
    )
    assert [one.step for one in kept] == [1, 3], "what is no number is not the best"


def test_removing_takes_the_name_first(tmp_path):
    one = write(tmp_path, 3)
    checkpoint.remove(one)
    assert list(tmp_path.iterdir()) == []


def test_differences_that_change_losses_are_named():
    before = {"sft": {"seed": 1}, "policy": {"precision": "float32"}, "logger": {"log_dir": "a"}}
    now = {"sft": {"seed": 2}, "policy": {"precision": "float32"}, "logger": {"log_dir": "b"}}
    assert checkpoint.differences(before, now) == ["sft.seed: 1 then, 2 now"]
    shape = {"policy": {"hf_config_overrides": {"rope_theta": 1e4}}, "cluster": {"cpus_per_worker": 1}}
    other = {"policy": {"hf_config_overrides": {"rope_theta": 1e6}}, "cluster": {"cpus_per_worker": 2}}
    assert [said.partition(":")[0] for said in checkpoint.differences(shape, other)] == [
        "policy.hf_config_overrides",
        "cluster.cpus_per_worker",
    ]
