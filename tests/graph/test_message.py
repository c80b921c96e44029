"""Values as messages and back: what arrives equals what was sent, and what cannot travel says so."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import enum
import gc
import pickle
import re
import sqlite3
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch

from core.processes import start_code
from graph.arrival import arrive
from raylane import _ray
from raylane.errors import GraphActorDiedError, GraphValueError, TensorFreedError
from raylane.graph.values.failures import OTHER_THREAD, raised_message
from raylane.graph.values.message import (
    ERROR,
    MAX_BUFFERS,
    NOTHING,
    SIGNAL,
    TENSORS,
    VALUE,
    Encoder,
    decode,
    encode_error,
)


@pytest.fixture
def encoder() -> Encoder:
    return Encoder()


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Batch:
    tokens: Any
    names: list[str]


Pair = collections.namedtuple("Pair", "left right")


# Plain values


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1.5,
        True,
        "text é \ud800",
        b"bytes",
        bytearray(b"array"),
        (),
        [1, [2, (3, {4: {5}})]],
        {"k": None},
        frozenset([1]),
        2**200,
        range(5),
        slice(1, 2),
        complex(1, 2),
        Colour.RED,
        Pair(1, [2]),
        Batch([1], ["n"]),
        collections.OrderedDict(a=1),
        int,
        len,
        Ellipsis,
        NotImplemented,
        ValueError("a value, not a failure"),
    ],
    ids=repr,
)
def test_plain_values(encoder: Encoder, value: Any) -> None:
    message = encoder.encode(value)
    assert (message.kind, message.buffers) == (VALUE, ())
    got = arrive(message)
    assert type(got) is type(value)
    assert got == value or repr(got) == repr(value)


def test_none_is_a_mere_signal(encoder: Encoder) -> None:
    assert encoder.encode(None) is SIGNAL
    assert (SIGNAL.kind, SIGNAL.nbytes) == (NOTHING, 0)
    assert decode(NOTHING, b"", ()) is None


def test_encode_keeps_sharing_within_one_value_only(encoder: Encoder) -> None:
    inside: list[int] = []
    got = arrive(encoder.encode([inside, inside]))
    assert got[0] is got[1]
    endless: list[Any] = [1]
    endless.append(endless)
    got = arrive(encoder.encode(endless))
    assert got[1] is got
    assert arrive(encoder.encode(inside)) == []  # whole again, though the same encoder has met it before


# NumPy


ARRAYS = {
    "c": np.arange(6.0).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "zero size": np.empty((0, 3)),
    "zero size, no axis first": np.empty((3, 0), np.int8),
    "scalar array": np.array(5),
    "strided": np.arange(10)[::2],
    "reversed": np.arange(5)[::-1],
    "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
    "transposed": np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
    "big endian": np.arange(3, dtype=">i4"),
    "text": np.array(["a", "bcd"]),
    "bytes": np.array([b"a", b"bcd"]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "half": np.ones(3, np.float16),
    "objects": np.array([1, "two", None, [3]], object),
    "structured": np.array([(1, 2.5, "ab")], [("a", "i4"), ("b", "f8"), ("c", "U3")]),
    "structured, aligned": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8", (2,))], align=True)),
    "record": np.rec.array([(1, 2.0)], dtype=[("x", int), ("y", float)]),
    "masked": np.ma.masked_array([1, 2, 3], [0, 1, 0]),
    "matrix-like view": np.arange(9).reshape(3, 3)[1:, :2],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(encoder: Encoder, name: str) -> None:
    value = ARRAYS[name]
    for wrapped in (value, {"a": [value, 1]}):
        got = arrive(encoder.encode(wrapped))
        got = got if wrapped is value else got["a"][0]
        assert (type(got), got.dtype, got.shape) == (type(value), value.dtype, value.shape)
        assert got.dtype.isalignedstruct == value.dtype.isalignedstruct
        np.testing.assert_array_equal(got, value)
        assert got.flags.writeable


def test_contiguous_arrays_are_not_copied_into_the_body(encoder: Encoder) -> None:
    for order in ("C", "F"):
        value = np.ones((300, 400), order=order)  # type: ignore[call-overload]
        message = encoder.encode([value, value, 5])
        assert len(message.buffers) == 1
        assert memoryview(message.buffers[0]).nbytes == value.nbytes
        assert len(message.body) < 500
        assert message.nbytes == len(message.body) + value.nbytes
        got = arrive(message)
        assert got[0] is got[1]
        assert got[0].flags.f_contiguous is (order == "F")


def test_numpy_scalars_and_read_only_arrays(encoder: Encoder) -> None:
    got = arrive(encoder.encode([np.float32(1.5), np.int64(3), np.bool_(True), np.datetime64("2020-01-01")]))
    assert [type(item) for item in got] == [np.float32, np.int64, np.bool_, np.datetime64]
    fixed = np.arange(3)
    fixed.flags.writeable = False
    got = arrive(encoder.encode(fixed))
    assert got.tolist() == [0, 1, 2]


def test_decode_shared_arrays_are_read_only(encoder: Encoder) -> None:
    got = arrive(encoder.encode([np.ones(3)]), shared=True)[0]
    with pytest.raises(ValueError, match="read-only"):
        got[0] = 5


def test_arrays_own_the_memory_they_are_made_from(encoder: Encoder) -> None:
    message = encoder.encode(np.arange(1000))
    buffer = bytearray(message.buffers[0])
    got = decode(message.kind, message.body, [buffer])
    with pytest.raises(BufferError):
        buffer.clear()  # in use
    del buffer
    assert got.sum() == 499500


# torch


WITHOUT_TORCH = """
import sys, threading
import numpy as np
from raylane.graph.values.message import Encoder, decode, encode_error
assert "torch" not in sys.modules
class Mine:
    def __eq__(self, other): return type(other).__name__ == "Mine"
