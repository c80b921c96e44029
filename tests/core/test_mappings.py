"""Mappings of regions and sealed segments: used again, showing the maker's content, locked while arrays exist."""

from __future__ import annotations

import ctypes
import gc
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.processes import Pipe, start
from raylane.core.memory import mappings as mappings_module
from raylane.core.memory import regions
from raylane.core.memory.mappings import MOST_IDLE, Mappings, written_ranges
from raylane.core.memory.regions import DATA_OFFSET, Region
from raylane.core.memory.sealed import write_segment

PAGE = 4096


def made(pages: int = 4) -> tuple[np.ndarray[Any, Any], Region]:
    memory = regions.make(pages * PAGE)
    array = np.frombuffer(memory, np.uint8, offset=DATA_OFFSET)
    region = regions.region_at(array.ctypes.data)
    assert region is not None
    region.publish()
    return array, region


def data(memory: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(memory, np.uint8, offset=DATA_OFFSET)


def test_a_mapping_is_used_again_and_shows_the_makers_bytes() -> None:
    array, region = made()
    mappings = Mappings(math.inf, 1 << 30)
    array[:] = 1
    first = data(mappings.take_region(region.path))
    assert region.is_read
    where = first.ctypes.data
    first[5 * PAGE // 2] = 9
    assert array.max() == 1
    other = data(mappings.take_region(region.path))  # two values at once: what is written to one is not in the other
    assert other.max() == 1
    del other
    del first
    gc.collect()
    assert not region.is_read
    array[:] = 2
    again = [data(mappings.take_region(region.path)), data(mappings.take_region(region.path))]
    assert where in [each.ctypes.data for each in again]
    assert [(int(each.min()), int(each.max())) for each in again] == [(2, 2), (2, 2)]
    mappings.close()
    assert again[0].sum() == 2 * again[0].size


def test_written_ranges_are_those_of_written_pages() -> None:
    array, region = made(640)
    array[:] = 1
    mapped = data(Mappings(math.inf, 1 << 30).take_region(region.path))
    start = mapped.ctypes.data
    if written_ranges(start, mapped.nbytes) is None:
        pytest.skip("this kernel is older than 6.7")
    assert mapped.sum() == mapped.nbytes
    assert written_ranges(start, mapped.nbytes) == []
    mapped[0 :: 2 * PAGE] = 3
    expected = [(start + at, start + at + PAGE) for at in range(0, mapped.nbytes, 2 * PAGE)]
    assert len(expected) == 320
    assert written_ranges(start, mapped.nbytes) == expected


def test_without_the_kernels_help_a_region_is_mapped_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    array, region = made()
    mappings = Mappings(math.inf, 1 << 30)
    data(mappings.take_region(region.path))[:] = 7
    gc.collect()
    array[:] = 1
    monkeypatch.setattr(mappings_module, "written_ranges", lambda *_: None)
    assert data(mappings.take_region(region.path)).max() == 1


@pytest.mark.processes
def test_forked_child_unlocks_nothing() -> None:
    assert start(_child_drops_its_copy).result() == "still read"


def _child_drops_its_copy(_: Pipe) -> str:
    _array, region = made()
    mappings = Mappings(math.inf, 1 << 30)
    held = [mappings.take_region(region.path)]
    if not (child := os.fork()):
        held.clear()
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    return "still read" if held and region.is_read else "unlocked"


def test_idle_mappings_are_few_and_end() -> None:
    regions = [made() for _ in range(MOST_IDLE + 3)]
    before = len(os.listdir("/proc/self/fd"))
    mappings = Mappings(math.inf, 1 << 30)
    for _, region in regions:
        mappings.take_region(region.path)
    mappings.trim()
    assert len(os.listdir("/proc/self/fd")) <= before + MOST_IDLE
    mappings.close()
    assert len(os.listdir("/proc/self/fd")) == before
    small = Mappings(math.inf, PAGE)
    small.take_region(regions[0][1].path)
    small.trim()
    assert len(os.listdir("/proc/self/fd")) == before
    short = Mappings(1e-9, 1 << 30)
    short.take_region(regions[0][1].path)
    while short.trim() is not None:
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_goes_back_to_the_system_although_it_is_mapped() -> None:
    array, region = made(256)
    array[:] = 1
    mappings = Mappings(math.inf, 1 << 30)
    held = mappings.take_region(region.path)
    file = os.open(region.path.partition("#")[0], os.O_RDONLY)
    del array, region
    gc.collect()
    regions.close()
    assert os.fstat(file).st_blocks * 512 >= 256 * PAGE  # a reader has it
    assert data(held).min() == 1
    array, region = made(256)
    array[:] = 1
    idle = os.open(region.path.partition("#")[0], os.O_RDONLY)
    mappings.take_region(region.path)
    gc.collect()
    del array, region
    gc.collect()
    regions.close()
    assert os.fstat(idle).st_blocks * 512 < 256 * PAGE
    os.close(file)
    os.close(idle)


def test_bad_paths_are_refused(tmp_path: Path) -> None:
    mappings = Mappings(math.inf, 1 << 30)
    for path in ("", str(tmp_path), "/proc/self/fd/0#1", f"/proc/{os.getpid()}/fd/99999#1"):
        with pytest.raises(OSError, match=r"."):
            mappings.take_region(path)
    assert ctypes.sizeof(mappings_module._ScanArgument) == 96


def test_a_sealed_segment_is_mapped_once() -> None:
    fd = write_segment([memoryview(bytes(range(256)) * 32)])
    path, nbytes = f"/proc/{os.getpid()}/fd/{fd}", 2 * PAGE
    mappings = Mappings(math.inf, 1 << 30)
    addresses = []
    for _ in range(3):
        memory = mappings.take_sealed(path, nbytes, 1)
        assert bytes(memory) == bytes(range(256)) * 32
        addresses.append(ctypes.addressof(memory))
        del memory
    assert len(set(addresses)) == 1
    both = [mappings.take_sealed(path, nbytes, 1), mappings.take_sealed(path, nbytes, 2)]
    assert ctypes.addressof(both[0]) == addresses[0] != ctypes.addressof(both[1])
    # Of another size, and a file that can shrink: reading a page that is gone would end this process.
    loose = os.memfd_create("raylane", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, nbytes)
    for file, size in ((path, nbytes + 1), (f"/proc/{os.getpid()}/fd/{loose}", nbytes), ("/dev/null", 0)):
        with pytest.raises(OSError, match=r"."):
            mappings.take_sealed(file, size, 3)
    os.close(loose)
    os.close(fd)
