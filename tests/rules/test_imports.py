"""The architecture, read off the import statements."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest
from tests.suite.affected import LAYERS, SIDE_BY_SIDE
from tests.suite.imports import imports_of

from raylane.core.state_table import StateTable, unchanged

SRC = Path(__file__).parents[2] / "src" / "raylane"
BESIDE = ("errors", "_ray_names", "_ray_calls", "_ray")
"""Modules beside the packages; each may import what stands to its left."""
BASE = {"errors", "_ray_names", "_ray"}
"""Modules of BESIDE that packages may import: `_ray_calls` is loaded by `_ray` alone, after its check."""
ROOMS = {
    "core": (
        "_native",
        "state_table",
        "listing",
        "settings",
        "deadline",
        "trace_file",
        "native",
        "process",
        "signals",
        "memory",
    ),
    "graph": ("lifecycle", "plan", "values", "channels", "inspect", "worker", "driver", "inline", "api"),
    "transport": ("value", "observe", "hold", "link", "backends", "read", "produce", "groups", "register", "api"),
    "training": (
        "config",
        "labels",
        "storage",
        "vocabulary",
        "text",
        "report",
        "parallel",
        "model",
        "checkpoint",
        "run",
    ),
    "sft": ("config", "data", "run"),
    "weights": (
        "layout",
        "memory",
        "chunks",
        "state",
        "service",
        "held",
        "verification",
        "publisher",
        "subscriber",
        "engines",
        "fleet",
    ),
}
"""Rooms of each package; each may import what stands to its left."""
AUTHORING = {"collectives", "nodes", "ray_dag"}
"""Modules of graph that any room may import; they import no room."""
MAX_LEVELS = {"transport": 10, "training": 9, "sft": 7}
"""Longest chain of imports within a package."""
TESTING_MAY = {*LAYERS[: LAYERS.index("workers") + 1], "testing"} | BASE


def modules() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def layer(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def own(names: AbstractSet[str]) -> set[str]:
    """Return the layers of raylane among imported names."""
    return {name.split(".")[1] for name in names if name.startswith("raylane.")}


def test_imports_run_from_upper_layers_to_lower_ones() -> None:
    wrong = []
    for path in modules():
        here = layer(path)
        if here == "core":
            allowed = {"core"}
        elif here == "testing":
            allowed = TESTING_MAY
        elif here in LAYERS:
            allowed = {*LAYERS[: LAYERS.index(here) + 1], *BASE}
        elif here in BESIDE:
            allowed = {*BESIDE[: BESIDE.index(here)]}
        else:  # the package itself
            continue
        used = own(imports_of(path)) & {*LAYERS, *BESIDE, "testing"}
        wrong += [f"{path.relative_to(SRC)} imports {name}" for name in sorted(used - allowed)]
    assert not wrong


@pytest.mark.parametrize("package", sorted(SIDE_BY_SIDE))
def test_kinds_of_training_do_not_import_each_other(package: str) -> None:
    others = SIDE_BY_SIDE - {package}
    paths = sorted((SRC / package).rglob("*.py"))  # none if the package does not exist
    wrong = [f"{path.relative_to(SRC)} imports {name}" for path in paths for name in own(imports_of(path)) & others]
    assert not wrong


@pytest.mark.parametrize("package", ROOMS)
def test_imports_between_rooms_run_one_way(package: str) -> None:
    wrong, rooms = [], ROOMS[package]
    for path in sorted((SRC / package).rglob("*.py")):
        room = path.relative_to(SRC / package).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        used = {name.split(".")[2] for name in imports_of(path) if name.startswith(f"raylane.{package}.")} - AUTHORING
        allowed = set(rooms[: rooms.index(room) + 1]) if room in rooms else set()
        wrong += [f"{path.relative_to(SRC)} imports {name}" for name in sorted(used - allowed)]
    assert not wrong


def import_graph() -> dict[str, set[str]]:
    """Return the modules of raylane that each module imports."""
    names = {"raylane." + ".".join(path.relative_to(SRC).with_suffix("").parts): path for path in modules()}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    return {
        name: {t if t in names else t.rpartition(".")[0] for t in imports_of(path)} & set(names) - {name}
        for name, path in names.items()
    }


@pytest.mark.parametrize("package", MAX_LEVELS)
def test_chains_of_imports_are_short(package: str) -> None:
    graph = import_graph()
    levels: dict[str, int] = {}

    def level(name: str) -> int:
        if name not in levels:
            lower = [level(target) for target in graph[name] if target.startswith(f"raylane.{package}.")]
            levels[name] = 1 + max(lower, default=0)
        return levels[name]

    deep = {name: level(name) for name in graph if name.startswith(f"raylane.{package}.")}
    assert max(deep.values()) <= MAX_LEVELS[package], max(deep, key=lambda name: deep[name])


def test_imports_make_no_cycle() -> None:
    graph = import_graph()
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_core_imports_neither_ray_nor_torch() -> None:
    for path in (SRC / "core").rglob("*.py"):
        assert not {name.split(".")[0] for name in imports_of(path)} & {"ray", "torch"}, path.name


OPTIONAL = ("transformers", "safetensors", "tokenizers", "yaml", "tensorboard", "wandb", "nixl", "matplotlib", "pytest")


@pytest.mark.processes
@pytest.mark.alone
def test_import_needs_no_optional_package_and_is_quick() -> None:
    """`import raylane` after `import ray`: under 150 ms, the limit that the project has set itself, and lazily.

    Best of five, in a process of its own: a limit on what is loaded, not a measurement of the machine.
    """
    program = f"""
import sys, time
import ray
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r} and name not in sys.modules:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Block())
start = time.process_time()
import raylane
spent = time.process_time() - start
assert "torch" not in sys.modules or "torch" in RAY_HAD, "import raylane loads torch"
raylane.method, raylane.put, raylane.get, raylane.errors, raylane.BatchDict, raylane.WorkerGroup
import raylane.cli, raylane.cli.doctor
print(spent)
""".replace("class Block", "RAY_HAD = set(sys.modules)\nclass Block")
    spent = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        spent.append(float(done.stdout))
        if min(spent) < 0.150:
            break
    assert min(spent) < 0.150


@pytest.mark.processes
def test_graphs_do_not_import_torch_into_actors() -> None:
    """Importing torch costs an actor two seconds and 200 MB."""
    program = """
import sys, ray
import raylane.graph.driver.graph, raylane.graph.worker.session, raylane.graph.inline
from raylane.graph.values.message import Encoder
Encoder().encode({"a": [1]})
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_tables_of_states_have_one_law() -> None:
    tables, wrong = 0, []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and any(
                name.endswith("TRANSITIONS") for name in map(ast.unparse, node.targets)
            ):
                tables += 1
                wrong += [f"{path}: no StateTable"] * (not ast.unparse(node.value).startswith("StateTable("))
            elif isinstance(node, ast.Attribute) and ast.unparse(node).endswith("TRANSITIONS.get"):
                wrong.append(f"{path}:{node.lineno}: a missing pair must raise")
    assert tables == 9
    assert not wrong
    with pytest.raises(KeyError, match=r"Age\.YOUNG cannot happen in old\. This is a defect"):
        StateTable({("new", "Age.OLD"): "old", **unchanged("old", ["Age.OLD"])})["old", "Age.YOUNG"]
