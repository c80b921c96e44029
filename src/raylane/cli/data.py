"""The `raylane data` command: build an example data set from installed packages."""

from __future__ import annotations

import argparse
import time

from raylane.cli.help import describe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one sub-command for each example data set."""
    sets = parser.add_subparsers(dest="set", metavar="SET", required=True)
    summary = "questions and answers from the docstrings of the standard library and installed packages"
    docstrings = sets.add_parser(
        "docstrings",
        help=summary,
        **describe(
            summary,
            "raylane data docstrings --out runs/docstrings/data",
            "raylane data docstrings --out runs/small --packages stdlib --validation-fraction 0.1",
        ),
    )
    docstrings.add_argument(
        "--out", required=True, metavar="DIR", help="folder for train.jsonl and validation.jsonl (created if needed)"
    )
    docstrings.add_argument(
        "--packages",
        default="stdlib,numpy,torch",
        metavar="A,B",
        help="packages to read; stdlib is the standard library (default: %(default)s)",
    )
    docstrings.add_argument(
        "--validation-fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="fraction of the pairs to hold out for validation, 0 <= F < 1 (default: %(default)s)",
    )
    sorting_summary = "numbers whose digits are to be sorted, for reinforcement learning"
    sorting = sets.add_parser(
        "sorting",
        help=sorting_summary,
        **describe(sorting_summary, "raylane data sorting --out runs/grpo/data"),
    )
    sorting.add_argument(
        "--out", required=True, metavar="DIR", help="folder for warm_start.jsonl, train.jsonl and validation.jsonl"
    )


def run(args: argparse.Namespace) -> int:
    """Write the data set and print its size."""
    if args.set == "sorting":
        from raylane.rl.sorting import write_sets

        print(", ".join(f"{lines:,} lines in {args.out}/{name}.jsonl" for name, lines in write_sets(args.out).items()))
        return 0
    from raylane.sft.data.docstrings import collect, write_set

    if not 0 <= args.validation_fraction < 1:
        raise SystemExit(
            f"raylane data: --validation-fraction must be at least 0 and less than 1, got {args.validation_fraction}"
        )
    began = time.perf_counter()
    pairs = collect([name for name in args.packages.split(",") if name])
    train, validation = write_set(pairs, args.out, args.validation_fraction)
    seconds = time.perf_counter() - began
    print(f"{train + validation:,} pairs in {seconds:.1f} s: {train:,} in {args.out}/train.jsonl, ", end="")
    print(f"{validation:,} in {args.out}/validation.jsonl")
    return 0
