"""The `raylane migrate` command: list the lines of a program that change when it leaves Ray's own graphs and transport.

Files are parsed, never imported or written. `findings` is pure; docs/howto/from-ray-compiled-graphs.md and
from-ray-direct-transport.md explain the changes.
"""

from __future__ import annotations

import argparse
import ast
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from raylane.graph.api import OPTIONS_OF_RAY

_NO_COUNTERPART = "leave it out: raylane has no counterpart"
_WHEN_READ = "leave it out: memory is registered when it is first read"
MODULES = ("ray.dag.", "ray.exceptions.", "ray.experimental.")
CHANNELS = "ray.experimental.channel."
NAMES = {
    "CompiledDAGFuture": "the result of execute: read it with get() or await",
    "CompiledDAGRef": "the result of execute: read it with get() or await",
    "DAGContext": "options of raylane.compile",
    "RayCgraphCapacityExceeded": "execute waits instead; execute_nowait raises raylane.errors.GraphFullError",
    "RayChannelError": "raylane.errors.GraphError; GraphActorDiedError if an actor has died",
    "RayChannelTimeoutError": "raylane.errors.GraphTimeoutError",
    "create_collective_group": "leave it out, or raylane.create_collective_group: transports work without a group",
    "deregister_nixl_memory": _WHEN_READ,
    "destroy_all_collective_groups": "raylane.destroy_all_collective_groups",
    "destroy_collective_group": "raylane.destroy_collective_group",
    "get_collective_groups": "raylane.get_collective_groups",
    "register_nixl_memory": _WHEN_READ,
    "register_nixl_memory_pool": _WHEN_READ,
    "register_tensor_transport": "raylane.add_ray_transport(name, manager_class, devices=[...]), after ray.init",
    "set_nixl_cuda_stream": _NO_COUNTERPART,
    "set_target_device_for_ref": "raylane.get(ref, device=...)",
    "set_target_for_ref": "raylane.get(ref, into=[...])",
    "wait_tensor_freed": "raylane.wait_tensor_freed",
}
"""Names in MODULES, and what takes their place."""
VARIABLES = {
    "RAY_CGRAPH_ENABLE_DETECT_DEADLOCK": "leave it out: compile always checks",
    "RAY_CGRAPH_VISUALIZE_SCHEDULE": "graph.show() or graph.draw(path)",
    "RAY_CGRAPH_get_timeout": "use timeout, or RAYLANE_TIMEOUT_S",
    "RAY_CGRAPH_read_iteration_timeout_s": _NO_COUNTERPART,
    "RAY_CGRAPH_teardown_timeout": "graph.teardown(timeout=...)",
    "RAY_rdt_fetch_fail_timeout_milliseconds": "RAYLANE_TIMEOUT_S",
    **{f"RAY_CGRAPH{name}": change for name, change in OPTIONS_OF_RAY.items() if name.startswith("_")},
    **{f"RAY_CGRAPH_ENABLE_{kind}PROFILING": "graph.trace(path)" for kind in ("", "NVTX_", "TORCH_")},
}
"""Environment variables, and what takes their place."""
KEYWORDS = {
    "_tensor_transport": ("ray.put", "raylane.put(value)"),
    "_use_object_store": ("ray.get", "leave it out: every process reads the value"),
    "device": (".with_tensor_transport", "leave it out, and call tensor.to(...) in the method that receives it"),
    "enable_tensor_transport": ("", "leave it out, and decorate the methods that return tensors with raylane.method"),
    "kill_actors": (".teardown", "leave it out, and call ray.kill(actor) for each actor"),
    "tensor_transport": ("ray.method", "raylane.method; without tensor_transport it chooses the transport itself"),
    **{name: (".experimental_compile", change) for name, change in OPTIONS_OF_RAY.items()},
}
"""Keyword arguments: the function, or the method with a dot, or an empty text for any, and what takes their place."""
GRAPH, NODE, RESULT, MAYBE_RESULT = "compiled graph", "node", "result of a compiled graph", "result of a graph"
"""Kinds of values that a program's variables hold."""


class Finding(NamedTuple):
    """Place in a file that changes: number of the line, the words of Ray in it, and what takes their place."""

    line: int
    words: str
    change: str


