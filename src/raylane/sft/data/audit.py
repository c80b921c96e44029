"""Reports on training data for people: statistics, and conversations with the supervised spans marked.

Pure functions from prepared data to text; `raylane inspect-data` prints them. On a terminal supervised text is green;
elsewhere it stands between [[ and ]].
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data.chat import ChatTokenizer, runs
from raylane.sft.data.places import place_of
from raylane.sft.data.prepared import DataCounts, PreparedData
from raylane.sft.data.rows import RowSource

if TYPE_CHECKING:
    import numpy as np

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Marks:
    """Text before and after a supervised span, and before and after a heading."""

    open: str
    close: str
    bold: str
    plain: str


def marks(coloured: bool) -> Marks:
    """Return ANSI colours (ECMA-48 SGR: 32 green, 1 bold, 0 plain) or brackets."""
    return Marks("\x1b[32m", "\x1b[0m", "\x1b[1m", "\x1b[0m") if coloured else Marks("[[", "]]", "", "")


def mark_document(tokens: np.ndarray, supervised: np.ndarray, tokenizer: ChatTokenizer, style: Marks) -> str:
    """Return the text of one document with each supervised span marked; tokens int32 [n], supervised bool [n]."""
    parts = []
    done = 0
    for start, end in runs(supervised):
        before, span = (printable(tokenizer.decode(part)) for part in (tokens[done:start], tokens[start:end]))
        parts += [before, style.open, span, style.close]
        done = end
    parts.append(printable(tokenizer.decode(tokens[done:])))
    return "".join(parts)


def printable(text: str) -> str:
    """Return a text with its control characters escaped, except line feeds and tabs.

    Text from data or models must not be able to move the cursor of a terminal, set its title or clear it.
    """
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def sample(rows: RowSource, tokenizer: ChatTokenizer, style: Marks, documents: Iterable[int]) -> str:
    """Return documents of a cache, marked, each under a heading."""
    cache = rows.cache
    shown = []
    for index in documents:
        tokens, supervised = cache.document(index)
        heading = (
            f"{style.bold}document {index} ({place_of(rows.places, int(cache.origin[index]))}): {len(tokens)} tokens, "
            f"{int(supervised.sum())} supervised{style.plain}"
        )
        shown.append(f"{heading}\n{mark_document(tokens, supervised, tokenizer, style)}")
    return "\n".join(shown)


def figures(name: str, counts: DataCounts, rows: RowSource, config: SftRunConfig) -> str:
    """Return the statistics of one set as lines: contents, what was left out, and how full the rows are."""
    packing = config.policy.sequence_packing
    layout = packing.algorithm if packing.enabled else "one document a row"
    ended = "yes" if counts.ended_turns == counts.turns else "NOT ALWAYS" if counts.ended_turns else "NO"
    long, limit = counts.truncated + counts.split + counts.dropped, config.policy.max_total_sequence_length
    overlong = f"none above {limit} tokens"
    if long:
        overlong = (
            f"{long:,} above {limit} tokens: {counts.truncated:,} truncated ({counts.cut_tokens:,} tokens lost), "
            f"{counts.split:,} split, {counts.dropped:,} dropped"
        )
    dropped = (
        f"{counts.dropped:,} over-long, {counts.emptied:,} with nothing supervised after cutting, "
        f"{counts.unsupervised:,} with nothing supervised at all"
    )
    lines = [
        ("conversations", f"{counts.conversations:,} read, the longest {counts.longest:,} tokens"),
        ("documents", f"{counts.documents:,} kept, {counts.tokens:,} tokens"),
        ("supervised", f"{counts.supervised:,} tokens, {counts.supervised_percent:.1f}%"),
        ("end token", f"supervised: {ended} ({counts.ended_turns:,} of {counts.turns:,} assistant turns)"),
        ("over-long", overlong),
        ("dropped", f"{counts.dropped + counts.emptied + counts.unsupervised:,} ({dropped})"),
        ("control text", f"{counts.control_tokens:,} conversations contain special tokens as text"),
        ("repeated", f"{counts.repeated:,} conversations repeat an earlier one"),
        ("rows", f"{rows.num_rows:,} of {rows.row_tokens} tokens, {100 * rows.efficiency:.1f}% full ({layout})"),
    ]
    if name == "validation":
        lines.append(("in training", f"{counts.also_in_train:,} conversations are also in the training data"))
    return "\n".join([name, *(f"  {key:<14}{text}" for key, text in lines)])


def report(prepared: PreparedData, config: SftRunConfig, sets: dict[str, RowSource]) -> str:
    """Return the statistics of every set."""
    parts = [figures(name, prepared.report[name], rows, config) for name, rows in sets.items()]
    pairs = zip(config.data.train_sources, prepared.files, strict=True)
    kinds = [f"  {source.path}: {counts.kind}" for source, counts in pairs]
    parts.append("\n".join(["rows read", *kinds]))
    if len(prepared.files) > 1:
        # One line for each file of training data: weight, contents, and its part of an epoch.
        files = [*zip(config.data.train_sources, prepared.files, strict=True)]
        epoch = sum(source.weight * counts.tokens for source, counts in files)
        lines = [
            f"  {source.path}: weight {source.weight:g}, {counts.conversations:,} conversations, {counts.documents:,} "
            f"documents, {counts.tokens:,} tokens ({counts.supervised:,} supervised), "
            f"{100 * source.weight * counts.tokens / epoch:.1f}% of the tokens of an epoch"
            for source, counts in files
        ]
        parts.append("\n".join(["files", *lines]))
    return "\n\n".join(parts)
