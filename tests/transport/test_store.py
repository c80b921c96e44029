from __future__ import annotations

import threading

import torch

from raylane.core.deadline import Deadline
from raylane.core.memory.spans import Span
from raylane.transport.hold.store import Entry, Store
from raylane.transport.value import codec
from raylane.transport.value.guards import footprint
from raylane.transport.value.leaf_memory import leaf_span


def entry(key: bytes, tensor: torch.Tensor) -> Entry:
    return Entry(
        key=key,
        leaves=[tensor],
        layout=codec.plan_layout([tensor]),
        footprints=[footprint(tensor)],
        for_callers=True,
    )


def test_publish_get_free() -> None:
    store = Store()
    one = entry(b"1", torch.ones(10))
    store.publish(one)
    assert store.get(b"1") is one
    assert store.stats() == {"entries": 1, "entry_bytes": 40, "published": 1}
    store.free([b"1", b"unknown"])
    assert store.get(b"1") is None
    assert repr(store) == "Store(0 entries, 0 bytes)"
    store.free([b"1"])


def test_free_in_a_finalizer_never_waits_for_the_lock() -> None:
    store = Store()
    store.publish(entry(b"1", torch.ones(10)))
    store.publish(entry(b"2", torch.ones(10)))
    store.free_soon([b"1"])
    assert len(store) == 1
    with store.freed:  # as if the finalizer ran in a thread that uses the store
        store.free_soon([b"2"])
    store.free([])
    assert len(store) == 0


def test_marks_tell_who_read_before() -> None:
    store = Store()
    one = entry(b"1", torch.ones(10))
    store.publish(one)
    assert store.mark_read(one, creator=False) == (False, False)
    assert store.mark_read(one, creator=True) == (False, True)
    assert store.mark_read(one, creator=False) == (True, True)
    store.free([b"1"])
    assert store.mark_read(one, creator=False) == (False, False)


def test_wait_freed_wakes_when_the_last_overlap_goes() -> None:
    store = Store()
    base = torch.zeros(100)
    store.publish(entry(b"1", base[:50]))
    store.publish(entry(b"2", base[40:]))
    spans = [leaf_span(base[45:46])]
    assert not store.wait_freed(spans, Deadline(0))
    woken = []
    thread = threading.Thread(target=lambda: woken.append(store.wait_freed(spans, Deadline(30))))
    thread.start()
    store.free([b"1"])
    assert not store.wait_freed(spans, Deadline(0))
    store.free([b"2"])
    thread.join()
    assert woken == [True]
    assert store.wait_freed([Span(0, 1)], Deadline(0))


def test_wait_freed_ignores_memory_that_its_owner_gave_up() -> None:
    store = Store()
    tensor = torch.zeros(100)
    span = leaf_span(tensor)
    store.publish(entry(b"1", tensor))
    assert not store.wait_freed([span], Deadline(0))
    tensor.untyped_storage().resize_(0)  # whatever lies at its old address now is not what was published
    assert store.wait_freed([span], Deadline(0))


def test_a_write_after_publication_is_known() -> None:
    tensor = torch.ones(4)
    one = entry(b"1", tensor)
    one.versions = [(tensor, tensor._version)]
    assert not one.is_mutated()
    tensor.mul_(2)
    assert one.is_mutated()


def test_tensor_set_to_another_storage_at_one_address_is_moved() -> None:
    memory = bytearray(4_000)  # stands for memory that was freed and allocated again
    tensor, other = (torch.frombuffer(memory, dtype=torch.float32) for _ in range(2))
    one = entry(b"1", tensor)
    assert one.is_intact()
    tensor.set_(other)
    assert tensor.data_ptr() == other.data_ptr()
    assert not one.is_intact()
