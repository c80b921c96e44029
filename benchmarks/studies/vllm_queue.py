"""Run `python -m benchmarks graph` with vLLM's message queue, used as vLLM's executor uses it, as one more contender.

    python -m benchmarks.studies.vllm_queue [--only CASE[,CASE]] [--quick] [--json FILE]

    driver   --one broadcast queue-->       all actors     (method, arguments)
    driver   <--one queue for each actor--  actor          (status, result)

The queue is `MessageQueue` of vllm/distributed/device_communicators/shm_broadcast.py; its use follows `collective_rpc`
and `worker_busy_loop` of vllm/v1/executor/multiproc_executor.py (vLLM 0.33). It comes from an installed vLLM, or from a
wheel or an unpacked folder named by RAYLANE_VLLM_WHEEL: then only that one module is loaded, with stand-ins for the
modules of vLLM that it imports. Both need pyzmq and torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import ray

from benchmarks import environment, goals
from benchmarks.graph import run as graph
from benchmarks.graph.actors import Peer
from benchmarks.graph.cases import RAYLANE, Case, cases
from benchmarks.graph.contenders import KINDS, TIMEOUT_S, Contender

VLLM = "vllm"
GOAL = goals.faster("broadcast-8", "faster than vLLM's queue", VLLM, RAYLANE, 1.5)
CASES = "echo,echo-1ms,echo-10ms,scatter-4,broadcast-8"
"""Without idle-8: readers of the queue spin for a second after a call, and a block there has 2.5 seconds."""
WHEEL_VARIABLE = "RAYLANE_VLLM_WHEEL"
"""Environment variable with the path of a vLLM wheel, or of the folder that holds the folder `vllm`."""
FILE = "vllm/distributed/device_communicators/shm_broadcast.py"
INSTALLED = "vllm.distributed.device_communicators.shm_broadcast"
LOADED = "raylane_bench_shm_broadcast"
"""Name of the module when it is loaded from a wheel or folder."""
WARN_AFTER_S = 60
"""vLLM's default of VLLM_RINGBUFFER_WARNING_INTERVAL."""


class Status(enum.Enum):
    """Outcome of a call, sent with its result: vLLM's workers send such a member too."""

    SUCCESS = enum.auto()


def why_unavailable() -> str | None:
    """Return the reason why the queue cannot be used here; None if it can. Imports nothing."""
    path = os.environ.get(WHEEL_VARIABLE)
    if path:
        try:
            _source(path)
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            return f"{WHEEL_VARIABLE}={path} holds no {FILE}: {error}"
    elif importlib.util.find_spec("vllm") is None:
        return f"vllm is not installed, and {WHEEL_VARIABLE} names no wheel of it"
    return None if importlib.util.find_spec("zmq") else "pyzmq is not installed"


def load(path: str | None, folder: str) -> ModuleType:
    """Return the module with `MessageQueue` and `Handle`: from the wheel or folder `path`, or the installed vLLM.

    A module from `path` creates its sockets in `folder`.
    """
    if not path:
        return importlib.import_module(INSTALLED)
    network = {
        "get_ip": lambda: "127.0.0.1",
        "get_open_port": _refuse,
        "get_open_zmq_inproc_path": lambda: f"inproc://{uuid.uuid4()}",
        "get_open_zmq_ipc_path": lambda: f"ipc://{folder}/{uuid.uuid4()}",
        "is_valid_ipv6_address": lambda address: ":" in address,
    }
    # Options have vLLM's default values.
    options = {
        "VLLM_RINGBUFFER_WARNING_INTERVAL": WARN_AFTER_S,
        "VLLM_SLEEP_WHEN_IDLE": False,
        "VLLM_USE_SPINLOOP_EXT": False,
    }
    # What `FILE` imports of vLLM (0.11 to 0.33), by module name.
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": options,
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": None},
        "vllm.distributed": {},
        "vllm.distributed.utils": {"StatelessProcessGroup": type("Unused", (), {}), "sched_yield": os.sched_yield},
        "vllm.utils": network,
        "vllm.utils.network_utils": network,
        "vllm.utils.cpu_resource_utils": {"check_cgroup_memory_available": lambda *args, **kwargs: None},
    }
    stand_ins = {}
    for name, attributes in contents.items():
        stand_ins[name] = ModuleType(name)
        vars(stand_ins[name]).update(attributes)
    stand_ins["vllm"].envs = stand_ins["vllm.envs"]  # type: ignore[attr-defined]  # for `import vllm.envs as envs`
    module = ModuleType(LOADED)
    sys.modules[LOADED] = module  # dataclasses look up the module of their class
    sys.modules.update(stand_ins)
    try:
        exec(compile(_source(path), FILE, "exec"), module.__dict__)
    finally:
        for name in stand_ins:
            del sys.modules[name]
    return module


