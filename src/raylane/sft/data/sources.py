"""Rows of data files, folders and data sets of the hub, read by Hugging Face `datasets`.

    JSON Lines, JSON arrays       lines of text: parsed and checked row by row in `messages`
    plain text                    a row for each line
    CSV, Parquet, Arrow           columns as `datasets` reads them
    folder of `save_to_disk`, folder of files, name on the hub     the same, one split of it

Files may be compressed (gzip, Zstandard, bzip2, xz), may be a glob, and may lie in storage that fsspec reaches. The
kind of a file follows from its first bytes, then from its name. Called by `prepare`; knows nothing of conversations.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from raylane.errors import DataError
from raylane.sft.config.schema import DataSource
from raylane.sft.data.places import FilePlace
from raylane.training import storage
from raylane.training.storage import Place, Url
from raylane.training.text.messages import refuse_deep, without_repeats

if TYPE_CHECKING:
    from datasets import Dataset

HEAD_BYTES = 4096
HUB_TIMEOUT_S = 5.0
"""Seconds after which the hub counts as out of reach."""
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""Name of a data set on the hub."""
_GLOB = re.compile(r"[*?\[]")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ": "xz"}
"""First bytes of compressed files, and fsspec's name of the compression."""

_COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")


class FileKind(NamedTuple):
    """How `datasets` reads one kind of file."""

    name: str
    """As users see it."""
    builder: str
    options: dict[str, Any]
    is_json: bool = False
    """True if rows are the text of JSON, in the column `text`."""
    is_array: bool = False
    """True if the only row is the text of a list of all rows."""


_TEXT_OPTIONS = {"encoding": "utf-8-sig"}
LINES = FileKind("JSON Lines", "text", _TEXT_OPTIONS, is_json=True)
ARRAY = FileKind("JSON array", "text", {**_TEXT_OPTIONS, "sample_by": "document"}, is_json=True, is_array=True)
TEXT = FileKind("plain text", "text", _TEXT_OPTIONS)
# `NA` is a text, and no missing value.
_CSV_OPTIONS = {**_TEXT_OPTIONS, "keep_default_na": False}
CSV = FileKind("CSV", "csv", {**_CSV_OPTIONS, "sep": ","})
TSV = FileKind("TSV", "csv", {**_CSV_OPTIONS, "sep": "\t"})
PARQUET = FileKind("Parquet", "parquet", {})
ARROW = FileKind("Arrow", "arrow", {})
DATA_SET = FileKind("data set", "", {})
"""Folder, or data set of the hub, whose files `datasets` finds itself."""
_BY_HEAD = {b"PAR1": PARQUET, b"ARROW1": ARROW, b"\xff\xff\xff\xff": ARROW}
_BY_SUFFIX = {".csv": CSV, ".tsv": TSV, ".txt": TEXT, ".parquet": PARQUET, ".arrow": ARROW}
_DATA_SUFFIXES = {".json", ".jsonl", *_BY_SUFFIX, *_COMPRESSED_SUFFIXES}
_REFUSED_HEADS = {b"PK\x03\x04": ("a zip archive", "Unpack it"), b"\x89HDF": ("an HDF5 file", "Convert it to Parquet")}


@dataclass(frozen=True)
class RowTable:
    """Rows of one source."""

    rows: Dataset
    kind: FileKind
    places: tuple[FilePlace, ...]


