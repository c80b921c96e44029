"""Reading conversations: every form that is accepted, and a message with file and line for every one that is not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from raylane.errors import DataError
from raylane.sft.messages import is_held_out, parse_conversation, read_conversations
from sft.conversations import question, talk, turn, write_jsonl

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_all_roles_and_turns_are_kept_in_order() -> None:
    parsed = talk(turn("developer", "be brief"), turn("user", "hi"), turn("assistant", "ho"), turn("user", "again"))
    assert [message["role"] for message in parsed.messages] == ["system", "user", "assistant", "user"]


def test_tool_call_arguments_become_objects() -> None:
    as_object = {"function": {"name": "add", "arguments": {"a": 1}}}
    parsed = talk(turn("user", "?"), turn("assistant", None, tool_calls=[CALL, as_object]), turn("tool", "2"))
    calls = parsed.messages[1]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == [{"a": 1}, {"a": 1}]
    assert parsed.messages[1]["content"] == ""


def test_text_parts_are_joined() -> None:
    parsed = talk(turn("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), turn("assistant", "c"))
    assert parsed.messages[0]["content"] == "ab"


def test_keys_that_templates_may_read_stay() -> None:
    parsed = talk(
        turn("user", "x", name="Ann"), turn("tool", "y", tool_call_id="c1"), turn("assistant", "z", tool_calls=None)
    )
    assert parsed.messages[0]["name"] == "Ann"
    assert parsed.messages[1]["tool_call_id"] == "c1"
    assert "tool_calls" not in parsed.messages[2]


def test_weights_are_read_for_each_assistant_message() -> None:
    parsed = talk(
        turn("user", "x"), turn("assistant", "a", weight=0), turn("assistant", "b", weight=1), turn("assistant", "c")
    )
    assert parsed.weights == (False, True, True)
    assert all("weight" not in message for message in parsed.messages)


BAD_LINES: list[tuple[Any, list[str]]] = [
    ("{", ["not JSON"]),
    ([1], ["a list"]),
    ({"message": []}, ["no key 'messages'", "data.messages_key=message"]),
    ({"prompt": "a"}, ["no key 'messages' among ['prompt']", "role"]),
    ({"messages": []}, ["at least one message"]),
    ({"messages": ["hi"]}, ["message 0", "a str"]),
    ({"messages": [turn("assistent", "x")]}, ["unknown role 'assistent'", "did you mean 'assistant'?"]),
    ({"messages": [{"content": "x"}]}, ["unknown role None"]),
    ({"messages": [{"role": ["user"], "content": "x"}]}, ["unknown role ['user']"]),
    ({"messages": [turn("user", "half a \ud83d")]}, [r"'\ud83d' is half of a character"]),
    ("[" * 100_000, ["not JSON"]),
    ({"messages": [turn("user", None)]}, ["role 'user' without content"]),
    ({"messages": [turn("assistant", None)]}, ["without content"]),
    ({"messages": [turn("user", 3)]}, ["content is a int"]),
    ({"messages": [turn("user", [{"type": "image_url"}])]}, ["'image_url'", "only text"]),
    ({"messages": [turn("user", "x", tool_calls=[CALL])]}, ["tool_calls on role 'user'"]),
    ({"messages": [turn("assistant", "x", tool_calls=[{"name": "f"}])]}, ["tool call 0", "function"]),
    ({"messages": [turn("assistant", "x", tool_calls={})]}, ["tool_calls is a dict"]),
    (
        {"messages": [turn("assistant", "x", tool_calls=[{"function": {"name": "f", "arguments": "{a"}}])]},
        ["arguments of 'f' are not JSON"],
    ),
    (
        {"messages": [turn("assistant", "x", tool_calls=[{"function": {"name": "f", "arguments": "3"}}])]},
        ["must be an object, not 3"],
    ),
    (
        {"messages": [turn("assistant", "x", weight=0.5)]},
        ["weight must be 0 (context only) or 1 (trained on), got 0.5"],
    ),
    ({"messages": [turn("user", "x")], "tools": {}, "x": 1}, []),
    ({"messages": [turn("user", "x")], "tools": {"a": 1}}, ["'tools' must be a list"]),
]


@pytest.mark.parametrize(("line", "words"), [case for case in BAD_LINES if case[1]])
def test_unusable_row_names_file_and_line(line: Any, words: list[str]) -> None:
    with pytest.raises(DataError) as error:
        parse_conversation(line if isinstance(line, str) else json.dumps(line), "chat.jsonl:7")
    for word in ["chat.jsonl:7", *words]:
        assert word in str(error.value)


def test_surrogate_pairs_are_joined() -> None:
    line = json.dumps({"messages": [turn("user", "\N{GRINNING FACE}")]})
    assert "\\ud83d\\ude00" in line
    assert parse_conversation(line, "chat.jsonl:1").messages[0]["content"] == "\N{GRINNING FACE}"


def test_files_are_read_in_order_without_blank_lines(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [question(1)])
    second = tmp_path / "b.jsonl"
    second.write_text("\ufeff" + json.dumps(question(2)) + "\n\n" + json.dumps(question(3)), encoding="utf-8")
    where = [one.where for one in read_conversations([first, second])]
    assert where == [f"{first}:1", f"{second}:1", f"{second}:3"]


def test_other_keys_may_hold_the_messages(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"conversation": question(1)["messages"]}])
    assert len(list(read_conversations([path], "conversation"))) == 1


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: No such file"):
        list(read_conversations([tmp_path / "none.jsonl"]))
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="holds no conversation"):
        list(read_conversations([tmp_path / "empty.jsonl"]))
    (tmp_path / "latin.jsonl").write_bytes('{"messages": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        list(read_conversations([tmp_path / "latin.jsonl"]))


def test_a_digest_depends_on_the_messages_alone() -> None:
    line = json.dumps(question(1))
    one, other = parse_conversation(line, "a:1"), parse_conversation(line, "b:9")
    assert one.digest() == other.digest()
    assert one.digest() != parse_conversation(json.dumps(question(2)), "a:1").digest()


def test_about_the_asked_part_is_held_out() -> None:
    digests = [parse_conversation(json.dumps(question(seed)), "a:1").digest() for seed in range(2000)]
    assert 150 < sum(is_held_out(digest, 0.1) for digest in digests) < 250
    assert not any(is_held_out(digest, 0.0) for digest in digests)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON"),
        ('{"messages": [], "extra": ' + "[" * 150 + "]" * 150 + "}", "nested more than 100 deep"),
        ('{"messages": ' + "9" * 5000 + "}", "not JSON"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "key 'content' is repeated"),
        ('{"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]}', "entry of tool_calls"),
        ('{"messages": [{"role": "user", "content": "a"}], "functions": [{"name": "f"}]}', "old form of 'tools'"),
    ],
)
def test_lossy_json_names_file_and_line(line: str, words: str) -> None:
    with pytest.raises(DataError, match=rf"f\.jsonl:3[:,] .*{words}"):
        parse_conversation(line, "f.jsonl:3")


@pytest.mark.parametrize("arguments", ['{"a":' * 100_000, '{"a":' * 150 + "1" + "}" * 150, "9" * 5000])
def test_hostile_arguments_are_named_with_file_and_line(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    line = json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    with pytest.raises(DataError, match=r"f\.jsonl:3, message 0, tool call 0: "):
        parse_conversation(line, "f.jsonl:3")


PAIR = ("question", "answer")


def test_pair_of_texts_becomes_two_messages() -> None:
    parsed = parse_conversation('{"question": "a?", "answer": "b", "id": 1}', "f:1", "messages", PAIR)
    assert parsed.messages == ({"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"})
    assert parsed.weights == (True,)
    line = json.dumps({**question(1), "question": "a?", "answer": "b"})
    assert parse_conversation(line, "f:1", "messages", PAIR).messages == talk(*question(1)["messages"]).messages


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            '{"question": "a?"}',
            r"data\.output_key=answer must name a text, found nothing among the keys \['question'\]",
        ),
        ('{"question": ["a"], "answer": "b"}', r"data\.input_key=question must name a text, found \['a'\]"),
    ],
)
def test_pair_without_texts_names_the_line_and_the_key(line: str, told: str) -> None:
    with pytest.raises(DataError, match=rf"f:1: {told}"):
        parse_conversation(line, "f:1", "messages", PAIR)


ALPACA = ("instruction", "output")


@pytest.mark.parametrize(
    "more",
    [
        {"input": "Two numbers: 3 and 4."},
        {"context": "Berlin"},
        {"system": "Be brief."},
        {"history": [["a", "b"]]},
        {"rationale": "because of that"},
    ],
)
def test_pair_with_text_in_another_key_is_refused(more: dict[str, object]) -> None:
    """The input of Alpaca's rows was dropped without a word."""
    line = json.dumps({"instruction": "Add.", "output": "7", **more})
    (key,) = more
    with pytest.raises(DataError, match=rf"f:1: the text of '{key}' is in no message .*data\.ignore_keys=\[{key}\]"):
        parse_conversation(line, "f:1", "messages", ALPACA)
    kept = parse_conversation(line, "f:1", "messages", ALPACA, [key])
    assert [message["content"] for message in kept.messages] == ["Add.", "7"]


