"""The only door to what Ray does not call public. Every other module of raylane uses `ray`'s documented names alone.

What is used, and why (checked on Ray 2.57.0 and 2.60.0; tests/rules names what is gone when a new Ray drops it):

| name | used for |
| --- | --- |
| worker.global_worker: mode, worker_id, gcs_client, actor_id, actors, core_worker | which process and call this is |
| worker.Worker.get_objects: its code object | to know that a value is unpickled within `ray.get` |
| CoreWorker.get_current_task_id / get_current_task_function_name | to know that Ray, not Python, made this call |
| CoreWorker.current_actor_is_asyncio / get_event_loop | coroutine methods in a graph run on their actor's loop |
| ActorMethod._actor, _method_name, _num_returns, _signature | which method `bind` was given |
| ActorHandle._actor_id, _ray_actor_creation_function_descriptor | which actor a handle is, and its class's name |
| function_actor_manager._function_execution_info | `exclusive=True` puts a lock around ordinary calls |
| ActorHandle.`__ray_call__`, `__ray_terminate__` | set a graph up in an actor; end an actor as exit_actor does |
| ray.dag's nodes: _bound_args and the like | graphs written for experimental_compile |
| CoreWorker.is_canceled | a cancelled call publishes nothing |
| CoreWorker.add_object_out_of_scope_callback | lifetimes: Ray's own reference count tells when a value is free |
| CoreWorker.serialize_object_ref / deserialize_and_register_object_ref | hand a ref over a link (object_store) |
| `__ray_invocation_decorator__` on a method | runs in the caller, sees the refs that the call returned |
| `__ray_num_returns__` and its siblings on a method | what `ray.method` writes and Ray reads back |
| ObjectRef.task_id().actor_id() | which actor produced a ref |
| _private.state.actors | leak checks ask which actors are alive |
| ray.cloudpickle.CloudPickler | pickles what Ray can pickle, refs and handles included |
| serialization._object_ref_deserializer, by name | graphs refuse refs in what cloudpickle has pickled |
| ray.experimental.internal_kv, gcs_client.internal_kv_multi_get | the cluster's secret and where producers listen |

Nothing here keeps state beyond what Ray keeps.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import ray
from ray._private import worker as _worker
from ray.cloudpickle import CloudPickler
from ray.experimental import internal_kv

__all__ = [
    "INVOCATION_HOOK",
    "METHOD_OPTIONS",
    "REF_MAKER",
    "CloudPickler",
    "actor_of",
    "actor_target",
    "adopt_ref",
    "call_identity",
    "connected",
    "current_actor_id",
    "describe_self",
    "empty_task_refs",
    "get_objects_code",
    "hand_over_ref",
    "is_actor_call",
    "is_canceled",
    "is_task_worker",
    "kv_delete",
    "kv_get",
    "kv_put_if_absent",
    "kv_sample",
    "kv_set",
    "living_actors",
    "node_ip",
    "on_out_of_scope",
    "worker_token",
]

CHECKED_ON = ("2.57.0", "2.60.0")
INVOCATION_HOOK = "__ray_invocation_decorator__"
METHOD_OPTIONS = (
    "num_returns",
    "concurrency_group",
    "max_task_retries",
    "retry_exceptions",
    "generator_backpressure_num_objects",
    "enable_task_events",
)
"""What `ray.method` may leave on a function, as `__ray_<name>__`."""
REF_MAKER = "ray._private.serialization", "_object_ref_deserializer"
"""Module and name of the function that makes a ref again where cloudpickle has pickled one."""
_KV_NAMESPACE = b"raylane"


def connected() -> bool:
    return bool(ray.is_initialized())


def worker_token() -> bytes | None:
    """Identifies this process's membership in one cluster session; None when not connected. A driver's worker id alone
    does not: it comes from the job's number, which is 1 in every fresh cluster."""
    worker = _worker.global_worker
    return worker.worker_id + worker.gcs_client.cluster_id.binary() if worker.connected else None


def current_actor_id() -> str | None:
    """Hexadecimal id of the actor that this process is, or None (driver, task worker)."""
    actor_id = _worker.global_worker.actor_id
    return None if actor_id is None or actor_id.is_nil() else actor_id.hex()


