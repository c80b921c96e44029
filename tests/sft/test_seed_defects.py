"""Defects that reviewers found in NeMo-RL's pull request 1612 (R1-R14, F1-F10), a test for each."""

from __future__ import annotations

import ast
import inspect
import logging
import re
import time
from pathlib import Path

import pytest
import ray
import torch

from raylane.errors import ConfigError, WorkerCallError, WorkerGroupError
from raylane.graph.plan.ir import DRIVER
from raylane.nemo import compiled_graph
from raylane.nemo.compiled_graph import (
    CompiledGraphWorkerGroup,
    get_compiled_graph_config,
    should_use_compiled_graph,
)
from raylane.sft.data.mixing import open_rows
from raylane.sft.run.policy import SftPolicy
from raylane.workers.batch import BatchDict
from raylane.workers.compiled import CompiledWorkerGroup
from raylane.workers.future import GroupFuture
from raylane.workers.group import WorkerGroup, WorkerOptions
from raylane.workers.sharding import NamedSharding
from sft import tiny_run
from workers import seed_worker
from workers.seed_worker import SeedWorker

ray.cloudpickle.register_pickle_by_value(seed_worker)

ROOT = Path(__file__).parents[2]
PREFERRED = {"ray_compiled_graph": {"enabled": True}}


@pytest.fixture(scope="module")
def group(ray_session):
    options = WorkerOptions(num_cpus=0.5, env_vars={"RAYLANE_TEST_COLOUR": "green"})
    sharding = NamedSharding.of(replica=2, shard=2)
    with CompiledGraphWorkerGroup(SeedWorker, sharding, PREFERRED, options=options) as group:
        assert group.compiled
        yield group


@pytest.fixture(scope="module")
def policy(ray_session, folder):
    """Two workers that train a small model through graphs."""
    config = tiny_run.config_of(folder, {"cluster.num_workers": 2, "policy.compiled_graph.mode": "required"})
    with SftPolicy(config, tiny_run.prepared_in(folder), 50) as policy:
        yield policy


def test_r1_every_sharded_axis_is_nested(group):
    nested = [[{"ids": torch.tensor([10 * r + s])} for s in range(2)] for r in range(2)]
    assert group.call("rows", nested, shard=["replica", "shard"]).results(60) == [
        [0],
        [1],
        [10],
        [11],
    ]


def test_r2_axes_have_any_names_and_roles(group):
    parts = BatchDict({"ids": torch.arange(4)}).shard(2)
    free = group.call("rows", parts, shard=["shard"], replicate=[])
    assert (free.called_ranks, free.results(60)) == ((0, 1), [[0, 1], [2, 3]])
    same = group.call("rows", parts, shard=["shard"], replicate=["replica"])
    assert same.results(60) == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_r3_a_call_of_one_worker_is_a_future_like_any(group):
    future = group.call("work", "alone", ranks=[3])
    assert isinstance(future, GroupFuture)
    assert (future.called_ranks, future.returning_ranks) == ((3,), (3,))
    assert future.results(60) == [3]


def test_r4_missing_arguments_are_named_by_the_driver(group):
    with pytest.raises(TypeError, match=r"SeedWorker.both.*missing a required argument: 'mask'"):
        group.call("both", replicate=["replica", "shard"], data=1)


def test_r5_runtime_environment_reaches_the_actor(group):
    assert group.call("environment", "RAYLANE_TEST_COLOUR").results(60) == ["green"] * 4
    with pytest.raises(TypeError, match="runtime_environment"):
        WorkerOptions(runtime_environment={"env_vars": {}})


def test_r6_no_internals_of_ray_in_groups_and_training():
    names = [path for part in ("workers", "sft") for path in (ROOT / "src/raylane" / part).glob("*.py")]
    for path in names:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ray":
                assert not node.attr.startswith("_"), f"{path.name}: ray.{node.attr}"


def test_r7_unknown_method_fails_on_the_driver(group):
    with pytest.raises(AttributeError, match="no public method 'wrok'; did you mean 'work'"):
        group.call("wrok")
    assert "seconds: 'float' = 0.0" in str(inspect.signature(group.worker_class.work)), "signatures are inspectable"


def test_r8_warm_up_batch_has_keys_and_shape_of_real_ones(policy, folder, monkeypatch):
    config, prepared = tiny_run.config_of(folder, {"sft.feed": "driver"}), tiny_run.prepared_in(folder)
    rows, sent = open_rows(prepared.train, config.policy, prepared.pad_id), []
    monkeypatch.setattr(policy, "_config", tiny_run.config_of(folder, {"cluster.num_workers": 2, "sft.feed": "driver"}))
    send = policy._send_batch
    monkeypatch.setattr(
        policy, "_send_batch", lambda batch, *args, **how: sent.append(batch) or send(batch, *args, **how)
    )
    policy.warm_up(rows)
    real = tiny_run.global_batch(config, prepared)
    assert {key: (value.shape, value.dtype) for key, value in sent[0].items()} == {
        key: (value.shape, value.dtype) for key, value in real.items()
    }


