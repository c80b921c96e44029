"""One run at a time in a folder, and folders that cannot be written to are told before anything starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from raylane.errors import ConfigError
from raylane.training.run.places import LOCK_FILE, lock_folders

HOLD = """
import sys, signal
from raylane.training.run.places import lock_folders
with lock_folders({"key": sys.argv[1]}):
    print("held", flush=True)
    signal.pause()
"""


def test_second_run_in_a_folder_is_refused(tmp_path):
    with lock_folders({"checkpointing.checkpoint_dir": str(tmp_path / "a"), "logger.log_dir": str(tmp_path / "b")}):
        whose = rf"logger\.log_dir=.*/b is in use by another run \(process {os.getpid()} on .*choose another folder"
        with pytest.raises(ConfigError, match=whose), lock_folders({"logger.log_dir": str(tmp_path / "b")}):
            pass
    with lock_folders({"logger.log_dir": str(tmp_path / "b")}):
        pass


def test_two_keys_may_name_one_folder(tmp_path):
    with lock_folders({"a": str(tmp_path), "b": f"{tmp_path}/../{tmp_path.name}"}):
        assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")


def test_a_refused_folder_does_not_keep_the_others(tmp_path):
    with lock_folders({"b": str(tmp_path / "b")}):
        with pytest.raises(ConfigError), lock_folders({"a": str(tmp_path / "a"), "b": str(tmp_path / "b")}):
            pass
        with lock_folders({"a": str(tmp_path / "a")}):
            pass


@pytest.mark.processes
@pytest.mark.faults
def test_a_killed_run_holds_nothing(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {other.pid} on"), lock_folders({"key": str(tmp_path)}):
            pass
        other.send_signal(signal.SIGKILL)
        other.wait(60)
    with lock_folders({"key": str(tmp_path)}):
        pass


def test_a_folder_that_cannot_be_is_named_with_its_key(tmp_path):
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "below"
    said = r"logger\.log_dir=.*/file/below cannot be written to: Not a directory"
    with pytest.raises(ConfigError, match=said), lock_folders({"logger.log_dir": str(below)}):
        pass


@pytest.mark.claim("security", "symbolic links in folders of a run are neither written through nor exported")
def test_lock_that_is_a_link_leaves_its_target_alone(tmp_path):
    (tmp_path / "precious").write_text("text")
    for make in ("symlink_to", "hardlink_to"):
        folder = tmp_path / make
        folder.mkdir()
        getattr(folder / LOCK_FILE, make)(tmp_path / "precious")
        with (
            pytest.raises(ConfigError, match=r"logger\.log_dir=.* is refused: .*Remove it"),
            lock_folders({"logger.log_dir": str(folder)}),
        ):
            pass
    assert (tmp_path / "precious").read_text() == "text"


@pytest.mark.claim("security", "checkpoints (unless `allow_other_owner`) and locks of another user are refused")
def test_lock_of_another_user_is_refused(tmp_path, monkeypatch):
    (tmp_path / LOCK_FILE).write_text("")
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    told = rf"belongs to user \d+, and this process runs as user {other}"
    with pytest.raises(ConfigError, match=told), lock_folders({"key": str(tmp_path)}):
        pass


def test_lock_that_is_no_plain_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / LOCK_FILE)
    with pytest.raises(ConfigError, match="is no plain file"), lock_folders({"key": str(tmp_path)}):
        pass
