"""Workers that are called, and their slices: rules of `shard`, `replicate`, free axes and returned results."""

from __future__ import annotations

import itertools

import pytest

from raylane.workers.dispatch import check_nesting, plan_call, plan_ranks, take
from raylane.workers.sharding import NamedSharding

MESH = NamedSharding.of(pp=2, dp=2, tp=2)


@pytest.mark.claim("worker groups", "arguments are divided along any named axes, in the order of the axes")
def test_every_sharded_axis_is_used_in_the_order_of_the_list():
    """R1: the reference compiled path stopped at the first axis and dropped the rest."""
    plan = plan_call(MESH, ["tp", "dp"], ["pp"])
    assert plan.nesting == (("tp", 2), ("dp", 2))
    nested = [[f"tp{t} dp{d}" for d in range(2)] for t in range(2)]
    for call in plan.calls:
        coords = MESH.get_worker_coords(call.rank)
        assert take(nested, call.path) == f"tp{coords['tp']} dp{coords['dp']}"
    assert plan.called_ranks == tuple(range(8))


@pytest.mark.parametrize("order", list(itertools.permutations(["pp", "dp", "tp"])))
def test_axis_names_are_taken_from_the_arguments_never_assumed(order):
    """R2: names were hard-coded."""
    renamed = NamedSharding(MESH.layout, ["stage", "copy", "piece"])
    to_new = {"pp": "stage", "dp": "copy", "tp": "piece"}
    plan = plan_call(MESH, order)
    assert [call.path for call in plan.calls] == [
        call.path for call in plan_call(renamed, [to_new[axis] for axis in order]).calls
    ]


def test_replicated_axes_get_the_same_slice():
    plan = plan_call(MESH, ["dp"], ["tp", "pp"])
    paths = {call.rank: call.path for call in plan.calls}
    assert all(paths[rank] == (MESH.get_worker_coords(rank)["dp"],) for rank in MESH.ranks)


def test_dispatch_calls_only_coordinate_zero_of_a_free_axis():
    plan = plan_call(MESH, ["dp"], ["tp"])
    assert plan.called_ranks == tuple(MESH.get_ranks_by_coord(pp=0))


def test_free_axes_are_called_with_none_on_request():
    plan = plan_call(MESH, ["dp"], ["tp"], call_free_axes=True)
    assert plan.called_ranks == tuple(range(8))
    for call in plan.calls:
        assert (call.path is None) == (MESH.get_worker_coords(call.rank)["pp"] != 0)
        assert call.path is not None or take([["x"]], call.path) is None


def test_replicated_output_comes_from_coordinate_zero():
    """F4: the list of axes with equal results was ignored for other axes than the built-in ones."""
    plan = plan_call(MESH, [], ["pp", "dp", "tp"], ["dp", "pp"])
    assert plan.returning_ranks == tuple(MESH.get_ranks_by_coord(pp=0, dp=0)) == (0, 1)


def test_called_and_returning_ranks_are_ranks_not_positions():
    """F3: positions in the list of futures were taken for worker ids."""
    sharding = NamedSharding([[3, 1], [0, 2]], ["dp", "tp"])
    plan = plan_call(sharding, ["dp"], ["tp"], ["tp"])
    assert plan.returning_ranks == (0, 3)
    assert {call.rank: call.path for call in plan.calls} == {3: (0,), 1: (0,), 0: (1,), 2: (1,)}


@pytest.mark.parametrize("argument", ["shard", "replicate", "one_result"])
def test_dispatch_refuses_unknown_and_repeated_axes(argument):
    with pytest.raises(ValueError, match=rf"{argument}: no axis 'dpp' here; the axes are \['pp', 'dp', 'tp'\]"):
        plan_call(MESH, **{argument: ["dpp"]})
    with pytest.raises(ValueError, match=f"{argument}: axis 'dp' is listed twice"):
        plan_call(MESH, **{argument: ["dp", "dp"]})
    with pytest.raises(TypeError, match=r"write \['dp'\]"):
        plan_call(MESH, **{argument: "dp"})


def test_an_axis_cannot_be_both_cut_and_copied():
    with pytest.raises(ValueError, match=r"axes \['dp'\] are in both shard and replicate"):
        plan_call(MESH, ["dp"], ["dp"])


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ([1, 2, 3], ValueError, "data: expected 2 entries, one for each coordinate of 'tp', found 3"),
        ([[1, 2], [1]], ValueError, r"data\[1\]: expected 2 entries, one for each coordinate of 'dp', found 1"),
        ([[1, 2], 5], TypeError, r"data\[1\]: expected a list .* 2 coordinates of 'dp', found int"),
        ({"x": 1}, TypeError, "data: expected a list .* 'tp', found dict"),
    ],
)
def test_wrong_nesting_names_axis_expected_and_found(value, error, message):
    with pytest.raises(error, match=message):
        check_nesting("data", value, (("tp", 2), ("dp", 2)))


def test_without_sharded_axes_arguments_are_not_nested():
    plan = plan_call(MESH, [], ["pp", "dp", "tp"])
    check_nesting("data", {"any": "value"}, plan.nesting)
    assert {call.path for call in plan.calls} == {()}


def test_axes_that_are_not_sharded_are_replicated_by_default():
    assert plan_call(MESH) == plan_call(MESH, [], ["pp", "dp", "tp"])
    assert plan_call(MESH, ["dp"]) == plan_call(MESH, ["dp"], ["pp", "tp"])
    assert plan_call(MESH, ["dp"], []).called_ranks == tuple(
        rank for rank in MESH.ranks if MESH.is_axis_zero(rank, ["pp", "tp"])
    )


def test_ranks_are_called_once_each_and_must_exist():
    plan = plan_ranks(MESH, [5, 0, 5])
    assert (plan.called_ranks, plan.returning_ranks, plan.nesting) == ((0, 5), (0, 5), ())
    with pytest.raises(ValueError, match="ranks must name at least one worker"):
        plan_ranks(MESH, [])
    with pytest.raises(ValueError, match="rank 8 is not in this layout"):
        plan_ranks(MESH, [8])
