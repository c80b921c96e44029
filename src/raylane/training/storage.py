"""Places that files are read from and written to: local paths, and URLs of storage that fsspec can reach.

    runs/checkpoints, file:///disk/checkpoints    pathlib.Path
    s3://bucket/run, memory://run                 Url, which has the methods of Path that raylane needs

Callers use a place without asking which kind it is. How checkpoints become complete differs (storage has no rename) and
is in `publishing`. Errors of all storage libraries arrive as OSError. `memory://` is the memory of one process, which
only tests in one process can use. Called by `checkpoint`, `data` and the modules that read the configuration.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from raylane.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

OPTIONS: Mapping[str, Any] = MappingProxyType({"use_listings_cache": False})
"""Options of every fsspec file system: a cached listing would miss what other processes wrote meanwhile.

Read-only: `datasets` adds to the options that it gets.
"""

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs"}
"""Package that fsspec needs for a scheme; the first two are in the extra `s3` of raylane."""


@dataclass(frozen=True, order=True)
class Url:
    """Name of a file or folder in storage, as text without a slash at its end. Holds no connection; can be pickled."""

    text: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text.rstrip("/"))

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self.text}/{name}")

    @property
    def name(self) -> str:
        """Last part of the URL."""
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> Url:
        """URL without its last part."""
        return Url(self.text.rpartition("/")[0])

    def resolve(self) -> Url:
        """Return the URL itself, which does not depend on a working directory."""
        return self

    def is_file(self) -> bool:
        """Return True if there is such a file; OSError if storage does not answer."""
        return self._type() == "file"

    def is_dir(self) -> bool:
        """Return True if there are files below this URL; OSError if storage does not answer."""
        return self._type() == "directory"

    def exists(self) -> bool:
        """Return True if there is such a file or folder; OSError if storage does not answer."""
        return self._type() is not None

    def _type(self) -> str | None:
        # fsspec's own isfile and isdir return False for every error, so a network failure would look like a folder
        # without checkpoints, and the run would start from the beginning.
        with os_errors(self):
            try:
                return cast("str", filesystem(self).info(self.text)["type"])
            except FileNotFoundError:
                return None

    def iterdir(self) -> Iterator[Url]:
        """Yield what is directly below this URL."""
        with os_errors(self):
            names = filesystem(self).ls(self.text, detail=False)
        yield from (self / name.rstrip("/").rpartition("/")[2] for name in names)

    def sizes(self) -> dict[str, int]:
        """Return relative name -> size in bytes of all files below this URL, at any depth."""
        return {name: int(entry["size"]) for name, entry in self._files().items()}

    def versions(self) -> dict[str, str]:
        """Return relative name -> text that changes with the content: size, and hash or time if storage has them."""
        # S3 calls it ETag, and other file systems of fsspec by these names.
        keys = ("size", "ETag", "etag", "md5Hash", "mtime", "created")
        return {
            name: " ".join(str(entry[key]) for key in keys if key in entry) for name, entry in self._files().items()
        }

    def _files(self) -> dict[str, dict[str, Any]]:
        with os_errors(self):
            files = filesystem(self)
            # fsspec's names begin with the bucket, not with the protocol.
            root = str(files._strip_protocol(self.text))
            entries = cast("dict[str, Any]", files.find(self.text, detail=True))
        return {name.removeprefix(root).lstrip("/"): entry for name, entry in sorted(entries.items())}

    def read_bytes(self) -> bytes:
        """Return the content of the file."""
        with os_errors(self):
            return cast("bytes", filesystem(self).cat_file(self.text))

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the content of the file as text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes) -> None:
        """Write a file, which other processes see either whole or not at all."""
        with os_errors(self):
            filesystem(self).pipe_file(self.text, content)

    def write_text(self, content: str, encoding: str = "utf-8") -> None:
        """Write a text file."""
        self.write_bytes(content.encode(encoding))

    def open(self, mode: str = "rb", encoding: str | None = None) -> IO[Any]:
        """Open the file; with an encoding as text. Close it: a written file exists only after that."""
        with os_errors(self):
            # Always binary: libraries differ in what their text mode does.
            raw = UrlStream(self, filesystem(self).open(self.text, f"{mode[0]}b"))
        return raw if encoding is None else io.TextIOWrapper(cast("IO[bytes]", io.BufferedReader(raw)), encoding)  # type: ignore[return-value]

    def remove(self) -> None:
        """Remove the file, or the folder with all that is below it; nothing happens if there is none."""
        with os_errors(self):
            try:
                filesystem(self).rm(self.text, recursive=True)
            except FileNotFoundError:
                return


class UrlStream(io.RawIOBase):
    """Open file of a storage library, whose errors arrive as OSError."""

    def __init__(self, url: object, inner: Any) -> None:
        super().__init__()
        self._url, self._inner = url, inner

    def readable(self) -> bool:
        """Return True if the file was opened for reading."""
        return bool(self._inner.readable())

    def writable(self) -> bool:
        """Return True if the file was opened for writing."""
        return bool(self._inner.writable())

    def seekable(self) -> bool:
        """Return True if the position can be changed."""
        return bool(self._inner.seekable())

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes; all that are left if it is negative."""
        with os_errors(self._url):
            return cast("bytes", self._inner.read(size))

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; return the number of bytes read."""
        content = self.read(memoryview(buffer).nbytes)
        memoryview(buffer).cast("B")[: len(content)] = content
        return len(content)

    def write(self, content: Any) -> int:
        """Write all bytes of the content; return their number."""
        with os_errors(self._url):
            return int(self._inner.write(content))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to another position; return it."""
        with os_errors(self._url):
            return int(self._inner.seek(offset, whence))

    def tell(self) -> int:
        """Return the position."""
        return int(self._inner.tell())

    def close(self) -> None:
        """Close the file; for a written one wait until storage has all of it."""
        if not self.closed:
            with os_errors(self._url):
                self._inner.close()
        super().close()