def call_identity() -> tuple[str, bytes] | None:
    """(function name, task id) of the call Ray runs in this thread or coroutine; None outside any call."""
    worker = _worker.global_worker
    if worker.mode != _worker.WORKER_MODE:
        return None
    core = worker.core_worker
    name = core.get_current_task_function_name()
    if not name:
        return None
    return name, core.get_current_task_id().binary()


@functools.cache
def get_objects_code() -> types.CodeType:
    """Return the code of `Worker.get_objects`, by which its frames are known: every `ray.get` runs it."""
    code: types.CodeType = inspect.unwrap(_worker.Worker.get_objects).__code__
    return code


def is_task_worker() -> bool:
    """Whether this process runs plain tasks: it has no lasting identity, any task may find itself in it."""
    worker = _worker.global_worker
    return bool(worker.mode == _worker.WORKER_MODE and worker.actor_id.is_nil())


def actor_target(name: str) -> Any:
    """What the class of this process's actor holds under a method name, without Ray's tracing wrapper; None if this
    is no actor or it has no such name."""
    worker = _worker.global_worker
    actor_id = worker.actor_id
    instance = None if actor_id is None or actor_id.is_nil() else worker.actors.get(actor_id)
    if instance is None:
        return None
    found = inspect.getattr_static(type(instance), name, None)
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    return _untraced(found)


def _untraced(function: Any) -> Any:
    """Ray wraps every method once for tracing; functools.wraps makes the copy look original, its code name does not."""
    while getattr(getattr(function, "__code__", None), "co_name", "") == "_resume_span":
        function = function.__wrapped__
    return function


def untraced_method(instance: Any, name: str) -> Any:
    """`instance.name` without Ray's tracing wrapper, which costs a microsecond; None if there is no such name."""
    found: Any = getattr(instance, name, None)
    function = getattr(found, "__func__", None)
    plain = _untraced(function)
    return found if function is None or plain is function else plain.__get__(found.__self__)


def describe_self() -> str:
    """This process as an error message should name it: its actor and class, or what else it is."""
    worker = _worker.global_worker
    actor_id = worker.actor_id
    instance = None if actor_id is None or actor_id.is_nil() else worker.actors.get(actor_id)
    if instance is not None:
        return f"Actor({type(instance).__name__}, {actor_id.hex()})"
    return "the driver" if worker.mode == _worker.SCRIPT_MODE else "a task worker"


def node_ip() -> str:
    ip: str = ray.util.get_node_ip_address()
    return ip


def is_canceled() -> bool:
    return bool(_worker.global_worker.core_worker.is_canceled())


def on_out_of_scope(ref: Any, callback: Callable[[bytes], None]) -> None:
    """Call `callback(object id)` once, on a thread of Ray's, when nobody in the cluster can reach `ref` any more.

    ValueError if this process does not own the ref. The callback may use Ray; an exception in it is logged and lost.
    """
    _worker.global_worker.core_worker.add_object_out_of_scope_callback(ref, callback)


def actor_of(ref: Any) -> bytes:
    """Binary id of the actor whose method returned `ref`."""
    binary: bytes = ref.task_id().actor_id().binary()
    return binary


def _nothing(count: int) -> list[None]:
    """Runs in some worker of this node. In this module, because that imports Ray and nothing else."""
    return [None] * count


@functools.cache
def _empty_task() -> Any:
    return ray.remote(num_cpus=0, max_retries=0)(_nothing)


def empty_task_refs(count: int) -> list[Any]:
    """`count` (at least 2) fresh refs to None, owned by this process: the returns of one task. Does not wait for it."""
    node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=True
    )
    task = _empty_task().options(
        num_returns=count, name="raylane anchors", scheduling_strategy=node, enable_task_events=False
    )
    refs: list[Any] = task.remote(count)
    return refs


def is_actor_call(ref: Any) -> bool:
    """Whether an actor's method returned `ref` (and not a plain task)."""
    return not ref.task_id().actor_id().is_nil()


def hand_over_ref(ref: Any) -> tuple[bytes, bytes]:
    """(object id, owner address): what another process needs to `adopt_ref`. The giver keeps `ref` until then."""
    _, owner, _ = _worker.global_worker.core_worker.serialize_object_ref(ref)
    return ref.binary(), owner


