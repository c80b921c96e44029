"""`raylane data docstrings --out DIR`: build an example data set out of what is installed."""

from __future__ import annotations

import argparse
import time

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One word for each example set."""
    sets = parser.add_subparsers(dest="set", metavar="SET", required=True)
    summary = "questions and answers from the docstrings of the standard library and installed packages"
    docstrings = sets.add_parser("docstrings", help=summary, description=summary)
    docstrings.add_argument("--out", required=True, metavar="DIR", help="folder of train.jsonl and validation.jsonl")
    docstrings.add_argument(
        "--packages", default="stdlib,numpy,torch", metavar="A,B", help="packages to read (default: %(default)s)"
    )
    docstrings.add_argument(
        "--validation-fraction", type=float, default=0.05, metavar="F", help="part to hold out (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the set and say what is in it."""
    from raylane.sft.docstrings import collect, write_set

    if not 0 <= args.validation_fraction < 1:
        raise SystemExit(f"raylane data: --validation-fraction {args.validation_fraction} is not in [0, 1)")
    began = time.perf_counter()
    pairs = collect([name for name in args.packages.split(",") if name])
    train, validation = write_set(pairs, args.out, args.validation_fraction)
    seconds = time.perf_counter() - began
    print(f"{train + validation:,} pairs in {seconds:.1f} s: {train:,} in {args.out}/train.jsonl, ", end="")
    print(f"{validation:,} in {args.out}/validation.jsonl")
    return 0
