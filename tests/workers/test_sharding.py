"""NamedSharding on values alone: coordinates, ranks by coordinate, and errors that name the known axes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from raylane.workers.sharding import NamedSharding


@pytest.fixture
def mesh() -> NamedSharding:
    return NamedSharding(np.arange(12).reshape(2, 3, 2), ["pp", "dp", "tp"])


def test_every_rank_is_found_at_its_own_coordinates(mesh):
    for rank in mesh.ranks:
        assert mesh.get_ranks(**mesh.get_worker_coords(rank)) == rank
    assert mesh.get_worker_coords(9) == {"pp": 1, "dp": 1, "tp": 1}


def test_partial_coordinates_give_the_remaining_sharding(mesh):
    part = mesh.get_ranks(dp=1)
    assert part == NamedSharding([[2, 3], [8, 9]], ["pp", "tp"])
    assert mesh.get_ranks_by_coord(pp=1, tp=0) == [6, 8, 10]
    assert mesh.get_ranks_by_coord() == list(range(12))


def test_sizes_and_names_agree_with_the_layout(mesh):
    assert dict(mesh.shape) == {"pp": 2, "dp": 3, "tp": 2}
    assert (mesh.ndim, mesh.size, mesh.get_axis_size("dp"), mesh.get_axis_index("tp")) == (3, 12, 3, 2)
    assert mesh == NamedSharding.of(pp=2, dp=3, tp=2)
    assert repr(mesh) == "NamedSharding(pp=2, dp=3, tp=2; ranks 0..11)"


def test_layout_cannot_be_changed_and_is_a_copy():
    source = np.arange(4)
    sharding = NamedSharding(source, ["dp"])
    source[0] = 99
    assert sharding.ranks == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="read-only"):
        sharding.layout[0] = 7


def test_ranks_may_stand_in_any_order_and_survive_pickling():
    sharding = NamedSharding([[3, 1], [0, 2]], ["a", "b"])
    assert sharding.get_worker_coords(1) == {"a": 0, "b": 1}
    assert pickle.loads(pickle.dumps(sharding)) == sharding
    assert hash(pickle.loads(pickle.dumps(sharding))) == hash(sharding)


@pytest.mark.parametrize(
    ("layout", "names", "message"),
    [
        ([[0, 1], [1, 2]], ["a", "b"], r"repeated ranks: \[1\]"),
        ([0, -1], ["a"], "negative"),
        ([], ["a"], "integer ranks"),
        ([0.5], ["a"], "integer ranks"),
        ([0, 1], ["a", "b"], "1 axes of sizes"),
        ([[0, 1]], ["a", "a"], "axis names must differ"),
        ([[0, 1]], "ab", "the names are 'ab'"),
        (0, [], "at least one axis"),
    ],
)
def test_bad_layouts_are_refused_with_what_is_wrong(layout, names, message):
    with pytest.raises(ValueError, match=message):
        NamedSharding(layout, names)


def test_unknown_axis_is_answered_with_the_known_ones_everywhere(mesh):
    for ask in (
        lambda: mesh.get_axis_size("tpp"),
        lambda: mesh.get_ranks(tpp=0),
        lambda: mesh.get_ranks_by_coord(tpp=0),
        lambda: mesh.is_axis_zero(0, ["tpp"]),
    ):
        with pytest.raises(ValueError, match=r"\['pp', 'dp', 'tp'\]; did you mean 'tp'\?"):
            ask()


def test_coordinate_and_rank_outside_the_layout_are_refused(mesh):
    with pytest.raises(ValueError, match="axis 'dp' has coordinates 0 to 2, got 3"):
        mesh.get_ranks(dp=3)
    with pytest.raises(ValueError, match=r"rank 12 is not in this layout; it has 0\.\.11"):
        mesh.get_worker_coords(12)


def test_axis_zero_is_about_the_named_axes_only(mesh):
    assert mesh.is_axis_zero(2, ["pp", "tp"])
    assert not mesh.is_axis_zero(2, ["dp"])
