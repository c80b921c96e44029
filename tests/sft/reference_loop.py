"""Independent fine-tuning loop: the reference for losses, gradients and weights of every parallel layout.

Imports nothing from raylane. It tokenises with transformers, makes its own labels, passes one document at a time
through a plain model (no packing, no padding, no mask, one process), and takes the mean over all supervised tokens of
all documents. Every step uses all documents, so their order is irrelevant.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

IGNORED = -100


def documents(data: Path, tokenizer_folder: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (tokens, labels), int64 [T] each, of every conversation; only the assistant's tokens have labels."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    found = []
    for line in data.read_text(encoding="utf-8").splitlines():
        made = tokenizer.apply_chat_template(
            json.loads(line)["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens, mask = torch.tensor(made["input_ids"]), torch.tensor(made["assistant_masks"]).bool()
        labels = torch.full_like(tokens, IGNORED)
        labels[:-1] = torch.where(mask[1:], tokens[1:], IGNORED)
        found.append((tokens, labels))
    return found


def new_model(hf_config: Any, seed: int) -> Any:
    """Return a plain model with random float32 weights: transformers' rule, with new random numbers for each module."""
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).train()
    filled = set()
    for name, module in model.named_modules():
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        if own - filled:  # a tied head has nothing of its own
            torch.manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
            model._init_weights(module)
            filled |= own
    return model


def backward(model: Any, data: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
    """Leave the gradients of the mean loss of all documents in `.grad`; return that loss and the token accuracy."""
    supervised = sum(int((labels != IGNORED).sum()) for _, labels in data)
    total, right = 0.0, 0
    for tokens, labels in data:
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        (loss / supervised).backward()
        total += loss.item()
        right += int((logits.argmax(dim=-1) == labels).sum())
    return total / supervised, right / supervised


def train(
    model: Any, data: list[tuple[torch.Tensor, torch.Tensor]], steps: int, lr: float, eps: float, max_norm: float
) -> tuple[list[float], list[float]]:
    """Train with AdamW at a constant rate, gradients clipped to `max_norm`, no decay of vectors.

    Return the losses and the token accuracies.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=eps)
    measured = []
    for _ in range(steps):
        measured.append(backward(model, data))
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    losses, accuracies = map(list, zip(*measured, strict=True))
    return losses, accuracies
