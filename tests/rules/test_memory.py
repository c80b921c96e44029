"""Check that shared memory is made, mapped and locked in one room only, by the imports and attributes of all files."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "raylane"
ROOM = PACKAGE / "core" / "memory"
MAKERS = {"fcntl", "memfd_create", "mmap"}
"""Modules and functions by which memory is made, mapped, sealed and locked."""
EXCEPTIONS = {
    # Locks a file on disk, so that one run uses a folder at a time: no memory.
    PACKAGE / "training" / "run" / "places.py": {"fcntl"},
}


def makers_in(path: Path) -> set[str]:
    """Return the makers that a file imports or uses as an attribute."""
    used: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            used.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            used.update({node.module or "", *(alias.name for alias in node.names)})
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
    return used & MAKERS


def test_shared_memory_is_made_in_one_room_only() -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if ROOM not in path.parents]
    wrong = {path: makers for path in paths if (makers := makers_in(path) - EXCEPTIONS.get(path, set()))}
    assert not wrong, f"make, map and lock memory in {ROOM.relative_to(PACKAGE)}"


def test_exceptions_to_the_memory_rule_are_still_needed() -> None:
    assert {path: makers_in(path) for path in EXCEPTIONS} == EXCEPTIONS


def test_memfds_are_made_by_one_function() -> None:
    assert [path.name for path in sorted(ROOM.rglob("*.py")) if "memfd_create" in makers_in(path)] == ["segment.py"]
