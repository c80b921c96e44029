"""Preparation of conversations for training: tokenised, fitted to rows, counted, and cached under a content hash.

`prepare` is called once by the driver (and by `raylane inspect-data` and `raylane plan`); the workers then open the
resulting folders with `mixing.open_rows`. Data that cannot be trained on raises DataError or is counted in the report,
and is never skipped silently. T = `policy.max_total_sequence_length`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
from pydantic import TypeAdapter, ValidationError

from raylane.errors import ConfigError, DataError
from raylane.sft.config.schema import RunConfig
from raylane.sft.data.chat import ChatTokenizer, Encoded, template_text
from raylane.sft.data.messages import Conversation, is_held_out, read_conversations
from raylane.sft.data.rows import write_cache
from raylane.training import storage
from raylane.training.config.keys import explain
from raylane.training.vocabulary import Vocabulary

log = logging.getLogger(__name__)

# Part of every cache key: increase it when a change of the code makes other documents from the same input.
FORMAT = 4
# Number of conversations at the start of a set whose masks are compared with the assistant's text. The check decodes
# each conversation again, and a wrong template shows in nearly every conversation, so a sample is enough.
MASK_CHECKS = 1000


@dataclass
class FileCounts:
    """Statistics of one file of training data, without its conversations held out for validation."""

    conversations: int = 0  # conversations read
    documents: int = 0  # documents kept; more than conversations if over-long ones were split
    tokens: int = 0  # tokens of all documents
    supervised: int = 0  # tokens with a loss


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
    longest: int = 0  # tokens of the longest conversation, before cutting

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
    files: tuple[FileCounts, ...] = ()  # statistics of each file of data.train, in that order

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
"""Keys of the configuration in a checkpoint that are not keys of `RunConfig`: hash of the data, weights of files."""

PREPARED: TypeAdapter[PreparedData] = TypeAdapter(PreparedData)
"""Conversion of `PreparedData` to JSON and back; unknown counts are ignored."""


# ------------------------------------------------------------------------------------------- fitting, pure


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


# --------------------------------------------------------------------------------------------------------- cache


def prepare(config: RunConfig) -> PreparedData:
    """Return the tokenised data of a run, from the cache or newly made. Waits for files only; a second call is fast.

    Writes below `data.cache_dir`. Raises DataError (data, chat template or mask cannot be used) or ConfigError (a path
    in the configuration does not exist or cannot be written).
    """
    sources = _digest_files(_data_paths(config))
    folder = Path(config.data.cache_dir).resolve() / f"data-{_cache_key(config, sources)}"
    done = folder / "prepared.json"
    model = config.policy.model_name
    if model is not None and not Path(model).is_dir():  # found here, before hours of tokenising
        raise ConfigError(
            f"policy.model_name={model!r} is no folder on this machine. Set it to a local Hugging Face folder; a model "
            f"on the hub must be downloaded first: `hf download {model} --local-dir DIR`"
        )
    if not done.is_file():
        try:
            _build(config, folder, sources)
        except OSError as error:
            raise ConfigError(
                f"cannot write to data.cache_dir={config.data.cache_dir}: {error}. Check its free space and permissions"
            ) from error
    prepared = read_prepared(done)
    for line in warnings(prepared, config):
        log.warning("%s", line)
    return prepared


def read_prepared(done: Path) -> PreparedData:
    """Return the content of a finished cache folder, with paths inside this folder whatever the file contains."""
    folder = done.parent
    try:
        # Paths in the file are ignored: a copied or shared cache must not point elsewhere.
        return PREPARED.validate_json(done.read_bytes(), strict=True).in_folder(folder)
    except (OSError, ValidationError) as error:
        reason = explain(error, "its content") if isinstance(error, ValidationError) else str(error)
        raise DataError(f"{done} is damaged: {reason}. Delete {folder} and run again") from error


def _data_paths(config: RunConfig) -> list[str]:
    return [*config.data.train_paths, *([] if config.data.validation is None else [config.data.validation])]


def _digest_files(paths: Iterable[str | Path]) -> str:
    """Return a hash of the contents of files, in this order; DataError if one cannot be read."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            place = storage.at(path)
            if not place.is_file() and not place.is_dir() and place.exists():
                raise DataError(
                    f"data file {path} is a pipe or device, and raylane reads data more than once. Write it to a file"
                )
            with place.open("rb") as file:
                digest.update(hashlib.file_digest(cast("Any", file), "sha256").digest())
        except OSError as error:
            raise DataError(
                f"cannot read data file {path}: {error.strerror or error}. Check data.train and data.validation"
            ) from error
    return digest.hexdigest()


