"""The study of large groups: its measured part runs on real actors, its computed part follows the routes."""

from __future__ import annotations

from benchmarks.studies import group_scale


def test_small_group_is_measured_both_ways(ray_session, monkeypatch):
    monkeypatch.setattr(group_scale, "CALLS", {"graph": 20, "plain": 10})
    found = group_scale.measure_group(2)
    assert set(found) == {"graph", "plain"}
    assert all(one.wall_us > 0 and one.driver_cpu_us > 0 for one in found.values())


def test_computed_row_counts_one_message_for_each_host():
    row = group_scale.computed_row(4096, plain_us=500.0)
    assert row.startswith("| 4,096 on 512 hosts | 1 | 4 | ")
    assert row.endswith("| 4,096 | 4,096 | 2,048 ms |")
