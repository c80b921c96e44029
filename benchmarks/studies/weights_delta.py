"""Updates of weights through a link of 1 Gbit/s, whole and as deltas, where 1% of all bfloat16 elements change.

    python -m benchmarks.studies.weights_delta [--megabytes 200] [--rounds 20]

Two Ray nodes in network namespaces (root and iproute2): a trainer on one, a reader on the other. The same tensors are
published under two names, `dense` (delta="never") and `delta` (delta="auto"). An update is measured until it is on the
reader's host (`prefetch`), in two ways: the reader asks when the trainer has made its next step, in which the patches
are made; and the reader waits already when the trainer publishes. Names alternate in every round. The bytes are those
that leave the trainer's host.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import ray
import torch
from tests.network_drivers import ask, connect
from tests.networks import Hosts

from raylane import weights
from raylane.weights.chunks.delta import DeltaOptions, Run, diff
from raylane.weights.layout.boxes import chunk_bytes

NAMES = {"dense": "never", "delta": "auto"}
TENSORS = 20
STEP_S = 1.0
"""Seconds of a step of the trainer."""


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return the SHA-256 of all tensors."""
    total = hashlib.sha256()
    for tensor in tensors.values():
        total.update(tensor.view(torch.uint8).numpy().data)
    return total.hexdigest()


