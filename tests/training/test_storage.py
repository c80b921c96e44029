"""Places behind URLs: the same answers from the memory of this process and from an S3 server."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from tests.s3_server import s3_server

from raylane.errors import CheckpointDamagedError, CheckpointError, ConfigError
from raylane.training import storage
from raylane.training.checkpoint import folders, publishing
from raylane.training.config.schema import CheckpointingConfig
from raylane.training.storage import Url


@pytest.fixture(scope="module")
def s3_variables():
    pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    with s3_server() as server:
        yield server.variables


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.processes)])
def root(request, monkeypatch):
    """An empty folder behind a URL."""
    scheme = request.param
    storage._filesystem.cache_clear()
    if scheme == "s3":
        for name, value in request.getfixturevalue("s3_variables").items():
            monkeypatch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
    url = Url(f"{scheme}://bucket/{request.node.name.translate(str.maketrans('[]', '--'))}")
    yield url
    url.remove()
    storage._filesystem.cache_clear()


def settings(folder: Url, **fields) -> CheckpointingConfig:
    return CheckpointingConfig(checkpoint_dir=str(folder), **fields)


def write(folder: Url, step: int, text: str = "weights", **metrics: float) -> folders.Saved:
    partial = publishing.begin(folder, step)
    (partial / "state/__0_0.distcp").write_text(text)
    return folders.commit(partial, step, metrics, {"sft": {"seed": 1}})


def names(folder: Url) -> list[str]:
    return sorted(place.name for place in folder.iterdir())


def test_url_behaves_like_a_path(root):
    file = root / "a/b.txt"
    assert (file.exists(), root.is_dir(), file.is_file()) == (False, False, False)
    file.write_text("grün")
    (root / "c").write_bytes(bytes(range(200)))
    assert (file.is_file(), file.is_dir(), (root / "a").is_dir(), root.is_file()) == (True, False, True, False)
    assert file.read_text() == "grün"
    assert names(root) == ["a", "c"]
    assert root.sizes() == {"a/b.txt": 5, "c": 200}
    with (root / "c").open("rb") as stream:
        stream.seek(190)
        assert stream.read() == bytes(range(190, 200))
    with (root / "d").open("wb") as stream:
        stream.write(b"x" * 3)
    assert (root / "d").read_bytes() == b"xxx"
    assert pickle.loads(pickle.dumps(file)) == file
    assert (file.name, file.parent) == ("b.txt", root / "a")
    root.remove()
    root.remove()
    assert not root.exists()
    with pytest.raises(FileNotFoundError):
        file.read_bytes()


def test_checkpoint_counts_from_its_marker_on(root):
    write(root, 3)
    second = publishing.begin(root, 20)
    (second / "state/__0_0.distcp").write_text("half")
    (second / "run.json").write_text("{}")
    assert [one.step for one in folders.list_saved(root)] == [3]
    assert folders.find(settings(root)).step == 3
    with pytest.raises(CheckpointError, match="is not a complete checkpoint: it has no COMPLETE file"):
        folders.read(second)
    assert publishing.discard_partial(root) == [second]
    assert names(root) == ["step_3"]
    with pytest.raises(CheckpointError, match=r"holds step_3, and this run starts at step 0"):
        folders.refuse_later(settings(root, resume="never"), 0)


def test_a_replaced_checkpoint_is_found_until_the_new_one_is(root):
    write(root, 3, "first", loss=2.0)
    partial = publishing.begin(root, 3)
    (partial / "state/__0_0.distcp").write_text("second")
    assert folders.find(settings(root)).metrics == {"loss": 2.0}
    saved = folders.commit(partial, 3, {"loss": 1.0}, {})
    assert folders.find(settings(root)) == saved
    assert (saved.path / "state/__0_0.distcp").read_text() == "second"
    assert names(root) == [saved.path.name], "the first one is gone"
    assert write(root, 3).step == 3


def test_damaged_checkpoint_is_marked_and_kept(root, caplog):
    write(root, 3)
    newest = write(root, 5)
    (newest.path / "state/__0_0.distcp").write_text("cut")
    with pytest.raises(CheckpointDamagedError, match=r"state/__0_0\.distcp has 3 bytes, 7 were written"):
        folders.read(newest.path)
    assert folders.find(settings(root)).step == 3
    assert "marked by" in caplog.text
    assert publishing.discard_partial(root) == []
    assert names(root) == ["step_3", "step_5"]
    assert [one.step for one in folders.list_whole(root)[0]] == [3]
    again = write(root, 5)
    assert folders.find(settings(root)) == again
    assert len(names(root)) == 3, "the damaged one stays for the user"


def test_export_is_whole_or_absent(root):
    saved = write(root, 3)
    partial = publishing.begin_export(saved.path)
    (partial / "config.json").write_text("{}")
    assert publishing.exported(saved.path) is None
    folder = publishing.publish_export(saved.path, partial)
    assert publishing.exported(saved.path) == folder
    publishing.begin_export(saved.path)
    assert publishing.exported(saved.path) is None
    publishing.remove(saved.path)
    assert not root.exists()


def test_download_copies_all_files(root, tmp_path):
    (root / "a/b").write_text("one")
    (root / "c").write_text("two")
    storage.download(root, tmp_path / "copy")
    assert (tmp_path / "copy/a/b").read_text() == "one"
    assert (tmp_path / "copy/c").read_text() == "two"
    with pytest.raises(FileNotFoundError, match="there is nothing at"):
        storage.download(root / "missing", tmp_path / "other")


def test_other_content_of_the_same_size_is_another_version(root):
    (root / "weights").write_bytes(b"old")
    before = root.versions()
    assert root.versions() == before
    (root / "weights").write_bytes(b"new")
    assert root.versions() != before
    assert root.sizes() == {"weights": 3}


def test_place_of_a_text_is_a_path_or_a_url(tmp_path):
    assert storage.at("runs/saved") == Path("runs/saved")
    assert storage.at(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    assert storage.at("s3://bucket/run/") == Url("s3://bucket/run")
    assert storage.is_url("memory://x")
    assert not storage.is_url(f"file://{tmp_path}")


def test_file_url_has_the_semantics_of_a_local_folder(tmp_path):
    folder = storage.at(f"file://{tmp_path}")
    (tmp_path / "step_3.partial/state").mkdir(parents=True)
    folders.commit(tmp_path / "step_3.partial", 3, {}, {})
    publishing.begin(folder, 4)
    assert names(folder) == ["step_3", "step_4.partial"]
    assert folders.find(CheckpointingConfig(checkpoint_dir=f"file://{tmp_path}")).step == 3


def test_unknown_scheme_and_missing_package_are_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"checkpointing\.checkpoint_dir=nfs3://x cannot be used: nfs3:// is no stor"):
        storage.require("checkpointing.checkpoint_dir", "nfs3://x")
    storage._filesystem.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"s3:// needs a package.*pip install 'raylane\[s3\]' on all nodes"):
        storage.require("data.train", "s3://bucket/x")
    storage.require("data.train", "local/file")


@pytest.mark.processes
@pytest.mark.parametrize("wrong", ["endpoint", "key"])
def test_storage_that_refuses_is_not_an_empty_folder(s3_variables, monkeypatch, wrong):
    """A run that takes a failure for an empty folder would begin at step 0."""
    import s3fs

    changed = {"endpoint": {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "key": {"AWS_ACCESS_KEY_ID": "unknown"}}[wrong]
    for name, value in {**s3_variables, **changed, "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    storage._filesystem.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    with pytest.raises(OSError):
        folders.find(settings(Url("s3://bucket/run")))
    storage._filesystem.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()
    assert os.environ["AWS_ACCESS_KEY_ID"]
