"""Collective groups and two-sided transfers, on a real Ray: who is a member, who is not, and members that die."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import raylane
from raylane import _ray
from raylane.errors import SourceLostError, TransferTimeoutError, TransportUnavailableError
from raylane.transport import groups
from raylane.transport.link.endpoint import endpoint

pytestmark = pytest.mark.usefixtures("cluster")
N = 100_000


class Member:
    """Returns and takes tensors by gloo."""

    @raylane.method(tensor_transport="gloo")
    def make(self, count: int = N) -> torch.Tensor:
        return torch.arange(count, dtype=torch.float32)

    def total(self, tensor: torch.Tensor) -> float:
        return float(tensor.double().sum())

    def totals(self, refs: list[Any]) -> list[float]:
        return [self.total(one) for one in ray.get(refs)]

    def stats(self) -> dict[str, Any]:
        return raylane.stats()

    def names(self) -> list[str]:
        return [group.name for group in raylane.get_collective_groups()]

    def create(self, actors: list[Any], name: str) -> str:
        return raylane.create_collective_group(actors, "gloo", name).name

    def joined(self) -> list[str]:
        return sorted(endpoint().groups())

    def wait_for(self, key: str) -> None:
        while _ray.kv_get(f"test/{key}") is None:
            time.sleep(0.01)
        _ray.kv_delete(f"test/{key}")

    def announce(self, key: str) -> None:
        _ray.kv_set(f"test/{key}", b"1")

    def serving(self) -> int:
        return sum(thread.name == "raylane-pair" for thread in threading.enumerate())

    def pid(self) -> int:
        return os.getpid()


CHANNELS = ("idle_channels", "served_channels")
TOTAL = float(torch.arange(N, dtype=torch.float64).sum())


@contextlib.contextmanager
def members(count: int, **options: Any) -> Iterator[list[Any]]:
    """Start actors, and end them and all groups afterwards."""
    actors = [ray.remote(num_cpus=0, **options)(Member).remote() for _ in range(count)]
    try:
        yield actors
    finally:
        raylane.destroy_all_collective_groups()
        for actor in actors:
            ray.kill(actor)


def read_by(actor: Any, transport: str) -> int:
    return int(ray.get(actor.stats.remote()).get(transport, 0))


def test_members_of_a_group_use_its_transport_and_others_do_not() -> None:
    with members(3) as (sender, receiver, outsider):
        group = raylane.create_collective_group([sender, receiver], "torch_gloo")
        assert (group.backend, group.get_rank(receiver), group.get_rank(outsider)) == ("gloo", 1, -1)
        ref = sender.make.remote()
        assert ray.get([receiver.total.remote(ref), outsider.total.remote(ref)]) == [TOTAL, TOTAL]
        before = raylane.stats().get("outside_group", 0)
        assert float(ray.get(ref).double().sum()) == TOTAL
        assert raylane.stats()["outside_group"] == before + 1
        assert (read_by(receiver, "gloo"), read_by(receiver, "outside_group")) == (1, 0)
        assert (read_by(outsider, "gloo"), read_by(outsider, "outside_group")) == (0, 1)
        # Who asks for the transport by name gets it.
        assert float(raylane.get(ref, tensor_transport="gloo").double().sum()) == TOTAL


def test_transport_works_without_a_group() -> None:
    with members(2) as (sender, receiver):
        assert ray.get(receiver.total.remote(sender.make.remote())) == TOTAL
        assert read_by(receiver, "gloo") == 1


def test_actors_are_in_several_groups_made_by_any_process() -> None:
    with members(3) as (a, b, c):
        raylane.create_collective_group([a, b], "gloo", "first")
        assert ray.get(c.create.remote([b, c], "second")) == "second"
        assert ray.get(a.names.remote()) == ["first", "second"]
        assert [group.name for group in raylane.get_collective_groups([b])] == ["first", "second"]
        assert [group.name for group in raylane.get_collective_groups([a], "gloo")] == ["first"]
        # As the end of an earlier group of this name would arrive, from another process and late.
        ray.get(b.__ray_call__.remote(groups._leave, "first"))
        refs = [a.make.remote(), b.make.remote()]
        assert ray.get([b.total.remote(refs[0]), c.total.remote(refs[1])]) == [TOTAL, TOTAL]
        assert read_by(b, "gloo") == read_by(c, "gloo") == 1


def test_refs_pass_through_any_process_and_in_containers() -> None:
    """With Ray's collective transports, refs may only be direct arguments, submitted by the creator of the group."""
    with members(3) as (a, b, c):
        raylane.create_collective_group([a, b], "gloo")
        assert ray.get(b.totals.remote([a.make.remote(), a.make.remote()])) == [TOTAL, TOTAL]
        assert ray.get(c.totals.remote([a.make.remote()])) == [TOTAL]