def kind_of(name: str, head: bytes) -> FileKind:
    """Return the kind of a file from its name and its first bytes, which are not compressed; DataError if none."""
    for start, (what, remedy) in _REFUSED_HEADS.items():
        if head.startswith(start):
            raise DataError(f"{name} is {what}, which raylane does not read. {remedy}", path=name)
    for start, kind in _BY_HEAD.items():
        if head.startswith(start):
            return kind
    suffixes = [suffix for suffix in Path(name.lower()).suffixes if suffix not in _COMPRESSED_SUFFIXES]
    if suffixes and suffixes[-1] in _BY_SUFFIX:
        return _BY_SUFFIX[suffixes[-1]]
    return ARRAY if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[") else LINES


def files_of(source: DataSource) -> list[Place]:
    """Return the files of a source; none if it is a folder or a name on the hub.

    DataError if it is a glob without files, or no file, folder or name.
    """
    place = storage.at(source.path)
    try:
        if isinstance(place, Path) and (place.is_dir() or place.exists()):
            return [] if place.is_dir() else [place]
        if _GLOB.search(source.path):
            if isinstance(place, Url):
                files = storage.filesystem(place)
                with storage.os_errors(place):
                    names = [str(files.unstrip_protocol(name)) for name in files.glob(place.text)]
            else:
                names = [name for name in glob.glob(str(place), recursive=True) if not os.path.isdir(name)]
            if not names:
                raise DataError(f"no file matches {place}. Check data.train and data.validation", path=str(place))
            return [storage.at(name) for name in sorted(names)]
        if isinstance(place, Url):
            return [place]
    except OSError as error:
        raise _unreadable(source.path, error) from error
    # A name on the hub looks like a relative path, and has no suffix of data.
    if not _NAME.fullmatch(source.path) or Path(source.path).suffix in _DATA_SUFFIXES:
        raise DataError(
            f"cannot read data file {source.path}: No such file or folder. Check data.train and data.validation",
            path=source.path,
        )
    return []


def digest(sources: Iterable[DataSource]) -> str:
    """Return a hash of the contents of sources, in this order; DataError if one cannot be read."""
    whole = hashlib.sha256()
    for source in sources:
        place = storage.at(source.path)
        files: Iterable[Place] = files_of(source)
        if not files and isinstance(place, Path) and place.is_dir():
            # Of all splits: which one is read follows from other keys, and from the names of the files.
            files = [file for split in folder_files(source).values() for file in split]
            whole.update(f"{source.subset} {source.split} {[str(file) for file in files]}".encode())
        elif not files:
            with _reading(source.path):
                from datasets import load_dataset_builder

                _require_hub(source.path)
                builder = load_dataset_builder(source.path, source.subset)
                # Both change with the revision on the hub.
                whole.update(f"{builder.cache_dir} {builder.config.data_files} {source.split}".encode())
        for file in files:
            whole.update(file_digest(file))
            whole.update(Path(str(file)).suffix.encode())  # CSV and plain text are told by their names
    return whole.hexdigest()


def folder_files(source: DataSource) -> dict[str, list[Place]]:
    """Return the files of each split of a folder; those of a folder of `save_to_disk` under one name."""
    folder = Path(source.path)
    if _is_saved(folder):
        return {"": sorted(path for path in folder.rglob("*") if path.is_file())}
    with _reading(source.path):
        from datasets import load_dataset_builder

        builder = load_dataset_builder(source.path, source.subset)
        return {
            str(split): [storage.at(str(file)) for file in files]
            for split, files in (builder.config.data_files or {}).items()
        }


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def file_digest(file: Place) -> bytes:
    """Return a hash of the content of a file; DataError if it cannot be read."""
    try:
        if not file.is_file() and not file.is_dir() and file.exists():
            raise DataError(
                f"data file {file} is a pipe or device, and raylane reads data more than once. Write it to a file"
            )
        with file.open("rb") as opened:
            return hashlib.file_digest(cast("Any", opened), "sha256").digest()
    except OSError as error:
        raise _unreadable(file, error) from error


def no_conversation(name: str) -> DataError:
    """Return the error of a file without rows."""
    return DataError(f"data file {name} holds no conversation. Give it at least one row", path=name)


def _unreadable(path: object, error: object) -> DataError:
    reason = str(getattr(error, "strerror", None) or error).strip().rstrip(".")
    return DataError(f"cannot read data file {path}: {reason}. Check data.train and data.validation", path=str(path))


_NO_ROWS = ("corresponds to no data", "No columns to parse", "BatchSize must be greater than 0")
"""Parts of the messages of `datasets` and pandas for files without rows."""


class _reading:
    """Errors of reading as DataError with the path."""

    def __init__(self, path: object) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, DataError) or not isinstance(error, Exception):
            return
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if any(text in str(cause) for text in _NO_ROWS):
            raise no_conversation(str(self._path)) from error
        if isinstance(cause, UnicodeDecodeError):
            raise DataError(f"{self._path}: not UTF-8 ({cause}); convert the file", path=str(self._path)) from error
        raise _unreadable(self._path, cause) from error


def tables(sources: Sequence[DataSource], default_split: str, folder: Path) -> Iterator[RowTable]:
    """Yield the rows of each source; `folder` gets what `datasets` writes. DataError if one cannot be read."""
    first = 0
    for source in sources:
        files, split = files_of(source), source.split or default_split
        if files and (source.split or source.subset):
            raise DataError(
                f"{source.path} is a file, and has no split or subset. Remove split and subset", path=source.path
            )
        if not files and Path(source.path).is_dir() and not _is_saved(Path(source.path)):
            # As single files: their rows have places then, and are read in the same way.
            files = _of_split(folder_files(source), source, split)
        if files:
            table = _file_table(files, first, folder)
        else:
            with _reading(source.path):
                rows = _set_rows(source, split)
            table = RowTable(rows, DATA_SET, (FilePlace(source.path, first, False),))
        first += len(table.rows)
        yield table


