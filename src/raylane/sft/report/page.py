"""Report of a run, one HTML page: losses, learning rate, speed, where time went, configuration, warnings, sample.

`write_report` reads the run's folder only (metrics.jsonl, and report.json of `run.record`), so it also works during a
run and long after it. With matplotlib the page has plots, otherwise tables. Called by `run.record` and `cli`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raylane.errors import DataError
from raylane.sft.config.load import differences
from raylane.sft.report.html import escape, page, picture, table, write_file
from raylane.sft.report.metrics import METRICS_FILE, figure, read_metrics, read_notes, read_samples
from raylane.sft.report.series import MAX_POINTS, TIMES, Records, thin

__all__ = ["FACTS_FILE", "REPORT_FILE", "read_facts", "write_report"]

REPORT_FILE, FACTS_FILE = "report.html", "report.json"
_MAX_ROWS = 30
_MAX_ANSWERS = 5
_COLUMNS = {
    "train:loss": "training loss",
    "val:loss": "held-out loss",
    "train:lr": "learning rate",
    "train:grad_norm": "gradient norm",
    "train:tokens_per_s": "tokens/s",
    "train:step_time_s": "step (s)",
}
_EMPTY: dict[str, Any] = {"status": "not known", "config": None, "warnings": [], "more_warnings": 0, "sample": None}


def read_facts(run_dir: str | Path) -> dict[str, Any]:
    """Return the facts that `run.record` kept; empty ones if the file is missing or damaged."""
    try:
        stored = json.loads((Path(run_dir) / FACTS_FILE).read_text(encoding="utf-8"))
        facts = {**_EMPTY, **stored}
        facts["warnings"] = [
            {"time": str(warning["time"]), "text": str(warning["text"])} for warning in facts["warnings"]
        ]
        facts["more_warnings"] = int(facts["more_warnings"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return dict(_EMPTY)
    return facts


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of the run in `run_dir` to `out` (default: report.html in it); return the path.

    DataError if there is no metrics.jsonl, or no step in it.
    """
    run_dir = Path(run_dir)
    try:
        records, notes = read_metrics(run_dir / METRICS_FILE), read_notes(run_dir / METRICS_FILE)
        answers = read_samples(run_dir / METRICS_FILE)
    except OSError as error:
        raise DataError(
            f"cannot read {run_dir / METRICS_FILE}: {error.strerror or error}. Give the folder logger.log_dir of a run"
        ) from error
    if not any("train:loss" in record or "val:loss" in record for record in records):
        raise DataError(f"cannot draw a report: {run_dir / METRICS_FILE} holds no train:loss and no val:loss")
    # The folder may have been copied from elsewhere or damaged; the numbers are worth showing without the facts.
    facts = read_facts(run_dir)
    title = f"Run {run_dir.resolve()}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        table(_summary(records, facts)),
        *_curves(records),
        *_events(notes, facts),
        *_answers(answers),
        *_sample(facts["sample"]),
        *_configuration(facts["config"]),
    ]
    path = run_dir / REPORT_FILE if out is None else Path(out)
    write_file(path, page(title, parts))
    return path


