"""Leases and lags of readers, without Ray: the table of states, and their renewal by keepers that may not answer."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
import ray

from raylane.cli.weights import render_readers
from raylane.core.process.place import here, start_ticks
from raylane.weights.service import lag_metrics, reader_watch
from raylane.weights.service.lag_metrics import LagGauge, report_lags
from raylane.weights.service.reader_watch import CatalogueEnded, Leases, WatchedReaders
from raylane.weights.state.readers import (
    LEASE_S,
    MOST_COMMITS,
    TRANSITIONS,
    LeaseEvent,
    LeaseState,
    NamedReaders,
    ReaderKey,
    VersionKey,
    key_of_reader,
)


def key(label: str, host: str = "a", pid: int = 1, ticks: int = 1) -> ReaderKey:
    return ReaderKey("policy", label, host, pid, ticks)


def version(number: int) -> VersionKey:
    return VersionKey("", number)


ONE, TWO = key("one"), key("two", "b")


def leases_of(readers: NamedReaders) -> dict[str, str]:
    return {info.label: info.lease for info in readers.infos(0)}


@pytest.mark.claim("weights", "publishers wait for readers with a live lease only (death of a host: fakes only)")
def test_lease_follows_the_table() -> None:
    readers = NamedReaders()
    assert readers.join(ONE, 0)
    assert not readers.join(ONE, 0)
    assert leases_of(readers) == {"one": "unseen"}
    readers.advance([ONE, TWO], LeaseEvent.RENEWED, 1)  # an unknown reader is ignored
    assert leases_of(readers) == {"one": "held"}
    readers.advance([ONE], LeaseEvent.MISSED, LEASE_S)
    assert leases_of(readers) == {"one": "unseen"}
    readers.advance([ONE], LeaseEvent.MISSED, 1 + LEASE_S)
    assert leases_of(readers) == {"one": "expired"}
    readers.join(ONE, 30)  # it has called
    assert leases_of(readers) == {"one": "unseen"}
    readers.advance([ONE], LeaseEvent.MISSED, 29 + LEASE_S)
    assert leases_of(readers) == {"one": "unseen"}
    readers.advance([ONE], LeaseEvent.MISSED, 30 + LEASE_S)
    readers.advance([ONE], LeaseEvent.RENEWED, 60)
    assert leases_of(readers) == {"one": "held"}
    assert not readers.advance([ONE], LeaseEvent.RENEWED, 61)


@pytest.mark.parametrize("event", [LeaseEvent.LEFT, LeaseEvent.PROCESS_ENDED, LeaseEvent.HOST_ENDED])
def test_reader_that_ends_is_forgotten(event: LeaseEvent) -> None:
    assert {TRANSITIONS[state, event] for state in LeaseState} == {LeaseState.ENDED}
    readers = NamedReaders()
    readers.join(ONE, 0)
    readers.join(TWO, 0)
    assert readers.advance([ONE], event, 1)
    assert readers.keys() == [TWO]
    assert readers.keys("a") == []
    assert not readers.advance([ONE], event, 1)


def test_calls_that_arrive_late_change_nothing() -> None:
    readers = NamedReaders()
    for number in (1, 2):
        readers.commit(number, 0)
    assert readers.apply(ONE, version(2), 2, 0)
    assert not readers.apply(ONE, version(1), 1, 0)
    assert readers.users(2) == ["one"]
    readers.advance([ONE], LeaseEvent.LEFT, 0)
    assert not readers.apply(ONE, version(3), 3, 0)
    assert readers.keys() == []
    readers.apply(TWO, version(1), 1, 0)
    readers.advance([TWO], LeaseEvent.HOST_ENDED, 0)
    assert readers.apply(TWO, version(2), 2, 0)  # Ray was wrong about its host


def test_expired_readers_are_not_waited_for() -> None:
    readers = NamedReaders()
    for reader in (ONE, TWO):
        readers.join(reader, 0)
    readers.commit(1, 0)
    readers.apply(ONE, version(1), 1, 0)
    assert readers.behind(version(1)) == ["two"]
    readers.advance([TWO], LeaseEvent.MISSED, LEASE_S)
    assert readers.behind(version(1)) == []
    assert [reader.key for reader in readers.counted()] == [ONE]
    assert len(readers) == 2


@pytest.mark.claim("weights", "readers that are too far behind are named in metrics and by `weights.readers`")
def test_lag_counts_from_the_version_in_use() -> None:
    readers = NamedReaders()
    readers.max_lag = 2
    readers.join(ONE, 0)
    for number in range(1, 6):
        readers.commit(number, 10.0 * number)
    readers.join(TWO, 50)  # a new reader has missed nothing
    readers.apply(ONE, version(2), 1, 50)
    first, second = readers.infos(60)
    assert (first.label, first.version, first.lag, first.behind_s, first.too_far) == ("one", 2, 3, 30, True)
    assert (second.label, second.version, second.lag, second.behind_s, second.too_far) == ("two", 0, 0, 0, False)
    readers.commit(6, 60)
    assert [(info.label, info.lag, info.behind_s) for info in readers.infos(61)] == [("one", 4, 31), ("two", 1, 1)]
    readers.apply(ONE, version(6), 2, 61)
    assert [info.label for info in readers.infos(61) if info.too_far] == []
    assert readers.users(6) == ["one"]
    for number in range(7, 8 + MOST_COMMITS):
        readers.commit(number, 100)
    assert readers.infos(101)[0].behind_s == 1


def test_readers_of_an_earlier_catalogue_keep_their_version() -> None:
    readers = NamedReaders()
    readers.life = "present"
    readers.join(ONE, 0)  # from its keeper, which does not know its version
    assert readers.join(ONE, 0, VersionKey("earlier", 8))
    readers.join(TWO, 0)
    readers.commit(9, 0)
    assert {info.label: (info.version, info.lag) for info in readers.infos(0)} == {"one": (8, 1), "two": (0, 1)}
    # A number beyond the newest one is that of a name that was dropped.
    assert not readers.join(ONE, 0, VersionKey("earlier", 12))
    assert readers.behind(VersionKey("present", 9)) == ["one", "two"]


@pytest.mark.claim("weights", "readers that are too far behind are named in metrics and by `weights.readers`")
def test_readers_are_shown_with_lag_and_lease() -> None:
    readers = NamedReaders()
    readers.max_lag = 0
    assert render_readers([]) == []
    readers.join(ONE, 0)
    readers.commit(1, 0)
    readers.join(TWO, 0)
    empty, *table = render_readers(readers.infos(7))
    assert empty == ""
    assert table == [
        "name    reader  version  behind       for  lease   node",
        "policy  one     -        1 (too far)  7 s  unseen  a",
        "policy  two     -        0            -    unseen  b",
    ]


@pytest.mark.claim("weights", "readers that are too far behind are named in metrics and by `weights.readers`")
def test_gauge_names_readers_too_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[tuple[str, ...], float] = {}

    class Gauge:
        def __init__(self, name: str, text: str, tags: tuple[str, ...]) -> None:
            self.tags = tags

        def set(self, value: float, tags: dict[str, str]) -> None:
            values[tuple(tags[name] for name in self.tags)] = value

    monkeypatch.setattr(lag_metrics.metrics, "Gauge", Gauge)
    lag_metrics.gauge.cache_clear()
    readers, lags = NamedReaders(), LagGauge()
    readers.max_lag = 1
    readers.join(ONE, 0)
    for number in (1, 2):
        lags.push(readers.infos(0))
        assert values == {}
        readers.commit(number, 0)
    lags.push(readers.infos(0))
    assert values == {("policy", "one", "a"): 2}
    readers.apply(ONE, version(2), 1, 0)

    async def run() -> None:
        task = asyncio.ensure_future(report_lags(lambda: readers.infos(0)))
        while values != {("policy", "two", "b"): 2}:
            await asyncio.sleep(0)
        task.cancel()

    lags.push(readers.infos(0))
    assert values == {("policy", "one", "a"): 0}
    values.clear()
    asyncio.run(report_lags(lambda: readers.infos(0)))  # off
    monkeypatch.setenv("RAYLANE_METRICS_S", "0.001")
    readers.join(TWO, 0)
    for number in (3, 4):
        readers.commit(number, 0)
    readers.apply(ONE, version(4), 2, 0)
    asyncio.run(asyncio.wait_for(run(), 20))
    lag_metrics.gauge.cache_clear()


def test_key_names_the_process() -> None:
    name, label, host, pid, ticks = key_of_reader("policy", "a")
    assert (name, host, pid, ticks) == ("policy", "a", os.getpid(), here().start_ticks)
    assert f" {pid} " in label
    assert key_of_reader("policy", "a").label != label


@pytest.mark.processes
def test_keeper_reports_readers_that_have_ended() -> None:
    async def run() -> None:
        watched = WatchedReaders()
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            ticks = start_ticks(child.pid)
            assert ticks is not None
            living, other = (
                key("living", pid=os.getpid(), ticks=here().start_ticks),
                key("child", "a", child.pid, ticks),
            )
            reused = key("reused", pid=os.getpid(), ticks=1)
            assert await watched.renew([living, reused], 20) == [reused]
            assert watched.keys() == [living]
            call = asyncio.ensure_future(watched.renew([living, reused, other], 20))
            assert await call == [reused]  # reported until the catalogue has heard of it
            call = asyncio.ensure_future(watched.renew([living, other], 20))
            await asyncio.sleep(0)
            assert not call.done()
            assert child.stdin is not None
            child.stdin.close()
            assert await call == [other]
        assert await watched.renew([key("none", pid=child.pid, ticks=ticks)], 20) != []
        replaced = asyncio.ensure_future(watched.renew([living], 20))
        await asyncio.sleep(0)
        assert await watched.renew([living], 0.001) == []
        assert await replaced == []
        assert await watched.renew([], 0) == []
        assert watched.keys() == []

    asyncio.run(run())


class FakeKeeper:
    """Keeper of one host, with the interface of Ray's handle. Its answers are futures that the test completes."""

    def __init__(self, found: Iterable[ReaderKey] = ()) -> None:
        self.renew = self.readers = self
        self.found = list(found)
        self.calls: list[tuple[list[ReaderKey], asyncio.Future[list[ReaderKey]]]] = []

    def remote(self, *args: Any) -> Awaitable[list[ReaderKey]]:
        future = asyncio.get_running_loop().create_future()
        if not args:
            future.set_result(self.found)
        else:
            self.calls.append((args[0], future))
        return future


