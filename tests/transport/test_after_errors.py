"""After a call has raised, nothing of raylane writes into the caller's tensors, or works on for the call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch
from tests.transport.crews import OneMaker

import raylane
from raylane.core.deadline import Cancellation, Cancelled, Deadline
from raylane.errors import SourceLostError, TransferTimeoutError
from raylane.transport.link.endpoint import endpoint

LENGTH = 24 << 20
"""Elements of a large value: 96 MiB, which every transport moves for tens of milliseconds."""
TRANSPORTS = ["host", "tcp", "gloo"]


class Holder:
    @raylane.method
    def large(self) -> torch.Tensor:
        return torch.ones(LENGTH)

    @raylane.method
    def pair(self, a: Any = None, b: Any = None) -> torch.Tensor:
        return torch.ones(1 << 18)

    def pid(self) -> int:
        return os.getpid()

    def stats(self) -> dict[str, Any]:
        return raylane.stats()


class Crew(OneMaker):
    maker_class = Holder


@pytest.fixture
def holder(crew: Crew, tidy: None) -> Any:
    return crew.maker


@pytest.fixture
def lost(cluster: None, eventually: Any) -> Any:
    """Return a ref to a value whose source has died."""
    actor: Any = ray.remote(num_cpus=0)(Holder).remote()
    ref = actor.pair.remote()
    ray.wait([ref])
    pid = ray.get(actor.pid.remote())
    ray.kill(actor)
    eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    return ref


@pytest.fixture
def untouched(eventually: Any) -> Callable[[torch.Tensor], None]:
    """Return a function that fails if something writes into a tensor from now on."""

    def check(target: torch.Tensor) -> None:
        target.fill_(-1)
        here = endpoint()
        eventually(lambda: not here.fetchers.busy and not here.getters.busy, within_s=30)
        assert holds_only(target, -1)

    return check


def holds_only(target: torch.Tensor, value: float) -> bool:
    """Return True if all elements equal a number; a failed `assert` on the tensor itself would print it."""
    return bool((target == value).all())


@contextlib.contextmanager
def when_written(target: torch.Tensor, action: Callable[[], object]) -> Iterator[None]:
    """Call `action` on a thread as soon as the first or the last element of a target changes."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            if target[0] or target[-1]:
                action()
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_get_of_list_with_lost_source_leaves_targets_alone(
    holder: Any, lost: Any, untouched: Any, transport: str
) -> None:
    ref = holder.large.remote()
    ray.wait([ref])
    small, target = torch.zeros(1 << 18), torch.zeros(LENGTH)
    with pytest.raises(SourceLostError):
        raylane.get([lost, ref], into=[small, target], tensor_transport=transport, timeout=20)
    untouched(target)


@pytest.mark.claim("transport", "`into=` fills tensors of any strides; after an error nothing writes there")
@pytest.mark.parametrize("transport", ["host", "tcp"])
@pytest.mark.parametrize("count", [1, 2])
def test_ctrl_c_leaves_targets_alone(holder: Any, untouched: Any, transport: str, count: int) -> None:
    refs = [holder.large.remote() for _ in range(count)]
    ray.wait(refs, num_returns=count)
    targets = [torch.zeros(LENGTH) for _ in refs]

    def read() -> None:
        raylane.get(refs, into=targets, tensor_transport=transport)
        signal.pause()  # the transfer was quicker than the signal

    with pytest.raises(KeyboardInterrupt), when_written(targets[0], interrupt):
        read()
    for target in targets:
        untouched(target)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_cancelled_get_async_leaves_targets_alone(holder: Any, untouched: Any, transport: str) -> None:
    ref = holder.large.remote()
    ray.wait([ref])
    target = torch.zeros(LENGTH)

    async def read() -> None:
        task = asyncio.create_task(raylane.get_async(ref, into=target, tensor_transport=transport))
        while not target[0] and not task.done():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        target.fill_(-1)

    asyncio.run(read())
    assert holds_only(target, -1)
    untouched(target)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_get_with_short_timeout_leaves_targets_alone(holder: Any, untouched: Any, transport: str) -> None:
    refs = [holder.large.remote() for _ in range(2)]
    ray.wait(refs, num_returns=2)
    targets = [torch.zeros(LENGTH) for _ in refs]
    # What is read in one system call ends, however late: on a quick machine nothing is interrupted after 5 ms.
    for timeout in (0.005, 0.002, 0.001, 1e-4):
        try:
            raylane.get(refs, into=targets, tensor_transport=transport, timeout=timeout)
        except TransferTimeoutError:
            break
        assert all(holds_only(target, 1) for target in targets)
    else:
        pytest.fail("no timeout was too short")
    for target in targets:
        untouched(target)


def test_retry_after_error_gets_whole_content(holder: Any, lost: Any) -> None:
    refs = [holder.large.remote() for _ in range(2)]
    ray.wait(refs, num_returns=2)
    small, target = torch.zeros(1 << 18), torch.zeros(LENGTH)
    for transport in ("host", "tcp"):
        with pytest.raises(SourceLostError):
            raylane.get([lost, refs[0]], into=[small, target], tensor_transport=transport)
        raylane.get(refs[1], into=target, tensor_transport=transport)
        target += 1
        assert holds_only(target, 2)


def test_targets_that_do_not_fit_stop_all_reads(holder: Any, untouched: Any) -> None:
    refs = [holder.large.remote(), holder.pair.remote()]
    target = torch.zeros(LENGTH)
    with pytest.raises(ValueError, match="shape"):
        raylane.get(refs, into=[target, torch.zeros(3)])
    assert holds_only(target, 0)
    untouched(target)


def test_consumer_with_lost_argument_keeps_no_memory(holder: Any, lost: Any, eventually: Any) -> None:
    consumer: Any = ray.remote(num_cpus=0)(Holder).remote()
    ref = holder.large.remote()
    with pytest.raises(SourceLostError):
        ray.get(consumer.pair.remote(lost, ref))
    eventually(lambda: ray.get(consumer.stats.remote())["pool_used_bytes"] == 0)


def test_cancel_waits_for_writers_and_refuses_new_ones() -> None:
    cancellation, entered, leave = Cancellation(), threading.Event(), threading.Event()
    deadline = Deadline(None, cancellation)

    def write() -> None:
        with deadline.writing():
            entered.set()
            assert leave.wait(10)

    writer = threading.Thread(target=write)
    writer.start()
    assert entered.wait(10)
    canceller = threading.Thread(target=cancellation.cancel)
    canceller.start()
    while not cancellation.cancelled:
        pass
    assert deadline.left_s() == 0
    assert canceller.is_alive()
    with pytest.raises(Cancelled), deadline.writing():
        pass
    leave.set()
    canceller.join(10)
    assert not canceller.is_alive()
    writer.join()


def test_cancel_by_the_interrupted_writer_itself_returns() -> None:
    cancellation = Cancellation()
    block = cancellation.writing()
    block.__enter__()  # as if Ctrl-C had come before the `try` of the block
    cancellation.cancel()
    assert cancellation.cancelled


def test_cancel_interrupts_what_waits_and_nothing_later() -> None:
    cancellation = Cancellation()
    calls: list[str] = []
    with cancellation.interrupts(lambda: calls.append("ended")):
        pass
    with cancellation.interrupts(lambda: calls.append("waiting")):
        cancellation.cancel()
        cancellation.cancel()
    assert calls == ["waiting"]
    with pytest.raises(Cancelled), cancellation.interrupts(lambda: calls.append("late")):
        pass