def _source(path: str) -> bytes:
    if Path(path).is_dir():
        return (Path(path) / FILE).read_bytes()
    with zipfile.ZipFile(path) as wheel:
        return wheel.read(FILE)


def _refuse(*args: Any) -> Any:
    raise RuntimeError("readers on other hosts take no part in this benchmark")


class QueuePeer(Peer):
    """Actor that answers calls from a queue, like the loop of a vLLM worker."""

    def join(self, path: str | None, folder: str, handle: dict[str, Any], rank: int) -> dict[str, Any]:
        """Open the queues of this actor; return the handle of its answers. Handles travel as their fields."""
        module = load(path, folder)
        self.calls = module.MessageQueue.create_from_handle(module.Handle(**handle), rank)
        self.answers = module.MessageQueue(1, 1)
        return dict(vars(self.answers.export_handle()))

    def serve(self) -> None:
        """Answer calls until one has no method. Waits for the driver's `wait_until_ready` first."""
        self.calls.wait_until_ready()
        self.answers.wait_until_ready()
        while True:
            method, args, kwargs, _ = self.calls.dequeue(indefinite=True)
            if method is None:
                break
            self.answers.enqueue((Status.SUCCESS, getattr(self, method)(*args, **kwargs)))
        del self.calls, self.answers  # unlinks the shared memory


class Broadcast:
    """The driver's end: one queue to all actors (of QueuePeer), and one from each."""

    def __init__(self, actors: Sequence[Any], timeout_s: float) -> None:
        """Connect to all actors. Waits until every queue is ready."""
        path = os.environ.get(WHEEL_VARIABLE) or None
        self.timeout_s = timeout_s
        self.folder = tempfile.mkdtemp(prefix="raylane-vllm-")
        module = load(path, self.folder)
        self.calls = module.MessageQueue(len(actors), len(actors))
        handle = dict(vars(self.calls.export_handle()))
        joined = [actor.join.remote(path, self.folder, handle, rank) for rank, actor in enumerate(actors)]
        self.answers = [
            module.MessageQueue.create_from_handle(module.Handle(**fields), 0)
            for fields in ray.get(joined, timeout=timeout_s)
        ]
        self.serving = [actor.serve.remote() for actor in actors]
        self.calls.wait_until_ready()
        for queue in self.answers:
            queue.wait_until_ready()

    def submit(self, method: str, value: Any) -> None:
        """Send one call to all actors."""
        self.calls.enqueue((method, (value,), {}, None))

    def finish(self) -> list[Any]:
        """Wait for the answers of all actors to the oldest call and return them."""
        return [queue.dequeue(timeout=self.timeout_s)[1] for queue in self.answers]

    def close(self) -> None:
        """End the loops of the actors, and free queues and sockets. A second call does nothing."""
        if not self.serving:
            return
        self.calls.enqueue((None, (), {}, None))
        ray.get(self.serving, timeout=self.timeout_s)
        self.serving.clear()
        self.answers.clear()
        del self.calls
        shutil.rmtree(self.folder, ignore_errors=True)


class Vllm(Contender):
    """vLLM's message queues: one to all actors, and one from each."""

    actor = QueuePeer
    queues: Broadcast | None = None

    def open(self) -> None:
        self.queues = Broadcast(self.actors, TIMEOUT_S)

    def submit(self) -> Any:
        assert self.queues is not None
        self.queues.submit(self.case.method, self.value)

    def finish(self, token: Any) -> Any:
        assert self.queues is not None
        answers = self.queues.finish()
        return answers if self.case.shape == "fan" else answers[0]

    def close(self) -> None:
        if self.queues is not None:
            self.queues.close()
        super().close()


def with_queue(selected: Sequence[Case]) -> list[Case]:
    """Return the cases with vLLM's queue as one more contender. RuntimeError if it cannot be used here."""
    if (reason := why_unavailable()) is not None:
        raise RuntimeError(f"vLLM's queue cannot take part: {reason}")
    return [dataclasses.replace(case, contenders=(*case.contenders, VLLM)) for case in selected]


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=CASES, metavar="CASE[,CASE]", help="run these cases only")
    parser.add_argument("--quick", action="store_true", help="make few calls: a test that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions and records to FILE")
    args = parser.parse_args()
    KINDS[VLLM] = Vllm
    records = graph.run(with_queue(cases(args.only)), quick=args.quick)
    print(graph.table(records, {"x vllm": (VLLM, "p50")}))
    print("\n".join(map(str, goals.reached([GOAL], records))))
    if args.json is not None:
        environment.write_report(args.json, records, quick=args.quick)


if __name__ == "__main__":
    main()