def living_actors() -> dict[str, str]:
    """Hexadecimal id to class name of every actor of the cluster that is not dead. For leak checks."""
    from ray._private import state

    return {actor_id: info["ActorClassName"] for actor_id, info in state.actors().items() if info["State"] != "DEAD"}


def adopt_ref(binary: bytes, owner: bytes) -> Any:
    ref = ray.ObjectRef(binary)
    _worker.global_worker.core_worker.deserialize_and_register_object_ref(binary, ray.ObjectRef.nil(), owner, b"")
    return ref


def kv_get(key: str) -> bytes | None:
    value: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=_KV_NAMESPACE)
    return value


def kv_set(key: str, value: bytes) -> None:
    internal_kv._internal_kv_put(key.encode(), value, overwrite=True, namespace=_KV_NAMESPACE)


def kv_delete(key: str) -> None:
    internal_kv._internal_kv_del(key.encode(), namespace=_KV_NAMESPACE)


def kv_sample(prefix: str, most: int) -> dict[str, bytes]:
    """Return the entries whose keys begin with `prefix`; if there are more than `most`, so many of them, at random."""
    keys: list[bytes] = internal_kv._internal_kv_list(prefix.encode(), namespace=_KV_NAMESPACE)
    chosen = random.sample(keys, most) if len(keys) > most else keys
    found = _worker.global_worker.gcs_client.internal_kv_multi_get(chosen, _KV_NAMESPACE) if chosen else {}
    return {key.decode(): value for key, value in found.items()}


def kv_put_if_absent(key: str, value: bytes) -> bytes:
    """Store unless there is something already; returns what is stored now."""
    internal_kv._internal_kv_put(key.encode(), value, overwrite=False, namespace=_KV_NAMESPACE)
    return kv_get(key) or value


def bound_method(method: Any) -> tuple[Any, str, Any, inspect.Signature | None] | None:
    """(actor handle or object, method's name, num_returns, signature without self) of a method; None if it is none."""
    if isinstance(method, ray.actor.ActorMethod):
        shown = method._signature
        if shown is not None:
            shown = inspect.Signature([parameter for parameter in shown if parameter.name != "_ray_trace_ctx"])
        return method._actor, method._method_name, method._num_returns, shown
    if inspect.ismethod(method):
        count = getattr(method.__func__, "__ray_num_returns__", 1)
        return method.__self__, method.__name__, count, inspect.signature(method)
    return None


def is_handle(actor: Any) -> bool:
    return isinstance(actor, ray.actor.ActorHandle)


def class_name_of(actor: Any) -> str:
    """Class name of an actor by its handle, or of a plain object."""
    if not is_handle(actor):
        return type(actor).__name__
    name: str = actor._ray_actor_creation_function_descriptor.class_name
    return name.rpartition(".")[2]


def actor_id_of(actor: Any) -> str:
    """Hexadecimal id of an actor by its handle."""
    return str(actor._actor_id.hex())


def dumps(value: Any) -> bytes:
    """By cloudpickle: classes and functions of a script, refs and handles included. TypeError for nodes of `ray.dag`,
    which would arrive as values that no execution computes."""
    import sys

    dag: Any = sys.modules.get("ray.dag")
    if dag is None:
        data: bytes = ray.cloudpickle.dumps(value)
        return data

    class Refusing(CloudPickler):  # type: ignore[misc]  # Ray gives mypy no types
        def reducer_override(self, found: Any) -> Any:
            if isinstance(found, dag.DAGNode):
                raise TypeError(
                    f"{type(found).__name__} of ray.dag has no value yet: nodes may stand by themselves or in lists, "
                    "tuples and values of dicts, not inside other objects"
                )
            return super().reducer_override(found)

    file = io.BytesIO()
    Refusing(file).dump(value)
    return file.getvalue()


def task_error(where: str, traceback_text: str, cause: BaseException) -> BaseException:
    """What `ray.get` raises for a call that raised `cause`: an instance of its class too, with the remote text. Where
    that was is said here: left out, it would be filled in by whoever unpickles the error."""
    here = {"proctitle": where, "pid": os.getpid(), "ip": node_ip()}
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(cause))
    except BaseException as obstacle:  # its own __reduce__ may raise anything; Ray expects two classes
        kind = f"{type(cause).__module__}.{type(cause).__qualname__}"
        text = f"a {kind}, which cannot be pickled and unpickled ({obstacle!r}), was raised:\n{traceback_text}"
        cause = ray.exceptions.RayError(text)
    error = ray.exceptions.RayTaskError(where, traceback_text, cause, **here)
    found: BaseException = error
    return found


