"""Steps by which a folder of a checkpoint becomes complete, is replaced, put aside and removed.

                 local folders (Renaming)                 storage without rename (Marking)
    begin        new folder step_N.partial                nothing; step_N, or step_N.1 if a complete step_N exists
    publish      marker, fsync, rename to step_N          marker, which is the last object; remove the replaced one
    remove       rename to .partial, delete               delete the marker, then the rest
    put_aside    rename to step_N.damaged                 object DAMAGED
    export       folder beside it, renamed into it        step_N/hf, then the object HF_COMPLETE

In both a reader sees a complete checkpoint or none. Knows nothing of the content. Called by `folders`.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Protocol, TypeVar, cast

from raylane.sft.data.storage import Place, Url

P = TypeVar("P", bound=Place)

MARKER = "COMPLETE"
HF_FOLDER = "hf"
_HF_MARKER = "HF_COMPLETE"
_DAMAGED = "DAMAGED"
_NAME = re.compile(r"step_(\d+)(?:\.(\d+))?$")
"""Name of a checkpoint: its step, and in storage the number of its replacement if it has replaced another one."""

_PARTIAL = re.compile(r"(step_\d+)(?:\.old)?\.partial$")
"""Names used by `Renaming.publish`. `remove` uses another name: `recover` never restores a removed checkpoint."""


class Publishing(Protocol[P]):
    """Way in which folders of checkpoints become complete, for places of one kind. Has no state."""

    def complete(self, folder: P) -> list[P]:
        """Return the complete checkpoints in a folder, in no particular order; none if the folder does not exist."""

    def begin(self, folder: P, name: str) -> P:
        """Return an empty place to write this checkpoint to; remove what an earlier attempt left there."""

    def publish(self, partial: P, name: str) -> P:
        """Make a written checkpoint complete, in place of one with the same name; return where it is now."""

    def write(self, file: P, text: str) -> None:
        """Write a file and wait until it would survive a power cut."""

    def sizes(self, folder: P) -> dict[str, int]:
        """Return relative name -> size in bytes of all files below a folder."""

    def leftovers(self, folder: P) -> list[P]:
        """Return what killed runs have left in a folder; it is safe to `clear` them if no other run writes there."""

    def recover(self, folder: P) -> list[P]:
        """Complete replacements that were interrupted; return the checkpoints that became visible again."""

    def clear(self, place: P) -> None:
        """Remove a folder that is not a complete checkpoint; nothing happens if there is none."""

    def remove(self, place: P) -> None:
        """Remove a complete checkpoint in such an order that it never looks complete while files are missing."""

    def put_aside(self, place: P, reason: str) -> tuple[P, str]:
        """Make a damaged checkpoint invisible without removing it; return its new place and what was done."""

    def owner(self, file: P) -> int | None:
        """Return the user ID of a file's owner; None if there is none to compare with this process's user."""

    def begin_export(self, checkpoint: P) -> P:
        """Return a place for the Hugging Face folder of a complete checkpoint; nothing exists at this place."""

    def publish_export(self, checkpoint: P, partial: P) -> P:
        """Make the Hugging Face folder of a checkpoint visible, in place of an earlier one; return its place."""

    def exported(self, checkpoint: P) -> P | None:
        """Return the Hugging Face folder of a checkpoint; None if there is none."""


class Renaming(Publishing[Path]):
    """Local and network file systems: a folder gets its final name when all of it is on the disk."""

    def complete(self, folder: Path) -> list[Path]:
        """Return the folders that have the name of a checkpoint and a marker."""
        if not folder.is_dir():
            return []
        # A name alone says nothing: a copy of a checkpoint can be interrupted too.
        return [
            path
            for path in folder.iterdir()
            if (match := _NAME.match(path.name)) is not None and match[2] is None and (path / MARKER).is_file()
        ]

    def begin(self, folder: Path, name: str) -> Path:
        """Create and return step_N.partial."""
        partial = folder / f"{name}.partial"
        self.clear(partial)
        # A new folder has no files of an earlier attempt, whose shards would be read together with the new ones.
        partial.mkdir(parents=True)
        return partial.resolve()

    def publish(self, partial: Path, name: str) -> Path:
        """Add the marker and rename to step_N. A complete step_N is renamed away first: see `recover`."""
        final = partial.with_name(name)
        # Order matters: a folder with the marker must have everything else on disk already, even after a power cut.
        self.write(partial / MARKER, "")
        _sync_folder(partial)
        # A folder cannot replace another one in one rename, hence two of them.
        if final.exists():
            old = partial.with_name(f"{name}.old.partial")
            self.clear(old)
            final.rename(old)
            partial.rename(final)
            _sync_folder(final.parent)
            shutil.rmtree(old)
        else:
            partial.rename(final)
            _sync_folder(final.parent)
        return final

    def write(self, file: Path, text: str) -> None:
        """Write and fsync, so that the marker never survives a power cut alone."""
        with file.open("w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())

    def sizes(self, folder: Path) -> dict[str, int]:
        """Return the sizes of all regular files."""
        return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}

    def leftovers(self, folder: Path) -> list[Path]:
        """Return the folders that are being written or removed."""
        return [*sorted(folder.glob("step_*.partial"))] if folder.is_dir() else []

    def recover(self, folder: Path) -> list[Path]:
        """Rename step_N.partial, or else step_N.old.partial, to step_N if it is complete and there is no step_N.

        A process that ends between the two renames of `publish` leaves both, and no step_N. The newer one is restored.
        """
        recovered: list[Path] = []
        for path in self.leftovers(folder):
            match = _PARTIAL.match(path.name)
            if match is None or path.is_symlink() or not (path / MARKER).is_file():
                continue
            final = path.with_name(match[1])
            newer = path.with_name(f"{match[1]}.partial")
            # Nothing to do if step_N exists; and step_N.old.partial is used only without a complete step_N.partial.
            if final.exists() or (path != newer and (newer / MARKER).is_file()):
                continue
            path.rename(final)
            recovered.append(final)
        return recovered

    def clear(self, place: Path) -> None:
        """Remove a folder or a symbolic link of that name, never the target of a link."""
        if place.is_symlink():
            place.unlink()
        elif place.exists():
            shutil.rmtree(place)

    def remove(self, place: Path) -> None:
        """Rename to a name that `leftovers` finds, then delete."""
        doomed = place.with_name(f"{place.name}.removed.partial")
        self.clear(doomed)
        place.rename(doomed)
        shutil.rmtree(doomed)

    def put_aside(self, place: Path, reason: str) -> tuple[Path, str]:
        """Rename to step_N.damaged, or step_N.damaged1 and so on if an earlier one exists."""
        taken = {other.name for other in place.parent.iterdir()}
        names = (f"{place.name}.damaged{count or ''}" for count in range(len(taken) + 1))
        aside = place.rename(place.with_name(next(name for name in names if name not in taken)))
        return aside, f"renamed to {aside}"

    def owner(self, file: Path) -> int | None:
        """Return the owner of the file, None if there is no such file."""
        try:
            return file.stat().st_uid
        except OSError:  # `folders.read` reports a missing file
            return None

    def begin_export(self, checkpoint: Path) -> Path:
        """Return step_N.hf.partial beside the checkpoint."""
        partial = checkpoint.with_name(f"{checkpoint.name}.hf.partial").resolve()
        self.clear(partial)
        return partial

    def publish_export(self, checkpoint: Path, partial: Path) -> Path:
        """Rename to step_N/hf."""
        final = checkpoint / HF_FOLDER
        self.clear(final)
        partial.rename(final)
        _sync_folder(checkpoint)
        return final

    def exported(self, checkpoint: Path) -> Path | None:
        """Return step_N/hf if it exists."""
        return folder if (folder := checkpoint / HF_FOLDER).is_dir() else None


class Marking(Publishing[Url]):
    """Object storage: objects appear whole and are never renamed, so a last object makes the others count."""

    def complete(self, folder: Url) -> list[Url]:
        """Return the marked checkpoints, of each step only the newest replacement."""
        newest: dict[int, tuple[int, Url]] = {}
        for place in self._named(folder):
            step, attempt = _numbers(place.name)
            if not (place / MARKER).is_file() or (place / _DAMAGED).is_file():
                continue
            if step not in newest or attempt > newest[step][0]:
                newest[step] = (attempt, place)
        return [place for _, place in newest.values()]

    def _named(self, folder: Url) -> list[Url]:
        """Return all that has the name of a checkpoint, complete or not."""
        return [place for place in folder.iterdir() if _NAME.match(place.name)] if folder.is_dir() else []

    def begin(self, folder: Url, name: str) -> Url:
        """Return step_N, or step_N.1 and so on if complete or damaged ones exist; a replaced one stays until then."""
        step = _numbers(name)[0]
        same = [place for place in self._named(folder) if _numbers(place.name)[0] == step]
        published = [place for place in same if (place / MARKER).is_file() or (place / _DAMAGED).is_file()]
        attempt = max((_numbers(place.name)[1] + 1 for place in published), default=0)
        chosen = folder / (f"{name}.{attempt}" if attempt else name)
        self.clear(chosen)
        return chosen

    def publish(self, partial: Url, name: str) -> Url:
        """Write the marker, then remove the checkpoints that this one replaces."""
        self.write(partial / MARKER, "")
        for place in self.leftovers(partial.parent):
            if _numbers(place.name)[0] == _numbers(name)[0]:
                self.remove(place)
        return partial

    def write(self, file: Url, text: str) -> None:
        """Write an object; storage answers when it is safe."""
        file.write_text(text, encoding="utf-8")

    def sizes(self, folder: Url) -> dict[str, int]:
        """Return the sizes of all objects."""
        return folder.sizes()

    def leftovers(self, folder: Url) -> list[Url]:
        """Return the checkpoints without a marker and those that were replaced; damaged ones are kept."""
        whole = self.complete(folder)
        return [
            place for place in sorted(self._named(folder)) if not (place / _DAMAGED).is_file() and place not in whole
        ]

    def recover(self, folder: Url) -> list[Url]:
        """Return nothing: a replaced checkpoint is visible until the marker of the new one exists."""
        return []

    def clear(self, place: Url) -> None:
        """Remove all objects."""
        place.remove()

    def remove(self, place: Url) -> None:
        """Remove the marker before the other objects."""
        (place / MARKER).remove()
        self.clear(place)

    def put_aside(self, place: Url, reason: str) -> tuple[Url, str]:
        """Add an object that holds the reason and makes the checkpoint invisible."""
        self.write(place / _DAMAGED, reason)
        return place, f"marked by {place / _DAMAGED}"

    def owner(self, file: Url) -> int | None:
        """Return None: who may write to storage is decided by its access rules, not by users of this machine."""
        return None

    def begin_export(self, checkpoint: Url) -> Url:
        """Return step_N/hf, with its marker and content removed."""
        (checkpoint / _HF_MARKER).remove()
        self.clear(checkpoint / HF_FOLDER)
        return checkpoint / HF_FOLDER

    def publish_export(self, checkpoint: Url, partial: Url) -> Url:
        """Write the marker of the Hugging Face folder."""
        self.write(checkpoint / _HF_MARKER, "")
        return partial

    def exported(self, checkpoint: Url) -> Url | None:
        """Return step_N/hf if its marker exists."""
        return checkpoint / HF_FOLDER if (checkpoint / _HF_MARKER).is_file() else None


_RENAMING, _MARKING = Renaming(), Marking()


def publishing(place: Place) -> Publishing[Place]:
    """Return the way in which checkpoints become complete at this place."""
    return cast("Publishing[Place]", _MARKING if isinstance(place, Url) else _RENAMING)


def _numbers(name: str) -> tuple[int, int]:
    """Return step and number of the replacement of a checkpoint's name."""
    match = _NAME.match(name)
    assert match is not None, name
    return int(match[1]), int(match[2] or 0)


def _sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk, so that a power cut does not undo a rename."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
