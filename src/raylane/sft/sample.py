"""One answer of the finished model, for people to see. Loads the Hugging Face folder as any user would. Called by
`trainer` when the model is small enough for the driver's CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raylane.sft.cache import TokenCache

__all__ = ["Sample", "answer", "first_prompt"]


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

    tokenizer: Any = AutoTokenizer.from_pretrained(str(hf_dir), local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(str(hf_dir), local_files_only=True).eval()
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
    new = out[ids.shape[1] :]
    return Sample(_text(tokenizer, ids[0]), _text(tokenizer, new))


def _text(tokenizer: Any, ids: torch.Tensor) -> str:
    text: str = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
    return text.strip()