def _cache_key(config: RunConfig, sources: str) -> str:
    """Return a hash that changes whenever the documents could change: data, tokenizer, template, length, versions."""
    import tokenizers
    import transformers

    data, tokenizer = config.data, config.policy.tokenizer
    folder = _tokenizer_folder(config)
    names = ("*.json", "*.jinja", "*.model", "*.txt")  # files of a tokenizer; weights would take minutes to hash
    depends = {
        "format": FORMAT,
        "sources": sources,
        "num_train_files": len(data.train),
        "tokenizer": None if folder is None else _digest_files(sorted(p for n in names for p in Path(folder).glob(n))),
        "train_vocab_size": tokenizer.train_vocab_size,
        "template": template_text(tokenizer.chat_template),
        "template_choice": tokenizer.chat_template in ("chatml", "llama3"),
        "template_kwargs": repr(tokenizer.chat_template_kwargs),  # YAML values, some of which JSON does not have
        "row_tokens": config.policy.max_total_sequence_length,
        "data": [
            data.overlong,
            data.allow_unsupervised,
            data.messages_key,
            data.input_key,
            data.output_key,
            sorted(data.ignore_keys),
            data.validation_fraction,
            data.check_masks,
        ],
        "versions": [transformers.__version__, tokenizers.__version__],
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]


def _tokenizer_folder(config: RunConfig) -> str | None:
    """Return the folder that the tokenizer is loaded from; None if it is trained on the data."""
    if config.policy.tokenizer.train_vocab_size is not None:
        return None
    return config.policy.tokenizer.name or config.policy.model_name


def _build(config: RunConfig, folder: Path, sources: str) -> None:
    """Fill the cache folder; `sources` is the digest of the data files that its name was made from."""
    with storage.filled_beside(folder) as draft:
        prepared = _fill(config, draft, folder)
        # The folder's name is made from the digest taken before reading; a file that changed since would be cached
        # under the name of its old content.
        if _digest_files(_data_paths(config)) != sources:
            raise DataError(
                f"the data files ({', '.join(_data_paths(config))}) changed while they were read. Run the command "
                "again when they are complete"
            )
        (draft / "prepared.json").write_bytes(PREPARED.dump_json(prepared, indent=2))


def _fill(config: RunConfig, draft: Path, folder: Path) -> PreparedData:
    """Write tokenizer and token caches into `draft`; return the result with paths in `folder`, its later name."""
    settings = config.policy.tokenizer
    tokenizer_folder = _tokenizer_folder(config)
    if tokenizer_folder is not None:
        tokenizer = ChatTokenizer.load(tokenizer_folder, settings.chat_template, settings.chat_template_kwargs)
    else:
        texts = (
            message["content"]
            for _, conversation in _conversations(config, "train")
            for message in conversation.messages
        )
        tokenizer = ChatTokenizer.train(texts, settings)
    tokenizer.save(draft / "tokenizer")
    sets = _Sets(config, tokenizer)
    report = {"train": sets.write(draft, "train")}
    if config.data.has_validation:
        report["validation"] = sets.write(draft, "validation")
    return PreparedData(
        tokenizer_dir=folder / "tokenizer",
        train=folder / "train",
        validation=folder / "validation" if config.data.has_validation else None,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        end_ids=tuple(sorted(tokenizer.end_ids)),
        report=report,
        files=sets.files,
    )


def _conversations(config: RunConfig, name: str) -> Iterator[tuple[int, Conversation]]:
    """Yield (number of the file, conversation) for all conversations of the set "train" or "validation"."""
    data = config.data
    pair_keys = (data.input_key, data.output_key) if data.input_key and data.output_key else None
    if name == "validation" and data.validation is not None:
        validation = read_conversations([data.validation], data.messages_key, pair_keys, data.ignore_keys)
        yield from ((0, conversation) for conversation in validation)
        return
    for number, path in enumerate(data.train_paths):
        for conversation in read_conversations([path], data.messages_key, pair_keys, data.ignore_keys):
            held_out = data.validation_fraction > 0 and is_held_out(conversation.digest(), data.validation_fraction)
            if held_out == (name == "validation"):
                yield number, conversation


def conversations_at(config: RunConfig, numbers: Sequence[int]) -> list[str]:
    """Return the places (file:line) of training conversations by their numbers, counted as in `TokenCache.origin`.

    Reads the files up to the last one of `numbers`, which rise. DataError if a file cannot be read.
    """
    chosen, places = set(numbers), list[str]()
    for index, (_, conversation) in enumerate(_conversations(config, "train")):
        if index in chosen:
            places.append(conversation.where)
            if len(places) == len(chosen):
                break
    return places


