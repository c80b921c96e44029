"""Which way messages take between hosts. Pure."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.graph.graphs import random_plan

from raylane.core.process.place import Place
from raylane.graph.plan import routing
from raylane.graph.plan.ir import DRIVER


def test_fanout_writer_and_relays_serve_four_each() -> None:
    assert routing.fanout(0) == []
    assert routing.fanout(4) == [-1] * 4
    assert routing.fanout(9) == [-1, -1, -1, -1, 0, 0, 0, 0, 1]
    for index, parent in enumerate(routing.fanout(100)):
        if parent >= 0:
            assert index in range(4 * parent + 4, 4 * parent + 8)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 20, 21, 300])
def test_fanout_each_relay_has_one_earlier_sender(count: int) -> None:
    parents = routing.fanout(count)
    assert all(parent < index for index, parent in enumerate(parents))
    assert max(parents.count(parent) for parent in set(parents)) <= 4
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert 4 ** (max(depths) - 1) <= 3 * count + 4  # as deep as a tree of four must be


def test_route_has_one_relay_on_each_other_host() -> None:
    #        driver      actors 1 to 6
    hosts = ["a", "a", "b", "b", "a", "c", "b"]
    found = routing.route(7, 1, (0, 2, 3, 4, 5, 6), hosts)
    assert found.local == (0, 4)
    assert [(relay.member, relay.readers, relay.source, relay.level) for relay in found.relays] == [
        (2, (2, 3, 6), 1, 1),
        (5, (5,), 1, 1),
    ]
    assert found.onward(1) == ((2, 1), (5, 1))
    assert found.onward(2) == ()
    assert found.rings[found.ring_of(3)] == (2, 3, 6)
    assert found.members == set(range(7))
    assert routing.kind(found) == "shared memory, links to 2 hosts"
    assert routing.note(found, [f"m{i}" for i in range(7)]) == "relayed by m2, m5"


def test_route_above_four_hosts_descends_one_level_a_step() -> None:
    hosts = ["d", *(f"h{i}" for i in range(1, 31))]
    found = routing.route(0, DRIVER, range(1, 31), hosts)
    assert found.local == ()
    assert [relay.level for relay in found.relays] == [1] * 4 + [2] * 16 + [3] * 10
    assert found.onward(DRIVER) == tuple((member, 1) for member in (1, 2, 3, 4))
    assert found.onward(1) == tuple((member, 2) for member in (5, 6, 7, 8))
    assert found.onward(5) == tuple((member, 3) for member in (21, 22, 23, 24))
    assert routing.kind(found) == "links to 30 hosts"
    assert "h5 (from h1)" in routing.note(found, hosts)


@pytest.mark.parametrize("seed", range(30))
def test_all_channels_of_random_graphs_reach_all_readers_once(seed: int) -> None:
    rng = random.Random(seed)
    plan = random_plan(rng, tasks=12, members=9)
    hosts = [rng.choice("abcdefg") for _ in plan.members]
    found = routing.routes(plan, hosts)
    assert [route.channel for route in found.all] == list(range(len(found.all)))
    for edge, route in zip(plan.edges, found.edges, strict=True):
        got = [*route.local, *(reader for relay in route.relays for reader in relay.readers)]
        assert sorted(got) == sorted(edge.readers)
        assert all(hosts[reader] == hosts[edge.writer] for reader in route.local)
        heard = {route.writer}
        for relay in route.relays:
            assert relay.source in heard  # whoever passes it on has it
            assert {hosts[reader] for reader in relay.readers} == {hosts[relay.member]}
            assert (relay.source, relay.member, relay.level) in found.links
            heard.add(relay.member)
    for member, (orders, reports) in enumerate(zip(found.orders, found.reports, strict=True), 1):
        if hosts[member] == hosts[DRIVER]:
            assert (orders.local, reports.local) == ((member,), (DRIVER,))
        else:  # driver and actor have a line of their own both ways
            assert {(DRIVER, member, 0), (member, DRIVER, 0)} <= found.links
    for link in found.links:  # whoever can lose a connection can tell the driver
        assert all((member, DRIVER, 0) in found.links for member in link[:2] if member != DRIVER)
    if len(set(hosts)) == 1:
        assert not found.links


def test_connections_never_wait_in_a_circle() -> None:
    """Who receives at one level sends on at the next, so a wait can only lead to deeper levels."""
    hosts = [f"h{i}" for i in range(40)]
    found = routing.route(0, 0, range(1, 40), hosts)
    arrives = {relay.member: relay.level for relay in found.relays}
    for relay in found.relays:
        for _, level in found.onward(relay.member):
            assert level == arrives[relay.member] + 1


def test_edges_between_gpus_of_one_host_publish_large_tensors() -> None:
    one, other = (Place(boot, 1, 1, 0, 7, 1, "host") for boot in ("one", "other"))
    plan = random_plan(random.Random(3), tasks=12, members=4)
    assert routing.publishing_cuda(plan, {}) is plan
    places = {1: one, 2: one, 3: other}
    marked = routing.publishing_cuda(plan, places)
    assert {edge.publishes_cuda for edge in marked.edges} == {True, False}
    for edge in marked.edges:
        ends = {edge.writer, *edge.readers}
        assert edge.publishes_cuda == (ends <= {1, 2}), edge
    named = replace(plan, edges=tuple(replace(edge, transport="shm") for edge in plan.edges))
    assert not any(edge.publishes_cuda for edge in routing.publishing_cuda(named, places).edges)
