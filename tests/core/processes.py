"""Real processes for tests that need no Ray: forked from a server that has imported what they use, so that one starts
in milliseconds, and without the threads of this process.

child = start(work, 3)        `work` is a function of a module, not of a test
child.result()                what it returned; a failure there is one here

`start_code(text, x=3)` runs a text instead: its module has imported nothing, torch for one, and `answer` is its result.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["raylane.graph.channels.ring", "numpy"])


class Child:
    """A process that runs one function. `send` and `receive` talk with it over the pipe that the function gets as its
    first argument."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_run, args=(theirs, function, args), daemon=True)
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def send(self, value: Any) -> None:
        self._pipe.send(value)

    def receive(self, timeout_s: float = 30) -> Any:
        """What the function sent."""
        kind, value = self._next(timeout_s)
        assert kind == "sent", value
        return value

    def result(self, timeout_s: float = 30) -> Any:
        kind, value = self._next(timeout_s)
        self._close(timeout_s)
        if kind == "raised":
            pytest.fail(f"in the child:\n{value}")
        assert kind == "returned", f"the child has sent {value!r}, which nobody received"
        return value

    def kill(self) -> None:
        self.process.kill()
        self._close(30)

    def _close(self, timeout_s: float) -> None:
        self._pipe.close()
        self.process.join(timeout_s)
        self.process.close()

    def _next(self, timeout_s: float) -> tuple[str, Any]:
        assert self._pipe.poll(timeout_s), f"process {self.pid} says nothing for {timeout_s} s"
        try:
            found: tuple[str, Any] = self._pipe.recv()
        except EOFError:
            self.process.join(timeout_s)
            pytest.fail(f"process {self.pid} has ended with {self.process.exitcode}")
        return found


class Pipe:
    """The child's end."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, value: Any) -> None:
        self._connection.send(("sent", value))

    def receive(self) -> Any:
        return self._connection.recv()


def _run(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = "returned", function(Pipe(connection), *args)
    except BaseException:
        answer = "raised", traceback.format_exc()
    connection.send(answer)


def start(function: Callable[..., Any], *args: Any) -> Child:
    """Run `function(pipe, *args)` in a process of its own."""
    return Child(function, args)


def start_code(text: str, **names: Any) -> Child:
    """Run a text with these names in a process of its own."""
    return Child(_execute, (text, names))


def _execute(pipe: Pipe, text: str, names: dict[str, Any]) -> Any:
    known = {"pipe": pipe, **names}
    exec(text, known)
    return known.get("answer")
