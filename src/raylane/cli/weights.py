"""The `raylane weights` command: names, versions and readers of the weights that a cluster keeps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from raylane.cli.cluster import add_address, connected
from raylane.weights.service.answers import VersionInfo
from raylane.weights.service.client import all_readers, all_versions
from raylane.weights.state.readers import ReaderInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --address and --timeout."""
    add_address(parser)
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="S", help="wait at most S seconds (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the versions and readers of all jobs. Return 0."""
    if not args.timeout > 0:
        raise SystemExit(f"raylane weights: --timeout must be greater than 0, got {args.timeout}")
    with connected(args.address):
        print("\n".join([render(all_versions(args.timeout)), *render_readers(all_readers(args.timeout))]))
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
                version.state + missing + (", held" if version.held else ""),
                f"{version.nbytes / 1e6:.1f}",
                f"{version.age_s:.0f} s",
                str(len(version.hosts)),
                ", ".join(version.readers) or "-",
            )
        )
    return "\n".join(_aligned(rows))


def render_readers(readers: Sequence[ReaderInfo]) -> list[str]:
    """Return a table of readers as lines, after an empty one; none if there are no readers."""
    if not readers:
        return []
    rows = [("name", "reader", "version", "behind", "for", "lease", "node")]
    for reader in readers:
        behind = f"{reader.lag} (too far)" if reader.too_far else str(reader.lag)
        seconds = f"{reader.behind_s:.0f} s" if reader.lag else "-"
        version = str(reader.version or "-")
        rows.append((reader.name, reader.label, version, behind, seconds, reader.lease, reader.host))
    return ["", *_aligned(rows)]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]
