"""The `raylane weights` command: names, versions and readers of the weights that a cluster keeps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from raylane.cli.cluster import add_address, connected
from raylane.weights.catalogue import VersionInfo
from raylane.weights.client import all_versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --address and --timeout."""
    add_address(parser)
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="S", help="wait at most S seconds (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the versions of all jobs. Return 0."""
    if not args.timeout > 0:
        raise SystemExit(f"raylane weights: --timeout must be greater than 0, got {args.timeout}")
    with connected(args.address):
        print(render(all_versions(args.timeout)))
    return 0


def render(versions: Sequence[VersionInfo]) -> str:
    """Return a table of versions as text."""
    if not versions:
        return "no weights are published in this cluster"
    rows = [("name", "version", "step", "state", "MB", "age", "hosts", "readers")]
    for version in versions:
        missing = f" (missing ranks {list(version.missing_ranks)})" if version.missing_ranks else ""
        rows.append(
            (
                version.name,
                str(version.number),
                str(version.step),
                version.state + missing,
                f"{version.nbytes / 1e6:.1f}",
                f"{version.age_s:.0f} s",
                str(len(version.hosts)),
                ", ".join(version.readers) or "-",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
