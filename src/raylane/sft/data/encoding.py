"""Conversations of rows as documents of tokens: what the processes do that prepare data.

`RowEncoder` is the function of `datasets.Dataset.map`: it gets rows of a source and returns an Arrow table with a line
for each document, and at least one line for each conversation. The first line of a conversation has its counts; a line
without tokens is of a conversation that has no document. Called by `prepare`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raylane.errors import ConfigError, DataError
from raylane.sft.config.schema import DataConfig
from raylane.sft.data.chat import ChatTokenizer, Encoded
from raylane.sft.data.places import FilePlace, place_of
from raylane.training.text.formats import FORMATS, ColumnKeys
from raylane.training.text.messages import Conversation, conversation_of, parse_line

_BRACES = re.compile(r"\{(?!\})|(?<!\{)\}")
# Number of conversations at the start of a source whose masks are compared with the assistant's text. The check decodes
# each conversation again, and a wrong template shows in nearly every conversation, so a sample is enough.
MASK_CHECKS = 1000

COUNTS = (
    "conversations",
    "turns",
    "ended_turns",
    "length",
    "truncated",
    "cut_tokens",
    "dropped",
    "split",
    "emptied",
    "unsupervised",
    "control_tokens",
    "reasoning_left_out",
    "empty_answers",
    "skipped",
    "supervised",
    "layout",
)
"""Columns of what `DataCounts` counts, of the tokens of a conversation before cutting, and of its layout in FORMATS."""


def fit(
    tokens: np.ndarray, supervised: np.ndarray, row_tokens: int, overlong: str, where: str = "conversation"
) -> tuple[list[tuple[np.ndarray, np.ndarray]], str | None]:
    """Return the documents made of one conversation of n tokens, and the action: None, truncate, drop or split.

    Pieces of a split overlap by one token: the first token of a piece is context only, so each supervised token is
    predicted exactly once. DataError if `overlong` is "error" and n > `row_tokens`.
    """
    if len(tokens) <= row_tokens:
        return [(tokens, supervised)], None
    if overlong == "error":
        raise DataError(
            f"{where}: {len(tokens)} tokens are more than policy.max_total_sequence_length={row_tokens}, and "
            "data.overlong=error; set data.overlong to truncate, drop or split, or increase the length"
        )
    if overlong == "drop":
        return [], "drop"
    if overlong == "truncate":
        return [(tokens[:row_tokens], supervised[:row_tokens])], "truncate"
    pieces = []
    for start in range(0, len(tokens) - 1, row_tokens - 1):
        # A copy, because pieces overlap: in a view this would clear the last token of the previous piece.
        mask = supervised[start : start + row_tokens].copy()
        mask[0] = False
        pieces.append((tokens[start : start + row_tokens], mask))
    return pieces, "split"


@dataclass
class _Document:
    """One line of the result."""

    row: int
    digest: int
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    supervised: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))
    counts: dict[str, int] = field(default_factory=dict)
    problem: str | None = None
    """Why the row was skipped."""
    unread: str | None = None
    """Columns of the row and keys of its messages that nothing reads, one a line."""


@dataclass(frozen=True)
class RowReader:
    """Conversations of the rows of one source."""

    places: tuple[FilePlace, ...]
    is_json: bool
    keys: ColumnKeys
    ignore_keys: Collection[str]
    prompt: str | None
    """Text around the first question."""

    def conversation(self, columns: Mapping[str, Sequence[Any]], index: int, row: int) -> Conversation | None:
        """Return entry `index` of a batch, which is row `row` of all sources; None for an empty line.

        DataError with its place if it is not one.
        """
        where = place_of(self.places, row)
        if self.is_json:
            line = columns["text"][index]
            if not line.strip():
                return None
            record = parse_line(line, where)
        else:
            # Not where the row is JSON: a null of a call's argument may mean something there.
            # Tables have a value for each column of a row: what the row lacks is none.
            record = {name: _plain(values[index], f"{where}: {name!r}") for name, values in columns.items()}
            record = {name: value for name, value in record.items() if value is not None}
            if record.keys() == {"text"} and not record["text"].strip():
                return None
        conversation = conversation_of(record, where, self.keys, self.ignore_keys)
        return conversation if self.prompt is None else conversation.with_prompt(self.prompt)


def prompt_text(choice: str | None) -> str | None:
    """Return the text that `data.prompt` names or holds; ConfigError if it has no place for the question."""
    text = choice
    if choice is not None and "{}" not in choice:
        try:
            text = Path(choice).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"data.prompt={choice!r} has no {{}}, and cannot be read as a file: {error}. Give a text with {{}} in "
                "the place of the question, or a file with one",
                key="data.prompt",
            ) from error
    if text is not None and (text.count("{}") != 1 or _BRACES.search(text.replace("{{", "").replace("}}", ""))):
        raise ConfigError(
            f"data.prompt={choice!r} must have {{}} once, and other braces twice ({{{{ and }}}})", key="data.prompt"
        )
    return text


def reader_of(data: DataConfig, places: tuple[FilePlace, ...], is_json: bool) -> RowReader:
    """Return the reader of a source as the configuration asks."""
    pair = (data.input_key, data.output_key) if data.input_key and data.output_key else None
    keys = ColumnKeys(data.messages_key, pair)
    return RowReader(places, is_json, keys, data.ignore_keys, prompt_text(data.prompt))


def _plain(value: Any, where: str) -> Any:
    """Return a value of a table as JSON has it, without the keys of objects that only other rows have.

    Dates and decimals become text. DataError with `where` for bytes.
    """
    if isinstance(value, dict):
        return {key: _plain(item, where) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item, where) for item in value]
    if isinstance(value, bytes):
        raise DataError(f"{where} has bytes, and only text can be trained on. Leave the column out, or write text")
    return value if value is None or isinstance(value, str | int | float) else str(value)


@dataclass(frozen=True)
class RowEncoder:
    """Documents of the rows of one source. Can be pickled."""

    reader: RowReader
    tokenizer: ChatTokenizer
    data: DataConfig
    row_tokens: int
    first: int
    """Number of the first row of the source among the rows of all sources."""
    is_alone: bool
    """False in one of several processes, which leaves Ctrl-C to the process that started it."""

    def __call__(self, columns: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> Any:
        """Return the documents of a batch of rows as an Arrow table."""
        if not self.is_alone:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        documents = [document for at, index in enumerate(indices) for document in self._row(columns, at, index)]
        return _table(documents)

    def _row(self, columns: Mapping[str, Sequence[Any]], at: int, index: int) -> Iterator[_Document]:
        row = self.first + index
        try:
            conversation = self.reader.conversation(columns, at, row)
            documents = [] if conversation is None else self._documents(conversation, row, index < MASK_CHECKS)
        except DataError as error:
            if self.data.on_bad_row == "stop":
                raise
            # The largest digest is never held out.
            documents = [_Document(row, 2**64 - 1, counts={"skipped": 1, "layout": -1}, problem=str(error))]
        yield from documents

    def _documents(self, conversation: Conversation, row: int, is_checked: bool) -> list[_Document]:
        """Return the documents of one conversation; at least one, which has the counts."""
        data, tokenizer = self.data, self.tokenizer
        encoded = tokenizer.encode(conversation)
        counts = {
            "conversations": 1,
            "turns": encoded.num_turns,
            "ended_turns": encoded.num_ended_turns,
            "length": len(encoded.tokens),
            "reasoning_left_out": int(tokenizer.reasoning_left_out(conversation, encoded)),
            "control_tokens": int(tokenizer.special_in(conversation) is not None),
            "empty_answers": sum(
                message["role"] == "assistant" and not message["content"] and message.keys() == {"role", "content"}
                for message in conversation.messages
            ),
            "layout": FORMATS.index(conversation.layout),
        }
        further = {
            f"messages[].{key}" for key in conversation.further_keys - {*data.ignore_keys} if not tokenizer.reads(key)
        }
        unread = "\n".join([*conversation.unread_columns, *sorted(further)])
        head = _Document(row, conversation.digest(), counts=counts, unread=unread or None)
        if not encoded.supervised.any():
            if not data.allow_unsupervised:
                roles = ", ".join(message["role"] for message in conversation.messages)
                raise DataError(
                    f"{conversation.where}: nothing in this conversation is supervised (roles: {roles}); correct it, "
                    "or set data.allow_unsupervised=true to leave out (and count) such conversations"
                )
            counts["unsupervised"] = 1
            return [head]
        if is_checked and data.check_masks and (wrong := tokenizer.misplaced(conversation, encoded)):
            raise DataError(
                f"{conversation.where}: {wrong}; check the {{% generation %}} spans of the chat template with "
                "raylane inspect-data. If they are right, set data.check_masks=false"
            )
        pieces = self._fitting(conversation, encoded, counts)
        documents = [head, *(_Document(row, head.digest) for _ in pieces[1:])]
        for document, (tokens, mask) in zip(documents, pieces, strict=False):
            document.tokens, document.supervised = tokens, mask
            document.counts["supervised"] = int(np.count_nonzero(mask))
        return documents

    def _fitting(
        self, conversation: Conversation, encoded: Encoded, counts: dict[str, int]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the pieces of one conversation that have a supervised token, and count the others."""
        limit = self.row_tokens
        pieces, done = fit(encoded.tokens, encoded.supervised, limit, self.data.overlong, conversation.where)
        counts["dropped"] = int(done == "drop")
        counts["split"] = int(done == "split")
        if done == "truncate":
            counts["truncated"] = 1
            counts["cut_tokens"] = len(encoded.tokens) - limit
        learned_pieces = [(tokens, mask) for tokens, mask in pieces if mask.any()]
        counts["emptied"] = len(pieces) - len(learned_pieces)
        return learned_pieces


def _table(documents: Sequence[_Document]) -> Any:
    import pyarrow as pa

    # Lists are made of one array each: to convert them one by one would take longer than to tokenise.
    lengths = [len(document.tokens) for document in documents]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))

    def joined(arrays: list[np.ndarray], dtype: Any) -> Any:
        values = np.concatenate(arrays) if arrays else np.zeros(0)
        return pa.ListArray.from_arrays(offsets, pa.array(values.astype(dtype)))

    return pa.table(
        {
            "tokens": joined([document.tokens for document in documents], np.int32),
            "mask": joined([document.supervised for document in documents], np.uint8),
            "row": pa.array([document.row for document in documents], pa.int64()),
            "digest": pa.array(np.array([document.digest for document in documents], np.uint64)),
            "problem": pa.array([document.problem for document in documents], pa.string()),
            "unread": pa.array([document.unread for document in documents], pa.string()),
            **{name: pa.array([document.counts.get(name, 0) for document in documents], pa.int32()) for name in COUNTS},
        }
    )
