"""Answers of a model: at every validation (`sft.sample_prompts`), and once of the finished model.

`Prompts` turns the questions of a run into tokens and the answers into text (called by `trainer`); the workers make the
answers (`raylane.training.run.generate`).

`answer` loads the Hugging Face folder of the finished model, as any user would. Called by `trainer` if the model is
small enough for the driver's CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raylane.errors import ConfigError
from raylane.sft.config.layout import room_for_prompts
from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data.chat import ChatTokenizer
from raylane.sft.data.prepared import PreparedData
from raylane.sft.data.rows import TokenCache
from raylane.training.model.defaults import with_own_defaults
from raylane.training.run.record import Sample

_ROLES = ("user", "system", "tool", "assistant")


def first_prompt(cache: TokenCache) -> np.ndarray:
    """Return the tokens before the first supervised token of document 0: int32 [n], generation prompt included."""
    tokens, supervised = cache.document(0)
    start = int(np.argmax(supervised)) if supervised.any() else len(tokens)
    return tokens[: max(1, start)]


@with_own_defaults
def answer(hf_dir: Path, prompt: np.ndarray, end_ids: tuple[int, ...], max_new_tokens: int = 64) -> Sample:
    """Return the answer of the model in a Hugging Face folder to these tokens, by greedy decoding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # its output would mix with the progress lines of the run
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(hf_dir), local_files_only=True, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(hf_dir), local_files_only=True, trust_remote_code=False
        ).eval()
    finally:
        if shown:
            hf_logging.enable_progress_bar()
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(end_ids) or None,
            pad_token_id=tokenizer.pad_token_id,
        )[0]
    new: list[int] = out[ids.shape[1] :].tolist()  # generate() returns the prompt too
    # The question is in most templates the longest text between special tokens; its role name is left out.
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    questions = []
    for is_text, part in groupby(prompt.tolist(), key=lambda token: token not in special):
        if is_text:
            text = tokenizer.decode(list(part)).strip()
            role, _, rest = text.partition("\n")
            questions.append(rest.strip() if role.strip() in _ROLES else text)
    question = max(questions, key=len, default="")
    return Sample(question, tokenizer.decode(new, skip_special_tokens=True).strip())


class Prompts:
    """The questions of a run, tokenised with its chat template."""

    def __init__(self, config: SftRunConfig, prepared: PreparedData) -> None:
        """Tokenise the questions; ConfigError if one of them leaves no room for an answer."""
        settings = config.policy.tokenizer
        self._texts = config.sft.sample_prompts
        if not self._texts:
            return  # loading a tokenizer takes a second
        self._tokenizer = ChatTokenizer.load(prepared.tokenizer_dir, template_kwargs=settings.chat_template_kwargs)
        self._tokens = [self._tokenizer.question(text) for text in self._texts]
        # Checked here, before workers are started: a run would otherwise end at its first validation.
        room = room_for_prompts(config)
        for text, tokens in zip(self._texts, self._tokens, strict=True):
            if len(tokens) > room:
                raise ConfigError(
                    f"sft.sample_prompts: {text[:40]!r} has {len(tokens)} tokens with the chat template, and "
                    f"policy.max_total_sequence_length={config.policy.max_total_sequence_length} less "
                    f"sft.sample_tokens={config.sft.sample_tokens} leaves room for {room}; shorten it, or lower "
                    "sft.sample_tokens",
                    key="sft.sample_prompts",
                )

    def answers(self, generate: Callable[[list[list[int]]], list[list[int]]]) -> list[tuple[str, str]]:
        """Return each question with the answer of the model as it is now; `generate` is `SftPolicy.answer`."""
        if not self._texts:
            return []
        answers = [self._tokenizer.text(tokens) for tokens in generate(self._tokens)]
        return list(zip(self._texts, answers, strict=True))
