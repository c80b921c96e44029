"""`raylane sft CONFIG [overrides]`: fine-tune. A thin door: reads the configuration and hands it to the trainer."""

from __future__ import annotations

import argparse
import logging

__all__ = ["add_arguments", "add_config_arguments", "run", "set_up_logging"]


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG and overrides, shared by every command that reads a run's configuration."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the run")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="a.b=c sets a key, +a.b=c adds one to an open mapping, ++a.b=c does either, ~a.b takes one away",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Only what every run needs; everything else is a key of the configuration."""
    add_config_arguments(parser)


def set_up_logging(level: str) -> None:
    """raylane's own log to standard error, from `level` on; other libraries keep what they have."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    log = logging.getLogger("raylane")
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(level.upper())


def run(args: argparse.Namespace) -> int:
    """Train until the configured end; 0 also after SIGTERM, once everything is saved."""
    from raylane.sft.config import load_config

    config = load_config(args.config, args.overrides)  # before the trainer's imports: a typing error answers at once
    set_up_logging(config.logger.log_level)
    from raylane.sft import trainer

    trainer.run(config)
    return 0