def test_r9_warm_up_is_timed_in_the_workers(policy, folder):
    config, prepared = tiny_run.config_of(folder), tiny_run.prepared_in(folder)
    started = time.perf_counter()
    figures = policy.warm_up(open_rows(prepared.train, config.policy, prepared.pad_id))
    assert 0 < figures["compute_time_s"] < time.perf_counter() - started


def test_r10_sizes_of_the_warm_up_are_checked_before_start(folder):
    with pytest.raises(ConfigError, match=r"warmup_gbs=6 is no multiple of .* = 4; use 4 or 8, or 0"):
        tiny_run.config_of(folder, {"cluster.num_workers": 2, "policy.compiled_graph.warmup_gbs": 6})
    with pytest.raises(ConfigError, match=r"warmup_seq_len=128 is more than policy.max_total_sequence_length=64"):
        tiny_run.config_of(folder, {"policy.compiled_graph.warmup_seq_len": 128})
    with pytest.raises(ConfigError, match=r"inflight=1 is less than sft.steps_in_flight=2"):
        tiny_run.config_of(folder, {"policy.compiled_graph.inflight": 1})


def test_r11_failures_are_loud(ray_session, caplog):
    impossible = {"compiled_graph": {"mode": "preferred", "inflight": 1 << 40}}
    options = WorkerOptions(num_cpus=0.5)
    with (
        caplog.at_level(logging.WARNING, logger="raylane"),
        CompiledGraphWorkerGroup(SeedWorker, 1, impossible, options=options) as group,
    ):
        assert "cannot create the channels" in group.fallback_reason
    assert any("calls are plain Ray calls" in record.getMessage() for record in caplog.records)
    impossible["compiled_graph"]["mode"] = "required"
    with pytest.raises(WorkerGroupError, match="no graph could be compiled"):
        CompiledGraphWorkerGroup(SeedWorker, 1, impossible, options=options)


def test_r12_defaults_stand_in_one_typed_schema(folder):
    settings = get_compiled_graph_config({})
    assert (settings.mode, settings.warmup_gbs, settings.overlap_communication) == ("preferred", None, True)
    assert should_use_compiled_graph(PREFERRED)
    assert not should_use_compiled_graph({"ray_compiled_graph": {"enabled": False}})
    assert not should_use_compiled_graph(tiny_run.config_of(folder, {"policy.compiled_graph.mode": False}).policy)
    with pytest.raises(ConfigError, match="warmup_sequence"):
        get_compiled_graph_config({"compiled_graph": {"warmup_sequence": 3}})
    page = (ROOT / "docs/reference/training-config.md").read_text()
    section = page.split("## policy.compiled_graph\n")[1].split("## ")[0]
    assert all(f"| `{name}` |" in section for name in type(settings).model_fields)


def test_r13_tests_figures_and_a_convergence_run_exist():
    figures = (ROOT / "docs/reference/figures.md").read_text()
    runs = [path.read_text() for path in (ROOT / "benchmarks/results").glob("sft-*.json")]
    assert "`noop-8-worker-fed`" in figures
    assert runs, "the page is made of these"
    for case in ("noop-8-worker-fed", "step20ms-2-worker-fed", "train-2"):
        assert all(f'"case": "{case}"' in run for run in runs), case
    assert re.search(r"!\[[^\]]*\]\(\.\./assets/convergence\.svg\)", figures)
    for kind in (WorkerGroup, CompiledWorkerGroup, compiled_graph.CompiledGraphWorkerGroup):
        assert not [name for name, value in vars(kind).items() if isinstance(value, list | dict | set)]


def test_r14_calls_of_the_plain_group_keep_working():
    for name, method in inspect.getmembers(WorkerGroup, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(CompiledWorkerGroup, name)) == inspect.signature(method), name


def test_f1_any_method_runs_through_one_graph(policy):
    graphs = len(policy.group._graphs)
    policy.train_step(0)
    assert policy.validate()["supervised_tokens"] > 0
    assert len(policy.group._graphs) == graphs, "the graph depends on who is called, not on the method"


