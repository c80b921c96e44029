"""What a reader receives when the owner frees, resizes, re-points or overwrites published memory. On a real Ray.

The rule: memory that its owner has freed, resized or re-pointed is never read, whatever the options; under
`on_mutation="error"`, and for snapshots, a reader receives exactly what was published or a typed error.
"""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch

import raylane
from raylane.core.process import vm
from raylane.errors import TensorFreedError, TensorMutatedError
from raylane.testing.leaks import leaks, snapshot

TRANSPORTS = ("host", "tcp", "object_store", "local")
NUMEL = 50_000
"""float32: 200 kB, above what travels inside a reply and below where malloc maps memory of its own."""


def _free_storage(value: Any) -> None:
    value.untyped_storage().resize_(0)


def _shrink_storage(value: Any) -> None:
    value.untyped_storage().resize_(64)


def _grow(value: Any) -> None:
    value.resize_(4 * NUMEL)


def _set(value: Any) -> None:
    value.set_(torch.full((NUMEL,), 77.0))


def _assign_data(value: Any) -> None:
    value.data = torch.full((NUMEL,), 77.0)


def _share(value: Any) -> None:
    value.share_memory_()


MOVES: dict[str, Callable[[Any], None]] = {
    "free_storage": _free_storage,
    "shrink_storage": _shrink_storage,
    "grow": _grow,
    "set": _set,
    "assign_data": _assign_data,
    "share_memory": _share,
}
ARRAY_MOVES: dict[str, Callable[[Any], None]] = {
    "resize": lambda array: array.resize(4 * NUMEL, refcheck=False),
    "shrink": lambda array: array.resize(8, refcheck=False),
}


def _cycle(value: Any) -> None:
    """Free the memory and take as much again: often at the same address."""
    storage = value.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    other = [torch.full((NUMEL,), 77.0) for _ in range(3)]
    storage.resize_(nbytes)
    del other


def _fused_step(value: Any) -> None:
    value.requires_grad_()
    value.grad = torch.ones_like(value)
    torch.optim.AdamW([value], lr=0.5, fused=True).step()
    value.grad = None
    value.requires_grad_(False)


