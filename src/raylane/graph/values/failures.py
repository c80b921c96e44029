"""Errors of calls as messages, and the placeholder that takes the place of a value that could not be computed.

Used by the executors of actors, by the driver and by the inline backend.
"""

from __future__ import annotations

import traceback
from typing import Generic, TypeVar

from raylane import _ray
from raylane.errors import GraphError
from raylane.graph.values.message import Message, encode_error

E = TypeVar("E")

OTHER_THREAD = (
    "raylane: methods of a compiled graph run on another thread of the actor than its constructor. Let a method of the "
    "graph create what belongs to one thread, or call the method with .remote() (docs/reference/graphs.md)."
)
"""Note on errors that speak of threads."""


class Failure(Generic[E]):
    """Placeholder for a value: the error that arrived instead.

    In an actor `error` is the encoded message, which is forwarded as it is; in the driver and in the inline backend it
    is the exception.
    """

    __slots__ = ("error",)

    def __init__(self, error: E) -> None:
        self.error = error


def error_message(error: BaseException, where: str) -> Message:
    """Encode an error that happened around a call at `where`.

    Errors of raylane's graphs are encoded as they are, because they name their place themselves.
    """
    return encode_error(error) if isinstance(error, GraphError) else raised_message(error, where)


def raised_message(error: BaseException, where: str) -> Message:
    """Encode an error that a method has raised, as Ray does: an instance of its class and of RayTaskError.

    This holds for a GraphError too: it belongs to another graph, which the method has used, and must not look like an
    error of this graph.
    """
    # Of sqlite3, threading.local, profilers. `str(error)` may raise, and this does not.
    if "thread" in "".join(traceback.format_exception_only(error)).lower():
        error.add_note(OTHER_THREAD)
    text = "".join(traceback.format_exception(error))
    return encode_error(_ray.task_error(where, text, error))