encoder = Encoder()
for value in (5, "t", np.ones((2, 3)), {"a": [np.zeros(2000)]}, Mine(), [Mine(), np.ones(3)], lambda: 4):
    message = encoder.encode(value)
    got = decode(message.kind, message.body, [bytearray(buffer) for buffer in message.buffers])
    assert repr(got) == repr(value) or type(got).__name__ in ("Mine", "list", "function"), (got, value)
assert decode(*encode_error(ValueError("x"))[:3]).args == ("x",)
try:
    encoder.encode([lambda: 1, threading.Lock()])
except Exception as error:
    answer = str(error)
assert "torch" not in sys.modules
"""


@pytest.mark.processes
def test_without_torch_nothing_imports_it() -> None:
    said = start_code(WITHOUT_TORCH).result()
    assert said.startswith("a value of type list cannot be pickled")


def test_torch_may_be_imported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["torch"]
    monkeypatch.delitem(sys.modules, "torch")
    encoder = Encoder()
    assert arrive(encoder.encode([1])) == [1]
    monkeypatch.setitem(sys.modules, "torch", module)
    assert encoder.encode([torch.ones(3, requires_grad=True)]).kind == TENSORS


# Classes and functions that another process could not import


SCRIPT = """
class Point:
    def __init__(self, x): self.x = x
    def double(self): return Point(2 * self.x)
