"""Preparation of conversations for training: tokenised, fitted to rows, counted, and cached under a content hash.

`prepare` is called once by the driver (and by `raylane inspect-data` and `raylane plan`); the workers then open the
resulting folders with `mixing.open_rows`. Data that cannot be trained on raises DataError or is counted in the report,
and is never skipped silently. T = `policy.max_total_sequence_length`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raylane.errors import ConfigError, DataError
from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data import sources
from raylane.sft.data.chat import ChatTokenizer
from raylane.sft.data.encoding import COUNTS, RowEncoder, prompt_text, reader_of
from raylane.sft.data.prepared import PREPARED, DataCounts, FileCounts, PreparedData, read_prepared, warnings
from raylane.sft.data.rows import CACHE_COLUMNS
from raylane.sft.data.sources import RowTable
from raylane.training import storage
from raylane.training.text.formats import FORMATS
from raylane.training.text.messages import is_held_out
from raylane.training.text.tokenizer import template_text

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger(__name__)

# Part of every cache key: increase it when a change of the code makes other documents from the same input.
FORMAT = 8
ROWS_PER_PROCESS = 20_000
"""Rows from which another process is started, if `data.num_proc` leaves the number open."""
MOST_PROCESSES = 8
_SHOWN_PROBLEMS = 3
"""Skipped rows whose problem is told; the others are counted."""


def prepare(config: SftRunConfig) -> PreparedData:
    """Return the tokenised data of a run, from the cache or newly made. Waits for files only; a second call is fast.

    Writes below `data.cache_dir`. Raises DataError (data, chat template or mask cannot be used) or ConfigError (a path
    in the configuration does not exist or cannot be written).
    """
    content = sources.digest(config.data.sources)
    folder = Path(config.data.cache_dir).resolve() / f"data-{_cache_key(config, content)}"
    done = folder / "prepared.json"
    model = config.policy.model_name
    if model is not None and not Path(model).is_dir():  # found here, before hours of tokenising
        raise ConfigError(
            f"policy.model_name={model!r} is no folder on this machine. Set it to a Hugging Face folder, or to "
            f"hf:{model} for a model on the hub"
        )
    if not done.is_file():
        try:
            _build(config, folder, content)
        except OSError as error:
            raise ConfigError(
                f"cannot write to data.cache_dir={config.data.cache_dir}: {error}. Check its free space and permissions"
            ) from error
    prepared = read_prepared(done)
    for line in warnings(prepared, config):
        log.warning("%s", line)
    return prepared


def _cache_key(config: SftRunConfig, content: str) -> str:
    """Return a hash that changes whenever the documents could change: data, tokenizer, template, length, versions."""
    import tokenizers
    import transformers

    data, tokenizer = config.data, config.policy.tokenizer
    folder = _tokenizer_folder(config)
    names = ("*.json", "*.jinja", "*.model", "*.txt")  # files of a tokenizer; weights would take minutes to hash
    files = [] if folder is None else sorted(file for name in names for file in Path(folder).glob(name))
    depends = {
        "format": FORMAT,
        "sources": content,
        "num_train_files": len(data.train),
        "tokenizer": [sources.file_digest(file).hex() for file in files],
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
            data.on_bad_row,
            prompt_text(data.prompt),
        ],
        "versions": [transformers.__version__, tokenizers.__version__],
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]


def _tokenizer_folder(config: SftRunConfig) -> str | None:
    """Return the folder that the tokenizer is loaded from; None if it is trained on the data."""
    if config.policy.tokenizer.train_vocab_size is not None:
        return None
    return config.policy.tokenizer.name or config.policy.model_name


def _build(config: SftRunConfig, folder: Path, content: str) -> None:
    """Fill the cache folder; `content` is the digest of the data that its name was made from."""
    with storage.filled_beside(folder) as draft:
        prepared = _fill(config, draft, folder)
        # The folder's name is made from the digest taken before reading; a file that changed since would be cached
        # under the name of its old content.
        if sources.digest(config.data.sources) != content:
            paths = ", ".join(source.path for source in config.data.sources)
            raise DataError(
                f"the data files ({paths}) changed while they were read. Run the command again when they are complete"
            )
        (draft / "prepared.json").write_bytes(PREPARED.dump_json(prepared, indent=2))


def _fill(config: SftRunConfig, draft: Path, folder: Path) -> PreparedData:
    """Write tokenizer and token caches into `draft`; return the result with paths in `folder`, its later name."""
    with _quiet_library(), tempfile.TemporaryDirectory(dir=draft, prefix="reading-") as name:
        reading = Path(name)
        train = [*sources.tables(config.data.train_sources, "train", reading)]
        held = config.data.validation_source
        validation = [] if held is None else [*sources.tables([held], "validation", reading)]
        tokenizer = _tokenizer(config, train)
        tokenizer.save(draft / "tokenizer")
        sets = _Sets(config, tokenizer, reading)
        places = tuple(place for table in train for place in table.places)
        sets.encode("train", train)
        sets.encode("validation", validation)
        train.clear()  # their mapped files would count as memory of this process
        validation.clear()
        names = ("train", "validation") if config.data.has_validation else ("train",)
        report = {name: sets.write(name, draft / name) for name in names}
    return PreparedData(
        tokenizer_dir=folder / "tokenizer",
        train=folder / "train",
        validation=folder / "validation" if config.data.has_validation else None,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        end_ids=tuple(sorted(tokenizer.end_ids)),
        report=report,
        files=sets.files(),
        places=places,
    )


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Show the bars of `datasets` on a terminal only, and leave its errors to ours."""
    import datasets

    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)

    shown = datasets.are_progress_bars_disabled() is False
    if shown and not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()


