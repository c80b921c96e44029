"""Translation of NeMo-RL's data sections (`data.train`, `data.validation`, `data.default`) to keys of raylane's `data`.

NeMo-RL names a data set, which it downloads, or a file with `dataset_name: ResponseDataset` (one question and one
answer per line) or `openai_format` (messages). raylane reads local JSONL files only. Configurations of 2025 have the
same keys in `data` itself. Pure functions; called by `translate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_PAIRS = ("ResponseDataset",)
_MESSAGES = ("openai_format", "OpenAIFormatDataset")
_WITHOUT_EFFECT = {
    "split": "a file is read as a whole",
    "subset": "a file is read as a whole",
    "seed": "the choice depends on a hash of each conversation",
    "processor": "there is one",
    "tool_key": "the key is tools",
    "use_preserving_dataset": "every line keeps its own keys",
    "env_name": "only reinforcement learning uses it",
    "download_dir": "nothing is downloaded",
}
"""Keys of one data set that have no effect -> reason. Other keys are refused unless they are empty."""
_OLD: tuple[str, ...] = (
    "dataset_name",
    "chat_key",
    "input_key",
    "output_key",
    "prompt_file",
    "system_prompt_file",
    "system_prompt",
    "system_key",
    "tool_key",
    "use_preserving_dataset",
    "split",
)
"""Keys of a data set that configurations of 2025 have in `data` itself."""
_OLD_FILES = {"train": "train_data_path", "validation": "val_data_path"}


@dataclass
class DataTranslation:
    """Keys of `data` in raylane, keys left out or replaced with the reason, and what cannot be translated."""

    keys: dict[str, Any] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    """As (key of raylane that must be set, reason)."""


def translate_data(section: Mapping[str, Any]) -> DataTranslation:
    """Return the translation of the section `data`; keys that are the same in raylane are kept as they are."""
    translation = DataTranslation()
    data = dict(section)
    # The keys of 2025 move from `data` to `data.train` and `data.validation`.
    old_paths = {name: data.pop(old) for name, old in _OLD_FILES.items() if old in data}
    if old_paths or "dataset_name" in data:
        shared = {key: data.pop(key) for key in _OLD if key in data}
        # A data set by name has its own validation part; files are named one by one.
        for name in ("train", "validation") if "dataset_name" in shared and not old_paths else old_paths:
            path = {"data_path": old_paths[name]} if name in old_paths else {}
            data.setdefault(name, {**shared, **path})
        translation.notes.append(("data.dataset_name", "replaced by data.train and data.validation"))
    default = data.pop("default", None) or {}
    if default:
        translation.notes.append(("data.default", "its values are used for data.train and data.validation"))
    for name in ("train", "validation"):
        sets = data.get(name)
        if isinstance(sets, Mapping):
            sets = [sets]
        # A file name, or a list of names and of {path, weight}, is raylane's own form and stays as it is.
        if not isinstance(sets, list) or not all(
            isinstance(data_set, Mapping) and "path" not in data_set for data_set in sets
        ):
            continue
        del data[name]
        paths = [path for data_set in sets for path in _one_set({**default, **data_set}, name, translation)]
        # raylane has one validation file; training data may be spread over several.
        if name == "validation" and len(paths) > 1:
            translation.problems.append(("data.validation", f"several files ({', '.join(paths)}): join them into one"))
        elif len(paths) == len(sets) and paths:
            _set(translation, name, paths[0] if len(paths) == 1 else paths)
            translation.notes.append((f"data.{name}", "the section is replaced by its data_path"))
    for key, value in data.items():
        translation.keys[key] = value  # the user's own keys win over translated ones
    return translation


def _one_set(data_set: dict[str, Any], name: str, translation: DataTranslation) -> Iterator[str]:
    """Yield the path of one data set if raylane can read it; record keys and problems in `translation`."""
    where = f"data.{name}"
    kind, path = data_set.pop("dataset_name", None), data_set.pop("data_path", None)
    question, answer, chat = (
        data_set.pop("input_key", None),
        data_set.pop("output_key", None),
        data_set.pop("chat_key", None),
    )
    # The size of the validation set that is held out from the training data.
    size = data_set.pop("split_validation_size", 0)
    if size and name == "train":
        # NeMo-RL passes the value to train_test_split, for which 1 and above is a number of rows.
        if isinstance(size, int | float) and 0 < size < 1:
            _set(translation, "validation_fraction", size)
            translation.notes.append((f"{where}.split_validation_size", "replaced by data.validation_fraction"))
        else:
            reason = f"{where}.split_validation_size={size} is no fraction: it must be less than 1"
            translation.problems.append(("data.validation_fraction", reason))
    for key, value in data_set.items():
        if key in _WITHOUT_EFFECT and not (key == "tool_key" and value not in (None, "tools")):
            translation.notes.append((f"{where}.{key}", _WITHOUT_EFFECT[key]))
        elif value:  # an unknown key that requests something; null and empty text request nothing
            translation.problems.append(
                (where, f"{where}.{key}={value!r} is not supported; put its effect into the data")
            )
        else:
            translation.notes.append((f"{where}.{key}", "empty"))
    if kind is not None and kind not in (*_PAIRS, *_MESSAGES):
        reason = (
            f"{where}.dataset_name={kind!r} is a data set that NeMo-RL downloads, and raylane reads local files. Write "
            f"it as JSONL, and set {where} to its path (with data.messages_key, or data.input_key and data.output_key)"
        )
        translation.problems.append((where, reason))
    elif not isinstance(path, str):
        translation.problems.append((where, f"{where}.data_path is not set; set {where} to the path of a JSONL file"))
    else:
        # NeMo-RL's defaults of input_key and output_key (response_dataset.py).
        if kind in _PAIRS or (kind is None and (question or answer)):
            _set(translation, "input_key", question or "input")
            _set(translation, "output_key", answer or "output")
        elif chat:
            _set(translation, "messages_key", chat)
        yield path


def _set(translation: DataTranslation, key: str, value: Any) -> None:
    """Set a key of `data`, unless another data set needs another value of it."""
    if translation.keys.setdefault(key, value) != value:
        translation.problems.append(
            (
                f"data.{key}",
                f"data sets with {key}={translation.keys[key]!r} and {value!r}: all files must have the same",
            )
        )
