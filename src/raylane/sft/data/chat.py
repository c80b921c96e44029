"""Conversion of conversations to tokens, with a mask of the tokens that the model is trained on.

The mask comes from the `{% generation %}` spans of the chat template; for templates without such marks, from renderings
of the conversation up to each answer (`spans`), or from the marks of a training version of the template
(`training_templates`). Both give spans of characters, and one rule makes them spans of tokens. This module checks that
spans contain an end-of-turn token, and that they cover exactly what the assistant wrote. transformers is imported when
first needed. Called by `prepare`, `audit` and the command line; knows nothing of data files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raylane.errors import ConfigError, DataError
from raylane.sft.data.spans import (
    THINK,
    SpansUnknownError,
    assistant_spans,
    can_be_searched,
    check_answer,
    has_marks,
)
from raylane.sft.data.training_templates import training_version
from raylane.training.config.policy import TokenizerConfig
from raylane.training.text.messages import REASONING, Conversation
from raylane.training.text.tokenizer import (
    check_template_kwargs,
    folder_end_ids,
    load_tokenizer,
    own_template,
    save_tokenizer,
    template_text,
    use_template,
    vocabulary_size,
)

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_TokensAndSpans = tuple[np.ndarray, list[tuple[int, int]]]


@dataclass(frozen=True)
class Encoded:
    """One tokenised conversation: tokens int32 [n]; supervised bool [n], True for a token with a loss."""

    tokens: np.ndarray
    supervised: np.ndarray
    num_turns: int  # supervised spans, one for each uninterrupted text of the assistant
    num_ended_turns: int  # supervised spans that contain an end token


def chatml_template() -> str:
    """Return raylane's ChatML template, with tools; the end token of every assistant turn is supervised."""
    return own_template("chatml")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Return a transformers tokenizer: a byte-level BPE of at most `vocab_size` tokens. Deterministic.

    Every byte is a token, so no text is unknown. The special tokens are those of `chatml_template`; the token that ends
    a turn is the end-of-sequence token, at which `generate` stops.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Return [start, end) of each uninterrupted run of True in a bool [n]."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _mask(num_tokens: int, spans: Iterable[tuple[int, int]]) -> np.ndarray:
    """Return a bool [num_tokens] that is True within the spans [start, end)."""
    mask = np.zeros(num_tokens, dtype=np.bool_)
    for start, end in spans:
        mask[start:end] = True
    return mask