def _tokenizer(config: SftRunConfig, train: Sequence[RowTable]) -> ChatTokenizer:
    settings = config.policy.tokenizer
    folder = _tokenizer_folder(config)
    if folder is not None:
        return ChatTokenizer.load(folder, settings.chat_template, settings.chat_template_kwargs)

    def texts() -> Iterator[str]:
        fraction = config.data.validation_fraction
        for table in train:
            reader, row = reader_of(config.data, table.places, table.kind.is_json), table.places[0].first
            for batch in table.rows.iter(1000):
                for at in range(len(next(iter(batch.values())))):
                    try:
                        conversation = reader.conversation(batch, at, row + at)
                    except DataError:
                        if config.data.on_bad_row == "stop":
                            raise
                        continue
                    # Text that is held out must not shape the tokenizer.
                    if conversation is None or is_held_out(conversation.digest(), fraction):
                        continue
                    yield from (message["content"] for message in conversation.messages)
                    if conversation.text is not None:
                        yield conversation.text
                row += at + 1

    return ChatTokenizer.train(texts(), settings)


@dataclass
class _EncodedSource:
    """Documents of one source: a line for each, and the columns of its numbers."""

    files: str
    """Name of the kind of its files."""
    documents: Dataset
    columns: dict[str, np.ndarray]

    def count(self, lines: np.ndarray, counts: FileCounts) -> None:
        """Add the lines, bool [n], to the statistics."""
        columns = self.columns
        counts.documents += int(np.count_nonzero(columns["kept_tokens"][lines]))
        counts.tokens += int(columns["kept_tokens"].sum(where=lines))
        for name in {*COUNTS} & {*counts.__dict__}:
            setattr(counts, name, getattr(counts, name) + int(columns[name].sum(where=lines)))

    def unread(self) -> set[str]:
        """Return the names of columns and of keys of messages that nothing reads."""
        texts = self.documents.data.column("unread").drop_null().unique().to_pylist()
        return {name for text in texts for name in text.split("\n")}

    def kind(self) -> str:
        """Return the kind of the files, and the layouts of their rows."""
        layouts = self.columns["layout"][self.columns["conversations"] > 0]
        numbers = np.bincount(layouts, minlength=len(FORMATS)).tolist()
        names = [f"{name} ({number:,})" for name, number in zip(FORMATS, numbers, strict=True) if number]
        return f"{self.files}: {', '.join(names)}"


