"""The short path of an executor: one message in, one call, one message out.

After a pause a message runs out of cold caches, so the number of steps on its way counts, not their speed in a loop.
`shorten` therefore puts the steps of the usual case into one function when the graph is compiled. Everything else
(errors, large values, several inputs, several graphs with different settings) takes the general way of the executor.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from types import CoroutineType
from typing import Any

from raylane.graph.channels.ring import ELSEWHERE, ROOM_BYTES, WAKE, RingWriter, fits_slot
from raylane.graph.values.failures import Failure
from raylane.graph.values.message import BYTES, TEXT, VALUE, Message, kind_as_it_is
from raylane.graph.worker.executor import Executor, OutboundEdge, PreparedTask


def as_encoded(message: Message, _: Any) -> Message:
    """Return the message of a value that is encoded already."""
    return message


def sender(
    executor: Executor, task: PreparedTask, edge: OutboundEdge
) -> Callable[[Any, int], tuple[Any, Callable[[Any], Message]] | None]:
    """Return a function (result, flags) that sends what a task has returned to its one edge.

    It returns None; or, if the result has to take the general way, the arguments of `Executor.deliver`.
    """
    assert isinstance(edge.writer, RingWriter)
    number, encoder, sent = task.index, executor.encoder, executor.recorder.sent
    write, write_parts = edge.writer.write_small, edge.writer.write_parts

    def send(result: Any, flags: int) -> tuple[Any, Callable[[Any], Message]] | None:
        encoder.renew_for_imports()
        if kind := kind_as_it_is(result):
            write(executor.execution, kind, flags, result)
            sent(number, executor.execution)
            return None
        if type(result) is Failure:
            return result, encoder.encode
        try:
            try:
                body = encoder.small(result)
                message = Message(VALUE, body) if body is not None else encoder.rest(result)
            except BaseException as error:
                message = encoder.unusual(result, error)
        except BaseException as error:
            return executor.unsendable(error, task, edge), encoder.encode
        kind, pickled, buffers, _ = message
        if not (fits_slot(len(pickled), buffers) if buffers else len(pickled) <= ROOM_BYTES):
            return result, functools.partial(as_encoded, message)
        if buffers:
            write_parts(executor.execution, kind, flags, pickled, buffers)
        else:
            write(executor.execution, kind, flags, pickled)
        sent(number, executor.execution)
        return None

    return send


def shorten(executor: Executor) -> None:
    """Let an executor run its task by the short path in the usual case.

    The usual case is one task whose one argument is the one message that it needs, and whose result goes as it is to
    readers of this host.
    """
    if len(executor.tasks) != 1 or executor.lock is not None:
        return
    task = executor.tasks[0]
    if len(task.inputs) != 1 or len(task.outputs) != 1 or task.local or task.single_argument != task.inputs[0].value:
        return
    (inbound,), (edge,) = task.inputs, task.outputs
    if inbound.edge in executor.fetches.edges or edge.steps or not isinstance(edge.writer, RingWriter):
        return
    # Looked up once: locals of the closure are found without a dictionary.
    poll, value_in_slot = inbound.poll, inbound.reader.value_in_slot
    call, loads, send = task.call, pickle.loads, sender(executor, task, edge)
    started, returned = executor.recorder.started, executor.recorder.returned

    def run() -> bool:
        """Go on in the general way after the message was read."""
        executor.run(task)
        executor.end_task()
        return True

    def step() -> bool:
        polled = poll()
        if polled is None:
            return False
        kind, flags, body = polled
        # Kept in the executor, because reports of failures carry the flag too.
        executor.flags = wakes = flags & WAKE
        if kind not in (VALUE, BYTES, TEXT) or flags & ELSEWHERE or executor.before_user_code is not None:
            executor.read(inbound, kind, flags, body)
            return run()
        # Unpickling runs code of the value's class, which may raise anything.
        try:
            if kind == VALUE and body is not None:
                inbound.bytes += len(body)
                argument = loads(body)
            else:
                argument = value_in_slot(kind, body, inbound)
        except BaseException as error:
            executor.values[inbound.value] = executor.unreadable(error, inbound)
            return run()
        started()
        try:
            result = call(argument)
            if type(result) is CoroutineType:
                result = executor.run_coroutine(result)
        except BaseException as error:  # a cancelled coroutine too: a failed call must not end the loop
            result = executor.call_failed(task, error)
        returned()
        remaining = send(result, wakes)
        if remaining is None:
            executor.execution += 1
            return True
        executor.deliver(task, *remaining)
        executor.end_task()
        return True

    executor.use_for_ready(step)
