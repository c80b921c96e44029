"""Reading of torch DCP folders without running code from them; distinguishes a wrong model from damaged files.

torch's own reader unpickles `.metadata` and every value that is not a tensor, so a manipulated folder could run any
program in the workers. Here `.metadata` may name only the classes that DCP itself writes, and values are read with
torch's `weights_only` reader. Called by `state.load_state`, on all workers.
"""

from __future__ import annotations

import enum
import io
import os
import pathlib
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from raylane.errors import CheckpointDamagedError, CheckpointError
from raylane.training.storage import OPTIONS, Place, Url, UrlStream, os_errors

# Classes and functions in the `.metadata` of torch 2.13 (listed with pickletools), besides `torch.<dtype>`.
_METADATA_CLASSES = {
    *((dcp_metadata.__name__, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((dcp_metadata.__name__, name) for name in ("TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata")),
    (dcp_metadata.__name__, "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}
_PATHS = ("PosixPath", "PurePosixPath")  # in module `pathlib`; in Python 3.13 pickled as `pathlib._local`


def _enum_member(kind: Any, name: str) -> Any:
    """Return a member of an enumeration of the metadata: CPython before 3.11.4 pickles it as `getattr(class, name)`."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)) or name not in kind.__members__:
        raise CheckpointError(f"it asks for {name!r} of {kind!r}. It was not run; use another checkpoint")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that refuses every name not needed by DCP's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_CLASSES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return getattr(pathlib, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise CheckpointError(
            f"it names {module}.{name}, which no checkpoint of raylane contains. It was not run; use another checkpoint"
        )


class _UrlFiles(FileSystem):
    """torch's access to fsspec, with errors as OSError.

    The errors of storage libraries are of many classes. While a checkpoint is loaded, every other exception counts as
    damage, and a network failure must not make a run put a good checkpoint aside.
    """

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file; an exception while it is written removes it."""
        with os_errors(path):
            inner = super().create_stream(path, mode)
            stream = inner.__enter__()
        try:
            yield UrlStream(path, stream)
        except BaseException as error:
            inner.__exit__(type(error), error, error.__traceback__)
            raise
        with os_errors(path):  # the last part of a file is written when it is closed
            inner.__exit__(None, None, None)


class _UrlWriter(FsspecWriter):
    """torch's writer for fsspec, with errors as OSError."""

    def __init__(self, url: str) -> None:
        # Storage has a file when it is closed; the alternative is os.sync(), which waits for all disks of the machine.
        super().__init__(url, sync_files=False)
        self.fs = _UrlFiles()  # type: ignore[assignment]
        self.path = self.fs.init_path(url, **OPTIONS)


def state_writer(folder: Place) -> FileSystemWriter:
    """Return a new writer of a DCP folder at this place."""
    return _UrlWriter(str(folder)) if isinstance(folder, Url) else FileSystemWriter(folder)


class CodeFreeReader(FileSystemReader):
    """torch's reader of a DCP folder, with an unpickler of `.metadata` that cannot run code."""

    def __init__(self, path: Place) -> None:
        super().__init__(str(path))
        if isinstance(path, Url):
            self.fs = _UrlFiles()  # type: ignore[assignment]
            self.path = self.fs.init_path(str(path), **OPTIONS)
        self._folder = path
        self._metadata: Metadata | None = None
        """Metadata of the folder; None before the first read."""

    def read_metadata(self) -> Metadata:
        """Return the metadata, which is read once. There is no metadata of single ranks, which torch would ask for.

        Raises CheckpointError if the file cannot be opened or names foreign code, CheckpointDamagedError if it is not
        metadata.
        """
        # torch's `load` calls this on every rank, after `state.load_state` did: both must get the same object.
        if self._metadata is not None:
            return self._metadata
        path = self._folder / ".metadata"
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read by process {os.getpid()} on {socket.gethostname()}: {error.strerror or error}. "
                "With several nodes, checkpointing.checkpoint_dir must be on storage that they share",
                path=str(path),
            ) from error
        try:
            metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        except CheckpointError as error:
            raise CheckpointError(f"{path} is refused: {error}", path=str(path)) from error
        except Exception as error:  # unpickling arbitrary bytes can raise almost any exception
            raise CheckpointDamagedError(
                f"{path} is damaged: {error!r}. Resume from an earlier checkpoint", path=str(path)
            ) from error
        if not isinstance(metadata, Metadata):
            raise CheckpointDamagedError(f"{path} holds a {type(metadata).__name__}, not metadata", path=str(path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self._metadata = metadata
        return metadata


class FitPlanner(DefaultLoadPlanner):  # type: ignore[misc, unused-ignore]
    """torch's load planner with a comparison of names and shapes before reading, and without unpickling of objects."""

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of this worker; CheckpointError if the folder holds another model or optimizer."""
        assert self.metadata is not None
        stored, differing = self.metadata.state_dict_metadata, []
        for name, value in self.state_dict.items():
            entry = stored.get(name)
            if entry is None:
                differing.append(f"it has no {name}")
            elif isinstance(value, torch.Tensor) and isinstance(entry, TensorStorageMetadata):
                if tuple(value.shape) != tuple(entry.size):
                    differing.append(
                        f"{name} has shape {list(entry.size)} in the checkpoint and {list(value.shape)} in this run"
                    )
            elif isinstance(value, torch.Tensor) or isinstance(entry, TensorStorageMetadata):
                differing.append(f"{name} is a tensor only in the checkpoint or only in this run")
        if differing:
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise CheckpointError("; ".join(differing[:3]) + more)
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store a value that is not a tensor: a number, a text, None, or a list of such values."""
        torch.load(value, weights_only=True)  # raises if the bytes hold anything but plain values
        value.seek(0)
        super().load_bytes(read_item, value)
