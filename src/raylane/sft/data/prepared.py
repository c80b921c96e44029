"""Prepared data of a run: where its caches are, and what was counted in it.

Written by `prepare` as JSON beside the caches, and read by all that train on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from raylane.errors import DataError
from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data.places import FilePlace
from raylane.training.config.keys import explain
from raylane.training.vocabulary import Vocabulary


@dataclass
class FileCounts:
    """Statistics of one file of training data, without its conversations held out for validation."""

    conversations: int = 0  # conversations read
    documents: int = 0  # documents kept; more than conversations if over-long ones were split
    tokens: int = 0  # tokens of all documents
    supervised: int = 0  # tokens with a loss
    kind: str = ""  # kind of its files, and layouts of its rows with their numbers


@dataclass
class DataCounts(FileCounts):
    """Statistics of one set of conversations. Token counts refer to the documents that are kept."""

    turns: int = 0  # assistant turns read
    ended_turns: int = 0  # assistant turns whose end token is supervised
    truncated: int = 0  # conversations whose tail was cut off
    cut_tokens: int = 0  # tokens in the tails cut off
    dropped: int = 0  # over-long conversations left out
    split: int = 0  # over-long conversations split into pieces
    emptied: int = 0  # conversations and pieces left out because no supervised token remained after cutting
    unsupervised: int = 0  # conversations left out because none of their tokens was supervised
    control_tokens: int = 0  # conversations whose text contains a special token
    repeated: int = 0  # training conversations that are equal to an earlier one
    reasoning_left_out: int = 0  # conversations with reasoning that the chat template does not include
    also_in_train: int = 0  # validation conversations that are also in the training data
    empty_answers: int = 0  # messages of the assistant that say nothing and call nothing
    skipped: int = 0  # rows left out because they cannot be used
    longest: int = 0  # tokens of the longest conversation, before cutting
    unread: list[str] = field(default_factory=list)  # names of columns and of keys of messages that nothing reads

    @property
    def supervised_percent(self) -> float:
        """Percentage of the kept tokens that have a loss."""
        return 100.0 * self.supervised / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class PreparedData(Vocabulary):
    """Result of `prepare`: absolute folders, and facts about the tokenizer."""

    train: Path  # token cache of the training set
    validation: Path | None  # token cache of the validation set
    report: dict[str, DataCounts] = field(default_factory=dict)  # statistics of "train" and, if present, "validation"
    files: tuple[FileCounts, ...] = ()  # statistics of each entry of data.train, in that order
    places: tuple[FilePlace, ...] = ()  # files of the training data, which tell where a row is from

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders that every node of a run needs: one folder holds all data."""
        return (self.train.parent,)

    def moved(self, path_of: Callable[[Path], Path]) -> Self:
        """Return the same data with each path replaced by what `path_of` returns for it."""
        validation = None if self.validation is None else path_of(self.validation)
        return replace(
            self, tokenizer_dir=path_of(self.tokenizer_dir), train=path_of(self.train), validation=validation
        )

    def in_folder(self, folder: Path) -> PreparedData:
        """Return the same data with its paths in another folder, which has the same files."""
        validation = None if self.validation is None else folder / "validation"
        return replace(self, tokenizer_dir=folder / "tokenizer", train=folder / "train", validation=validation)


NOT_CONFIGURED = ("prepared", "train_weights")
"""Keys of the configuration in a checkpoint that are not keys of `SftRunConfig`: hash of the data, weights of files."""

_SHOWN_KEYS = 10

PREPARED: TypeAdapter[PreparedData] = TypeAdapter(PreparedData)
"""Conversion of `PreparedData` to JSON and back; unknown counts are ignored."""


def read_prepared(done: Path) -> PreparedData:
    """Return the content of a finished cache folder, with paths inside this folder whatever the file contains."""
    folder = done.parent
    try:
        # Paths in the file are ignored: a copied or shared cache must not point elsewhere.
        return PREPARED.validate_json(done.read_bytes(), strict=True).in_folder(folder)
    except (OSError, ValidationError) as error:
        reason = explain(error, "its content") if isinstance(error, ValidationError) else str(error)
        raise DataError(f"{done} is damaged: {reason}. Delete {folder} and run again") from error


def warnings(prepared: PreparedData, config: SftRunConfig) -> list[str]:
    """Return sentences about the data that a user should know before training. Pure."""
    limit = config.policy.max_total_sequence_length
    texts, named = [], set[str]()
    for name, c in prepared.report.items():
        of_all = f"of {c.conversations} conversations"
        counted = {
            f"{c.truncated} {of_all} are longer than {limit} tokens and lose their tail, {c.cut_tokens} tokens in all "
            f"(longest: {c.longest}); data.overlong=split keeps them": c.truncated,
            f"{c.dropped} {of_all} are longer than {limit} tokens; dropped": c.dropped,
            f"{c.emptied} conversations or pieces are left out: cut at {limit} tokens, nothing supervised remains in "
            "them; a larger policy.max_total_sequence_length keeps them": c.emptied,
            f"{c.unsupervised} conversations in which nothing is supervised are left out": c.unsupervised,
            f"{c.turns - c.ended_turns} of {c.turns} assistant turns have no supervised end token": (
                c.turns - c.ended_turns
            ),
            f"{c.control_tokens} conversations contain special tokens as text": c.control_tokens,
            f"{c.repeated} {of_all} repeat an earlier one and are trained on too": c.repeated,
            f"{c.reasoning_left_out} conversations have reasoning (reasoning_content, or <think> in a content) that "
            "the chat template does not include, so it is not learned": c.reasoning_left_out,
            f"{c.empty_answers} answers are empty, which teaches the model to end at once": c.empty_answers,
            f"{c.skipped} rows cannot be used and are left out (data.on_bad_row=skip)": c.skipped,
            f"{c.also_in_train} {of_all} are also in the training data": c.also_in_train,
        }
        texts += [f"{name}: {text}" for text, count in counted.items() if count > 0]
        if unread := [key for key in c.unread if key not in named]:
            shown = ", ".join(unread[:_SHOWN_KEYS]) + ", ..." * (len(unread) > _SHOWN_KEYS)
            texts.append(
                f"{name}: nothing reads {shown} (columns of rows, keys of messages). If these hold nothing to learn "
                "from, name them in data.ignore_keys"
            )
            named.update(unread)
    return texts