@pytest.mark.parametrize(
    "more",
    [
        {"input": ""},
        {"input": "  "},
        {"text": "Below is a task.\n\n### Instruction:\nAdd.\n\n### Response:\n7"},
        {"prompt": "Add."},
        {"id": "row 1 of 2", "source": "a long name of it", "category": "open question"},
        {"quality": "high", "votes": 3, "tags": ["a", "b c"]},
    ],
)
def test_pair_with_descriptions_or_repeats_is_kept(more: dict[str, object]) -> None:
    line = json.dumps({"instruction": "Add.", "output": "7", **more})
    assert len(parse_conversation(line, "f:1", "messages", ALPACA).messages) == 2


def test_messages_beside_a_system_text_are_refused() -> None:
    """Some data sets have the system prompt beside the messages, and others repeat the first message there."""
    messages = question(1)["messages"]
    with pytest.raises(DataError, match=r"the text of 'system' is in no message"):
        parse_conversation(json.dumps({"system": "Be brief.", "messages": messages}), "f:1")
    repeated = {"prompt": messages[0]["content"], "messages": messages, "rejected": "a bad answer"}
    assert len(parse_conversation(json.dumps(repeated), "f:1").messages) == len(messages)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"PAR1\x15\x04\x15", "is a Parquet file"),
        (gzip.compress(b'{"messages": []}', mtime=0), "is compressed by gzip, .*gunzip"),
        (b"\x28\xb5\x2f\xfd\x04", "is compressed by Zstandard"),
        (b"ARROW1\0\0", "is an Arrow file"),
        (b'[\n{"messages": []}\n]', "seems to be one JSON array; .*jq"),
        (b'[{"messages": []}]', "seems to be one JSON array; .*jq"),
        (b'{"messages": [{"from": "human", "value": "a"}]}', "'from' and 'value' are the keys of ShareGPT"),
        (b'{"messages": [{"role": "user", "content": "a"}], "tools": "[]"}', "it is a text here"),
    ],
)
def test_file_of_another_format_is_named(tmp_path, content: bytes, words: str) -> None:
    (tmp_path / "data.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=words):
        list(read_conversations([tmp_path / "data.jsonl"]))
