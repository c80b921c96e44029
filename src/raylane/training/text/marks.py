"""Marks of messages and rows that say whether an answer is learned: one table of their names and values. Pure.

Programs that train on conversations have many names for the same mark. A mark is honoured, or the row is refused by the
name of the mark; none is ignored, because an answer that somebody excluded would be learned.

    weight, train, loss, ...        0 or false: context only; 1 or true: learned (OpenAI, axolotl, ms-swift, slime)
    train_detail, training_detail   parts of a text (axolotl): refused
    mask, masked                    refused at messages, because programs mean opposite things by it

A row has marks too: what says that all answers are learned changes nothing, and all else is refused. Called by
`messages` and `formats`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raylane.errors import DataError

_SWITCHES = (
    *("weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight", "loss_scale"),
    *("compute_loss", "learn", "supervised"),
)
"""Marks of one message: 0 or false makes it context."""
_PARTS = ("train_detail", "training_detail")
"""Marks of parts of a text."""
_AMBIGUOUS = ("mask", "masked")
MARKS = frozenset((*_SWITCHES, *_PARTS, *_AMBIGUOUS))
"""Names of all marks."""
_USUAL_MASK = "user"
"""Value of `mask` at a row in data of NeMo: the messages of the user are not learned, as always."""


def is_learned(message: Mapping[str, Any], where: str) -> bool | None:
    """Return what the marks of a message say; None without marks. DataError for marks that cannot be honoured."""
    said: dict[str, bool] = {}
    for key in MARKS & message.keys():
        value = message[key]
        # Tables have a null where another row has a mark, and an empty list where it has parts.
        if value is None or (key in _PARTS and not value):
            continue
        if key in _PARTS:
            raise DataError(
                f"{where}: {key!r} says which parts of a text are learned, and raylane learns a message as a whole or "
                f"not at all. Write weight: 0 for context only, or remove {key!r}",
                key=key,
            )
        if key in _AMBIGUOUS:
            raise DataError(
                f"{where}: {key!r}={value!r} means in some programs that a message is learned, and in others that it "
                "is not. Write weight: 0 for context only, 1 for learned",
                key=key,
            )
        if value not in (0, 1):
            raise DataError(f"{where}: {key} must be 0 (context only) or 1 (trained on), got {value!r}", key=key)
        said[key] = bool(value)
    if len(set(said.values())) > 1:
        texts = ", ".join(f"{key}={message[key]!r}" for key in sorted(said))
        raise DataError(f"{where}: the marks {texts} contradict each other. Leave one of them", keys=sorted(said))
    learned = next(iter(said.values()), None)
    if learned and message.get("role", "assistant") != "assistant":
        raise DataError(
            f"{where}: {min(said)}={message[min(said)]!r} asks to learn a message of role {message['role']!r}, and "
            "only those of the assistant are learned. Remove the mark",
            key=min(said),
        )
    return learned


def refuse_row_marks(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a mark of a whole row, unless it says that all is learned."""
    for key in sorted(MARKS & row.keys()):
        value = row[key]
        if key == "mask" and isinstance(value, str) and value.lower() == _USUAL_MASK:
            continue
        # 1 is the default of every row. `mask` has none.
        if value is None or value == [] or (key in _SWITCHES and isinstance(value, bool | int | float) and value == 1):
            continue
        raise DataError(
            f"{where}: {key!r}={str(value)[:60]} beside the messages says what of the row is learned, and raylane "
            "reads such marks at messages only. Write weight: 0 at a message that is context, leave out a row that is "
            f"not learned, or, if {key!r} means something else, set data.ignore_keys=[{key}]",
            key=key,
        )
