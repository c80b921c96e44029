"""The only module that uses private names of Ray; `_ray_names.txt` is the table of them, with the reasons.

Loaded by `_ray` at its first use, after a check that the installed Ray has all names. Keeps no state of its own.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import random
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import ray
from ray._private import worker as _worker
from ray.cloudpickle import CloudPickler
from ray.experimental import CommunicatorMetadata as CommunicatorMetadata
from ray.experimental import TensorTransportManager as TensorTransportManager
from ray.experimental import TensorTransportMetadata as TensorTransportMetadata
from ray.experimental import internal_kv
from ray.experimental import register_tensor_transport as register_tensor_transport

from raylane import _ray_names

AUTHENTICATION_LOGGER = "ray._private.authentication"
INVOCATION_HOOK = "__ray_invocation_decorator__"
METHOD_OPTIONS = (
    "num_returns",
    "concurrency_group",
    "max_task_retries",
    "retry_exceptions",
    "generator_backpressure_num_objects",
    "enable_task_events",
)
"""Options that `ray.method` may write on a function, as `__ray_<name>__`."""
OPTIONS_KEYWORD = "_raylane_options"
"""Keyword that `raylane.method` adds to a method: options for one call."""
_KV_NAMESPACE = b"raylane"


def session() -> Any:
    """Return the object that stands for this process's session of a cluster; None when not connected. 0.2 us."""
    # Ray makes a Node for each `ray.init` and each worker process.
    worker = _worker.global_worker
    return worker.node if worker.connected else None


def started_here() -> bool:
    """Return True if this process started the Ray that it is connected to, which does not grow by itself."""
    return bool(getattr(session(), "head", False))


def current_actor_id() -> str | None:
    """Return the hexadecimal id of this process's actor, or None in a driver or task worker."""
    actor_id = _worker.global_worker.actor_id
    return None if actor_id is None or actor_id.is_nil() else actor_id.hex()


def call_identity() -> tuple[str, bytes] | None:
    """Return (function name, task id) of the call that Ray runs in this thread or coroutine; None outside calls."""
    worker = _worker.global_worker
    if worker.mode != _worker.WORKER_MODE:
        return None
    core = worker.core_worker
    name = core.get_current_task_function_name()
    if not name:  # outside of tasks
        return None
    return name, core.get_current_task_id().binary()


@functools.cache
def get_objects_code() -> types.CodeType:
    """Return the code object of `Worker.get_objects`, to recognise its stack frames: every `ray.get` runs it."""
    # Ray decorates the method, and frames show the innermost function.
    code: types.CodeType = inspect.unwrap(_worker.Worker.get_objects).__code__
    return code


def is_task_worker() -> bool:
    """Return True if this process runs plain tasks, which Ray assigns to worker processes arbitrarily."""
    worker = _worker.global_worker
    return bool(worker.mode == _worker.WORKER_MODE and worker.actor_id.is_nil())


def actor_class() -> type | None:
    """Return the class of the actor in this process; None if there is none."""
    worker = _worker.global_worker
    actor_id = worker.actor_id
    instance = None if actor_id is None or actor_id.is_nil() else worker.actors.get(actor_id)
    return None if instance is None else type(instance)


def actor_target(name: str) -> Any:
    """Return the attribute of the actor's class under a method name, without Ray's tracing wrapper.

    None if this process is not an actor, or its class has no such attribute.
    """
    attribute = inspect.getattr_static(actor_class(), name, None)
    if isinstance(attribute, classmethod | staticmethod):
        attribute = attribute.__func__
    return _untraced(attribute)


def _untraced(function: Any) -> Any:
    """Return a function without the tracing wrapper that Ray puts around every method."""
    # functools.wraps copies the function's name to the wrapper, but not the name of its code object.
    while getattr(getattr(function, "__code__", None), "co_name", "") == "_resume_span":
        function = function.__wrapped__
    return function


def untraced_method(instance: Any, name: str) -> Any:
    """Return `instance.name` without Ray's tracing wrapper, which costs a microsecond per call; None if missing."""
    method: Any = getattr(instance, name, None)
    function = getattr(method, "__func__", None)
    plain = _untraced(function)
    return method if function is None or plain is function else plain.__get__(method.__self__)


