"""Rows of published data sets as OpenAI-style messages: which layout a row has follows from its columns alone. Pure.

    messages                        a list of role and content; also under `conversations`
    ShareGPT                        `conversations`, a list of from and value
    prompt and completion           two texts, or two lists of messages of which the second is learned
    question and answer             two texts, under one of the usual pairs of names
    Alpaca                          `instruction`, `output`, and perhaps `input`, `system` and `history`
    text                            one text, learned as it is

Called by `messages`, which checks what this module makes of a row.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from raylane.errors import DataError
from raylane.training.text.marks import is_learned

MESSAGES, SHAREGPT, COMPLETION, PAIR, ALPACA, TEXT = (
    "messages",
    "ShareGPT",
    "prompt and completion",
    "question and answer",
    "Alpaca",
    "text",
)
FORMATS = (MESSAGES, SHAREGPT, COMPLETION, PAIR, ALPACA, TEXT)
"""Names of the layouts, as users see them."""

_PAIRS = (("question", "answer"), ("query", "response"), ("prompt", "response"), ("question", "response"))
_ANSWERS = ("output", "response")
"""Names of the answer beside an `instruction`."""
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response"), "tool"),
    **dict.fromkeys(("system", "developer"), "system"),
    "function_call": "assistant",
}


class ColumnKeys(NamedTuple):
    """Names of columns that the configuration gives."""

    messages: str = "messages"
    pair: tuple[str, str] | None = None
    """Question and answer, in rows without messages."""


class FormattedRow(NamedTuple):
    """A row as messages that are not checked yet, or as one text."""

    layout: str
    used: frozenset[str]
    """Columns of which nothing is lost."""
    messages: Any = None
    text: str | None = None


def formatted(row: Mapping[str, Any], keys: ColumnKeys, where: str) -> FormattedRow:
    """Return a row as messages or text; DataError with `where` if its columns are of no known layout."""
    # A row with messages is complete, even if it has the columns of a pair as well; NeMo-RL decides in the same way.
    if keys.messages in row:
        as_messages = _as_messages(row, keys.messages)
        return as_messages._replace(used=as_messages.used.union(keys.pair or ()))
    if keys.pair is not None:
        return _as_pair(row, keys.pair, where)
    if isinstance(_turns(row.get("conversations")), list):
        return _as_messages(row, "conversations")
    for columns, convert in _BY_COLUMNS:
        if all(row.get(column) is not None for column in columns):
            return convert(row, where)
    close = difflib.get_close_matches(keys.messages, row, n=1)
    if "chosen" in row and "rejected" in row:
        reason = (
            "'chosen' and 'rejected' are a choice between two answers, and raylane trains on one. Write the chosen one "
            f"as {keys.messages!r}"
        )
    elif close:
        reason = f"no key {keys.messages!r} among {sorted(row)}; set data.messages_key={close[0]}"
    else:
        reason = (
            f"no known layout has the keys {sorted(row)}. Known are {keys.messages!r}, 'conversations', 'prompt' with "
            "'completion', 'question' with 'answer', 'instruction' with 'output', and 'text'. Write "
            '{"messages": [{"role": ..., "content": ...}]}, or set data.input_key and data.output_key to the keys of '
            "question and answer"
        )
    raise DataError(f"{where}: {reason}", keys=sorted(row))


def _as_messages(row: Mapping[str, Any], key: str) -> FormattedRow:
    messages = _turns(row[key])
    # `functions` too: `messages` refuses the old form of tools by name.
    used = {key, "tools", "functions"}
    if not (isinstance(messages, list) and any(isinstance(turn, dict) and "from" in turn for turn in messages)):
        return FormattedRow(MESSAGES, frozenset(used), messages)
    return FormattedRow(SHAREGPT, frozenset({*used, "system"}), [*_system(row), *map(_turn, messages)])


def _turns(value: Any) -> Any:
    """Return messages as a list of objects. `datasets` keeps a `Sequence` of objects as an object of lists."""
    if not isinstance(value, dict) or not value or not all(isinstance(items, list) for items in value.values()):
        return value
    if len({len(items) for items in value.values()}) > 1:
        return value
    rows = zip(*value.values(), strict=True)
    return [{name: item for name, item in zip(value, row, strict=True) if item is not None} for row in rows]


def _turn(turn: Any) -> Any:
    """Return one entry of ShareGPT as a message; what is none stays, and is refused by its role."""
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        return turn
    source, value = turn["from"], turn["value"]
    rest = {key: item for key, item in turn.items() if key not in ("from", "value")}
    message = {**rest, "role": _SHAREGPT_ROLES.get(str(source), source), "content": value}
    # LLaMA-Factory writes a call as the text of its name and arguments.
    if source == "function_call":
        try:
            call = json.loads(value)
        except (TypeError, ValueError, RecursionError):
            call = value  # is refused as a call
        calls = call if isinstance(call, list) else [call]
        return {**message, "content": None, "tool_calls": [{"function": function} for function in calls]}
    return message


def _system(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    text = row.get("system")
    return [{"role": "system", "content": text}] if text is not None and text != "" else []


def _as_pair(row: Mapping[str, Any], keys: tuple[str, str], where: str) -> FormattedRow:
    for option, key in zip(("data.input_key", "data.output_key"), keys, strict=True):
        if not isinstance(row.get(key), str):
            shown = repr(row[key])[:60] if key in row else "nothing"
            raise DataError(
                f"{where}: {option}={key} must name a text, found {shown} among the keys {sorted(row)}. Correct the "
                f"row or {option}"
            )
    return FormattedRow(PAIR, frozenset(keys), _question_and_answer(row[keys[0]], row[keys[1]]))


def _question_and_answer(question: Any, answer: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _usual_pair(columns: tuple[str, str]) -> Callable[[Mapping[str, Any], str], FormattedRow]:
    def convert(row: Mapping[str, Any], where: str) -> FormattedRow:
        question, answer = (_text(row, column, where) for column in columns)
        used = frozenset({*columns, "system"})
        return FormattedRow(PAIR, used, [*_system(row), *_question_and_answer(question, answer)])

    return convert


def _as_completion(row: Mapping[str, Any], where: str) -> FormattedRow:
    prompt, completion = row["prompt"], row["completion"]
    used = frozenset({"prompt", "completion", "tools", "functions"})
    if isinstance(prompt, list) and isinstance(completion, list):
        # Only the completion is learned.
        context = [_context(message, f"{where}, message {index}") for index, message in enumerate(prompt)]
        return FormattedRow(COMPLETION, used, [*context, *completion])
    texts = _text(row, "prompt", where), _text(row, "completion", where)
    return FormattedRow(COMPLETION, used, _question_and_answer(*texts))


def _context(message: Any, where: str) -> Any:
    """Return a message of a prompt, which is not learned if it is one of the assistant."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    if is_learned(message, where):
        raise DataError(
            f"{where}: the mark of this message asks to learn it, but messages of 'prompt' are context. Move it into "
            "'completion', or write all messages as 'messages'"
        )
    return {**message, "weight": 0}


