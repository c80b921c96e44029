"""Private names of Ray: the table of them, the check at the first use, and the modules that may use them."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.suite.imports import imports_of

from raylane import _ray, _ray_calls, _ray_names
from raylane._ray_names import CHECKED_ON, MissingName, Use, message, missing_names, parsed, private_names
from raylane.errors import RaylaneError

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "raylane"
TABLE, CALLS = SRC / "_ray_names.py", SRC / "_ray_calls.py"
USES = [use for uses in private_names().values() for use in uses]
NAMES = {name for use in USES for name in use.names.split()}
KNOWN = NAMES | {part for owner in private_names() for part in re.findall(r"\w+", owner)}
"""Names of the table, and the modules and classes that have them."""
HOLDERS = {"_worker", "worker", "global_worker", "core", "core_worker", "function_actor_manager", "gcs_client"}
HOLDERS |= {"state", "internal_kv", "dag", "node", "operation", "info", "manager_info", "error"}
"""Variables and attributes in `_ray_calls` whose attributes are all private or undocumented."""
OF_ACTORS = re.compile(r"__ray_\w+?__")
"""Methods and attributes of actors' classes, which Ray names so."""

FIRST_USES = """
import sys, ray
from ray._private import state
del ray.actor.ActorMethod.options, ray.actor.ActorMethod._remote, state.jobs, ray.cloudpickle.CloudPickler
del ray.experimental.internal_kv
sys.modules["ray.experimental.internal_kv"] = None
import raylane
import raylane.transport.api, raylane.graph.api, raylane.workers.group, raylane.weights, raylane.rl, raylane.cli.doctor
from raylane.errors import RaylaneError
assert "raylane._ray_calls" not in sys.modules
errors = []
for use in (
    lambda: raylane.method(lambda self: None),
    lambda: raylane.bind(print),
    lambda: raylane.compile(None),
    lambda: raylane.register_with_ray(),
):
    try:
        use()
    except RaylaneError as error:
        errors.append(error)
import json
print(json.dumps([[type(error).__name__, str(error), error.fields["missing"]] for error in errors]))
"""


def sources(*left_out: Path) -> Iterator[tuple[Path, str]]:
    return ((path, path.read_text()) for path in sorted(SRC.rglob("*.py")) if path not in left_out)


def test_installed_ray_has_all_private_names() -> None:
    assert missing_names(private_names(), import_dag=True) == []


def test_table_is_read_by_owner() -> None:
    text = "# a comment\n\nray.x\n  a b | count | graphs\n  c | add | raylane.put\n\nray.y:Z\n  d | stop | groups\n"
    assert parsed(text) == {
        "ray.x": [Use("a b", "count", "graphs"), Use("c", "add", "raylane.put")],
        "ray.y:Z": [Use("d", "stop", "groups")],
    }


def test_table_has_each_name_of_an_owner_once_with_reasons() -> None:
    for owner, uses in private_names().items():
        names = [name for use in uses for name in use.names.split()]
        assert names, owner
        assert len(names) == len(set(names)), owner
    assert not [use for use in USES if not use.purpose or not use.needed_by]


def test_missing_names_are_seen_in_every_kind_of_owner() -> None:
    table = {
        "ray.nosuch": (Use("first second", "count", "graphs"),),
        "ray.actor": (Use("ActorMethod Nosuch", "count", "graphs"),),
        "ray.actor:Nosuch": (Use("method", "count", "graphs"),),
        "ray.actor:ActorMethod": (Use("options _actor", "count", "graphs"),),
        "ray.actor:ActorMethod()": (Use("_actor _nosuch", "count", "graphs"),),
        "ray.actor:ActorMethod._remote()": (Use("invocation nosuch", "count", "graphs"),),
        "ray.actor:_modify_class()": (Use("__ray_call__ __ray_nosuch__", "count", "graphs"),),
        "ray._private.worker:connect()": (Use("gcs_client nosuch", "count", "graphs"),),
    }
    assert [name for name, _ in missing_names(table)] == [
        "ray.nosuch.first",
        "ray.nosuch.second",
        "ray.actor.Nosuch",
        "ray.actor.Nosuch.method",
        "ray.actor.ActorMethod._actor",
        "ray.actor.ActorMethod()._nosuch",
        "ray.actor.ActorMethod._remote().nosuch",
        "ray.actor._modify_class().__ray_nosuch__",
        "ray._private.worker.connect().nosuch",
    ]


def test_names_of_ray_dag_wait_for_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ray_names, "_DAG", "ray.nosuch")
    table = {"ray.nosuch:Node": (Use("inner", "count", "graphs"),)}
    assert missing_names(table) == []
    assert [name for name, _ in missing_names(table, import_dag=True)] == ["ray.nosuch.Node.inner"]
    monkeypatch.setitem(sys.modules, "ray.nosuch", None)  # type: ignore[arg-type]
    assert len(missing_names(table)) == 1


