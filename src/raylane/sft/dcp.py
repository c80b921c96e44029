"""Reading of torch DCP folders without running code from them, and telling apart what does not fit and what is damaged.

torch's own reader unpickles `.metadata` and every value that is no tensor, so a prepared folder could run any program
in the workers. Here `.metadata` may name only the classes that DCP itself writes, and values are read with torch's
`weights_only` reader. Called by `state.load_state`, on all workers.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import socket
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from raylane.errors import CheckpointDamagedError, CheckpointError

__all__ = ["CodeFreeReader", "FitPlanner"]

# What `.metadata` of torch 2.13 names (read with pickletools), besides `torch.<dtype>`.
_METADATA_CLASSES = {
    *((dcp_metadata.__name__, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((dcp_metadata.__name__, name) for name in ("TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata")),
    (dcp_metadata.__name__, "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}
_PATHS = ("PosixPath", "PurePosixPath")  # of `pathlib`, or of `pathlib._local` in Python 3.13


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that refuses every name which DCP's metadata does not need."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_CLASSES:
            return super().find_class(module, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return getattr(pathlib, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise CheckpointError(f"it names {module}.{name}, which a checkpoint of raylane does not; it was not run")


class CodeFreeReader(FileSystemReader):
    """torch's reader of a DCP folder, with a `.metadata` that cannot run code."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None
        """None before it was read."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, read once.

        CheckpointError: the file cannot be opened, or names foreign code. CheckpointDamagedError: it is no metadata.
        """
        if self._metadata is None:
            self._metadata = self._read()
        return self._metadata

    def _read(self) -> Metadata:
        path = pathlib.Path(self.path) / ".metadata"
        try:
            file = path.open("rb")
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read by process {os.getpid()} on {socket.gethostname()}: {error.strerror}. On "
                "several nodes checkpointing.checkpoint_dir must be on storage that they share",
                path=str(path),
            ) from error
        with file:
            try:
                found = _MetadataUnpickler(file).load()
            except CheckpointError as error:
                raise CheckpointError(f"{path} is refused: {error}", path=str(path)) from error
            except Exception as error:  # bytes that are no pickle make it raise nearly anything
                raise CheckpointDamagedError(
                    f"{path} is damaged: {error!r}. Resume from an earlier checkpoint", path=str(path)
                ) from error
        if not isinstance(found, Metadata):
            raise CheckpointDamagedError(f"{path} holds a {type(found).__name__}, not metadata", path=str(path))
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class FitPlanner(DefaultLoadPlanner):  # type: ignore[misc, unused-ignore]
    """torch's planner of a load, which compares names and shapes before anything is read and unpickles no objects."""

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of this worker. CheckpointError when the folder holds another model or optimizer."""
        assert self.metadata is not None
        differing = list(_differences(self.state_dict, self.metadata))
        if differing:
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise CheckpointError("; ".join(differing[:3]) + more)
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep a value that is no tensor: numbers, text, None and lists of them."""
        torch.load(value, weights_only=True)  # raises where the bytes name anything that is no plain value
        value.seek(0)
        super().load_bytes(read_item, value)


def _differences(wanted: dict[str, Any], metadata: Metadata) -> Iterator[str]:
    """Yield what differs between the flat state of this run (name -> tensor or value) and a checkpoint."""
    stored = metadata.state_dict_metadata
    for name, value in wanted.items():
        if name not in stored:
            yield f"it has no {name}"
            continue
        there = stored[name]
        if isinstance(value, torch.Tensor) and isinstance(there, TensorStorageMetadata):
            if tuple(value.shape) != tuple(there.size):
                yield f"{name} has shape {list(there.size)} there and {list(value.shape)} here"
        elif isinstance(value, torch.Tensor) or isinstance(there, TensorStorageMetadata):
            yield f"{name} is a tensor on one side only"
