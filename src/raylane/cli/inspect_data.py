"""The `raylane inspect-data` command: print statistics of the training data and samples with marked supervised text."""

from __future__ import annotations

import argparse
import sys

from raylane.cli.interrupt import exit_on_interrupt
from raylane.cli.sft import add_config_arguments, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, overrides, and the number of documents to show."""
    add_config_arguments(parser)
    parser.add_argument(
        "--show", type=int, default=3, metavar="N", help="number of documents to show (default: 3); put before CONFIG"
    )


def run(args: argparse.Namespace) -> int:
    """Print a sample of the training data with supervised spans marked, then the statistics of every set."""
    with exit_on_interrupt(args.command):
        from raylane.sft.data import audit
        from raylane.sft.data.chat import ChatTokenizer
        from raylane.sft.data.mixing import open_rows, open_training_rows
        from raylane.sft.data.prepare import prepare

    config = load(args)
    prepared = prepare(config)
    sets = {"train": open_training_rows(prepared, config)}
    if prepared.validation is not None:
        sets["validation"] = open_rows(prepared.validation, config.policy, prepared.pad_id)
    style = audit.marks(sys.stdout.isatty())
    if args.show > 0:
        tokenizer = ChatTokenizer.load(prepared.tokenizer_dir)
        print(audit.sample(sets["train"], tokenizer, style, range(min(args.show, len(sets["train"].cache)))))
    print(audit.report(prepared, config, sets))
    return 0