class Catalogue:
    """Catalogue with one name, the readers of which are renewed by fakes."""

    def __init__(self, *found: ReaderKey) -> None:
        self.readers = NamedReaders()
        self.keepers: dict[str, FakeKeeper] = {}
        self.found, self.now_s = found, 0.0
        self.dead: set[str] = set()
        self.ended = False
        self.leases = Leases(self.keeper, self.host_lives, self.readers.keys, self.join, self.advance)

    def keeper(self, host: str) -> FakeKeeper:
        if self.ended:
            raise CatalogueEnded
        return self.keepers.setdefault(host, FakeKeeper(self.found))

    async def host_lives(self, host: str) -> bool:
        return host not in self.dead

    def join(self, reader: ReaderKey) -> None:
        if self.readers.join(reader, self.now_s):
            self.leases.change(reader.host)

    async def advance(self, readers: Iterable[ReaderKey], event: LeaseEvent) -> None:
        self.readers.advance(readers, event, self.now_s)

    async def call(self, host: str, readers: list[ReaderKey]) -> asyncio.Future[list[ReaderKey]]:
        """Return the future of the next call of a keeper, which must be for these readers."""
        async with asyncio.timeout(20):
            while not (host in self.keepers and self.keepers[host].calls):
                await asyncio.sleep(0)
        keys, future = self.keepers[host].calls.pop(0)
        assert keys == readers
        return future

    async def until(self, leases: dict[str, str]) -> None:
        async with asyncio.timeout(20):
            while leases_of(self.readers) != leases:
                await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_watch, "PAUSE_S", 0.001)
    monkeypatch.setattr(reader_watch, "ANSWER_S", 0.01)
    monkeypatch.setattr(reader_watch, "RENEW_S", 0.01)


