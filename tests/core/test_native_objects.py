"""Compiled objects of the short path: encoder of messages, section that one thread runs, result of an execution."""

from __future__ import annotations

import collections
import contextlib
import math
import pickle
import signal
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from raylane.core import native
from raylane.core.native import BUSY, BYTES, NOTHING, TEXT, VALUE


class Recoder(native.Encoder):
    """Encoder that notes what is not usual."""

    def __init__(self, most_kept: int = 1000, awaited: tuple[str, ...] = ()) -> None:
        super().__init__(Parts, Parts((NOTHING,)), self.modules, most_kept)
        self.awaited = awaited
        self.errors: list[BaseException] = []
        self.renew()

    modules: ClassVar[dict[str, Any]] = {}

    def renew(self) -> None:
        self.output: list[Any] = []
        self.buffers: list[Any] = []
        file = types.SimpleNamespace(write=self.output.append)
        made = pickle.Pickler(file, 5, buffer_callback=self.buffers.append)
        self.prepare(made.dump, made.clear_memo, self.output, self.buffers, self.awaited)

    def rest(self, value: Any) -> Any:
        return "rest"

    def unusual(self, value: Any, error: BaseException) -> Any:
        self.errors.append(error)
        raise error


class Parts(tuple[Any, ...]):
    __slots__ = ()


class Text(str):
    __slots__ = ()


def test_encoder_returns_usual_values_and_keeps_no_memo() -> None:
    encoder = Recoder()
    shared = [1, 2]
    for _ in range(3):  # a memo that is kept would write references to what the reader has never seen
        kind, body, buffers, held = encoder.encode({"a": shared, "b": shared})
        assert (kind, buffers, held) == (VALUE, (), None)
        assert pickle.loads(body) == {"a": [1, 2], "b": [1, 2]}
    assert type(encoder.small(1)) is Parts
    assert encoder.encode(None) == (NOTHING,)
    assert (encoder.output, encoder.buffers) == ([], [])


def test_large_bytes_and_ascii_need_no_pickle() -> None:
    encoder = Recoder()
    data, text = bytes(1 << 16), "x" * (1 << 16)
    assert encoder.encode(data) == (BYTES, data, (), data)
    kind, body, buffers, held = encoder.encode(text)
    assert (kind, bytes(body), buffers) == (TEXT, text.encode(), ())
    assert held is text
    for other in (data[1:], text[1:], text[1:] + "\u00e9", bytearray(data), Text(text)):
        assert encoder.encode(other) == "rest" or encoder.encode(other)[0] == VALUE
        encoder.renew()


@pytest.mark.parametrize(
    "found",
    [bytes(2000), "__main__", bytearray(200_000), pickle.PickleBuffer(b"x")],
    ids=["bytes", "main", "large-bytearray", "buffer"],
)
def test_encoder_leaves_the_parts_of_other_values(found: Any) -> None:
    encoder = Recoder()
    assert encoder.small(found) is None
    again = pickle.loads(b"".join(encoder.output), buffers=encoder.buffers)
    assert bytes(again) == bytes(found) if not isinstance(found, str) else again == found
    encoder.renew()
    assert encoder.encode(found) == "rest"


def test_encoder_gives_errors_to_the_subclass() -> None:
    encoder = Recoder()
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda") as raised:
        encoder.encode(lambda: None)
    assert encoder.errors == [raised.value]
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        encoder.small(lambda: None)
    assert len(encoder.errors) == 1
    with pytest.raises(ValueError, match="was not initialised"):
        native.Encoder(Parts, None, {}, 1).small(1)
    with pytest.raises(TypeError, match="messages are tuples"):
        native.Encoder(dict, None, {}, 1)  # type: ignore[arg-type]


def test_encoder_is_renewed_once_an_awaited_module_is_there() -> None:
    encoder = Recoder(awaited=("late",))
    first = encoder.output
    assert encoder.encode(1)[0] == VALUE
    assert encoder.output is first
    Recoder.modules["late"] = None
    try:
        assert encoder.encode(2)[0] == VALUE
        assert encoder.output is not first
    finally:
        del Recoder.modules["late"]


def test_section_is_run_by_one_thread_at_a_time() -> None:
    section = native.Section()
    assert section.run(0, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        section.run(0, divmod, 7, 0)
    assert not section.locked
    inside, leave = threading.Event(), threading.Event()

    def stay() -> bool:
        inside.set()
        assert section.locked
        assert section.runs_here()
        assert section.run(0, int) is BUSY  # it is no reentrant lock
        return leave.wait(20)

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(section.run(0, stay)))
    thread.start()
    assert inside.wait(20)
    assert section.locked
    assert not section.runs_here()
    assert section.run(0, int) is BUSY
    assert section.run(0.01, int) is BUSY
    waiting = threading.Thread(target=lambda: results.append(section.run(math.inf, int)))
    waiting.start()
    leave.set()
    for each in (thread, waiting):
        each.join(20)
    assert results == [True, 0]
    for wrong in ((), (0,), ("x", int)):
        with pytest.raises(TypeError):
            section.run(*wrong)
    assert not section.locked


