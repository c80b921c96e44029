"""Every wait without a limit of its own has its reason in waits.txt: what ends it, or why the caller has to wait."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).parent / "waits.txt"
WAITS = ("ray.get", "ray.wait", "asyncio.wait", "asyncio.wait_for", "concurrent.futures.wait")
"""Functions that wait."""
METHODS = ("acquire", "get", "join", "result", "wait", "wait_for")
"""Methods that wait when they are called without arguments; `wait_for`, of a condition, with one."""
LIMITS = {"timeout", "timeout_s", "blocking"}
LEFT_OUT = ("testing",)
"""Packages whose callers have limits around them."""


def waits_without_limit(text: str) -> list[str]:
    """Return the calls in a module that may wait for ever, as source."""
    waits = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or {keyword.arg for keyword in node.keywords} & LIMITS:
            continue
        name = ast.unparse(node.func)
        given = len(node.args)
        if name in WAITS:
            unlimited = given < 2
        else:
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            unlimited = method in METHODS and given <= (method == "wait_for")
        if unlimited:
            waits.append(ast.unparse(node))
    return sorted(waits)


def test_waits_without_a_limit_have_reasons() -> None:
    listed: dict[str, str] = {}
    for line in TABLE.read_text().splitlines():
        if line and not line.startswith("#"):
            place, _, reason = line.partition("  # ")
            assert place not in listed, f"twice in {TABLE.name}: {place}"
            listed[place] = reason
    package = ROOT / "src" / "raylane"
    waits = {
        f"{path.relative_to(package)}: {call}"
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] not in LEFT_OUT
        for call in waits_without_limit(path.read_text())
    }
    assert sorted(waits - set(listed)) == [], "give it a deadline from its caller, or a line with the reason"
    assert sorted(set(listed) - waits) == [], "no such wait any more: remove the line"
    assert [place for place, reason in listed.items() if len(reason) < 10] == []


def test_all_kinds_of_waits_are_seen() -> None:
    text = (
        "ray.get(a); ray.get(a, timeout=1); t.join(); ','.join(a); q.get(); c.wait_for(f); c.wait_for(f, 1); d.get(k)"
    )
    assert waits_without_limit(text) == ["c.wait_for(f)", "q.get()", "ray.get(a)", "t.join()"]
    assert waits_without_limit("lock.acquire(blocking=False); future.result(3); event.wait()") == ["event.wait()"]