def run(scene: Callable[[Catalogue], Awaitable[None]], *found: ReaderKey) -> None:
    async def play() -> None:
        await scene(Catalogue(*found))

    asyncio.run(play())


def test_keepers_renew_the_leases_of_their_hosts() -> None:
    async def scene(catalogue: Catalogue) -> None:
        third = key("third")
        for reader in (ONE, TWO):
            catalogue.join(reader)
        (await catalogue.call("a", [ONE])).set_result([])
        (await catalogue.call("b", [TWO])).set_result([])
        await catalogue.until({"one": "held", "two": "held"})
        passed_over = await catalogue.call("a", [ONE])
        catalogue.join(third)  # at once, not after the call under way
        call = await catalogue.call("a", [ONE, third])
        passed_over.set_result([])
        call.set_result([ONE])
        await catalogue.until({"third": "held", "two": "held"})

    run(scene)


def test_dead_keeper_is_replaced_and_loses_no_reader() -> None:
    async def scene(catalogue: Catalogue) -> None:
        catalogue.join(ONE)
        (await catalogue.call("a", [ONE])).set_result([])
        await catalogue.until({"one": "held"})
        call = await catalogue.call("a", [ONE])
        catalogue.keepers.clear()
        call.set_exception(ray.exceptions.ActorDiedError())
        await catalogue.until({"one": "unseen"})
        (await catalogue.call("a", [ONE])).set_result([])
        await catalogue.until({"one": "held"})

    run(scene)


