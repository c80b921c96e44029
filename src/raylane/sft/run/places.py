"""Paths and URLs in the configuration of a run: checked before anything is started, and models fetched from URLs.

Called by `trainer.run` and by the commands that read a configuration.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from raylane.errors import ConfigError
from raylane.sft.config.schema import RunConfig
from raylane.sft.data import storage
from raylane.sft.data.storage import Url


def check_places(config: RunConfig) -> None:
    """Raise ConfigError for a URL that no installed package can reach, and for one where only a local path works."""
    for key, local in (("data.cache_dir", config.data.cache_dir), ("logger.log_dir", config.logger.log_dir)):
        if storage.is_url(local):
            why = {
                "data.cache_dir": "the cache is mapped into memory",
                "logger.log_dir": "a line is appended to metrics.jsonl at every step",
            }[key]
            raise ConfigError(f"{key}={local} must be a local folder: {why}. Set it to a path on this machine", key=key)
    checked: list[tuple[str, str | None]] = [("data.train", path) for path in config.data.train_paths]
    checked += [
        ("data.validation", config.data.validation),
        ("policy.model_name", config.policy.model_name),
        ("policy.tokenizer.name", config.policy.tokenizer.name),
    ]
    if config.checkpointing.enabled:
        checked.append(("checkpointing.checkpoint_dir", config.checkpointing.checkpoint_dir))
        checked.append(("checkpointing.resume", config.checkpointing.resume))
    for key, text in checked:
        if text is not None:
            storage.require(key, text)


def fetch_models(config: RunConfig) -> RunConfig:
    """Return the configuration with local folders in place of URLs of model and tokenizer; download them if needed.

    Folders below `data.cache_dir` that were downloaded before are used again as long as names and sizes of the files
    behind the URL are the same, and their hashes or times if storage has them. Raises ConfigError if the URL cannot be
    read.
    """
    policy = config.policy
    update: dict[str, object] = {}
    if policy.model_name is not None:
        update["model_name"] = _fetched("policy.model_name", policy.model_name, config)
    if policy.tokenizer.name is not None:
        name = _fetched("policy.tokenizer.name", policy.tokenizer.name, config)
        update["tokenizer"] = policy.tokenizer.model_copy(update={"name": name})
    return config.model_copy(update={"policy": policy.model_copy(update=update)}) if update else config


def _fetched(key: str, text: str, config: RunConfig) -> str:
    place = storage.at(text)
    if not isinstance(place, Url):
        return str(place) if "://" in text else text
    try:
        listing = json.dumps([str(place), sorted(place.versions().items())])
        digest = hashlib.sha256(listing.encode()).hexdigest()[:16]
        folder = Path(config.data.cache_dir).resolve() / f"model-{digest}"
        if not folder.is_dir():
            with storage.filled_beside(folder) as draft:
                storage.download(place, draft)
    except OSError as error:
        raise ConfigError(
            f"{key}={text} cannot be copied to data.cache_dir={config.data.cache_dir}: {error}. Check the URL, the "
            "credentials of its storage and the free space",
            key=key,
        ) from error
    return str(folder)
