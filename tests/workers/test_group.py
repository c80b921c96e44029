"""WorkerGroup on a real Ray: environment, the four calls, failures told by rank, and nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import torch
from ray.util.placement_group import placement_group_table

import raylane
from raylane.errors import WorkerCallError, WorkerGroupError, WorkerLostError
from raylane.graph.plan.ir import DRIVER
from raylane.workers.batch import BatchDict
from raylane.workers.compiled import CompiledWorkerGroup
from raylane.workers.group import WorkerGroup, WorkerOptions
from raylane.workers.host import Seat
from raylane.workers.places import order_by_devices
from raylane.workers.sharding import NamedSharding
from workers import worker_classes
from workers.worker_classes import Recorder

# The workers' processes do not have the tests on their path; the classes travel with the calls instead.
ray.cloudpickle.register_pickle_by_value(worker_classes)

SMALL = {"num_cpus": 0.5}
ENV = {"RAYLANE_TEST_COLOUR": "green"}


def placements() -> int:
    return sum(entry["state"] != "REMOVED" for entry in placement_group_table().values())


@pytest.fixture(scope="module", params=[WorkerGroup, CompiledWorkerGroup])
def kind(request):
    """Class of groups: every test of this file holds for both."""
    return request.param


@pytest.fixture(scope="module")
def group(ray_session, kind):
    """Four workers on two axes, kept for all tests that leave them healthy."""
    options = WorkerOptions(**SMALL, env_vars=ENV, name_prefix="kept")
    with kind(Recorder, NamedSharding.of(dp=2, tp=2), options=options) as group:
        yield group


def test_runtime_environment_reaches_workers_only(group):
    """R5 and weak point c: the option was dropped; mutable defaults were filled with the driver's environment."""
    before = dict(os.environ)
    seen = group.call("environment", names=["RAYLANE_TEST_COLOUR"]).results(30)
    assert seen == [{"RAYLANE_TEST_COLOUR": "green"}] * 4
    assert ENV == {"RAYLANE_TEST_COLOUR": "green"}
    assert dict(os.environ) == before
    assert "RAYLANE_TEST_COLOUR" not in os.environ
    assert "RANK" not in os.environ


def test_rank_variables_are_those_of_torchrun(group):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
    seen = group.call("environment", names).results(30)
    assert [entry["RANK"] for entry in seen] == ["0", "1", "2", "3"] == [entry["LOCAL_RANK"] for entry in seen]
    assert {(entry["WORLD_SIZE"], entry["LOCAL_WORLD_SIZE"], entry["NODE_RANK"]) for entry in seen} == {("4", "4", "0")}
    assert len({(entry["MASTER_ADDR"], entry["MASTER_PORT"]) for entry in seen}) == 1


def listening_addresses(pid, port):
    """Local addresses, as /proc writes them, of sockets of a process that listen on this port."""
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    fields = [line.split() for line in lines]
    found = [one for one in fields if one[3] == "0A" and one[1].endswith(f":{port:04X}")]
    # Another process may listen on the same port of another address.
    own = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            own.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return [one[1].rpartition(":")[0] for one in found if f"socket:[{one[9]}]" in own]


@pytest.mark.claim("security", "the TCPStore of a worker group listens on the address of its node alone")
def test_store_of_a_group_listens_on_the_node_address_alone(group):
    env = group.call("environment", ["MASTER_ADDR", "MASTER_PORT"], ranks=[0]).results(30)[0]
    address = socket.inet_aton(env["MASTER_ADDR"])[::-1].hex().upper()  # /proc/net/tcp: hex of the host's byte order
    pid = ray.get(group._actors[0].__ray_call__.remote(lambda host: os.getpid()))
    assert listening_addresses(pid, int(env["MASTER_PORT"])) == [address]


