"""Doorbell of a process: one semaphore that every message to the process posts, whichever ring the message lies in.

    writer                               reader
    1. fill the slot
    2. post the ring's semaphore         polls the semaphores of its rings without waiting
    3. post the doorbell           --->  waits for the doorbell when all rings are empty

A reader often finds a message by polling before it has consumed the message's doorbell post. `Doorbell` counts consumed
posts, so that such left-over posts are consumed (`absorb`) before the reader sleeps: otherwise each of them would end a
later wait for nothing.
"""

from __future__ import annotations

from raylane.core.semaphore import Segment, init, try_wait
from raylane.core.waiting import Waiter


class Doorbell:
    """Doorbell of this process. One thread waits at a time; any process posts."""

    __slots__ = ("address", "consumed", "segment", "waiter")

    def __init__(self) -> None:
        self.segment = Segment.make(4096)
        self.address = self.segment.address
        init(self.address)
        self.consumed = 0
        """Posts consumed. Lower than the number of messages read when messages were found by polling."""
        self.waiter = Waiter()

    def wait(self, timeout_s: float) -> bool:
        """Wait for one post and consume it. Return False after `timeout_s` (at most one second) or on a signal."""
        if self.waiter.wait(self.address, timeout_s):
            self.consumed += 1
            return True
        return False

    def absorb(self, messages_read: int) -> bool:
        """Consume posts of messages that were read before their posts. Return True if there were any.

        After True the rings must be polled again: the consumed post may belong to a message that nobody has seen yet.
        """
        found = False
        while self.consumed < messages_read and not try_wait(self.address):
            self.consumed += 1
            found = True
        return found
