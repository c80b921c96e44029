"""The `raylane doctor` command: test which transports work between which processes, and why the others do not.

Everything is tested instead of inferred: a value is sent from a process on every node to a process on every node.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
import torch

from raylane import _ray_names
from raylane.cli.cluster import connected
from raylane.core import settings
from raylane.core.deadline import Deadline
from raylane.core.process.environment import NICENESS_REMEDY
from raylane.errors import RaylaneError
from raylane.transport.api import put
from raylane.transport.backends.base import NO_DEVICE
from raylane.transport.backends.registry import backends
from raylane.transport.link.endpoint import endpoint
from raylane.transport.read.redeem import redeem
from raylane.transport.read.unpickling import collect
from raylane.transport.value.guards import array_layout_known, counter_offsets, torch_layout

PROBE_FLOATS = 250_000
"""Size of the test value in float32 elements: 1 MB."""
TIMEOUT_S = 10.0
"""Time limit in seconds for one transfer."""
CALL_TIMEOUT_S = 120.0
"""Time limit in seconds for a call of a probe actor, which may have to start first."""


@dataclass(frozen=True)
class Finding:
    """Result of one transport between two processes; `why_not` is empty if it works."""

    source: str
    reader: str
    transport: str
    why_not: str


class Probe:
    """Test process on a node: publishes values and reads those of other probes."""

    def publish(self, fill: float) -> list[Any]:
        """Publish a test value filled with `fill`; return its ref in a list, because Ray would resolve a bare ref."""
        self.kept = put({"probe": torch.full((PROBE_FLOATS,), fill)}, on_mutation="allow")
        return [self.kept]

    def read(self, refs: list[Any], fill: float) -> dict[str, str]:
        """Read a test value with every transport; return transport -> reason for failure, or ""."""
        return try_all(refs[0], fill)

    def where(self) -> tuple[str, int]:
        """Return host name and IP address of this process, and its niceness."""
        return f"{platform.node()} ({ray.util.get_node_ip_address()})", os.getpriority(os.PRIO_PROCESS, 0)


def try_all(ref: Any, fill: float) -> dict[str, str]:
    """Read one test value with every transport; return transport -> reason for failure, or ""."""
    pending = collect([ref], TIMEOUT_S)[0]
    failures = {}
    for name, backend in backends().items():
        source, place = pending.ticket.origin(), endpoint().place
        why = backend.refusal(source, place)
        if source.place.same_process(place) and not (backend.capability.own_objects or backend.capability.by_ray):
            why = "not needed within one process"
        if why is None:
            try:
                value = redeem(pending.ticket, pending.skeleton, name, Deadline(TIMEOUT_S), may_call_ray=True)
                why = "" if bool((value["probe"] == fill).all()) else "the value that arrived differs from the sent one"
            except RaylaneError as error:
                why = str(error)
        failures[name] = why
    return failures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all test results to FILE too")


def run(args: argparse.Namespace) -> int:
    """Test all transports, print the report, and return 0 if the result is healthy, otherwise 1.

    A Ray that this starts has the settings of any other `ray.init()`, because its workers are what the report is about.
    """
    machine = facts()
    print("\n".join(["This machine", *(f"  {name:15}{value}" for name, value in machine.items())]))
    _ray_names.require(import_dag=True)  # before Ray is started for nothing
    print("\nTesting all transports between the driver and two actors on each node ...", flush=True)
    with connected(None, default=None, include_dashboard=False):
        findings, niceness = examine()
    print(report(findings, niceness))
    if args.json is not None:
        args.json.write_text(json.dumps({"facts": machine, "findings": [asdict(f) for f in findings]}, indent=1) + "\n")
    return 0 if healthy(findings) else 1


def examine() -> tuple[list[Finding], dict[str, int]]:
    """Start two probes on every node, and let each probe and this driver read from each.

    Returns the findings, and the niceness of an actor on each node.
    """
    places: list[tuple[str, Any]] = [("driver", Probe())]
    niceness = {}
    for node in ray.nodes():
        if node["Alive"]:
            on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            for i in (1, 2):  # two, so that there is a pair of processes on a cluster of one node
                probe = ray.remote(num_cpus=0)(Probe).options(scheduling_strategy=on_node).remote()
                host, niceness_there = ray.get(probe.where.remote(), timeout=CALL_TIMEOUT_S)
                places.append((f"actor {i} on {host}", probe))
                niceness[host] = niceness_there
    findings = []
    # Each source has another fill value, so a reader that gets the value of another source is noticed.
    for fill, (source, publisher) in enumerate(places, 1):
        ref = _call(publisher, "publish", float(fill))
        for reader, probe in places:
            for transport, why_not in _call(probe, "read", ref, float(fill)).items():
                findings.append(Finding(source, "itself" if reader == source else reader, transport, why_not))
    return findings, niceness


def _call(probe: Any, name: str, *args: Any) -> Any:
    """Call a method of the driver's own probe, or of an actor."""
    if isinstance(probe, Probe):
        return getattr(probe, name)(*args)
    return ray.get(getattr(probe, name).remote(*args), timeout=CALL_TIMEOUT_S)