class _Sets:
    """Tokenisation of the sets of a run, and their statistics."""

    def __init__(self, config: SftRunConfig, tokenizer: ChatTokenizer, folder: Path) -> None:
        self._config, self._tokenizer, self._folder = config, tokenizer, folder
        self._encoded: dict[str, list[_EncodedSource]] = {"train": [], "validation": []}
        """Sources by the set that they are given for."""

    def encode(self, name: str, tables: Sequence[RowTable]) -> None:
        """Tokenise the sources that are given for a set; DataError for a row that cannot be used, with its place."""
        self._encoded[name] = [self._encode(table, f"{name}{number}") for number, table in enumerate(tables)]

    def _encode(self, table: RowTable, name: str) -> _EncodedSource:
        import pyarrow.compute as pc

        config, rows = self._config, table.rows
        if not len(rows):
            raise sources.no_conversation(table.places[0].name)
        reader = reader_of(config.data, table.places, table.kind.is_json)
        length = config.policy.max_total_sequence_length
        processes = num_processes(config.data.num_proc, len(rows), len(os.sched_getaffinity(0)))
        try:
            documents = rows.map(
                RowEncoder(reader, self._tokenizer, config.data, length, table.places[0].first, processes == 1),
                batched=True,
                with_indices=True,
                remove_columns=rows.column_names,
                num_proc=processes if processes > 1 else None,
                cache_file_name=str(self._folder / f"{name}.arrow"),
                load_from_cache_file=False,
                new_fingerprint=name,  # the library makes one by pickling the tokenizer
                desc=f"Tokenizing {table.places[0].name}",
            )
        except Exception as error:
            # After Ctrl-C the library waits 0.05 s for results of its processes, and raises what that gives: on a busy
            # machine a TimeoutError of its own, which is not Python's.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            if processes == 1 or not isinstance(error, RuntimeError):
                raise
            raise DataError(
                f"one of {processes} processes that tokenise {table.places[0].name} has ended: {error}. If memory ran "
                "out, set data.num_proc=1"
            ) from error
        columns = {column: documents.data.column(column).to_numpy() for column in ("row", "digest", *COUNTS)}
        columns["kept_tokens"] = pc.list_value_length(documents.data.column("tokens")).to_numpy()
        ends = [*(place.first for place in table.places), sys.maxsize]
        for place, count in zip(table.places, np.diff(np.searchsorted(columns["row"], ends)), strict=True):
            if not count:
                raise sources.no_conversation(place.name)
        for problem in documents.data.column("problem").drop_null().slice(0, _SHOWN_PROBLEMS).to_pylist():
            log.warning("row left out: %s", problem)
        return _EncodedSource(table.kind.name, documents, columns)

    def write(self, name: str, folder: Path) -> DataCounts:
        """Write the cache of one set, and return its statistics.

        DataError if it has no documents or no supervised end token.
        """
        from datasets import concatenate_datasets

        counts, kept, parts = DataCounts(), list[Any](), self._parts(name)
        for source, lines in parts:
            source.count(lines, counts)
            counts.longest = max(counts.longest, int(source.columns["length"][lines].max(initial=0)))
            kept.append(source.documents.select(np.flatnonzero(lines & (source.columns["kept_tokens"] > 0))))
            counts.unread = sorted({*counts.unread, *source.unread()})
        known = np.unique(_digests(self._parts("train")))
        if name == "train":
            counts.repeated = counts.conversations - len(known)
        else:
            counts.also_in_train = int(np.isin(_digests(parts), known).sum())
        self._check(counts, name)
        concatenate_datasets(kept).select_columns([*CACHE_COLUMNS]).save_to_disk(str(folder))
        return counts

    def files(self) -> tuple[FileCounts, ...]:
        """Return the statistics of each source of training data."""
        files = []
        for source, lines in self._parts("train"):
            files.append(FileCounts(kind=source.kind()))
            source.count(lines, files[-1])
        return tuple(files)

    def _parts(self, name: str) -> list[tuple[_EncodedSource, np.ndarray]]:
        """Return the sources of a set, and their lines that belong to it, bool [n]."""
        fraction = self._config.data.validation_fraction
        if name == "validation" and not fraction:
            return [(source, np.ones(len(source.documents), np.bool_)) for source in self._encoded["validation"]]
        return [
            (source, is_held_out(source.columns["digest"], fraction) == (name == "validation"))
            for source in self._encoded["train"]
        ]

    def _check(self, counts: DataCounts, name: str) -> None:
        if not counts.documents:
            asked = f"data.validation_fraction={self._config.data.validation_fraction}"
            raise DataError(
                f"no {name} documents are left of {counts.conversations} conversations "
                f"({asked if name == 'validation' else 'data.train'}; longer than "
                f"policy.max_total_sequence_length={self._config.policy.max_total_sequence_length} and dropped: "
                f"{counts.dropped}, cut before the first supervised token: {counts.emptied}, nothing supervised: "
                f"{counts.unsupervised}). Give more data, a larger length, or a chat template that marks the "
                "assistant's text"
            )
        if not counts.ended_turns:
            raise DataError(
                f"none of the {counts.turns} assistant turns of the {name} data has its end token supervised, so the "
                "model would never learn to stop; make the token that ends a turn the tokenizer's eos_token, or put it "
                "inside {% generation %} ... {% endgeneration %}"
            )


def _digests(parts: Sequence[tuple[_EncodedSource, np.ndarray]]) -> np.ndarray:
    """Return the digests of the conversations of a set."""
    chosen = [source.columns["digest"][lines & (source.columns["conversations"] > 0)] for source, lines in parts]
    return np.concatenate(chosen)


def num_processes(asked: int | None, rows: int, processors: int) -> int:
    """Return the number of processes that tokenise `rows` rows. Pure."""
    return min(rows, asked or max(1, min(rows // ROWS_PER_PROCESS, processors, MOST_PROCESSES)))
