"""Files of a run on nodes that do not share a disk with the driver: prepared data, tokenizer and model folder.

Before the workers are set up, the driver asks each of their nodes once for the folders that the run needs. A node that
has no folder of that name with the same files gets a copy through Ray's object store, in blocks that it writes to
<temporary folder>/raylane-<user ID>; training then reads local files. A later run finds the copy by its digest.

    driver                          a receiver on each other node (a Ray actor without CPUs)
    digest of names and sizes  -->  same folder here?  yes: use it     no: a copy with this digest?  yes: use that
    blocks of 64 MiB           -->  no: write a draft, rename it       (one block per node in memory, two on the way)

Nothing happens if all workers are on the driver's node. Called by `policy`; workers apply the result (`FolderCopies`).
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylane.errors import ConfigError, WorkerGroupError
from raylane.training import storage
from raylane.training.config.load import Config
from raylane.training.config.schema import TrainingConfig
from raylane.training.vocabulary import AnyVocabulary, Vocabulary

_BLOCK_BYTES = 64 * 2**20
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True)
class FolderCopies:
    """Folders of the driver -> folders with the same files, by Ray node."""

    by_node: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def on_this_node(self, config: Config, vocabulary: AnyVocabulary) -> tuple[Config, AnyVocabulary]:
        """Return configuration and tokens with the folders of the node that this worker runs on."""
        if not self.by_node:  # the usual case, which also works outside Ray
            return config, vocabulary
        copies = {
            Path(folder): Path(copy)
            for folder, copy in self.by_node.get(ray.get_runtime_context().get_node_id(), {}).items()
        }

        def path_of(path: Path) -> Path:
            # A path may lie inside a folder that was copied as a whole, as the tokenizer does in the data of a run.
            for folder, copy in copies.items():
                if path.is_relative_to(folder):
                    return copy / path.relative_to(folder)
            return path

        policy = config.policy
        if policy.model_name is not None:
            policy = policy.model_copy(update={"model_name": str(path_of(Path(policy.model_name)))})
        return config.model_copy(update={"policy": policy}), vocabulary.moved(path_of)


def provide(config: TrainingConfig, vocabulary: Vocabulary, node_ids: Sequence[str]) -> FolderCopies:
    """Make data and model available on these nodes; return where. Waits until everything is written.

    Raises ConfigError if checkpoints would go to a folder that the driver and a node do not share, and WorkerGroupError
    if a node does not answer a call, such as one block of a file, within `cluster.start_timeout_s`.
    """
    others = sorted(set(node_ids) - {ray.get_runtime_context().get_node_id()})
    if not others:
        return FolderCopies()
    remote, limit_s = ray.remote(FolderReceiver), config.cluster.start_timeout_s
    receivers = {
        node: remote.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in others
    }
    try:
        place = storage.at(config.checkpointing.checkpoint_dir) if config.checkpointing.enabled else None
        if isinstance(place, Path):
            place.mkdir(parents=True, exist_ok=True)
            probe = place.resolve() / f".shared-{secrets.token_hex(8)}"
            probe.touch()
            try:
                answers = _answers([receiver.sees.remote(str(probe)) for receiver in receivers.values()], limit_s)
            finally:
                probe.unlink()
            blind = sorted(host for host, sees in answers if not sees)
            if blind:
                raise ConfigError(
                    f"checkpointing.checkpoint_dir={config.checkpointing.checkpoint_dir} is not shared: files that the "
                    f"driver writes there are not seen on {', '.join(blind)}. Set it to a folder on storage that all "
                    "nodes share, or to a URL such as s3://bucket/run",
                    key="checkpointing.checkpoint_dir",
                )
        folders = [*vocabulary.folders]
        if config.policy.model_name is not None:
            folders.append(Path(config.policy.model_name))
        by_node: dict[str, dict[str, str]] = {node: {} for node in others}
        for folder in folders:
            for node, path in _provide_folder(folder, receivers, limit_s).items():
                by_node[node][str(folder)] = path
        return FolderCopies(by_node)
    finally:
        for receiver in receivers.values():
            ray.kill(receiver)


def _answers(refs: Sequence[Any], limit_s: float) -> list[Any]:
    """Return the answers of the receivers to one call each; WorkerGroupError after `limit_s` seconds."""
    try:
        answers: list[Any] = ray.get(list(refs), timeout=limit_s)
    except ray.exceptions.GetTimeoutError as error:
        raise WorkerGroupError(
            f"not all other nodes answered within {limit_s:g} s while they got model and data. Look at them with `ray "
            "status`, or raise cluster.start_timeout_s"
        ) from error
    return answers


def _provide_folder(folder: Path, receivers: Mapping[str, Any], limit_s: float) -> dict[str, str]:
    """Return node -> path of a folder with the same files; send the files to the nodes that have none."""
    listing = list_files(folder)
    answers = _answers([receiver.find.remote(str(folder), listing) for receiver in receivers.values()], limit_s)
    paths = dict(zip(receivers, answers, strict=True))
    lacking = {node: receivers[node] for node, path in paths.items() if path is None}
    waiting: list[list[Any]] = []
    for name, block in _blocks(folder, listing) if lacking else ():
        # Stored once, and fetched by each node; at most two blocks are on the way, so a model of any size fits.
        ref = ray.put(block)
        waiting.append([receiver.write.remote(name, ref) for receiver in lacking.values()])
        if len(waiting) > 1:
            _answers(waiting.pop(0), limit_s)
    _answers([ref for refs in waiting for ref in refs], limit_s)
    copies = _answers([receiver.finish.remote() for receiver in lacking.values()], limit_s)
    paths.update(zip(lacking, copies, strict=True))
    return paths


def list_files(folder: Path) -> dict[str, tuple[int, str]]:
    """Return relative name -> (size in bytes, hash of samples) of all files below a folder; none if it does not exist.

    A model that was trained further has the same names and sizes. The samples, both ends and 14 places between them,
    tell it from the old one without reading many gigabytes.
    """
    listing = {}
    for path in [path for path in sorted(folder.rglob("*")) if path.is_file()]:
        digest, size = hashlib.sha256(), path.stat().st_size
        with path.open("rb") as file:
            for i in range(16):
                file.seek(max(0, size - _SAMPLE_BYTES) * i // 15)
                digest.update(file.read(_SAMPLE_BYTES))
        listing[str(path.relative_to(folder))] = size, digest.hexdigest()[:16]
    return listing


def _blocks(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Yield (name of the file, next bytes of it); for an empty file one empty block."""
    for name in names:
        with (folder / name).open("rb") as file:
            yield name, file.read(_BLOCK_BYTES)
            while block := file.read(_BLOCK_BYTES):
                yield name, block


