"""The `raylane import-config` command: turn a NeMo-RL configuration into one of raylane."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add FILE, overrides and the name of the new file."""
    parser.add_argument("file", metavar="FILE", help="YAML file with a NeMo-RL SFT configuration")
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="change of one key, in the words of NeMo-RL or raylane"
    )
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="path on this machine of a model, data set or prompt file that FILE names (again for each name)",
    )
    parser.add_argument("-o", "--out", metavar="OUT", type=Path, help="new file (default: print to standard output)")


def run(args: argparse.Namespace) -> int:
    """Write the configuration, print the report to standard error, and return 0 if nothing is left to do."""
    from raylane.errors import ConfigError
    from raylane.nemo.import_config import import_config

    if wrong := [pair for pair in args.map if "=" not in pair]:
        raise ConfigError(f"--map {wrong[0]} is no NAME=PATH. Write the name of FILE, =, and a path")
    names = {name: path for name, _, path in (pair.partition("=") for pair in args.map)}
    imported = import_config(args.file, args.overrides, names)
    text = imported.yaml(args.file)
    if args.out is None:
        sys.stdout.write(text)
    else:
        try:
            with args.out.open("x", encoding="utf-8") as file:  # "x": never overwrite a file that was edited
                try:
                    file.write(text)
                    file.flush()
                except BaseException:  # the new file is written whole or not at all
                    args.out.unlink()
                    raise
        except OSError as error:
            raise ConfigError(f"cannot write {args.out}: {error.strerror or error}. Choose another name") from error
        print(f"Wrote {args.out}", file=sys.stderr)
    # Standard error, because the file itself may go to standard output and into a pipe.
    print(imported.report(), file=sys.stderr)
    return 1 if imported.to_do else 0
