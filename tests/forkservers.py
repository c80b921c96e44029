"""Server processes that have imported some modules, and fork a child for each test that asks for one.

Python has one such server for each process, with the modules that were asked for first. Here each set of modules has a
server of its own: ranks of a training run start with torch and transformers, and other children must not have torch.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest

CONTEXT = multiprocessing.get_context("forkserver")


class Server:
    """Starts processes that have imported `modules`. The server itself starts with the first of them."""

    def __init__(self, modules: list[str]) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(modules)

    def start(self, function: Callable[..., Any], *args: Any) -> ForkServerProcess:
        """Run a module-level function in a new process."""
        process = CONTEXT.Process(target=function, args=args, daemon=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forkserver, "connect_to_new_process", self._server.connect_to_new_process)
            process.start()
        return process
