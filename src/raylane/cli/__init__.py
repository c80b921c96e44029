"""The `raylane` command: one module per word, loaded only when that word is called.

Each module of this package that is named in `COMMANDS` offers `add_arguments(parser)` and `run(args) -> exit status`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from raylane.errors import RaylaneError

COMMANDS: dict[str, tuple[str, str]] = {
    "sft": ("raylane.cli.sft", "fine-tune a language model"),
    "plan": ("raylane.cli.plan", "say what a fine-tuning run would do, without starting anything"),
    "inspect-data": ("raylane.cli.inspect_data", "show what a model would be trained on, token by token"),
    "data": ("raylane.cli.data", "build an example data set"),
    "bench": ("raylane.cli.bench", "measure this machine against stock Ray"),
    "doctor": ("raylane.cli.doctor", "say which transports work here, and why the others do not"),
}


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="raylane", description="Direct tensor transport, worker groups and SFT on Ray."
    )
    words = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        word = words.add_parser(name, help=summary, description=summary)
        if argv and argv[0] == name:  # importing all of them would make `raylane doctor` wait for transformers
            importlib.import_module(module).add_arguments(word)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors of ours are printed as one message, without a traceback. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv).parse_args(argv)
    try:
        status: int = importlib.import_module(COMMANDS[args.command][0]).run(args)
    except RaylaneError as error:
        print(f"raylane {args.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status