def describe_self() -> str:
    """Return the name of this process for error messages: its actor and class, `the driver` or `a task worker`."""
    if (cls := actor_class()) is not None:
        return f"Actor({cls.__name__}, {current_actor_id()})"
    return "the driver" if _worker.global_worker.mode == _worker.SCRIPT_MODE else "a task worker"


def node_ip() -> str:
    """Return the IP address of this node, as Ray's other nodes reach it."""
    return str(ray.util.get_node_ip_address())


def is_canceled() -> bool:
    """Return True if the task that runs in this thread was cancelled."""
    return bool(_worker.global_worker.core_worker.is_canceled())


def on_out_of_scope(ref: Any, callback: Callable[[bytes], None]) -> None:
    """Call `callback(object id)` once, on a thread of Ray, when no process of the cluster can reach `ref` any more.

    If that is so already, call it at once, on this thread. ValueError if this process does not own the ref. The
    callback may use Ray; Ray logs an exception in the callback and ignores it.
    """
    if _worker.global_worker.core_worker.add_object_out_of_scope_callback(ref, callback) is False:
        callback(ref.binary())


def identity_of(method: Any) -> tuple[bytes, str]:
    """Return the binary id of the actor, and the name, of a method of a handle."""
    return method._actor._actor_id.binary(), method._method_name


def _return_nothing(count: int) -> list[None]:
    """Return `count` times None: the body of an empty task, which runs in some worker of this node."""
    # Defined in this module, because importing it loads Ray and nothing else into that worker.
    return [None] * count


@functools.cache
def _empty_task() -> Any:
    return ray.remote(num_cpus=0, max_retries=0)(_return_nothing)


def empty_task_refs(count: int) -> list[Any]:
    """Return `count` (at least 2) fresh refs owned by this process: the returns of one task, which may run later."""
    # Soft affinity: this node if it has room, otherwise any other one.
    node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=True
    )
    # One task for many refs: a task costs about a millisecond, and its refs are used up one by one.
    task = _empty_task().options(
        num_returns=count, name="raylane anchors", scheduling_strategy=node, enable_task_events=False
    )
    return list(task.remote(count))


def called_method(invocation: Any) -> Any:
    """Return the method of a handle that an `invocation` calls, as Ray gives it to INVOCATION_HOOK; None for a task."""
    cells = invocation.__closure__ or ()
    return next((c.cell_contents for c in cells if isinstance(c.cell_contents, ray.actor.ActorMethod)), None)


def hand_over_ref(ref: Any) -> tuple[bytes, bytes]:
    """Return (object id, owner address) for `adopt_ref` in another process; keep `ref` until that call is done."""
    _, owner, _ = _worker.global_worker.core_worker.serialize_object_ref(ref)
    return ref.binary(), owner


def token_headers() -> dict[str, str]:
    """Return the headers by which Ray lets this process into a cluster; none without RAY_AUTH_MODE=token."""
    loader = ray._raylet.AuthenticationTokenLoader.instance()
    return dict(loader.get_token_for_http_header()) if loader.has_token() else {}


def state_of(actor_id: str) -> str:
    """Return Ray's word for the state of an actor; "DEAD" if Ray will not restart it. Asks Ray's control service."""
    from ray._private import state

    # An actor without an entry was removed from the list some time after its death.
    return str(state.actors(actor_id=actor_id).get("State", "DEAD"))


def job_has_ended(job: str) -> bool:
    """Return True if the driver of a job (hexadecimal id) has ended. Asks Ray's control service."""
    from ray._private import state

    return any(entry["JobID"] == job and entry["IsDead"] for entry in state.jobs())


def driver_node(job: str) -> str | None:
    """Return the id of the node on which the driver of a job (hexadecimal id) runs; None if it is not known."""
    from ray._private import state

    addresses = {entry["DriverIPAddress"] for entry in state.jobs() if entry["JobID"] == job}
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] in addresses]
    # Several nodes of one host share its address: drivers are on the head of the cluster as a rule.
    nodes.sort(key=lambda node: "node:__internal_head__" not in node["Resources"])
    return nodes[0]["NodeID"] if nodes else None


def living_actors() -> dict[str, str]:
    """Return the class name of every actor of the cluster that is not dead, by hexadecimal id. For leak checks."""
    from ray._private import state

    return {actor_id: info["ActorClassName"] for actor_id, info in state.actors().items() if info["State"] != "DEAD"}


