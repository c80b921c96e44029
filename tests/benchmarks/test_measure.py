from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from benchmarks.measure import Tally
from tests.process_tools import stop

from benchmarks import measure


@dataclass
class Fake:
    name: str
    pids: list[int] = field(default_factory=list)


@pytest.fixture
def sleeper() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    yield process.pid
    process.kill()
    process.wait()


def state(pid: int) -> str:
    """proc_pid_stat(5), third field."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def becomes(pid: int, *, stopped: bool) -> bool:
    """Whether it is, soon: a signal takes effect when its process is next looked at."""
    deadline = time.monotonic() + 60
    while (state(pid) == "T") != stopped:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def test_quantiles_are_samples() -> None:
    ordered = [float(i) for i in range(1, 101)]
    assert [measure.quantile(ordered, q) for q in (0.5, 0.9, 0.99)] == [50, 90, 99]
    assert measure.quantile([3.0], 0.99) == 3


def test_choose() -> None:
    known = {"a": 1, "b": 2, "c": 3}
    assert measure.choose(known, None) == [1, 2, 3]
    assert measure.choose(known, "c,a") == [3, 1]
    with pytest.raises(ValueError, match=r"unknown cases d, e; the cases are a, b, c \(f too\)"):
        measure.choose(known, "d,a,e", " (f too)")


def test_every_contender_has_one_block_in_every_round() -> None:
    seen: list[str] = []

    def block(who: Fake) -> Tally:
        seen.append(who.name)
        return Tally([float(len(seen))], 10, extra={who.name: len(seen)})

    warmed: list[str] = []
    tallies = measure.take_turns(
        [Fake("a"), Fake("b"), Fake("c")], 4, block, seed="x", warm=lambda who: warmed.append(who.name)
    )
    assert warmed == seen
    rounds = [seen[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1, "the order is the same in all rounds"
    for name, tally in tallies.items():
        assert tally.samples_us == [float(i + 1) for i, who in enumerate(seen) if who == name]
        assert tally.calls == 40
        assert tally.extra == {name: tally.samples_us[-1]}


@pytest.mark.processes
def test_only_whose_turn_it_is_runs(sleeper: int) -> None:
    seen = {}

    def block(who: Fake) -> Tally:
        seen[who.name] = becomes(sleeper, stopped=who.name == "other")
        return Tally([1.0], 1)

    measure.take_turns([Fake("mine", [sleeper]), Fake("other")], 1, block, seed="x")
    assert seen == {"mine": True, "other": True}
    assert becomes(sleeper, stopped=False)


@pytest.mark.processes
def test_an_error_leaves_nobody_stopped(sleeper: int) -> None:
    def block(who: Fake) -> Tally:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure.take_turns([Fake("a", [sleeper])], 1, block, seed="x")
    assert becomes(sleeper, stopped=False)


@pytest.mark.processes
def test_cpu_time_of_others(sleeper: int) -> None:
    before = measure.cpu_seconds([])
    while measure.cpu_seconds([]) < before + 0.01:
        pass
    assert measure.cpu_seconds([sleeper]) >= before + 0.01
    # A process asked from outside says what it says of itself.
    code = "import json, sys, time\nsum(range(10**6))\nprint(time.process_time(), flush=True)\nsys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    inside = json.loads(child.stdout.readline())
    stop(child.pid)
    before = measure.cpu_seconds([])
    outside = measure.cpu_seconds([child.pid]) - before
    child.kill()
    child.communicate()
    assert outside >= inside > 0
    with pytest.raises(OSError, match=f"CPU clock of process {child.pid}"):
        measure.cpu_seconds([child.pid])


def test_a_record_and_its_place_in_the_table() -> None:
    slow = measure.record("echo", "theirs", Tally([40.0, 20.0, 30.0], 30, 0.003, {"more": 1}), 1234.56)
    assert slow == {
        "case": "echo",
        "contender": "theirs",
        "n": 30,
        "p50_us": 30.0,
        "p90_us": 40.0,
        "p99_us": 40.0,
        "min_us": 20.0,
        "first_us": 1234.6,
        "cpu_s": 0.003,
        "more": 1,
    }
    quick = measure.record("echo", "ours", Tally([10.0], 10, 0.0005), 99.0)
    alone = measure.record("other", "ours", Tally([10.0], 10), 99.0)
    lines = measure.table([slow, quick, alone], {"x faster": ("theirs", "p50"), "x its CPU": ("theirs", "cpu")})
    head, *rows = lines.splitlines()
    assert head.split()[:2] == ["case", "contender"]
    assert "p99/p50 first/p50" in " ".join(head.split())
    assert " ".join(rows[0].split()) == "echo theirs 30.0 us 40.0 us 20.0 us 1.23 ms 100 us 1.33 41.15 1.00 1.00"
    assert " ".join(rows[1].split()) == "echo ours 10.0 us 10.0 us 10.0 us 99.0 us 50.0 us 1.00 9.90 3.00 2.00"
    assert rows[2].split()[-2:] == ["-", "-"], "no baseline in this case"
    assert len({len(line) for line in (head, *rows)}) == 1


@pytest.mark.parametrize(
    ("us", "text"), [(0.31, "0.3 us"), (99.9, "99.9 us"), (640, "640 us"), (2500, "2.50 ms"), (2.5e6, "2.50 s")]
)
def test_times_in_the_unit_that_reads_best(us: float, text: str) -> None:
    assert measure.time_text(us) == text
