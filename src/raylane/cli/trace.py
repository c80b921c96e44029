"""The `raylane trace` command: put the traces of several processes into one file for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path

from raylane.cli.help import describe
from raylane.core.trace_file import merge, parse_lines, save
from raylane.errors import ConfigError
from raylane.transport.observe.tracing import FILES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-command `merge`."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    summary = "put the transfers that RAYLANE_TRACE=FOLDER recorded into one trace"
    merge = commands.add_parser("merge", help=summary, **describe(summary, "raylane trace merge traces transfers.json"))
    merge.add_argument("folder", type=Path, metavar="FOLDER", help="folder with the files of the processes")
    merge.add_argument("out", type=Path, metavar="OUT", help="file for ui.perfetto.dev or chrome://tracing")


def run(args: argparse.Namespace) -> int:
    """Merge the files and print the number of events."""
    files = sorted(args.folder.glob(FILES))
    if not files:
        raise ConfigError(
            f"could not merge traces: {args.folder} has no files {FILES}. Set RAYLANE_TRACE to this folder in the "
            "processes that should be traced, for example in runtime_env of ray.init"
        )
    trace = merge(parse_lines(file.read_text()) for file in files)
    save(args.out, trace)
    print(f"{len(trace['traceEvents']):,} events of {len(files)} processes written to {args.out}")
    return 0
