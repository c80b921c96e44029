"""From a conversation to tokens, with a mask of those the model is trained on.

The mask comes from the `{% generation %}` spans of the chat template, through transformers' own
`return_assistant_tokens_mask`; here it is made sure that there are such spans, that an end-of-turn token lies inside
them, and that they cover what the assistant wrote and nothing else. transformers is imported when first needed.
Called by `data.py`, `audit.py` and the command line; knows nothing of files of data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raylane.errors import ConfigError, DataError

if TYPE_CHECKING:
    from raylane.sft.config import TokenizerConfig
    from raylane.sft.messages import Conversation

__all__ = ["ChatTokenizer", "Encoded", "chatml_template", "runs", "template_text", "train_tokenizer"]

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_OWN_TEMPLATES = {
    "chatml": (START, END),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
"""Templates that come with raylane (NAME.jinja beside this file), and the tokens of each; the last one ends a turn."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which transformers 5 passes a message's reasoning to templates (its chat_template_utils)."""
_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Encoded:
    """One conversation. tokens: int32[n]; supervised: bool[n], True for a token that the model learns to say."""

    tokens: np.ndarray
    supervised: np.ndarray
    num_turns: int  # supervised spans: what the assistant says in one go
    num_ended_turns: int  # those that hold an end token


def chatml_template() -> str:
    """The chat template that comes with raylane: ChatML with tools, every assistant turn marked with its end token."""
    return _own_template("chatml")


def _own_template(name: str) -> str:
    return (Path(__file__).parent / f"{name}.jinja").read_text(encoding="utf-8")