Place: TypeAlias = Path | Url


def is_url(text: str | Place) -> bool:
    """Return True if this is a URL of storage, False if it is a local path or a file:// URL."""
    return isinstance(at(text), Url)


def at(text: str | Place) -> Place:
    """Return the place that a value of the configuration names. Does not examine whether anything is there."""
    if not isinstance(text, str):
        return text
    if text.startswith("file://"):
        return Path(unquote(urlsplit(text).path))
    return Url(text) if "://" in text else Path(text)


def require(key: str, text: str) -> None:
    """Raise ConfigError if a value of the configuration is a URL that no installed package can reach."""
    place = at(text)
    if isinstance(place, Path):
        return
    try:
        filesystem(place)
    except ConfigError as error:
        raise ConfigError(f"{key}={text} cannot be used: {error}", key=key) from error


def filesystem(url: Url) -> AbstractFileSystem:
    """Return fsspec's file system for a URL; ConfigError if the scheme is unknown or its package is missing."""
    return _filesystem(url.text.partition("://")[0])


@functools.cache
def _filesystem(scheme: str) -> AbstractFileSystem:
    package = _PACKAGES.get(scheme)
    try:
        if package is not None:  # fsspec's own message names neither the cause nor the extra
            importlib.import_module(package)
        return importlib.import_module("fsspec").filesystem(scheme, **OPTIONS)
    except ImportError as error:
        requirement = "'raylane[s3]'" if package == "s3fs" else package or "the package of this storage"
        raise ConfigError(
            f"{scheme}:// needs a package that cannot be imported ({error}); run pip install {requirement} on all nodes"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{scheme}:// is no storage that fsspec knows ({error}); use a path, file:// or s3://"
        ) from error


@contextmanager
def os_errors(place: object) -> Iterator[None]:
    """Translate the errors of storage libraries to OSError, with the name of the place.

    Each library has its own classes (botocore, aiohttp, Google's, Azure's), which no caller can list.
    """
    try:
        yield
    except (OSError, ConfigError):
        raise
    except Exception as error:
        raise OSError(f"{place}: {type(error).__name__}: {error}") from error


def download(url: Url, folder: Path) -> None:
    """Copy all files below a URL into a new local folder."""
    names = url.sizes()
    if not names:
        raise FileNotFoundError(f"there is nothing at {url}")
    for name in names:
        target = (folder / name).resolve()
        if not target.is_relative_to(folder.resolve()):
            raise OSError(f"{url} has a file whose name leads out of the folder: {name!r}")
        target.parent.mkdir(parents=True, exist_ok=True)
        with os_errors(url):
            filesystem(url).get_file(f"{url.text}/{name}", str(target))


@contextmanager
def local_copy(place: Place) -> Iterator[Path]:
    """Yield a local folder with the files at this place: the folder itself, or a copy until the end of the block."""
    if isinstance(place, Path):
        yield place
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        download(place, folder)
        yield folder


def new_draft(folder: Path) -> Path:
    """Create and return an empty folder beside `folder`; remove the drafts that ended processes of this node left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # The names of drafts have the host, because other nodes use the same process IDs.
    for other in folder.parent.glob(f"*.draft-{socket.gethostname()}-*"):
        number = other.name.rpartition("-")[0].rpartition("-")[2]
        if number.isdecimal() and not other.is_symlink() and not Path("/proc", number).exists():
            shutil.rmtree(other, ignore_errors=True)
    draft = folder.with_name(f"{folder.name}.draft-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")
    draft.mkdir()
    return draft


def write_jsonl(folder: Path, sets: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Write lines into NAME.jsonl in a folder, which is created if needed; return the number of lines by name.

    Readers see the old or the new content of a file. DataError if a file cannot be written.
    """
    counts = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, lines in sets.items():
            texts = [line + "\n" for line in lines]
            draft = folder / f"{name}.jsonl.draft"
            draft.write_text("".join(texts), encoding="utf-8")
            draft.replace(folder / f"{name}.jsonl")
            counts[name] = len(texts)
    except OSError as error:
        raise DataError(
            f"cannot write to {folder}: {error}. Choose another folder with --out", path=str(folder)
        ) from error
    return counts


@contextmanager
def filled_beside(folder: Path) -> Iterator[Path]:
    """Yield a draft of `folder`, which gets this name at the end of the block: readers never see a partial folder.

    Of two processes that fill the same folder the first one wins. After an exception the draft is removed.
    """
    draft = new_draft(folder)
    try:
        yield draft
        try:
            draft.rename(folder)
        except OSError:  # the folder exists if another process was first; its content is the same
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
