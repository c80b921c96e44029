"""Lines that `raylane migrate` finds in programs written for Ray's compiled graphs and direct transport."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import ray.dag.context
import ray.dag.dag_node

from raylane.cli import main
from raylane.cli.migrate import KEYWORDS, NAMES, VARIABLES, findings
from raylane.graph.api import OPTIONS_OF_RAY

ROOT = Path(__file__).parents[2]

GRAPHS = """\
import os
import ray
from ray.dag import InputNode, DAGContext
from ray.exceptions import RayChannelTimeoutError as Late
os.environ["RAY_CGRAPH_get_timeout"] = "30"
class Driver:
    def __init__(self, worker):
        with InputNode() as inp:
            dag = worker.step.bind(inp).with_tensor_transport("nccl", device="cpu")
        self.graph = dag.experimental_compile(
            enable_asyncio=False,
            _max_inflight_executions=4,
        )
        self.graph.visualize()
    def run(self, batches, ref):
        other = ray.get(ref)  # an argument
        refs = [self.graph.execute(batch) for batch in batches]
        for i, ref in enumerate(refs):
            try:
                print(i, ray.get(ref, timeout=1))
            except Late:
                pass
        return [ray.get(ref) for ref in refs]
    async def later(self, x):
        future = await self.graph.execute_async(x)
        return await future
def plain(worker):
    dag = worker.step.bind(1)
    ref = dag.execute()
    first = ray.get(ref)  # never compiled
    ref = worker.step.remote()
    return first, ray.get(ref)
def elsewhere(graph):
    ref = graph.execute(1)
    graph.teardown(kill_actors=True)
    return ray.get(ref)
"""

TRANSPORT = """\
import ray
import ray.util.collective
from ray import experimental as rx
from ray.experimental.collective import create_collective_group, allreduce
@ray.remote(enable_tensor_transport=True)
class Trainer:
    @ray.method(tensor_transport="gloo", num_returns=1)
    def weights(self):
        return self.tensor
    def put(self):
        return ray.put(self.tensor, _tensor_transport="nixl")
ray.util.collective.create_collective_group([], 2, [0, 1])
group = create_collective_group([a, b], backend="gloo")
rx.set_target_for_ref(ref, [target])
value = ray.get(ref, _use_object_store=True)
ray.experimental.wait_tensor_freed(tensor)
"""

MIGRATED = """\
import ray, raylane
from ray.dag import InputNode, MultiOutputNode
from ray.experimental.collective import allreduce
class Trainer:
    @raylane.method(tensor_transport="gloo")
    def weights(self):
        return self.tensor
with InputNode() as inp:
    dag = MultiOutputNode([a.f.bind(inp), b.f.bind(inp).with_tensor_transport("nccl")])
graph = raylane.compile(dag, max_inflight=4)
print(graph.execute(1).get(), ray.get(a.f.remote(1)), cursor.execute("RAY_CGRAPH_"))
"""


def found(program: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.words) for finding in findings(program)]


def test_findings_of_graphs_follow_their_results() -> None:
    assert found(GRAPHS) == [
        (3, "DAGContext"),
        (4, "RayChannelTimeoutError"),
        (5, "RAY_CGRAPH_get_timeout"),
        (9, "device"),
        (10, "experimental_compile"),
        (11, "enable_asyncio"),
        (12, "_max_inflight_executions"),
        (14, "visualize"),
        (20, "ray.get of a result of execute"),
        (21, "RayChannelTimeoutError"),
        (23, "ray.get of a result of execute"),
        (35, "kill_actors"),
        (36, "ray.get of a result of execute"),
    ]
    changes = {finding.line: finding.change for finding in findings(GRAPHS)}
    assert changes[10] == "raylane.compile(dag)"
    assert changes[12] == "use max_inflight"
    assert (changes[20], changes[36]) == ("result.get()", "result.get(), if the graph is compiled")


def test_findings_of_direct_transport_name_their_place() -> None:
    assert found(TRANSPORT) == [
        (4, "create_collective_group"),
        (5, "enable_tensor_transport"),
        (7, "tensor_transport"),
        (11, "_tensor_transport"),
        (13, "create_collective_group"),
        (14, "set_target_for_ref"),
        (15, "_use_object_store"),
        (16, "wait_tensor_freed"),
    ]


def test_findings_of_a_migrated_program_are_none() -> None:
    assert findings(MIGRATED) == []
    assert findings((ROOT / "examples/from_ray_graphs.py").read_bytes()) == []


NEW_IN_2_58 = {"set_nixl_cuda_stream", "set_target_device_for_ref"}
"""Names of Ray that its version 2.57 does not have yet."""


def test_names_of_the_tables_are_those_of_ray() -> None:
    """A clear message when a new Ray adds an option, or drops a name."""
    options = set(inspect.signature(ray.dag.dag_node.DAGNode.experimental_compile).parameters) - {"self"}
    assert options == set(OPTIONS_OF_RAY)
    assert options <= set(KEYWORDS)
    sources = [Path(module.__file__ or "").read_text() for module in (ray.dag.context, ray.dag.constants)]
    assert set(re.findall(r'"(RAY_CGRAPH_\w+)', "".join(sources))) <= set(VARIABLES)
    import ray.experimental.collective as collective
    from ray.experimental import compiled_dag_ref

    places = (ray.dag, ray.exceptions, ray.experimental, collective, compiled_dag_ref)
    lacking = {name for name in NAMES if not any(hasattr(place, name) for place in places)}
    assert lacking == (NEW_IN_2_58 if ray.__version__.startswith("2.57.") else set())


def test_command_lists_lines_of_files_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, program in (("a/graphs.py", GRAPHS), ("a/done.py", MIGRATED), ("a/.venv/skipped.py", GRAPHS)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(program)
    assert main(["migrate", str(tmp_path / "a")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"{tmp_path}/a/graphs.py:10: experimental_compile -> raylane.compile(dag)" in lines
    assert lines[-1].startswith("Places to change: 13. Files read: 2.")
    assert main(["migrate", str(tmp_path / "a/done.py")]) == 0


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"def f(:\n", "wrong.py:1: invalid syntax"),
        (b"x = '\xff'\n", "wrong.py"),
        (b"x = 1\0\n", "null bytes"),
        (None, "wrong.py: No such file or directory"),
    ],
)
def test_file_that_is_no_python_is_one_line(
    content: bytes | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "wrong.py").write_bytes(content)
    (tmp_path / "good.py").write_text(GRAPHS)
    assert main(["migrate", str(tmp_path / "wrong.py"), str(tmp_path / "good.py")]) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith("raylane migrate: cannot read ")
    assert told in line
    assert line.endswith("Correct it, or leave it out")
    assert "Places to change: 13. Files read: 1." in output.out


def test_folder_without_python_files_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", str(tmp_path)]) == 2
    assert "Places to change: 0. Files read: 0." in capsys.readouterr().out
