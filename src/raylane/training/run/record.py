"""Facts about a run that are not numbers: configuration, status, warnings and sample answer, kept for its report.

The facts are in `report.json` in the run's folder, which is rewritten whenever one changes, so a killed run keeps them.
Numbers and restarts are in metrics.jsonl only. Used by the trainers; `report.page` reads the file. A failure here is a
warning and never ends a run.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raylane.errors import DataError
from raylane.training.config.load import differences, dump_to_share
from raylane.training.config.schema import TrainingConfig
from raylane.training.report.metrics import METRICS_FILE
from raylane.training.report.page import FACTS_FILE, read_facts, write_file, write_report

_log = logging.getLogger(__name__)
_MAX_WARNINGS = 200
_MAX_WARNING_CHARACTERS = 2_000


@dataclass(frozen=True)
class Sample:
    """A prompt and an answer, both without special tokens."""

    prompt: str
    answer: str


class RunRecord(logging.Handler):
    """Recorder of a run's facts, and a context manager around the whole run. Draws the report at its end.

    As a handler of the log it keeps the text of each warning and error, from any thread.
    """

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__(logging.WARNING)
        shown = dump_to_share(config)
        self._facts: dict[str, Any] = {
            # After SIGKILL nobody can correct the status.
            "status": "running, unless it was killed",
            "config": shown,
            "changed": differences(shown, type(config)),
            "model": None,
            "resumes_from": config.checkpointing.checkpoint_dir if config.checkpointing.enabled else None,
            "warnings": [],
            "more_warnings": 0,
        }
        self._run_dir: Path | None = None
        self._old_size = 0
        """Size of metrics.jsonl when a new run began; an earlier run in the same folder may have left it."""

    def __enter__(self) -> RunRecord:
        logging.getLogger("raylane").addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        logging.getLogger("raylane").removeHandler(self)
        if error is not None and self._run_dir is not None and _size(self._run_dir) != self._old_size:
            self._facts["status"] = f"ended by {type(error).__name__}: {error}"[:_MAX_WARNING_CHARACTERS]
            self._draw()

    def open(self, run_dir: Path, *, resumes: bool) -> None:
        """Keep the facts in this folder from now on; a run that `resumes` keeps the warnings from before."""
        self._run_dir = run_dir
        # Only a resumed run belongs to the same report as the run before it.
        if resumes:
            earlier = read_facts(run_dir)
            self._facts["more_warnings"] += earlier["more_warnings"]
            new_warnings, self._facts["warnings"] = self._facts["warnings"], []
            for warning in [*earlier["warnings"], *new_warnings]:
                self._keep(warning)
        else:
            self._old_size = _size(run_dir)
        try:
            self._save()
        except OSError as error:
            _log.warning("the report will lack the configuration of this run: %s", error)

    def finish(self, status: str, sample: Sample | None, model: Any = None) -> Path | None:
        """Draw the report of a run that ended without an error; return its path, None if it cannot be drawn.

        `model` is the place of the exported model, if there is one.
        """
        self._facts["status"] = status
        self._facts["model"] = None if model is None else str(model)
        if status == "finished":
            self._facts["resumes_from"] = None
        self._facts["sample"] = None if sample is None else asdict(sample)
        return self._draw()

    def _draw(self) -> Path | None:
        assert self._run_dir is not None
        try:
            self._save()
            return write_report(self._run_dir)
        except DataError:
            return None  # no step was logged, so there is nothing to draw
        except Exception as error:  # the run itself is complete, so this must not turn it into a failure
            _log.warning("the report of the run in %s could not be drawn: %r", self._run_dir, error)
            return None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning."""
        # logging.Handler.handle holds the handler's lock here, so two threads are never here at once.
        try:
            text = record.getMessage()[:_MAX_WARNING_CHARACTERS]
            self._keep({"time": time.strftime("%Y-%m-%d %H:%M:%S"), "text": text})
            self._save()
        except Exception:  # e.g. a full disk; logging must not end the run
            self.handleError(record)

    def _keep(self, warning: dict[str, str]) -> None:
        """Add a warning, or count it if there are many already: the file is rewritten for each one."""
        if len(self._facts["warnings"]) < _MAX_WARNINGS:
            self._facts["warnings"].append(warning)
        else:
            self._facts["more_warnings"] += 1

    def _save(self) -> None:
        if self._run_dir is not None:
            write_file(self._run_dir / FACTS_FILE, json.dumps(self._facts, indent=1, default=str))


def _size(run_dir: Path) -> int:
    path = run_dir / METRICS_FILE
    return path.stat().st_size if path.exists() else 0