def test_silent_keeper_lets_leases_expire_and_come_back() -> None:
    async def scene(catalogue: Catalogue) -> None:
        catalogue.join(ONE)
        call = await catalogue.call("a", [ONE])
        catalogue.now_s = LEASE_S
        await catalogue.until({"one": "expired"})
        assert not catalogue.keepers["a"].calls  # the first call is waited for
        call.set_result([])
        await catalogue.until({"one": "held"})

    run(scene)


@pytest.mark.claim("weights", "publishers wait for readers with a live lease only (death of a host: fakes only)")
def test_readers_of_a_dead_host_are_forgotten() -> None:
    async def scene(catalogue: Catalogue) -> None:
        for reader in (ONE, TWO):
            catalogue.join(reader)
        call = await catalogue.call("b", [TWO])
        catalogue.dead.add("b")
        call.set_exception(ray.exceptions.ActorDiedError())
        await catalogue.until({"one": "unseen"})

    run(scene)


def test_new_catalogue_finds_the_readers_of_keepers() -> None:
    async def scene(catalogue: Catalogue) -> None:
        await catalogue.leases.recover("a")
        assert leases_of(catalogue.readers) == {"one": "unseen"}
        (await catalogue.call("a", [ONE])).set_result([])
        await catalogue.until({"one": "held"})
        await catalogue.advance([ONE], LeaseEvent.LEFT)
        catalogue.leases.change("a")
        (await catalogue.call("a", [ONE])).set_result([])  # replaced by the next one
        (await catalogue.call("a", [])).set_result([])
        catalogue.ended = True
        catalogue.join(ONE)
        await asyncio.wait(list(catalogue.leases._renewals.values()), timeout=20)

    run(scene, ONE)
