"""Script: call everything in a build of `_native.c`, named by its path, with values of defects and hostile peers.

`test_native.py` runs it under AddressSanitizer. Prints "survived".
"""

# ruff: noqa: E402
import gc
import importlib.util
import pickle
import struct
import sys
import types

spec = importlib.util.spec_from_file_location("raylane.core._native", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
from raylane.core.memory.segment import Segment
from raylane.core.signals import semaphore
from raylane.core.signals.patience import Patience

HEADER = struct.Struct("<QIBBH")
segment, page = Segment.make(8192), Segment.make(4096)
for at in (segment.address, page.address):
    semaphore.init(at)


def attempt(call, *args):
    try:
        return call(*args)
    except (
        ValueError,
        TypeError,
        AssertionError,
        ArithmeticError,
        MemoryError,
        AttributeError,
        RuntimeError,
        pickle.PicklingError,
    ):
        return None


odd = [0, 1, -1, 7, 15, 16, 64, 4096, 8191, 8192, 1 << 31, 1 << 32, (1 << 63) - 1, -(1 << 63), 1 << 64, None, "x", 1.5]
bell = native.Doorbell(page.memory, Patience())
for a in odd:
    attempt(native.Doorbell, a, Patience())
    attempt(native.Doorbell, bytearray(4096), a)
    attempt(native.Recorder, a, 4) if a not in ((1 << 31), (1 << 32), (1 << 63) - 1) else None
    attempt(bell.wait, 0.0 if isinstance(a, int) else a)
    attempt(bell.sleeping, a)
    for b in odd:
        for c in (1, 3, 16, 256, 1 << 62):
            reader = attempt(native.SlotReader, segment.memory, 0, a, b, c, bell, pickle.loads)
            writer = attempt(native.SlotWriter, segment.memory, a, b, c, 200, ((0, page.memory, 3),))
            if writer is not None:
                attempt(writer.write, 0, (0, b"x" * max(0, c - 16), ()), 0)
                attempt(writer.write, a, (b, b"x" * 300, ()), c)
                attempt(writer.write, a, (0, b"y", ()))
                attempt(writer.write, 0, (0, b"y", [b"z" * 100, b"z" * min(c, 100)]))
                attempt(writer.write, 0, (0, a, [a, b])), attempt(writer.write, 0, a, b), attempt(writer.write, a)
                attempt(writer.write_parts, a, 0, 0, b"y", [b"z" * 100, a])
                attempt(writer.write_parts, 0, 0, 0, b"x" * max(0, c - 30), [b"z"])
            if reader is not None:
                HEADER.pack_into(segment.view, a, 0, 0xFFFFFFFF, 255, 255, 0)
                attempt(reader.take), attempt(reader.read, [None], a, b), attempt(reader.read, b, 0, None)
                HEADER.pack_into(segment.view, a, 0, 0xFFFFFFFF, 255, 255, 0xFFFF)
                attempt(reader.parts)
        attempt(native.SlotReader, segment.memory, a, 64, 3, 256, bell, pickle.loads)
        attempt(native.SlotWriter, segment.memory, 64, 3, 256, b, ((a, page.memory, b),))
        attempt(native.SlotWriter, segment.memory, 64, 3, 256, 0, a)
        attempt(native.SlotWriter, segment.memory, 64, 3, 256, 0, (a, b))
readers = tuple((0, page.memory, flag) for flag in range(256))
writer = native.SlotWriter(segment.memory, 64, 3, 256, 100, readers)
reader = native.SlotReader(segment.memory, 0, 64, 3, 256, bell, pickle.loads)
while reader.poll.__self__ and not semaphore.try_wait(segment.address):
    pass
for number in range(1000):
    writer.write(number, (5, bytes(number % 240), ()), 4)
    values = []
    assert number % 2 or reader.take() == (5, 4, bytes(number % 240))
    assert number % 2 == 0 or (semaphore.post(segment.address), reader.read([None], 0, None))[1] == 4
    while bell.flagged() >= 0:
        pass
assert bell.glance()
assert bell.absorb()
assert bell.consumed == bell.read
output, buffers = [], []
made = pickle.Pickler(types.SimpleNamespace(write=output.append), 5, buffer_callback=buffers.append)


class Message(tuple):
    pass


encoder = native.Encoder(Message, None, sys.modules, 1000)
attempt(encoder.prepare, made.dump, made.clear_memo, output, buffers, ("absent",))
large = [bytes(100_000), "x" * 100_000, "\u00e9" * 100_000]
for found in (None, 1, "__main__", *large, pickle.PickleBuffer(b"x"), encoder):
    attempt(encoder.encode, found), attempt(encoder.small, found)
    output.clear(), buffers.clear()
for bad in ((1, 2, [], [], ()), (made.dump, made.clear_memo, [1, 2], [], ()), (len, len, [], [], ([],))):
    attempt(encoder.prepare, *bad), attempt(encoder.encode, 1), attempt(encoder.encode, lambda: 0)
for bad in odd:
    attempt(native.Encoder, bad, 1, {}, 1), attempt(native.Encoder, tuple, 1, bad, 1)
    attempt(native.Encoder, tuple, 1, {}, bad)
cycle = []
broken = native.Encoder(Message, cycle, {}, 5)
broken.prepare(cycle.append, cycle.clear, cycle, [], ())
cycle.append(broken)
section = native.Section()
for a in odd:
    attempt(section.run, a, int), attempt(section.run, 0, a), attempt(section.run, 0, int, a)
    attempt(section.run, 0, section.reset), attempt(section.run, 0, section.run, 0, int)
result = native.Result(cycle, 1, 2, [], True)
for a in odd:
    attempt(native.Result, a, a, a, a, a), attempt(result.complete, a, a), attempt(result.__init__, a)
executions = native.Executions([], native.Recorder(1, 2))
for a in odd:
    attempt(native.Executions, a, a), attempt(executions.find, a), attempt(executions.settle, result, a)
    executions.pending.append(a)
    attempt(executions.settle, a, 0), attempt(executions.end_oldest), attempt(executions.find, 0)
    executions.pending[:] = [native.Result(None, 0, 1, [a], False)]
    attempt(executions.settle, executions.find(executions.completed), 0)
    executions.pending.append(executions)
cycle.append(native.Result(cycle, 1, 2, cycle, True))
recorder = native.Recorder(2, 3)
for execution in range(10):
    recorder.started()
    recorder.returned()
    recorder.sent(execution % 2, execution)
    attempt(recorder.sent, execution + 2, execution)
    attempt(recorder.totals, execution)
    recorder.records()
messages = (native.Doorbell, native.SlotReader, native.SlotWriter, native.Encoder)
for kind in (*messages, native.Recorder, native.Section, native.Result, native.Executions):
    empty = kind.__new__(kind)  # without __init__
    for name in dir(empty):
        method = getattr(empty, name)
        if not name.startswith("_") and callable(method):
            attempt(method), attempt(method, 0), attempt(method, 0, 0), attempt(method, 0, 0, 0, b"")
for nbytes in (0, 1, 1000, 5_000_000):
    for threads in odd:
        target = bytearray(nbytes)
        attempt(native.copy, target, bytes(nbytes), threads)
        attempt(native.copy, target, bytes(nbytes + 1), threads)
        attempt(native.copy, bytes(nbytes), target, threads)
native.run_delay_ns()
del cycle, bell, reader, writer, encoder, broken
gc.collect()
print("survived")
