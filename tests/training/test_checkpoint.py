"""Checkpoint folders as files and decisions: what is complete, what is kept, where a run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raylane.errors import CheckpointDamagedError, CheckpointError
from raylane.training.checkpoint import folders, publishing
from raylane.training.checkpoint.folders import Saved
from raylane.training.config.schema import CheckpointingConfig


def write(folder: Path, step: int, **metrics: float) -> Saved:
    partial = publishing.begin(folder, step)
    (partial / "payload").write_text(str(step))
    return folders.commit(partial, step, metrics, {"sft": {"seed": 1}})


def saved(step: int, loss: float | None = None) -> Saved:
    return Saved(step, Path(f"step_{step}"), {} if loss is None else {"val:loss": loss}, {})


def settings(**fields) -> CheckpointingConfig:
    return CheckpointingConfig(**fields)


def test_list_saved_sorts_complete_checkpoints_by_step(tmp_path):
    for step in (100, 20, 3):
        write(tmp_path, step)
    publishing.begin(tmp_path, 200)  # killed while writing
    (tmp_path / "step_300").mkdir()  # no marker
    (tmp_path / "notes").mkdir()
    assert [one.step for one in folders.list_saved(tmp_path)] == [3, 20, 100]
    assert folders.find(settings(checkpoint_dir=str(tmp_path))).step == 100
    assert folders.list_saved(tmp_path / "nowhere") == []


def test_discard_partial_removes_only_leftovers(tmp_path):
    write(tmp_path, 3)
    left = publishing.begin(tmp_path, 4)
    assert publishing.discard_partial(tmp_path) == [left]
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


def test_a_second_save_of_a_step_replaces_the_first(tmp_path):
    write(tmp_path, 3, **{"val:loss": 2.0})
    again = write(tmp_path, 3, **{"val:loss": 1.0})
    assert again.metrics == {"val:loss": 1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


def test_resume_never_and_by_name(tmp_path):
    write(tmp_path, 3)
    write(tmp_path, 5)
    assert folders.find(settings(checkpoint_dir=str(tmp_path), resume="never")) is None
    assert folders.find(settings(checkpoint_dir="elsewhere", resume=str(tmp_path / "step_3"))).step == 3
    with pytest.raises(CheckpointError, match="there is no checkpoint folder"):
        folders.find(settings(resume=str(tmp_path / "step_4")))
    with pytest.raises(CheckpointError, match="is not a complete checkpoint: it has no COMPLETE file"):
        folders.read(publishing.begin(tmp_path, 9))


def test_run_refuses_a_folder_with_later_checkpoints(tmp_path):
    """They would be taken for the latest: this run's own would be dropped, and resume would go to theirs."""
    write(tmp_path, 3)
    write(tmp_path, 5)
    here = settings(checkpoint_dir=str(tmp_path), resume="never")
    with pytest.raises(CheckpointError, match=r"holds step_3, step_5, and this run starts at step 0"):
        folders.refuse_later(here, 0)
    with pytest.raises(CheckpointError, match=r"holds step_5, and"):
        folders.refuse_later(here, 3)
    folders.refuse_later(here, 5)