def test_error_has_versions_missing_names_and_a_remedy() -> None:
    missing = [
        MissingName("ray.x.Core.count", Use("count", "count refs", "raylane.put")),
        MissingName("ray.y.loop", Use("loop", "run coroutines", "compiled graphs")),
    ]
    assert message("9.8.7", missing, ("2.57.0", "2.60.0")) == (
        "raylane cannot work with Ray 9.8.7: this version lacks 2 of the private names that raylane uses:\n"
        "  ray.x.Core.count: needed by raylane.put, to count refs\n"
        "  ray.y.loop: needed by compiled graphs, to run coroutines\n"
        "raylane was run with Ray 2.57.0, 2.60.0. Install one of these versions (pip install 'ray==2.60.0'), or "
        "report this message to the authors of raylane"
    )


def test_summary_tells_whether_names_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    count = sum(len(use.names.split()) for use in USES)
    assert _ray_names.summary() == f"Ray has all {count}; raylane was run with Ray {', '.join(CHECKED_ON)}"
    monkeypatch.setattr(_ray_names, "missing_names", lambda *_, **__: [MissingName("ray.x", USES[0])])
    assert _ray_names.summary().startswith("Ray lacks ray.x; ")
    with pytest.raises(RaylaneError, match=r"ray\.x: needed by"):
        _ray_names.require()


@pytest.mark.processes
def test_first_use_names_all_missing_names_and_imports_do_not() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 4
    assert len({text for _, text, _ in errors}) == 1
    name, text, missing = errors[0]
    assert name == "RaylaneError"
    assert missing == [
        "ray._private.state.jobs",
        "ray.actor.ActorMethod._remote",
        "ray.actor.ActorMethod.options",
        "ray.actor.ActorMethod._remote().invocation",
        "ray.cloudpickle.CloudPickler",
        *(f"ray.experimental.internal_kv._internal_kv_{verb}" for verb in ("del", "get", "list", "put")),
    ]
    assert all(f"\n  {name}: needed by " in text for name in missing)


def test_first_use_loads_all_names_of_ray_calls() -> None:
    assert _ray.session is _ray_calls.session
    assert not [name for name in _ray.__all__ if name not in vars(_ray)]
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        _ray.nosuch  # type: ignore[attr-defined]  # noqa: B018


def test_door_lists_all_of_its_public_names() -> None:
    trees = [ast.parse(path.read_text()) for path in (CALLS, SRC / "_ray.py")]
    defined = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    functions = {name for name in defined if not name.startswith("_")}
    constants = {name for name in vars(_ray_calls) if name.isupper() and not name.startswith("_")}
    of_ray = {alias.asname for node in ast.walk(trees[0]) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert list(_ray.__all__) == sorted(_ray.__all__, key=lambda name: (not name.isupper(), name))
    assert set(_ray.__all__) == functions | constants | of_ray - {None, "_worker"} | {"CloudPickler"}


UNDOCUMENTED = ("ray._", "ray.experimental", "ray.cloudpickle", "ray.core", "ray.dag", "ray.util.tracing")
"""Beginnings of names that only `_ray_calls` may import."""


def test_private_names_of_ray_are_used_in_one_module() -> None:
    private = {name for name in NAMES if name.startswith("_") and not OF_ACTORS.fullmatch(name)}
    wrong = []
    for path, text in sources(TABLE, CALLS):
        found = {name for name in imports_of(path) if name.startswith(UNDOCUMENTED)}
        found |= {word for word in ("global_worker", "core_worker", "_private.", "ray._raylet") if word in text}
        for node in ast.walk(ast.parse(text)):
            # Attributes of our own objects may have the same names.
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
                found |= {node.attr} & private
        wrong += [f"{path.relative_to(SRC)} uses {name}: move that to _ray_calls.py" for name in sorted(found)]
    assert not wrong


def test_names_that_code_uses_are_in_the_table() -> None:
    tree = ast.parse(CALLS.read_text())
    ours = {_ray_calls.OPTIONS_KEYWORD} | {name for name in vars(_ray_calls) if name.startswith("_")}
    found = {name for _, text in sources(TABLE) for name in OF_ACTORS.findall(text)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            holder = ast.unparse(node.value).rpartition(".")[2]
            is_private = node.attr.startswith("_") and not node.attr.startswith("__") and holder != "os"
            if is_private or holder in HOLDERS:
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"_[a-z]\w+", str(node.value)):
            found.add(node.value)
    assert found >= {"global_worker", "is_canceled", "_internal_kv_get", "_collective_op", "__ray_call__"}
    assert found - KNOWN - ours == set(), "names of Ray that _ray_names.txt lacks"


def test_names_of_the_table_are_used() -> None:
    text = "".join(text for _, text in sources(TABLE))
    # Names of options are put together from a prefix and the option.
    assert not [name for name in sorted(NAMES) if name.strip("_") not in text]


def test_versions_of_ray_are_the_same_everywhere() -> None:
    assert f"ray=={CHECKED_ON[-1]}\n" in (ROOT / "constraints.txt").read_text()
    lowest = re.search(r'"ray>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert lowest
    assert CHECKED_ON[0].startswith(f"{lowest[1]}.")