def template_text(choice: str | None) -> str | None:
    """The template that `policy.tokenizer.chat_template` names or holds; None: the tokenizer's own."""
    if choice is None or choice == "default":
        return None
    if choice in _OWN_TEMPLATES:
        return _own_template(choice)
    if "{%" in choice or "{{" in choice:
        return choice
    try:
        return Path(choice).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"policy.tokenizer.chat_template={choice!r} is neither null, 'chatml' nor a file that can be read "
            f"({getattr(error, 'strerror', None) or error}); llama3 comes with raylane too, and text with "
            "{{ or {% in it is a template itself"
        ) from error


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE of at most `vocab_size` tokens as a transformers tokenizer; the same texts give the same one.

    Every byte is a token, so nothing is unknown. Its special tokens are those of `chatml_template`; the end of a turn
    is its end-of-sequence token, which is what `generate` stops at.
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
    """[start, end) of each unbroken run of True in a bool[n]."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


class ChatTokenizer:
    """A transformers tokenizer whose chat template is known to say what is supervised.

    Attributes: `hf` the tokenizer; `pad_id`, `vocab_size`; `end_ids` the tokens that end a turn.
    """

    def __init__(self, hf: Any, template: str | None = None, extra_end_ids: Sequence[int] = ()) -> None:
        if template is not None:
            hf.chat_template = template
        if not hf.is_fast:
            raise DataError(
                f"{type(hf).__name__} cannot tell which characters its tokens came from, so assistant spans cannot be "
                "found; use the tokenizer's fast form (tokenizer.json)"
            )
        _check_template(hf.chat_template)
        for name, tokens in _OWN_TEMPLATES.items():
            if template == _own_template(name):
                _check_tokens(hf, name, tokens)
                hf.eos_token = tokens[-1]  # what ends a turn in this template is what generation must stop at
        if hf.eos_token_id is None and not extra_end_ids:
            raise DataError("the tokenizer names no end-of-sequence token; set eos_token in its tokenizer_config.json")
        self.hf = hf
        self.end_ids = frozenset([*extra_end_ids, *([] if hf.eos_token_id is None else [hf.eos_token_id])])
        self.pad_id = int(min(self.end_ids) if hf.pad_token_id is None else hf.pad_token_id)
        self.vocab_size = max(len(hf), *(number + 1 for number in hf.get_vocab().values()))  # numbers may have gaps
        self._specials = [token.content for token in hf.added_tokens_decoder.values() if token.special]

    @classmethod
    def load(cls, folder: str | Path, choice: str | None = None) -> ChatTokenizer:
        """From a Hugging Face folder; `choice` is `policy.tokenizer.chat_template`."""
        from transformers import AutoTokenizer

        path = Path(folder)
        if not path.is_dir():
            raise ConfigError(
                f"there is no tokenizer folder {str(folder)!r}; give a local folder (tokenizer.json, "
                "tokenizer_config.json), downloaded beforehand if it is on a hub"
            )
        try:
            hf = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # damaged files make transformers and tokenizers raise nearly anything
            raise ConfigError(f"transformers cannot load a tokenizer from {folder}: {error}") from error
        return cls(hf, template_text(choice), _generation_end_ids(path))

    @classmethod
    def train(cls, texts: Iterable[str], settings: TokenizerConfig) -> ChatTokenizer:
        """A new one, trained on `texts` as `policy.tokenizer.train_vocab_size` asks."""
        assert settings.train_vocab_size is not None
        template = template_text(settings.chat_template) or chatml_template()
        return cls(train_tokenizer(texts, settings.train_vocab_size), template)

    def encode(self, conversation: Conversation) -> Encoded:
        """Tokens and mask of one conversation; DataError naming its file and line when the template refuses it.

        A template is a program, in transformers' sandbox: any exception of it is a DataError here. The sandbox bounds
        neither its time nor its memory.
        """
        try:
            out = self.hf.apply_chat_template(
                list(conversation.messages),
                tools=list(conversation.tools) if conversation.tools else None,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise DataError(f"{conversation.where}: the chat template refuses this conversation: {reason}") from error
        tokens = np.asarray(out["input_ids"], dtype=np.int32)
        supervised = np.asarray(out["assistant_masks"], dtype=np.bool_)
        spans = runs(supervised)
        if not all(conversation.weights):
            supervised, spans = _without_weightless(supervised, spans, conversation)
        ends = np.isin(tokens, list(self.end_ids))
        ended = sum(bool(ends[start:end].any()) for start, end in spans)
        if supervised.size:
            supervised[0] = False  # nothing stands before it that could predict it
        return Encoded(tokens, supervised, len(spans), ended)

    def decode(self, tokens: np.ndarray) -> str:
        """Text of int[n] tokens, special ones included."""
        text: str = self.hf.decode(tokens.tolist(), skip_special_tokens=False)
        return text

    def special_in(self, conversation: Conversation) -> str | None:
        """A special token that somebody's text spells out: it would be taken for the real one, forging turns."""
        text = json.dumps(conversation.messages, ensure_ascii=False)
        return next((token for token in self._specials if token in text), None)

    def misplaced(self, conversation: Conversation, encoded: Encoded) -> str | None:
        """What is wrong with the mask of this conversation, or None: compares supervised text with who wrote what."""
        said = self.decode(encoded.tokens[encoded.supervised])
        texts = {role: [] for role in ("assistant", "other")}  # type: dict[str, list[str]]
        for message in conversation.messages:
            texts["assistant" if message["role"] == "assistant" else "other"].append(message["content"].strip())
        # Its calls and its reasoning are its own words too, and often repeat what was asked.
        own = "\n".join(_texts_in([one for one in conversation.messages if one["role"] == "assistant"]))
        own += "\n" + self._as_read_back(own)
        for text in texts["other"]:
            for part in (text[:20], text[-20:]):  # a mask that starts or ends within it still takes in one of these
                if len(part) >= 16 and part in said and part not in own:
                    return f"the loss would include what the assistant did not write: {part!r}"
        trained = [text for text, weight in zip(texts["assistant"], conversation.weights, strict=True) if weight]
        missing = [text for text in trained if not self._was_said(text, said)]
        if trained and len(missing) == len(trained):
            return f"the loss would not include what the assistant wrote: {missing[0][:60]!r}"
        return None

    def _was_said(self, text: str, said: str) -> bool:
        """True if `said` holds this text as it stands, as the tokenizer normalises it, or without its <think> parts.

        Tokenizers may change text (Unicode NFC), and templates may leave out reasoning that is written into the content
        of earlier turns.
        """
        spoken = _THINK.sub("", text).strip()
        return any(one in said or self._as_read_back(one).strip() in said for one in (text, spoken))

    def _as_read_back(self, text: str) -> str:
        """Return a text after it went through the tokenizer and back."""
        ids: list[int] = self.hf(text, add_special_tokens=False)["input_ids"]
        back: str = self.hf.decode(ids, skip_special_tokens=False)
        return back

    def reasoning_left_out(self, conversation: Conversation, encoded: Encoded) -> bool:
        """True if an assistant message has reasoning that the template did not write out."""
        reasoned = [one for one in conversation.messages if one["role"] == "assistant" and _reasoning(one)]
        if not reasoned:
            return False
        text = self.decode(encoded.tokens)
        return any(not self._was_said(_reasoning(one), text) for one in reasoned)

    def save(self, folder: Path) -> None:
        """Write it as a Hugging Face folder, template included."""
        self.hf.save_pretrained(str(folder))


