"""Layouts of published data sets as messages: one test for each layout, with rows as the data sets have them."""

from __future__ import annotations

from typing import Any

import pytest

from raylane.training.text.formats import FORMATS
from raylane.training.text.messages import Conversation, conversation_of

CASES: dict[str, tuple[str, dict[str, Any], list[tuple[str, str]]]] = {
    "conversations_of_messages": (
        "messages",
        {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        [("user", "a"), ("assistant", "b")],
    ),
    "messages_as_text": (
        "messages",
        {"messages": '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'},
        [("user", "a"), ("assistant", "b")],
    ),
    "messages_before_all_others": (
        "messages",
        {"prompt": "a", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        [("user", "a"), ("assistant", "b")],
    ),
    "sharegpt": (
        "ShareGPT",
        {"id": "1", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        [("user", "a"), ("assistant", "b")],
    ),
    "messages_as_an_object_of_lists": (
        "messages",
        {"messages": {"role": ["user", "assistant"], "content": ["why", "so"], "tool_calls": [None, None]}},
        [("user", "why"), ("assistant", "so")],
    ),
    "sharegpt_as_an_object_of_lists": (
        "ShareGPT",
        {"conversations": {"from": ["human", "gpt"], "value": ["why", "so"]}},
        [("user", "why"), ("assistant", "so")],
    ),
    "sharegpt_with_system_beside": (
        "ShareGPT",
        {"system": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        [("system", "s"), ("user", "a"), ("assistant", "b")],
    ),
    "prompt_and_completion": (
        "prompt and completion",
        {"prompt": "a", "completion": "b"},
        [("user", "a"), ("assistant", "b")],
    ),
    "question_and_answer": (
        "question and answer",
        {"question": "a", "answer": "b", "source": "the long name"},
        [("user", "a"), ("assistant", "b")],
    ),
    "query_and_response": ("question and answer", {"query": "a", "response": "b"}, [("user", "a"), ("assistant", "b")]),
    "alpaca": (
        "Alpaca",
        {"instruction": "Add.", "input": "3 and 4", "output": "7", "text": "Below. Add. 3 and 4 7"},
        [("user", "Add.\n\n3 and 4"), ("assistant", "7")],
    ),
    "alpaca_without_input": (
        "Alpaca",
        {"instruction": "Add.", "input": "", "output": "7"},
        [("user", "Add."), ("assistant", "7")],
    ),
    "alpaca_with_history": (
        "Alpaca",
        {"instruction": "c", "output": "d", "system": "s", "history": [["a", "b"]]},
        [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
    ),
    "dolly": (
        "Alpaca",
        {"instruction": "Who?", "context": "Ann did it.", "response": "Ann", "category": "closed_qa"},
        [("user", "Who?\n\nAnn did it."), ("assistant", "Ann")],
    ),
}


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


@pytest.mark.parametrize("name", CASES)
def test_layout_becomes_messages(name: str) -> None:
    layout, row, expected = CASES[name]
    conversation = conversation_of(row, "f:1")
    assert (conversation.layout, turns(conversation)) == (layout, expected)
    assert all(conversation.weights)
    assert layout in FORMATS


def test_only_the_completion_of_messages_is_learned() -> None:
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    row = {"prompt": prompt, "completion": [{"role": "assistant", "content": "d"}], "tools": [{"name": "f"}]}
    conversation = conversation_of(row, "f:1")
    assert [content for _, content in turns(conversation)] == ["a", "b", "c", "d"]
    assert conversation.weights == (False, True)
    assert conversation.tools == ({"name": "f"},)


def test_calls_of_sharegpt_become_calls() -> None:
    row = {
        "conversations": [
            {"from": "human", "value": "2 + 2?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "It is 4.", "weight": 0},
        ],
        "tools": '[{"name": "add"}]',
    }
    conversation = conversation_of(row, "f:1")
    assert turns(conversation) == [("user", "2 + 2?"), ("assistant", ""), ("tool", "4"), ("assistant", "It is 4.")]
    assert conversation.messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    ]
    assert conversation.tools == ({"name": "add"},)
    assert conversation.weights == (True, False)


def test_plain_text_has_no_messages() -> None:
    conversation = conversation_of({"text": "Once upon a time.", "url": "x", "title": "a tale"}, "f:1")
    assert (conversation.text, conversation.messages, conversation.layout) == ("Once upon a time.", (), "text")
    assert conversation.digest() != conversation_of({"text": "Twice."}, "f:1").digest()
