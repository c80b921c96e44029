"""Prompts of a run: read from JSON Lines, tokenised with the model's chat template, in the order of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raylane.errors import ConfigError, DataError
from raylane.rl.config import GrpoRunConfig
from raylane.rl.rollout import Prompt
from raylane.training.vocabulary import Vocabulary


def read_rows(path: str, prompt_key: str) -> list[dict[str, Any]]:
    """Return the lines of a JSONL file. DataError names the line that cannot be used."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the prompts in {path} cannot be read: {error}. Check data.train and data.validation"
        ) from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict) or not row.get(prompt_key):
            raise DataError(
                f"{path}, line {number} has no {prompt_key!r}. Set data.prompt_key to the key of the prompt"
            )
        rows.append(row)
    if not rows:
        raise DataError(f"{path} has no prompts")
    return rows


def load_tokenizer(config: GrpoRunConfig) -> Any:
    """Return the tokenizer of the run, with the configured chat template. ConfigError if there is none."""
    from transformers import AutoTokenizer

    settings = config.policy.tokenizer
    source = settings.name or config.policy.model_name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer in {source} cannot be loaded: {error}. Set policy.tokenizer.name to a folder with one"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer in {source} has no end-of-sequence token, so no answer would end")
    return tokenizer


def vocabulary_of(tokenizer: Any, folder: str) -> Vocabulary:
    """Return the facts about a tokenizer that workers need."""
    end = int(tokenizer.eos_token_id)
    pad = tokenizer.pad_token_id
    return Vocabulary(Path(folder).resolve(), len(tokenizer), end if pad is None else int(pad), (end,))


@dataclass
class PromptSet:
    """Prompts by number in the order of the run, which has as many epochs as it needs."""

    rows: Sequence[Mapping[str, Any]]
    tokens: Sequence[list[int]]
    seed: int
    shuffle: bool

    @classmethod
    def read(cls, path: str, config: GrpoRunConfig, tokenizer: Any) -> PromptSet:
        """Read and tokenise a file. DataError for a line that cannot be used, or that leaves no room for an answer."""
        rows = read_rows(path, config.data.prompt_key)
        room = config.policy.max_total_sequence_length - config.rollout.max_new_tokens
        tokens = []
        for number, row in enumerate(rows, 1):
            tokens.append(
                tokenise(tokenizer, row[config.data.prompt_key], config.policy.tokenizer.chat_template_kwargs)
            )
            if len(tokens[-1]) > room:
                raise DataError(
                    f"{path}, prompt {number} has {len(tokens[-1])} tokens, and policy.max_total_sequence_length="
                    f"{config.policy.max_total_sequence_length} less rollout.max_new_tokens="
                    f"{config.rollout.max_new_tokens} leaves room for {room}. Shorten it, or change one of them"
                )
        return cls(rows, tokens, config.grpo.seed, config.data.shuffle)

    def prompt(self, number: int) -> Prompt:
        """Return prompt `number` of the run."""
        # A pure function of the number, so a resumed run or a new actor gets the same prompt.
        epoch, place = divmod(number, len(self.rows))
        row = int(self._order(epoch)[place]) if self.shuffle else place
        return Prompt(number, self.tokens[row], self.rows[row])

    def first(self, count: int) -> list[Prompt]:
        """Return the first prompts of the file, for validation; 0: all."""
        count = min(count or len(self.rows), len(self.rows))
        return [Prompt(number, self.tokens[number], self.rows[number]) for number in range(count)]

    def _order(self, epoch: int) -> np.ndarray:
        # Kept for one epoch: the prompts of a step are nearly always of the same one.
        if getattr(self, "_epoch", None) != epoch:
            self._epoch, self._permutation = (
                epoch,
                np.random.default_rng([self.seed, epoch]).permutation(len(self.rows)),
            )
        return self._permutation


def tokenise(tokenizer: Any, prompt: Any, template_kwargs: Mapping[str, Any]) -> list[int]:
    """Return the tokens of a prompt with the chat template, up to where the answer begins."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    # As text first: templates write their own special tokens, which must not be added a second time.
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **template_kwargs)
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens
