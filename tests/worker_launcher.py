"""Stands in for Python where Ray starts a worker: asks tests/worker_forks.py for a fork, or starts Python itself.

worker_launcher.py <socket of the server> <arguments of Python>
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

# Variables that an interpreter or an imported module has read before the fork, or may have.
READ_EARLY = ("PYTHON", "LD_", "OMP_", "MKL_", "OPENBLAS_", "TORCH", "HF_", "TRANSFORMERS_")
CONTEXT = "--serialized-runtime-env-context="


def worker_command(arguments: list[str]) -> tuple[list[str], dict[str, str]] | None:
    """Return script and arguments of a worker, and the variables of its runtime environment; None for a process of
    another kind, and for a worker that asks for more than variables.

    Ray starts a worker as `default_worker.py ...`, or as `setup_worker.py default_worker.py ...`, which applies the
    runtime environment, then starts Python again.
    """
    words = [word for word in arguments if not word.startswith((CONTEXT, "--language="))]
    if words[:1] and words[0].endswith("setup_worker.py"):
        del words[0]
    if not words[:1] or not words[0].endswith("default_worker.py"):
        return None
    variables: dict[str, str] = {}
    for context in (json.loads(word.removeprefix(CONTEXT)) for word in arguments if word.startswith(CONTEXT)):
        if context.get("command_prefix") or context.get("override_worker_entrypoint"):
            return None
        if context.get("py_executable", sys.executable) != sys.executable:
            return None
        variables |= context.get("env_vars", {})
    if any(name.startswith(READ_EARLY) for name in variables):
        return None
    return words, variables


def main() -> None:
    address, *arguments = sys.argv[1:]
    command = worker_command(arguments)
    if command is not None:
        words, variables = command
        os.environ.update({name: os.path.expandvars(value) for name, value in variables.items()})
        request = {
            "arguments": words,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "blocked_signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        }
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.connect(address)
            socket.send_fds(server, [b"f"], [0, 1, 2])
            server.sendall(json.dumps(request).encode())
            server.shutdown(socket.SHUT_WR)
            if server.recv(1):
                return
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
