"""Reading of the safetensors of a Hugging Face folder: the index, where there is one, decides which files count.

torch's own reader takes every `.safetensors` file of a folder. Published folders often hold more of them than belong to
the model (a consolidated copy, adapters, an older shard), and of two files with the same weight the last one would win.

    with model.safetensors.index.json      each weight from the file that the index names; other files are not opened
    without                                all files; the same weight in two of them is an error

Called by `build`, on all workers.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata

from raylane.errors import CheckpointError

INDEX = "model.safetensors.index.json"
"""Name of the index: https://huggingface.co/docs/transformers/big_models"""
_SINGLE = "model.safetensors"

_log = logging.getLogger(__name__)


class _Listing(FileSystem):
    """torch's access to local files, with a listing that holds one file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def ls(self, path: Any) -> list[str]:
        """Return the one file."""
        return [str(self._file)]


class IndexedReader(HuggingFaceStorageReader):
    """torch's reader of a Hugging Face folder, which reads each weight from the file that the index names."""

    def __init__(self, folder: Path) -> None:
        """Read the index. CheckpointError if it is damaged, or if the folder has no weights."""
        super().__init__(str(folder))
        self._folder = folder
        self._index: dict[str, str] | None = None
        """Name of each weight -> its file; None without an index."""
        self._metadata: Metadata | None = None
        path = folder / INDEX
        if not path.is_file():
            if not any(folder.glob("*.safetensors")):
                raise CheckpointError(
                    f"{folder} holds no .safetensors file, and other weight files are not read. Convert the model "
                    "first",
                    path=str(folder),
                )
            return
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            self._index = {str(name): str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error!r}. Copy or download the folder again", path=str(folder)
            ) from error
        files = self._index.values()
        outside = [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]
        if outside or not files:
            cause = "names no weights"
            if outside:
                cause = f"names {outside[0]!r}, which is no .safetensors file of the folder"
            raise CheckpointError(f"{path} {cause}. Copy or download the folder again", path=str(folder))

    def read_metadata(self) -> Metadata:
        """Return names, shapes and places of the weights, read once from the headers of the files.

        CheckpointError if the index names a file that does not exist or a weight that its file does not hold, or if two
        files hold the same weight and there is no index.
        """
        if self._metadata is None:
            self._metadata = self._read()
        return self._metadata

    def _read(self) -> Metadata:
        merged: Metadata | None = None
        origins: dict[Any, Path] = {}
        for file in self._files():
            self.fs = _Listing(file)
            try:
                of_file = super().read_metadata()
            except Exception as error:  # safetensors' own error class and, for damaged headers, others
                raise CheckpointError(
                    f"{file} cannot be read: {error}. Copy or download the folder again", path=str(self._folder)
                ) from error
            if merged is None:
                merged = Metadata(state_dict_metadata={}, storage_data={}, storage_meta=of_file.storage_meta)
            # A weight may have several parts, in files that torch's distributed writer made.
            for place, stored in of_file.storage_data.items():
                if not self._belongs(place.fqn, file):
                    continue
                if place in origins:
                    raise CheckpointError(
                        f"{self._folder} holds {place.fqn} twice, in {origins[place].name} and in {file.name}, and has "
                        f"no {INDEX} that tells which one counts. Remove the file that does not belong to the model",
                        path=str(self._folder),
                        files=[origins[place].name, file.name],
                    )
                origins[place] = file
                merged.storage_data[place] = stored
            for name, tensor in of_file.state_dict_metadata.items():
                if self._belongs(name, file):
                    _add(merged.state_dict_metadata, name, tensor)
        assert merged is not None, "`_files` returns at least one file"
        index = self._index or {}
        missing = [name for name in index if name not in merged.state_dict_metadata]
        if missing:
            raise CheckpointError(
                f"{index[missing[0]]} does not hold {missing[0]}, although {self._folder / INDEX} names it for "
                f"this weight ({len(missing)} such weights). Copy or download the folder again",
                path=str(self._folder),
            )
        return merged

    def _files(self) -> list[Path]:
        """Return the files that are opened."""
        if self._index is None:
            return sorted(self._folder.glob("*.safetensors"))
        files = [self._folder / name for name in sorted(set(self._index.values()))]
        for file in files:
            if not file.is_file():
                names = [name for name, of_name in self._index.items() if of_name == file.name]
                raise CheckpointError(
                    f"{self._folder / INDEX} names the file {file.name} for {names[0]} and {len(names) - 1} more, "
                    "and there is no such file. Copy or download the folder again",
                    path=str(self._folder),
                    files=[file.name],
                )
        if _SINGLE not in self._index.values() and (self._folder / _SINGLE).is_file():
            _log.warning(
                "%s holds %s beside %s: the weights are read from the files that the index names. Other programs may "
                "read %s instead; remove the one that is out of date",
                self._folder,
                _SINGLE,
                INDEX,
                _SINGLE,
            )
        return files

    def _belongs(self, name: str, file: Path) -> bool:
        return self._index is None or self._index.get(name) == file.name


def _add(merged: dict[str, Any], name: str, tensor: Any) -> None:
    """Add the parts of a weight that one file holds."""
    if name not in merged:
        merged[name] = tensor
        return
    before = merged[name]
    before.chunks.extend(tensor.chunks)
    before.size = type(before.size)(max(a, b) for a, b in zip(before.size, tensor.size, strict=True))
