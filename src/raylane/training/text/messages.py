"""Rows of data sets as conversations: checked, and converted to one form.

A row holds OpenAI-style messages, or what `formats` makes messages of, and optional `tools`: roles system, user,
assistant and tool; several turns; `content` as text or a list of text parts; `tool_calls` whose arguments may be a JSON
string; `weight: 0`, or another mark of `marks`, on an assistant message that is context only. Anything unusable raises
DataError with file and line, also a further text in a row that no message has; nothing is skipped silently. Knows
nothing of files and of tokens. Called by `encoding`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raylane.errors import DataError
from raylane.training.text.formats import ALPACA, COMPLETION, PAIR, TEXT, ColumnKeys, formatted
from raylane.training.text.marks import MARKS, is_learned, refuse_row_marks

# JSON can hold half of a surrogate pair (a character above U+FFFF). Half a pair is no text, and tokenizers refuse it.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MAX_DEPTH = 100
_ANSWERS = {
    *("answer", "answers", "response", "responses", "output", "outputs", "completion", "completions", "target"),
    *("reasoning", "rationale", "thought", "thoughts", "explanation"),
}
"""Keys of a row that hold what the assistant says in published data sets."""
_CONTENT = _ANSWERS | {
    *("system", "system_prompt", "instruction", "instructions", "prompt", "question", "query", "input", "inputs"),
    *("context", "contexts", "passage", "passages", "document", "documents", "knowledge", "history", "facts"),
    *("choices", "options", "candidates", "examples", "hint", "hints", "conversation", "conversations", "dialogue"),
}
"""Keys of a row that hold a part of the conversation in published data sets."""
_LONG_WORD = 8
_MEDIA = {"image", "images", "audio", "audios", "video", "videos"}
"""Keys of a row, or of a message, that hold what is no text."""
_DESCRIPTIVE = {
    *("id", "uid", "uuid", "source", "dataset", "dataset_name", "subset", "split", "category", "categories", "type"),
    *("task", "task_name", "topic", "domain", "title", "language", "lang", "license", "model", "generator", "author"),
    *("url", "date", "timestamp", "tags", "difficulty", "score", "comment", "note"),
}
"""Keys of a line whose text describes the conversation and is no part of it."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which chat templates of transformers 5 find its reasoning (chat_template_utils)."""
_READ = {"role", "content", "tool_calls", "tool_call_id", "name", *REASONING}
"""Keys of a message that conversion, or the usual template, reads."""
_USUAL = ColumnKeys()
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True)
class Conversation:
    """One row of a data set. `where` is 'file:line', for messages."""

    where: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] | None
    weights: tuple[bool, ...]  # for each assistant message, in order: True if it is trained on
    text: str | None = None  # of a row of plain text, which has no messages and is learned as it is
    layout: str = "messages"  # one of `formats.FORMATS`
    unread_columns: tuple[str, ...] = ()  # of the row: no part of the conversation, and no usual description of it

    @property
    def further_keys(self) -> set[str]:
        """Keys of messages that are neither read here nor usual descriptions; a template may read them."""
        return {key for message in self.messages for key in message} - _READ - _DESCRIPTIVE

    def with_prompt(self, prompt: str) -> Conversation:
        """Return the conversation with the user's first message in the place of {} in `prompt`."""
        first = next((index for index, message in enumerate(self.messages) if message["role"] == "user"), None)
        if first is None:
            raise DataError(f"{self.where}: data.prompt needs a message of the user. Remove data.prompt, or the row")
        message = {**self.messages[first], "content": prompt.format(self.messages[first]["content"])}
        return replace(self, messages=(*self.messages[:first], message, *self.messages[first + 1 :]))

    def digest(self) -> int:
        """Return a hash of 64 bits of messages, tools and text, equal for duplicates in any file."""
        content = [self.messages, self.tools] if self.text is None else self.text
        encoded = json.dumps(content, sort_keys=True, ensure_ascii=False).encode()
        return int.from_bytes(hashlib.blake2b(encoded, digest_size=16).digest()[:8], "big")


def is_held_out(digest: Any, fraction: float) -> Any:
    """Return True if a conversation with this digest belongs to the held-out part; the same on every machine.

    `digest` is a number, or an array of them.
    """
    return digest < fraction * 2.0**64