def test_a_damaged_description_is_told(tmp_path):
    one = write(tmp_path, 3)
    (one.path / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run\.json cannot be read"):
        folders.list_saved(tmp_path)


def write_state(folder: Path, step: int) -> Saved:
    partial = publishing.begin(folder, step)
    (partial / "state").mkdir()
    (partial / "state/weights").write_text("weights of step " + str(step))
    return folders.commit(partial, step, {}, {})


@pytest.mark.parametrize("damage", ["truncate", "remove", "description"])
def test_find_with_a_damaged_newest_takes_the_one_before(tmp_path, caplog, damage):
    write_state(tmp_path, 3)
    newest = write_state(tmp_path, 5)
    if damage == "truncate":
        os.truncate(newest.path / "state/weights", 4)
    elif damage == "remove":
        (newest.path / "state/weights").unlink()
    else:
        (newest.path / "run.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointDamagedError, match=r"damaged: state/weights has|run\.json cannot be read"):
        folders.find(settings(resume=str(newest.path)))
    assert folders.find(settings(checkpoint_dir=str(tmp_path))).step == 3
    assert "renamed to" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3", "step_5.damaged"]
    folders.refuse_later(settings(checkpoint_dir=str(tmp_path)), 3)


def test_find_with_only_damaged_ones_starts_nothing_anew(tmp_path):
    only = write_state(tmp_path, 5)
    os.truncate(only.path / "state/weights", 4)
    with pytest.raises(CheckpointDamagedError, match="holds only damaged checkpoints"):
        folders.find(settings(checkpoint_dir=str(tmp_path)))
    assert only.path.is_dir(), "a second try must not find an empty folder and begin at step 0"


REPLACE_AND_DIE = """
import os, pathlib, signal, sys
from raylane.training.checkpoint import folders, publishing
rename, calls = pathlib.Path.rename, []
def dying(self, target):
    calls.append(self)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
pathlib.Path.rename = dying
partial = publishing.begin(pathlib.Path(sys.argv[1]), 5)
(partial / "state").mkdir()
(partial / "state/weights").write_text("second")
folders.commit(partial, 5, {"val:loss": 1.0}, {})
"""


@pytest.mark.processes
@pytest.mark.faults
@pytest.mark.parametrize("rename", [1, 2])
def test_commit_killed_before_a_rename_loses_nothing(tmp_path, rename):
    write_state(tmp_path, 5)
    command = [sys.executable, "-c", REPLACE_AND_DIE, str(tmp_path), str(rename)]
    assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
    recovered = publishing.recover(tmp_path)
    publishing.discard_partial(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_5"]
    assert recovered == ([] if rename == 1 else [tmp_path / "step_5"])
    found = folders.find(settings(checkpoint_dir=str(tmp_path)))
    assert found.metrics == ({} if rename == 1 else {"val:loss": 1.0}), "the newer of the two"


def test_recover_leaves_removed_and_half_written_ones_alone(tmp_path):
    one = write_state(tmp_path, 5)
    one.path.rename(tmp_path / "step_5.removed.partial")
    publishing.begin(tmp_path, 7)
    assert publishing.recover(tmp_path) == []
    publishing.discard_partial(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.claim("security", "symbolic links in folders of a run are neither written through nor exported")
def test_discard_of_a_link_removes_the_link_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/precious").write_text("")
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "step_4.partial").symlink_to(tmp_path / "mine")
    publishing.discard_partial(folder)
    assert (tmp_path / "mine/precious").exists()
    (folder / "step_4.partial").symlink_to(tmp_path / "mine")
    (publishing.begin(folder, 4) / "payload").write_text("")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["precious"]


@pytest.mark.claim("security", "checkpoints (unless `allow_other_owner`) and locks of another user are refused")
def test_find_refuses_files_of_another_user_unless_allowed(tmp_path, monkeypatch):
    one = write_state(tmp_path, 5)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    for resume in ("auto", str(one.path)):
        here = settings(checkpoint_dir=str(tmp_path), resume=resume)
        with pytest.raises(CheckpointError, match=rf"runs as user {other}.*checkpointing\.allow_other_owner=true"):
            folders.find(here)
        assert folders.find(here.model_copy(update={"allow_other_owner": True})).step == 5


def test_the_latest_and_the_best_are_kept():
    history = [saved(1, 3.0), saved(2, 1.0), saved(3, 2.0), saved(4), saved(5, 4.0)]
    kept, removed = folders.keep(history, settings(keep_latest_k=1, keep_top_k=2))
    assert [one.step for one in kept] == [2, 3, 5]
    assert [one.step for one in removed] == [1, 4]
    kept, _ = folders.keep(history, settings(keep_latest_k=2, keep_top_k=1, higher_is_better=True))
    assert [one.step for one in kept] == [4, 5]
    kept, _ = folders.keep([saved(1, 1.0), saved(2, 1.0), saved(3, 9.0)], settings(keep_latest_k=1, keep_top_k=1))
    assert [one.step for one in kept] == [2, 3], "of equals the later"
    kept, _ = folders.keep([saved(1, 1.0), saved(2, float("nan")), saved(3)], settings(keep_latest_k=1, keep_top_k=1))
    assert [one.step for one in kept] == [1, 3], "what is no number is not the best"


def test_removing_takes_the_name_first(tmp_path):
    one = write(tmp_path, 3)
    publishing.remove(one.path)
    assert list(tmp_path.iterdir()) == []


def test_differences_that_change_losses_are_named():
    before = {"sft": {"seed": 1}, "policy": {"precision": "float32"}, "logger": {"log_dir": "a"}}
    now = {"sft": {"seed": 2}, "policy": {"precision": "float32"}, "logger": {"log_dir": "b"}}
    assert folders.differences(before, now, ["sft.seed"]) == ["sft.seed: 1 in the checkpoint, 2 now"]
    shape = {"policy": {"hf_config_overrides": {"rope_theta": 1e4}}, "cluster": {"cpus_per_worker": 1}}
    other = {"policy": {"hf_config_overrides": {"rope_theta": 1e6}}, "cluster": {"cpus_per_worker": 2}}
    assert [said.partition(":")[0] for said in folders.differences(shape, other)] == [
        "policy.hf_config_overrides.rope_theta",
        "cluster.cpus_per_worker",
    ]


@pytest.mark.parametrize(
    "content", ['{"step": 5, "metrics": {"val:loss": "x"}, "config": {}}', "[]", '{"step": "x"}', "\xff"]
)
def test_description_that_is_none_counts_as_damage(tmp_path, content):
    write_state(tmp_path, 3)
    (write_state(tmp_path, 5).path / "run.json").write_bytes(content.encode("latin-1"))
    assert folders.find(settings(checkpoint_dir=str(tmp_path))).step == 3


def test_description_that_may_not_be_read_puts_nothing_aside(tmp_path, monkeypatch):
    """Permissions and file systems may come back; damage does not."""
    write_state(tmp_path, 3)
    write_state(tmp_path, 5)
    plain = Path.read_bytes

    def refuse(path):
        if path.parent.name == "step_5":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointError, match="Permission denied") as caught:
        folders.find(settings(checkpoint_dir=str(tmp_path)))
    assert type(caught.value) is CheckpointError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3", "step_5"]
