"""Paths and URLs in the configuration of a fine-tuning run, checked before anything is started.

Called by `trainer.run` and by the commands that read a configuration.
"""

from __future__ import annotations

from raylane.sft.config.schema import SftRunConfig
from raylane.training import storage
from raylane.training.run import places


def check_places(config: SftRunConfig) -> None:
    """Raise ConfigError for a URL that no installed package can reach, and for one where only a local path works."""
    places.require_local("data.cache_dir", config.data.cache_dir, "the cache is mapped into memory")
    # Before the preparation of the data, which may take long.
    for source in config.data.sources:
        storage.require("data.train or data.validation", source.path)
    places.check_places(config)


def fetch_models(config: SftRunConfig) -> SftRunConfig:
    """Return the configuration with local folders in place of URLs of model and tokenizer; download them if needed."""
    return places.fetch_models(config, config.data.cache_dir)
