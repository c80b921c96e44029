"""Facts about a tokenizer that a model in training needs. Knows nothing of text; used by `run`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeVar


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a run, and the folder of their tokenizer."""

    tokenizer_dir: Path  # Hugging Face folder of the tokenizer, chat template included; absolute
    vocab_size: int
    pad_id: int  # token that fills rows up
    end_ids: tuple[int, ...]  # tokens that end a turn

    @property
    def end_id(self) -> int | None:
        """First token that ends a turn; None if there is none."""
        return self.end_ids[0] if self.end_ids else None

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders that every node of a run needs."""
        return (self.tokenizer_dir,)

    def moved(self, path_of: Callable[[Path], Path]) -> Self:
        """Return the same facts with each path replaced by what `path_of` returns for it."""
        # Data classes of kinds of training have more paths, and override this method.
        return replace(self, tokenizer_dir=path_of(self.tokenizer_dir))


AnyVocabulary = TypeVar("AnyVocabulary", bound=Vocabulary)
"""Vocabulary, or more facts about the data of one kind of training."""