class Trainer:
    """Tensors that are published under both names."""

    def __init__(self, nbytes: int) -> None:
        self._chance = np.random.default_rng(0)
        size = nbytes // 2 // TENSORS
        self._tensors = {f"w{i}": torch.randn(size).to(torch.bfloat16) for i in range(TENSORS)}
        self._publishers = {name: weights.Publisher(name, self._tensors, delta=delta) for name, delta in NAMES.items()}

    def change(self) -> str:
        """Change 1% of the elements; return the digest of all."""
        for tensor in self._tensors.values():
            bits = tensor.view(torch.int16).numpy()
            places = self._chance.choice(len(bits), len(bits) // 100, replace=False)
            bits[places] ^= self._chance.integers(1, 1 << 15, len(places), dtype=np.int16)
        return digest(self._tensors)

    def publish(self, name: str, step: int) -> tuple[float, float]:
        """Publish; return when that ended (monotonic clock of the machine) and the seconds that it took."""
        began_s = time.monotonic()
        self._publishers[name].publish(step)
        return time.monotonic(), time.monotonic() - began_s

    def sent(self) -> int:
        """Return the bytes that have left this host."""
        line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0" in line)
        return int(line.split(":")[1].split()[8])


class Reader:
    """A reader of both names."""

    def __init__(self, nbytes: int) -> None:
        self._tensors = {f"w{i}": torch.zeros(nbytes // 2 // TENSORS, dtype=torch.bfloat16) for i in range(TENSORS)}
        self._subscribers = {name: weights.Subscriber(name, self._tensors) for name in NAMES}

    def ready(self) -> bool:
        """Return True."""
        return True

    def prefetch(self, name: str, number: int) -> tuple[float, float]:
        """Bring a version to this host; return when that ended and the seconds that it took."""
        began_s = time.monotonic()
        self._subscribers[name].prefetch(number, timeout=60)
        return time.monotonic(), time.monotonic() - began_s

    def update(self, name: str) -> str:
        """Take the version; return the digest of the tensors."""
        self._subscribers[name].update()
        return digest(self._tensors)


def drive(address: str, megabytes: int, rounds: int) -> None:
    """Measure, on the head."""
    connect(address)
    nbytes = megabytes * 1_000_000
    trainer = ray.remote(num_cpus=0)(Trainer).options(resources={"one": 0.1}).remote(nbytes)
    reader = ray.remote(num_cpus=0)(Reader).options(resources={"head": 0.1}).remote(nbytes)
    seconds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    sent: defaultdict[str, list[int]] = defaultdict(list)
    publishing: defaultdict[str, list[float]] = defaultdict(list)
    ask("gigabit")
    for round_number in range(-3, rounds):  # three to fill all slots, and to measure the link
        order = list(NAMES)[:: 1 if round_number % 2 else -1]
        for waiting in (False, True):
            expected = ray.get(trainer.change.remote())
            for name in order:
                before = ray.get(trainer.sent.remote())
                newest = weights.versions(name)[-1].number if round_number > -3 or waiting else 0
                if waiting:
                    ray.get(reader.ready.remote())
                    call = reader.prefetch.remote(name, newest + 1)
                    time.sleep(0.1)
                published_s, publish_s = ray.get(trainer.publish.remote(name, 2 * round_number + waiting + 10))
                if not waiting:
                    time.sleep(STEP_S)
                    call = reader.prefetch.remote(name, newest + 1)
                ended_s, taken_s = ray.get(call)
                bytes_out = ray.get(trainer.sent.remote()) - before
                assert ray.get(reader.update.remote(name)) == expected, "other bytes than the trainer's"
                if round_number >= 0:
                    case = "reader waits" if waiting else "after a step"
                    seconds[name, case].append(ended_s - published_s if waiting else taken_s)
                    publishing[name].append(publish_s)
                    sent[name].append(bytes_out)
        if round_number >= 0:
            print({f"{name}, {case}": f"{times[-1]:.3f}" for (name, case), times in seconds.items()}, flush=True)
    for case in ("after a step", "reader waits"):
        middle = {name: report(f"{name}, {case}, s", seconds[name, case]) for name in NAMES}
        ratios = [a / b for a, b in zip(seconds["dense", case], seconds["delta", case], strict=True)]
        print(f"{case}: dense / delta of the p50 {middle['dense'] / middle['delta']:.2f}; of pairs:", end=" ")
        report("ratio", ratios)
    for name in NAMES:
        report(f"{name}, publish, s", publishing[name])
        report(f"{name}, sent / bytes of a version", [count / nbytes for count in sent[name]])
    print({name: weights.versions(name)[-1].copied_bytes for name in NAMES}, flush=True)
    for name in NAMES:
        weights.drop(name)


def report(title: str, values: list[float]) -> float:
    """Print the spread of values; return the median."""
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    middle = statistics.median(ordered)
    print(f"{title}: p50 {middle:.4f}, p99 {p99:.4f}, least {ordered[0]:.4f}, n {len(ordered)}", flush=True)
    return middle


def time_diff(nbytes: int) -> None:
    """Measure the making of patches alone, on one thread."""
    chance = np.random.default_rng(0)
    old = chance.integers(0, 1 << 16, nbytes // 2, dtype=np.uint16)
    options, step = DeltaOptions("always"), chunk_bytes(nbytes)
    for density in (0.0, 0.001, 0.01, 0.1, 1.0):
        new = old.copy()
        new[chance.random(len(new)) < density] ^= 1
        diffs, digests = [], []
        for _ in range(10):
            began_s, hashing_s = time.perf_counter(), 0.0
            for first in range(0, nbytes, step):
                a, b = (each.view(np.uint8)[first : first + step] for each in (new, old))
                diff(a, b, [Run(len(a), 2)], options.most_patch_bytes(len(a), None))
                hash_s = time.perf_counter()
                hashlib.sha256(a.data).digest()
                hashing_s += time.perf_counter() - hash_s
            diffs.append(time.perf_counter() - began_s - hashing_s)
            digests.append(hashing_s)
        report(f"diff of {nbytes:,} bytes, {density:.1%} changed, s", diffs)
        report("  its digests, s", digests)


def main() -> None:
    """Start two nodes and the measurement, or be it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("driver", nargs="?", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.driver:
        drive(args.driver, args.megabytes, args.rounds)
        return
    time_diff(args.megabytes * 1_000_000)
    words = f"--megabytes {args.megabytes} --rounds {args.rounds}".split()
    hosts = Hosts(None)
    try:
        print(*hosts.drive("benchmarks.studies.weights_delta", *words))
    finally:
        hosts.net.close()


if __name__ == "__main__":
    main()
