"""The short paths of the driver: one small input to one ring, one result from one ring.

As in `worker.flat`, the steps of the usual case are put into one function each when the graph is compiled, because the
number of steps counts after a pause. Everything else takes the general way of `Submitter` and `Collector`.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable
from typing import Any

from raylane.core.deadline import Deadline
from raylane.graph.channels.ring import ELSEWHERE, ROOM_BYTES, WAKE, RingWriter, fits_slot
from raylane.graph.driver.collect import CHECK_S, Collector
from raylane.graph.driver.result import GraphResult
from raylane.graph.driver.submit import Submitter
from raylane.graph.values.message import BYTES, TEXT, VALUE, Message, kind_as_it_is


def submit_function(submitter: Submitter, collector: Collector) -> Callable[..., GraphResult]:
    """Return `Submitter.submit`, or a shorter one for graphs whose one argument goes to one ring as it is."""
    if submitter.single_input is None:
        return submitter.submit
    writer, value = submitter.single_input
    if not isinstance(writer, RingWriter):
        return submitter.submit
    # Looked up once: locals of the closure are found without a dictionary.
    executions, lock, lifecycle = submitter.executions, submitter.lock, submitter.lifecycle
    pending, bridge, encoder, empty = executions.pending, collector.bridge, submitter.encoder, submitter.empty
    write, write_parts = writer.write_small, writer.write_parts
    edges, max_inflight = collector.edge_count, submitter.max_inflight
    general, running_loop = submitter.submit, asyncio._get_running_loop

    def submit(args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float | None) -> GraphResult:
        if kwargs or len(args) != 1 or lifecycle.error is not None or not lock.lock.acquire(False):
            return general(args, kwargs, timeout_s)
        try:
            # The marks of `locks.RecoverableLock`, written out: a call here could be interrupted.
            lock.entries += 1
            lock.held = True
            encoder.renew_for_imports()
            argument = args[0]
            message: Message | None = None
            sent: Any = argument
            buffers: Any = ()
            fits = True
            if not (kind := kind_as_it_is(argument)):
                try:
                    body = encoder.small(argument)
                    message = Message(VALUE, body) if body is not None else encoder.rest(argument)
                except BaseException as error:
                    message = encoder.unusual(argument, error)
                kind, sent, buffers, _ = message
                fits = fits_slot(len(sent), buffers) if buffers else len(sent) <= ROOM_BYTES
            number = executions.submitted
            if fits and number - executions.completed < max_inflight:
                # Outside of asyncio no message needs to wake a loop, and the actors save a system call.
                wakes = bridge.active and running_loop() is not None
                result = GraphResult(collector, number, edges, empty.copy(), wakes)
                try:
                    pending.append(result)  # before the message: its answer may come at once
                    executions.submitted = number + 1
                    if buffers:
                        write_parts(number, kind, WAKE if wakes else 0, sent, buffers)
                    else:
                        write(number, kind, WAKE if wakes else 0, sent)
                except BaseException as error:
                    submitter.interrupted(number, error)
                    raise
                return result
            message = message or encoder.encode(argument)
            return submitter.admit([(writer, message, value)], empty.copy(), timeout_s)
        finally:
            lock.held = False
            lock.lock.release()

    return submit


def shorten_wait(collector: Collector) -> None:
    """Give the collector a shorter way to wait, if the output is the value of the one edge to the driver."""
    if collector.edge_count != 1 or collector.output_value is None:
        return
    executions, lock, doorbell, (edge,) = collector.executions, collector.lock, collector.doorbell, collector.edges
    # The driver may also read values that only mark the end of a call, and values of which it has to fetch a part.
    if edge.value != collector.output_value or edge.fetched is not None:
        return
    empty = [None] * len(collector.plan.values)
    pending, early_failures, records = executions.pending, executions.early_failures, executions.records
    wait, poll, loads, clock = doorbell.wait, edge.poll, pickle.loads, time.perf_counter
    value_in_slot = edge.reader.value_in_slot
    # The functions get the collector as an argument: a reference to it would be a cycle, and a graph that is dropped
    # must end at once.

    def read(collector: Collector, result: GraphResult) -> None:
        """Read one message after a post of the doorbell."""
        try:  # also around `poll`: Ctrl-C may be raised when it has returned
            message = poll()
            if message is None:
                return
            kind, flags, body = message
            if kind not in (VALUE, BYTES, TEXT) or flags & ELSEWHERE or pending[0] is not result or result._done:
                collector.read(edge, kind, flags, body)
                return
            try:
                if kind == VALUE and body is not None:
                    edge.bytes += len(body)
                    value = loads(body)
                else:
                    value = value_in_slot(kind, body, edge)
            except Exception as error:
                collector.arrived(edge, result, empty.copy(), collector.unreadable(edge, error))
                return
            # The same as `Collector.arrived` for one edge and a value.
            pending.popleft()
            executions.completed += 1
            records.append((result.number, result.submitted_s, clock()))
            result._values = None
            result.complete(value, None)
        except BaseException as error:  # Ctrl-C
            collector.interrupted(error)
            raise

    def short_wait(collector: Collector, result: GraphResult, timeout_s: float | None) -> bool:
        if (timeout_s is not None and timeout_s < CHECK_S) or not lock.lock.acquire(False):
            return collector.collect_until(result._is_done, Deadline(timeout_s))
        start = clock()
        try:
            lock.entries += 1
            lock.held = True
            # Check again with the lock: another leader may have completed the result since the caller looked, and
            # then the doorbell may stay silent for a long time.
            # Failures that actors have reported early are left to the general way.
            if not result._done and wait(CHECK_S) and not early_failures:
                read(collector, result)
        finally:
            lock.held = False
            lock.lock.release()  # before any other call: Ctrl-C is raised at calls
            if collector.followers or collector.missed_wake:
                collector.after_reading()
        if result._done:
            return True
        left_s = None if timeout_s is None else max(0.0, timeout_s - (clock() - start))
        return collector.collect_until(result._is_done, Deadline(left_s))

    collector.short_wait = short_wait
