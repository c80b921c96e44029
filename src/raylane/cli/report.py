"""The `raylane report` command: draw the report of a run that goes on or has ended."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN_DIR and the name of the report."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run: its logger.log_dir")
    parser.add_argument("-o", "--out", metavar="FILE", help="file to write (default: RUN_DIR/report.html)")


def run(args: argparse.Namespace) -> int:
    """Write the report and print its path."""
    from raylane.errors import ConfigError
    from raylane.training.report.page import write_report

    try:
        print(write_report(args.run_dir, args.out))
    except OSError as error:
        raise ConfigError(
            f"cannot write the report of {args.run_dir}: {error}. Name another file with --out"
        ) from error
    return 0