def test_f2_every_keyword_argument_is_sharded(group):
    parts = BatchDict({"ids": torch.arange(2)}).shard(2)
    future = group.call("both", shard=["shard"], replicate=[], common={"scale": 3}, data=parts, mask=["left", "right"])
    assert future.results(60) == [([0], "left"), ([3], "right")]


def test_f3_called_workers_are_ranks(group):
    future = group.call(
        "rows",
        BatchDict({"ids": torch.arange(2)}).shard(2),
        shard=["replica"],
        replicate=["shard"],
        one_result=["shard"],
    )
    assert (future.called_ranks, future.returning_ranks) == ((0, 1, 2, 3), (0, 2))
    assert future.results(60) == [[0], [1]]


def test_f4_replicated_output_holds_for_every_axis(group):
    everyone = ["replica", "shard"]
    for axes, wanted in ((["replica"], [0, 1]), (["shard"], [0, 2]), (everyone, [0])):
        future = group.call("work", "x", replicate=everyone, one_result=axes)
        assert future.results(60) == wanted
    with pytest.raises(ValueError, match="one_result: no axis 'tensor'"):
        group.call("work", "x", one_result=["tensor"])


def test_f5_failure_of_one_shard_fails_the_call_for_all(group):
    failing = group.call("raise_on", 2)
    ahead = group.call("work", "ahead")
    with pytest.raises(WorkerCallError, match="raised on rank 2"):
        failing.results(60)
    with pytest.raises(WorkerCallError, match="rank 2 refused work"):
        ahead.results(60)
    assert group.call("work", "later").results(60) == [0, 1, 2, 3]


def test_f6_late_result_is_not_lost(group, tmp_path):
    future = group.call("wait_for", str(tmp_path / "go"))
    with pytest.raises(WorkerCallError, match="Nothing is lost"):
        future.results(0.2)
    (tmp_path / "go").touch()
    assert future.results() == [0, 1, 2, 3]


def test_f7_training_evaluation_and_saving_share_a_thread(group):
    sent = [group.call("work", name, replicate=["replica", "shard"], seconds=0.02) for name in ("f7 train", "f7 save")]
    sent.append(group.call("work", "f7 evaluate", ranks=[1]))
    for future in sent:
        future.results(60)
    log = [call for call in group.call("log_of_calls").results(60)[1] if "f7" in call[0]]
    assert [name for name, *_ in log] == ["f7 train", "f7 save", "f7 evaluate"]
    assert len({thread for _, thread, *_ in log}) == 1
    assert log[0][3] <= log[1][2]
    assert log[1][3] <= log[2][2]


def test_f8_a_step_sends_its_number_and_no_function(policy):
    policy.train_step(1)
    graph = next(one.graph for plan, one in policy.group._graphs.items() if plan.returning_ranks == (0,))
    before = next(edge for name, edge in graph.stats()["edges"].items() if name.startswith("input"))["bytes"]
    for number in range(2, 12):
        policy.train_step(number)
    after = next(edge for name, edge in graph.stats()["edges"].items() if name.startswith("input"))["bytes"]
    assert after - before < 10 * 200, "less than 200 bytes for each step"
    assert len(graph.plan.edges_from(DRIVER)) == 1, "one message for all workers of the host"


def test_f9_overlap_of_communication_has_an_effect(folder):
    """It was passed to a graph without a GPU channel. Here it sends a step while the one before computes."""
    from raylane.sft.run.trainer import Trainer
    from raylane.training.run.stopping import StopRequest

    for overlap, wanted in ((True, 2), (False, 1)):
        config = tiny_run.config_of(folder, {"policy.compiled_graph.overlap_communication": overlap})
        assert Trainer(config, None, None, None, 1, StopRequest())._max_in_flight == wanted


def test_f10_warm_up_runs_backward_and_optimizer_and_on_resume(policy, folder):
    config, prepared = tiny_run.config_of(folder), tiny_run.prepared_in(folder)
    rows = open_rows(prepared.train, config.policy, prepared.pad_id)
    policy.recover()
    policy.train_step(0)
    saved = policy.save({})
    wanted = policy.train_step(1)
    policy.load(saved.path)
    assert policy.warm_up(rows)["grad_norm"] > 0
    found = policy.train_step(1)
    assert (found["loss"], found["grad_norm"]) == (wanted["loss"], wanted["grad_norm"]), "bit for bit"


def test_every_spelling_of_the_seed_is_understood():
    settings = get_compiled_graph_config(
        {"ray_compiled_graph": {"enabled": True, "warmup_seq_len": 64, "warmup_gbs": 8, "overlap_communication": False}}
    )
    assert settings.mode == "preferred"
    assert (settings.warmup_seq_len, settings.warmup_gbs, settings.overlap_communication) == (64, 8, False)