class ChatTokenizer:
    """A transformers tokenizer with a chat template.

    Attributes: `hf` the tokenizer; `pad_id`, `vocab_size`; `end_ids` the tokens that end a turn; `has_marks`, True if
    the template, or its training version, marks the text of the assistant.
    """

    def __init__(
        self,
        hf: Any,
        template: str | None = None,
        extra_end_ids: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        use_template(hf, template)
        if not hf.is_fast:
            raise DataError(
                f"{type(hf).__name__} does not map tokens to characters, so assistant spans cannot be found; use the "
                "fast form of the tokenizer (tokenizer.json)"
            )
        self.hf, self._fault = hf, _fault(hf.chat_template)
        self._template = training_version(hf.chat_template) if self._fault is None else ""
        self.has_marks = has_marks(self._template)
        if hf.eos_token_id is None and not extra_end_ids:
            raise DataError("the tokenizer has no end-of-sequence token; set eos_token in its tokenizer_config.json")
        check_template_kwargs(hf, template_kwargs or {})
        self._template_kwargs = dict(template_kwargs or {})
        self.end_ids = frozenset([*extra_end_ids, *([] if hf.eos_token_id is None else [hf.eos_token_id])])
        self.pad_id = int(min(self.end_ids) if hf.pad_token_id is None else hf.pad_token_id)
        self.vocab_size = vocabulary_size(hf)
        self._specials = [token.content for token in hf.added_tokens_decoder.values() if token.special]
        self._end_tokens: list[str] = hf.convert_ids_to_tokens(sorted(self.end_ids))

    @classmethod
    def load(
        cls, folder: str | Path, choice: str | None = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> ChatTokenizer:
        """Load from a Hugging Face folder; the other arguments are keys of `policy.tokenizer`."""
        hf = load_tokenizer(folder)
        return cls(hf, template_text(choice), folder_end_ids(Path(folder), hf), template_kwargs)

    @classmethod
    def train(cls, texts: Iterable[str], settings: TokenizerConfig) -> ChatTokenizer:
        """Train a new tokenizer on `texts`, of the size `policy.tokenizer.train_vocab_size`."""
        assert settings.train_vocab_size is not None
        template = template_text(settings.chat_template) or chatml_template()
        # The template is not part of the training: its special tokens are fixed, and its other text is rare.
        hf = train_tokenizer(texts, settings.train_vocab_size)
        return cls(hf, template, template_kwargs=settings.chat_template_kwargs)

    def encode(self, conversation: Conversation) -> Encoded:
        """Return tokens and mask of one conversation; DataError with file and line if the template refuses it.

        Plain text is supervised as a whole, and ended by the end token. ConfigError for messages if the tokenizer has
        no template that can be used.

        A template is a program that runs in transformers' sandbox; each of its exceptions becomes a DataError. The
        sandbox limits neither time nor memory.
        """
        if conversation.text is not None:
            ids = list(map(int, self.hf(conversation.text)["input_ids"]))
            if not ids or ids[-1] not in self.end_ids:
                ids.append(min(self.end_ids) if self.hf.eos_token_id is None else self.hf.eos_token_id)
            learned = np.ones(len(ids), dtype=np.bool_)
            learned[0] = False  # as in a conversation
            return Encoded(np.asarray(ids, dtype=np.int32), learned, 1, 1)
        if self._fault is not None:
            raise ConfigError(self._fault)
        try:
            tokens, spans = self._marked(conversation) if self.has_marks else self._rendered(conversation)
        except SpansUnknownError as error:
            raise DataError(
                f"{conversation.where}: {error}. Change the conversation, or name a template with {{% generation %}} "
                "marks in policy.tokenizer.chat_template, such as chatml or llama3 (docs/howto/prepare-data.md)"
            ) from error
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise DataError(f"{conversation.where}: the chat template refuses this conversation: {reason}") from error
        # Templates know nothing of `weight`, so spans of messages with weight 0 are removed here.
        if not all(conversation.weights):
            if len(spans) != len(conversation.weights):
                raise DataError(
                    f"{conversation.where}: weight: 0 needs one generation span per assistant message, but the chat "
                    f"template makes {len(spans)} spans for {len(conversation.weights)} assistant messages. Remove "
                    "the weights, or use a template with one span per message"
                )
            spans = [span for span, weight in zip(spans, conversation.weights, strict=True) if weight]
        supervised = _mask(len(tokens), spans)
        ends = np.any([tokens == token for token in self.end_ids], axis=0)  # faster than np.isin for a few of them
        ended = sum(bool(ends[start:end].any()) for start, end in spans)
        if supervised.size:
            supervised[0] = False  # no token precedes it, so nothing can predict it
        return Encoded(tokens, supervised, len(spans), ended)

    def _template_options(self, conversation: Conversation) -> dict[str, Any]:
        return {"tools": list(conversation.tools) if conversation.tools else None, **self._template_kwargs}

    def _marked(self, conversation: Conversation) -> _TokensAndSpans:
        """Return the tokens, and the spans of them that the marks of the template say."""
        from transformers.utils.chat_template_utils import render_jinja_template

        # Not `apply_chat_template`, whose mask (5.23) is wrong for tokenizers that drop blanks: a span whose last
        # character has no token runs to the end of the row, and one whose first has none ends the search for spans.
        (text,), (parts,) = render_jinja_template(
            [list(conversation.messages)],
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            **{**self.hf.special_tokens_map, **self._template_options(conversation)},
        )
        tokens, spans = self._spans_of_tokens(text, parts)
        # Templates may mark one message in several blocks, which then touch each other.
        if len(spans) != len(conversation.weights):
            spans = runs(_mask(len(tokens), spans))
        # A user who writes marks may change texts on purpose. Ours must refuse what the search refuses.
        if self._template != self.hf.chat_template:
            numbered = [pair for pair in enumerate(conversation.messages) if pair[1]["role"] == "assistant"]
            for (number, message), (start, end) in zip(numbered, spans, strict=True):
                check_answer(number, message, self.decode(tokens[start:end]))
        return tokens, spans

    def _rendered(self, conversation: Conversation) -> _TokensAndSpans:
        """Return the same for a template without marks: a span of tokens for each message of the assistant."""
        options = self._template_options(conversation)

        def render(messages: Sequence[dict[str, Any]], with_prompt: bool) -> str:
            text: str = self.hf.apply_chat_template(
                list(messages),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=with_prompt,
                **options,
            )
            return text

        text, parts = assistant_spans(render, conversation.messages, self._end_tokens, self._specials)
        return self._spans_of_tokens(text, parts)

    def _spans_of_tokens(self, text: str, parts: Sequence[tuple[int, int]]) -> _TokensAndSpans:
        """Return the tokens of a rendered text, and the span of tokens of each span of characters; (0, 0) for none."""
        # The template writes the special tokens itself.
        out = self.hf(text, add_special_tokens=False, return_offsets_mapping=True)
        begins, ends = np.asarray(out["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        spans = []
        for start, end in parts:
            # A token that begins before the span and ends in it counts too. Characters without a token are passed over.
            inside = np.flatnonzero((ends > start) & (begins < end))
            spans.append((int(inside[0]), int(inside[-1]) + 1) if inside.size else (0, 0))
        return np.asarray(out["input_ids"], dtype=np.int32), spans

    def reads(self, key: str) -> bool:
        """Return True if the chat template names this key of a message."""
        return re.search(rf"(?<!\w){re.escape(key)}(?!\w)", self._template) is not None

    def question(self, text: str) -> list[int]:
        """Return the tokens of one message of the user, and of what the template puts before the answer to it."""
        messages = [{"role": "user", "content": text}]
        out = self.hf.apply_chat_template(
            messages, tokenize=True, return_dict=True, add_generation_prompt=True, **self._template_kwargs
        )
        return list(map(int, out["input_ids"]))

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens without special tokens and without space around it."""
        text: str = self.hf.decode(tokens, skip_special_tokens=True)
        return text.strip()

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of tokens int [n], special tokens included."""
        text: str = self.hf.decode(tokens.tolist(), skip_special_tokens=False)
        return text

    def special_in(self, conversation: Conversation) -> str | None:
        """Return a special token that the messages contain as text, or None.

        Such text would become the real special token and could imitate a turn of another role.
        """
        text = conversation.text or json.dumps(conversation.messages, ensure_ascii=False)
        return next((token for token in self._specials if token in text), None)

    def misplaced(self, conversation: Conversation, encoded: Encoded) -> str | None:
        """Return the fault in the mask of this conversation, or None if the mask covers the assistant's text only."""
        supervised_text = self.decode(encoded.tokens[encoded.supervised])
        assistant = [message for message in conversation.messages if message["role"] == "assistant"]
        # Tool calls and reasoning are the assistant's words too, and often repeat the question.
        assistant_text = "\n".join(_texts_in(assistant))
        assistant_text += "\n" + self._round_trip(assistant_text)
        others = [message["content"].strip() for message in conversation.messages if message["role"] != "assistant"]
        for text in others:
            # A wrong mask may start or end within the text, so both ends are searched. Short parts occur by chance.
            for part in (text[:20], text[-20:]):
                if len(part) >= 16 and part in supervised_text and part not in assistant_text:
                    return f"the loss would include what the assistant did not write: {part!r}"
        # After an end token stands the next message, whose text counts however short it is.
        following = self._after_end(encoded)
        for text in filter(None, others):
            if text in following and text not in assistant_text:
                return f"the loss would include what the assistant did not write: {text[:60]!r}"
        weighted = zip(assistant, conversation.weights, strict=True)
        trained = [message["content"].strip() for message, weight in weighted if weight]
        # A template may leave earlier answers out of the loss, but not the last one.
        if trained and not self._contains(trained[-1], supervised_text):
            return f"the loss would not include what the assistant wrote: {trained[-1][:60]!r}"
        return None

    def _after_end(self, encoded: Encoded) -> str:
        """Return the supervised text that follows an end token without a break."""
        parts = []
        for start, end in runs(encoded.supervised):
            ends = [index for index in range(start, end) if int(encoded.tokens[index]) in self.end_ids]
            parts.append(self.decode(encoded.tokens[ends[0] + 1 : end]) if ends else "")
        return "\n".join(parts)

    def _contains(self, text: str, supervised_text: str) -> bool:
        """Return True if `supervised_text` contains this text, also if normalised or without its <think> parts.

        Tokenizers may change text (Unicode NFC), and templates may leave out reasoning that is part of the content of
        earlier turns.
        """
        spoken = THINK.sub("", text).strip()
        return any(
            variant in supervised_text or self._round_trip(variant).strip() in supervised_text
            for variant in (text, spoken)
        )

    def _round_trip(self, text: str) -> str:
        """Return a text after encoding and decoding."""
        ids: list[int] = self.hf(text, add_special_tokens=False)["input_ids"]
        back: str = self.hf.decode(ids, skip_special_tokens=False)
        return back

    def reasoning_left_out(self, conversation: Conversation, encoded: Encoded) -> bool:
        """Return True if an assistant message has reasoning that the template did not include.

        Reasoning stands in a key of its own, or as <think> within the content.
        """
        reasoned = [
            text
            for message in conversation.messages
            if message["role"] == "assistant"
            for text in (_reasoning(message), *map(_inner, THINK.findall(message["content"])))
            if text
        ]
        if not reasoned:
            return False
        text = self.decode(encoded.tokens)
        return any(not self._contains(part, text) for part in reasoned)

    def save(self, folder: Path) -> None:
        """Write the tokenizer as a Hugging Face folder, with its own template and not the training version of it.

        The folder names all end tokens, so that a tokenizer that is loaded from it has them too.
        """
        save_tokenizer(self.hf, sorted(self.end_ids), folder)


def _fault(template: Any) -> str | None:
    """Return why a tokenizer with this chat template cannot encode messages, and the remedy; None if it can."""
    if not template:
        return "the tokenizer has no chat template; set policy.tokenizer.chat_template=chatml, or to a Jinja file"
    if not isinstance(template, str):
        return f"the tokenizer has several chat templates ({', '.join(template)}); name one in a Jinja file"
    if has_marks(template) or can_be_searched(template):
        return None
    return (
        "the chat template neither marks the text of the assistant by {% generation %} ... {% endgeneration %} nor has "
        "a generation prompt (add_generation_prompt), so it is not known where answers begin. Add the marks to a copy "
        "of it, and name the file in policy.tokenizer.chat_template; or set policy.tokenizer.chat_template=chatml or "
        "llama3 if the model knows the tokens of one of these (docs/howto/prepare-data.md)"
    )


def _reasoning(message: dict[str, Any]) -> str:
    reasoning = next((message[key] for key in REASONING if message.get(key)), "")
    return reasoning.strip() if isinstance(reasoning, str) else ""


def _inner(think: str) -> str:
    """Return the reasoning between <think> and </think>."""
    return think.removeprefix("<think>").removesuffix("</think>").strip()


def _texts_in(value: Any) -> list[str]:
    """Return every text within plain values, and every mapping as JSON in the forms that a template may use."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        written = [json.dumps(value, ensure_ascii=ascii_only) for ascii_only in (False, True)]
        return written + [text for item in value.values() for text in _texts_in(item)]
    return [text for item in value for text in _texts_in(item)] if isinstance(value, list) else []
