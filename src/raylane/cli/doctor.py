"""`raylane doctor`: which transports work here, between which places, and why the others do not.

Nothing is inferred that can be tried: a value is really sent from a process on every node to a process on every node.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
import torch

from raylane.core.deadline import Deadline
from raylane.errors import RaylaneError
from raylane.transport.api import put
from raylane.transport.backends.registry import NOT_YET, backends
from raylane.transport.endpoint import endpoint
from raylane.transport.guards import array_layout_known, counter_offsets, torch_layout
from raylane.transport.reader import collect, redeem

PROBE_FLOATS = 250_000
TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Finding:
    """One transport between two places; `why_not` is empty where it works."""

    source: str
    reader: str
    transport: str
    why_not: str


class Probe:
    """A process on some node, as source and as reader."""

    def publish(self, fill: float) -> list[Any]:
        self.kept = put({"probe": torch.full((PROBE_FLOATS,), fill)}, on_mutation="allow")
        return [self.kept]

    def read(self, refs: list[Any], fill: float) -> dict[str, str]:
        return try_all(refs[0], fill)

    def where(self) -> str:
        return f"{platform.node()} ({ray.util.get_node_ip_address()})"


def try_all(ref: Any, fill: float) -> dict[str, str]:
    """Read one probe value by every transport; transport to why it did not work, or nothing."""
    pending = collect([ref], TIMEOUT_S)[0]
    found = {}
    for name, backend in backends().items():
        source, here = pending.ticket.origin(), endpoint().place
        why = backend.refusal(source, here)
        if source.place.same_process(here) and name not in ("local", "object_store"):
            why = "not needed within one process"
        if why is None:
            try:
                value = redeem(pending.ticket, pending.skeleton, name, Deadline(TIMEOUT_S), may_call_ray=True)
                why = "" if bool((value["probe"] == fill).all()) else "it brought other bytes than were published"
            except RaylaneError as error:
                why = str(error)
        found[name] = why
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings to FILE as well")


def run(args: argparse.Namespace) -> int:
    started = not ray.is_initialized()
    if started:
        ray.init(
            address=os.environ.get("RAY_ADDRESS"), include_dashboard=False, log_to_driver=False, logging_level="warning"
        )
    try:
        findings = examine()
    finally:
        if started:
            ray.shutdown()
    print(report(findings))
    if args.json is not None:
        args.json.write_text(json.dumps({"facts": facts(), "findings": [asdict(f) for f in findings]}, indent=1) + "\n")
    return 0 if healthy(findings) else 1


def examine() -> list[Finding]:
    """Two probes on every node and this driver, each reading from each."""
    places: list[tuple[str, Any]] = [("driver", Probe())]
    for node in ray.nodes():
        if node["Alive"]:
            on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            for i in (1, 2):
                probe = ray.remote(num_cpus=0)(Probe).options(scheduling_strategy=on_node).remote()
                places.append((f"actor {i} on {ray.get(probe.where.remote(), timeout=CALL_TIMEOUT_S)}", probe))
    findings = []
    for fill, (source, publisher) in enumerate(places, 1):
        ref = _call(publisher, "publish", float(fill))
        for reader, probe in places:
            for transport, why_not in _call(probe, "read", ref, float(fill)).items():
                findings.append(Finding(source, "itself" if reader == source else reader, transport, why_not))
    return findings


def _call(probe: Any, name: str, *args: Any) -> Any:
    """A method of the driver's own probe, or of an actor's."""
    if isinstance(probe, Probe):
        return getattr(probe, name)(*args)
    return ray.get(getattr(probe, name).remote(*args), timeout=CALL_TIMEOUT_S)


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether every place gets a value from every other in some direct way."""
    pairs = {(f.source, f.reader) for f in findings}
    direct = {(f.source, f.reader) for f in findings if not f.why_not and f.transport != "object_store"}
    return pairs == direct


def facts() -> dict[str, str]:
    """What decides about transports on this machine."""
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    shown = {
        "python": platform.python_version(),
        **{name: version(name) for name in ("raylane", "ray", "torch")},
        "kernel": f"{platform.release()} {platform.machine()}",
        "yama ptrace_scope": yama.read_text().strip() if yama.exists() else "no Yama",
        "write counters": "readable by host" if counter_offsets() else "not found: host reads cannot notice writes",
        "memory guards": "readable by host"
        if torch_layout() and array_layout_known()
        else "not found: host reads are refused, auto takes tcp",
        "cuda devices": str(torch.cuda.device_count()),
    }
    return shown


def report(findings: Sequence[Finding]) -> str:
    """One line for each way that works, and for each that does not, grouped by pair of places."""
    lines = [f"{name}: {value}" for name, value in facts().items()]
    pairs = dict.fromkeys((f.source, f.reader) for f in findings)
    for source, reader in pairs:
        lines.append(f"\nfrom {source} to {reader}:")
        for finding in findings:
            if (finding.source, finding.reader) == (source, reader):
                lines.append(f"  {finding.transport:13} {'works' if not finding.why_not else 'no: ' + finding.why_not}")
    lines.append("\nwhat they do:")
    lines += [f"  {name:13} {backend.capability.summary}" for name, backend in backends().items()]
    lines.append("\nnot in this version:")
    lines += [f"  {name:13} {why}" for name, why in NOT_YET.items()]
    lines.append("\nhealthy" if healthy(findings) else "\nNOT healthy: some places have no direct way between them")
    return "\n".join(lines)