@contextlib.contextmanager
def run_elsewhere(section: native.Section) -> Iterator[None]:
    """Let another thread run a section."""
    inside, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: section.run(0, lambda: inside.set() or leave.wait(20)))
    thread.start()
    assert inside.wait(20)
    yield
    leave.set()
    thread.join(20)


def test_reset_frees_a_section_that_another_thread_runs() -> None:
    section = native.Section()
    with run_elsewhere(section):
        section.reset()
        assert section.run(0, int) == 0


def test_ctrl_c_in_a_section_leaves_it_free() -> None:
    """Python raises KeyboardInterrupt between any two of its instructions: in 300 places, none leaves a lock."""
    section, counted = native.Section(), 0
    main = threading.main_thread().ident
    assert main is not None

    def count() -> None:
        nonlocal counted
        counted += 1

    def interrupt(stop: threading.Event, after_s: float) -> None:
        if not stop.wait(after_s):
            signal.pthread_kill(main, signal.SIGINT)

    for number in range(300):
        stop = threading.Event()
        thread = threading.Thread(target=interrupt, args=(stop, number * 1e-5))
        with contextlib.suppress(KeyboardInterrupt):
            try:
                thread.start()
                for _ in range(10_000_000):
                    assert section.run(0, count) is not BUSY
            finally:
                stop.set()
        with contextlib.suppress(KeyboardInterrupt):
            thread.join(20)
        assert not section.locked
        assert section.run(0, int) == 0
    assert counted > 300


def interrupted_wait(section: native.Section, timer: threading.Timer) -> None:
    try:
        timer.start()
        section.run(20, int)
    finally:
        timer.join()


def test_ctrl_c_ends_the_wait_for_a_section() -> None:
    section = native.Section()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    with run_elsewhere(section), pytest.raises(KeyboardInterrupt):
        interrupted_wait(section, timer)
    assert section.run(0, int) == 0


class Answer(native.Result):
    __slots__ = ("woken",)

    def wake(self) -> None:
        self.woken = True


def test_result_is_completed_once_and_lets_go_of_its_source() -> None:
    class Source: ...

    source = Source()
    gone = weakref.ref(source)
    result = Answer(source, 7, 2, [None], True)
    assert (result.number, result._messages_left, result._values, result._wakes_asyncio) == (7, 2, [None], True)
    assert (result._is_done(), result._value, result._error, result.leaf_errors) == (False, None, None, ())
    assert result._source is source
    del source
    result.complete([result], None)  # a cycle
    assert gone() is None
    assert result._is_done()
    assert result._value == [result]
    other = Answer(None, 0, 1, [], False)
    other._waiting = [1]
    error = ValueError("x")
    other.complete(None, error)
    assert (other.woken, other._error, other._done) == (True, error, True)
    with pytest.raises(TypeError, match="initialised once, with five values"):
        other.__init__(None, 0, 1, [], False)  # type: ignore[misc]
    with pytest.raises(TypeError, match="an error or None"):
        other.complete(1)  # type: ignore[call-arg]


def test_executions_end_in_their_order() -> None:
    recorder = native.Recorder(1, 10)
    executions = native.Executions(collections.deque(), recorder)
    results = [Answer(None, number, 2, [None, "value"], False) for number in range(4)]
    for result in results:
        executions.pending.append(result)
        executions.submitted += 1
    assert [executions.find(number) for number in (-1, 0, 3, 4)] == [None, results[0], results[3], None]
    assert executions.settle(results[0], 1) is False
    assert executions.settle(results[0], 1) is True
    assert (results[0]._value, results[0]._values, results[0]._is_done()) == ("value", None, True)
    assert executions.find(0) is None
    assert executions.find(1) is results[1]
    results[1].complete(None, ValueError("failed early"))
    assert executions.settle(results[1], 1) is False
    assert executions.settle(results[1], 1) is None  # left to Python, and not noted
    assert results[1]._messages_left == 1
    assert executions.end_oldest() is results[1]
    results[2]._messages_left = 1
    assert executions.settle(results[2], -1) is None
    assert executions.settle(results[2], 2) is None
    assert executions.settle(results[2], 0) is True
    assert [record[1] for record in recorder.records()] == [0, 1, 2]
    assert (executions.submitted, executions.completed, list(executions.pending)) == (4, 3, [results[3]])
    executions.end_oldest()
    with pytest.raises(IndexError):
        executions.end_oldest()
    with pytest.raises(TypeError, match="takes a Result and an index"):
        executions.settle(object(), 0)