def adopt_ref(binary: bytes, owner: bytes) -> Any:
    """Return a ref to the object that another process passed with `hand_over_ref`, counted by Ray from now on."""
    ref = ray.ObjectRef(binary)
    _worker.global_worker.core_worker.deserialize_and_register_object_ref(binary, ray.ObjectRef.nil(), owner, b"")
    return ref


def tensor_transport_class(name: str) -> type[Any] | None:
    """Return the class that is registered with Ray as the tensor transport of this name, or None."""
    from ray.experimental.rdt import util

    manager_info = util.transport_manager_info.get(name)
    return None if manager_info is None else manager_info.transport_manager_class


def kv_get(key: str) -> bytes | None:
    """Return the value of a key in Ray's internal key-value store, or None."""
    value: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=_KV_NAMESPACE)
    return value


def kv_set(key: str, value: bytes) -> None:
    """Store a value under a key, in place of an earlier one."""
    internal_kv._internal_kv_put(key.encode(), value, overwrite=True, namespace=_KV_NAMESPACE)


def kv_delete(key: str) -> None:
    """Delete a key; unknown keys are ignored."""
    internal_kv._internal_kv_del(key.encode(), namespace=_KV_NAMESPACE)


def kv_sample(prefix: str, most: int) -> dict[str, bytes]:
    """Return the entries whose keys begin with `prefix`; a random selection of `most` entries if there are more."""
    # A random selection, so that many processes that delete stale entries cover all of them in the end.
    keys: list[bytes] = internal_kv._internal_kv_list(prefix.encode(), namespace=_KV_NAMESPACE)
    chosen = random.sample(keys, most) if len(keys) > most else keys
    stored = _worker.global_worker.gcs_client.internal_kv_multi_get(chosen, _KV_NAMESPACE) if chosen else {}
    return {key.decode(): value for key, value in stored.items()}


def kv_put_if_absent(key: str, value: bytes) -> bytes:
    """Store a value unless the key has one already. Returns the value that is stored afterwards."""
    # Several processes may do this at the same time; reading the value back gives all of them the same one.
    internal_kv._internal_kv_put(key.encode(), value, overwrite=False, namespace=_KV_NAMESPACE)
    return kv_get(key) or value


def bound_method(method: Any) -> tuple[Any, str, Any, inspect.Signature | None] | None:
    """Return (actor handle or object, method's name, num_returns, signature without self), or None for a non-method."""
    if isinstance(method, ray.actor.ActorMethod):
        shown = method._signature
        if shown is not None:
            # Users never pass these: Ray's tracing adds the first one to every method, raylane.method the second.
            hidden = ("_ray_trace_ctx", OPTIONS_KEYWORD)
            shown = inspect.Signature([parameter for parameter in shown if parameter.name not in hidden])
        return method._actor, method._method_name, method._num_returns, shown
    if inspect.ismethod(method) and not isinstance(method.__self__, ray.actor.ActorMethod):  # not `method.remote`
        count = getattr(method.__func__, "__ray_num_returns__", 1)
        return method.__self__, method.__name__, count, inspect.signature(method)
    return None


def hook_of(method: Any) -> Any:
    """Return the function that the method of a handle has as INVOCATION_HOOK, or None."""
    return method._decorator


def is_generator_method(method: Any) -> bool:
    """Return True if the method of a handle is a generator."""
    return bool(method._is_generator)


def declared_options(method: Any) -> dict[str, Any]:
    """Return the options that `ray.method` declared for the method of a handle, except for the number of returns."""
    names = ("max_task_retries", "retry_exceptions", "enable_task_events")
    options = {name: getattr(method, f"_{name}") for name in names if getattr(method, f"_{name}") is not None}
    # Only the actor itself and its class know the group. Ray has loaded the class wherever a handle was unpickled.
    load = _worker.global_worker.function_actor_manager.load_actor_class
    actor = method._actor
    actor_class = load(actor._actor_id.job_id, actor._ray_actor_creation_function_descriptor)
    group = getattr(getattr(actor_class, method._method_name, None), "__ray_concurrency_group__", None)
    return options if group is None else options | {"concurrency_group": group}


def submit(method: Any, args: Any, kwargs: dict[str, Any], options: dict[str, Any]) -> Any:
    """Submit a call of a handle's method with options of Ray."""
    return method._remote(args=args, kwargs=kwargs, **options)


def is_handle(actor: Any) -> bool:
    """Return True for the handle of an actor."""
    return isinstance(actor, ray.actor.ActorHandle)


