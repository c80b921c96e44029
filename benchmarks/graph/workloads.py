"""Workloads: functions that make and time one block of a contender's calls. They know nothing of Ray or graphs.

Called by `graph_contenders`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from benchmarks.measure import Tally, quantile

CALLS_PER_SAMPLE = 100
"""Number of calls in one sample of `stream`: with several calls in flight, results arrive in bursts."""


def back_to_back(call: Callable[[], object], seconds: float, gap_s: float = 0.0) -> Tally:
    """Call, wait for the answer, pause for `gap_s` (not part of the sample), and repeat; at least one call."""
    clock = time.perf_counter
    samples: list[float] = []
    end = clock() + seconds
    while not samples or clock() < end:
        start = clock()
        call()
        samples.append((clock() - start) * 1e6)
        if gap_s:
            time.sleep(gap_s)
    return Tally(samples, len(samples))


async def in_event_loop(call: Callable[[], Awaitable[object]], seconds: float) -> Tally:
    """Do the same as `back_to_back`, for a coroutine function."""
    clock = time.perf_counter
    samples: list[float] = []
    end = clock() + seconds
    while not samples or clock() < end:
        start = clock()
        await call()
        samples.append((clock() - start) * 1e6)
    return Tally(samples, len(samples))


def stream(submit: Callable[[], Any], finish: Callable[[Any], object], in_flight: int, seconds: float) -> Tally:
    """Keep `in_flight` calls in flight and wait for the oldest; a sample is the mean of CALLS_PER_SAMPLE calls."""
    clock = time.perf_counter
    pending = deque(submit() for _ in range(in_flight))
    samples: list[float] = []
    start = clock()
    end = start + seconds
    while not samples or start < end:
        for _ in range(CALLS_PER_SAMPLE):
            finish(pending.popleft())
            pending.append(submit())
        now = clock()
        samples.append((now - start) * 1e6 / CALLS_PER_SAMPLE)
        start = now
    for token in pending:
        finish(token)
    return Tally(samples, len(samples) * CALLS_PER_SAMPLE)


def steps(submit: Callable[[], Any], finish: Callable[[Any], object], in_flight: int, count: int) -> Tally:
    """Make `count` calls with `in_flight` in flight; a sample is the time from one result to the next.

    The first sample starts with the first call.
    """
    times = [time.perf_counter()]
    pending = deque(submit() for _ in range(min(in_flight, count)))
    to_submit = count - len(pending)
    while pending:
        finish(pending.popleft())
        times.append(time.perf_counter())
        if to_submit:
            pending.append(submit())
            to_submit -= 1
    return Tally([(after - before) * 1e6 for before, after in itertools.pairwise(times)], count)


def idle(seconds: float) -> Tally:
    """Make no calls for `seconds`; the only sample is the elapsed time."""
    start = time.perf_counter()
    time.sleep(seconds)
    return Tally([(time.perf_counter() - start) * 1e6], 1)


def million(call: Callable[[], object], count: int, memory: Callable[[], dict[str, int]]) -> Tally:
    """Make `count` calls (an even multiple of 10) back to back, and call `memory` at the start, middle and end.

    Extra fields: each field of `memory` as a list of three values, and the medians of the first and last tenth of the
    calls.
    """
    # np.full writes every page now; otherwise page faults during the calls would count as growth of the driver.
    times = np.full(count, np.nan)
    clock = time.perf_counter
    seen = [memory()]
    for half in (range(count // 2), range(count // 2, count)):
        for index in half:
            start = clock()
            call()
            times[index] = clock() - start
        seen.append(memory())
    times *= 1e6
    tenth = count // 10
    ends = {"p50_first_tenth_us": times[:tenth], "p50_last_tenth_us": times[-tenth:]}
    extra: dict[str, Any] = {name: [each[name] for each in seen] for name in seen[0]}
    extra |= {name: round(quantile(sorted(part.tolist()), 0.5), 2) for name, part in ends.items()}
    return Tally(times.tolist(), count, extra=extra)