TWO_NODES = """
import json, sys
import ray
from ray.cluster_utils import Cluster
sys.path.insert(0, sys.argv[1])
from raylane.workers.compiled import CompiledWorkerGroup
from raylane.workers.group import WorkerGroup, WorkerOptions
from workers import worker_classes
ray.cloudpickle.register_pickle_by_value(worker_classes)

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 4, "include_dashboard": False})
cluster.add_node(num_cpus=2, num_gpus=2)
ray.init(address=cluster.address, log_to_driver=False, logging_level="error")

def seats(group):
    asked = group.call("environment", ["NODE_RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"])
    return [list(one.values()) for one in asked.results(60)]

for options in (WorkerOptions(num_gpus=1, placement_strategy="SPREAD"), WorkerOptions(num_gpus=1, workers_per_node=2)):
    with WorkerGroup(worker_classes.Recorder, 4, options=options) as group:
        print(json.dumps(seats(group)))
for options in ({"placement_strategy": "SPREAD"}, {"workers_per_node": 2}):
    trainer = WorkerGroup(
        worker_classes.Recorder, 4, options=WorkerOptions(num_cpus=0, num_gpus=0.6, reserve={"GPU": 0.4}, **options)
    )
    beside = WorkerOptions(num_cpus=0, num_gpus=0.4, colocate=trainer)
    engine = WorkerGroup(worker_classes.Recorder, 4, options=beside)
    print(json.dumps([seats(trainer), seats(engine)]))
    try:
        WorkerGroup(worker_classes.Recorder, 4, options=beside)
    except ValueError as error:
        print(json.dumps(str(error)))
    before = seats(engine)
    trainer.recover()
    print(json.dumps([seats(trainer), seats(engine) == before]))
    trainer.shutdown()
    engine.recover()
    print(json.dumps(seats(engine)))
    engine.shutdown()
    print(json.dumps([each["state"] for each in ray.util.placement_group_table().values()]))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_ranks_and_gpus_ascend_on_each_of_two_nodes():
    tests = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", TWO_NODES, tests], capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    spread, two_each, *colocated = map(json.loads, done.stdout.splitlines()[-12:])
    assert spread == sorted(spread), "however Ray has numbered the places"
    assert [one[:2] for one in two_each] == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert two_each == sorted(two_each)
    for (trainer, engine), full, (recovered, undisturbed), alone, states in (colocated[:5], colocated[5:]):
        assert trainer == engine == recovered == alone == sorted(trainer)
        assert undisturbed
        assert "a worker needs {'GPU': 0.4}, and of {'GPU': 1.0} for each rank [{'GPU': 0.6}, {'GPU': 0.4}] is" in full
        assert set(states) == {"REMOVED"}


def test_ranks_are_ordered_by_devices_within_their_node():
    nodes, devices = "ababa", [(3,), (0,), (1,), (1,), (2,)]
    seats = [Seat(node, "10.0.0.1", 1, device, 0, None) for node, device in zip(nodes, devices, strict=True)]
    assert order_by_devices(seats) == [2, 1, 4, 3, 0]
    without = [dataclasses.replace(seat, devices=()) for seat in seats]
    assert order_by_devices(without) == [0, 1, 2, 3, 4]


def test_group_cannot_share_places_that_do_not_fit(ray_session, kind):
    with kind(Recorder, 2, options=WorkerOptions(**SMALL, reserve={"CPU": 0.1})) as first:
        with pytest.raises(ValueError, match="as many workers, got 1 beside 2"):
            kind(Recorder, 1, options=WorkerOptions(num_cpus=0.1, colocate=first))
        with pytest.raises(ValueError, match=r"a worker needs .* Start the other group with WorkerOptions\(reserve="):
            kind(Recorder, 2, options=WorkerOptions(num_cpus=0.2, colocate=first))
    with pytest.raises(TypeError, match="colocate must be a WorkerGroup, got int"):
        kind(Recorder, 2, options=WorkerOptions(num_cpus=0.1, colocate=2))
    with pytest.raises(WorkerGroupError, match="has no places any more"):
        kind(Recorder, 2, options=WorkerOptions(num_cpus=0.1, colocate=first))


@pytest.mark.claim("worker groups", "`torch.distributed` starts from the environment of each worker")
def test_torch_distributed_joins_through_the_environment(group):
    means = group.call("mean_over_ranks", shard=["dp", "tp"], value=[[1.0, 2.0], [3.0, 6.0]]).results(30)
    assert means == [3.0] * 4
    group.call("leave_process_group").results(30)


def test_single_worker_and_all_workers_take_positional_arguments(group):
    assert group.call("echo", "a", k=1, ranks=[2]).results(30) == [(2, ("a",), {"k": 1})]
    assert group.call("echo", "a", k=1).results(30) == [(rank, ("a",), {"k": 1}) for rank in range(4)]
    only = group.call("echo", replicate=["dp"])
    assert [result[0] for result in only.results(30)] == [0, 2]
    assert [result[0] for result in group.call("echo", ranks=[3, 0, 3]).results(30)] == [0, 3]
    with pytest.raises(ValueError, match="rank 4 is not in this layout"):
        group.call("echo", ranks=[4])


@pytest.mark.claim("worker groups", "arguments are divided along any named axes, in the order of the axes")
def test_every_argument_is_sharded_along_every_listed_axis(group):
    """R1, F2: only the first axis, and only the argument called "data", were looked at."""
    nested = [[f"tp{t} dp{d}" for d in range(2)] for t in range(2)]
    future = group.call("echo", nested, shard=["tp", "dp"], other=nested)
    assert [result[1:] for result in future.results(30)] == [
        ((f"tp{t} dp{d}",), {"other": f"tp{t} dp{d}"}) for d in range(2) for t in range(2)
    ]


@pytest.mark.claim("worker groups", "a batch is divided, copied along replicated axes, and returned once")
def test_batches_are_sharded_replicated_and_returned_once(group):
    batch = BatchDict({"ids": torch.arange(8)})
    future = group.call(
        "total",
        shard=["dp"],
        replicate=["tp"],
        one_result=["tp"],
        common={"scale": 10},
        data=batch.shard(2),
    )
    assert future.called_ranks == (0, 1, 2, 3)
    assert future.returning_ranks == (0, 2)
    assert future.results(30) == [60, 220]
    assert future.results(30) == [60, 220], "a future can be asked twice"
    assert future.done()


@pytest.mark.claim("worker groups", "a shard is sent once for all workers that get it")
def test_shard_is_sent_once_for_all_its_workers(group, kind, monkeypatch):
    puts = []
    monkeypatch.setattr("raylane.workers.group.put", lambda value: puts.append(value) or raylane.put(value))
    batch = BatchDict({"ids": torch.arange(8)})
    future = group.call("total", batch.shard(2), shard=["dp"], replicate=["tp"], common={"scale": 2})
    assert future.results(30) == [12, 12, 44, 44]
    if kind is WorkerGroup:
        assert len(puts) == 2
    else:
        plan = group._graphs[future.plan].graph.plan
        readers = sorted(edge.readers for edge in plan.edges_from(DRIVER))
        assert readers == [(1, 2), (1, 2, 3, 4), (3, 4)], "one message for each slice, and one with the common part"
        assert not puts


def test_a_reference_arrives_as_the_value_it_stands_for(group):
    ref = raylane.put(BatchDict({"ids": torch.arange(4)}))
    assert group.call("total", ref).results(30) == [6] * 4
    assert group.call("total", data=ref, scale=ray.put(2)).results(30) == [12] * 4


def test_free_axes_are_left_out_or_called_with_none(group):
    batch = BatchDict({"ids": torch.arange(8)})
    left_out = group.call("total", batch.shard(2), shard=["dp"], replicate=[])
    assert left_out.called_ranks == (0, 2)
    dummies = group.call("total", batch.shard(2), shard=["dp"], replicate=[], call_free_axes=True)
    assert dummies.results(30) == [6, None, 22, None]


def test_results_that_are_not_wanted_never_leave_their_worker(group):
    """The reference fetched every replica's result and filtered afterwards."""
    both = ["dp", "tp"]
    future = group.call("costly_result", replicate=both, one_result=both)
    assert [result.rank for result in future.results(30)] == [0]
    with pytest.raises(WorkerCallError, match="was sent though nobody asked"):
        group.call("costly_result").results(30)