def healthy(findings: Sequence[Finding]) -> bool:
    """Return True if every process gets values from every other one without Ray's object store."""
    return not _without_direct_transport(findings)


def _without_direct_transport(findings: Sequence[Finding]) -> list[tuple[str, str]]:
    """Return the pairs (source, reader) between which only the object store works, or nothing."""
    pairs = dict.fromkeys((f.source, f.reader) for f in findings)
    direct = {(f.source, f.reader) for f in findings if not f.why_not and not _by_ray(f)}
    return [pair for pair in pairs if pair not in direct]


def facts() -> dict[str, str]:
    """Return the versions and kernel settings that determine which transports work."""
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    guards = torch_layout() and array_layout_known()
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("raylane", "ray", "torch")},
        "private names": _ray_names.summary(),
        "kernel": f"{platform.release()} {platform.machine()}",
        "ptrace_scope": yama.read_text().strip() if yama.exists() else "not set (no Yama in this kernel)",
        "write counters": "readable" if counter_offsets() else "not readable: host cannot notice writes during a read",
        "memory guards": "readable" if guards else "not readable: host is refused, and auto uses tcp",
        "cuda devices": str(torch.cuda.device_count()),
        "settings": settings.set_here() or "no RAYLANE_ variable is set",
    }


def report(findings: Sequence[Finding], niceness: Mapping[str, int]) -> str:
    """Return the findings as text: what works, what does not and why, what to do, and the result.

    `niceness` is that of Ray's workers, by host.
    """
    tested = [finding for finding in findings if applies(finding)]
    lacking = [name for name in backends() if _lacks_device(name, tested)]
    lines = ["", "What works"]
    for name, backend in backends().items():
        if name in lacking:
            continue
        findings_of_transport = [finding for finding in tested if finding.transport == name]
        works = sum(not finding.why_not for finding in findings_of_transport)
        lines.append(f"  {name:15}{works} of {len(findings_of_transport)} tests passed: {backend.capability.summary}")
    lines += ["", "What does not work"]
    failed = [finding for finding in tested if finding.why_not and finding.transport not in lacking]
    for name in dict.fromkeys(finding.transport for finding in failed):
        lines += [
            f"  {name:15}from {finding.source} to {finding.reader}: {finding.why_not}"
            for finding in failed
            if finding.transport == name
        ]
        lines.append(f"  {'':15}What to do: {backends()[name].capability.remedy}")
    if not failed:
        lines.append("  nothing: all tests passed")
    lines += [f"  {name:15}not tested, because {NO_DEVICE}" for name in lacking]
    lines += [
        f"  {'priority':15}Ray's workers on {host} run at niceness {number}, so other programs on busy cores go first. "
        f"What to do: {NICENESS_REMEDY}"
        for host, number in niceness.items()
        if number > 0
    ]
    return "\n".join([*lines, "", "Result", *_result(findings)])


def _result(findings: Sequence[Finding]) -> list[str]:
    """Return the last section of the report."""
    missing = _without_direct_transport(findings)
    if not missing:
        return ["  Healthy: every process can get values from every other process directly."]
    return [
        "  NOT healthy: values between these processes must go through Ray's object store, or cannot be sent:",
        *(f"    from {source} to {reader}" for source, reader in missing),
        "  What to do: follow the advice above for tcp or host, then run `raylane doctor` again.",
    ]


def applies(finding: Finding) -> bool:
    """Return True if the transport is meant for this pair: local within a process, all others between processes."""
    return _by_ray(finding) or backends()[finding.transport].capability.own_objects == (finding.reader == "itself")


def _lacks_device(transport: str, tested: Sequence[Finding]) -> bool:
    """Return True if a transport was refused everywhere, because it needs a CUDA device and there is none."""
    reasons = {finding.why_not for finding in tested if finding.transport == transport}
    return reasons == {NO_DEVICE}


def _by_ray(finding: Finding) -> bool:
    return backends()[finding.transport].capability.by_ray
