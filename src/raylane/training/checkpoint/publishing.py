"""Steps by which a folder of a checkpoint becomes complete, is replaced, put aside and removed.

                 local folders                            storage without rename (a URL)
    begin        new folder step_N.partial                nothing; step_N, or step_N.1 if a complete step_N exists
    publish      marker, fsync, rename to step_N          marker, which is the last object; remove the replaced one
    remove       rename to .partial, delete               delete the marker, then the rest
    put_aside    rename to step_N.damaged                 object DAMAGED
    export       folder beside it, renamed into it        step_N/hf, then the object HF_COMPLETE

In local and network file systems a folder gets its final name when all of it is on the disk. In storage objects appear
whole and are never renamed, so a last object makes the others count. In both a reader sees a complete checkpoint or
none. Knows nothing of the content. Called by `folders`, `policy` and `trainer`.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from raylane.training.storage import Place, Url

MARKER = "COMPLETE"
HF_FOLDER = "hf"
_HF_MARKER = "HF_COMPLETE"
_DAMAGED = "DAMAGED"
_NAME = re.compile(r"step_(\d+)(?:\.(\d+))?$")
"""Name of a checkpoint: its step, and in storage the number of its replacement if it has replaced another one."""

_PARTIAL = re.compile(r"(step_\d+)(?:\.old)?\.partial$")
"""Names used by `publish`. `remove` uses another name: `recover` never restores a removed checkpoint."""


def complete(folder: Place) -> list[Place]:
    """Return the complete checkpoints in a folder, in no particular order; none if the folder does not exist.

    A checkpoint has the right name and a marker: a copy of a checkpoint can be interrupted too. In storage a damaged
    one has another marker, and of each step only the newest replacement counts.
    """
    newest: dict[int, tuple[int, Place]] = {}
    for place in _named(folder):
        step, attempt = _numbers(place)
        is_whole = (place / MARKER).is_file() and (isinstance(place, Path) or not (place / _DAMAGED).is_file())
        if is_whole and (step not in newest or attempt > newest[step][0]):
            newest[step] = (attempt, place)
    return [place for _, place in newest.values()]


def _named(folder: Place) -> list[Place]:
    """Return all that has the name of a checkpoint, complete or not."""
    named = [place for place in folder.iterdir() if _NAME.match(place.name)] if folder.is_dir() else []
    return [place for place in named if isinstance(place, Url) or not _numbers(place)[1]]


def _numbers(place: Place) -> tuple[int, int]:
    """Return step and number of the replacement of a checkpoint, from its name."""
    match = _NAME.match(place.name)
    assert match is not None, place
    return int(match[1]), int(match[2] or 0)


def begin(folder: Place, step: int) -> Place:
    """Return an empty place to write the checkpoint of this step to; remove what an earlier attempt left there.

    In storage a complete or damaged checkpoint of the same step stays, and the new one gets the next number.
    """
    if isinstance(folder, Path):
        partial = folder / f"step_{step}.partial"
        clear(partial)
        # A new folder has no files of an earlier attempt, whose shards would be read together with the new ones.
        partial.mkdir(parents=True)
        return partial.resolve()
    attempts = [
        _numbers(place)[1] + 1
        for place in _named(folder)
        if _numbers(place)[0] == step and ((place / MARKER).is_file() or (place / _DAMAGED).is_file())
    ]
    chosen = folder / (f"step_{step}.{max(attempts)}" if attempts else f"step_{step}")
    clear(chosen)
    return chosen


def publish(partial: Place, step: int) -> Place:
    """Make a written checkpoint complete, in place of one of the same step; return where it is now."""
    # Order matters: a folder with the marker must have everything else on disk already, even after a power cut.
    write(partial / MARKER, "")
    if isinstance(partial, Url):
        for place in leftovers(partial.parent):
            if _numbers(place)[0] == step:
                remove(place)
        return partial
    _sync_folder(partial)
    final = partial.with_name(f"step_{step}")
    old = partial.with_name(f"{final.name}.old.partial") if final.exists() else None
    # A folder cannot replace another one in one rename, hence two of them: see `recover`.
    if old is not None:
        clear(old)
        final.rename(old)
    partial.rename(final)
    _sync_folder(final.parent)
    if old is not None:
        shutil.rmtree(old)
    return final


def write(file: Place, text: str) -> None:
    """Write a file and wait until it would survive a power cut; storage answers when it is safe."""
    if isinstance(file, Url):
        file.write_text(text, encoding="utf-8")
        return
    with file.open("w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def _sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk, so that a power cut does not undo a rename."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def sizes(folder: Place) -> dict[str, int]:
    """Return relative name -> size in bytes of all files below a folder."""
    if isinstance(folder, Url):
        return folder.sizes()
    return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def leftovers(folder: Place) -> list[Place]:
    """Return what killed runs have left in a folder; it is safe to `clear` them if no other run writes there.

    In storage: the checkpoints without a marker and those that were replaced; damaged ones are kept.
    """
    if isinstance(folder, Path):
        return [*sorted(folder.glob("step_*.partial"))] if folder.is_dir() else []
    whole = complete(folder)
    named = sorted(_named(folder), key=str)
    return [place for place in named if not (place / _DAMAGED).is_file() and place not in whole]


def discard_partial(folder: Place) -> list[Place]:
    """Remove the leftovers of killed runs and return their paths. No other run may write to the folder meanwhile."""
    removed = leftovers(folder)
    for path in removed:
        clear(path)
    return removed


def recover(folder: Place) -> list[Place]:
    """Complete the replacements of checkpoints that were interrupted; return the paths that are visible again.

    A process that ends between the two renames of `publish` leaves step_N.partial and step_N.old.partial, and no
    step_N. The newer one is restored. In storage a replaced checkpoint is visible until the marker of the new one
    exists. Call this before `folders.find` and `discard_partial`, and never while another run writes to the folder.
    """
    recovered: list[Place] = []
    for path in leftovers(folder) if isinstance(folder, Path) else ():
        match = _PARTIAL.match(path.name)
        if not isinstance(path, Path) or match is None or path.is_symlink() or not (path / MARKER).is_file():
            continue
        final, newer = path.with_name(match[1]), path.with_name(f"{match[1]}.partial")
        # Nothing to do if step_N exists; and step_N.old.partial is used only without a complete step_N.partial.
        if not final.exists() and (path == newer or not (newer / MARKER).is_file()):
            recovered.append(path.rename(final))
    return recovered


def clear(place: Place) -> None:
    """Remove a folder that is not a complete checkpoint, or a link of that name but never its target.

    Nothing happens if there is none.
    """
    if isinstance(place, Url):
        place.remove()
    elif place.is_symlink():
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)


def discard(place: Place) -> None:
    """Remove what was written to a place of `begin` or `begin_export`; a failure to remove it is ignored."""
    # Frees the space if the disk is full; otherwise `discard_partial` does it at the next start.
    with suppress(OSError):
        clear(place)


def remove(checkpoint: Place) -> None:
    """Delete a complete checkpoint in such an order that it never looks complete while files are missing."""
    if isinstance(checkpoint, Url):
        (checkpoint / MARKER).remove()
        doomed: Place = checkpoint
    else:
        doomed = checkpoint.with_name(f"{checkpoint.name}.removed.partial")  # a name that `leftovers` finds
        clear(doomed)
        checkpoint.rename(doomed)
    clear(doomed)


def put_aside(place: Place, reason: str) -> tuple[Place, str]:
    """Make a damaged checkpoint invisible without removing it; return its new place and what was done.

    A local one is renamed to step_N.damaged, or step_N.damaged1 and so on if an earlier one exists.
    """
    if isinstance(place, Url):
        write(place / _DAMAGED, reason)
        return place, f"marked by {place / _DAMAGED}"
    taken = {other.name for other in place.parent.iterdir()}
    names = (f"{place.name}.damaged{count or ''}" for count in range(len(taken) + 1))
    aside = place.rename(place.with_name(next(name for name in names if name not in taken)))
    return aside, f"renamed to {aside}"


def owner(file: Place) -> int | None:
    """Return the user ID of a file's owner, None if there is no such file; `folders.read` reports that.

    None also in storage: who may write there is decided by its access rules, not by users of this machine.
    """
    try:
        return file.stat().st_uid if isinstance(file, Path) else None
    except OSError:
        return None


def begin_export(checkpoint: Place) -> Place:
    """Return a place for the Hugging Face folder of a complete checkpoint; nothing exists at this place."""
    if isinstance(checkpoint, Url):
        (checkpoint / _HF_MARKER).remove()
        partial: Place = checkpoint / HF_FOLDER
    else:
        partial = checkpoint.with_name(f"{checkpoint.name}.hf.partial").resolve()
    clear(partial)
    return partial


def publish_export(checkpoint: Place, partial: Place) -> Place:
    """Make a finished Hugging Face folder part of its checkpoint, replacing an earlier one; return its path."""
    if isinstance(checkpoint, Url):
        write(checkpoint / _HF_MARKER, "")
        return partial
    final = checkpoint / HF_FOLDER
    clear(final)
    Path(str(partial)).rename(final)
    _sync_folder(checkpoint)
    return final


def exported(checkpoint: Place) -> Place | None:
    """Return the Hugging Face folder of a checkpoint, None if there is none."""
    folder = checkpoint / HF_FOLDER
    is_there = (checkpoint / _HF_MARKER).is_file() if isinstance(checkpoint, Url) else folder.is_dir()
    return folder if is_there else None
