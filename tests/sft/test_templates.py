"""Spans of the assistant in renderings of published chat templates, compared with TRL's marked versions of them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raylane.errors import ConfigError, DataError
from raylane.sft.data.chat import ChatTokenizer, Encoded, train_tokenizer
from raylane.sft.data.training_templates import training_version
from raylane.training.text.messages import Conversation

SPEC = importlib.util.find_spec("trl")  # its code is not run, which would need more packages
assert SPEC is not None, "run `make setup`"
assert SPEC.submodule_search_locations is not None
FOLDER = Path(SPEC.submodule_search_locations[0]) / "chat_templates"
UNMARKED = sorted(path.stem for path in FOLDER.glob("*.jinja") if "endgeneration" not in path.read_text())

# What TRL's marked version does otherwise; docs/reference/chat-templates.md has the reasons.
HEADER_IS_TRAINED = {"qwen2_5", "deepseekv3", "deepseek_r1_distill", "gptoss", "muse_glimmer"}
HEADERS = re.compile("(\n|<[|]start[|]>assistant|<\uff5cAssistant\uff5c>|<\uff5ctool▁outputs▁end\uff5c>)+")
"""Text that only TRL trains on in these: headers that the generation prompts have."""
EARLIER_REASONING_IS_KEPT = {"qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}
MARKED = {"gptoss", "glm4moe"}
"""Templates with a training version that has marks."""
CHANGED = MARKED | {"deepseekv3", "deepseek_r1_distill"}
"""Templates with a training version."""
IMAGES = {"llava_next", "idefics3", "smolvlm"}
LOSES_CALLS = {"deepseek_r1_distill", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl"}
"""Templates that write nothing of a call, or nothing of one beside a text."""
LOSES_TEXT = {
    *((name, case) for name in LOSES_CALLS for case in ("call", "text and call")),
    *((name, "text and call") for name in ("llama3_1", "llama3_2", "gptoss", "diffusion_gemma", "gemma4_v5")),
    ("muse_glimmer", "text and call"),
}
"""Conversations of which a template leaves something out, or which it joins."""
OTHER_ENDS = {"gptoss"}
"""Templates in which another token ends a turn within a conversation."""

END_TOKENS = {
    *("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<\uff5cend▁of▁sentence\uff5c>", "<|eot|>"),
    *("<|END_OF_TURN_TOKEN|>", "<|return|>", "</s>"),
}
ENDS_OF = {"gptoss": ["<|return|>", "<|call|>"], "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"]}
"""Tokens that end a turn in the published settings of generation."""
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call12345", "content": "sunny"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name"}},
            "required": ["city"],
        },
    },
}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [user("Hi?"), answer("Hello.")],
    "system": [system("Be brief."), user("Hi?"), answer("Hello.")],
    "three turns": [user("A?"), answer("B."), user("C?"), answer("D."), user("E?"), answer("F.")],
    "system and turns": [system("Be brief."), user("A?"), answer("B."), user("C?"), answer("D.")],
    "call": [user("Weather?"), answer("", tool_calls=[CALL]), RESULT, answer("Sunny.")],
    "text and call": [user("Weather?"), answer("I look.", tool_calls=[CALL]), RESULT, answer("Sunny.")],
    "reasoning": [user("2+2?"), answer("4", reasoning_content="two and two")],
    "reasoning in turns": [
        *(user("2+2?"), answer("4", reasoning_content="two and two")),
        *(user("3+3?"), answer("6", reasoning_content="three and three")),
    ],
    "reasoning in the text": [
        *(user("2+2?"), answer("<think>\nx\n</think>\n\n4")),
        *(user("3+3?"), answer("<think>\nz\n</think>\n\n6")),
    ],
    "unicode": [user("Grüße 你好?"), answer("Ünïcode 🙂 é.")],
    "empty answer": [user("Say nothing."), answer("")],
    "white space": [user("  x  "), answer("  y \n")],
}
MORE_ORDERS: dict[str, list[dict[str, Any]]] = {
    "two answers": [user("A?"), answer("B."), answer("C."), user("D?"), answer("E.")],
    "a call at the end": [user("Weather?"), answer("", tool_calls=[CALL], reasoning_content="I look.")],
    "a question at the end": [user("A?"), answer("B."), user("C?")],
    "two results": [user("Weather?"), answer("", tool_calls=[CALL]), RESULT, RESULT, answer("Sunny.")],
    "a question after a call": [user("Weather?"), answer("", tool_calls=[CALL]), user("And?"), answer("Sunny.")],
    "a late system text": [user("A?"), answer("B."), system("Be brief."), user("C?"), answer("D.")],
}


def tokenizer_of(name: str, kind: str = "") -> ChatTokenizer:
    """Return a byte tokenizer that has the special tokens of a published template, with it or its marked version."""
    published = (FOLDER / f"{name}.jinja").read_text()
    specials = set(
        re.findall("<[|\uff5c][^|\uff5c<>]{1,30}[|\uff5c]>|<turn[|]>|<[|]turn>|<(?:start|end)_of_turn>", published)
    )
    hf = train_tokenizer(["abc"], 259)
    hf.add_special_tokens({"additional_special_tokens": sorted(specials | {"</s>", "<s>"})})
    hf.eos_token, hf.bos_token = ENDS_OF.get(name, ["</s>"])[0], "<s>"
    ends = {hf.convert_tokens_to_ids(token) for token in END_TOKENS & (specials | {"</s>"})}
    if name in ENDS_OF:
        ends = set(hf.convert_tokens_to_ids(ENDS_OF[name]))
    return ChatTokenizer(hf, (FOLDER / f"{name}{kind}.jinja").read_text(), sorted(ends))


def conversation_of(case: str) -> Conversation:
    messages = (CONVERSATIONS | MORE_ORDERS)[case]
    tools = (TOOL,) if "call" in case else None
    return Conversation(case, tuple(messages), tools, (True,) * sum(each["role"] == "assistant" for each in messages))


def encoded_or_refusal(tokenizer: ChatTokenizer, case: str) -> Encoded | str:
    try:
        return tokenizer.encode(conversation_of(case))
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("name", sorted(set(UNMARKED) - IMAGES))
def test_answers_are_those_of_the_marked_version(name: str) -> None:
    ours = tokenizer_of(name)
    assert ours.has_marks == (name in MARKED)
    theirs = tokenizer_of(name, "_training") if (FOLDER / f"{name}_training.jinja").exists() else None
    for case in CONVERSATIONS:
        found = encoded_or_refusal(ours, case)
        if isinstance(found, str):
            assert ("the chat template refuses" in found) != ((name, case) in LOSES_TEXT), found
            continue
        assert (name, case) not in LOSES_TEXT
        assert found.num_turns == sum(each["role"] == "assistant" for each in CONVERSATIONS[case])
        assert ours.misplaced(conversation_of(case), found) is None
        if name not in OTHER_ENDS and case != "call":  # a call may wait for its result within the turn
            assert found.num_ended_turns == found.num_turns
        if theirs is None:
            continue
        expected = theirs.encode(conversation_of(case))
        is_same_text = np.array_equal(found.tokens, expected.tokens)
        if (name, case) == ("diffusion_gemma", "call"):
            continue  # it writes a header after the result of a call, but no generation prompt
        if name in HEADER_IS_TRAINED and is_same_text:
            assert not (found.supervised & ~expected.supervised).any()  # they begin earlier
            assert HEADERS.fullmatch(theirs.decode(found.tokens[expected.supervised & ~found.supervised])), case
        elif is_same_text:
            assert np.array_equal(found.supervised, expected.supervised), case
        else:
            in_text = (name, case) == ("deepseek_r1_distill", "reasoning in the text")
            assert name in EARLIER_REASONING_IS_KEPT or in_text, case


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_template_of_images_is_refused(name: str) -> None:
    with pytest.raises(
        (ConfigError, DataError), match=r"neither marks the text|leaves out or changes what message 1 says: 'Hello.'"
    ):
        tokenizer_of(name).encode(conversation_of("one turn"))


def rendered(tokenizer: ChatTokenizer, case: str, template: str) -> str:
    conversation = conversation_of(case)
    messages, tools = list(conversation.messages), list(conversation.tools or ()) or None
    return str(tokenizer.hf.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False))


@pytest.mark.parametrize("name", sorted(UNMARKED))
def test_training_version_renders_the_published_text(name: str) -> None:
    published = (FOLDER / f"{name}.jinja").read_text()
    template = training_version(published)
    assert training_version(published + "\n") == (template + "\n" if name in CHANGED else published + "\n")
    if name not in CHANGED:
        assert template == published
        return
    tokenizer = tokenizer_of(name)
    for case, messages in (CONVERSATIONS | MORE_ORDERS).items():
        if name == "deepseekv3" and any("tool_calls" in message for message in messages):
            with pytest.raises(TypeError, match='can only concatenate str \\(not "dict"'):
                rendered(tokenizer, case, published)
            continue
        expected = rendered(tokenizer, case, published)
        if name == "glm4moe" and messages[-1]["role"] == "assistant":
            expected += "<|observation|>" if "tool_calls" in messages[-1] else "<|user|>"
        if (name, case) == ("deepseek_r1_distill", "reasoning in the text"):
            expected = expected.replace("\n\n6", "<think>\nz\n</think>\n\n6")
        assert rendered(tokenizer, case, template) == expected, case


@pytest.mark.parametrize("name", sorted(MARKED))
def test_training_version_marks_one_span_per_answer(name: str) -> None:
    for case, messages in MORE_ORDERS.items():
        found = tokenizer_of(name).encode(conversation_of(case))
        assert found.num_turns == sum(each["role"] == "assistant" for each in messages), case


def test_second_call_that_a_template_drops_is_refused() -> None:
    messages = (user("Weather?"), answer("", tool_calls=[CALL, CALL]), RESULT, RESULT, answer("Sunny."))
    for name, is_kept in (("gptoss", False), ("glm4moe", True), ("deepseekv3", True), ("qwen3", True)):
        conversation = Conversation("row 7", messages, (TOOL,), (True, True))
        if is_kept:
            tokenizer_of(name).encode(conversation)
            continue
        with pytest.raises(DataError, match=r"row 7: the chat template leaves out .* 'weather' is too few times in"):
            tokenizer_of(name).encode(conversation)


@pytest.mark.parametrize("name", sorted(CHANGED))
def test_saved_template_is_the_published_one(name: str, tmp_path: Path) -> None:
    tokenizer_of(name).save(tmp_path)
    assert (tmp_path / "chat_template.jinja").read_text() == (FOLDER / f"{name}.jinja").read_text()
    assert "generation" not in tokenizer_of(name).decode(np.asarray(tokenizer_of(name).question("Hi?")))
