"""What the benchmarks share: contenders take turns, their samples become records, records become a table.

All contenders of a case live in one session and have actors of their own. They are measured in short blocks, in a new
random order every round, so that a slow minute of the machine hits all of them; the actors of those who wait for their
turn are stopped (SIGSTOP), because some burn CPU when idle: UCX's progress threads, Ray's compiled graphs. Knows
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

QUANTILES = {"p50_us": 0.5, "p90_us": 0.9, "p99_us": 0.99}
CALM_S = 5e-3
Known = TypeVar("Known")


class Contender(Protocol):
    """One way to do what a case asks for."""

    @property
    def name(self) -> str: ...

    @property
    def pids(self) -> Sequence[int]:
        """Its processes besides the driver's: stopped while others are measured, their CPU time is counted."""


Someone = TypeVar("Someone", bound=Contender)


@dataclass
class Tally:
    """What the blocks of one contender in one case have come to."""

    samples_us: list[float] = field(default_factory=list)
    calls: int = 0
    """As many as there are samples, unless a sample stands for several calls."""
    cpu_s: float = 0.0
    """Of its processes and the driver, from the start to the end of each block, pauses between calls included."""
    extra: dict[str, Any] = field(default_factory=dict)
    """More fields of the record."""


def choose(known: Mapping[str, Known], only: str | None, more: str = "") -> list[Known]:
    """The cases named in `only` (comma-separated), or all of them.

    ValueError names unknown ones and those known, and says `more`.
    """
    if only is None:
        return list(known.values())
    wanted = only.split(",")
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"unknown cases {', '.join(unknown)}; there are {', '.join(known)}{more}")
    return [known[name] for name in wanted]


def take_turns(
    contenders: Sequence[Someone],
    rounds: int,
    block: Callable[[Someone], Tally],
    *,
    seed: str,
    warm: Callable[[Someone], object] | None = None,
) -> dict[str, Tally]:
    """Run `block` once a round for every contender; by name what its blocks add up to.

    `warm` runs before each block, outside all measuring: processes that have just been continued catch up first. All
    processes run again afterwards.
    """
    tallies = {contender.name: Tally() for contender in contenders}
    order = list(contenders)
    rng = random.Random(seed)
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
    finally:
        send(signal.SIGCONT, contenders)
    return tallies


def _add(tally: Tally, contender: Someone, block: Callable[[Someone], Tally]) -> None:
    before = cpu_seconds(contender.pids)
    done = block(contender)
    tally.cpu_s += cpu_seconds(contender.pids) - before
    tally.samples_us += done.samples_us
    tally.calls += done.calls
    tally.extra |= done.extra


def stop(contenders: Iterable[Contender]) -> None:
    """Stop their processes, a moment after the last call: not in the middle of what they do to become idle. Who finds
    that it lost seconds between two instructions would think the machine overloaded, and wait in another way."""
    time.sleep(CALM_S)
    send(signal.SIGSTOP, contenders)


def send(number: signal.Signals, contenders: Iterable[Contender]) -> None:
    """Send a signal to every process of these contenders."""
    for contender in contenders:
        for pid in contender.pids:
            os.kill(pid, number)


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time used so far by this process and these others, all threads, in nanosecond resolution."""
    return time.process_time() + sum(time.clock_gettime(_cpu_clock(pid)) for pid in pids)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _cpu_clock(pid: int) -> int:
    """The clock of another process's CPU time: clock_getcpuclockid(3). ProcessLookupError if there is none."""
    found = ctypes.c_int()
    error = _libc().clock_getcpuclockid(ctypes.c_int(pid), ctypes.byref(found))
    if error:
        raise OSError(error, f"{os.strerror(error)}: CPU clock of process {pid}")
    return found.value


def timed(call: Callable[[], object]) -> float:
    """Microseconds that a call takes."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def quantile(ordered: Sequence[float], q: float) -> float:
    """The smallest sample that at least a share `q` of the samples do not exceed."""
    return ordered[min(len(ordered) - 1, max(0, -(-int(q * len(ordered) * 1000) // 1000) - 1))]


def record(case: str, contender: str, tally: Tally, first_us: float) -> dict[str, Any]:
    """What is written of one contender in one case. Times in microseconds, `cpu_s` in seconds over all `n` calls."""
    ordered = sorted(tally.samples_us)
    found: dict[str, Any] = {"case": case, "contender": contender, "n": tally.calls}
    found.update({name: round(quantile(ordered, q), 1) for name, q in QUANTILES.items()})
    found |= {"min_us": round(ordered[0], 1), "first_us": round(first_us, 1), "cpu_s": round(tally.cpu_s, 4)}
    return found | tally.extra


def table(records: Sequence[Mapping[str, Any]], baselines: Mapping[str, tuple[str, str]]) -> str:
    """The records as text.

    Each of `baselines` (title to contender and "p50" or "cpu") adds a column: how many times less one record has of
    that than this contender's record of the same case.
    """
    heads = ("p50", "p99", "min", "first", "cpu/call")
    widths = [max(len(str(row[name])) for row in (*records, {name: name})) + 1 for name in ("case", "contender")]
    words = [f"{word:>10}" for word in heads] + [f"{title:>{len(title) + 2}}" for title in baselines]
    lines = [f"{'case':{widths[0]}}{'contender':{widths[1]}}" + "".join(words)]
    by_key = {(row["case"], row["contender"]): _figures(row) for row in records}
    for row in records:
        figures = _figures(row)
        words = [f"{time_text(row[f'{name}_us']):>10}" for name in heads[:4]] + [f"{time_text(figures['cpu']):>10}"]
        for title, (contender, what) in baselines.items():
            base = by_key.get((row["case"], contender))
            ratio = "-" if base is None or not figures[what] else f"{base[what] / figures[what]:.2f}"
            words.append(f"{ratio:>{len(title) + 2}}")
        lines.append(f"{row['case']:{widths[0]}}{row['contender']:{widths[1]}}" + "".join(words))
    return "\n".join(lines)


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds: of the median call, and of CPU time a call."""
    return {"p50": row["p50_us"], "cpu": row["cpu_s"] / row["n"] * 1e6}


def time_text(us: float) -> str:
    """A time in microseconds, in the unit that reads best."""
    if us < 100:
        return f"{us:.1f} us"
    return f"{us:.0f} us" if us < 1000 else f"{us / 1000:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"
