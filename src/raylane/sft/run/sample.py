"""Sample answer of the finished model. Loads the Hugging Face folder as any user would.

Called by `trainer` if the model is small enough for the driver's CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raylane.sft.data.cache import TokenCache
from raylane.sft.model.defaults import with_own_defaults

_ROLES = ("user", "system", "tool", "assistant")


@dataclass(frozen=True)
class Sample:
    """A prompt and an answer, both without special tokens."""

    prompt: str
    answer: str


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
