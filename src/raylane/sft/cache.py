"""Tokenised documents on disk, read by mapping: what the driver writes once and every worker opens for nothing.

    folder/tokens.bin      int32[sum n]    all documents, one after the other
           supervised.bin  uint8[sum n]    1 where the token is learned
           offsets.npy     int64[N + 1]    document i is tokens[offsets[i] : offsets[i + 1]]
           origin.npy      int64[N]        the conversation (counted from 0) that document i came from

A folder is complete when it exists under its name: it is filled beside it and renamed. Knows nothing of text.
Written by `data.prepare`; read by `data.RowSource` and `audit`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from raylane.errors import DataError

__all__ = ["TokenCache", "write_cache"]


def write_cache(folder: Path, documents: Iterable[tuple[np.ndarray, np.ndarray, int]]) -> None:
    """Fill `folder` (made here) with (tokens int32[n], supervised bool[n], origin); memory stays flat."""
    folder.mkdir(parents=True)
    ends, origins = [0], []
    with (folder / "tokens.bin").open("wb") as tokens_file, (folder / "supervised.bin").open("wb") as mask_file:
        for tokens, supervised, origin in documents:
            tokens_file.write(np.ascontiguousarray(tokens, dtype=np.int32).tobytes())
            mask_file.write(np.ascontiguousarray(supervised, dtype=np.uint8).tobytes())
            ends.append(ends[-1] + len(tokens))
            origins.append(origin)
    np.save(folder / "offsets.npy", np.asarray(ends, dtype=np.int64))
    np.save(folder / "origin.npy", np.asarray(origins, dtype=np.int64))


class TokenCache:
    """An open cache folder. Arrays that it hands out are read-only views of the mapped files.

    Attributes: `folder`; `lengths` int64[N], tokens in each document; `origin` int64[N].
    """

    def __init__(
        self, folder: Path, tokens: np.ndarray, supervised: np.ndarray, offsets: np.ndarray, origin: np.ndarray
    ) -> None:
        self.folder = folder
        self._tokens = tokens
        self._supervised = supervised
        self._offsets = offsets
        self.lengths: np.ndarray = np.diff(offsets)
        self.origin = origin

    @classmethod
    def open(cls, folder: str | Path) -> TokenCache:
        """Map the files of `folder`; DataError when they are missing or do not belong together."""
        folder = Path(folder)
        try:
            offsets, origin = (np.load(folder / name, allow_pickle=False) for name in ("offsets.npy", "origin.npy"))
            sizes = [(folder / name).stat().st_size for name in ("tokens.bin", "supervised.bin")]
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"{folder} is no token cache that this machine can read ({error}); on several nodes data.cache_dir "
                "must be on storage that they share"
            ) from error
        if not _are_offsets(offsets) or origin.dtype != np.int64 or origin.shape != (len(offsets) - 1,):
            raise DataError(f"token cache {folder} is damaged: its offsets are no offsets; delete it and run again")
        total = int(offsets[-1])
        if sizes != [4 * total, total]:
            raise DataError(
                f"token cache {folder} is damaged: {total} tokens in {sizes} bytes; delete it and run again"
            )
        tokens, supervised = np.empty(0, np.int32), np.empty(0, np.bool_)
        if total:  # an empty file cannot be mapped
            tokens = np.memmap(folder / "tokens.bin", dtype=np.int32, mode="r")
            supervised = np.memmap(folder / "supervised.bin", dtype=np.bool_, mode="r")
        return cls(folder, tokens, supervised, offsets, origin)

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"TokenCache({str(self.folder)!r}, {len(self)} documents, {self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self._offsets[-1])

    @property
    def num_supervised(self) -> int:
        """Supervised tokens of all documents; reads the whole mask once."""
        return int(np.count_nonzero(self._supervised))

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32[n], supervised bool[n]) of one document; IndexError when there is no such one."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        part = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        return self._tokens[part], self._supervised[part]


def _are_offsets(offsets: np.ndarray) -> bool:
    """True for int64 [N + 1] that begins at 0 and rises."""
    if offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) == 0 or int(offsets[0]) != 0:
        return False
    return bool((np.diff(offsets) > 0).all())
