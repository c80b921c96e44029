"""NeMo-RL's keys in files and on the command line. Called by the command line."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from raylane.nemo.keys import is_nemo_key, refusal
from raylane.nemo.translate import is_from_nemo_rl, read_document
from raylane.training.config.load import Dialect

_log = logging.getLogger(__name__)


def _read(document: Mapping[str, Any], file: Mapping[str, Any], source: str) -> tuple[dict[str, Any], list[str]]:
    """Return the translated document and the requests that raylane cannot meet; log what was replaced or set."""
    translation = read_document(document, source, with_their_defaults=is_from_nemo_rl(file))
    # Two lines at most: users paste files with dozens of such keys.
    if replaced := [note.key for note in translation.notes if not note.is_set]:
        _log.info("%s: NeMo-RL keys ignored or replaced: %s", source, ", ".join(replaced))
    if filled_in := [f"{note.key} ({note.reason})" for note in translation.notes if note.is_set]:
        _log.info("%s: set as in NeMo-RL: %s", source, ", ".join(filled_in))
    return translation.document, [problem.text for problem in translation.problems]


NEMO_RL = Dialect(is_nemo_key, refusal, _read)
"""Keys of NeMo-RL; a file that has some also gets NeMo-RL's behaviour where it sets nothing."""
