"""Questions that a model answers at every validation (`sft.sample_prompts`): tokens before, text after.

Called by `trainer`; the workers generate (`generation`).
"""

from __future__ import annotations

from collections.abc import Callable

from raylane.errors import ConfigError
from raylane.sft.config.layout import room_for_prompts
from raylane.sft.config.schema import RunConfig
from raylane.sft.data.chat import ChatTokenizer
from raylane.sft.data.prepare import PreparedData


class Prompts:
    """The questions of a run, tokenised with its chat template."""

    def __init__(self, config: RunConfig, prepared: PreparedData) -> None:
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
        """Return each question with the answer of the model as it is now; `generate` is `Policy.answer`."""
        if not self._texts:
            return []
        answers = [self._tokenizer.text(tokens) for tokens in generate(self._tokens)]
        return list(zip(self._texts, answers, strict=True))
