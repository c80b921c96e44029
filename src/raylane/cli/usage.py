"""Remedies for words of a command line that name nothing. Pure but for a look at the files that are named.

Called by the commands before they read what their words name.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable
from pathlib import Path

_DATA = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
_PACKED = (".gz", ".zst", ".xz", ".bz2")


def meant(words: Iterable[str], known: Iterable[str]) -> str:
    """Return "Did you mean ...? " with the known word that is nearest to one of `words`; an empty text if none is."""
    names = list(known)
    near = [name for word in words for name in difflib.get_close_matches(word, names, n=1)]
    return f"Did you mean {near[0]}? " if near else ""


def config_problem(command: str, path: str) -> str | None:
    """Return why a word cannot be the configuration of a command, with the remedy; None if it may be one."""
    file, takes_model = Path(path), command != "grpo"
    form = f"raylane {command} CONFIG" + f" or raylane {command} MODEL DATA..." * takes_model
    suffixes = [suffix for suffix in file.suffixes if suffix not in _PACKED]
    if suffixes and suffixes[-1] in _DATA:
        way = f"name the model before it (raylane {command} MODEL {path}), or " if takes_model else ""
        return f"{path} is data, not a configuration: {way}name a YAML file that has it as data.train"
    if file.is_dir():
        reason = "no model, because it has no config.json" if takes_model else "a folder"
        return f"{path} is {reason}, and no YAML file. Use {form}"
    if not file.exists():
        siblings = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
        near = difflib.get_close_matches(file.name, siblings, n=1)
        hint = f"Did you mean {file.parent / near[0]}?" if near else f"Use {form}"
        return f"there is no {'file or model folder' if takes_model else 'file'} {path}. {hint}"
    return None


def other_command(command: str, path: str, document: Container[str]) -> str | None:
    """Return the remedy for a file whose sections are those of another kind of training; None if they fit."""
    kind, other = ("grpo", "sft") if command == "grpo" else ("sft", "grpo")
    if other not in document or kind in document:
        return None
    if other == "sft":
        return f"{path} has a section sft and no section grpo: it is for fine-tuning. Use raylane sft {path}"
    return (
        f"{path} has a section grpo: raylane {command} is for fine-tuning. Use raylane grpo {path}, which prints the "
        "plan of the run before it begins"
    )
