"""The figures of a run as they come in: to metrics.jsonl always, to TensorBoard and W&B when asked, and to people.

Called by the trainer, in the driver process. One JSON object a line: `{"step": 7, "time_s": 12.3, "train:loss": 4.2}`;
`time_s` counts from the opening of this log. A resumed run appends, and what a killed one wrote beyond the step it
resumes from is taken away by `rewind`; a run that begins anew puts an older one's aside. Progress is one plain line per
interval, and on a terminal a live bar as well.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from raylane.errors import ConfigError, DataError

if TYPE_CHECKING:
    from raylane.sft.config import LoggerConfig

__all__ = ["METRICS_FILE", "MetricsLog", "progress_bar", "progress_line", "read_metrics"]

METRICS_FILE = "metrics.jsonl"


class Sink(Protocol):
    """Somewhere that figures go."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of one step."""

    def close(self) -> None:
        """Let go of whatever is held."""


class _TensorBoard:
    def __init__(self, run_dir: Path) -> None:
        module = _optional("torch.utils.tensorboard", "logger.tensorboard_enabled", "tensorboard")
        self._writer = module.SummaryWriter(log_dir=str(run_dir / "tensorboard"))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name.replace(":", "/"), value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, settings: LoggerConfig, run_dir: Path) -> None:
        module = _optional("wandb", "logger.wandb_enabled", "wandb")
        self._run = module.init(project=settings.wandb.project, name=settings.wandb.name, dir=str(run_dir))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({name.replace(":", "/"): value for name, value in figures.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


def _optional(module: str, key: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key}=true needs the package {package}, which cannot be imported here ({error}); "
            f"pip install 'raylane[{package}]', or set {key}=false"
        ) from error


class MetricsLog:
    """Takes the figures of a run. Not for several threads or processes at once; a context manager.

    Attributes: `run_dir`, the folder (made here); `path`, its metrics.jsonl.
    """

    def __init__(self, settings: LoggerConfig, run_dir: str | Path, stream: TextIO | None = None) -> None:
        """Opens all that is enabled; ConfigError when a package for it is missing. `stream`: stdout unless given."""
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.path = self.run_dir / METRICS_FILE
        self._sinks: list[Sink] = []
        if settings.tensorboard_enabled:
            self._sinks.append(_TensorBoard(self.run_dir))
        if settings.wandb_enabled:
            self._sinks.append(_Wandb(settings, self.run_dir))
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream.isatty()
        self._bar_width = 0
        self._began = time.perf_counter()
        for name in (METRICS_FILE, "metrics.draft", "loss.html", "loss.png"):
            if (self.run_dir / name).is_symlink():  # what it points to would be cut and written to
                raise ConfigError(
                    f"{self.run_dir / name} is a symbolic link; remove it, or choose another logger.log_dir"
                )
        _drop_torn_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, figures: Mapping[str, float], prefix: str = "") -> None:
        """Record the figures of a step, named `prefix:name` when there is a prefix (train, val). On disk on return."""
        named = {f"{prefix}:{name}" if prefix else name: float(value) for name, value in figures.items()}
        record = {"step": step, "time_s": round(time.perf_counter() - self._began, 3)}
        self._file.write(_json_line({**record, **named}))
        self._file.flush()
        for sink in self._sinks:
            sink.write(step, named)

    def rewind(self, step: int) -> None:
        """Before going on from a checkpoint at `step`: take away what was recorded for later steps."""
        kept = [line for line in read_metrics(self.path) if line["step"] <= step]
        draft = self.path.with_suffix(".draft")
        draft.write_text("".join(_json_line(line) for line in kept), encoding="utf-8")
        self._file.close()
        draft.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def begin_anew(self) -> Path | None:
        """Before a run that goes on from nothing: an earlier run's records are put aside; returns where, if any."""
        if self.path.stat().st_size == 0:
            return None
        taken = {path.name for path in self.run_dir.iterdir()}
        aside = next(name for n in itertools.count(1) if (name := f"metrics.{n}.jsonl") not in taken)
        self._file.close()
        kept = self.path.rename(self.run_dir / aside)
        self._file = self.path.open("a", encoding="utf-8")
        return kept

    def progress(self, step: int, total: int, figures: Mapping[str, float]) -> None:
        """Print one line about where the run is: steps counted from 1, of `total`."""
        self._clear_bar()
        self._stream.write(progress_line(step, total, figures) + "\n")
        self._stream.flush()

    def live(self, step: int, total: int, figures: Mapping[str, float]) -> None:
        """Redraw the bar in the last line of a terminal; does nothing elsewhere, so it may be called every step."""
        if self._live:
            columns = os.get_terminal_size(self._stream.fileno()).columns or 80  # some terminals do not know
            bar = progress_bar(step, total, figures, columns - 1)
            self._stream.write("\r" + bar.ljust(self._bar_width))
            self._stream.flush()
            self._bar_width = len(bar)

    def _clear_bar(self) -> None:
        if self._bar_width:
            self._stream.write("\r" + " " * self._bar_width + "\r")
            self._bar_width = 0

    def close(self) -> None:
        """Close the file and every sink; a second call does nothing."""
        self._clear_bar()
        self._file.close()
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()


def progress_line(step: int, total: int, figures: Mapping[str, float]) -> str:
    """'step  20/107  loss 5.1234  tokens_per_s 12,345': pure."""
    width = len(str(total))
    return "  ".join([f"step {step:>{width}}/{total}", *(f"{name} {figure(value)}" for name, value in figures.items())])


def progress_bar(step: int, total: int, figures: Mapping[str, float], columns: int) -> str:
    """A bar of at most `columns` characters with the same figures behind it: pure."""
    text = f" {progress_line(step, total, figures)}"
    room = max(min(30, columns - len(text) - 2), 0)
    filled = room * step // total if total else room
    bar = f"[{'#' * filled}{'.' * (room - filled)}]" if room else ""
    return (bar + text)[: max(columns, 0)]


def figure(value: float) -> str:
    """A number in a few characters that people can read."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    size = abs(value)
    return (
        f"{value:,.0f}"
        if size >= 1000
        else f"{value:.4g}"
        if size < 0.1
        else f"{value:.4f}"
        if size < 100
        else f"{value:.1f}"
    )


def _json_line(record: Mapping[str, float]) -> str:
    # JSON has no NaN and no infinity: they are written as text, which float() reads back.
    plain = {name: value if math.isfinite(value) else str(value) for name, value in record.items()}
    return json.dumps(plain) + "\n"


def _drop_torn_line(path: Path) -> None:
    """A run that was killed while it wrote leaves half a line: cut it off, so that the next one does not follow it."""
    if path.is_file():
        whole = path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):
            os.truncate(path, end)


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The records of a metrics.jsonl, also of a run that is still writing (half a last line is left out).

    DataError when another line is not what this module writes.
    """
    text = Path(path).read_text(encoding="utf-8")
    records = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            record = json.loads(line)
            records.append({name: float(value) if isinstance(value, str) else value for name, value in record.items()})
            if not isinstance(records[-1]["step"], int | float):
                raise TypeError(f"step is {records[-1]['step']!r}")
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path}:{number} is no line of metrics: {error}") from error
    return records
