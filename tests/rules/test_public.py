"""Public interface: names, errors, the trees of folders, the version."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
from pathlib import Path

import pytest

import raylane
from raylane import errors

ROOT = Path(__file__).parents[2]


def test_public_names() -> None:
    assert raylane.__all__ == [
        "BatchDict",
        "Buffers",
        "CollectiveGroup",
        "CompiledGraphExecutor",
        "CompiledWorkerGroup",
        "InputNode",
        "MultiDPCompiledGraphExecutor",
        "MultiOutputNode",
        "NamedSharding",
        "OpenedValue",
        "TensorInfo",
        "WorkerGroup",
        "WorkerOptions",
        "__version__",
        "add_ray_transport",
        "bind",
        "compile",
        "create_collective_group",
        "destroy_all_collective_groups",
        "destroy_collective_group",
        "empty",
        "empty_like",
        "errors",
        "get",
        "get_async",
        "get_collective_groups",
        "graph",
        "is_free",
        "method",
        "open",
        "options",
        "put",
        "register_with_ray",
        "rl",
        "stats",
        "to_shared",
        "wait_free",
        "wait_tensor_freed",
        "weights",
    ]
    for name in raylane.__all__:
        assert getattr(raylane, name) is not None
    assert dir(raylane) == sorted(raylane.__all__)
    with pytest.raises(AttributeError, match="'nosuch'; it has BatchDict"):
        raylane.nosuch  # noqa: B018


def test_every_public_callable_is_documented() -> None:
    for name in raylane.__all__:
        value = getattr(raylane, name)
        if callable(value):
            assert inspect.getdoc(value), f"raylane.{name} has no docstring"


CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__]


def test_errors_survive_pickling_with_their_fields() -> None:
    for cls in CLASSES:
        back = pickle.loads(pickle.dumps(cls("it broke: actor 7", actor="7", step=3)))
        assert type(back) is cls
        assert str(back) == "it broke: actor 7"
        assert back.fields == {"actor": "7", "step": 3}
        assert isinstance(back, errors.RaylaneError)


def test_the_tree_of_errors_is_drawn_and_complete() -> None:
    drawing = errors.__doc__ or ""
    for cls in CLASSES:
        assert cls.__name__ in drawing
        assert cls.__name__ in errors.__all__


def tracked_folders() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    folders = {str(parent) for name in listed for parent in Path(name).parents}
    return {f for f in folders if f != "." and f.count("/") <= 3 and not f.startswith(("tests/", "."))}


@pytest.mark.processes
def test_folders_are_drawn_as_they_are() -> None:
    readme = (ROOT / "README.md").read_text()
    packages = {folder.split("/")[2] for folder in tracked_folders() if folder.startswith("src/raylane/")}
    assert set(re.findall(r"(\w+)/(?=,|  +#| )", readme[readme.index("```\nsrc/raylane/") :])) >= packages
    block = re.search(r"```\n(src/raylane/.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert block, "CONTRIBUTING.md has no tree of folders"
    trail: list[str] = []
    drawn = set()
    for line in block[1].splitlines():
        name = line.split("#")[0].split()
        if not name or not name[0].endswith("/"):
            continue
        depth = (len(line) - len(line.lstrip())) // 2
        trail = [*trail[:depth], name[0].rstrip("/")]
        path = "/".join(trail)
        drawn |= {path, *(str(p) for p in Path(path).parents if str(p) != ".")}
    assert drawn == tracked_folders()


def test_the_changelog_knows_the_version() -> None:
    assert f"## {raylane.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()


def test_the_constraints_pin_the_cpu_build_and_no_cuda() -> None:
    text = (ROOT / "constraints.txt").read_text()
    assert "torch==2.13.0+cpu" in text
    assert not re.search(r"^(nvidia|cuda|triton)", text, re.MULTILINE)