def raised_form(error: BaseException) -> BaseException:
    """A RayTaskError as it is raised in its caller; any other error as it is."""
    if isinstance(error, ray.exceptions.RayTaskError):
        dual: BaseException = error.as_instanceof_cause()
        return dual
    return error


EXIT_WITHIN_S = 5.0


def exit_this_actor() -> None:
    """End this actor as `ray.actor.exit_actor` does, from any thread. Does not wait.

    Ray is asked, which takes it about 2.4 s from within the actor, and sometimes does nothing: then the process ends
    itself, which Ray takes for a crash.
    """
    ray.get_runtime_context().current_actor.__ray_terminate__.remote()
    last_resort = threading.Timer(EXIT_WITHIN_S, os._exit, (0,))
    last_resort.daemon = True
    last_resort.start()


def guard_actor_calls(instance: Any, lock: Any) -> Callable[[], None]:
    """Make every ordinary call of this process's actor hold `lock` while it runs. Returns how to undo it.

    Ray keeps one executor a method, a closure over the function: the function is replaced in there, because Ray has
    its own copies of everything around it.
    """
    found = []
    for info in list(_worker.global_worker.function_actor_manager._function_execution_info.values()):
        executor = info.function
        method = getattr(executor, "method", None)
        name = getattr(executor, "name", "")
        if method is None or name.startswith("__") or getattr(type(instance), name, None) is None:
            continue
        cell = executor.__closure__[executor.__code__.co_freevars.index("method")]
        found.append((cell, cell.cell_contents, _holding(cell.cell_contents, lock)))
    for cell, _, guarded in found:
        cell.cell_contents = guarded

    def restore() -> None:
        for cell, original, _ in found:
            cell.cell_contents = original

    return restore


def _holding(method: Callable[..., Any], lock: Any) -> Callable[..., Any]:
    if isinstance(method, types.MethodType):  # a class method: Ray sees that it is bound, and passes no instance
        return types.MethodType(_holding(method.__func__, lock), method.__self__)
    if inspect.isgeneratorfunction(method):

        @functools.wraps(method)
        def items(*args: Any, **kwargs: Any) -> Any:
            with lock:
                yield from method(*args, **kwargs)

        return items

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return method(*args, **kwargs)

    return call


def dag_node(node: Any) -> tuple[Any, ...] | None:
    """What a node of `ray.dag` says: ("input",), ("attribute", base, how, key), ("call", actor, method, args, kwargs,
    num_returns, how many calls were bound on this handle before), ("output", call, index), ("multiple", nodes), or
    ("other",). None for anything else."""
    import sys

    if "ray.dag" not in sys.modules:  # nobody has made one
        return None
    from ray import dag

    if not isinstance(node, dag.DAGNode):
        return None
    if isinstance(node, dag.InputNode):
        return ("input",)
    if isinstance(node, dag.InputAttributeNode):
        how = "attr" if node._accessor_method == "__getattr__" else "item"
        return "attribute", node._dag_input_node, how, node._key
    if isinstance(node, dag.MultiOutputNode):
        return "multiple", list(node.get_args())
    if type(node) is dag.ClassMethodNode:  # a collective is one of a class derived from it
        if node.is_class_method_output:
            return "output", node.class_method_call, node.output_idx
        actor = node._get_actor_handle()
        if actor is not None:
            bound = node.get_args(), node.get_kwargs()
            return "call", actor, node.get_method_name(), *bound, node.num_returns, node._get_bind_index()
    return ("other",)


def dag_users(node: Any) -> list[Any]:
    """The nodes of `ray.dag` that were made from this one."""
    return list(getattr(node, "_downstream_nodes", ()))


def actor_loop() -> Any:
    """The event loop on which this process's asyncio actor runs its methods; None if it is no such actor."""
    core = _worker.global_worker.core_worker
    if not core.current_actor_is_asyncio():
        return None
    loop, _ = core.get_event_loop(ray._raylet.PythonFunctionDescriptor("raylane", "any", "method"), "")
    return loop
