"""`raylane sft CONFIG [overrides]`: fine-tune. A thin door: says what will be done, has the trainer do it, says what
came of it. Also what every command shares that reads a run's configuration.
"""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raylane.sft.trainer import RunResult

__all__ = ["add_arguments", "add_config_arguments", "run", "set_up_logging", "summary"]


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """CONFIG and overrides."""
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
    # On a terminal a line of the log takes the place of the live bar (carriage return, then ECMA-48 EL: erase in line).
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    handler.setFormatter(logging.Formatter(f"{clear}%(levelname)s %(name)s: %(message)s"))
    log = logging.getLogger("raylane")
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(level.upper())


def run(args: argparse.Namespace) -> int:
    """Train until the configured end; 0 also after SIGTERM, once everything is saved; 130 after Ctrl-C."""
    from raylane.sft.config import load_config

    config = load_config(args.config, args.overrides)  # before the trainer's imports: a typing error answers at once
    set_up_logging(config.logger.log_level)
    from raylane.sft import trainer
    from raylane.sft.planning import plan_run, render

    print(render(plan_run(config), config), flush=True)
    try:
        print(summary(trainer.run(config)))
    except KeyboardInterrupt:
        print(f"\nraylane sft: interrupted, nothing was saved. {trainer.resume_advice(config)}", file=sys.stderr)
        return 130
    return 0


def summary(result: RunResult) -> str:
    """What came of a run, and where it is: plain text, several lines."""
    losses = (("train loss", result.train_loss), ("held-out loss", result.val_loss))
    lines = [
        ("ended", f"{'on SIGTERM ' if result.stopped else ''}after {result.steps:,} steps"),
        *((name, f"{loss:.4f}") for name, loss in losses if loss is not None),
        *(
            (name, str(path))
            for name, path in (
                ("checkpoint", result.checkpoint),
                ("model", result.hf_dir),
                ("loss curve", result.curve),
            )
            if path is not None
        ),
    ]
    if result.sample is not None:
        one = result.sample
        from raylane.sft.audit import printable

        lines += [
            (name, printable(" ".join(text.split())))
            for name, text in (("asked", one.prompt), ("answered", one.answer))
        ]
    return "\n".join(f"{name:<14}{text}" for name, text in lines)
