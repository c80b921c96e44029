"""Windows that show one file after the other, on the memory of this process."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylane.core.memory import windows
from raylane.core.memory.segment import make_memfd
from raylane.core.memory.windows import StagedFile, Window

NBYTES = (1 << 21) + 5000
"""More than the kernel moves at once, and no whole number of pages."""


@pytest.fixture
def files() -> Iterator[list[int]]:
    """Descriptors of three files with one value in all bytes: 1, 2 and 3."""
    fds = [make_memfd(NBYTES) for _ in range(3)]
    for value, fd in enumerate(fds, 1):
        os.pwrite(fd, bytes([value]) * NBYTES, 0)
    yield fds
    for fd in fds:
        os.close(fd)


def values(window: Window) -> set[int]:
    return set(bytes(window.memory))


def mapped(address: int) -> bool:
    """Return True if something is mapped at an address."""
    ranges = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_window_shows_one_file_after_the_other_in_one_place(files: list[int]) -> None:
    window = Window(NBYTES)
    address = ctypes.addressof(window.memory)
    assert address % (1 << 21) == 0
    for value, fd in [*enumerate(files, 1), (1, files[0])]:
        window.show(StagedFile(fd, NBYTES))
        assert values(window) == {value}
        assert ctypes.addressof(window.memory) == address
        window.memory[7] = 99  # stays in this process, and only until the next file
        assert os.pread(fd, 8, 0) == bytes([value]) * 8
    os.pwrite(files[0], bytes([9]) * 4096, mmap.PAGESIZE)
    assert values(window) == {1, 9, 99}, "pages that were not written to are those of the file"


def test_mappings_end_with_the_objects_that_need_them(files: list[int]) -> None:
    window, staged = Window(NBYTES), StagedFile(files[0], NBYTES)
    places = [ctypes.addressof(window.memory), staged.address]
    assert all(map(mapped, places))
    window.show(staged)
    del staged
    memory = window.memory
    del window
    gc.collect()
    assert set(bytes(memory)) == {1}
    forgotten = StagedFile(files[1], NBYTES)
    places.append(forgotten.address)
    del forgotten, memory
    gc.collect()
    assert not any(map(mapped, places))


def test_other_threads_read_either_file(files: list[int]) -> None:
    window, ended, seen = Window(NBYTES), threading.Event(), set()
    window.show(StagedFile(files[0], NBYTES))

    def read() -> None:
        while not ended.is_set():
            seen.update(window.memory[at][0] for at in range(0, NBYTES, 64 * 1024))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(300):
        window.show(StagedFile(files[number % 3], NBYTES))
    ended.set()
    for thread in threads:
        thread.join()
    assert seen <= {1, 2, 3}


def test_errors_name_the_cause(files: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="mapping 4096 bytes") as caught:
        StagedFile(10**6, 4096)
    assert caught.value.errno == errno.EBADF
    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 26), limits[1]))
    try:
        with pytest.raises(OSError, match="reserving 1073741824 bytes of address space"):
            Window(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    # A kernel without the advice: the pages are looked up at the first access.
    monkeypatch.setattr(windows, "_MADV_POPULATE_READ", 9999)
    window = Window(NBYTES)
    window.show(StagedFile(files[2], NBYTES))
    assert values(window) == {3}