def test_nothing_is_sent_when_arguments_are_wrong(group):
    """R4, R7."""
    with pytest.raises(AttributeError, match="did you mean 'total'"):
        group.call("totals")
    with pytest.raises(AttributeError, match=r"Use call\(method, ...\), or a group of raylane.nemo.groups"):
        group.run_all_workers_single_data("total")
    with pytest.raises(TypeError, match="missing a required argument: 'data'"):
        group.call("total")
    with pytest.raises(TypeError, match=r"\['scale'\] are given both"):
        group.call("total", replicate=["dp"], common={"scale": 1}, scale=1)
    with pytest.raises(ValueError, match=r"Recorder.total: data: expected 2 entries, one for each coordinate of 'dp'"):
        group.call("total", shard=["dp"], data=[1])
    with pytest.raises(ValueError, match="one_result: no axis 'cp'"):
        group.call("total", one_result=["cp"], data=1)
    with pytest.raises(ValueError, match=r"ranks must name at least one worker, got \[\]"):
        group.call("total", data=1, ranks=[])
    with pytest.raises(ValueError, match=r"ranks=\[0\] name the workers, so there is no argument about axes"):
        group.call("total", data=1, ranks=[0], shard=["dp"])


@pytest.mark.claim("worker groups", "an error names its rank, and the group continues")
def test_worker_error_names_rank_and_the_group_continues(group):
    with pytest.raises(WorkerCallError, match=r"Recorder.fail raised on rank 2: KeyError: 'the reason'") as caught:
        group.call("fail", 2).results(30)
    assert caught.value.fields == {"rank": 2, "call": "Recorder.fail"}
    assert 'raise KeyError("the reason")' in str(caught.value), "the remote traceback is in the message"
    assert isinstance(caught.value.__cause__, KeyError)
    assert group.call("fail", 9).results(30) == [0, 1, 2, 3]