def is_counted_handle(value: Any) -> bool:
    """Return True for an actor handle that keeps its actor alive, as those of `ray.get_actor` do not."""
    return is_handle(value) and not value._ray_weak_ref


def class_name_of(actor: Any) -> str:
    """Return the class name of an actor (given its handle) or of a plain object."""
    if not is_handle(actor):
        return type(actor).__name__
    # A class in a function or another class has a qualified name.
    return str(actor._ray_actor_creation_function_descriptor.class_name).rpartition(".")[2]


def actor_id_of(actor: Any) -> str:
    """Return the hexadecimal id of an actor, given its handle."""
    return str(actor._actor_id.hex())


def has_modules_by_value() -> bool:
    """Return True if `ray.cloudpickle.register_pickle_by_value` was called for a module."""
    return bool(ray.cloudpickle.list_registry_pickle_by_value())


def dumps(value: Any, persistent_id: Callable[[Any], Any] | None = None) -> bytes:
    """Pickle a value with cloudpickle, which accepts classes and functions of a script, refs and handles.

    `persistent_id` as of `pickle.Pickler`. TypeError for a node of `ray.dag` in the value, which no execution would
    replace by a value.
    """
    dag = _dag()
    if dag is None and persistent_id is None:
        return bytes(ray.cloudpickle.dumps(value))

    class Refusing(CloudPickler):  # type: ignore[misc]  # Ray gives mypy no types
        def persistent_id(self, value: Any) -> Any:
            return None if persistent_id is None else persistent_id(value)

        def reducer_override(self, value: Any) -> Any:
            if dag is not None and isinstance(value, dag.DAGNode):
                raise TypeError(
                    f"could not pickle a value: {type(value).__name__} of ray.dag has no value yet. Pass nodes "
                    "directly or in lists, tuples and values of dicts, not inside other objects"
                )
            return super().reducer_override(value)

    file = io.BytesIO()
    Refusing(file).dump(value)
    return file.getvalue()


def task_error(where: str, traceback_text: str, cause: BaseException) -> BaseException:
    """Return the error that `ray.get` raises for a call that raised `cause`, with the remote traceback's text.

    The error is also an instance of the class of `cause`.
    """
    # Pass process and node explicitly: RayTaskError would fill in those of the process that unpickles the error.
    process = {"proctitle": where, "pid": os.getpid(), "ip": node_ip()}
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(cause))
    except BaseException as obstacle:  # a user's __reduce__ may raise anything, and Ray expects two classes only
        kind = f"{type(cause).__module__}.{type(cause).__qualname__}"
        text = f"a {kind}, which cannot be pickled and unpickled ({obstacle!r}), was raised:\n{traceback_text}"
        cause = ray.exceptions.RayError(text)
    error: BaseException = ray.exceptions.RayTaskError(where, traceback_text, cause, **process)
    return error


def raised_at(error: BaseException | None) -> str | None:
    """Return the `where` of `task_error`, None for other errors and for errors in their raised form."""
    return error.function_name if isinstance(error, ray.exceptions.RayTaskError) else None


def raised_form(error: BaseException) -> BaseException:
    """Return a RayTaskError in the form that its caller gets (also an instance of its cause's class); else `error`."""
    if isinstance(error, ray.exceptions.RayTaskError):
        dual: BaseException = error.as_instanceof_cause()
        return dual
    return error


EXIT_WITHIN_S = 5.0
"""Seconds that Ray has to end an actor before the process ends itself."""


def exit_this_actor() -> None:
    """End this actor as `ray.actor.exit_actor` does, but from any thread. Does not wait.

    Ray takes about 2.4 s to end an actor on its own request, and sometimes ignores the request. In that case the
    process ends itself after EXIT_WITHIN_S, which Ray reports as a crash.
    """
    ray.get_runtime_context().current_actor.__ray_terminate__.remote()
    last_resort = threading.Timer(EXIT_WITHIN_S, os._exit, (0,))
    last_resort.daemon = True
    last_resort.start()