def test_transfers_in_both_directions_at_once_end() -> None:
    with members(2) as (a, b):
        raylane.create_collective_group([a, b], "gloo")
        refs = [(a.make.remote(3_000_000), b.make.remote(3_000_000)) for _ in range(8)]
        total = float(torch.arange(3_000_000, dtype=torch.float32).double().sum())
        sums = [pair for x, y in refs for pair in (b.total.remote(x), a.total.remote(y))]
        assert ray.get(sums, timeout=120) == [total] * 16


@pytest.mark.claim("transport", "survivors of a failed two-sided transfer go on")
def test_survivors_of_a_group_go_on(eventually: Any) -> None:
    with members(3) as (a, b, c):
        group = raylane.create_collective_group([a, b, c], "gloo", "three")
        kept, lost = a.make.remote(), c.make.remote()
        ray.wait([kept, lost], num_returns=2, fetch_local=False)
        assert ray.get(b.total.remote(lost)) == TOTAL
        pid = ray.get(c.pid.remote())
        ray.kill(c)
        eventually(lambda: not os.path.exists(f"/proc/{pid}"))
        with pytest.raises(SourceLostError, match="Member"):
            ray.get(b.total.remote(lost), timeout=30)
        assert ray.get(b.total.remote(kept)) == TOTAL
        eventually(lambda: len(raylane.get_collective_groups([a])[0].actors) == 2)
        assert group.name == raylane.get_collective_groups([a, b])[0].name


def test_a_source_that_dies_in_the_middle_is_reported_soon() -> None:
    with members(1) as (source,):
        ref = source.make.remote(200_000_000)
        ray.wait([ref], fetch_local=False)
        raylane.get(source.make.remote(), tensor_transport="gloo")  # the channel is open
        used = raylane.stats()["pool_used_bytes"]
        raised: list[BaseException] = []

        def read() -> None:
            try:
                raylane.get(ref, tensor_transport="gloo", timeout=60)
            except BaseException as error:
                raised.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        while raylane.stats()["pool_used_bytes"] == used and reader.is_alive():
            time.sleep(0.001)  # until the memory for the value was taken: the transfer begins
        ray.kill(source)
        reader.join(30)
        assert not reader.is_alive()
        assert [type(error) for error in raised] == [SourceLostError]


def test_sources_close_channels_of_dead_readers(eventually: Any) -> None:
    with members(2) as (source, reader):
        assert ray.get(reader.total.remote(source.make.remote())) == TOTAL
        assert ray.get(source.stats.remote())["served_channels"] == 1
        ray.kill(reader)
        eventually(lambda: ray.get(source.stats.remote())["served_channels"] == 0)


@pytest.mark.claim("transport", "a restarted actor finds its transports again")
def test_restarted_members_find_their_groups() -> None:
    with members(2, max_restarts=1, max_task_retries=2) as (a, b):
        raylane.create_collective_group([a, b], "gloo")
        ray.kill(b, no_restart=False)
        assert ray.get(b.total.remote(a.make.remote()), timeout=60) == TOTAL
        assert read_by(b, "gloo") == 1


