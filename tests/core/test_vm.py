from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading

import pytest

from raylane.core.memory.layout import address_of
from raylane.core.process import place, vm

CHILD = """
import ctypes, sys
buffer = ctypes.create_string_buffer(bytes(range(200)) * 500)
print(ctypes.addressof(buffer), flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_read_of_another_process_notices_its_death() -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        address = int(child.stdout.readline())
        mine = ctypes.create_string_buffer(300)
        vm.read(child.pid, [(address, address_of(mine), 200), (address + 5, address_of(mine) + 200, 100)])
        assert mine.raw == bytes(range(200)) + bytes(range(5, 105))
        many = ctypes.create_string_buffer(3000)
        vm.read(child.pid, [(address + i % 200, address_of(many) + i, 1) for i in range(3000)])
        assert many.raw == bytes(i % 200 for i in range(3000))
        with pytest.raises(OSError) as bad:
            vm.read(child.pid, [(8, address_of(mine), 8)])
        assert bad.value.errno == errno.EFAULT
    finally:
        child.kill()
        child.communicate()
    with pytest.raises(ProcessLookupError):
        vm.read(child.pid, [(address, address_of(mine), 8)])


def test_ptracer_setting_is_checked_and_can_be_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Libc:
        @staticmethod
        def prctl(*arguments: object) -> None:
            asked.append(arguments)

    monkeypatch.setattr(vm, "_libc", Libc)
    monkeypatch.setenv("RAYLANE_PTRACER", "none")
    vm.allow_readers()
    assert not asked
    monkeypatch.setenv("RAYLANE_PTRACER", "some")
    with pytest.raises(ValueError, match="any or none"):
        vm.allow_readers()
    monkeypatch.delenv("RAYLANE_PTRACER")
    vm.allow_readers()
    assert len(asked) == 1


def test_gather_joins_thousands_of_ranges_or_raises() -> None:
    data = (ctypes.c_char * 30_000)(*(bytes([i % 251]) for i in range(30_000)))
    ranges = [(address_of(data) + 7 * i, 1 + i % 5) for i in range(3000)]
    expected = b"".join(data.raw[7 * i : 7 * i + 1 + i % 5] for i in range(3000))
    assert vm.gather(os.getpid(), vm.pack_ranges(ranges)) == expected
    assert vm.gather(os.getpid(), b"") == b""
    with pytest.raises(OSError) as bad:
        vm.gather(os.getpid(), vm.pack_ranges([*ranges, (8, 8)]))
    assert bad.value.errno == errno.EFAULT


@pytest.mark.processes
def test_a_place_knows_itself_and_a_dead_process() -> None:
    here = place.here()
    assert here.pid == os.getpid()
    assert place.alive(here)
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    assert place.start_ticks(child.pid) is not None or child.poll() is not None
    while place.start_ticks(child.pid) is not None:  # until it is a zombie: not yet waited for
        os.sched_yield()
    assert child.wait() == 0


def test_a_split_read_keeps_the_order_and_the_limits() -> None:
    big = vm.MAX_BYTES_PER_CALL
    calls = vm.split([(0, 0, big + 5), (10 * big, 2 * big, 7)])
    assert calls == [[(0, 0, big)], [(big, big, 5), (10 * big, 2 * big, 7)]]
    assert [len(call) for call in vm.split([(i, i, 1) for i in range(2500)])] == [1024, 1024, 452]


def test_large_reads_need_no_more_threads_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    source = bytearray(os.urandom(1 << 20)) * 20
    target = bytearray(len(source))
    there, here = (ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (source, target))

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(vm._ProcessReader, "start", fail)
    for _ in range(3):  # the number of threads is tried out
        target[:] = bytes(len(target))
        vm.read(os.getpid(), [(there, here, len(source))])
        assert target == source