class _Sets:
    """Tokenisation of the sets of a run, the training set first."""

    def __init__(self, config: RunConfig, tokenizer: ChatTokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._row_tokens = config.policy.max_total_sequence_length
        self._seen: set[bytes] = set()
        """Digests of the training conversations so far, which find repeated ones."""
        self.files = tuple(FileCounts() for _ in config.data.train)
        """Statistics of each file of training data."""

    def write(self, draft: Path, name: str) -> DataCounts:
        """Tokenise one set and write its cache; DataError if it has no documents or no supervised end token."""
        counts, data = DataCounts(), self._config.data
        write_cache(draft / name, self._documents(name, counts))
        if not counts.documents:
            asked = f"data.validation_fraction={data.validation_fraction}" if name == "validation" else "data.train"
            raise DataError(
                f"no {name} documents are left of {counts.conversations} conversations ({asked}; longer than "
                f"policy.max_total_sequence_length={self._row_tokens} and dropped: {counts.dropped}, "
                f"cut before the first supervised token: {counts.emptied}, nothing supervised: {counts.unsupervised}). "
                "Give more data, a larger length, or a chat template that marks the assistant's text"
            )
        if not counts.ended_turns:
            raise DataError(
                f"none of the {counts.turns} assistant turns of the {name} data has its end token supervised, so the "
                "model would never learn to stop; make the token that ends a turn the tokenizer's eos_token, or put it "
                "inside {% generation %} ... {% endgeneration %}"
            )
        return counts

    def _documents(self, name: str, counts: DataCounts) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yield (tokens, supervised, index of the conversation) of one set, and count them."""
        data, tokenizer = self._config.data, self._tokenizer
        for origin, (number, conversation) in enumerate(_conversations(self._config, name)):
            file_counts = self.files[number] if name == "train" else FileCounts()
            file_counts.conversations += 1
            encoded = tokenizer.encode(conversation)
            counts.conversations += 1
            counts.turns += encoded.num_turns
            counts.ended_turns += encoded.num_ended_turns
            counts.longest = max(counts.longest, len(encoded.tokens))
            counts.reasoning_left_out += tokenizer.reasoning_left_out(conversation, encoded)
            counts.control_tokens += tokenizer.special_in(conversation) is not None
            digest = conversation.digest()
            if name == "train":
                counts.repeated += digest in self._seen
                self._seen.add(digest)
            else:
                counts.also_in_train += digest in self._seen
            if not encoded.supervised.any():
                if not data.allow_unsupervised:
                    roles = ", ".join(message["role"] for message in conversation.messages)
                    raise DataError(
                        f"{conversation.where}: nothing in this conversation is supervised (roles: {roles}); correct "
                        "it, or set data.allow_unsupervised=true to leave out (and count) such conversations"
                    )
                counts.unsupervised += 1
                continue
            checks = data.check_masks and origin < MASK_CHECKS
            if checks and (wrong := tokenizer.misplaced(conversation, encoded)):
                raise DataError(
                    f"{conversation.where}: {wrong}; check the {{% generation %}} spans of the chat template with "
                    "raylane inspect-data. If they are right, set data.check_masks=false"
                )
            for tokens, supervised in self._fitting(conversation, encoded, counts):
                for statistics in (counts, file_counts):
                    statistics.documents += 1
                    statistics.tokens += len(tokens)
                    statistics.supervised += int(np.count_nonzero(supervised))
                yield tokens, supervised, origin

    def _fitting(
        self, conversation: Conversation, encoded: Encoded, counts: DataCounts
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the documents of one conversation that have a supervised token, and count the others."""
        overlong, where = self._config.data.overlong, conversation.where
        pieces, done = fit(encoded.tokens, encoded.supervised, self._row_tokens, overlong, where)
        counts.dropped += done == "drop"
        counts.split += done == "split"
        if done == "truncate":
            counts.truncated += 1
            counts.cut_tokens += len(encoded.tokens) - self._row_tokens
        for tokens, supervised in pieces:
            if supervised.any():
                yield tokens, supervised
            else:
                counts.emptied += 1


def warnings(prepared: PreparedData, config: RunConfig) -> list[str]:
    """Return sentences about the data that a user should know before training. Pure."""
    limit = config.policy.max_total_sequence_length
    texts = []
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
            f"{c.reasoning_left_out} conversations have reasoning (reasoning_content) that the chat template does not "
            "include, so it is not learned": c.reasoning_left_out,
            f"{c.also_in_train} {of_all} are also in the training data": c.also_in_train,
        }
        texts += [f"{name}: {text}" for text, count in counted.items() if count > 0]
    return texts
