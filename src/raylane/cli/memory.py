"""The `raylane memory` command: which process holds which published tensors, since when, and created where."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from raylane.cli.cluster import add_address, connected
from raylane.transport.link import wire
from raylane.transport.link.memory_report import Report, ask_everywhere
from raylane.weights.service.client import all_memory

DEFAULT_LIMIT = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --address, --limit, --timeout and --json."""
    add_address(parser)
    parser.add_argument(
        "--limit",
        type=int,
        default=DEFAULT_LIMIT,
        metavar="N",
        help="show the N largest and the N oldest values of each process, at most 300 (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="wait at most S seconds for answers (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE too")


def run(args: argparse.Namespace) -> int:
    """Ask all processes and print the report. Return 0 if all processes answered, otherwise 1."""
    for name, value in (("--limit", args.limit), ("--timeout", args.timeout)):
        if not value > 0:
            raise SystemExit(f"raylane memory: {name} must be greater than 0, got {value}")
    with connected(args.address):
        reports = ask_everywhere(args.timeout, args.limit)
        weights = all_memory(args.timeout)
    print("\n".join([render(reports, args.limit), *render_weights(weights)]))
    if args.json is not None:
        plain = as_plain(reports) + [
            {"weights": name, "node": node, "nbytes": nbytes} for node, name, nbytes in weights
        ]
        args.json.write_text(msgspec.json.format(msgspec.json.encode(plain), indent=1).decode() + "\n")
    return 0 if all(report.holdings is not None for report in reports) else 1


def as_plain(reports: Sequence[Report]) -> list[dict[str, object]]:
    """Return the reports as dicts with the names of all fields."""
    reports_as_dicts = []
    for report in reports:
        held = report.holdings
        plain: dict[str, object] = {name: getattr(report, name) for name in ("process", "pid", "host", "address")}
        if held is None:
            plain["why_not"] = report.why_not
        else:
            plain |= {name: getattr(held, name) for name in held.__struct_fields__}
            plain["values"] = [msgspec.structs.asdict(record) for record in held.values]
            plain["kept"] = [msgspec.structs.asdict(record) for record in held.kept_actors]
        reports_as_dicts.append(plain)
    return reports_as_dicts


def render(reports: Sequence[Report], limit: int) -> str:
    """Return the reports as text: a summary, then the processes, those that hold most first. Pure."""
    answered = [(report, report.holdings) for report in reports if report.holdings is not None]
    # Idle memory breaks ties, because a process that holds nothing may still keep gigabytes of it.
    answered.sort(key=lambda answer: (-answer[1].nbytes, -_idle(answer[1]), answer[0].process, answer[0].pid))
    silent = [report for report in reports if report.holdings is None]
    total = sum(held.nbytes for _, held in answered)
    count = sum(held.entries for _, held in answered)
    idle = sum(_idle(held) for _, held in answered)
    lines = [
        f"{_count(len(answered), 'process', 'processes')} of this cluster hold {_size(total)} "
        f"in {_count(count, 'published value')}, and {_size(idle)} of idle memory."
    ]
    # A label ends with the id of its actor, by which other processes name the actors that they keep.
    labels = {report.process.rpartition(", ")[2].rstrip(")"): report.process for report, _ in answered}
    for report, held in answered:
        lines += ["", *_process(report, held, limit, labels)]
    if silent:
        lines += ["", "These processes did not answer:"]
        lines += [f"  {_name(report)}: {report.why_not}" for report in silent]
    return "\n".join(lines)


def render_weights(weights: Sequence[tuple[str, str, int]]) -> list[str]:
    """Return lines about the shared memory with weights, given its node, name and bytes."""
    if not weights:
        return []
    total = sum(nbytes for _, _, nbytes in weights)
    lines = ["", f"Weights take {_size(total)} of shared memory; `raylane weights` lists their versions:"]
    return lines + [f"  {_size(nbytes):>9}  {name!r} on node {node}" for node, name, nbytes in weights]


def _process(report: Report, held: wire.Holdings, limit: int, labels: dict[str, str]) -> list[str]:
    """Return the lines of one process. `labels` has the names of processes by the id of their actor."""
    budget = "" if held.budget is None else f" of a budget of {_size(held.budget)}"
    lines = [
        _name(report),
        f"  published: {_size(held.nbytes)}{budget} in {_count(held.entries, 'value')}; "
        f"receive memory: {_size(held.pool_used_bytes)} in use, {_size(held.pool_idle_bytes)} idle",
    ]
    if held.shared_bytes:
        lines.append(f"  copies for readers: {_size(held.shared_bytes)}, of which {_size(held.shared_idle_bytes)} idle")
    if held.region_bytes:
        lines.append(
            f"  memory of raylane.empty: {_size(held.region_bytes)}, of which other processes read "
            f"{_size(held.region_read_bytes)} and {_size(held.region_idle_bytes)} is idle"
        )
    if held.mapped_bytes or held.mapped_idle_bytes:
        lines.append(
            f"  mapped from other processes: {_size(held.mapped_bytes)} in use, {_size(held.mapped_idle_bytes)} idle"
        )
    if held.waiting:
        lines.append(f"  {_count(held.waiting, 'publication')} waiting for room in the budget")
    oldest = sorted(held.values, key=lambda value: -value.age_s)[:limit]
    largest = sorted(held.values, key=lambda value: -value.nbytes)[:limit]
    # The oldest in addition: a leak of many small values does not show among the largest.
    shown = largest + [value for value in oldest if value not in largest]
    if shown:
        lines.append(f"  {'size':>9} {'tensors':>7} {'age':>8} {'reads':>6}  {'transport':<12} created by")
    lines += [_value(value) for value in shown]
    if held.entries > len(shown):
        remaining_bytes = held.nbytes - sum(value.nbytes for value in shown)
        lines.append(f"  {_size(remaining_bytes):>9} in {_count(held.entries - len(shown), 'other value')}")
    for actor in held.kept_actors:
        refs = ", ".join(f"{_count(count, 'ref')} to results of {name or '?'}" for name, count in actor.refs)
        gone = f"{_count(actor.ended, 'ref')} gone whose values others may still need" if actor.ended else ""
        lines.append(f"  keeps {labels.get(actor.actor, 'Actor ' + actor.actor)} alive: {refs or gone}")
    return lines


def _value(value: wire.Held) -> str:
    what = value.origin or "?"
    if value.snapshot:
        what += " (snapshot)"
    # An age with one unit, such as `12 min`.
    units = ((100, "s", 1), (6000, "min", 60), (172800, "h", 3600), (math.inf, "d", 86400))
    unit, seconds = next((unit, seconds) for limit, unit, seconds in units if value.age_s < limit)
    age = f"{value.age_s / seconds:.3g} {unit}"
    return f"  {_size(value.nbytes):>9} {value.tensors:>7,} {age:>8} {value.reads:>6,}  {value.transport:<12} {what}"


def _idle(held: wire.Holdings) -> int:
    return held.pool_idle_bytes + held.shared_idle_bytes + held.region_idle_bytes


def _name(report: Report) -> str:
    return f"{report.process}, pid {report.pid} on {report.host} ({report.address})"


def _count(count: int, singular: str, many: str = "") -> str:
    return f"{count:,} {singular if count == 1 else many or singular + 's'}"


def _size(nbytes: int) -> str:
    """Return a size with three digits and a unit, such as `1.53 GB`."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"
