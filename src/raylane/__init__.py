"""raylane: direct transport, compiled graphs, worker groups, weights in versions, and trainers for stock Ray.

`__all__` lists all public names. Each name is loaded on first use, so that `import raylane` is fast and needs no
optional package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from raylane import errors, graph, rl, weights
    from raylane.graph.api import compile
    from raylane.graph.nodes import InputNode, MultiOutputNode, bind
    from raylane.nemo.executors import CompiledGraphExecutor, MultiDPCompiledGraphExecutor
    from raylane.transport.api import get, get_async, method, put, stats, wait_tensor_freed
    from raylane.transport.groups import (
        CollectiveGroup,
        create_collective_group,
        destroy_all_collective_groups,
        destroy_collective_group,
        get_collective_groups,
    )
    from raylane.transport.produce.buffers import Buffers, is_free, to_shared, wait_free
    from raylane.transport.produce.methods import options
    from raylane.transport.produce.ray_plugin import register_with_ray
    from raylane.transport.read.opened import OpenedValue, TensorInfo
    from raylane.transport.read.opened import open_value as open
    from raylane.transport.register import add_ray_transport
    from raylane.transport.value.arrays import empty, empty_like
    from raylane.workers.batch import BatchDict
    from raylane.workers.compiled import CompiledWorkerGroup
    from raylane.workers.group import WorkerGroup
    from raylane.workers.options import WorkerOptions
    from raylane.workers.sharding import NamedSharding

_HOME = {  # module of each public name
    "errors": "raylane.errors",
    "rl": "raylane.rl",
    "weights": "raylane.weights",
    "CollectiveGroup": "raylane.transport.groups",
    "create_collective_group": "raylane.transport.groups",
    "destroy_all_collective_groups": "raylane.transport.groups",
    "destroy_collective_group": "raylane.transport.groups",
    "get_collective_groups": "raylane.transport.groups",
    "empty": "raylane.transport.value.arrays",
    "empty_like": "raylane.transport.value.arrays",
    "Buffers": "raylane.transport.produce.buffers",
    "is_free": "raylane.transport.produce.buffers",
    "to_shared": "raylane.transport.produce.buffers",
    "wait_free": "raylane.transport.produce.buffers",
    "get": "raylane.transport.api",
    "get_async": "raylane.transport.api",
    "method": "raylane.transport.api",
    "put": "raylane.transport.api",
    "register_with_ray": "raylane.transport.produce.ray_plugin",
    "add_ray_transport": "raylane.transport.register",
    "stats": "raylane.transport.api",
    "wait_tensor_freed": "raylane.transport.api",
    "OpenedValue": "raylane.transport.read.opened",
    "TensorInfo": "raylane.transport.read.opened",
    "open": "raylane.transport.read.opened:open_value",
    "options": "raylane.transport.produce.methods",
    "graph": "raylane.graph",
    "InputNode": "raylane.graph.nodes",
    "MultiOutputNode": "raylane.graph.nodes",
    "bind": "raylane.graph.nodes",
    "compile": "raylane.graph.api",
    "BatchDict": "raylane.workers.batch",
    "CompiledGraphExecutor": "raylane.nemo.executors",
    "CompiledWorkerGroup": "raylane.workers.compiled",
    "MultiDPCompiledGraphExecutor": "raylane.nemo.executors",
    "NamedSharding": "raylane.workers.sharding",
    "WorkerGroup": "raylane.workers.group",
    "WorkerOptions": "raylane.workers.options",
}

__all__ = [
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


def __getattr__(name: str) -> Any:
    """Load a public name on its first use (PEP 562)."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'raylane' has no attribute {name!r}; it has {', '.join(__all__)}")
    # `open` has another name in its module, where it would hide Python's own.
    where, _, attribute = home.partition(":")
    module = importlib.import_module(where)
    value = module if home == f"raylane.{name}" else getattr(module, attribute or name)
    globals()[name] = value  # later uses find the name without calling this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
