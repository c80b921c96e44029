"""Ctrl-C while a command imports packages. Called by the commands around their slow imports."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exit_on_interrupt(command: str) -> Iterator[None]:
    """End the process on Ctrl-C in a `with` block that only imports packages: one line, and exit status 130.

    Extension modules run Python code where an exception cannot be raised (Cython's patches of `collections.abc`, for
    example). A KeyboardInterrupt there is printed with a traceback and dropped, and the command goes on.
    """
    # Another handler, or none in a background job, belongs to the caller; only the main thread can set one.
    replaces = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not replaces:
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
