"""Values in blocks of shared memory, without Ray."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from raylane.core.deadline import Deadline
from raylane.core.memory.segment import Segment
from raylane.errors import GraphValueError
from raylane.rl.queue.blocks import IDLE_S, BlockWriter, WrittenItem, block_bytes, read_item

BLOCK = 1 << 20


class Host:
    """Host in this process."""

    def __init__(self) -> None:
        self.held: dict[str, Segment] = {}
        self.limits_s: list[float | None] = []
        """Timeout of each call of `hold`."""
        self.now = 100.0
        self.writer = BlockWriter(BLOCK, 4 * BLOCK, self.hold, self.forget, clock=lambda: self.now)

    def write(self, value: Any, timeout_s: float | None = None) -> WrittenItem:
        return self.writer.write(value, Deadline(timeout_s))

    def hold(self, path: str, deadline: Deadline) -> str:
        self.limits_s.append(deadline.timeout_s)
        self.held[path] = Segment.open(path, keep_fd=True)
        return path

    def forget(self, paths: list[str]) -> None:
        for path in paths:
            self.held.pop(path).close_fd()

    def read(self, item: WrittenItem) -> Any:
        view = self.held[self.writer.blocks[item.block].path].view
        return read_item(view[item.offset : item.offset + item.nbytes])

    def close(self) -> None:
        self.writer.blocks.clear()
        self.forget(list(self.held))


@pytest.fixture
def host() -> Any:
    made = Host()
    yield made
    made.close()


VALUES = (
    None,
    7,
    "text",
    "long text " * 20_000,
    b"bytes",
    {"tokens": torch.arange(12).reshape(3, 4), "rewards": torch.ones(3, dtype=torch.bfloat16), "prompt": "a"},
    [torch.zeros(0), torch.tensor(3.5), np.arange(5, dtype=np.int16), (1, 2)],
    torch.arange(24.0).reshape(4, 6)[:, ::2],
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_what_was_written(host: Host, value: Any) -> None:
    read = host.read(host.write(value))
    assert type(read) is type(value)
    if isinstance(value, dict):
        assert read.keys() == value.keys()
        assert all(torch.equal(read[key], value[key]) for key in ("tokens", "rewards"))
    elif isinstance(value, list):
        assert torch.equal(read[0], value[0])
        assert torch.equal(read[1], value[1])
        assert np.array_equal(read[2], value[2])
        assert read[3] == value[3]
    elif isinstance(value, torch.Tensor):
        assert torch.equal(read, value)
    else:
        assert read == value


def test_views_stay_tied(host: Host) -> None:
    whole = torch.arange(10)
    first, second = host.read(host.write([whole, whole[2:4]]))
    first[2] = -1
    assert second[0] == -1


def test_blocks_are_used_again(host: Host) -> None:
    value = torch.zeros(BLOCK // 3, dtype=torch.uint8)
    written = [host.write(value) for _ in range(5)]
    assert [item.block for item in written] == [1, 1, 2, 2, 3]
    assert host.writer.take_full() == [1, 2]
    assert host.writer.take_full() == []
    host.writer.release([1], 4 * BLOCK)
    assert [host.write(value).block for _ in range(3)] == [3, 1, 1]


def test_large_item_has_a_block_of_its_own(host: Host) -> None:
    large = host.write(torch.ones(3 * BLOCK, dtype=torch.uint8), timeout_s=4)
    assert host.read(large).sum() == 3 * BLOCK
    assert host.limits_s == [4]  # the host is not waited for longer than the caller does
    assert host.write(1).block == large.block
    host.write(torch.zeros(BLOCK // 2))
    host.writer.release([large.block], 4 * BLOCK)
    # Beyond the limit of the queue, blocks of other sizes are given up.
    host.write(torch.zeros(3 * BLOCK // 2))
    assert large.block not in host.writer.blocks
    assert len(host.held) == len(host.writer.blocks)


def test_free_blocks_beyond_the_share_are_given_up(host: Host) -> None:
    written = [host.write(torch.zeros(BLOCK // 2, dtype=torch.uint8)).block for _ in range(4)]
    host.writer.release(written[:2], 3 * BLOCK)
    # Not at once: a stream of items would need new pages again and again.
    assert sorted(host.writer.blocks) == written
    host.now += IDLE_S
    host.writer.release([], 3 * BLOCK)
    assert sorted(host.writer.blocks) == written[1:]
    assert len(host.held) == 3
    # Blocks in use are kept, whatever the share is, and those that were used meanwhile.
    host.writer.release([], BLOCK)
    assert sorted(host.writer.blocks) == written[2:]
    host.writer.release([written[2]], BLOCK)
    assert host.write(torch.zeros(BLOCK // 2, dtype=torch.uint8)).block == written[2]
    host.now += IDLE_S
    host.writer.release([], BLOCK)
    assert sorted(host.writer.blocks) == written[2:]


def test_values_that_cannot_be_pickled_are_refused(host: Host) -> None:
    with pytest.raises(GraphValueError):
        host.write(threading.Lock())
    assert host.read(host.write("next")) == "next"


def test_block_size_follows_the_queue() -> None:
    assert block_bytes(1000) == 1 << 20
    assert block_bytes(1 << 30) == 16 << 20
