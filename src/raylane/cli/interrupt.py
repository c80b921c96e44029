"""Ctrl-C while a command imports packages, and while it trains. Called by the commands."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def exit_on_interrupt(command: str) -> Iterator[None]:
    """End the process on Ctrl-C in a `with` block that only imports packages: one line, and exit status 130.

    Extension modules run Python code where an exception cannot be raised (Cython's patches of `collections.abc`, for
    example). A KeyboardInterrupt there is printed with a traceback and dropped, and the command goes on.
    """
    if not _may_replace():
        yield
        return

    def end(*_: object) -> None:
        os.write(2, f"\nraylane {command}: interrupted\n".encode())
        os._exit(130)  # nothing has begun that would have to be ended

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def announce_interrupt(command: str) -> Iterator[None]:
    """Print on Ctrl-C in a `with` block at once that the command stops; the KeyboardInterrupt then ends the block.

    To end the workers takes seconds, in which a user would press Ctrl-C again.
    """
    if not _may_replace():
        yield
        return

    def announce(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, f"\nraylane {command}: stopping, the workers end ...\n".encode())
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, announce)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _may_replace() -> bool:
    """Return True if this thread may set the handler of SIGINT, and the handler is Python's own."""
    # Another handler, or none in a background job, belongs to the caller; only the main thread can set one.
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
