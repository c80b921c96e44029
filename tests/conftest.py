"""Fixtures for all tests: one Ray cluster per test process, started on first use, and a check for leaks.

Selects the fast tests: those that use neither Ray nor child processes, train no model, and are not marked `slow`. A
fast test that starts a process anyway fails.

Orders the tests for several test processes (pytest-xdist with `--dist loadfile`): first the fast ones, then those on
Ray, each file in one process, then those that need the machine for themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import multiprocessing.process
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests import networks
from tests.suite.record import Recorder
from tests.victims import VICTIMS, Victims
from tests.worker_forks import worker_forks

if "PYTEST_XDIST_WORKER" in os.environ:
    # One test process per core: more threads in each would only compete. torch reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
)  # Ray's default setting prints a warning at every start
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# The first transfer of Ray's own direct transport makes agents of NIXL, each of which keeps a core busy: on two busy
# cores the 60 s that Ray waits are not enough.
os.environ.setdefault("RAY_rdt_fetch_fail_timeout_milliseconds", "400000")
# A shell that starts the tests in the background makes them, and all their children, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Ray starts workers at niceness 15: beside three computing processes, an actor took 100 s to start instead of 3.
os.environ.setdefault("RAY_worker_niceness", "0")


# The marks that keep a test out of the fast ones. `ray` and `trains` are set here, from the fixtures; the others by the
# tests. Training is half of the work of all tests of one process.
NOT_FAST = ("ray", "processes", "trains", "ranks", "slow", "gpu", "matrix", "alone")
FIXTURE_MARKS = {"ray_session": "ray", "hosts": "ray", "worker": "trains", "ranks": "ranks", "groups": "ranks"}
WITHOUT_RAY = ("trains", "ranks")
"""Marks of tests that compute without Ray, if they are not marked `ray` too."""
# Tests of four Ray nodes, which they share, with limits of time: two of them at once would be too much.
NETWORKS = ("_networks.py", "test_unshared.py")
STAGES = ("fast", "rest", "alone")
# Folders with the longest tests come first: at the end all test processes have something to do.
FOLDERS = ("faults", "sft", "benchmarks", "examples", "graph", "workers", "transport")


def pytest_configure(config: pytest.Config) -> None:
    """Record durations and failures, in the process that controls the run."""
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(Recorder())


@pytest.hookimpl(tryfirst=True)  # before pytest selects by `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the marks that follow from fixtures and other marks, and sort by stage and folder."""
    for item in items:
        for fixture in FIXTURE_MARKS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(FIXTURE_MARKS[fixture])
        if not any(item.get_closest_marker(name) for name in NOT_FAST):
            item.add_marker("fast")
    if listing := os.environ.get("RAYLANE_ON_RAY"):
        listed = (
            {items[0].config.rootpath / line for line in Path(listing).read_text().splitlines()} if items else set()
        )
        items[:] = [item for item in items if item.path not in listed or not is_without_ray(item)]
    items.sort(key=stage_and_folder)


def is_without_ray(item: pytest.Item) -> bool:
    """Return True if a test cannot start Ray: then a change in what acts on Ray only cannot break it."""
    return not item.get_closest_marker("ray") and any(item.get_closest_marker(name) for name in WITHOUT_RAY)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one test process, and all files with several Ray nodes to the same one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "networks" if file.endswith(NETWORKS) else file

    return Scheduling(config, log)


def stage_and_folder(item: pytest.Item) -> tuple[int, int]:
    """Return the key by which tests are sorted; the order within a folder stays."""
    stage = "alone" if item.get_closest_marker("alone") else "fast" if item.get_closest_marker("fast") else "rest"
    folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
    return STAGES.index(stage), FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)


