"""All that raylane uses of Ray without a documented name; every other module uses only the documented names of `ray`.

    other modules ──> _ray ──> _ray_names    table of the private names of Ray, and the check that Ray has them
                          └──> _ray_calls    functions and constants that use these names

An import of this module checks nothing, so that commands and tests that never use Ray work with any version of it. The
first use of a name of `_ray_calls` checks the private names, and copies all functions and constants to this module: the
later uses find them here, without a check and at no cost. This module keeps no other state.
"""
# ruff: noqa: F403, F405  # the names in `__all__` are those of `_ray_calls`, and a test compares both

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raylane import _ray_names

if TYPE_CHECKING:
    from raylane._ray_calls import *

__all__ = [
    "AUTHENTICATION_LOGGER",
    "EXIT_WITHIN_S",
    "INVOCATION_HOOK",
    "METHOD_OPTIONS",
    "OPTIONS_KEYWORD",
    "CloudPickler",
    "CommunicatorMetadata",
    "TensorTransportManager",
    "TensorTransportMetadata",
    "actor_class",
    "actor_id_of",
    "actor_loop",
    "actor_target",
    "adopt_ref",
    "answer_options_first",
    "bound_method",
    "call_identity",
    "called_method",
    "class_name_of",
    "current_actor_id",
    "dag_actor",
    "dag_collective",
    "dag_collective_calls",
    "dag_node",
    "dag_transport",
    "dag_users",
    "declared_options",
    "describe_self",
    "driver_node",
    "dumps",
    "empty_task_refs",
    "exit_this_actor",
    "get_objects_code",
    "hand_over_ref",
    "has_modules_by_value",
    "hook_of",
    "identity_of",
    "is_canceled",
    "is_counted_handle",
    "is_generator_method",
    "is_handle",
    "is_task_worker",
    "job_has_ended",
    "kv_delete",
    "kv_get",
    "kv_put_if_absent",
    "kv_sample",
    "kv_set",
    "living_actors",
    "node_ip",
    "on_out_of_scope",
    "raised_at",
    "raised_form",
    "register_tensor_transport",
    "session",
    "started_here",
    "state_of",
    "submit",
    "task_error",
    "tensor_transport_class",
    "token_headers",
    "untraced_method",
    "wrap_actor_calls",
]

CloudPickler: Any = _ray_names.find("ray.cloudpickle:CloudPickler") or pickle.Pickler
"""Pickler of Ray. Modules derive classes from it when they are imported, which must not fail before the check."""


def answer_options_first(answer: Callable[[Any, dict[str, Any]], Any]) -> None:
    """Let `answer(method, options)` answer calls of `actor.method.options(...)`; None passes them on to Ray.

    Modules call this function when they are imported, so it does nothing on a Ray that the check will refuse.
    """
    method_class = _ray_names.find("ray.actor:ActorMethod")
    original = getattr(method_class, "options", None)
    if original is None:
        return

    @functools.wraps(original)
    def options(method: Any, **options: Any) -> Any:
        reply = answer(method, options)
        return original(method, **options) if reply is None else reply

    method_class.options = options


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Load all names of `_ray_calls`. RaylaneError if the installed Ray lacks private names (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _ray_names.require()
        from raylane import _ray_calls

        globals().update({each: getattr(_ray_calls, each) for each in __all__ if each not in globals()})
        return globals()[name]
