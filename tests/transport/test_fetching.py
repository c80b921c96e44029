from __future__ import annotations

import threading

import pytest

from raylane.core.process import daemon_pool as fetching
from raylane.core.process.daemon_pool import FetchPool


def test_results_and_errors_come_back() -> None:
    pool = FetchPool(64, "raylane-fetch")
    assert pool.submit(lambda: 5).result(10) == 5
    with pytest.raises(KeyError):
        pool.submit(lambda: {}["x"]).result(10)
    pool.close()


def test_fetches_that_hang_hold_up_no_other() -> None:
    pool, gate = FetchPool(64, "raylane-fetch"), threading.Event()
    stuck = [pool.submit(lambda: gate.wait(60)) for _ in range(20)]
    assert [pool.submit(lambda i=i: i).result(10) for i in range(50)] == list(range(50))  # type: ignore[misc]
    gate.set()
    assert all(future.result(10) for future in stuck)
    pool.close()


def test_threads_are_reused_bounded_and_end(monkeypatch: pytest.MonkeyPatch, eventually: object) -> None:
    others = set(threading.enumerate())  # of pools that other tests have just closed

    def alive() -> int:
        return sum(thread.name == "raylane-fetch" for thread in set(threading.enumerate()) - others)

    monkeypatch.setattr(fetching, "IDLE_S", 0.05)
    pool, gate = FetchPool(3, "raylane-fetch"), threading.Event()
    futures = [pool.submit(lambda: gate.wait(60)) for _ in range(10)]
    assert alive() <= 3
    gate.set()
    assert all(future.result(10) for future in futures)
    eventually(lambda: alive() == 0)  # type: ignore[operator]
    assert pool.submit(lambda: 1).result(10) == 1
    eventually(lambda: alive() == 0)  # type: ignore[operator]


def test_call_submitted_after_close_still_runs() -> None:
    pool, gate = FetchPool(None, "raylane-fetch"), threading.Event()
    futures = [pool.submit(lambda: gate.wait(60)) for _ in range(3)]
    gate.set()
    assert all(future.result(10) for future in futures)
    pool.close()
    assert [pool.submit(lambda i=i: i).result(10) for i in range(5)] == list(range(5))  # type: ignore[misc]
    pool.close()
