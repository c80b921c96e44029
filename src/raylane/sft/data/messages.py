"""Conversations in JSON Lines files: read, checked and converted to one form.

One line is one JSON object with a list of OpenAI-style messages and optional `tools`: roles system, user, assistant and
tool; several turns; `content` as text or a list of text parts; `tool_calls` whose arguments may be a JSON string;
`weight: 0` on an assistant message that is context only. A line may also hold one question and one answer as two texts
(`data.input_key`, `data.output_key`). Anything unusable raises DataError with file and line, also a further text in a
line that no message has; nothing is skipped silently. Knows nothing of tokens. Called by `prepare`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raylane.errors import DataError
from raylane.training import storage
from raylane.training.storage import Place

# JSON can hold half of a surrogate pair (a character above U+FFFF). Half a pair is no text, and tokenizers refuse it.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MAX_DEPTH = 100
# First bytes of formats that are not text, with what makes JSON Lines of them.
_FORMATS = {
    b"PAR1": ("a Parquet file", "pandas.read_parquet(...).to_json(..., orient='records', lines=True)"),
    b"ARROW1": ("an Arrow file", "datasets.Dataset.from_file(...).to_json(...)"),
    b"\xff\xff\xff\xff": ("an Arrow stream", "datasets.Dataset.from_file(...).to_json(...)"),
    b"\x1f\x8b": ("compressed by gzip", "gunzip"),
    b"\x28\xb5\x2f\xfd": ("compressed by Zstandard", "unzstd"),
    b"BZh": ("compressed by bzip2", "bunzip2"),
    b"\xfd7zXZ": ("compressed by xz", "unxz"),
    b"PK\x03\x04": ("a zip archive", "unzip"),
}
_CONTENT = {
    *("system", "system_prompt", "instruction", "instructions", "prompt", "question", "query", "input", "inputs"),
    *("context", "contexts", "passage", "document", "documents", "knowledge", "history"),
}
"""Keys of a line that hold a part of the conversation in published data sets."""
_DESCRIPTIVE = {
    *("id", "uid", "uuid", "source", "dataset", "dataset_name", "subset", "split", "category", "categories", "type"),
    *("task", "task_name", "topic", "domain", "title", "language", "lang", "license", "model", "generator", "author"),
    *("url", "date", "timestamp", "tags", "difficulty", "score", "comment", "note"),
}
"""Keys of a line whose text describes the conversation and is no part of it."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True)
class Conversation:
    """One line of a data file. `where` is 'file:line', for messages."""

    where: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None
    weights: tuple[bool, ...]  # for each assistant message, in order: True if it is trained on

    def digest(self) -> bytes:
        """Return a 16-byte hash of messages and tools, equal for duplicates in any file."""
        text = json.dumps([self.messages, self.tools], sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Return True if a conversation with this digest belongs to the held-out part; the same on every machine."""
    return int.from_bytes(digest[:8], "big") < fraction * 2.0**64


def read_conversations(
    paths: Iterable[str | Path],
    messages_key: str = "messages",
    pair_keys: tuple[str, str] | None = None,
    ignore_keys: Collection[str] = (),
) -> Iterator[Conversation]:
    """Yield the conversations of JSONL files, one file after the other; blank lines are skipped."""
    for path in paths:
        empty = True
        for number, line in _lines(storage.at(path)):
            if line.strip():
                empty = False
                yield parse_conversation(line, f"{path}:{number}", messages_key, pair_keys, ignore_keys)
        if empty:
            raise DataError(
                f"data file {path} holds no conversation. Give a JSONL file with one per line", path=str(path)
            )


def _lines(path: Place) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with path.open("rb") as binary:
            head = binary.read(8)
        for start, (kind, remedy) in _FORMATS.items():
            if head.startswith(start):
                raise DataError(
                    f"{path} is {kind}, and raylane reads JSON Lines in plain text. Convert it first ({remedy})",
                    path=str(path),
                )
        with path.open("r", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: after line {number}: not UTF-8 ({error}); convert the file") from error
    except OSError as error:
        raise DataError(f"cannot read data file {path}: {error.strerror or error}") from error


def parse_conversation(
    line: str,
    where: str,
    messages_key: str = "messages",
    pair_keys: tuple[str, str] | None = None,
    ignore_keys: Collection[str] = (),
) -> Conversation:
    """Return one line of JSON as a Conversation; DataError with `where` if it is not one.

    `pair_keys` are the keys of a question and its answer in lines without `messages_key`. Other keys of the line that
    hold a part of the conversation are an error, except `ignore_keys`.
    """
    try:
        record = json.loads(line, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4,300 digits
        raise DataError(
            f"{where}: not JSON ({error}); every line must be one JSON object{_other_layout(line)}"
        ) from error
    _refuse_deep(record, where)
    if _SURROGATE.search(line):  # a cheap test first: encoding every record again would be slow
        _refuse_lone_surrogates(record, where)
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: a line must be an object with {messages_key!r}, got a {type(record).__name__}"
            f"{_other_layout(line)}"
        )
    # A line with messages is complete, even if it has the other two keys as well; NeMo-RL decides in the same way.
    is_pair = pair_keys is not None and messages_key not in record
    if pair_keys is not None and is_pair:
        record[messages_key] = _pair(record, pair_keys, where)
    if messages_key not in record:
        close = difflib.get_close_matches(messages_key, record, n=1)
        hint = f"set data.messages_key={close[0]}" if close else 'write {"messages": [{"role": ..., "content": ...}]}'
        raise DataError(f"{where}: no key {messages_key!r} among {sorted(record)}; {hint}")
    if record.get("functions") and not record.get("tools"):
        raise DataError(f"{where}: 'functions' is the old form of 'tools'; write each as an entry of 'tools'")
    messages = record[messages_key]
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: {messages_key!r} must be a list of at least one message")
    parsed = tuple(_message(message, f"{where}, message {index}") for index, message in enumerate(messages))
    weights: list[bool] = []
    for index, (raw, message) in enumerate(zip(messages, parsed, strict=True)):
        if message["role"] == "assistant":
            weight = raw.get("weight")
            if weight not in (None, 0, 1):
                text = "weight must be 0 (context only) or 1 (trained on)"
                raise DataError(f"{where}, message {index}: {text}, got {weight!r}")
            weights.append(weight != 0)
    tools = record.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        hint = "; it is a text here: write the list that the text holds" if isinstance(tools, str) else ""
        raise DataError(f"{where}: 'tools' must be a list of tool descriptions (objects){hint}")
    used = {messages_key, "tools", "functions", *(pair_keys or ())}
    rest = {key: value for key, value in record.items() if key not in used and key not in ignore_keys}
    _refuse_unused(rest, [(message["role"], message["content"]) for message in parsed], is_pair, where)
    return Conversation(where, parsed, None if tools is None else tuple(tools), tuple(weights))


def _pair(record: dict[str, Any], keys: tuple[str, str], where: str) -> list[dict[str, Any]]:
    """Return the question and the answer of a line as two messages."""
    for option, key in zip(("data.input_key", "data.output_key"), keys, strict=True):
        if not isinstance(record.get(key), str):
            shown = repr(record[key]) if key in record else "nothing"
            raise DataError(
                f"{where}: {option}={key} must name a text, found {shown} among the keys {sorted(record)}. Correct "
                f"the line or {option}"
            )
    return [{"role": "user", "content": record[keys[0]]}, {"role": "assistant", "content": record[keys[1]]}]


def _other_layout(line: str) -> str:
    """Return a hint about a line that begins a file of another layout, or an empty text."""
    if line.lstrip().startswith("["):
        return ". The file seems to be one JSON array; write each of its objects on a line (jq -c '.[]')"
    return ""


def _refuse_unused(rest: Mapping[str, Any], texts: Sequence[tuple[str, str]], is_pair: bool, where: str) -> None:
    """Raise DataError for a key of a line whose text belongs to the conversation and is in none of its messages.

    `texts` has (role, content) of each message.
    Of lines with a question and an answer every text of several words counts, unless the key is a usual one of
    descriptions: such lines have no other place for content.
    """
    for key, value in rest.items():
        name = key.lower()
        if isinstance(value, str):
            # Alpaca's `text` repeats all others. An input repeats the question that it was joined to; an answer that
            # contains it by chance does not count.
            asked = [text for role, text in texts if role != "assistant"]
            if name in _CONTENT:
                repeats = any(value.strip() in text for text in asked)
            else:
                repeats = any(value.strip() in text for _, text in texts) or all(text in value for _, text in texts)
            content = bool(value.strip()) and not repeats
            content = content and (name in _CONTENT or (is_pair and name not in _DESCRIPTIVE and " " in value.strip()))
        else:
            content = name in _CONTENT and isinstance(value, list | dict) and bool(value)
        if content:
            raise DataError(
                f"{where}: the text of {key!r} is in no message and would be lost: {str(value)[:60]!r}. Put it into "
                f"the messages (join it to the question), or leave it out with data.ignore_keys=[{key}]",
                key=key,
            )


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs; ValueError for a repeated key, of which JSON would silently keep the last."""
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is repeated in an object")
    return record


def _refuse_deep(value: Any, where: str) -> None:
    """Raise DataError for values nested so deep that templates and JSON writers would exceed the stack."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise DataError(f"{where}: values are nested more than {MAX_DEPTH} deep; flatten them")
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items if isinstance(item, dict | list)]


def _refuse_lone_surrogates(record: Any, where: str) -> None:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(
            f"{where}: {half!r} is half of a character (a lone surrogate), which is no text. Correct or remove it"
        ) from error


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return one message in normal form; DataError with `where` if it cannot be used."""
    if not isinstance(message, dict):
        raise DataError(f"{where}: must be an object with role and content, got a {type(message).__name__}")
    role = ROLES.get(str(message.get("role")))
    if role is None:
        if "from" in message and "value" in message:
            raise DataError(
                f"{where}: 'from' and 'value' are the keys of ShareGPT; write role (system, user, assistant) and "
                "content"
            )
        close = difflib.get_close_matches(str(message.get("role")), ROLES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the role must be one of {', '.join(ROLES)}"
        raise DataError(f"{where}: unknown role {message.get('role')!r}; {hint}")
    # Templates may read further keys (name, tool_call_id, reasoning_content), so they stay. A key with the value null
    # is removed, because it means the same as an absent key.
    parsed = {key: value for key, value in message.items() if value is not None and key != "weight"}
    parsed["role"] = role
    if message.get("function_call") is not None:
        raise DataError(f"{where}: function_call is the old form of a call; write it as one entry of tool_calls")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        if not isinstance(content, list):
            raise DataError(f"{where}: content is a {type(content).__name__}, not text or a list of text parts")
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if not isinstance(part, dict) or kind != "text" or not isinstance(part.get("text"), str):
                raise DataError(f"{where}: content part of type {kind!r}; only text can be trained on")
            texts.append(part["text"])
        content = "".join(texts)
    raw_calls = message.get("tool_calls")
    if raw_calls is not None and not isinstance(raw_calls, list):
        raise DataError(f"{where}: tool_calls is a {type(raw_calls).__name__}, not a list")
    calls = [_tool_call(call, f"{where}, tool call {index}") for index, call in enumerate(raw_calls or [])]
    if content is None and not (role == "assistant" and calls):
        raise DataError(f"{where}: role {role!r} without content")
    if calls and role != "assistant":
        raise DataError(f"{where}: tool_calls on role {role!r}; only the assistant calls tools")
    parsed["content"] = content or ""
    parsed.pop("tool_calls", None)
    if calls:
        parsed["tool_calls"] = calls
    return parsed


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f'{where}: must look like {{"function": {{"name": ..., "arguments": ...}}}}')
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # the OpenAI format has a JSON string, chat templates expect the object
        try:
            arguments = json.loads(arguments, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: the arguments of {function['name']!r} are not JSON ({error})") from error
        _refuse_deep(arguments, where)
    if not isinstance(arguments, dict):
        raise DataError(f"{where}: the arguments of {function['name']!r} must be an object, not {arguments!r}")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