WRITES: dict[str, Callable[[Any], None]] = {
    "add": lambda value: value.add_(1),
    "data_add": lambda value: value.data.add_(1),
    "numpy_item": lambda value: value.numpy().__setitem__(random.randrange(NUMEL), 5e9),
    "fused_adamw": _fused_step,
    "out": lambda value: torch.mul(value, 2, out=value),
    "negate": lambda value: value.neg_(),
    "swap_halves": lambda value: value.copy_(value.roll(NUMEL // 2)),
}


class Owner:
    """The producing process; it keeps the tensor and does to it what a test asks for."""

    def publish(self, kind: str, options: dict[str, Any]) -> list[Any]:
        self.value: Any = torch.arange(NUMEL, dtype=torch.float32)
        if kind == "array":
            self.value = self.value.numpy().copy()
        elif kind == "view":
            self.value = self.value.numpy().copy()
            return [raylane.put(self.value[10:-10], **options)]
        return [raylane.put(self.value, **options)]

    def act(self, name: str) -> bool:
        """Do this to the value; False if torch refuses, as it does to resize what NumPy has seen."""
        try:
            ({"cycle": _cycle} | MOVES | ARRAY_MOVES | WRITES)[name](self.value)
        except RuntimeError as error:
            if "not resizable" not in str(error):
                raise
            return False
        self.other = [torch.full((NUMEL,), 77.0) for _ in range(8)]  # what takes freed memory
        return True

    def write_meanwhile(self) -> None:
        """Overwrite the tensor without torch's knowledge until `stop_writing`."""
        self.stop = threading.Event()
        target = self.value.numpy()

        def run() -> None:
            while not self.stop.is_set():
                np.add(target, 1, out=target)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def stop_writing(self) -> None:
        self.stop.set()
        self.thread.join()

    def read_own(self, box: list[Any]) -> Any:
        return _outcome(lambda: ray.get(box[0]))


def _outcome(read: Callable[[], Any]) -> Any:
    """A copy of the tensor read, or the class of the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = read()
        except (TensorFreedError, TensorMutatedError) as error:
            return type(error).__name__
    return torch.as_tensor(value).clone()


def _read(owner: Any, ref: Any, transport: str) -> Any:
    if transport == "local":
        return ray.get(owner.read_own.remote([ref]))
    return _outcome(lambda: raylane.get(ref, tensor_transport=transport))


@pytest.fixture(scope="module")
def owners(ray_session: None) -> Iterator[list[Any]]:
    before = snapshot()
    owners = [ray.remote(num_cpus=0)(Owner).remote()]
    yield owners
    owners.clear()
    assert not leaks(before, within_s=20)


@pytest.fixture
def owner(owners: list[Any]) -> Any:
    return owners[0]


PUBLISHED = torch.arange(NUMEL, dtype=torch.float32)


@pytest.mark.parametrize("on_mutation", ["allow", "warn", "error"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_read_of_moved_tensor_raises_freed(owner: Any, transport: str, on_mutation: str) -> None:
    for move in MOVES:
        ref = ray.get(owner.publish.remote("tensor", {"on_mutation": on_mutation}))[0]
        assert torch.equal(_read(owner, ref, transport), PUBLISHED)
        assert ray.get(owner.act.remote(move))
        assert _read(owner, ref, transport) == "TensorFreedError", move


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_read_of_resized_array_raises_freed(owner: Any, transport: str) -> None:
    for kind in ("array", "view"):
        for move in ARRAY_MOVES:
            ref = ray.get(owner.publish.remote(kind, {}))[0]
            ray.get(owner.act.remote(move))
            assert _read(owner, ref, transport) == "TensorFreedError", (kind, move)


@pytest.mark.claim("transport", '`on_mutation="error"` and `RAYLANE_CHECKSUM=1` find changed bytes, by a checksum')
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_strict_read_after_any_write_raises_mutated(owner: Any, transport: str) -> None:
    for write in WRITES:
        ref = ray.get(owner.publish.remote("tensor", {"on_mutation": "error"}))[0]
        assert torch.equal(_read(owner, ref, transport), PUBLISHED)
        ray.get(owner.act.remote(write))
        assert _read(owner, ref, transport) == "TensorMutatedError", write


@pytest.mark.claim("transport", "a strict read beside writes is exact, or an error")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_strict_read_during_writes_is_exact_or_an_error(owner: Any, transport: str) -> None:
    ref = ray.get(owner.publish.remote("tensor", {"on_mutation": "error"}))[0]
    ray.get(owner.write_meanwhile.remote())
    try:
        for _ in range(10):
            found = _read(owner, ref, transport)
            assert found == "TensorMutatedError" if isinstance(found, str) else torch.equal(found, PUBLISHED)
    finally:
        ray.get(owner.stop_writing.remote())


@pytest.mark.claim("security", "readers never get other memory, whatever a producer frees or overwrites")
@pytest.mark.parametrize("seed", range(6))
def test_reads_among_random_actions_keep_the_rule(owner: Any, seed: int) -> None:
    """Random sequences of frees, moves and writes against random reads over every transport."""
    rng = random.Random(seed)
    for _ in range(6):
        options: dict[str, Any] = {"on_mutation": rng.choice(["allow", "warn", "error"])}
        if rng.random() < 0.25:
            options = {"snapshot": True}
        ref = ray.get(owner.publish.remote("tensor", options))[0]
        moved = cycled = written = False
        for _ in range(rng.randint(1, 5)):
            action = rng.choice(["none", "none", "cycle", *MOVES, *WRITES])
            if action in MOVES or (action == "cycle" and not moved):
                done = ray.get(owner.act.remote(action))
                moved, cycled = moved or (done and action in MOVES), cycled or action == "cycle"
            elif action in WRITES and not (moved or cycled):
                ray.get(owner.act.remote(action))
                written = True
            transport = rng.choice(TRANSPORTS)
            found = _read(owner, ref, transport)
            note = (options, action, transport, moved, cycled, written, found)
            if options.get("snapshot"):
                assert torch.equal(found, PUBLISHED), note
            elif moved:
                assert found == "TensorFreedError", note
            elif options["on_mutation"] == "error":
                typed = {"TensorFreedError"} if cycled else set()
                typed |= {"TensorMutatedError"} if cycled or written else set()
                assert found in typed if isinstance(found, str) else torch.equal(found, PUBLISHED), note
            elif isinstance(found, str):
                assert cycled, note
                assert found == "TensorFreedError", note
            else:
                assert found.shape == PUBLISHED.shape, note
                assert written or cycled or torch.equal(found, PUBLISHED), note


def test_array_root_is_named_by_its_guards() -> None:
    """What an array borrows is watched to its owner, a tensor's storage included."""
    from raylane.transport.value.guards import footprint, guard_ranges, owners_of

    def strided() -> Any:
        return np.lib.stride_tricks.sliding_window_view(np.zeros(100), 10)

    def through_a_buffer() -> Any:
        return np.frombuffer(np.zeros(100).data, dtype=np.float64)

    made = [np.zeros(100), np.zeros((4, 25))[1:], torch.zeros(100).numpy()[3:], strided(), through_a_buffer()]
    for array in made:
        ranges = vm.pack_ranges(guard_ranges([array]) or [])
        assert ranges
        then, before = footprint(array), vm.gather(os.getpid(), ranges)
        assert footprint(array) == then
        assert vm.gather(os.getpid(), ranges) == before
        *_, root = owners_of(array)
        if isinstance(root, np.ndarray):
            root.resize(8, refcheck=False)
            assert footprint(array) != then
            assert vm.gather(os.getpid(), ranges) != before


@pytest.mark.usefixtures("ray_session")
def test_strict_read_of_own_columns_brings_what_was_put() -> None:
    for _ in range(8):  # copies lie in whatever order the allocator gives
        columns = [torch.randn(NUMEL, 4)[:, 0] for _ in range(6)]
        ref = raylane.put(columns, on_mutation="error")
        assert all(map(torch.equal, raylane.get(ref), columns))
        columns[3].add_(1)
        with pytest.raises(TensorMutatedError):
            raylane.get(ref)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("numel", [1_000, NUMEL])
def test_put_of_tensor_without_its_memory_raises_freed(numel: int) -> None:
    tensor = torch.ones(numel)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(TensorFreedError, match="storage holds 0 bytes"):
        raylane.put({"weights": tensor})
