"""Ctrl-C at a command: one line, and exit status 130, also while the program is still importing packages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.sft import tiny_run

from raylane.cli.interrupt import announce_interrupt
from raylane.training.config.load import dump

DEADLINE_S = 60.0
SLOW_PACKAGE = """
import pathlib, time
pathlib.Path({marker!r}).touch()
try:
    time.sleep({limit_s})
except {dropped}:  # as extension modules do
    time.sleep({limit_s})
"""


@pytest.mark.parametrize(
    ("package", "dropped", "command", "line"),
    [
        ("ray", "KeyboardInterrupt", "sft", "raylane sft: interrupted"),
        ("ray", "KeyboardInterrupt", "inspect-data", "raylane inspect-data: interrupted"),
        (
            "transformers",
            "()",
            "sft",
            "raylane sft: interrupted before training began, nothing was saved. Run the same",
        ),
    ],
)
@pytest.mark.processes
def test_interrupted_command_prints_one_line(
    tmp_path: Path, package: str, dropped: str, command: str, line: str
) -> None:
    """A package that imports slowly holds the command in its first half second, and later in the middle of its data."""
    tiny_run.write_data(tmp_path)
    import yaml

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(dump(tiny_run.config_of(tmp_path))), encoding="utf-8")
    slow = tmp_path / "packages" / package
    slow.mkdir(parents=True)
    marker = tmp_path / "imported"
    text = SLOW_PACKAGE.format(marker=str(marker), limit_s=DEADLINE_S, dropped=dropped)
    (slow / "__init__.py").write_text(text, encoding="utf-8")
    program = [sys.executable, "-c", "import sys\nfrom raylane.cli import main\nsys.exit(main())"]
    paths = os.pathsep.join([str(slow.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    started = subprocess.Popen(
        [*program, command, str(tmp_path / "run.yaml")],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    deadline = time.monotonic() + DEADLINE_S
    while not marker.exists():
        assert started.poll() is None, started.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    _, errors = started.communicate(timeout=DEADLINE_S)
    assert started.returncode == 130
    words = [text for text in errors.splitlines() if text]
    assert len(words) == 1, errors
    assert words[0].startswith(line)
    assert not list((tmp_path / "cache").glob("*.draft-*")), "nothing half-written remains"


def test_interrupt_while_training_is_announced_once(capfd: pytest.CaptureFixture[str]) -> None:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), announce_interrupt("sft"):
            signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err == "\nraylane sft: stopping, the workers end ...\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)
