"""One answer of the finished model, for people to see. Loads the Hugging Face folder as any user would. Called by
`trainer` when the model is small enough for the driver's CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raylane.sft.cache import TokenCache

__all__ = ["Sample", "answer", "first_prompt"]


_ROLES = ("user", "system", "tool", "assistant")


@dataclass(frozen=True)
class Sample:
    """Texts without special tokens."""

    prompt: str
    answer: str


def first_prompt(cache: TokenCache) -> np.ndarray:
    """Tokens before the first supervised one of the first document: int32[n], the generation prompt included."""
    tokens, supervised = cache.document(0)
    start = int(np.argmax(supervised)) if supervised.any() else len(tokens)
    return tokens[: max(1, start)]


def answer(hf_dir: Path, prompt: np.ndarray, end_ids: tuple[int, ...], max_new_tokens: int = 64) -> Sample:
    """What the model in a Hugging Face folder says to these tokens, taking the likeliest token each time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # it would land in the middle of the run's own lines
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
    new: list[int] = out[ids.shape[1] :].tolist()
    return Sample(_question(prompt.tolist(), tokenizer), tokenizer.decode(new, skip_special_tokens=True).strip())


def _question(prompt: list[int], tokenizer: Any) -> str:
    """The longest stretch between special tokens, without the name of its role: what was asked, in most templates."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    parts = [list(part) for is_text, part in groupby(prompt, key=lambda token: token not in special) if is_text]
    texts = [_without_role(tokenizer.decode(part).strip()) for part in parts]
    return max(texts, key=len, default="")


def _without_role(text: str) -> str:
    role, _, rest = text.partition("\n")
    return rest.strip() if role.strip() in _ROLES else text
