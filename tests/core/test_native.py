"""The compiled classes: what they carry, and that they refuse what would leave their memory."""

from __future__ import annotations

import ast
import itertools
import os
import pickle
import shutil
import struct
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.processes import start_code
from raylane.core import _native, native
from raylane.core.memory.segment import Segment
from raylane.core.native import BYTES, LOGGED, NOTHING, PAGE_BYTES, SLOT_HEADER_BYTES, TEXT, VALUE, WAKE
from raylane.core.process.copying import ThreadChoice
from raylane.core.signals import semaphore
from raylane.core.signals.patience import Patience
from raylane.core.signals.semaphore import value

ROOT = Path(__file__).resolve().parents[2]
SLOT_BYTES, SLOTS, SLOTS_AT = 256, 3, 128
HEADER = struct.Struct("<QIBBH")
"""Header of a slot: sequence number, bytes of the body, kind, flags, number of buffers."""


class Channel:
    """One ring of small slots with two readers."""

    def __init__(self) -> None:
        self.segment = Segment.make(8192)
        self.pages = [Segment.make(PAGE_BYTES) for _ in range(2)]
        for at in (0, 64):
            semaphore.init(self.segment.address + at)
        for page in self.pages:
            semaphore.init(page.address)
        self.doorbells = [native.Doorbell(page.memory, Patience()) for page in self.pages]
        readers = tuple((index * 64, page.memory, index + 5) for index, page in enumerate(self.pages))
        self.writer = native.SlotWriter(self.segment.memory, SLOTS_AT, SLOTS, SLOT_BYTES, 100, readers)
        self.readers = [
            native.SlotReader(self.segment.memory, index * 64, SLOTS_AT, SLOTS, SLOT_BYTES, doorbell, pickle.loads)
            for index, doorbell in enumerate(self.doorbells)
        ]


def test_stub_names_all_that_the_module_has() -> None:
    stub = ast.parse((ROOT / "src/raylane/core/_native.pyi").read_text())
    described: dict[str, set[str]] = {}
    for node in stub.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = (getattr(member, "name", None) or member.target.id for member in node.body if is_named(member))
            described[node.name] = {name for name in names if not name.startswith("_")}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            described[node.target.id] = set()
    del described["Policy"]
    assert described == {
        name: {key for key in dir(member) if not key.startswith("_") and not hasattr(AssertionError, key)}
        if isinstance(member, type)
        else set()
        for name, member in vars(_native).items()
        if not name.startswith("__")
    }


def is_named(member: ast.stmt) -> bool:
    return isinstance(member, ast.FunctionDef | ast.AnnAssign)


WITHOUT_MODULE = """
import sys
sys.modules["raylane.core._native"] = None
sys.modules.pop("raylane.core.native", None)
try:
    import raylane.core.native
except ImportError as error:
    answer = str(error)
"""


@pytest.mark.processes
def test_import_without_the_module_names_the_remedy() -> None:
    assert "apt install gcc python3-dev" in start_code(WITHOUT_MODULE).result()


def test_slots_carry_messages() -> None:
    made = Channel()
    for number in range(10):
        body = bytes([number]) * (number * 24)
        made.writer.write(number, (number % 3, body, ()), number % 2 and WAKE)
        for index, (reader, doorbell) in enumerate(zip(made.readers, made.doorbells, strict=True)):
            assert doorbell.wait(1.0)
            assert doorbell.flagged() == index + 5
            assert reader.poll() == (number % 3, number % 2 and WAKE, body)
            assert reader.poll() is None
            assert (doorbell.consumed, doorbell.read, reader.sequence) == (number + 1, number + 1, number + 1)
            assert doorbell.flagged() == -1
    assert made.writer.bytes == sum(number * 24 for number in range(10))


def test_slots_say_when_the_rest_of_a_message_must_be_read() -> None:
    made = Channel()
    array = np.arange(3, dtype=np.int64)
    made.writer.write_parts(0, 1, 2, b"body", [b"", array.data, pickle.PickleBuffer(bytearray(b"xyz"))])
    assert made.writer.bytes == 4 + 24 + 3
    assert [value(page.address) for page in made.pages] == [1, 1]
    for reader in made.readers:
        with pytest.raises(ValueError, match="no message was taken"):
            reader.parts()
        assert reader.poll() == (1, 2, None)
        body, buffers = reader.parts()
        assert (body, buffers) == (b"body", [b"", array.tobytes(), b"xyz"])
        assert [type(buffer) for buffer in buffers] == [bytearray] * 3


