"""Log of a run's metrics: always metrics.jsonl, optionally TensorBoard and W&B, and progress lines.

Called by the trainer, in the driver process. One JSON object per line: `{"step": 7, "time_s": 12.3, "train:loss":
4.2}`; `time_s` counts from the opening of this log. A resumed run appends; `rewind` removes records of a killed run
after the step to resume from. A new run moves the file of an older one aside. Progress is one plain line per interval,
and on a terminal also a live bar; both then tell the time left.
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
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from raylane.errors import ConfigError, DataError
from raylane.training.config.schema import LoggerConfig

METRICS_FILE = "metrics.jsonl"

_TEXTS = {"note", "prompt", "answer"}
"""Keys of texts; a line with one of them holds no metrics."""


def _optional(module: str, key: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{key}=true needs the package {package}, which cannot be imported ({error}); "
            f"run pip install 'raylane[{package}]', or set {key}=false"
        ) from error


class MetricsLog:
    """Recorder of a run's metrics, and a context manager. For one thread of one process at a time.

    Attributes: `run_dir`, the folder (created here); `path`, its metrics.jsonl.
    """

    def __init__(self, settings: LoggerConfig, run_dir: str | Path, stream: TextIO | None = None) -> None:
        """Open all enabled destinations; ConfigError if a package is missing. `stream` of progress: default stdout."""
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.path = self.run_dir / METRICS_FILE
        self._tensorboard: Any = None
        if settings.tensorboard_enabled:
            module = _optional("torch.utils.tensorboard", "logger.tensorboard_enabled", "tensorboard")
            self._tensorboard = module.SummaryWriter(log_dir=str(self.run_dir / "tensorboard"))
        self._wandb: Any = None
        if settings.wandb_enabled:
            module, wandb = _optional("wandb", "logger.wandb_enabled", "wandb"), settings.wandb
            self._wandb = module.init(project=wandb.project, name=wandb.name, dir=str(self.run_dir))
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream.isatty()
        self._bar_width = 0
        self._pace: tuple[int, float] | None = None
        """First step that was shown, and the time then (`time.perf_counter` seconds); None before it."""
        self._began = time.perf_counter()
        for name in (METRICS_FILE, "metrics.draft"):
            if (self.run_dir / name).is_symlink():  # writing would truncate and overwrite the target of the link
                raise ConfigError(
                    f"{self.run_dir / name} is a symbolic link; remove it, or choose another logger.log_dir"
                )
        if self.path.is_file():
            # A run that was killed while writing leaves an incomplete last line. Remove it, or the next record would
            # be appended to it.
            whole = self.path.read_bytes()
            end = whole.rfind(b"\n") + 1
            if end < len(whole):
                os.truncate(self.path, end)
        self._file = self.path.open("a", encoding="utf-8")

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, figures: Mapping[str, float], prefix: str = "") -> None:
        """Record the metrics of a step, named `prefix:name` if there is a prefix (train, val); on disk on return."""
        named = {f"{prefix}:{name}" if prefix else name: float(value) for name, value in figures.items()}
        # JSON has no NaN and no infinity, so both are written as text, which float() reads back.
        self._write(step, {name: value if math.isfinite(value) else str(value) for name, value in named.items()})
        shown = {name.replace(":", "/"): value for name, value in named.items()}
        if self._tensorboard is not None:
            for name, value in shown.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(shown, step=step)

    def note(self, step: int, text: str) -> None:
        """Record an event of the run in words, for example a restart; `read_notes` returns the notes."""
        self._write(step, {"note": text})

    def sample(self, step: int, prompt: str, answer: str, reward: float | None = None) -> None:
        """Record an answer of the model during the run, with its reward if it has one; for `read_samples`."""
        self._write(step, {"prompt": prompt, "answer": answer} | ({} if reward is None else {"answer_reward": reward}))

    def _write(self, step: int, values: Mapping[str, float | str]) -> None:
        record = {"step": step, "time_s": round(time.perf_counter() - self._began, 3), **values}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()  # a killed run keeps its records, and `tail -f` shows them at once

    def rewind(self, step: int) -> None:
        """Remove the metrics of steps after `step`, before a run resumes from a checkpoint at `step`. Keeps notes."""
        remaining = [record for record in _records(self.path) if "note" in record or record["step"] <= step]
        # Write a new file and rename it, so that a kill in between loses no record.
        draft = self.path.with_suffix(".draft")
        draft.write_text("".join(json.dumps(record) + "\n" for record in remaining), encoding="utf-8")
        self._file.close()
        draft.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def begin_anew(self) -> Path | None:
        """Move the records of an earlier run aside before a new run; return their new path, None without records."""
        if self.path.stat().st_size == 0:
            return None
        taken = {path.name for path in self.run_dir.iterdir()}
        aside = next(name for n in itertools.count(1) if (name := f"metrics.{n}.jsonl") not in taken)
        self._file.close()
        moved = self.path.rename(self.run_dir / aside)
        self._file = self.path.open("a", encoding="utf-8")
        return moved

    def show(self, step: int, total: int, figures: Mapping[str, float], interval: int) -> None:
        """Print a progress line at every `interval`-th step and the last one, and redraw the bar at the others."""
        if step % interval == 0 or step == total:
            self.progress(step, total, figures)
        else:
            self.live(step, total, figures)

    def progress(self, step: int, total: int, figures: Mapping[str, float]) -> None:
        """Print one progress line; steps count from 1 to `total`."""
        self._clear_bar()
        self._stream.write(progress_line(step, total, figures, self._left_s(step, total)) + "\n")
        self._stream.flush()

    def live(self, step: int, total: int, figures: Mapping[str, float]) -> None:
        """Redraw the progress bar in the last line of a terminal; do nothing elsewhere. Cheap enough for every step."""
        if self._live:
            columns = os.get_terminal_size(self._stream.fileno()).columns or 80  # some terminals report 0
            bar = progress_bar(step, total, figures, columns - 1, self._left_s(step, total))
            self._stream.write("\r" + bar.ljust(self._bar_width))
            self._stream.flush()
            self._bar_width = len(bar)

    def _left_s(self, step: int, total: int) -> float | None:
        """Return the time until the last step at the pace since the first one shown; None if that is not known.

        None also without a terminal: a line in a file is read later.
        """
        now = time.perf_counter()
        if self._pace is None or step < self._pace[0]:  # after a restart of the workers steps run again
            self._pace = (step, now)
        first, at = self._pace
        return (now - at) / (step - first) * (total - step) if self._live and step > first else None

    def _clear_bar(self) -> None:
        if self._bar_width:
            self._stream.write("\r" + " " * self._bar_width + "\r")
            self._bar_width = 0

    def close(self) -> None:
        """Close the file and every destination; a second call does nothing."""
        self._clear_bar()
        self._file.close()
        tensorboard, wandb = self._tensorboard, self._wandb
        self._tensorboard = self._wandb = None
        if tensorboard is not None:
            tensorboard.close()
        if wandb is not None:
            wandb.finish()


def progress_line(step: int, total: int, figures: Mapping[str, float], left_s: float | None = None) -> str:
    """Return a progress line such as 'step  20/107  left 0:12:05  loss 5.1234  tokens_per_s 12,345'. Pure."""
    width = len(str(total))
    # Before the metrics, because a narrow terminal shows only the beginning.
    time_left = [] if left_s is None else [f"left {timedelta(seconds=round(left_s))}"]
    shown = (f"{name} {figure(value)}" for name, value in figures.items())
    return "  ".join([f"step {step:>{width}}/{total}", *time_left, *shown])


def progress_bar(step: int, total: int, figures: Mapping[str, float], columns: int, left_s: float | None = None) -> str:
    """Return a bar of at most `columns` characters, followed by the same line. Pure."""
    text = f" {progress_line(step, total, figures, left_s)}"
    room = max(min(30, columns - len(text) - 2), 0)
    filled = room * step // total if total else room
    bar = f"[{'#' * filled}{'.' * (room - filled)}]" if room else ""
    return (bar + text)[: max(columns, 0)]


def counted(number: int, word: str, plural: str = "s") -> str:
    """Return a number with its word, in the plural but for 1: '1 worker', '2,000 workers', '2 batches' (of "es")."""
    return f"{number:,} {word}{'' if number == 1 else plural}"


def figure(value: float) -> str:
    """Return a number in a few readable characters."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    limits = {0.1: ".4g", 100: ".4f", 1000: ".1f", math.inf: ",.0f"}
    return format(value, next(form for limit, form in limits.items() if abs(value) < limit))


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Return the records of a metrics.jsonl without notes and answers; a last line that is being written is left out.

    DataError if another line is not a record of this module.
    """
    return [
        {name: float(value) for name, value in record.items()}
        for record in _records(path)
        if not _TEXTS.intersection(record)
    ]


def read_notes(path: str | Path) -> list[tuple[int, str]]:
    """Return (step, text) of each note of a metrics.jsonl, in the order in which they were written."""
    return [(int(record["step"]), str(record["note"])) for record in _records(path) if "note" in record]


class LoggedAnswer(NamedTuple):
    """An answer of the model during a run."""

    step: int
    prompt: str
    answer: str
    reward: float | None


def read_samples(path: str | Path) -> list[LoggedAnswer]:
    """Return the answers in a metrics.jsonl, in the order in which they were written."""
    return [
        LoggedAnswer(
            int(record["step"]), str(record["prompt"]), str(record.get("answer", "")), record.get("answer_reward")
        )
        for record in _records(path)
        if "prompt" in record
    ]


def _records(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl; DataError if one is not a record of this module."""
    text = Path(path).read_text(encoding="utf-8")
    records = []
    # A writer may be in the middle of the last line, so only text up to the last line feed is parsed.
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            record = json.loads(line)
            for name, value in record.items():
                if name not in _TEXTS:
                    float(value)
            if not isinstance(record["step"], int | float):
                raise TypeError(f"step is {record['step']!r}")
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path}:{number} is no line of metrics: {error}. Remove the line") from error
        records.append(record)
    return records
