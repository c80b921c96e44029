"""Copies of folders on nodes that do not have them: when one is made, and what is refused."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from raylane.sft.data.prepared import PreparedData
from raylane.training.run import delivery
from raylane.training.run.delivery import FolderCopies, FolderReceiver, list_files
from sft import tiny_run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with files, and an empty temporary folder of this "node"."""
    monkeypatch.setattr(delivery.tempfile, "gettempdir", lambda: str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    made = tmp_path / "data-1"
    (made / "train").mkdir(parents=True)
    (made / "prepared.json").write_text("{}")
    (made / "train/tokens.bin").write_bytes(bytes(range(250)))
    (made / "train/empty").touch()
    return made


def copy(folder, listing) -> str:
    receiver = FolderReceiver()
    assert receiver.find(f"{folder}-of-the-driver", listing) is None
    for name, block in delivery._blocks(folder, listing):
        receiver.write(name, block)
    return receiver.finish()


def test_find_takes_a_folder_that_the_node_sees(folder):
    assert FolderReceiver().find(str(folder), list_files(folder)) == str(folder)


def test_copy_has_the_same_files_and_is_found_again(folder, monkeypatch):
    monkeypatch.setattr(delivery, "_BLOCK_BYTES", 100)
    listing = list_files(folder)
    assert {name: size for name, (size, _) in listing.items()} == {
        "prepared.json": 2,
        "train/empty": 0,
        "train/tokens.bin": 250,
    }
    blocks = [(name, len(block)) for name, block in delivery._blocks(folder, listing)]
    assert blocks == [("prepared.json", 2), ("train/empty", 0), *(("train/tokens.bin", n) for n in (100, 100, 50))]
    made = copy(folder, listing)
    assert FolderReceiver().find(f"{folder}-of-the-driver", listing) == made
    assert list_files(delivery.Path(made)) == listing
    assert np.fromfile(f"{made}/train/tokens.bin", np.uint8).tolist() == list(range(250))
    assert not [name for name in os.listdir(os.path.dirname(made)) if "draft" in name]


def test_copy_of_another_content_is_not_taken(folder):
    made = copy(folder, list_files(folder))
    (folder / "prepared.json").write_text("{ }")
    assert copy(folder, list_files(folder)) != made


def test_folder_of_another_user_is_refused(folder, tmp_path, monkeypatch):
    (tmp_path / f"node/raylane-{os.geteuid()}").symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"is a link, or other users can write to it"):
        delivery.own_folder()


def test_other_content_of_the_same_size_is_noticed(tmp_path):
    """A model that was trained further has the same names and sizes."""
    (tmp_path / "model").mkdir()
    listings = []
    for content in (b"a" * 300_000, b"a" * 150_000 + b"b" * 150_000):
        (tmp_path / "model/weights").write_bytes(content)
        listings.append(list_files(tmp_path / "model"))
    assert listings[0] != listings[1]


def test_copy_that_another_run_finished_first_stays(folder, monkeypatch):
    """Its workers may be reading the files: they must not vanish for a moment."""
    listing = list_files(folder)
    slow = FolderReceiver()
    assert slow.find(f"{folder}-of-the-driver", listing) is None
    slow._draft = slow._draft.rename(f"{slow._draft}0")  # of another process
    first = copy(folder, listing)
    inode = os.stat(first).st_ino
    for name, block in delivery._blocks(folder, listing):
        slow.write(name, block)
    assert slow.finish() == first
    assert os.stat(first).st_ino == inode
    assert os.listdir(os.path.dirname(first)) == [os.path.basename(first)]


def test_drafts_of_ended_processes_are_removed(folder):
    listing = list_files(folder)
    left = (
        delivery.own_folder() / f"model-x.draft-{socket.gethostname()}-{2**22 + 1}-x"
    )  # above the largest process ID of Linux
    left.mkdir()
    (left / "weights").write_bytes(b"a" * 1000)
    copy(folder, listing)
    assert not left.exists()


def test_folder_copies_replace_paths_inside_delivered_folders(monkeypatch, tmp_path):
    node = SimpleNamespace(get_node_id=lambda: "second")
    monkeypatch.setattr(delivery.ray, "get_runtime_context", lambda: node)
    config = tiny_run.config_of(
        tmp_path, {"policy.model_name": "/driver/model", "policy.tokenizer": {"name": "tokenizer"}}
    )
    data = Path("/driver/data")
    prepared = PreparedData(data / "tokenizer", 9, 0, (1,), train=data / "train", validation=None)
    copies = FolderCopies({"first": {}, "second": {"/driver/data": "/copy", "/driver/model": "/copied-model"}})
    moved_config, moved = copies.on_this_node(config, prepared)
    assert (moved.tokenizer_dir, moved.train, moved.validation) == (Path("/copy/tokenizer"), Path("/copy/train"), None)
    assert moved_config.policy.model_name == "/copied-model"
    assert prepared.folders == (data,)
    assert FolderCopies({"second": {}}).on_this_node(config, prepared) == (config, prepared)