def findings(source: str | bytes) -> list[Finding]:
    """Return the places of a Python program that change, by line. SyntaxError or ValueError if it cannot be parsed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the parser about the program, such as on escapes in strings
        tree = ast.parse(source)
    search = _Search()
    search.visit(tree)
    return sorted(search.findings)


class _Search(ast.NodeVisitor):
    """Walk through a program in the order of its lines. Variables of all functions share one table, which is enough."""

    def __init__(self) -> None:
        self.findings: set[Finding] = set()
        self._imported: dict[str, str] = {}
        """Full name of what an import has bound, by its name in the program."""
        self._kinds: dict[str, str] = {}
        """Kind of the value of each variable and attribute (`self.graph`) at this line; an empty text if unknown."""

    def visit(self, node: ast.AST) -> None:
        for loop in getattr(node, "generators", [node] if isinstance(node, ast.For | ast.AsyncFor) else []):
            self._assign(loop.target, self._kind(loop.iter))
        super().visit(node)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._assign(target, self._kind(node.value))

    def visit_Import(self, node: ast.Import) -> None:
        self._imported.update({name.asname: name.name for name in node.names if name.asname})

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in node.names:
            self._imported[name.asname or name.name] = f"{node.module}.{name.name}"
            self._check_name(name, f"{node.module}.{name.name}")

    def visit_Name(self, node: ast.Name) -> None:
        self._check_name(node, self._full_name(node))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._check_name(node, self._full_name(node))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value in VARIABLES:
            self._add(node, node.value, VARIABLES[node.value])

    def visit_arg(self, node: ast.arg) -> None:
        self._kinds[node.arg] = ""

    def visit_Call(self, node: ast.Call) -> None:
        function, method = self._full_name(node.func), ""
        if isinstance(node.func, ast.Attribute):
            receiver, method = ast.unparse(node.func.value), f".{node.func.attr}"
            if method == ".experimental_compile":
                self._add(node, "experimental_compile", f"raylane.compile({receiver})")
            elif method == ".visualize" and self._kind(node.func.value) == GRAPH:
                self._add(node, "visualize", f"{receiver}.draw(path) or {receiver}.show()")
            elif method in (".append", ".add", ".extend") and (kind := self._kind(node)):
                self._assign(node.func.value, kind)
        for keyword in node.keywords:
            entry = KEYWORDS.get(keyword.arg or "")
            if entry is not None and entry[0] in ("", function, method):
                self._add(keyword.value, str(keyword.arg), entry[1])
        if function == "ray.get" and node.args and (kind := self._kind(node.args[0])) in (RESULT, MAYBE_RESULT):
            condition = "" if kind == RESULT else ", if the graph is compiled"
            self._add(node, "ray.get of a result of execute", f"result.get(){condition}")
        self.generic_visit(node)

    def _add(self, node: ast.AST, words: str, change: str) -> None:
        self.findings.add(Finding(getattr(node, "lineno", 0), words, change))

    def _check_name(self, node: ast.AST, full: str) -> None:
        name = full.rpartition(".")[2]
        is_channel = full.startswith(CHANNELS) and name[0].isupper() and not name.isupper()  # a class, no member of it
        change = NAMES.get(name) or ("leave it out: edges choose their transport" if is_channel else "")
        if change and full.startswith(MODULES):
            self._add(node, name, change)

    def _full_name(self, node: ast.AST) -> str:
        """Return the dotted name of an expression, as far as imports tell; an empty text if it has none."""
        if isinstance(node, ast.Name):
            return self._imported.get(node.id, node.id)
        owner = self._full_name(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{owner}.{node.attr}" if isinstance(node, ast.Attribute) and owner else ""

    def _assign(self, target: ast.AST, kind: str) -> None:
        names = (node for node in ast.walk(target) if isinstance(node, ast.Name | ast.Attribute))
        self._kinds.update({ast.unparse(node): kind for node in names})

    def _kind(self, node: ast.AST) -> str:
        """Return the kind of the value of an expression, or of what it holds; an empty text if unknown."""
        if isinstance(node, ast.Name | ast.Attribute):
            return self._kinds.get(ast.unparse(node), "")
        parts = ast.iter_child_nodes(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            if method in ("execute", "execute_async"):
                receiver = self._kind(node.func.value)
                return RESULT if receiver == GRAPH else "" if receiver == NODE else MAYBE_RESULT
            if method not in ("append", "add", "extend"):
                return {"experimental_compile": GRAPH, "bind": NODE}.get(method, "")
            parts = iter(node.args)
        return next((kind for part in parts if (kind := self._kind(part))), "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add PATH."""
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", type=Path, help="Python file, or folder whose Python files are read"
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings. Return 0 if there are none, 1 if there are some, and 2 if a file could not be read."""
    count = read = failed = 0
    for file in (file for path in args.paths for file in _files(path)):
        try:
            lines = findings(file.read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            place = f"{file}:{error.lineno}" if isinstance(error, SyntaxError) else str(file)
            cause = getattr(error, "msg", None) or getattr(error, "strerror", None) or error
            print(f"raylane migrate: cannot read {place}: {cause}. Correct it, or leave it out", file=sys.stderr)
            failed += 1
            continue
        print("".join(f"{file}:{line}: {words} -> {change}\n" for line, words, change in lines), end="")
        count, read = count + len(lines), read + 1
    print(f"Places to change: {count}. Files read: {read}. docs/howto/from-ray-*.md of raylane explain the changes.")
    return 2 if failed or not read else min(count, 1)


def _files(path: Path) -> Iterator[Path]:
    """Return the Python files of a folder without hidden and installed ones, or the file itself."""
    if not path.is_dir():
        return iter([path])
    inner = ((file, file.relative_to(path).parts) for file in sorted(path.rglob("*.py")))
    return (file for file, parts in inner if "site-packages" not in parts and not any(p[0] == "." for p in parts))
