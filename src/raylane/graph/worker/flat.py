"""The short path of an executor: one message in, one call, one message out.

After a pause a message runs out of cold caches, so the number of steps on its way counts, not their speed in a loop.
`shorten` therefore puts the steps of the usual case into one function when the graph is compiled. Everything else
(errors, large values, several inputs, several graphs with different settings) takes the general way of the executor.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable
from types import CoroutineType
from typing import Any

from ray.exceptions import RayError

from raylane.graph.channels.ring import ROOM_BYTES, WAKE, RingWriter
from raylane.graph.values.failures import Failure
from raylane.graph.values.message import VALUE, Message
from raylane.graph.worker.executor import Executor


def _message(body: bytes, value: Any) -> Message:
    """Return the message of a value that is pickled already."""
    return Message(VALUE, body)


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
    poll, call, loads, write = inbound.poll, task.call, pickle.loads, edge.writer.write_small
    number, encoder, modules = task.index, executor.encoder, sys.modules
    started, returned, sent = executor.recorder.started, executor.recorder.returned, executor.recorder.sent

    def run() -> bool:
        """Go on in the general way after the message was read."""
        executor.run(task)
        executor.end_task()
        return True

    def step() -> bool:
        message = poll()
        if message is None:
            return False
        kind, flags, body = message
        # Kept in the executor, because reports of failures carry the flag too.
        executor.flags = wakes = flags & WAKE
        if kind != VALUE or body is None or executor.before_user_code is not None:
            executor.read(inbound, kind, flags, body)
            return run()
        inbound.bytes += len(body)
        # Unpickling runs code of the value's class, which may raise anything.
        try:
            argument = loads(body)
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
        if not encoder.knows_torch and "torch" in modules:
            encoder.renew()
        encode: Callable[[Any], Message] = encoder.encode
        if type(result) is not Failure:
            try:
                body = encoder.small(result)
            except BaseException as error:
                encoder.renew()
                # A GraphResult inside has failed or has timed out: pickling must not begin again. All others, such as
                # tensors, are left to `encode`; keeping the error for it would be a cycle of references.
                if isinstance(error, RayError) or not isinstance(error, Exception):
                    result = executor.unsendable(error, task, edge)
            else:
                if body is not None and len(body) <= ROOM_BYTES:
                    write(executor.execution, VALUE, wakes, body)
                    sent(number, executor.execution)
                    executor.execution += 1
                    return True
                encode = encoder.rest if body is None else functools.partial(_message, body)
        executor.deliver(task, result, encode)
        executor.end_task()
        return True

    executor.use_for_ready(step)