def test_exception_that_cannot_be_pickled_ends_no_worker(group):
    """Ray ends an actor whose exception raises while it is pickled; the group would call it dead."""
    told = r"Recorder.fail_oddly raised on rank \d: RuntimeError: .*Unsendable: odd \(which cannot be pickled: .*no way"
    with pytest.raises(WorkerCallError, match=told):
        group.call("fail_oddly").results(30)
    assert [one[0] for one in group.call("echo").results(30)] == [0, 1, 2, 3]


def test_generator_that_is_returned_is_refused(group):
    """Ray would hand out its first item as the result, and drop the rest."""
    with pytest.raises(WorkerCallError, match="lazy_rows returned a generator; return a list instead"):
        group.call("lazy_rows").results(30)


def test_argument_that_cannot_be_pickled_is_sent_to_nobody(group):
    """Sent to some, it would leave them waiting for the others in a collective."""
    before = group.call("calls").results(30)
    arguments = [[1, 2], [3, threading.Lock()]]
    with pytest.raises(TypeError, match="an argument cannot be pickled, so nothing was sent"):
        group.call("echo", arguments, shard=["dp", "tp"])
    assert group.call("calls").results(30) == before
    reference = ray.put(5)
    nested = group.call("echo", [reference, 7], shard=["dp"], replicate=["tp"])
    assert [one[1] for one in nested.results(30)] == [(5,), (5,), (7,), (7,)]


@pytest.mark.slow
def test_group_dropped_without_shutdown_gives_its_place_back(ray_session, kind, eventually):
    before = placements()
    group = kind(Recorder, 1, options=WorkerOptions(**SMALL))
    assert placements() == before + 1
    kept = [group]
    del group
    with pytest.warns(ResourceWarning, match="dropped without shutdown"):
        kept.clear()
    eventually(lambda: placements() == before, 30)


@pytest.mark.slow
def test_shutdown_with_unknown_cleanup_ends_the_workers(ray_session, kind):
    before = placements()
    group = kind(Recorder, 1, options=WorkerOptions(**SMALL))
    assert not group.shutdown(cleanup_method="no_such_thing")
    assert placements() == before


@pytest.mark.slow
def test_a_late_answer_is_not_lost(ray_session, kind):
    """F6: a result that came after the timeout could not be fetched any more."""
    two_calls = {} if kind is CompiledWorkerGroup else {"max_concurrency": 2}
    with kind(Recorder, 1, options=WorkerOptions(**SMALL, **two_calls)) as group:
        gate = group.call("hang", ranks=[0])
        with pytest.raises(WorkerCallError, match=r"ranks \[0\] have not answered within 0.1 s") as caught:
            gate.results(timeout=0.1)
        assert caught.value.fields["ranks"] == [0]
        assert not gate.done()
        if two_calls:
            assert group.call("fail", 9).results(30) == [0], "other calls run beside it"


