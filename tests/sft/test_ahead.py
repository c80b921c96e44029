"""Reading ahead: the next item is read while the caller works on the current one."""

from __future__ import annotations

import threading

import pytest

from raylane.sft.run.worker import ReadAhead


def test_read_ahead_reads_the_next_item_meanwhile():
    here, begun = threading.get_ident(), {number: threading.Event() for number in range(4)}
    threads = {}

    def read(number):
        threads[number] = threading.get_ident()
        begun[number].set()
        return number * 10

    ahead = ReadAhead(read, 3)
    assert ahead.take(0) == 0
    assert begun[1].wait(30), "nobody has asked for it yet"
    assert [ahead.take(1), ahead.take(2)] == [10, 20]
    assert not begun[3].is_set(), "there is no fourth one"
    assert threads[0] == here != threads[1]
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("raylane-rows")]


def test_read_ahead_takes_items_out_of_order():
    ahead = ReadAhead(lambda number: number, 9)
    assert [ahead.take(number) for number in (0, 5, 5, 2, 3)] == [0, 5, 5, 2, 3]
    ahead.close()
    assert ahead.take(1) == 1
    ahead.close()
    ahead.close()


def test_read_ahead_raises_when_the_item_is_taken():
    def read(number):
        if number == 1:
            raise OSError("gone")
        return number

    ahead = ReadAhead(read, 9)
    assert ahead.take(0) == 0
    with pytest.raises(OSError, match="gone"):
        ahead.take(1)
    assert ahead.take(2) == 2
    ahead.close()