def test_usual_messages_are_read_into_their_place() -> None:
    made = Channel()
    reader = made.readers[0]
    calls: list[int] = []
    texts = ["", "x" * 240, "\u00e9\u4e2d", "\ud800", "a\0b"]
    usual = [(VALUE, pickle.dumps({"a": 1}), {"a": 1}), (BYTES, b"as it is", b"as it is"), (NOTHING, b"", "untouched")]
    usual += [(TEXT, text.encode("utf-8", "surrogatepass"), text) for text in texts]
    nbytes = 0
    for number, (kind, body, found) in enumerate(usual):
        values: list[Any] = [None, "untouched"]
        made.writer.write(number, (kind, memoryview(body), ()), number % 2 and WAKE)
        assert reader.read(values, 1, lambda: calls.append(1)) == (number % 2 and WAKE)
        assert values == [None, found]
        assert reader.read(values, 1, None) is None
        nbytes += len(body)
    assert len(calls) == len(usual) - 1  # nothing is unpickled for NOTHING
    assert reader.read_bytes == nbytes
    made.writer.write(len(usual), (VALUE, b"no pickle", ()))
    assert reader.read(None, 0, None) == 0  # dropped
    assert reader.sequence == len(usual) + 1


def test_other_messages_are_described_and_errors_are_raised() -> None:
    made = Channel()
    reader, values = made.readers[0], [None]
    for number, message in enumerate([(1, b"tensors", ()), (2, b"error", ())]):
        made.writer.write(number, message, 0)
        assert reader.read(values, 0, None) == (*message[:1], 0, message[1])
    made.writer.write_parts(2, VALUE, WAKE, b"body", [b"x"])
    assert reader.read(values, 0, None) == (VALUE, WAKE, None)
    made.writer.write(3, (VALUE, b"no pickle", ()))
    with pytest.raises(pickle.UnpicklingError):
        reader.read(values, 0, None)
    made.writer.write(4, (TEXT, b"\xff", ()))
    with pytest.raises(UnicodeDecodeError):
        reader.read(values, 0, None)
    made.writer.write(5, (VALUE, pickle.dumps(1), ()))
    with pytest.raises(ZeroDivisionError):
        reader.read(values, 0, lambda: 1 // 0)
    made.writer.write(6, (VALUE, pickle.dumps(1), ()))
    with pytest.raises(IndexError):
        reader.read(values, 1, None)
    with pytest.raises(TypeError, match="values are a list"):
        reader.read({}, 0, None)  # type: ignore[arg-type]
    assert (values, reader.sequence, made.doorbells[0].read) == ([None], 7, 7)


def test_parts_that_do_not_fit_are_refused() -> None:
    made = Channel()
    for body, buffers in ((bytes(200), [bytes(33)]), (b"", [b""] * 31), (b"", [bytes(300)])):
        with pytest.raises(ValueError, match="do not fit into a slot of 256"):
            made.writer.write_parts(0, 0, 0, body, buffers)
    assert made.readers[0].poll() is None
    made.writer.write_parts(0, 0, 0, bytes(200), [bytes(32)])  # fills the slot
    assert made.readers[0].poll() == (0, 0, None)
    assert made.readers[0].parts() == (bytes(200), [bytes(32)])
    HEADER.pack_into(made.segment.view, SLOTS_AT, 0, 201, 0, 0, 1)  # by a hostile peer
    with pytest.raises(AssertionError, match="201 bytes does not fit into a slot"):
        made.readers[0].parts()
    struct.pack_into("<Q", made.segment.view, SLOTS_AT + HEADER.size, 1 << 63)
    with pytest.raises(AssertionError, match="bytes does not fit into a slot"):
        made.readers[0].parts()
    HEADER.pack_into(made.segment.view, SLOTS_AT, 0, 0, 0, 0, 31)
    with pytest.raises(AssertionError, match="31 buffers do not fit into a slot"):
        made.readers[0].parts()


class Elsewhere(native.SlotWriter):
    """Notes the messages that do not fit."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.refused: list[Any] = []

    def write_elsewhere(self, *args: Any) -> None:
        self.refused.append(args)


def test_messages_that_do_not_fit_are_left_to_the_subclass() -> None:
    slot = 2048
    memory, page = Segment.make(8192), Segment.make(PAGE_BYTES)
    for address in (memory.address, page.address):
        semaphore.init(address)
    writer = Elsewhere(memory.memory, 128, 2, slot, 100, ((0, page.memory, 0),))
    room = slot - SLOT_HEADER_BYTES
    fits = [(0, bytes(room), ()), (0, bytes(room - 1024 - 8 - 100), [bytes(100)]), (0, b"", [bytes(50), bytes(50)])]
    others = [(0, bytes(room + 1), ()), (0, bytes(room - 1024 - 8 - 99), [bytes(100)]), (0, b"", [bytes(101)])]
    for number, message in enumerate([*fits, *others]):
        writer.write(number, message, WAKE)
    assert writer.refused == [(number, message, WAKE) for number, message in enumerate(others, len(fits))]
    assert value(memory.address) == len(fits)
    for wrong in ((0, b""), [0, b"", ()], b"123"):
        with pytest.raises(TypeError, match="write takes sequence, message and flags"):
            writer.write(0, wrong)  # type: ignore[arg-type]
    with pytest.raises((BufferError, ValueError), match="contiguous"):
        writer.write(0, (0, b"", [np.ones((20, 20))[::2, ::2]]))


def test_slots_refuse_what_does_not_fit() -> None:
    made = Channel()
    with pytest.raises(ValueError, match="a message does not fit into a slot of 256"):
        made.writer.write(0, (0, bytes(241), ()), 0)
    assert made.readers[0].poll() is None
    made.writer.write(0, (0, b"", ()), 0)
    HEADER.pack_into(made.segment.view, SLOTS_AT, 0, 241, 0, 0, 0)  # by a hostile peer
    with pytest.raises(native.DamagedRing, match="a message of 241 bytes does not fit into a slot"):
        made.readers[0].poll()
    made.writer.write(5, (0, b"overrun", ()), 0)
    with pytest.raises(native.DamagedRing, match=r"message 0 in the place of message 1|message 5 in the place"):
        made.readers[0].poll()


def test_eventfd_is_written_to_for_a_reader_that_sleeps() -> None:
    made = Channel()
    fd = made.writer.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        made.writer.write(0, (0, b"", ()), 0)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(fd)
        made.doorbells[1].sleeping(True)
        made.writer.write(1, (0, b"", ()), WAKE)
        assert os.eventfd_read(fd) == 1
        made.doorbells[1].sleeping(False)
        made.writer.write(2, (0, b"", ()), WAKE)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(fd)
    finally:
        os.close(fd)


def test_slots_outside_of_their_memory_are_refused() -> None:
    memory, page = Segment.make(8192), Segment.make(PAGE_BYTES)
    bell = native.Doorbell(page.memory, Patience())
    for full_at, at, slots, size in [
        (0, 64, 32, 256),
        (0, -1, 1, 256),
        (0, 64, 0, 256),
        (0, 64, -1, 256),
        (0, 64, 1, 15),
        (0, 64, 1, 1 << 62),
        (0, 64, 1 << 62, 256),
        (0, 1 << 62, 1, 256),
        (8180, 64, 1, 256),
        (-64, 64, 1, 256),
        (3, 64, 1, 256),
    ]:
        with pytest.raises(ValueError, match=r"do not fit into|no semaphore fits"):
            native.SlotReader(memory.memory, full_at, at, slots, size, bell, pickle.loads)
        with pytest.raises(ValueError, match=r"do not fit into|no semaphore fits"):
            native.SlotWriter(memory.memory, at, slots, size, 0, ((full_at, page.memory, 0),))
    for flag in (-1, native.FLAGS):
        with pytest.raises(ValueError, match=f"flag {flag} is not below 256"):
            native.SlotWriter(memory.memory, 64, 1, 256, 0, ((0, page.memory, flag),))
    with pytest.raises(ValueError, match="memory of 100 bytes is too small: 4096 are needed"):
        native.Doorbell(bytearray(100), Patience())
    with pytest.raises(ValueError, match="memory of 100 bytes is too small: 4096 are needed"):
        native.SlotWriter(memory.memory, 64, 1, 256, 0, ((0, bytearray(100), 0),))


WITHOUT_MEMORY = """
import _testcapi
from raylane.core import _native
from raylane.core.signals import semaphore
from raylane.core.native import LOGGED, PAGE_BYTES
from raylane.core.memory.segment import Segment

class Policy:
    budget_ns = slow_ns = 0
    def __init__(self):
        self.counts = []
    def review(self, waits, now):
        self.counts.append(len(waits))
        for length, worst in waits:  # CPython 3.12.1 and 3.13.0 crash where a generator is made without memory
            assert 0 <= length < 10**9 and worst == 0, waits
        return 0, 0

answer = []
for failing in range(2 * LOGGED + 8):
    page, policy = Segment.make(PAGE_BYTES), Policy()
    semaphore.init(page.address)
    bell = _native.Doorbell(page.memory, policy)
    for _ in range(LOGGED - 1):
        bell.wait(0)
    _testcapi.set_nomemory(failing, failing + 1)
    try:
        bell.wait(0)
    except MemoryError:
        pass
    finally:
        _testcapi.remove_mem_hooks()
    for _ in range(4 * LOGGED):
        bell.wait(0)
    answer.append(policy.counts)
"""


@pytest.mark.processes
def test_doorbell_without_memory_for_a_review_goes_on() -> None:
    pytest.importorskip("_testcapi")
    for counts in start_code(WITHOUT_MEMORY).result():
        assert max(counts) == LOGGED
        assert len(counts) >= 4


def test_recorder_keeps_the_last_records_and_all_totals() -> None:
    recorder = native.Recorder(3, 4)
    assert recorder.records() == []
    for execution in range(6):
        recorder.started()
        recorder.returned()
        recorder.sent(execution % 2, execution)
    records = recorder.records()
    assert [(task, execution) for task, execution, *_ in records] == [(0, 2), (1, 3), (0, 4), (1, 5)]
    for _, _, idle_since, started, returned, sent in records:
        assert idle_since <= started <= returned <= sent
    assert all(before[5] == after[2] for before, after in itertools.pairwise(records))
    assert [recorder.totals(task)[0] for task in range(3)] == [3, 3, 0]
    assert recorder.totals(2) == (0, 0.0, 0.0, 0.0)
    for task in (3, -1):
        with pytest.raises((ValueError, IndexError)):
            recorder.sent(task, 0)


def test_copy_with_any_number_of_threads() -> None:
    for nbytes in (0, 1, 63, 64, 1000, 100_003):
        source = os.urandom(nbytes)
        for threads in (1, 2, 3, 16):
            target = bytearray(nbytes)
            native.copy(target, source, threads)
            assert target == source
    with pytest.raises(ValueError, match="cannot copy 3 bytes into 2"):
        native.copy(bytearray(2), b"abc", 1)


def test_list_of_copies() -> None:
    target, source = array("B", bytes(100)), array("B", range(100))
    to, at = target.buffer_info()[0], source.buffer_info()[0]
    for threads in (1, 3, 16):
        target[:] = array("B", bytes(100))
        native.copy_many(array("Q", [to, at + 50, 10, to + 10, at, 1, to + 99, at + 99, 0]), threads)
        assert target.tobytes() == bytes([*range(50, 60), 0, *([0] * 89)])
        native.copy_many(array("Q"), threads)
        native.copy_many(array("Q", [n for i in range(100) for n in (to + i, at + i, 1)]), threads)
        assert target == source
    with pytest.raises(ValueError, match="three 64-bit numbers for each, got 32 bytes"):
        native.copy_many(array("Q", [1, 2, 3, 4]), 1)


def test_copy_uses_threads_while_they_are_faster() -> None:
    choice, chosen = ThreadChoice(4), []
    for number in range(100):
        threads = choice.threads()
        chosen.append(threads)
        idle = number < 50  # then a neighbour takes the other cores
        choice.copied(threads, 1000, {1: 2.0, 4: 1.0 if idle else 3.0}[threads])
    assert set(chosen[:2]) == {1, 4}
    assert chosen[2:50].count(4) >= 44
    assert chosen[60:].count(1) >= 36
    assert chosen[60:].count(4) >= 2  # tried again
    alone = ThreadChoice(1)
    assert [alone.threads() for _ in range(40)] == [1] * 40


def test_build_without_compiler_or_headers_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    hatch_build = pytest.importorskip("hatch_build", reason="hatchling is not installed")
    without_compiler = hatch_build.failure(FileNotFoundError(2, "No such file or directory", "cc"))
    assert without_compiler.endswith(
        "install a C compiler (Debian and Ubuntu: apt install gcc; Fedora: dnf install gcc)."
    )
    printed = "_native.c:11:10: fatal error: Python.h: No such file or directory"
    without_headers = hatch_build.failure(subprocess.CalledProcessError(1, "cc", stderr=printed))
    assert (
        "the headers of Python are missing; install them (Debian and Ubuntu: apt install python3-dev" in without_headers
    )
    other = hatch_build.failure(subprocess.CalledProcessError(1, "cc", stderr="note\na.c:1:1: error: no C11\n"))
    assert "could not be compiled: a.c:1:1: error: no C11; install GCC" in other
    assert {text.count("\n") for text in (without_compiler, without_headers, other)} == {0}
    monkeypatch.setattr(hatch_build, "LEAST_PYTHON", (99, 0))
    assert hatch_build.failure(FileNotFoundError()).startswith("raylane needs Python 3.11 or newer, and this is 3.")


@pytest.mark.slow
@pytest.mark.processes
def test_native_module_survives_abuse_under_the_sanitizer(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    hatch_build = pytest.importorskip("hatch_build", reason="hatchling is not installed")
    library = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    asan = library.stdout.strip()
    if not os.path.isabs(asan):
        pytest.skip("the compiler has no AddressSanitizer")
    built = hatch_build.compile_native(
        ROOT, "-Werror", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover", into=tmp_path
    )
    env = {
        **os.environ,
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": str(ROOT / "src"),
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("abuse_native.py")), str(built)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "survived"), done.stderr[-3000:]