def wrap_actor_calls(instance: Any, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace every method that Ray calls in this process's actor by `wrap(method)`. Returns a function that undoes it.

    Ray keeps one executor for each method, a closure over the function. The function is replaced inside the closure,
    because Ray keeps its own copies of the executors.
    """
    wrapped = []
    for info in list(_worker.global_worker.function_actor_manager._function_execution_info.values()):
        executor = info.function
        method = getattr(executor, "method", None)
        name = getattr(executor, "name", "")
        if method is None or name.startswith("__") or getattr(type(instance), name, None) is None:
            continue
        cell = executor.__closure__[executor.__code__.co_freevars.index("method")]
        wrapped.append((cell, cell.cell_contents, wrap(cell.cell_contents)))
    for cell, _, guarded in wrapped:
        cell.cell_contents = guarded

    def restore() -> None:
        for cell, original, _ in wrapped:
            cell.cell_contents = original

    return restore


def _dag() -> Any:
    """Return `ray.dag`; None if nothing has imported it, because then no node can exist."""
    return _checked_dag() if "ray.dag" in sys.modules else None


@functools.cache
def _checked_dag() -> Any:
    # When `_ray` checked the names of Ray, this module may not have been imported.
    _ray_names.require()
    return sys.modules["ray.dag"]


def dag_node(node: Any) -> tuple[Any, ...] | None:
    """Return the content of a node of `ray.dag` as a tuple, or None for any other object.

    The tuple is one of ("input",), ("attribute", base, how, key), ("call", actor, method, args, kwargs, num_returns,
    number of calls bound before on this handle), ("output", call, index), ("multiple", nodes), ("collective",
    operation, inputs, that number) and ("other",).
    """
    dag = _dag()
    if dag is None or not isinstance(node, dag.DAGNode):
        return None
    if isinstance(node, dag.InputNode):
        return ("input",)
    if isinstance(node, dag.InputAttributeNode):
        how = "attr" if node._accessor_method == "__getattr__" else "item"
        return "attribute", node._dag_input_node, how, node._key
    if isinstance(node, dag.MultiOutputNode):
        return "multiple", list(node.get_args())
    if type(node) is dag.ClassMethodNode:  # collectives have a derived class, which this must not match
        if node.is_class_method_output:
            return "output", node.class_method_call, node.output_idx
        actor = node._get_actor_handle()
        if actor is not None:
            bound = node.get_args(), node.get_kwargs()
            return "call", actor, node.get_method_name(), *bound, node.num_returns, node._get_bind_index()
    if isinstance(node, dag.CollectiveOutputNode):
        if node.is_class_method_output:
            return "output", node.class_method_call, node.output_idx
        return "collective", node.collective_op, list(node.get_args()), node._get_bind_index()
    return ("other",)


def dag_collective(operation: Any) -> tuple[str, str | None, list[Any]]:
    """Return the kind of a collective operation of `ray.dag`, its reduction (None for allgather), and its actors."""
    op = operation._op
    kind = type(op).__name__.removesuffix("Op").lower()
    return kind, op.reduceOp.name if hasattr(op, "reduceOp") else None, list(operation.actor_handles)


def dag_collective_calls(node: Any) -> list[Any]:
    """Return the nodes of all actors that take part in the collective of this node of `ray.dag`, in any order."""
    # Ray's operation knows the actors, not the nodes: search the graph, in both directions.
    calls, seen, waiting = [], set[int](), [node]
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        waiting += [*current._upstream_nodes, *current._downstream_nodes]
        # Not getattr: on an InputNode it would make an input of that name.
        if vars(current).get("_collective_op") is node._collective_op:
            calls.append(current)
    return calls


def dag_actor(node: Any) -> Any:
    """Return the handle of the actor that a call or a collective of `ray.dag` runs in."""
    return node._get_actor_handle()


def dag_transport(node: Any) -> tuple[str, str]:
    """Return the transport and the target device that were chosen for the value of a node of `ray.dag`.

    The transport is "auto", "cpu" or "accelerator".
    """
    hint = node._original_type_hint or node.type_hint
    device = getattr(hint, "device", None)
    return getattr(hint, "transport", "auto"), "default" if device is None else device.value


def dag_users(node: Any) -> list[Any]:
    """Return the nodes of `ray.dag` that use this node."""
    return list(getattr(node, "_downstream_nodes", ()))


def actor_loop() -> Any:
    """Return the event loop on which this process's asyncio actor runs its methods; None in any other process."""
    core = _worker.global_worker.core_worker
    if not core.current_actor_is_asyncio():
        return None
    loop, _ = core.get_event_loop(ray._raylet.PythonFunctionDescriptor("raylane", "any", "method"), "")
    return loop
