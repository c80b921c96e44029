"""The watcher of processes: told once of each end, and gone when there is nothing to watch."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raylane.core.process.watcher import Watcher, _WatchedDescriptor

Eventually = Callable[..., None]

pytestmark = pytest.mark.processes


@pytest.fixture
def watcher(eventually: Eventually) -> Iterator[Watcher]:
    found = Watcher()
    yield found
    eventually(lambda: found._thread is None)
    assert not found._watched
    if found._eventfd is not None:
        os.close(found._eventfd)


@pytest.fixture
def sleeper() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    made: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen(["sleep", "600"]))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def threads() -> int:
    return sum(thread.name == "raylane-watch" for thread in threading.enumerate())


def descriptors() -> int:
    """Return the number of descriptors of processes: others come and go with threads of earlier tests."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += "pidfd" in os.readlink(f"/proc/self/fd/{name}")
    return found


def test_an_end_is_told_once_on_the_watchers_thread(watcher: Watcher, sleeper: Any, eventually: Eventually) -> None:
    told: list[str] = []
    process = sleeper()
    before = threads()
    watch = watcher.watch(process.pid, lambda: told.append(threading.current_thread().name))
    assert len(watcher) == 1
    assert threads() == before + 1
    assert not told
    end(process)
    eventually(lambda: told)
    eventually(lambda: threads() == before)  # nothing left to watch
    watch.forget()  # too late, and no harm
    watch.forget()
    assert told == ["raylane-watch"]


def test_watch_of_an_ended_process_raises(watcher: Watcher, sleeper: Any, eventually: Eventually) -> None:
    process = sleeper()
    end(process)
    before = threads(), descriptors()
    with pytest.raises(ProcessLookupError):
        watcher.watch(process.pid, lambda: None)
    assert (threads(), descriptors()) == before
    zombie = sleeper()
    zombie.kill()
    told: list[int] = []
    eventually(lambda: Path(f"/proc/{zombie.pid}/stat").read_text().split()[2] == "Z")
    watcher.watch(zombie.pid, lambda: told.append(1))  # ended, though nobody has asked how
    eventually(lambda: told)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_many_ends_at_once(watcher: Watcher, sleeper: Any, eventually: Eventually, how: int) -> None:
    told: list[int] = []
    processes = [sleeper() for _ in range(20)]
    for number, process in enumerate(processes):
        watcher.watch(process.pid, lambda number=number: told.append(number))
        watcher.watch(process.pid, lambda number=number: told.append(number))  # two graphs, say
    assert threads() == 1
    for process in processes[::2]:
        process.send_signal(how)
    eventually(lambda: len(told) == 20)
    assert sorted(told) == sorted([*range(0, 20, 2)] * 2)
    eventually(lambda: len(watcher) == 20)
    for process in processes:
        process.send_signal(how)
    eventually(lambda: len(told) == 40)


def test_watches_of_one_process_share_a_descriptor(watcher: Watcher, sleeper: Any, eventually: Eventually) -> None:
    told: list[int] = []
    process = sleeper()
    first = watcher.watch(process.pid, lambda: told.append(0))
    gc.collect()  # descriptors that earlier tests have left to the collector
    before = descriptors()
    more = [watcher.watch(process.pid, lambda number=number: told.append(number)) for number in range(1, 300)]
    assert descriptors() == before
    first.forget()
    eventually(lambda: len(watcher) == 299)
    assert descriptors() == before
    for watch in more[100:]:
        watch.forget()
    end(process)
    eventually(lambda: sorted(told) == list(range(1, 101)))
    eventually(lambda: descriptors() == before - 1)


def test_watch_of_a_reused_number_gets_a_new_descriptor(watcher: Watcher, sleeper: Any, eventually: Eventually) -> None:
    told: list[str] = []
    old, new = sleeper(), sleeper()
    with watcher._lock:  # the thread cannot notice the end before the second watch exists
        watcher._by_pid[new.pid] = source = _WatchedDescriptor(os.pidfd_open(old.pid), select.POLLIN, new.pid)
        watcher._add(source, lambda: told.append("old"))
        end(old)
        assert source.ended()
    watcher.watch(new.pid, lambda: told.append("new"))
    eventually(lambda: told == ["old"])
    end(new)
    eventually(lambda: told == ["old", "new"])


def test_forget_suppresses_callback(watcher: Watcher, sleeper: Any, eventually: Eventually) -> None:
    told: list[str] = []
    one, two = sleeper(), sleeper()
    forgotten = watcher.watch(one.pid, lambda: told.append("one"))
    watcher.watch(two.pid, lambda: told.append("two"))
    forgotten.forget()
    eventually(lambda: len(watcher) == 1)
    end(one)
    end(two)
    eventually(lambda: told)
    assert told == ["two"]


