"""Spans of the assistant in a rendered conversation, for chat templates without {% generation %} marks. Pure.

A span begins where the template lets the model begin to write, at the end of its generation prompt, and ends where
the conversation up to this message ends:

    rendered up to the question, with generation prompt    <|user|>Hi<|end|><|assistant|>
    rendered up to the answer                              <|user|>Hi<|end|><|assistant|>Hello<|end|>
    span                                                                                 ^^^^^^^^^^

Both must be prefixes of the whole rendering. Where a template renders an answer in another way when more follows
(without its reasoning, for example), the span ends at the first end token instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

Render = Callable[[Sequence[dict[str, Any]], bool], str]
"""Renders messages as text, with the generation prompt or without it."""

_REASONING_PROMPT = re.compile(r"<think>\s*(</think>\s*)?$")
"""End of a generation prompt that opens the model's reasoning, or closes it: the model writes it in some templates, and
the template in others. It belongs to the span."""
THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
"""Reasoning within a text."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class SpansUnknownError(ValueError):
    """The template renders growing conversations in a way in which the text of the assistant cannot be found."""


def has_marks(template: str) -> bool:
    """Return True if a template marks the text of the assistant by {% generation %}."""
    return _GENERATION.search(template) is not None


def can_be_searched(template: str) -> bool:
    """Return True if a template has a generation prompt, without which it is not known where answers begin."""
    return "add_generation_prompt" in template


def assistant_spans(
    render: Render, messages: Sequence[dict[str, Any]], end_tokens: Sequence[str], specials: Sequence[str]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the rendered conversation, and [start, end) of what the assistant wrote in each of its messages.

    `end_tokens` are the texts of tokens that end a turn, and `specials` those of all special tokens. SpansUnknownError
    if a span cannot be found. Exceptions of the template pass.
    """
    whole = render(messages, False)
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _REASONING_PROMPT.sub("", render(messages[:number], True))
        start = len(prompt)
        # Two answers in succession: templates that join them have no second beginning.
        if not whole.startswith(prompt) or (spans and start < spans[-1][1]):
            raise SpansUnknownError(
                f"message {number} does not begin where the template's generation prompt for it ends: the prompt ends "
                f"with {prompt[-40:]!r}, and the rendered conversation goes on differently"
            )
        is_last = number + 1 == len(messages)
        until = whole if is_last else render(messages[: number + 1], False)
        end = _end(whole, start, until, end_tokens, specials)
        if end is None:
            raise SpansUnknownError(f"the end of message {number} cannot be found in {whole[start : start + 80]!r}")
        if not any(token in whole[start:end] for token in end_tokens):
            # A header of the next message that ends this one, such as <|user|> of GLM.
            end += next((len(token) for token in end_tokens if whole.startswith(token, end)), 0)
        check_answer(number, message, whole[start:end])
        spans.append((start, end))
    return whole, spans


def check_answer(number: int, message: dict[str, Any], answer: str) -> None:
    """Raise SpansUnknownError unless an answer has the text of message `number` and each of its calls."""
    said = [THINK.sub("", message["content"]).strip()]
    said += [call["function"]["name"] for call in message.get("tool_calls", ())]
    # Counted, because a template may write only the first of several calls of a function.
    if lost := [text for text in said if answer.count(text) < said.count(text)]:
        times = "too few times" if lost[0] in answer else "not"
        raise SpansUnknownError(
            f"the chat template leaves out or changes what message {number} says: {lost[0][:40]!r} is {times} in "
            f"{answer[:80]!r}"
        )


def _end(whole: str, start: int, until: str, end_tokens: Sequence[str], specials: Sequence[str]) -> int | None:
    """Return the end of a span; `until` is the conversation that ends with its message."""
    if whole.startswith(until):
        return len(until)
    # Templates that end each conversation with one more token, such as Phi-3's and that of gpt-oss.
    for token in end_tokens:
        stem = until.removesuffix(token)
        if stem != until and whole.startswith(stem):
            if stem.rstrip().endswith(tuple(specials)):
                return len(stem)
            # Within a conversation another special token stands in its place.
            following = [special for special in specials if whole.startswith(special, len(stem))]
            return len(stem) + len(max(following, key=len)) if following else None
    ends = [place + len(token) for token in end_tokens if (place := whole.find(token, start)) >= 0]
    if not ends:
        return None
    end = min(ends)
    # The end of the last turn shows whether white space after the token belongs to a turn.
    after = until[len(until.rstrip()) :]
    return end + len(after) if whole.startswith(after, end) else end