def parse_line(line: str, where: str) -> dict[str, Any]:
    """Return one line of JSON as an object; DataError with `where` if it is none, or if a part of it would be lost."""
    try:
        record = json.loads(line, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of more than 4,300 digits
        raise DataError(f"{where}: not JSON ({error}); every line must be one JSON object") from error
    refuse_deep(record, where)
    if _SURROGATE.search(line):  # a cheap test first: encoding every record again would be slow
        _refuse_lone_surrogates(record, where)
    if not isinstance(record, dict):
        raise DataError(f"{where}: a line must be a JSON object, got a {type(record).__name__}")
    return record


def conversation_of(
    record: Mapping[str, Any], where: str, keys: ColumnKeys = _USUAL, ignore_keys: Collection[str] = ()
) -> Conversation:
    """Return a row as a Conversation; DataError with `where` if it is not one.

    Other columns of the row that hold a part of the conversation are an error, except `ignore_keys`.
    """
    record = _with_lists(record, (keys.messages, "conversations", "tools"), where)
    row = formatted(record, keys, where)
    rest = {key: value for key, value in record.items() if key not in row.used and key not in ignore_keys}
    refuse_row_marks(rest, where)
    unread = tuple(sorted(key for key in rest.keys() - MARKS if key.lower() not in _DESCRIPTIVE))
    if row.text is not None:
        _refuse_unused(rest, [("assistant", row.text)], False, where)
        return Conversation(where, (), None, (), row.text, TEXT, unread)
    messages = row.messages
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: {keys.messages!r} must be a list of at least one message")
    parsed = tuple(_message(message, f"{where}, message {index}") for index, message in enumerate(messages))
    learned = [
        is_learned({**raw, "role": message["role"]}, f"{where}, message {index}")
        for index, (raw, message) in enumerate(zip(messages, parsed, strict=True))
    ]
    weights = [
        mark is not False for mark, message in zip(learned, parsed, strict=True) if message["role"] == "assistant"
    ]
    texts = [(message["role"], message["content"]) for message in parsed]
    is_pair = row.layout in (PAIR, ALPACA, COMPLETION)
    _refuse_unused(rest, texts, is_pair, where)
    # A cell that is missing is empty in CSV, and an empty answer teaches to end at once.
    if is_pair and not parsed[-1]["content"].strip() and "tool_calls" not in parsed[-1]:
        raise DataError(f"{where}: the answer is empty. Correct or remove the row, or set data.on_bad_row=skip")
    return Conversation(where, parsed, _tools(record, where), tuple(weights), None, row.layout, unread)


def prompt_of(record: Mapping[str, Any], key: str, where: str) -> Conversation:
    """Return the prompt under `key` of a row, a text or messages, as a Conversation; DataError as `conversation_of`."""
    prompt = record.get(key)
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise DataError(f"{where}: no {key!r}, which must be a text or messages. Set data.prompt_key to its key")
    record = _with_lists(record, ("tools",), where)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list):
        raise DataError(f"{where}: {key!r} is a {type(prompt).__name__}, and must be a text or a list of messages")
    parsed = tuple(_message(message, f"{where}, message {index}") for index, message in enumerate(messages))
    if parsed[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: {key!r} ends with a message of the assistant, which the model would have to answer. Remove it"
        )
    return Conversation(where, parsed, _tools(record, where), ())


def _tools(record: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ...] | None:
    if record.get("functions") and not record.get("tools"):
        raise DataError(f"{where}: 'functions' is the old form of 'tools'; write each as an entry of 'tools'")
    tools = record.get("tools")
    if not (tools.strip() if isinstance(tools, str) else tools):
        tools = []
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"{where}: 'tools' must be a list of tool descriptions (objects), got {str(tools)[:60]!r}")
    return tuple(tools) or None


def _with_lists(record: Mapping[str, Any], names: Iterable[str], where: str) -> dict[str, Any]:
    """Return a row with its columns that hold a list as text, as tables do, as lists."""
    lists = {}
    for name in names:
        value = record.get(name)
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                lists[name] = json.loads(value, object_pairs_hook=without_repeats)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: {name!r} is a text that is not JSON ({error}). Correct it") from error
            refuse_deep(lists[name], where)
    return {**record, **lists}


def _refuse_unused(rest: Mapping[str, Any], texts: Sequence[tuple[str, str]], is_pair: bool, where: str) -> None:
    """Raise DataError for a key of a line whose text belongs to the conversation and is in none of its messages.

    `texts` has (role, content) of each message.
    Of lines with a question and an answer every text of several words counts, unless the key is a usual one of
    descriptions: such lines have no other place for content.
    """
    # An input repeats the question that it was joined to; an answer that contains it by chance does not count.
    asked = [text for role, text in texts if role != "assistant"]
    said = [text for role, text in texts if role == "assistant"]
    parts = [part for _, text in texts for part in text.split("\n\n")]
    for key, value in rest.items():
        name = key.lower()
        if name in _MEDIA and value:
            raise DataError(f"{where}: {key!r} is no text, and only text can be trained on. Leave it out", key=key)
        for text in _texts(value):
            if name in _CONTENT:
                lost = not any(text in other for other in (said if name in _ANSWERS else asked))
            else:
                # Alpaca's `text` repeats all others.
                repeats = any(text in other for _, other in texts) or all(part in text for part in parts)
                # One word describes, unless it is of a script without spaces.
                is_prose = len(text.split()) > 1 or (len(text) > _LONG_WORD and not text.isascii())
                lost = is_pair and name not in _DESCRIPTIVE and is_prose and not repeats
            if not lost:
                continue
            raise DataError(
                f"{where}: the text of {key!r} is in no message and would be lost: {text[:60]!r}. Put it into "
                f"the messages (join it to the question), or leave it out with data.ignore_keys=[{key}]",
                key=key,
            )


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts that are not blank in a value, however deep."""
    if isinstance(value, str):
        if value.strip():
            yield value.strip()
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs; ValueError for a repeated key, of which JSON would silently keep the last."""
    record = dict(pairs)
    if len(record) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is repeated in an object")
    return record


def refuse_deep(value: Any, where: str) -> None:
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
        close = difflib.get_close_matches(str(message.get("role")), ROLES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the role must be one of {', '.join(ROLES)}"
        raise DataError(f"{where}: unknown role {message.get('role')!r}; {hint}")
    # Templates may read further keys (name, tool_call_id, reasoning_content), so they stay. A key with the value null
    # is removed, because it means the same as an absent key.
    parsed = {key: value for key, value in message.items() if value is not None and key not in MARKS}
    parsed["role"] = role
    if media := next((key for key in _MEDIA if message.get(key)), None):
        raise DataError(f"{where}: {media!r} is no text, and only text can be trained on. Leave it out")
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
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        # The OpenAI format has a JSON string, chat templates expect the object.
        try:
            arguments = json.loads(arguments, object_pairs_hook=without_repeats)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: the arguments of {function['name']!r} are not JSON ({error})") from error
        refuse_deep(arguments, where)
    # A call without arguments has null or an empty text in some data sets.
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if not isinstance(arguments, dict):
        raise DataError(f"{where}: the arguments of {function['name']!r} must be an object, not {arguments!r}")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
