"""Tokenised documents on disk, read through memory maps: written once by the driver, opened quickly by every worker.

    folder/tokens.bin      int32[sum n]    all documents, one after the other
           supervised.bin  uint8[sum n]    1 where the token has a loss
           offsets.npy     int64[N + 1]    document i is tokens[offsets[i] : offsets[i + 1]]
           origin.npy      int64[N]        conversation (counted from 0) that document i was made from

A folder is complete if it exists under its final name: it is filled beside that name and then renamed. This module
knows nothing of text. Written by `prepare.prepare`; read by `rows.RowSource` and `audit`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from raylane.errors import DataError


def write_cache(folder: Path, documents: Iterable[tuple[np.ndarray, np.ndarray, int]]) -> None:
    """Create and fill `folder` with (tokens int32 [n], supervised bool [n], origin); tokens are not kept in memory."""
    folder.mkdir(parents=True)
    ends, origins = [0], []
    with (folder / "tokens.bin").open("wb") as tokens_file, (folder / "supervised.bin").open("wb") as mask_file:
        for tokens, supervised, origin in documents:
            tokens_file.write(np.ascontiguousarray(tokens, dtype=np.int32).tobytes())
            mask_file.write(np.ascontiguousarray(supervised, dtype=np.uint8).tobytes())
            ends.append(ends[-1] + len(tokens))
            origins.append(origin)
    # int64: a large data set has more than 2**31 tokens.
    np.save(folder / "offsets.npy", np.asarray(ends, dtype=np.int64))
    np.save(folder / "origin.npy", np.asarray(origins, dtype=np.int64))


class TokenCache:
    """Open cache folder. The arrays it returns are read-only views of the mapped files.

    Attributes: `folder`; `lengths` int64 [N], tokens in each document; `origin` int64 [N].
    """

    def __init__(self, folder: str | Path) -> None:
        """Map the files of `folder`; DataError if files are missing or inconsistent."""
        self.folder = folder = Path(folder)
        try:
            # Without pickle, a manipulated file cannot run code.
            offsets, origin = (np.load(folder / name, allow_pickle=False) for name in ("offsets.npy", "origin.npy"))
            sizes = [(folder / name).stat().st_size for name in ("tokens.bin", "supervised.bin")]
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"token cache {folder} cannot be read on this machine: {error}. Delete it and run the command again"
            ) from error
        valid = offsets.dtype == np.int64 and offsets.ndim == 1 and len(offsets) > 0 and int(offsets[0]) == 0
        valid = valid and bool((np.diff(offsets) > 0).all())
        if not valid or origin.dtype != np.int64 or origin.shape != (len(offsets) - 1,):
            raise DataError(
                f"token cache {folder} is damaged: its offsets are wrong. Delete it and run the command again"
            )
        total = int(offsets[-1])
        if sizes != [4 * total, total]:
            raise DataError(
                f"token cache {folder} is damaged: {total} tokens in files of {sizes} bytes. Delete it and run the "
                "command again"
            )
        self._tokens: np.ndarray = np.empty(0, np.int32)
        self._supervised: np.ndarray = np.empty(0, np.bool_)
        if total:  # an empty file cannot be mapped
            self._tokens = np.memmap(folder / "tokens.bin", dtype=np.int32, mode="r")
            self._supervised = np.memmap(folder / "supervised.bin", dtype=np.bool_, mode="r")
        self._offsets, self.origin = offsets, origin
        self.lengths: np.ndarray = np.diff(offsets)

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"TokenCache({str(self.folder)!r}, {len(self)} documents, {self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all documents."""
        return int(self._offsets[-1])

    @property
    def num_supervised(self) -> int:
        """Number of supervised tokens in all documents; each access reads the whole mask."""
        return int(np.count_nonzero(self._supervised))

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens int32 [n], supervised bool [n]) of one document; IndexError if the index is out of range."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        part = slice(int(self._offsets[index]), int(self._offsets[index + 1]))
        return self._tokens[part], self._supervised[part]
