"""The `raylane grpo` command: train a model by GRPO, and print the result."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from raylane.cli.interrupt import announce_interrupt, exit_on_interrupt
from raylane.cli.sft import add_config_arguments, check_config_word, config_words, set_up_logging

if TYPE_CHECKING:
    from raylane.rl.trainer import GrpoResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and overrides; all other settings are keys of the configuration."""
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Train until the configured end and return the exit status: 130 after Ctrl-C, else 0."""
    with exit_on_interrupt(args.command):
        from raylane.rl.config import load_config

    set_up_logging("info")
    path, words = config_words(args)
    check_config_word(args.command, path)
    config = load_config(path, words)
    set_up_logging(config.logger.log_level)
    try:
        with exit_on_interrupt(args.command):
            from raylane.rl import trainer

        with announce_interrupt(args.command):
            result = trainer.run(config)
        print(summary(result))
    except KeyboardInterrupt:
        print("\nraylane grpo: interrupted. Run the same command again to resume", file=sys.stderr)
        return 130
    return 0


def summary(result: GrpoResult) -> str:
    """Return the result of a run as plain text, several lines."""
    lines = [("ended", f"{'on SIGTERM ' if result.stopped else ''}after {result.steps:,} steps")]
    for name, accuracy in (("before", result.first), ("after", result.last)):
        if accuracy is not None:
            lines.append((name, f"held-out reward {accuracy.greedy:.3f} greedy, {accuracy.sampled:.3f} sampled"))
    places = (("checkpoint", result.checkpoint), ("model", result.hf_dir), ("report", result.report))
    lines += [(name, str(path)) for name, path in places if path is not None]
    return "\n".join(f"{name:<14}{text}" for name, text in lines)
