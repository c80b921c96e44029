"""Reuse of memory that readers map: whether it is free, rings of buffers, and values moved into such memory."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raylane.core.deadline import Deadline
from raylane.core.memory import regions
from raylane.core.memory.layout import blocks_in, bytes_at, segment_offsets
from raylane.core.process import copying
from raylane.errors import TransferTimeoutError
from raylane.transport.link.endpoint import existing
from raylane.transport.value import codec
from raylane.transport.value.arrays import Form
from raylane.transport.value.leaf_memory import leaf_address, leaf_span

_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.0001, 0.01
"""Time between two looks at locks of other processes, which nothing announces; it grows from the first to the last."""


def is_free(tensor: Any) -> bool:
    """Return True if a tensor or an array may be written to: nobody reads its memory, or may still come to read it.

    False while a ref to a published value with its memory exists. Memory of `raylane.empty` is also in use while a
    reader has such a value mapped, and while a receiver of a graph holds a message in it; all of the memory counts,
    also where `tensor` is a part of it. Readers and receivers that died do not count; a message that a receiver had not
    taken when it died counts until the graph is torn down. Does not wait. TypeError if it is neither a tensor nor an
    array.
    """
    return _holder(tensor) is None


def wait_free(tensor: Any, timeout: float | None = None) -> None:
    """Wait until `is_free`.

    Other processes must drop refs and mapped values meanwhile: if the driver holds a ref and waits for a method that
    calls this function, both wait for each other.

    Args:
        tensor: A torch tensor or a NumPy array.
        timeout: Seconds; None means RAYLANE_TIMEOUT_S (60 s).

    Raises:
        TransferTimeoutError: It is still in use after the timeout.
        TypeError: `tensor` is no tensor or array.
    """
    deadline = Deadline.of_call(timeout)
    process = existing()
    if _holder(tensor) is not None and process is not None:
        process.store.wait_freed([leaf_span(tensor)], deadline)  # wakes at once, where the end of a lock is looked for
    if not _until(lambda: _holder(tensor) is None, deadline) and (holder := _holder(tensor)) is not None:
        raise TransferTimeoutError(
            f"a tensor of shape {tuple(tensor.shape)} is still referenced after {deadline.timeout_s} s: {holder}"
        )


def _holder(tensor: Any) -> str | None:
    """Return who uses the memory of a tensor, with a remedy; None if nobody does."""
    if not codec.is_leaf(tensor):
        raise TypeError(f"expected a torch tensor or a NumPy array, got {type(tensor).__name__}")
    process = existing()
    # The store first: a reader takes its lock before it makes sure that the value is still published.
    if process is not None and not process.store.wait_freed([leaf_span(tensor)], Deadline(0)):
        return (
            "there are refs to a value that contains it. Drop every ObjectRef to it (`del ref` in the processes that "
            "hold one), and end the calls that use it"
        )
    region = regions.region_at(leaf_address(tensor))
    if region is None or not region.is_read:
        return None
    return (
        "readers on this host have it mapped, or a graph's receivers hold it. Let them drop it, or read it with "
        "raylane.get(ref, copy=True)"
    )


def _until(condition: Callable[[], object], deadline: Deadline) -> bool:
    """Wait for something that other processes do, and return True; False after the deadline."""
    wait_s = _SHORTEST_WAIT_S
    while not condition():
        left_s = deadline.left_s()
        if left_s is not None and left_s <= 0:
            return False
        time.sleep(wait_s if left_s is None else min(wait_s, left_s))
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
    return True


class Buffers:
    """A ring of arrays or tensors in memory of `raylane.empty`, each given out again when nobody has it any more.

        self.buffers = raylane.Buffers((64, 1024), torch.float32, 3)

        @raylane.method
        def batch(self):
            target = self.buffers.take()
            torch.randn(target.shape, out=target)
            return target

    A buffer is free again when the tensor that `take` returned and all its views are garbage in this process, no ref to
    a value with it exists, and no reader has it mapped. With one buffer more than values are under way, nothing waits.
    Thread-safe.
    """

    def __init__(self, shape: int | Sequence[int], dtype: Any, count: int) -> None:
        """Make `count` buffers; a torch dtype makes tensors, another dtype NumPy arrays. Errors as `raylane.empty`."""
        if count < 1:
            raise ValueError(f"Buffers: count must be at least 1, got {count}")
        self._form = Form.of(shape, dtype, where="Buffers")
        if not self._form.nbytes:
            raise ValueError(f"Buffers: an array of shape {self._form.shape} has no memory to use again")
        # A region for each: readers lock whole regions.
        memories = [regions.make(self._form.nbytes) for _ in range(count)]
        self._ring = [_Buffer(memory) for memory in memories]
        """In the order in which they were taken."""
        self._lock = threading.Lock()  # guards _ring

    def take(self, timeout: float | None = None) -> Any:
        """Return a free buffer, the one that was taken longest ago; wait for one. The content is that of its last use.

        TransferTimeoutError after `timeout` seconds (None: RAYLANE_TIMEOUT_S, 60 s).
        """
        deadline, taken = Deadline.of_call(timeout), []

        def take_free() -> bool:
            with self._lock:
                buffer = next((buffer for buffer in self._ring if buffer.is_free), None)
                if buffer is None:
                    return False
                self._ring.remove(buffer)
                self._ring.append(buffer)
                taken.append(buffer.lend())
                return True

        if _until(take_free, deadline):
            return self._form.over(taken[0], 0)
        raise TransferTimeoutError(
            f"none of {len(self)} buffers of shape {self._form.shape} was free within {deadline.timeout_s} s: each is "
            "held by a tensor in this process, by a ref or by a reader. Make more of them (count), drop refs and "
            "tensors earlier, or read with raylane.get(ref, copy=True)"
        )

    def __len__(self) -> int:
        return len(self._ring)

    def __repr__(self) -> str:
        with self._lock:
            free = sum(buffer.is_free for buffer in self._ring)
        return f"Buffers({self._form.shape}, {self._form.dtype}, {len(self)}): {free} free"


class _Buffer:
    """Memory of one region, and the loan of it that is under way."""

    __slots__ = ("_loan", "_memory", "_region")

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        region = regions.region_at(ctypes.addressof(memory) + regions.DATA_OFFSET)
        assert region is not None
        self._region = region
        self._loan: Callable[[], object] = lambda: None

    @property
    def is_free(self) -> bool:
        """True if no array over a loan exists here, which includes those of published values, and nobody reads."""
        return self._loan() is None and not self._region.is_read

    def lend(self) -> Any:
        """Return the memory as an object that all arrays over it keep alive."""
        nbytes = ctypes.sizeof(self._memory) - regions.DATA_OFFSET
        loan = (ctypes.c_char * nbytes).from_buffer(self._memory, regions.DATA_OFFSET)
        self._loan = weakref.ref(loan)
        return loan


def to_shared(value: Any) -> Any:
    """Return a value with its CPU tensors and arrays, nested anywhere, in memory of `raylane.empty`.

    They are copied together, and tensors that share memory share it afterwards. A `torch.nn.Module` is changed in
    place: its parameters and buffers move there, and stay the same objects, as optimizers need them. CUDA tensors stay
    where they are. Raises the errors of pickling the rest of the value; OSError if there is no descriptor left.
    """
    if isinstance(value, torch.nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        # `data`, because the parameters themselves are known to optimizers and to other modules.
        for tensor, moved in zip(tensors, _in_one_region(tensors), strict=True):
            tensor.data = moved.data
        return value
    # As if it were published: what is no tensor is pickled, and arrives as a copy.
    skeleton, leaves = codec.encode_value(value)
    return codec.decode_value(skeleton, _in_one_region(leaves))


def _in_one_region(leaves: Sequence[Any]) -> list[Any]:
    """Return copies of leaves in one region; CUDA tensors as they are."""
    moved = [i for i, leaf in enumerate(leaves) if not (isinstance(leaf, torch.Tensor) and leaf.is_cuda)]
    layout = codec.plan_layout([leaves[i] for i in moved])
    sizes = [block.nbytes for block in layout.blocks]
    offsets, total = segment_offsets(sizes)
    if not total:
        return list(leaves)
    memory = regions.make(total)
    blocks = blocks_in(memory, [regions.DATA_OFFSET + offset for offset in offsets], sizes)
    for target, block in zip(blocks, layout.blocks, strict=True):
        copying.copy(memoryview(target).cast("B"), bytes_at(block.start, block.nbytes))
    copies = dict(zip(moved, codec.build_leaves(layout.specs, blocks), strict=True))
    return [copies.get(i, leaf) for i, leaf in enumerate(leaves)]
