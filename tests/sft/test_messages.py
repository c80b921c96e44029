"""Rows as conversations: every form that is accepted, and a message with file and line for every one that is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raylane.errors import DataError
from raylane.training.text.formats import ColumnKeys
from raylane.training.text.messages import Conversation, conversation_of, is_held_out, parse_line
from sft.conversations import question, talk, turn


def parsed_line(line: str, where: str, *options: Any) -> Conversation:
    return conversation_of(parse_line(line, where), where, *options)


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
    ([1], ["must be a JSON object, got a list"]),
    ({"message": []}, ["no key 'messages'", "data.messages_key=message"]),
    ({"prompt": "a"}, ["no known layout has the keys ['prompt']", "data.input_key"]),
    ({"chosen": "a", "rejected": "b"}, ["a choice between two answers"]),
    ({"text": 3}, ["'text' is a int, not a text"]),
    ({"conversations": [{"from": "robot", "value": "x"}]}, ["message 0: unknown role 'robot'"]),
    ({"conversations": [{"from": "function_call", "value": "no JSON"}]}, ["tool call 0"]),
    ({"instruction": "a", "output": "b", "history": ["c"]}, ["'history' must be a list of questions"]),
    ({"messages": [turn("user", "x")], "tools": "[{"}, ["'tools' is a text that is not JSON"]),
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
        parsed_line(line if isinstance(line, str) else json.dumps(line), "chat.jsonl:7")
    for word in ["chat.jsonl:7", *words]:
        assert word in str(error.value)


def test_surrogate_pairs_are_joined() -> None:
    line = json.dumps({"messages": [turn("user", "\N{GRINNING FACE}")]})
    assert "\\ud83d\\ude00" in line
    assert parsed_line(line, "chat.jsonl:1").messages[0]["content"] == "\N{GRINNING FACE}"


def test_a_digest_depends_on_the_messages_alone() -> None:
    line = json.dumps(question(1))
    one, other = parsed_line(line, "a:1"), parsed_line(line, "b:9")
    assert one.digest() == other.digest()
    assert one.digest() != parsed_line(json.dumps(question(2)), "a:1").digest()


def test_about_the_asked_part_is_held_out() -> None:
    digests = [parsed_line(json.dumps(question(seed)), "a:1").digest() for seed in range(2000)]
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
        parsed_line(line, "f.jsonl:3")


@pytest.mark.claim("security", "hostile training data is named with file and line, without terminal escapes")
@pytest.mark.parametrize("arguments", ['{"a":' * 100_000, '{"a":' * 150 + "1" + "}" * 150, "9" * 5000])
def test_hostile_arguments_are_named_with_file_and_line(arguments: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    line = json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    with pytest.raises(DataError, match=r"f\.jsonl:3, message 0, tool call 0: "):
        parsed_line(line, "f.jsonl:3")


PAIR = ("question", "answer")


def test_pair_of_texts_becomes_two_messages() -> None:
    parsed = parsed_line('{"question": "a?", "answer": "b", "id": 1}', "f:1", ColumnKeys("messages", PAIR))
    assert parsed.messages == ({"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"})
    assert parsed.weights == (True,)
    line = json.dumps({**question(1), "question": "a?", "answer": "b"})
    assert parsed_line(line, "f:1", ColumnKeys("messages", PAIR)).messages == talk(*question(1)["messages"]).messages


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
        parsed_line(line, "f:1", ColumnKeys("messages", PAIR))


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
        parsed_line(line, "f:1", ColumnKeys("messages", ALPACA))
    kept = parsed_line(line, "f:1", ColumnKeys("messages", ALPACA), [key])
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
    assert len(parsed_line(line, "f:1", ColumnKeys("messages", ALPACA)).messages) == 2


def test_messages_beside_a_system_text_are_refused() -> None:
    """Some data sets have the system prompt beside the messages, and others repeat the first message there."""
    messages = question(1)["messages"]
    with pytest.raises(DataError, match=r"the text of 'system' is in no message"):
        parsed_line(json.dumps({"system": "Be brief.", "messages": messages}), "f:1")
    repeated = {"prompt": messages[0]["content"], "messages": messages, "rejected": "a bad answer"}
    assert len(parsed_line(json.dumps(repeated), "f:1").messages) == len(messages)


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"question": "Which?", "choices": ["alpha one", "beta"], "answer": "B"}, "choices"),
        ({"question": "Which?", "options": {"A": "alpha", "B": "beta"}, "answer": "B"}, "options"),
        ({"question": "问题?", "answer": "答案", "材料": "这是一段很长的中文材料没有空格"}, "材料"),
        ({"messages": question(1)["messages"], "response": "the last answer"}, "response"),
        ({"messages": question(1)["messages"], "reasoning": "because of that"}, "reasoning"),
        ({"messages": question(1)["messages"], "conversations": [{"from": "gpt", "value": "lost"}]}, "conversations"),
        ({"question": "a b", "answer": "c", "notes": [["other text", "more of it"]]}, "notes"),
    ],
)
def test_text_beside_a_conversation_is_refused(row: dict[str, Any], key: str) -> None:
    with pytest.raises(DataError, match=f"f:1: the text of '{key}' is in no message"):
        conversation_of(row, "f:1")
    assert conversation_of(row, "f:1", ColumnKeys(), [key]).messages


@pytest.mark.parametrize("place", ["row", "message"])
def test_images_are_refused_where_they_lie(place: str) -> None:
    row = {"messages": [turn("user", "What is it?"), turn("assistant", "A cat.")]}
    (row if place == "row" else row["messages"][0])["images"] = ["cat.png"]
    with pytest.raises(DataError, match="'images' is no text, and only text can be trained on"):
        conversation_of(row, "f:1")


def test_empty_answers_of_pairs_are_refused() -> None:
    with pytest.raises(DataError, match="f:1: the answer is empty"):
        conversation_of({"question": "a", "answer": " "}, "f:1")
    assert talk(turn("user", "a"), turn("assistant", "")).messages[1]["content"] == ""


@pytest.mark.parametrize("key", ["weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight"])
@pytest.mark.parametrize("off", [0, False, 0.0])
def test_switch_that_is_off_makes_a_message_context(key: str, off: Any) -> None:
    marks = ({key: off}, {key: 1}, {key: None}, {})
    parsed = talk(turn("user", "x"), *(turn("assistant", "a", **mark) for mark in marks))
    assert parsed.weights == (False, True, True, True)
    assert all(key not in message for message in parsed.messages)
    share = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "a", key: off}, {"from": "gpt", "value": "b"}]
    assert conversation_of({"conversations": share}, "f:1").weights == (False, True)


def test_null_mark_does_not_hide_another() -> None:
    """Parquet has a null for each key that another row has."""
    parsed = talk(turn("user", "x"), turn("assistant", "a", weight=None, train=False, train_detail=[]))
    assert parsed.weights == (False,)


PARTS = [{"begin_offset": 0, "end_offset": 3, "train": False}]


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ({"train_detail": PARTS}, "'train_detail' says which parts of a text are learned"),
        ({"training_detail": PARTS}, "'training_detail' says which parts"),
        ({"mask": 1}, "'mask'=1 means in some programs that a message is learned"),
        ({"loss": "no"}, "loss must be 0 .* got 'no'"),
        ({"loss_mask": [0, 1]}, r"loss_mask must be 0 .* got \[0, 1\]"),
        ({"weight": 1, "train": False}, "the marks train=False, weight=1 contradict each other"),
    ],
)
def test_mark_that_cannot_be_honoured_is_refused(mark: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=f"talk.jsonl:1, message 1: {words}"):
        talk(turn("user", "x"), turn("assistant", "answer", **mark))


def test_mark_that_asks_to_learn_another_role_is_refused() -> None:
    with pytest.raises(DataError, match="message 0: train=True asks to learn a message of role 'user'"):
        talk(turn("user", "x", train=True), turn("assistant", "a"))
    assert talk(turn("user", "x", train=False, loss=0), turn("assistant", "a")).weights == (True,)
    prompt = [turn("user", "x"), turn("assistant", "a", weight=1), turn("user", "y")]
    with pytest.raises(DataError, match=r"message 1: .* messages of 'prompt' are context"):
        conversation_of({"prompt": prompt, "completion": [turn("assistant", "b")]}, "f:1")


@pytest.mark.parametrize("row", [question(1), {"question": "a", "answer": "b"}, {"text": "a b"}])
@pytest.mark.parametrize(("key", "value"), [("weight", 0), ("train", False), ("loss_mask", [0, 1]), ("loss", 2.31)])
def test_mark_of_a_row_is_refused_by_name(row: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(DataError, match=rf"f:1: '{key}'=.* beside the messages .* data\.ignore_keys=\[{key}\]"):
        conversation_of({**row, key: value}, "f:1")
    assert conversation_of({**row, key: value}, "f:1", ColumnKeys(), [key])
    assert conversation_of({**row, "weight": 1, "train": True, "loss": None, "mask": "User"}, "f:1")


def test_columns_and_keys_that_nothing_reads_are_named() -> None:
    row = {"messages": [turn("user", "x", name="Ann", emphasis=2), turn("assistant", "a", id="7", loss=1)]}
    parsed = conversation_of(
        {**row, "id": 3, "votes": 4, "quality": "high", "weight": 1}, "f:1", ColumnKeys(), ["votes"]
    )
    assert (parsed.unread_columns, parsed.further_keys) == (("quality",), {"emphasis"})


@pytest.mark.parametrize("arguments", [None, "", "  ", "null", "{}", {}])
def test_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}, {"function": {"name": "f"}}]
    parsed = talk(turn("user", "?"), turn("assistant", None, tool_calls=calls))
    assert [call["function"]["arguments"] for call in parsed.messages[1]["tool_calls"]] == [{}, {}]