def test_destroyed_groups_are_gone() -> None:
    with members(2) as (a, b):
        group = raylane.create_collective_group([a, b], "gloo")
        ref = a.make.remote()
        ray.wait([ref], fetch_local=False)
        raylane.destroy_collective_group(group)
        assert raylane.get_collective_groups() == []
        assert ray.get(b.total.remote(ref)) == TOTAL
        with pytest.raises(ValueError, match="there is no group 'gone'; the groups are: none"):
            raylane.destroy_collective_group("gone")


def test_members_create_groups_of_each_other_at_the_same_time() -> None:
    with members(3) as actors:
        created = [actor.create.remote(actors, f"group-{i}") for i, actor in enumerate(actors)]
        assert ray.get(created, timeout=50) == ["group-0", "group-1", "group-2"]
        for actor in actors:
            assert ray.get(actor.joined.remote()) == ["group-0", "group-1", "group-2"]
        assert ray.get(actors[0].total.remote(actors[1].make.remote())) == TOTAL
        assert read_by(actors[0], "gloo") == 1


@pytest.mark.slow
def test_failed_creation_leaves_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    with members(3) as (a, b, c):
        ray.get([actor.pid.remote() for actor in (a, b, c)])
        ray.kill(c)
        with pytest.raises(SourceLostError, match="has died"):
            raylane.create_collective_group([a, b, c], "gloo", "lost")
        assert [ray.get(actor.joined.remote()) for actor in (a, b)] == [[], []]
        gate = a.wait_for.remote("go")
        monkeypatch.setenv("RAYLANE_TIMEOUT_S", "0.5")
        with pytest.raises(TransferTimeoutError, match="did not answer within"):
            raylane.create_collective_group([a, b], "gloo", "late")
        ray.get(b.announce.remote("go"))
        ray.get(gate)
        assert [ray.get(actor.joined.remote()) for actor in (a, b)] == [[], []]


@pytest.mark.slow
def test_unused_channels_are_closed(eventually: Any) -> None:
    options = {"runtime_env": {"env_vars": {"RAYLANE_POOL_IDLE_S": "0.5"}}}
    with members(3, **options) as actors:
        refs = [actor.make.remote() for actor in actors]
        for actor in actors:
            assert ray.get(actor.totals.remote(refs)) == [TOTAL] * 3
        for actor in actors:
            eventually(lambda actor=actor: sum(map(ray.get(actor.stats.remote()).get, CHANNELS)) == 0, within_s=60)
            eventually(lambda actor=actor: ray.get(actor.serving.remote()) == 0, within_s=60)
        assert ray.get(actors[0].totals.remote(refs)) == [TOTAL] * 3


def test_mistakes_are_explained() -> None:
    with members(2) as (a, b):
        raylane.create_collective_group([a, b], "gloo", "taken")
        with pytest.raises(ValueError, match="the name 'taken' is in use"):
            raylane.create_collective_group([a, b], "gloo", "taken")
        with pytest.raises(ValueError, match="two or more different actors"):
            raylane.create_collective_group([a, a], "gloo")
        with pytest.raises(TypeError, match="must be actor handles, got 3"):
            raylane.create_collective_group([a, 3], "gloo")
        with pytest.raises(ValueError, match="unknown backend 'mpi' of a collective group; the backends are gloo"):
            raylane.create_collective_group([a, b], "mpi")
        with pytest.raises(TransportUnavailableError, match=r"NCCL|CUDA"):
            raylane.create_collective_group([a, b], "nccl")


def test_dead_and_busy_members_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with members(2) as (a, b):
        ray.get([a.pid.remote(), b.pid.remote()])
        ray.kill(b)
        with pytest.raises(SourceLostError, match="has died"):
            raylane.create_collective_group([a, b], "gloo")
        assert raylane.get_collective_groups() == []
    with members(2) as (a, b):
        ray.get([a.pid.remote(), b.pid.remote()])
        monkeypatch.setenv("RAYLANE_TIMEOUT_S", "0.5")
        slow = a.__ray_call__.remote(lambda _: time.sleep(2))
        with pytest.raises(TransferTimeoutError, match="did not answer within"):
            raylane.create_collective_group([a, b], "gloo")
        ray.get(slow)
