from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from benchmarks.graph.cases import cases
from benchmarks.studies.vllm_queue import (
    FILE,
    LOADED,
    WHEEL_VARIABLE,
    Broadcast,
    QueuePeer,
    load,
    why_unavailable,
    with_queue,
)

OWN = """
from __future__ import annotations
from dataclasses import dataclass
import colorsys
import vllm.envs as envs
from vllm.distributed.utils import StatelessProcessGroup, sched_yield
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils import get_ip, get_open_port
from vllm.utils.cpu_resource_utils import check_cgroup_memory_available
from vllm.utils.network_utils import get_open_zmq_inproc_path, get_open_zmq_ipc_path, is_valid_ipv6_address
SECONDS = envs.VLLM_RINGBUFFER_WARNING_INTERVAL
ADDRESSES = get_open_zmq_ipc_path(), get_open_zmq_ipc_path()
@dataclass
class Handle:
    name: str | None = None
"""
"""Module with the imports of vLLM's file, and nothing else of it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    file = tmp_path / "unpacked" / FILE
    file.parent.mkdir(parents=True)
    file.write_text(OWN)
    return tmp_path / "unpacked"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "vllm-0.whl", "w") as made:
        made.writestr(FILE, OWN)
    return tmp_path / "vllm-0.whl"


@pytest.mark.parametrize("kind", ["folder", "wheel"])
def test_load_of_one_file_leaves_no_stand_ins(kind: str, request: pytest.FixtureRequest) -> None:
    sys.modules.pop("colorsys", None)
    module = load(str(request.getfixturevalue(kind)), "/folder")
    assert module.SECONDS == 60
    first, second = module.ADDRESSES
    assert first.startswith("ipc:///folder/")
    assert first != second
    assert module.Handle(**vars(module.Handle("x"))) == module.Handle("x")
    assert not [name for name in sys.modules if name.split(".")[0] == "vllm"]
    assert "colorsys" in sys.modules, "what the module imports elsewhere stays imported"
    del sys.modules[LOADED]


def test_why_unavailable_names_the_cause(folder: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.delenv(WHEEL_VARIABLE, raising=False)
    assert why_unavailable() == "vllm is not installed, and RAYLANE_VLLM_WHEEL names no wheel of it"
    for path in (folder, wheel):
        monkeypatch.setenv(WHEEL_VARIABLE, str(path))
        assert why_unavailable() == "pyzmq is not installed"
    installed.add("zmq")
    assert why_unavailable() is None
    for wrong in (folder / "nosuch.whl", folder / "vllm", folder / FILE):
        monkeypatch.setenv(WHEEL_VARIABLE, str(wrong))
        assert f"RAYLANE_VLLM_WHEEL={wrong} holds no {FILE}" in (why_unavailable() or "")
    monkeypatch.delenv(WHEEL_VARIABLE)
    installed.add("vllm")
    assert why_unavailable() is None


def test_cases_get_the_queue_only_where_it_is_available(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "zmq" or None)
    monkeypatch.setenv(WHEEL_VARIABLE, str(folder))
    (case,) = with_queue(cases("echo"))
    assert case.contenders == ("raylane", "ray:compiled", "ray:calls", "loop", "wake-ups", "vllm")
    monkeypatch.delenv(WHEEL_VARIABLE)
    with pytest.raises(RuntimeError, match="vllm is not installed"):
        with_queue(cases("echo"))


@pytest.mark.slow
@pytest.mark.alone  # looks at all names in /dev/shm
@pytest.mark.skipif(why_unavailable() is not None, reason=f"needs vLLM: {why_unavailable()}")
def test_queues_of_vllm_carry_calls_and_leave_nothing(cluster: None, eventually: Callable[..., None]) -> None:
    before = set(os.listdir("/dev/shm"))
    actors = [ray.remote(num_cpus=0)(QueuePeer).remote() for _ in range(2)]
    queues = Broadcast(actors, 60.0)
    values: list[Any] = [{"step": 1}, "two", 3]
    for value in values:
        queues.submit("echo", value)
    assert [queues.finish() for _ in values] == [[value, value] for value in values]
    queues.close()
    queues.close()
    while actors:
        ray.kill(actors.pop())
    assert not os.path.exists(queues.folder)
    eventually(lambda: set(os.listdir("/dev/shm")) <= before)
