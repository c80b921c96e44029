"""Loading of tokenizers: their chat template, their end tokens, and the tokens of a prompt. For all kinds of training.

A tokenizer here is one of transformers, which is imported when first needed. Called by `sft.data.chat` and
`rl.prompts`; knows nothing of data files.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raylane.errors import ConfigError, DataError
from raylane.training.text.messages import Conversation

_OWN_TEMPLATES = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
"""Templates included in raylane (NAME.jinja beside this file) and their special tokens; the last one ends a turn."""
_END_TOKENS = ("generation_config.json", "config.json")
"""Files of a model folder whose `eos_token_id` names end tokens besides the tokenizer's."""


def own_template(name: str) -> str:
    """Return a template that is included in raylane."""
    return (Path(__file__).parent / f"{name}.jinja").read_text(encoding="utf-8")


def template_text(choice: str | None) -> str | None:
    """Return the template that `policy.tokenizer.chat_template` names or holds; None for the tokenizer's own."""
    if choice is None or choice == "default":
        return None
    if choice in _OWN_TEMPLATES:
        return own_template(choice)
    if "{%" in choice or "{{" in choice:
        return choice
    try:
        return Path(choice).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            "policy.tokenizer.chat_template must be null, 'default', 'chatml', 'llama3', a template (text with {{ or "
            f"{{%) or a readable file, got {choice!r}: {getattr(error, 'strerror', None) or error}"
        ) from error


def load_tokenizer(folder: str | Path) -> Any:
    """Return the tokenizer of a Hugging Face folder; ConfigError if there is none, or if it is damaged."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise ConfigError(
            f"there is no tokenizer folder {str(folder)!r}; set policy.tokenizer.name to a local folder with "
            "tokenizer.json and tokenizer_config.json, and download one from a hub first"
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged files make transformers and tokenizers raise almost any exception
        raise ConfigError(f"transformers cannot load a tokenizer from {folder}: {error}") from error


def use_template(hf: Any, template: str | None) -> None:
    """Give a tokenizer a chat template, None for its own; one that is included in raylane sets the end token too.

    DataError if the tokenizer lacks a token of an included template.
    """
    if template is None:
        return
    hf.chat_template = template
    for name, tokens in _OWN_TEMPLATES.items():
        if template == own_template(name):
            known = hf.get_vocab()
            if missing := [token for token in tokens if token not in known]:
                raise DataError(
                    f"policy.tokenizer.chat_template={name} needs the tokens {' and '.join(tokens)}, but the "
                    f"tokenizer lacks {' and '.join(missing)}; use a template made of tokens that it has"
                )
            hf.eos_token = tokens[-1]  # generation must stop at the token that ends a turn in this template


def check_template_kwargs(hf: Any, template_kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for a variable of the chat template that is a parameter of transformers."""
    # Such a value would change the call itself (tokenize=false) or fail in it.
    if taken := sorted(set(template_kwargs) & set(inspect.signature(hf.apply_chat_template).parameters)):
        raise ConfigError(
            f"policy.tokenizer.chat_template_kwargs sets {', '.join(taken)}, which raylane passes itself; only "
            "variables of the chat template can be set"
        )


def end_ids(hf: Any, folder: Path) -> tuple[int, ...]:
    """Return the tokens that end an answer, the tokenizer's own first: those of the tokenizer and of its folder.

    Empty if neither names one.
    """
    ids = [] if hf.eos_token_id is None else [int(hf.eos_token_id)]
    return tuple(dict.fromkeys([*ids, *folder_end_ids(folder, hf)]))


def folder_end_ids(folder: Path, hf: Any) -> list[int]:
    """Return the end tokens that the settings of a model folder name; ConfigError if a file is damaged."""
    named = [(name, end_id) for name in _END_TOKENS for end_id in _named_end_ids(folder / name)]
    # config.json of a model that was made in code names the default of its class, which may be any word.
    special = {number for number, token in hf.added_tokens_decoder.items() if token.special}
    return [end_id for name, end_id in named if name == _END_TOKENS[0] or end_id in special]


def _named_end_ids(settings: Path) -> Iterator[int]:
    if not settings.is_file():
        return
    try:
        ids = json.loads(settings.read_text(encoding="utf-8")).get("eos_token_id")
        end_ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)  # Llama 3 has three
        if not all(isinstance(end_id, int) for end_id in end_ids):
            raise TypeError(f"eos_token_id is {ids!r}")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{settings} is damaged: {error!r}. Correct or remove it") from error
    yield from end_ids


def save_tokenizer(hf: Any, end_ids: Sequence[int], folder: Path) -> None:
    """Write a tokenizer as a Hugging Face folder, which names its end tokens."""
    hf.save_pretrained(str(folder))
    (folder / _END_TOKENS[0]).write_text(json.dumps({"eos_token_id": list(end_ids)}), encoding="utf-8")


def vocabulary_size(hf: Any) -> int:
    """Return the number of rows that an embedding needs for a tokenizer."""
    # Token ids may have gaps, so the number of tokens can be less than the largest id.
    return int(max(len(hf), *(number + 1 for number in hf.get_vocab().values())))


def prompt_tokens(hf: Any, prompt: Conversation, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Return the tokens of a prompt with the chat template, up to where the answer begins.

    DataError with the place of the prompt if the template refuses it. A template is a program that runs in
    transformers' sandbox.
    """
    tools = None if prompt.tools is None else list(prompt.tools)
    # As text first: templates write their own special tokens, which must not be added a second time.
    try:
        text = hf.apply_chat_template(
            list(prompt.messages), tools=tools, tokenize=False, add_generation_prompt=True, **template_kwargs
        )
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise DataError(f"{prompt.where}: the chat template refuses this prompt: {reason}") from error
    tokens: list[int] = hf(text, add_special_tokens=False)["input_ids"]
    return tokens
