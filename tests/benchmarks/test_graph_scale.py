"""Simulated cost of graphs over many hosts: small cases by hand, and what must hold for all."""

from __future__ import annotations

import pytest
from benchmarks.studies import graph_scale as scale
from benchmarks.studies.graph_scale import broadcast, driver_links, hosts_of, simulate


def test_hosts_are_filled_evenly() -> None:
    assert hosts_of(6, 3) == [0, 1, 1, 2, 2, 3, 3]
    assert sorted({hosts_of(4096, 512).count(host) for host in range(1, 513)}) == [8]


def test_simulate_one_host_is_one_send_and_one_receipt() -> None:
    cost = simulate(broadcast(2, 1))
    sent_us = scale.ENCODE_US + scale.LINK_SEND_US
    assert (cost.sends, cost.levels) == (1, 1)
    assert cost.submit_us == pytest.approx(sent_us)
    received_us = scale.RECEIVE_US + scale.RING_WRITE_US + 2 * scale.EACH_READER_US
    assert cost.arrival_us == pytest.approx(sent_us + scale.HOP_US + received_us)


def test_simulate_relay_sends_when_it_has_the_message() -> None:
    four, five = simulate(broadcast(4, 4)), simulate(broadcast(5, 5))
    assert (four.sends, five.sends, five.levels) == (4, 4, 2)
    received_us = scale.HOP_US + scale.RECEIVE_US + scale.RING_WRITE_US + scale.EACH_READER_US
    # The first relay has its message after one send, and sends to the fifth host; the fourth waits for four sends.
    second_level_us = scale.ENCODE_US + 2 * (scale.LINK_SEND_US + received_us)
    assert four.arrival_us == pytest.approx(scale.ENCODE_US + 4 * scale.LINK_SEND_US + received_us)
    assert five.arrival_us == pytest.approx(max(four.arrival_us, second_level_us))
    assert simulate(broadcast(20, 20)).arrival_us > second_level_us


@pytest.mark.parametrize(("actors", "hosts"), [(64, 8), (512, 64), (4096, 512)])
def test_simulate_tree_costs_the_driver_four_sends(actors: int, hosts: int) -> None:
    alone = simulate(broadcast(actors, hosts, relays=False))
    flat = simulate(broadcast(actors, hosts, tree=False))
    tree = simulate(broadcast(actors, hosts))
    assert (alone.sends, flat.sends, tree.sends) == (actors, hosts, 4)
    assert tree.submit_us < flat.submit_us < alone.submit_us
    assert alone.collect_us == flat.collect_us == tree.collect_us  # results do not take the tree


def test_driver_links_count_control_channels_and_results() -> None:
    assert driver_links(16, 2) == (2 + 16, 16 + 16)  # to relays and for orders; results and reports


def test_main_prints_the_table_of_the_design_page(capsys: pytest.CaptureFixture[str]) -> None:
    scale.main()
    printed = capsys.readouterr().out
    assert "| one frame for each host, down the tree (as built) | 4 |" in printed
    assert "4,100 opened, 8,192 accepted" in printed
