"""Measurement shared by the benchmarks: contenders take turns, samples become records, records become a table.

All contenders of a case live in one session and have actors of their own. They are measured in short blocks, in a new
random order in each round, so that a slow minute of the machine affects all of them:

    round 1   [ A ][ C ][ B ]          one contender runs, the actors of the others are stopped (SIGSTOP)
    round 2   [ B ][ A ][ C ]

Waiting actors are stopped because some use CPU time while idle: UCX's progress threads, Ray's compiled graphs. Knows
nothing of Ray. Called by `transfer` and `graph`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from benchmarks.goals import CPU, P50, figure

QUANTILES = {"p50_us": 0.5, "p90_us": 0.9, "p99_us": 0.99}
QUIET_S = 5e-3
"""Time in seconds between the last call and SIGSTOP."""
CaseT = TypeVar("CaseT")


class Contender(Protocol):
    """One way to do the work of a case."""

    @property
    def name(self) -> str:
        """Name in the records."""

    @property
    def pids(self) -> Sequence[int]:
        """Process IDs besides the driver's: stopped while others are measured, and their CPU time is counted."""


ContenderT = TypeVar("ContenderT", bound=Contender)


@dataclass
class Tally:
    """Sum of the measurement blocks of one contender in one case."""

    samples_us: list[float] = field(default_factory=list)
    """Duration of each sample in microseconds."""
    calls: int = 0
    """Number of calls; equal to the number of samples unless a sample covers several calls."""
    cpu_s: float = 0.0
    """CPU seconds of the contender's processes and the driver during the blocks, pauses between calls included."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the record."""


def choose(known: Mapping[str, CaseT], only: str | None, more: str = "") -> list[CaseT]:
    """Return the cases named in `only` (comma-separated), or all cases if `only` is None.

    ValueError names the unknown cases, the known ones, and ends with `more`.
    """
    if only is None:
        return list(known.values())
    names = only.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown cases {', '.join(unknown)}; the cases are {', '.join(known)}{more}")
    return [known[name] for name in names]


def take_turns(
    contenders: Sequence[ContenderT],
    rounds: int,
    block: Callable[[ContenderT], Tally],
    *,
    seed: str,
    warm: Callable[[ContenderT], object] | None = None,
) -> dict[str, Tally]:
    """Run `block` once per round for every contender; return the sums of the blocks by contender name.

    `warm` runs before each block and is not measured, because processes need time after SIGCONT. All processes run
    again when the function returns.
    """
    tallies = {contender.name: Tally() for contender in contenders}
    order = list(contenders)
    rng = random.Random(seed)  # seeded, so that a run can be repeated in the same order
    stop(contenders)
    try:
        for _ in range(rounds):
            rng.shuffle(order)
            for contender in order:
                send(signal.SIGCONT, [contender])
                if warm is not None:
                    warm(contender)
                _add(tallies[contender.name], contender, block)
                stop([contender])
    finally:  # also after an error: a stopped process could never be ended cleanly
        send(signal.SIGCONT, contenders)
    return tallies


def _add(tally: Tally, contender: ContenderT, block: Callable[[ContenderT], Tally]) -> None:
    """Run one block and add its samples and CPU time to `tally`."""
    before = cpu_seconds(contender.pids)
    done = block(contender)
    tally.cpu_s += cpu_seconds(contender.pids) - before
    tally.samples_us += done.samples_us
    tally.calls += done.calls
    tally.extra |= done.extra


def stop(contenders: Iterable[Contender]) -> None:
    """Stop the contenders' processes, a moment after the last call.

    The delay lets processes become idle first. A process stopped in the middle would measure seconds between two
    instructions, assume an overloaded machine, and change its way of waiting.
    """
    time.sleep(QUIET_S)
    send(signal.SIGSTOP, contenders)


