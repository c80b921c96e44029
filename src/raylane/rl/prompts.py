"""Prompts of a run: read from JSON Lines, tokenised with the model's chat template, in the order of the run."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raylane.errors import ConfigError, DataError
from raylane.rl.config import GrpoRunConfig
from raylane.rl.rollout import Prompt
from raylane.training import storage
from raylane.training.text import tokenizer as tokenizers
from raylane.training.text.messages import Conversation, parse_line, prompt_of
from raylane.training.vocabulary import Vocabulary

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptLine:
    """Line of a file of prompts."""

    row: Mapping[str, Any]
    """All of the line, for rewards."""
    prompt: Conversation


def read_lines(path: str, prompt_key: str) -> list[PromptLine]:
    """Return the lines of a JSONL file, read as in fine-tuning. DataError names the line that cannot be used."""
    lines = []
    try:
        # Only a line feed ends a line: JSON may hold other separators of Unicode in its texts.
        with Path(path).open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}:{number}"
                    row = parse_line(line.rstrip("\r\n"), where)
                    lines.append(PromptLine(row, prompt_of(row, prompt_key, where)))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"the prompts in {path} cannot be read: {error}. Check data.train and data.validation"
        ) from error
    if not lines:
        raise DataError(f"{path} has no prompts. Write one JSON object with {prompt_key!r} in each line")
    return lines


def tokenizer_folder(config: GrpoRunConfig) -> Path:
    """Return the folder that the tokenizer is loaded from."""
    source = config.policy.tokenizer.name or config.policy.model_name
    assert source is not None, "the configuration names a model"
    return Path(source)


def load_tokenizer(config: GrpoRunConfig) -> Any:
    """Return the tokenizer of the run, with the configured chat template. ConfigError if there is none."""
    settings, source = config.policy.tokenizer, tokenizer_folder(config)
    tokenizer = tokenizers.load_tokenizer(source)
    tokenizers.use_template(tokenizer, tokenizers.template_text(settings.chat_template))
    tokenizers.check_template_kwargs(tokenizer, settings.chat_template_kwargs)
    template = tokenizer.chat_template
    # Of several templates transformers uses `default`, or `tool_use` if there are tools.
    if not template or (isinstance(template, dict) and "default" not in template):
        several = f"has the chat templates {', '.join(template)}, and no default" if template else ""
        raise ConfigError(
            f"the tokenizer in {source} {several or 'has no chat template'}, so prompts cannot be written. Set "
            "policy.tokenizer.chat_template to chatml, llama3 or a Jinja file; '{{ messages[-1].content }}' gives a "
            "base model the text as it is",
            key="policy.tokenizer.chat_template",
        )
    if isinstance(template, str) and "add_generation_prompt" not in template:
        _log.warning(
            "the chat template writes nothing between a prompt and its answer (add_generation_prompt), so the model "
            "has to begin its turn itself. Add it to a copy, and name that in policy.tokenizer.chat_template"
        )
    if not tokenizers.end_ids(tokenizer, source):
        raise ConfigError(
            f"the tokenizer in {source} has no end-of-sequence token, so no answer would end. Set eos_token in its "
            "tokenizer_config.json"
        )
    return tokenizer


def vocabulary_of(tokenizer: Any, folder: str | Path) -> Vocabulary:
    """Return the facts about a tokenizer that workers and engines need, with the end tokens that its folder names."""
    ends = tokenizers.end_ids(tokenizer, Path(folder))
    pad = min(ends) if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    return Vocabulary(Path(folder).resolve(), tokenizers.vocabulary_size(tokenizer), pad, ends)


def stored_vocabulary(tokenizer: Any, config: GrpoRunConfig) -> Vocabulary:
    """Return the vocabulary with the tokenizer in a folder of its own in `data.cache_dir`, as it is used in the run.

    The exported model gets this folder: it has the configured template, and nothing else of the model's folder.
    """
    vocabulary = vocabulary_of(tokenizer, tokenizer_folder(config))
    cache_dir = Path(config.data.cache_dir).resolve()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to data.cache_dir={config.data.cache_dir}: {error}. Check its free space and permissions"
        ) from error
    with tempfile.TemporaryDirectory(prefix="tokenizer-", dir=cache_dir) as name:
        tokenizers.save_tokenizer(tokenizer, vocabulary.end_ids, Path(name))
        contents = [(path.name, path.read_bytes()) for path in sorted(Path(name).rglob("*")) if path.is_file()]
        digest = hashlib.sha256(repr(contents).encode()).hexdigest()[:16]
        folder = cache_dir / f"tokenizer-{digest}"
        if not folder.is_dir():
            with storage.filled_beside(folder) as draft:
                shutil.copytree(name, draft, dirs_exist_ok=True)
    return replace(vocabulary, tokenizer_dir=folder)


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
        lines = read_lines(path, config.data.prompt_key)
        room = config.policy.max_total_sequence_length - config.rollout.max_new_tokens
        tokens = []
        for line in lines:
            prompt, kwargs = line.prompt, config.policy.tokenizer.chat_template_kwargs
            tokens.append(tokenizers.prompt_tokens(tokenizer, prompt, kwargs))
            if not tokens[-1]:
                raise DataError(f"{prompt.where}: the prompt has no tokens. Correct it, or the chat template")
            if len(tokens[-1]) > room:
                raise DataError(
                    f"{prompt.where}: the prompt has {len(tokens[-1])} tokens, and policy.max_total_sequence_length="
                    f"{config.policy.max_total_sequence_length} less rollout.max_new_tokens="
                    f"{config.rollout.max_new_tokens} leaves room for {room}. Shorten it, or change one of them"
                )
        return cls([line.row for line in lines], tokens, config.grpo.seed, config.data.shuffle)

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