class Odd(ValueError): pass
def scale(x): return FACTOR * x
FACTOR = 3
"""


@pytest.mark.parametrize("more", [[], [np.ones(1)], [torch.ones(1)]], ids=["plain", "array", "tensor"])
def test_encode_class_of_a_script_travels(encoder: Encoder, monkeypatch: pytest.MonkeyPatch, more: list[Any]) -> None:
    known: dict[str, Any] = {"__name__": "__main__"}
    exec(SCRIPT, known)
    names = ["Point", "Odd", "scale"]
    for name in names:
        monkeypatch.setattr(sys.modules["__main__"], name, known[name], raising=False)
    message = encoder.encode([known["Point"](4), known["scale"], known["Odd"]("mine"), *more])
    error = encode_error(known["Odd"]("mine too"))
    monkeypatch.undo()  # another process has another __main__
    point, scale, odd, *rest = arrive(message)
    assert (point.double().x, scale(5), type(odd).__name__, str(odd)) == (8, 15, "Odd", "mine")
    assert [item.tolist() for item in rest] == [[1.0]] * len(more)
    assert repr(decode(*error[:3])) == "Odd('mine too')"


def test_functions_made_on_the_way_travel(encoder: Encoder) -> None:
    factor = 3

    class Local:
        def scaled(self, x: int) -> int:
            return factor * x

    got = arrive(encoder.encode([lambda x: factor * x, Local()]))
    assert (got[0](5), got[1].scaled(6)) == (15, 18)


# What cannot travel


class Strided:
    def __reduce_ex__(self, protocol: Any) -> Any:
        return bytes, (pickle.PickleBuffer(np.arange(10)[::2]),)


class Refuses:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (threading.Lock, "lock"),
        (generator, "generator"),
        (Refuses, "Refuses"),
        (Strided, "Strided"),
        (lambda: [1, {"deep": threading.Lock()}], "list"),
        (lambda: [np.ones(5), threading.Lock()], "list"),
        (lambda: [torch.ones(5), threading.Lock()], "list"),
        (lambda: [lambda: 1, threading.Lock()], "list"),
    ],
)
def test_encode_unpicklable_value_names_type_and_cause(encoder: Encoder, make: Callable[[], Any], kind: str) -> None:
    value = make()
    for _ in range(2):
        with pytest.raises(GraphValueError, match=f"a value of type {kind} cannot be pickled, so it cannot") as caught:
            encoder.encode(value)
        assert caught.value.__cause__ is not None
    assert arrive(encoder.encode({"still": [1]})) == {"still": [1]}  # the encoder goes on


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def test_encode_too_deeply_nested_value_raises(encoder: Encoder) -> None:
    assert arrive(encoder.encode(nested(100))) == nested(100)
    with pytest.raises(GraphValueError, match="recursion"):
        encoder.encode(nested(100_000))
    assert arrive(encoder.encode([1])) == [1]


def test_an_encoder_can_be_used_again_whatever_has_happened(encoder: Encoder) -> None:
    good = {"a": [1, "x"], "n": np.arange(5000), "t": (None,)}
    events: list[Callable[[], Any]] = [
        lambda: encoder.encode([1, Refuses()]),
        lambda: encoder.encode(["before", torch.ones(2), "after"]),
        lambda: encoder.encode(lambda: 1),
        lambda: encoder.encode("x" * 3_000_000),
    ]
    for event in events * 2:
        with contextlib.suppress(GraphValueError):
            event()
        got = arrive(encoder.encode(good))
        assert (got["a"], got["n"].sum(), got["t"]) == (good["a"], 12497500, (None,))


def test_messages_do_not_change_when_the_encoder_goes_on(encoder: Encoder) -> None:
    one = encoder.encode([1, np.arange(3)])
    two = encoder.encode(["other", np.arange(2000)])
    three = encoder.encode("third")
    assert arrive(one)[1].tolist() == [0, 1, 2]
    assert arrive(two)[0] == "other"
    assert arrive(three) == "third"


class Holder:
    """Something that one can see the end of."""

    def __init__(self, *inside: Any) -> None:
        self.inside = inside


def test_a_message_keeps_what_its_buffers_lie_in(encoder: Encoder) -> None:
    value = Holder(np.ones(1000))
    gone = weakref.ref(value)
    message = encoder.encode(value)
    del value
    gc.collect()
    assert gone() is not None
    assert arrive(message).inside[0].sum() == 1000


@pytest.mark.parametrize(
    "make", [lambda: Holder(np.ones(1000)), lambda: Holder(bytes(2_000_000))], ids=["buffers", "large"]
)
def test_the_encoder_lets_go_of_large_values(encoder: Encoder, make: Callable[[], Any]) -> None:
    value = make()
    gone = weakref.ref(value)
    message = encoder.encode(value)
    del value, message
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Holder(torch.ones(1000)),
        lambda: Holder(lambda: 1, np.ones(100_000)),
        lambda: Holder(np.ones(2000)[::2]),
        lambda: Holder("small"),
    ],
)
def test_the_encoder_remembers_nothing_of_what_it_has_seen(encoder: Encoder, make: Callable[[], Any]) -> None:
    value = make()
    gone = weakref.ref(value)
    message = encoder.encode(value)
    del value, message
    gc.collect()
    assert gone() is None


class Interrupted:
    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def test_ctrl_c_while_pickling_does_not_spoil_the_next_message(encoder: Encoder) -> None:
    with pytest.raises(KeyboardInterrupt):
        encoder.encode([np.ones(5), Interrupted()])
    assert arrive(encoder.encode({"n": np.arange(5)}))["n"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("extra", [None, lambda: 1])
def test_very_many_arrays_make_few_buffers(encoder: Encoder, extra: Any) -> None:
    sent = [np.full(3, i) for i in range(1000)]
    message = encoder.encode([sent, extra])
    assert 0 < len(message.buffers) <= MAX_BUFFERS
    got = arrive(message)[0]
    assert [array.tolist() for array in got] == [[i] * 3 for i in range(1000)]
    got[0][:] = got[-1][:] = 7  # all are the receiver's own


def test_very_many_tensors_make_one_buffer_and_stay_tied(encoder: Encoder) -> None:
    sent = [torch.full((3,), float(i)) for i in range(1000)]
    message = encoder.encode([sent, sent[5][1:], torch.ones(0)])
    assert len(message.buffers) == 1
    got, view, empty = arrive(message)
    assert all(torch.equal(one, other) for one, other in zip(sent, got, strict=True))
    view[0] = -1
    assert got[5].tolist() == [5, -1, 5]
    assert empty.shape == (0,)


class Mute(Exception):
    def __init__(self) -> None:
        super().__init__(threading.Lock())

    def __str__(self) -> str:
        raise RuntimeError("no")


def test_errors_that_speak_of_threads_say_where_methods_run() -> None:
    connection = sqlite3.connect(":memory:")
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        error = other.submit(connection.execute, "select 1").exception()
    assert isinstance(error, sqlite3.ProgrammingError)
    assert OTHER_THREAD in str(arrive(raised_message(error, "A.f")))
    assert OTHER_THREAD not in str(arrive(raised_message(ValueError("x"), "A.f")))
    connection.close()


def test_encode_error_names_an_unprintable_error() -> None:
    got = arrive(encode_error(Mute()))
    assert isinstance(got, GraphValueError)
    assert str(got) == "Mute"


# Decoding


def test_decode_raises_errors_of_unpickling() -> None:
    with pytest.raises(pickle.UnpicklingError):
        decode(VALUE, b"\x80\x05garbage", ())
    with pytest.raises(ModuleNotFoundError):
        decode(VALUE, b"cno_such_module\nName\n.", ())


def test_a_body_may_be_any_bytes(encoder: Encoder) -> None:
    for value in ([1, "x"], [np.arange(3)], [torch.arange(3)]):
        message = encoder.encode(value)
        for kind in (bytes, bytearray, memoryview):
            buffers = [bytearray(memoryview(buffer).cast("B")) for buffer in message.buffers]
            assert repr(decode(message.kind, kind(message.body), buffers)) == repr(value)


# Errors


class Two(Exception):
    """Cannot be made again from its args."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class KeywordOnly(Exception):
    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