def _file_table(files: Sequence[Place], first: int, folder: Path) -> RowTable:
    """Return the rows of files of one kind."""
    from datasets import concatenate_datasets

    places, parts = [], []
    kinds = [_kind_at(file) for file in files]
    kind = kinds[0]
    for file, kind_of_file in zip(files, kinds, strict=True):
        if kind_of_file != kind:
            raise DataError(
                f"{files[0]} and {file} are of two kinds, {kind.name} and {kind_of_file.name}. List them one by one in "
                "data.train",
                path=str(file),
            )
        with _reading(file):
            rows = _file_rows(file, kind, folder)
        places.append(FilePlace(str(file), first, kind is LINES or kind is TEXT))
        first += len(rows)
        parts.append(rows)
    if len(parts) == 1:
        return RowTable(parts[0], kind, tuple(places))
    with _reading(f"{files[0]} and {len(files) - 1} more"):
        return RowTable(concatenate_datasets(parts), kind, tuple(places))


def _kind_at(file: Place) -> FileKind:
    with _reading(file), _decompressed(file) as stream:
        head = stream.read(HEAD_BYTES)
    if not head:
        raise no_conversation(str(file))
    return kind_of(str(file), head)


@contextlib.contextmanager
def _decompressed(file: Place) -> Iterator[Any]:
    """Open a file for reading, through the decompressor that its first bytes ask for."""
    from fsspec.compression import compr

    with file.open("rb") as opened:
        head = opened.read(max(map(len, _COMPRESSED)))
        opened.seek(0)
        codec = next((codec for start, codec in _COMPRESSED.items() if head.startswith(start)), None)
        yield opened if codec is None else compr[codec](opened, mode="rb")


def _file_rows(file: Place, kind: FileKind, folder: Path) -> Dataset:
    from datasets import Features, Value, load_dataset

    # Local names may have the characters of globs.
    name = str(file) if isinstance(file, Url) else glob.escape(str(file.absolute()))
    options = dict(kind.options)
    if kind.builder == "text":
        options["features"] = Features({"text": Value("string")})  # of a file of empty lines too
    if kind.builder == "csv":
        names = _csv_columns(file, options["sep"])
        # All cells are text: a column of numbers would be no answer.
        options |= {"names": names, "header": 0, "features": Features(dict.fromkeys(names, Value("string")))}
    if isinstance(file, Url):
        options["storage_options"] = dict(storage.OPTIONS)
    rows = load_dataset(kind.builder, data_files=[name], split="train", cache_dir=str(folder), **options)
    return _items(rows, file) if kind.is_array else rows


def _csv_columns(file: Place, separator: str) -> list[str]:
    """Return the names of the columns; DataError if the first row has more cells, of which pandas makes an index."""
    import pandas

    options = {"sep": separator, "encoding": "utf-8-sig", "dtype": str, "keep_default_na": False}
    with _decompressed(file) as stream:
        # Without a header, more cells in a row than in the one before are an error.
        names = pandas.read_csv(stream, header=None, nrows=2, **options).iloc[0].tolist()
    if len({*names}) < len(names):
        raise DataError(f"{file}: two columns have one name: {names}. Give each a name of its own", path=str(file))
    return [name or f"column {number}" for number, name in enumerate(names, 1)]


def _items(rows: Dataset, file: Place) -> Dataset:
    """Return the items of a JSON array as one text each."""
    (document,) = rows["text"] or ["[]"]
    try:
        items = json.loads(document, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file}: not JSON ({error}); a file that begins with [ must be one list", path=str(file)
        ) from error
    refuse_deep(items, str(file))
    from datasets import Dataset as Rows

    return Rows.from_dict({"text": [json.dumps(item) for item in items]})


T = TypeVar("T")


def _of_split(stored: Mapping[str, T], source: DataSource, split: str) -> T:
    if split not in stored:
        raise DataError(
            f"{source.path} has no split {split!r}, but {sorted(stored)}. Write {{path: {source.path}, split: ...}}",
            path=source.path,
        )
    return stored[split]


def _set_rows(source: DataSource, split: str) -> Dataset:
    """Return one split of a folder of `save_to_disk` or of a data set of the hub."""
    from datasets import Dataset as Rows
    from datasets import load_dataset, load_from_disk

    if _is_saved(Path(source.path)):
        stored = load_from_disk(source.path)
    else:
        _require_hub(source.path)
        stored = load_dataset(source.path, source.subset)
    if not isinstance(stored, Rows):
        return cast("Rows", _of_split(stored, source, split))
    if source.split is not None:
        raise DataError(f"{source.path} is one data set without splits. Remove split={split!r}", path=source.path)
    return stored


def _require_hub(name: str) -> None:
    """Raise DataError if the hub does not answer: the library would try again for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return  # the library looks into its cache only
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception as error:
        raise DataError(
            f"there is no file or folder {name}, and {constants.ENDPOINT} does not answer: {error}. Check the path; or "
            "download the data set; or set HF_HUB_OFFLINE=1 if it is in the cache of this machine",
            path=name,
        ) from error