@pytest.mark.claim("worker groups", "a killed worker fails every pending call, and the group recovers")
@pytest.mark.faults
def test_killed_worker_fails_every_pending_call(ray_session, kind):
    group = kind(Recorder, 3, options=WorkerOptions(**SMALL))
    try:
        hanging = group.call("die_or_hang", 1)
        queued = group.call("environment", [])
        with pytest.raises(WorkerLostError, match=r"rank 1 died during Recorder.die_or_hang") as caught:
            hanging.results(timeout=60)  # late would be a WorkerCallError
        assert caught.value.fields["rank"] == 1
        with pytest.raises(WorkerLostError, match="rank 1"):
            queued.results(timeout=60)
        with pytest.raises(WorkerLostError, match="rank 1"):
            group.call("echo", ranks=[1]).results(60)
    finally:
        assert group.shutdown(timeout=20)


@pytest.mark.slow
@pytest.mark.faults
def test_a_worker_that_ray_started_again_is_empty_until_rebuilt(ray_session, kind):
    with kind(Recorder, 1, options=WorkerOptions(**SMALL, max_restarts=1)) as group:
        with pytest.raises(WorkerLostError):
            group.call("die", 0).results(30)
        message, deadline = "", time.monotonic() + 60
        while "rebuild_worker(0)" not in message and time.monotonic() < deadline:
            with pytest.raises(WorkerLostError) as caught:  # "unavailable" until the process is there again
                group.call("echo").results(30)
            message = str(caught.value)
        group.rebuild_worker(0, timeout=30)
        assert group.call("echo").results(30) == [(0, (), {})]


@pytest.mark.slow
def test_shutdown_is_bounded_idempotent_and_leaves_nothing(ray_session, kind):
    before = placements()
    group = kind(Recorder, 2, options=WorkerOptions(**SMALL, name_prefix="ending"))
    assert ray.get_actor("ending-0")
    group.call("hang")
    assert not group.shutdown(timeout=4, cleanup_method="hang"), "it came back, though cleanup waits for ever"
    assert group.shutdown() is True
    assert repr(group) == f"{kind.__name__}(Recorder, worker=2, shut down)"
    assert placements() == before
    for rank in range(2):
        with pytest.raises(ValueError, match="ending"):
            ray.get_actor(f"ending-{rank}")
    with pytest.raises(WorkerGroupError, match=r"cannot be called after shutdown\. Start a new group"):
        group.call("echo")


def test_a_failing_constructor_is_told_and_leaves_nothing(ray_session, kind):
    before = placements()
    with pytest.raises(
        WorkerCallError, match=r"Recorder.__init__ raised on rank 1: RuntimeError: rank 1 does not want"
    ):
        kind(Recorder, 2, init_kwargs={"fail_on_rank": 1}, options=WorkerOptions(**SMALL, name_prefix="broken"))
    assert placements() == before
    with pytest.raises(ValueError, match="broken"):
        ray.get_actor("broken-0")


def test_unplaceable_group_names_demand_and_supply(ray_session, kind):
    before = placements()
    with pytest.raises(WorkerGroupError, match=r"2 workers of \{'CPU': 500.0\} need more than .*: \{'CPU': 8.0\}"):
        kind(Recorder, 2, options=WorkerOptions(num_cpus=500))
    with (
        kind(Recorder, 1, options=WorkerOptions(num_cpus=1)),
        pytest.raises(WorkerGroupError, match=r"could not place 1 workers of \{'CPU': 8.0\}.*1 s.*'CPU': 8.0\}"),
    ):
        kind(Recorder, 1, options=WorkerOptions(num_cpus=8, start_timeout_s=1))
    assert placements() == before


@pytest.mark.slow
def test_start_that_takes_too_long_names_ranks_and_option(ray_session, kind, monkeypatch, caplog):
    before = placements()
    monkeypatch.setattr("raylane.core.deadline.WORD_S", 1.0)
    told = r"ranks \[[01, ]+\] are not ready 5 s after the start.*raise start_timeout_s"
    with pytest.raises(WorkerCallError, match=told):
        kind(worker_classes.NeverReady, 2, options=WorkerOptions(**SMALL, start_timeout_s=5))
    assert "are not ready after 1 s of at most 5 s (load of this host: " in caplog.text
    assert placements() == before


def test_bad_classes_and_ranks_are_refused_before_start(ray_session, kind):
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        kind(Recorder, 1, init_kwargs={"x": 1})
    with pytest.raises(TypeError, match="take the decorator off"):
        kind(ray.remote(Recorder), 1)
    with pytest.raises(ValueError, match="ranks are 0 to 1"):
        kind(Recorder, NamedSharding([1, 2], ["dp"]))