class Attributes(Exception):
    pass


class Unprintable(Exception):
    def __init__(self) -> None:
        super().__init__(threading.Lock())

    def __str__(self) -> str:
        raise RuntimeError("not even that")


def received(error: BaseException) -> BaseException:
    message = encode_error(error)
    assert message.kind == ERROR
    got: BaseException = decode(ERROR, message.body, ())
    return got


@pytest.mark.parametrize(
    "error", [ValueError("v"), KeyError("k"), OSError(2, "no file", "/x"), StopIteration(3), SystemExit(4), Exception()]
)
def test_errors_arrive_as_they_are(error: BaseException) -> None:
    got = received(error)
    assert type(got) is type(error)
    assert got.args == error.args
    assert str(got) == str(error)


def test_errors_of_ours_keep_their_fields() -> None:
    got = received(GraphActorDiedError("gone", actor="12"))
    assert isinstance(got, GraphActorDiedError)
    assert (got.message, got.fields) == ("gone", {"actor": "12"})
    assert isinstance(received(TensorFreedError("freed")), TensorFreedError)


def test_attributes_and_notes_survive() -> None:
    error = Attributes("a")
    error.detail = {"step": 3}  # type: ignore[attr-defined]
    error.add_note("a note")
    got = received(error)
    assert got.detail == {"step": 3}  # type: ignore[attr-defined]
    assert got.__notes__ == ["a note"]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError(threading.Lock()), r"ValueError: <unlocked _thread.lock object"),
        (Two(5, "five"), "Two: five"),
        (KeywordOnly(reason="because"), "KeywordOnly: because"),
    ],
)
def test_an_error_that_cannot_travel_is_shown_by_one_that_can(error: BaseException, says: str) -> None:
    got = received(error)
    assert type(got) is GraphValueError
    assert re.match(says, got.message)


@pytest.mark.parametrize("cause", [ValueError("v"), Two(5, "five"), ValueError(threading.Lock())])
def test_errors_of_methods_arrive_with_the_remote_text(cause: BaseException) -> None:
    got = received(_ray.task_error("Worker.step", "Traceback: line 5", cause))
    raised = _ray.raised_form(got)
    assert "Traceback: line 5" in str(raised)
    assert isinstance(raised, ray.exceptions.RayError)


def test_errors_of_unknown_classes_arrive_as_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("only_there")
    monkeypatch.setitem(sys.modules, "only_there", library)
    exec("class LibraryError(Exception): ...", vars(library))  # as a library that this process lacks later
    library.LibraryError.__module__ = "only_there"
    known = encode_error(library.LibraryError("bad batch 7"))
    of_method = encode_error(_ray.task_error("A.step", "Traceback: line 5", library.LibraryError("bad batch 7")))
    assert type(arrive(known)) is library.LibraryError
    del sys.modules["only_there"]
    assert "LibraryError: bad batch 7" in str(arrive(known))
    assert "No module named 'only_there'" in arrive(known).__notes__[0]
    raised = _ray.raised_form(arrive(of_method))
    assert "Traceback: line 5" in str(raised)
    assert "bad batch 7" in str(raised.cause)  # type: ignore[attr-defined]


def test_a_chain_of_causes_is_no_obstacle() -> None:
    error = ValueError("outer")
    error.__cause__ = KeyError("inner")
    error.__context__ = Two(1, "context")
    assert str(received(error)) == "outer"