def _alpaca(answer: str) -> Callable[[Mapping[str, Any], str], FormattedRow]:
    def convert(row: Mapping[str, Any], where: str) -> FormattedRow:
        # `context` is what Dolly calls the input.
        inputs = [_text(row, key, where) for key in ("input", "context") if row.get(key)]
        question = "\n\n".join([_text(row, "instruction", where), *(text for text in inputs if text.strip())])
        history = row.get("history") or []
        # Pairs of texts, as data for chat models of 2023 has them.
        if not isinstance(history, list) or any(
            not isinstance(turn, Sequence) or len(turn) != 2 or not all(isinstance(text, str) for text in turn)
            for turn in history
        ):
            raise DataError(
                f"{where}: 'history' must be a list of questions with their answers, [[question, answer], ...], got "
                f"{str(history)[:60]!r}"
            )
        before = [message for turn in history for message in _question_and_answer(*turn)]
        asked = _question_and_answer(question, _text(row, answer, where))
        used = frozenset({"instruction", "input", "context", "system", "history", answer})
        return FormattedRow(ALPACA, used, [*_system(row), *before, *asked])

    return convert


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is a {type(value).__name__}, not a text. Correct the row", key=key)
    return value


_BY_COLUMNS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any], str], FormattedRow]], ...] = (
    (("prompt", "completion"), _as_completion),
    *((("instruction", answer), _alpaca(answer)) for answer in _ANSWERS),
    *((columns, _usual_pair(columns)) for columns in _PAIRS),
    (("text",), lambda row, where: FormattedRow(TEXT, frozenset({"text"}), text=_text(row, "text", where))),
)
"""Columns that a layout needs, and its conversion; the first one that fits counts."""