def send(number: signal.Signals, contenders: Iterable[Contender]) -> None:
    """Send a signal to every process of these contenders."""
    for contender in contenders:
        for pid in contender.pids:
            os.kill(pid, number)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time used so far by this process and the given ones, all threads, in seconds.

    Uses the CPU clocks of the processes, which have nanosecond resolution; /proc/PID/stat counts in 10 ms.
    """
    return time.process_time() + sum(time.clock_gettime(cpu_clock(pid)) for pid in pids)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def cpu_clock(pid: int) -> int:
    """Return the clock ID of another process's CPU time (clock_getcpuclockid(3)).

    OSError (ProcessLookupError if the process does not exist).
    """
    clock = ctypes.c_int()
    error = _libc().clock_getcpuclockid(ctypes.c_int(pid), ctypes.byref(clock))
    if error:
        raise OSError(error, f"{os.strerror(error)}: CPU clock of process {pid}")
    return clock.value


def timed(call: Callable[[], object]) -> float:
    """Return the duration of a call in microseconds."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the smallest sample that is not exceeded by at least a fraction `q` of the samples."""
    return ordered[min(len(ordered) - 1, max(0, -(-int(q * len(ordered) * 1000) // 1000) - 1))]


def record(case: str, contender: str, tally: Tally, first_us: float) -> dict[str, Any]:
    """Return the record of one contender in one case: times in microseconds, `cpu_s` in seconds over all `n` calls."""
    ordered = sorted(tally.samples_us)
    fields: dict[str, Any] = {"case": case, "contender": contender, "n": tally.calls}
    fields.update({name: round(quantile(ordered, q), 1) for name, q in QUANTILES.items()})
    fields |= {"min_us": round(ordered[0], 1), "first_us": round(first_us, 1), "cpu_s": round(tally.cpu_s, 4)}
    return fields | tally.extra


def table(records: Sequence[Mapping[str, Any]], baselines: Mapping[str, tuple[str, str]]) -> str:
    """Return the records as text.

    Two columns show the ratio of the 99th percentile, and of the first call, to the median. Each entry of `baselines`
    (title -> contender and "p50" or "cpu") adds a column: the baseline's value divided by the record's value of the
    same case.
    """
    heads = ("p50", "p99", "min", "first", "cpu/call")
    spreads = ("p99", "first")
    widths = [max(len(str(row[name])) for row in (*records, {name: name})) + 1 for name in ("case", "contender")]
    words = [f"{word:>10}" for word in (*heads, *(f"{name}/p50" for name in spreads))]
    words += [f"{title:>{len(title) + 2}}" for title in baselines]
    lines = [f"{'case':{widths[0]}}{'contender':{widths[1]}}" + "".join(words)]
    by_key = {(row["case"], row["contender"]): _figures(row) for row in records}
    for row in records:
        figures = _figures(row)
        words = [f"{time_text(row[f'{name}_us']):>10}" for name in heads[:4]] + [f"{time_text(figures['cpu']):>10}"]
        words += [f"{_ratio(row[f'{name}_us'], row['p50_us']):>10}" for name in spreads]
        for title, (contender, what) in baselines.items():
            base = by_key.get((row["case"], contender))
            ratio = "-" if base is None else _ratio(base[what], figures[what])
            words.append(f"{ratio:>{len(title) + 2}}")
        lines.append(f"{row['case']:{widths[0]}}{row['contender']:{widths[1]}}" + "".join(words))
    return "\n".join(lines)


def _ratio(value: float, base: float) -> str:
    """Return a quotient as text; a hyphen if `base` is zero."""
    return f"{value / base:.2f}" if base else "-"


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the microseconds of the median call, and of CPU time per call."""
    return {"p50": figure(row, P50), "cpu": figure(row, CPU)}


def time_text(us: float) -> str:
    """Return a time in microseconds as text, in a readable unit."""
    if us < 100:
        return f"{us:.1f} us"
    return f"{us:.0f} us" if us < 1000 else f"{us / 1000:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"