def _reasoning(message: dict[str, Any]) -> str:
    found = next((message[key] for key in _REASONING if message.get(key)), "")
    return found.strip() if isinstance(found, str) else ""


def _texts_in(value: Any) -> list[str]:
    """Every text within plain values, and every mapping as a template may write it out."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        written = [json.dumps(value, ensure_ascii=ascii_only) for ascii_only in (False, True)]
        return written + [text for item in value.values() for text in _texts_in(item)]
    return [text for item in value for text in _texts_in(item)] if isinstance(value, list) else []


def _check_template(template: Any) -> None:
    if not template:
        raise DataError(
            "the tokenizer has no chat template; set policy.tokenizer.chat_template=chatml, or to a Jinja file"
        )
    if not isinstance(template, str):
        raise DataError(f"the tokenizer has several chat templates ({', '.join(template)}); name one in a Jinja file")
    if not _GENERATION.search(template):
        raise DataError(
            "the chat template has no {% generation %} ... {% endgeneration %}, so nothing says which tokens the "
            "assistant wrote and the loss would be on everything or nothing; put them around the assistant's text and "
            "its end token, in a file named by policy.tokenizer.chat_template, or set that to chatml"
        )


def _check_tokens(hf: Any, name: str, tokens: tuple[str, ...]) -> None:
    known = hf.get_vocab()
    missing = [token for token in tokens if token not in known]
    if missing:
        raise DataError(
            f"policy.tokenizer.chat_template={name} needs the tokens {' and '.join(tokens)}, but the tokenizer lacks "
            f"{' and '.join(missing)}; use a template made of tokens that it has"
        )


def _generation_end_ids(folder: Path) -> list[int]:
    """End tokens that the model's generation_config.json names besides the tokenizer's own (Llama 3 has three)."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
        if not all(isinstance(one, int) for one in found):
            raise TypeError(f"eos_token_id is {ids!r}")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error!r}. Correct it, or remove it") from error
    return found


def _without_weightless(
    supervised: np.ndarray, spans: list[tuple[int, int]], conversation: Conversation
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    if len(spans) != len(conversation.weights):
        raise DataError(
            f"{conversation.where}: weight: 0 is used, but the chat template makes {len(spans)} generation spans for "
            f"{len(conversation.weights)} assistant messages, so which span belongs to which cannot be told"
        )
    kept = [span for span, weight in zip(spans, conversation.weights, strict=True) if weight]
    mask = np.zeros_like(supervised)
    for start, end in kept:
        mask[start:end] = True
    return mask, kept