def pytest_collection_finish() -> None:
    """Take the modules imported so far out of garbage collection.

    They are 400,000 objects that stay until the end. Without them, each of the many `gc.collect()` of the leak checks
    takes milliseconds instead of 0.25 s.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of pytest-timeout, which does not count the wait for the turn
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Wait until the test may run beside those of the other test processes; guard the fast ones."""
    with contextlib.ExitStack() as stack:
        if hasattr(item.config, "workerinput"):
            shared = Path(item.config.option.basetemp).parent
            stack.enter_context(turn(shared, alone=item.get_closest_marker("alone") is not None))
        if item.get_closest_marker("fast"):
            stack.enter_context(processes_refused(item))
        elif is_without_ray(item):
            stack.enter_context(ray_refused(item))
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drop the test's hold on its fixtures: the leak check of a module runs within the teardown of its last test.

    End the nodes in namespaces after the last test that uses them.
    """
    getattr(item, "funcargs", {}).clear()
    if item.path.name.endswith(NETWORKS) and not (nextitem and nextitem.path.name.endswith(NETWORKS)):
        networks.close_shared()


@contextlib.contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Let tests of all test processes run side by side, but a test that is `alone` only while no other runs."""
    with open(folder / "gate.lock", "w") as gate, open(folder / "room.lock", "w") as room:
        # A test that waits to be alone holds the gate, so that no further test starts before it.
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # for forked children too, which have the file open


@contextlib.contextmanager
def ray_refused(item: pytest.Item) -> Iterator[None]:
    """Make a test that is marked as one without Ray fail where it starts Ray."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        pytest.fail(f"{item.nodeid} counts as a test without Ray, but starts Ray. Mark the test `ray`.")

    with pytest.MonkeyPatch.context() as patch:
        import ray

        patch.setattr(ray, "init", refuse)
        yield


@contextlib.contextmanager
def processes_refused(item: pytest.Item) -> Iterator[None]:
    """Make a fast test fail where it, or one of its fixtures, starts Ray or a child process."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        pytest.fail(
            f"{item.nodeid} counts as fast, but starts Ray or a child process. "
            "Request the fixture `ray_session`, or mark the test `processes`."
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refuse)
        patch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
        patch.setattr(os, "fork", refuse)
        if "ray" in sys.modules:
            patch.setattr("ray.init", refuse)
        yield


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Start a local Ray with 8 logical CPUs: more than the machine has, because actors in tests mostly wait."""
    import ray

    with worker_forks() as launcher:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", launcher)
            ray.init(
                address="local", num_cpus=8, include_dashboard=False, object_store_memory=1 << 30, log_to_driver=False
            )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def weights_service(ray_session: None) -> Iterator[None]:
    """Keep the actors of `raylane.weights` for a module: they would end with the names of each test."""
    import torch

    from raylane import weights

    kept = weights.Subscriber("kept by the module", {"w": torch.zeros(1)})
    yield
    kept.close()
    weights.drop("kept by the module")


@pytest.fixture
def hosts(tmp_path: Path) -> networks.Hosts:
    """Return the Ray nodes in namespaces that tests share."""
    return networks.shared(secured=False, folder=tmp_path)


@pytest.fixture
def secured_hosts(tmp_path: Path) -> networks.Hosts:
    """Return Ray nodes in namespaces that encrypt their connections."""
    return networks.shared(secured=True, folder=tmp_path)


@pytest.fixture(scope="module")
def victims(ray_session: None) -> Iterator[Victims]:
    """Provide actors that a test may kill. Those that are not taken end with the module."""
    yield VICTIMS
    VICTIMS.end()


@pytest.fixture
def cluster(ray_session: None) -> Iterator[None]:
    """Provide the session's Ray; fail if the test leaves an actor, thread, descriptor, segment or published value."""
    from raylane.testing.leaks import leaks, snapshot

    before = snapshot()
    # An actor that waits here and that the test takes must be gone afterwards too.
    waiting = VICTIMS.waiting_ids()
    actors = frozenset(name for name in before.actors if name.rpartition(" ")[2] not in waiting)
    before = dataclasses.replace(before, actors=actors)
    yield
    left = leaks(before, within_s=20, spare_actors=VICTIMS.waiting_ids())
    assert not left, f"left behind: {left}"


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Return a function that polls a condition until a deadline, and fails with the last answer."""
    import time

    def wait(condition: Callable[[], object], within_s: float = 10.0) -> None:
        deadline = time.monotonic() + within_s
        while not (answer := condition()):
            assert time.monotonic() < deadline, f"still {answer!r} after {within_s} s"
            time.sleep(0.02)

    return wait