class FolderReceiver:
    """Actor on a node that looks for folders and writes copies of them."""

    def __init__(self) -> None:
        self._final: Path | None = None
        """Later path of the copy that is being written."""
        self._draft: Path | None = None
        self._listing: dict[str, tuple[int, str]] = {}
        """Files of the copy, as `list_files` returns them."""

    def sees(self, path: str) -> tuple[str, bool]:
        """Return the name of this machine, and True if it sees this file."""
        return socket.gethostname(), Path(path).exists()

    def find(self, folder: str, listing: dict[str, tuple[int, str]]) -> str | None:
        """Return a folder with exactly these files on this node; None if there is none, and `write` must follow."""
        if list_files(Path(folder)) == listing:
            return folder
        digest = hashlib.sha256(json.dumps([folder, listing]).encode()).hexdigest()[:16]
        self._final = own_folder() / f"{Path(folder).name}-{digest}"
        if list_files(self._final) == listing:
            return str(self._final)
        self._draft, self._listing = storage.new_draft(self._final), listing
        return None

    def write(self, name: str, block: bytes) -> None:
        """Append a block to a file of the copy."""
        assert self._draft is not None, "find comes first"
        path = self._draft / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(block)

    def finish(self) -> str:
        """Give the copy its final name and return it."""
        assert self._draft is not None
        assert self._final is not None
        if list_files(self._final) == self._listing:
            # Another run was first, and its workers may be reading the files.
            shutil.rmtree(self._draft)
            return str(self._final)
        shutil.rmtree(self._final, ignore_errors=True)  # damaged, or `find` would have returned it
        self._draft.rename(self._final)
        return str(self._final)


def own_folder() -> Path:
    """Return this user's folder for copies on this node; OSError if another user could write to it."""
    folder = Path(tempfile.gettempdir()) / f"raylane-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    # In a folder of another user the copies could be exchanged before they are read.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise OSError(f"{folder} is a link, or other users can write to it. Remove it, or set TMPDIR to another folder")
    return folder