def _summary(records: Records, facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the first table."""
    train = [record for record in records if "train:loss" in record]
    val = [record for record in records if math.isfinite(record.get("val:loss", math.nan))]
    # Facts come from a file that users may edit, so every value is turned into text.
    rows = [("status", str(facts["status"]))]
    if train:
        rows.append(("steps", f"{figure(train[-1]['step'])} (last one logged)"))
        rows.append(("training loss", f"{figure(train[0]['train:loss'])} to {figure(train[-1]['train:loss'])}"))
        wrong = sum(not math.isfinite(record["train:loss"]) for record in train)
        if wrong:
            rows.append(("steps without a finite loss", figure(wrong)))
    if val:
        # The last one may be worse: held-out loss rises when a model begins to overfit.
        best = min(val, key=lambda record: record["val:loss"])
        last = val[-1]
        rows.append(("held-out loss", f"{figure(last['val:loss'])} after step {figure(last['step'])}"))
        rows.append(("lowest held-out loss", f"{figure(best['val:loss'])} after step {figure(best['step'])}"))
    if speeds := [record["train:tokens_per_s"] for record in train if "train:tokens_per_s" in record]:
        rows.append(("tokens/s", f"{figure(statistics.median(speeds))} (median)"))
    total = math.fsum(record.get("train:step_time_s", 0.0) for record in train)
    if total > 0:
        shares = [(name, math.fsum(record.get(key, 0.0) for record in train) / total) for key, name in TIMES.items()]
        shown = ", ".join(f"{share:.1%} {name}" for name, share in shares)
        rows.append(("time in steps", f"{figure(round(total, 1))} s: {shown}"))
    return rows


def _curves(records: Records) -> list[str]:
    """Return the plots, or a table if matplotlib is missing or fails."""
    try:
        if importlib.util.find_spec("matplotlib") is None:
            reason = "Install matplotlib to see plots here: pip install 'raylane[report]', then `raylane report`."
        else:
            from raylane.sft.report.plots import draw

            drawn = draw({name: thin(records, name) for name in (*_COLUMNS, *TIMES)})
            pictures = [picture(svg, title) for title, svg in drawn]
            if len(records) > MAX_POINTS:
                note = (
                    f"Each line has at most {MAX_POINTS:,} points: means of groups of steps, with the range as a band."
                )
                pictures.append(f'<p class="note">{note}</p>')
            return pictures
    except Exception as error:  # an unusable installation; the table shows the same numbers
        reason = f"matplotlib could not draw the plots: {error!r}"
    return [f'<p class="note">{escape(reason)}</p>', _table_of_steps(records)]


def _table_of_steps(records: Records) -> str:
    """Return the metrics as a table of at most _MAX_ROWS rows, with means over groups of steps."""
    last = max(record["step"] for record in records)
    size = max(1, math.ceil(last / _MAX_ROWS))
    # By step and not by record: validations have records of their own.
    groups: dict[int, list[dict[str, float]]] = {}
    for record in records:
        groups.setdefault(math.ceil(record["step"] / size), []).append(record)
    columns = {**_COLUMNS, **TIMES}
    rows = []
    for number, group in sorted(groups.items()):
        cells = [figure(min(number * size, last))]
        for name in columns:
            series = thin(group, name, 1)
            cells.append("" if series is None else figure(series.mean[0]))
        rows.append(cells)
    return table(rows, ["up to step", *columns.values()])


def _events(notes: Sequence[tuple[int, str]], facts: dict[str, Any]) -> list[str]:
    """Return the sections on restarts and other events, and on warnings."""
    parts = []
    if notes:
        rows = [(figure(step), text) for step, text in notes]
        parts += ["<h2>Restarts and other events</h2>", table(rows, ["step", "event"])]
    if facts["warnings"]:
        rows = [(warning["time"], warning["text"]) for warning in facts["warnings"]]
        parts += ["<h2>Warnings</h2>", table(rows, ["time", "warning"])]
    if facts["more_warnings"]:
        parts.append(f"<p>{facts['more_warnings']:,} more warnings are not shown.</p>")
    return parts


def _answers(answers: Sequence[tuple[int, str, str]]) -> list[str]:
    """Return the answers during the run: for each question the first ones and the last ones."""
    if not answers:
        return []
    parts = ["<h2>Answers during the run</h2>"]
    for prompt in dict.fromkeys(prompt for _, prompt, _ in answers):
        rows = [(figure(step), answer) for step, asked, answer in answers if asked == prompt]
        shown = rows if len(rows) <= 2 * _MAX_ANSWERS else [*rows[:_MAX_ANSWERS], ("...", ""), *rows[-_MAX_ANSWERS:]]
        parts += [f"<p>asked</p><pre>{escape(prompt)}</pre>", table(shown, ["step", "answer"])]
    return parts


def _sample(sample: Any) -> list[str]:
    if not isinstance(sample, dict):
        return []
    prompt, answer = (escape(sample.get(name, "")) for name in ("prompt", "answer"))
    return ["<h2>Sample answer</h2>", f"<p>asked</p><pre>{prompt}</pre><p>answered</p><pre>{answer}</pre>"]


def _configuration(document: Any) -> list[str]:
    """Return the configuration: the keys that differ from the defaults, and all keys to unfold."""
    if not isinstance(document, dict):
        return []
    import yaml

    changed, whole = (escape(yaml.safe_dump(tree, sort_keys=False)) for tree in (differences(document), document))
    return [
        "<h2>Configuration</h2>",
        f"<p>Keys that differ from the defaults:</p><pre>{changed}</pre>",
        f"<details><summary>All keys</summary><pre>{whole}</pre></details>",
    ]
