"""Child processes for tests that need no Ray.

Children are forked from a server process that has imported their modules already, so a child starts in milliseconds and
has none of the threads of this process.

child = start(work, 3)        `work` must be a module-level function
child.result()                return value of `work`; an exception in the child fails the test

`start_code(text, x=3)` runs source text instead, in a module without imports (such as torch); its result is `answer`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
from tests.forkservers import CONTEXT, Server

_server = Server(["raylane.graph.channels.ring", "numpy"])


class Child:
    """A process that runs one function, whose first argument is the child's end of the pipe."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = _server.start(_run, theirs, function, args)
        theirs.close()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def send(self, value: Any) -> None:
        """Send a value to the child."""
        self._pipe.send(value)

    def receive(self, timeout_s: float = 30) -> Any:
        """Return the next value that the child sent."""
        kind, value = self._next(timeout_s)
        assert kind == "sent", value
        return value

    def result(self, timeout_s: float = 30) -> Any:
        """Wait for the child and return the function's result; fail the test if the function raised."""
        kind, value = self._next(timeout_s)
        self._close(timeout_s)
        if kind == "raised":
            pytest.fail(f"exception in the child:\n{value}")
        assert kind == "returned", f"the child sent {value!r}, which the test did not receive"
        return value

    def kill(self) -> None:
        """Kill the child with SIGKILL and wait for its end."""
        self.process.kill()
        self._close(30)

    def _close(self, timeout_s: float) -> None:
        self._pipe.close()
        self.process.join(timeout_s)
        self.process.close()

    def _next(self, timeout_s: float) -> tuple[str, Any]:
        assert self._pipe.poll(timeout_s), f"process {self.pid} sent nothing for {timeout_s} s"
        try:
            found: tuple[str, Any] = self._pipe.recv()
        except EOFError:
            self.process.join(timeout_s)
            pytest.fail(f"process {self.pid} ended with exit code {self.process.exitcode}")
        return found


class Pipe:
    """The child's end of the pipe."""

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
    """Run `function(pipe, *args)` in a child process."""
    return Child(function, args)


def start_code(text: str, **names: Any) -> Child:
    """Run source text with these names defined, in a child process."""
    return Child(_execute, (text, names))


def _execute(pipe: Pipe, text: str, names: dict[str, Any]) -> Any:
    known = {"pipe": pipe, **names}
    exec(text, known)
    return known.get("answer")
