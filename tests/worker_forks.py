"""Workers of Ray as forks of one process that has imported torch: an actor starts in a quarter of the time.

    ray.init  -->  raylet  -->  launcher (tests/worker_launcher.py)  -->  server (this file)  -->  fork = worker

The server belongs to a test process and ends with it. A worker that a fork cannot stand in for starts as usual. Ray
itself cannot be imported before the fork: it reads the environment then.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODULES = (
    "fsspec",
    "numpy",
    "pydantic",
    "torch",
    # What Ray imports. Not grpc, which is not to be forked.
    *("colorama", "filelock", "google.protobuf.json_format", "jsonschema", "msgpack", "packaging.version", "pdb"),
    *("psutil", "requests", "yaml"),
    *(f"torch.distributed.{name}" for name in ("checkpoint", "fsdp", "pipelining", "tensor.parallel")),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3")),
)
"""What actors of tests import, without all that imports Ray."""


@contextlib.contextmanager
def worker_forks() -> Iterator[str]:
    """Give the path of a program that, as `sys.executable` while Ray starts, lets that Ray fork its workers.

    The server imports its modules meanwhile, and ends after the block. Workers that run then go on.
    """
    with tempfile.TemporaryDirectory(prefix="raylane-forks-") as folder:
        address, launcher = Path(folder, "socket"), Path(folder, "python")
        program = Path(__file__).with_name("worker_launcher.py")
        launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{program}" "{address}" "$@"\n')
        launcher.chmod(0o755)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(address))
            listener.listen(64)
            # The pipe ends with this process, whatever way it ends, and the server with the pipe.
            server = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        try:
            yield str(launcher)
        finally:
            assert server.stdin
            server.stdin.close()
            server.wait()


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request and the descriptors of standard input, output and errors."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as stream:
        return json.load(stream), descriptors


def _serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each request. Return the request in the child, None at the end in the server."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes children that have ended
    watched = select.poll()
    watched.register(0, select.POLLHUP | select.POLLIN)
    watched.register(listener, select.POLLIN)
    while True:
        if any(descriptor == 0 for descriptor, _ in watched.poll()):
            return None
        connection, _ = listener.accept()
        with connection:
            request, descriptors = _receive(connection)
            if not os.fork():
                listener.close()
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                return request
            for descriptor in descriptors:
                os.close(descriptor)
            connection.sendall(b"f")


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    for name in MODULES:
        with contextlib.suppress(ModuleNotFoundError):  # some versions of Ray bring their own
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    request = _serve(listener)
    if request is None:
        return
    os.setpgrp()  # Ray kills a worker with its process group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked_signals"])
    os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.modules["numpy"].random.seed()
    sys.argv = request["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
