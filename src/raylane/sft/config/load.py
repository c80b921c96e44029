"""Loading of a fine-tuning configuration: YAML file and overrides become one checked `SftRunConfig`.

Called by the command line and by programs that build a configuration themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raylane.sft.config.layout import check_layout, without_validation
from raylane.sft.config.schema import SftRunConfig
from raylane.training.config.load import Dialect, make_config, read_document

log = logging.getLogger(__name__)


def load_config(path: str | Path, override_words: Sequence[str] = (), dialect: Dialect | None = None) -> SftRunConfig:
    """Return the configuration of a YAML file (and the files in its `defaults:`) with overrides applied, fully checked.

    `${a.b}` stands for the value of another key. With a dialect, keys of that program are accepted and translated.

    Raises ConfigError: file missing or not YAML, unknown key (the message names the nearest known one), value of the
    wrong type, or sizes that do not divide (`layout.check_layout`).
    """
    return build_config(read_document(path, SftRunConfig, override_words, dialect), source=str(path))


def build_config(document: Mapping[str, Any], source: str = "configuration") -> SftRunConfig:
    """Return the configuration of plain nested values, checked as in `load_config`; `source` names it in errors.

    Without data for validation, the settings of validation are switched off, and a log line names them.
    """
    config, note = without_validation(make_config(document, SftRunConfig, source))
    if note:
        log.info("%s", note)
    check_layout(config)
    return config