def test_callback_of_one_end_may_forget_another_that_has_come(
    watcher: Watcher, sleeper: Any, eventually: Eventually
) -> None:
    called: list[str] = []
    busy, proceed = threading.Event(), threading.Event()
    blocker, first, second = sleeper(), sleeper(), sleeper()

    def wait() -> None:
        busy.set()
        assert proceed.wait(10)

    def call(name: str, other: str) -> None:
        called.append(name)
        watches[other].forget()

    watches = {
        "first": watcher.watch(first.pid, lambda: call("first", "second")),
        "second": watcher.watch(second.pid, lambda: call("second", "first")),
    }
    watcher.watch(blocker.pid, wait)
    end(blocker)
    assert busy.wait(10)
    end(first)  # the thread learns of both ends at once, when it comes back from `wait`
    end(second)
    proceed.set()
    eventually(lambda: len(watcher) == 0)
    assert len(called) == 1


def test_forget_after_end_spares_a_reused_descriptor(watcher: Watcher, sleeper: Any, eventually: Eventually) -> None:
    told: list[str] = []
    one, two, other = sleeper(), sleeper(), sleeper()
    watcher.watch(other.pid, lambda: told.append("other"))
    first = watcher.watch(one.pid, lambda: told.append("one"))
    end(one)
    eventually(lambda: told == ["one"])
    second = watcher.watch(two.pid, lambda: told.append("two"))
    assert second.source.fd == first.source.fd  # the kernel gives the lowest free number
    first.forget()
    end(two)
    eventually(lambda: told == ["one", "two"])
    end(other)


def test_it_starts_again_and_leaves_nothing(watcher: Watcher, sleeper: Any, eventually: Eventually) -> None:
    process = sleeper()
    watcher.watch(process.pid, lambda: None).forget()
    eventually(lambda: watcher._thread is None)
    before = descriptors()
    for _ in range(200):
        watcher.watch(process.pid, lambda: None).forget()
    eventually(lambda: watcher._thread is None)
    assert descriptors() == before
    told: list[int] = []
    watcher.watch(process.pid, lambda: told.append(1))
    end(process)
    eventually(lambda: told)


def test_an_error_in_what_is_told_does_not_stop_it(
    watcher: Watcher, sleeper: Any, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []

    def fails() -> None:
        raise RuntimeError("in the callback")

    one, two = sleeper(), sleeper()
    with caplog.at_level(logging.ERROR, "raylane.core"):
        watcher.watch(one.pid, fails)
        watcher.watch(two.pid, lambda: told.append(1))
        end(one)
        eventually(lambda: "in the callback" in caplog.text)
        end(two)
        eventually(lambda: told)


def test_callback_may_use_the_watcher(watcher: Watcher, sleeper: Any, eventually: Eventually) -> None:
    told: list[str] = []
    one, two, three = sleeper(), sleeper(), sleeper()
    watch = watcher.watch(three.pid, lambda: told.append("three"))

    def ended() -> None:
        watch.forget()
        watcher.watch(two.pid, lambda: told.append("two"))
        told.append("one")

    watcher.watch(one.pid, ended)
    end(one)
    eventually(lambda: told == ["one"])
    end(three)
    end(two)
    eventually(lambda: told == ["one", "two"])


def test_a_watch_that_has_ended_keeps_nobody(watcher: Watcher, sleeper: Any, eventually: Eventually) -> None:
    class Graph:
        def fail(self) -> None:
            told.append(1)

    told: list[int] = []
    graph, process = Graph(), sleeper()
    gone = weakref.ref(graph)
    watch = watcher.watch(process.pid, graph.fail)
    end(process)
    eventually(lambda: told)
    watch.forget()
    del graph
    eventually(lambda: gone() is None)


class Forgets:
    """In a cycle, so that the collector ends it, at any allocation, within the watcher too."""

    def __init__(self, watch: Any) -> None:
        self.watch, self.itself = watch, self

    def __del__(self) -> None:
        self.watch.forget()


def test_a_finalizer_may_forget(watcher: Watcher, sleeper: Any, eventually: Eventually) -> None:
    process = sleeper()
    threshold = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    try:
        for _ in range(300):
            Forgets(watcher.watch(process.pid, lambda: None))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    eventually(lambda: not watcher._watched)


def test_many_threads_watch_and_forget(watcher: Watcher, sleeper: Any, eventually: Eventually) -> None:
    told: list[int] = []
    process = sleeper()

    def use() -> None:
        for number in range(100):
            watch = watcher.watch(process.pid, lambda: told.append(1))
            if number:
                watch.forget()

    users = [threading.Thread(target=use) for _ in range(5)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    eventually(lambda: len(watcher) == 5)
    assert not told
    end(process)
    eventually(lambda: told == [1] * 5)


@pytest.mark.parametrize("who", [0, 1])
def test_the_end_of_a_connection(watcher: Watcher, eventually: Eventually, who: int) -> None:
    told: list[str] = []
    pair = socket.socketpair()
    watcher.watch_connection(pair[0], lambda: told.append("broken"))
    pair[1].sendall(b"bytes that another thread will read")
    eventually(lambda: len(watcher._watched) == 1)
    assert not told
    pair[who].shutdown(socket.SHUT_RDWR)
    eventually(lambda: told == ["broken"])
    for end in pair:
        end.close()
