"""WorkerOptions and the driver-side check of calls, on values alone."""

from __future__ import annotations

import pytest

from raylane.workers.methods import check_call, check_constructor, check_worker_class
from raylane.workers.options import WorkerOptions
from raylane.workers.places import fitting_share


def test_an_unknown_option_is_an_error_never_dropped():
    """R5: a runtime environment under a name that nobody read was dropped silently."""
    with pytest.raises(TypeError, match="_ray_remote_runtime_env"):
        WorkerOptions(_ray_remote_runtime_env={})


def test_callers_mappings_are_neither_kept_nor_changed():
    variables, environment = {"A": "1"}, {"env_vars": {"B": "2"}}
    options = WorkerOptions(env_vars=variables, runtime_env=environment)
    variables["A"] = "changed"
    first = options.remote_options(0)
    first["runtime_env"]["env_vars"]["C"] = "3"
    assert options.remote_options(0)["runtime_env"] == {"env_vars": {"B": "2", "A": "1"}}
    assert environment == {"env_vars": {"B": "2"}}


def test_names_and_resources_reach_rays_options():
    options = WorkerOptions(num_cpus=0.5, num_gpus=1, resources={"slot": 2}, name_prefix="job", max_concurrency=3)
    assert options.bundle() == {"CPU": 0.5, "GPU": 1.0, "slot": 2.0}
    given = options.remote_options(4)
    assert (given["name"], given["resources"], given["max_concurrency"]) == ("job-4", {"slot": 2}, 3)
    assert "runtime_env" not in given


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_cpus": -1}, "negative"),
        ({"num_cpus": 0}, "at least one resource"),
        ({"max_concurrency": 0}, "at least 1"),
        ({"max_restarts": -2}, "-1 for no limit"),
        ({"start_timeout_s": 0}, "more than 0 seconds"),
        ({"placement_strategy": "PAKC"}, "placement_strategy must be one of PACK"),
        ({"env_vars": {"RANK": "3"}}, r"\['RANK'\] are set by the group"),
        (
            {"env_vars": {"A": "1"}, "runtime_env": {"env_vars": {"A": "2"}}},
            r"different values in env_vars and runtime_env\['env_vars'\]",
        ),
    ],
)
def test_bad_values_are_refused_at_once(fields, message):
    with pytest.raises(ValueError, match=message):
        WorkerOptions(**fields)
    with pytest.raises(TypeError, match="environment variables must be strings"):
        WorkerOptions(env_vars={"A": 1})


class Worker:
    def __init__(self, size: int) -> None:
        self.size = size

    def train(self, data, loss_fn, *, eval_mode=False):
        return data, loss_fn, eval_mode

    async def later(self):
        return 1

    def stream(self):
        yield 1

    @staticmethod
    def add(a, b):
        return a + b

    def _private(self):
        return 1


def test_bundles_hold_all_workers_of_a_node_when_asked():
    one_by_one = WorkerOptions(num_cpus=2, placement_strategy="SPREAD")
    assert one_by_one.bundles(3) == ([{"CPU": 2.0}] * 3, "SPREAD")
    by_node = WorkerOptions(num_cpus=2, num_gpus=1, workers_per_node=4)
    assert by_node.bundles(8) == ([{"CPU": 8.0, "GPU": 4.0}] * 2, "STRICT_SPREAD")
    with pytest.raises(ValueError, match="workers_per_node=4 does not divide the 6 workers"):
        by_node.bundles(6)
    with pytest.raises(ValueError, match="workers_per_node must be at least 1"):
        WorkerOptions(workers_per_node=0)
    shared = WorkerOptions(num_gpus=0.6, reserve={"GPU": 0.4, "memory": 10})
    assert shared.bundles(1) == ([{"CPU": 1.0, "GPU": 1.0, "memory": 10.0}], "PACK")
    assert shared.needs() == {"CPU": 1.0, "GPU": 0.6}
    assert shared.remote_options(0)["num_gpus"] == 1
    with pytest.raises(ValueError, match="must not be negative"):
        WorkerOptions(reserve={"GPU": -1})
    with pytest.raises(ValueError, match=r"at most 1, or a whole number, got 1\.6"):
        WorkerOptions(num_gpus=0.6, reserve={"GPU": 1})
    with pytest.raises(ValueError, match="leave out reserve and workers_per_node"):
        WorkerOptions(colocate=object(), workers_per_node=2)


@pytest.mark.parametrize(
    ("bundle", "shares", "first_gpus"),
    [
        (1.0, [0.6, 0.4], [0, 0.6]),
        (1.0, [0.6, 0.5], [0, None]),
        (1.0, [0.3, 0.3, 0.4, 0.1], [0, 0.3, 0.6, None]),
        (2.0, [1.0, 1.0], [0, 1]),
        (2.0, [0.6, 0.6, 0.4, 0.4], [0, 1, 0.6, 1.6]),  # a part of a GPU does not lie in two
        (3.0, [0.5, 2.0, 0.5], [0, 1, 0.5]),
        (0.8, [0.5, 0.3], [0, 0.5]),
        (1.0, [0.0, 1.0], [0, 0]),
    ],
)
def test_groups_divide_the_gpus_of_a_bundle(bundle, shares, first_gpus):
    others = []
    for gpus, first_gpu in zip(shares, first_gpus, strict=True):
        share = fitting_share({"CPU": 0.1, "GPU": gpus}, {"CPU": 1.0, "GPU": bundle}, others)
        assert (share and share.first_gpu) == (None if first_gpu is None else pytest.approx(first_gpu))
        others += [share] if share else []
    assert fitting_share({"CPU": 0.95}, {"CPU": 1.0, "GPU": bundle}, others) is None


def test_a_mistyped_method_is_answered_with_the_close_one():
    """R7: typos in method names surfaced in the worker."""
    with pytest.raises(AttributeError, match=r"no public method 'trian'; did you mean 'train'\?"):
        check_call(Worker, "trian", 0, [])
    with pytest.raises(AttributeError, match="no public method '_private'"):
        check_call(Worker, "_private", 0, [])


def test_a_missing_argument_is_named_before_anything_is_sent():
    """R4: a missing "data" or "loss_fn" was a bare remote KeyError."""
    with pytest.raises(TypeError, match=r"Worker.train\(self, data, loss_fn, .*missing a required argument: 'loss_fn'"):
        check_call(Worker, "train", 0, ["data"])
    with pytest.raises(TypeError, match=r"missing .*'loss_fn'. It has no argument 'los_fn' \(did you mean 'loss_fn'\?"):
        check_call(Worker, "train", 0, ["data", "los_fn"])
    with pytest.raises(TypeError, match="unexpected keyword argument 'gbs'"):
        check_call(Worker, "train", 2, ["gbs"])
    with pytest.raises(TypeError, match="multiple values for argument 'data'"):
        check_call(Worker, "train", 2, ["data"])
    check_call(Worker, "train", 1, ["loss_fn", "eval_mode"])
    check_call(Worker, "add", 2, [])


def test_methods_whose_result_is_not_one_value_are_refused():
    with pytest.raises(TypeError, match="asynchronous"):
        check_call(Worker, "later", 0, [])
    with pytest.raises(TypeError, match="generator"):
        check_call(Worker, "stream", 0, [])


def test_only_plain_classes_that_can_be_constructed():
    with pytest.raises(TypeError, match=r"take the decorator off"):
        check_worker_class(object())
    with pytest.raises(TypeError, match="missing a required argument: 'size'"):
        check_constructor(Worker, (), {})
