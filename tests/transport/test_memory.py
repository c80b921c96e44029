"""Reports of what processes hold. On a real Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch
from tests.process_tools import stop

import raylane
from raylane.transport.hold.store import Entry, Store
from raylane.transport.link import directory, wire
from raylane.transport.link.holdings import MOST_VALUES, holdings
from raylane.transport.link.memory_report import Report, ask_everywhere

NUMEL = 50_000


class Maker:
    @raylane.method
    def make(self) -> torch.Tensor:
        return torch.ones(NUMEL)

    @raylane.method(snapshot=True, tensor_transport="host")
    def snapshot(self) -> dict[str, torch.Tensor]:
        return {"a": torch.ones(NUMEL), "b": torch.ones(2 * NUMEL)}

    def undecorated(self) -> torch.Tensor:
        return torch.ones(3 * NUMEL)

    def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0)
def publishing_task() -> list[Any]:
    return [os.getpid(), raylane.put(torch.ones(NUMEL))]


def reports() -> dict[int, Report]:
    return {report.pid: report for report in ask_everywhere(10, 10)}


@pytest.mark.usefixtures("cluster")
def test_report_tells_size_origin_and_reads_of_values() -> None:
    maker = ray.remote(num_cpus=0)(Maker).remote()
    refs = [maker.make.remote(), maker.snapshot.remote(), raylane.options(maker.undecorated).remote()]
    for _ in range(3):
        ray.get(refs[0])
    raylane.get(refs[0], tensor_transport="tcp")
    ray.get(refs[1:])
    mine = raylane.put(torch.ones(NUMEL))
    found = reports()
    report = found[ray.get(maker.pid.remote())]
    assert report.process.startswith("Actor(Maker, ")
    held = report.holdings
    assert held is not None
    assert (held.entries, held.nbytes) == (3, 28 * NUMEL)
    by_origin = {one.origin: one for one in held.values}
    assert set(by_origin) == {"Maker.make", "Maker.snapshot", "Maker.undecorated"}
    assert [one.nbytes for one in held.values] == [12 * NUMEL, 12 * NUMEL, 4 * NUMEL]
    assert by_origin["Maker.make"].reads == 4
    one = by_origin["Maker.snapshot"]
    assert (one.tensors, one.snapshot, one.transport, one.result, one.reads) == (2, True, "host", True, 1)
    assert all(one.age_s > 0 for one in held.values)
    driver = found[os.getpid()].holdings
    assert driver is not None
    line = test_report_tells_size_origin_and_reads_of_values.__code__.co_firstlineno
    assert driver.values[0].origin.startswith(f"put at {__file__}:")
    assert line < int(driver.values[0].origin.rpartition(":")[2]) < line + 15
    kept = {kept.actor: kept for kept in driver.kept_actors}
    assert dict(kept[report.process.split(", ")[1].rstrip(")")].refs)["make"] == 1
    del refs, mine


@pytest.mark.usefixtures("cluster")
def test_report_covers_tasks_and_leaves_out_the_dead(eventually: Callable[..., None]) -> None:
    pid, ref = ray.get(publishing_task.remote())
    maker = ray.remote(num_cpus=0)(Maker).remote()
    made = maker.make.remote()
    ray.get(made)
    of_maker = ray.get(maker.pid.remote())
    found = reports()
    held = found[pid].holdings
    assert found[pid].process == "a task worker"
    assert held is not None
    assert held.values[0].nbytes == 4 * NUMEL
    assert of_maker in found
    ray.kill(maker)
    eventually(lambda: of_maker not in reports())
    assert of_maker not in {source.place.pid for source in directory.everywhere().values()}
    del ref, made


@pytest.mark.usefixtures("cluster")
def test_report_names_a_stopped_process() -> None:
    maker = ray.remote(num_cpus=0)(Maker).remote()
    made = maker.make.remote()
    ray.get(made)
    pid = ray.get(maker.pid.remote())
    stop(pid)
    try:
        stopped = {report.pid: report for report in ask_everywhere(1, 10)}[pid]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert stopped.holdings is None
    assert "within 1" in stopped.why_not
    del made


class NoPool:
    idle_bytes = used_bytes = 0

    def reclaim(self) -> None:
        pass


def test_holdings_fit_a_frame_whatever_a_process_holds() -> None:
    class Layout:
        specs = ()

        def __init__(self, nbytes: int) -> None:
            self.blocks = [memoryview(bytes(nbytes))]

    store = Store()
    for i in range(3 * MOST_VALUES):
        layout: Any = Layout(i % 7)
        store.publish(Entry(str(i).encode(), [], layout, for_callers=True, origin="\U0001f600" * 400, transport="auto"))
    pool: Any = NoPool()
    found = holdings(store, pool, None, 1 << 40, budget=None, waiting=0)
    assert MOST_VALUES // 2 <= len(found.values) <= MOST_VALUES
    assert found.entries == 3 * MOST_VALUES
    assert found.values == sorted(found.values, key=lambda one: -one.nbytes)
    assert wire.unpack_body(wire.pack_frame(found)[4:]) == found
