"""Report of a run, one HTML page: rewards, losses, speed, where time went, configuration, warnings, sample answers.

`write_report` reads the run's folder only (metrics.jsonl, and report.json of `run.record`), so it also works during a
run and long after it. With matplotlib the page has plots, otherwise tables. Called by `run.record` and `cli`.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import io
import itertools
import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import yaml
from markupsafe import Markup

from raylane.errors import DataError
from raylane.training.report.metrics import METRICS_FILE, LoggedAnswer, figure, read_metrics, read_notes, read_samples

REPORT_FILE, FACTS_FILE = "report.html", "report.json"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_MAX_ROWS = 30
_MAX_ANSWERS = 5
_COLUMNS = {
    "train:reward": "reward",
    "val:reward_greedy": "held-out reward",
    "train:loss": "training loss",
    "val:loss": "held-out loss",
    "train:token_accuracy": "token accuracy",
    "val:token_accuracy": "held-out token accuracy",
    "train:lr": "learning rate",
    "train:grad_norm": "gradient norm",
    "train:tokens_per_s": "tokens/s",
    "train:step_time_s": "step (s)",
}
_LAST = {
    "train:perplexity": "training perplexity",
    "train:token_accuracy": "training token accuracy",
    "train:tokens_seen": "tokens seen",
}
"""Metric of the last training step -> its row in the first table."""
_LAST_HELD_OUT = {"val:perplexity": "held-out perplexity", "val:token_accuracy": "held-out token accuracy"}
"""Metric of the last validation -> its row in the first table."""
_REWARDS = {
    "val:reward_greedy": "held-out reward, most probable answers",
    "val:reward_sampled": "held-out reward, sampled answers",
}
"""Metric of a validation with rewards -> its row in the first table."""
_EMPTY: dict[str, Any] = {
    "status": "not known",
    "model": None,
    "resumes_from": None,
    "config": None,
    "warnings": [],
    "more_warnings": 0,
    "sample": None,
    "changed": None,
}


def written_report(run_dir: Path) -> Path | None:
    """Return the path of the report in a run's folder, None if there is none."""
    path = run_dir / REPORT_FILE
    return path if path.is_file() else None


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
    document = facts["config"] if isinstance(facts["config"], dict) else None
    plots, note = _plots(records)
    columns = {name: title for name, title in {**_COLUMNS, **TIMES}.items() if any(name in one for one in records)}
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        # Every value is escaped, whoever wrote the template.
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else Markup(escape(value)),
        trim_blocks=True,
    )
    page = environment.get_template("page.jinja").render(
        title=f"Run {run_dir.resolve()}",
        summary=_summary(records, facts),
        plots=plots,
        note=note,
        steps=[] if plots else _steps(records, columns),
        columns=[*columns.values()],
        notes=[(figure(step), text) for step, text in notes],
        facts=facts,
        answers=_answers(answers),
        changed=document and facts["changed"] is not None and yaml.safe_dump(facts["changed"], sort_keys=False),
        whole=document and yaml.safe_dump(document, sort_keys=False),
    )
    path = run_dir / REPORT_FILE if out is None else Path(out)
    write_file(path, page)
    return path


def escape(text: object) -> str:
    """Return text for use in HTML, with control characters replaced: they could hide or reverse parts of it."""
    return html.escape(_CONTROL.sub("\ufffd", str(text)))


def write_file(path: Path, text: str) -> None:
    """Replace a file as a whole: readers see the old or the new content, and a symbolic link is replaced itself."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    draft.unlink(missing_ok=True)  # of an earlier process with the same number
    # O_EXCL also refuses a symbolic link that someone else put there.
    with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)


def _summary(records: Records, facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the first table."""
    train = [record for record in records if "train:loss" in record]
    val = [record for record in records if math.isfinite(record.get("val:loss", math.nan))]
    # Facts come from a file that users may edit, so every value is turned into text.
    rows = [("status", str(facts["status"]))]
    if facts["model"]:
        rows.append(("model", str(facts["model"])))
    if facts["resumes_from"]:
        rows.append(("to go on", f"run the same command again: it begins at the last step in {facts['resumes_from']}"))
    for key, name in _REWARDS.items():
        validations = [record for record in records if math.isfinite(record.get(key, math.nan))]
        if validations:
            first, last = validations[0], validations[-1]
            text = f"{figure(first[key])} after step {figure(first['step'])}, {figure(last[key])} after the last one"
            rows.append((name, text))
    if train:
        rows.append(("steps", f"{figure(train[-1]['step'])} (last one logged)"))
        rows.append(("training loss", f"{figure(train[0]['train:loss'])} to {figure(train[-1]['train:loss'])}"))
        for key, name in _LAST.items():
            if key in train[-1]:
                rows.append((name, figure(train[-1][key])))
        wrong = sum(not math.isfinite(record["train:loss"]) for record in train)
        if wrong:
            rows.append(("steps without a finite loss", figure(wrong)))
    if val:
        # The last one may be worse: held-out loss rises when a model begins to overfit.
        best = min(val, key=lambda record: record["val:loss"])
        last = val[-1]
        rows.append(("held-out loss", f"{figure(last['val:loss'])} after step {figure(last['step'])}"))
        for key, name in _LAST_HELD_OUT.items():
            if key in last:
                rows.append((name, figure(last[key])))
        rows.append(("lowest held-out loss", f"{figure(best['val:loss'])} after step {figure(best['step'])}"))
    if speeds := [record["train:tokens_per_s"] for record in train if "train:tokens_per_s" in record]:
        rows.append(("tokens/s", f"{figure(statistics.median(speeds))} (median)"))
    total = math.fsum(record.get("train:step_time_s", 0.0) for record in train)
    if total > 0:
        shares = [(name, math.fsum(record.get(key, 0.0) for record in train) / total) for key, name in TIMES.items()]
        shown = ", ".join(f"{share:.1%} {name}" for name, share in shares)
        rows.append(("time in steps", f"{figure(round(total, 1))} s: {shown}"))
    return rows


def _plots(records: Records) -> tuple[list[tuple[str, str]], str]:
    """Return (title, SVG in base64) of each plot and a note; no plots if matplotlib is missing or fails."""
    try:
        if importlib.util.find_spec("matplotlib") is None:
            return [], "Install matplotlib to see plots here: pip install 'raylane[report]', then `raylane report`."
        drawn = draw(records)
    except Exception as error:  # an unusable installation; the table shows the same numbers
        return [], f"matplotlib could not draw the plots: {error!r}"
    note = f"Lines of more than {_FEW} points are means of {_SMOOTH_OVER} around each one, with the values behind them."
    if len(records) > MAX_POINTS:
        note += f" Each line has at most {MAX_POINTS:,} points: means of groups of steps, with the range as a band."
    return [(title, base64.b64encode(svg).decode()) for title, svg in drawn], note if len(records) > _FEW else ""


def _steps(records: Records, columns: Iterable[str]) -> list[list[str]]:
    """Return these metrics as at most _MAX_ROWS rows, with means over groups of steps."""
    last = max(record["step"] for record in records)
    size = max(1, math.ceil(last / _MAX_ROWS))
    # By step and not by record: validations have records of their own.
    groups: dict[int, list[dict[str, float]]] = {}
    for record in records:
        groups.setdefault(math.ceil(record["step"] / size), []).append(record)
    rows = []
    for number, group in sorted(groups.items()):
        series = [thin(group, name, 1) for name in columns]
        means = ["" if metric is None else figure(metric.mean[0]) for metric in series]
        rows.append([figure(min(number * size, last)), *means])
    return rows


def _answers(samples: Iterable[LoggedAnswer]) -> dict[str, list[tuple[str, str, str]]]:
    """Return (step, answer, reward) of each question during the run: its first answers and its last ones.

    Equal answers that follow each other are one, with the first and the last step.
    """
    by_prompt: dict[str, list[LoggedAnswer]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.prompt, []).append(sample)
    shown = {}
    for prompt, of_prompt in by_prompt.items():
        rows = []
        for (answer, reward), same in itertools.groupby(of_prompt, key=lambda sample: (sample.answer, sample.reward)):
            steps = [figure(sample.step) for sample in same]
            span = steps[0] if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
            rows.append((span, answer, "" if reward is None else figure(reward)))
        rows[_MAX_ANSWERS:-_MAX_ANSWERS] = [("...", "", "")] if len(rows) > 2 * _MAX_ANSWERS else []
        shown[prompt] = rows
    return shown


_COLOURS = ("#3b6fb6", "#c0392b", "#d9a441")
_INK = "#808080"
"""Colour of text and axes in plots, which is readable on white and on black."""
_FEW = 60
"""Number of points up to which each point gets a dot; a line of more is smoothed."""
_SMOOTH_OVER = 20
"""Number of points over which a smoothed line averages."""


class Plot(NamedTuple):
    """A plot of the report."""

    title: str
    axis: str
    lines: Mapping[str, str]
    """Metric -> its name beside the plot."""


PLOTS = (
    Plot("Loss", "loss (nats per token)", {"train:loss": "training", "val:loss": "held out"}),
    Plot(
        "Token accuracy",
        "share of supervised tokens",
        {"train:token_accuracy": "training", "val:token_accuracy": "held out"},
    ),
)
"""Plots of fine-tuning, before COMMON_PLOTS."""
REWARD_PLOTS = (
    Plot(
        "Reward",
        "mean reward of an answer",
        {
            "train:reward": "training, sampled",
            "val:reward_greedy": "held out, most probable",
            "val:reward_sampled": "held out, sampled",
        },
    ),
    Plot("Length of answers", "tokens", {"train:length": ""}),
    Plot("Entropy of the policy", "nats per token", {"train:entropy": ""}),
    Plot("Engines against trainer", "KL divergence (nats per token)", {"train:sampling_kl": ""}),
    Plot("Age of the weights that answered", "steps", {"train:lag": ""}),
    Plot("Busy", "share of the time", {"train:trainer_busy": "trainer", "train:engines_busy": "engines"}),
    Plot("Loss of the policy", "loss", {"train:loss": ""}),
)
"""Plots of a run with rewards, before COMMON_PLOTS."""
COMMON_PLOTS = (
    Plot("Learning rate", "learning rate", {"train:lr": ""}),
    Plot("Gradient norm", "norm before clipping", {"train:grad_norm": ""}),
    Plot("Speed", "tokens/s", {"train:tokens_per_s": ""}),
)


MAX_POINTS = 500
"""Number of points above which a series is thinned: more cannot be told apart in a plot."""
TIMES = {"train:data_time_s": "reading rows", "train:dispatch_time_s": "waiting", "train:compute_time_s": "computing"}
"""Metric -> its name in the report; the three add up to train:step_time_s."""

Records = Sequence[dict[str, float]]
"""Lines of metrics.jsonl, as `metrics.read_metrics` returns them."""


@dataclass(frozen=True)
class Series:
    """One metric over the steps, thinned: each point stands for the steps since the point before."""

    steps: list[float]
    """Last step of each group of steps."""
    mean: list[float]
    low: list[float]
    high: list[float]
    is_thinned: bool


def thin(records: Records, name: str, max_points: int = MAX_POINTS) -> Series | None:
    """Return a metric with at most `max_points` points, None if no record has a finite value of it."""
    points = [(record["step"], record[name]) for record in records if math.isfinite(record.get(name, math.nan))]
    if not points:
        return None
    count = min(max_points, len(points))
    # Integer division spreads the remainder, so groups differ by one step at most.
    edges = [number * len(points) // count for number in range(count + 1)]
    groups = [points[start:end] for start, end in pairwise(edges)]
    values = [[value for _, value in group] for group in groups]
    return Series(
        steps=[group[-1][0] for group in groups],
        mean=[statistics.fmean(group) for group in values],
        low=[min(group) for group in values],
        high=[max(group) for group in values],
        is_thinned=len(points) > count,
    )


def plots_of(records: Records) -> tuple[Plot, ...]:
    """Return the plots of a run, of which some may have no data."""
    rewarded = any("train:reward" in record or "val:reward_greedy" in record for record in records)
    return (REWARD_PLOTS if rewarded else PLOTS) + COMMON_PLOTS


def smoothed(values: Sequence[float], over: int = _SMOOTH_OVER) -> list[float]:
    """Return the mean of about `over` values around each one, of fewer near the ends: it does not lag behind them."""
    sums, last = [0.0, *itertools.accumulate(values)], len(values) - 1
    means = []
    for index in range(len(values)):
        reach = min(over // 2, index, last - index)
        means.append((sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1))
    return means


def draw(records: Records) -> list[tuple[str, bytes]]:
    """Return (title, SVG) of each plot that has data. Text is drawn as shapes, so no font is needed to see it."""
    drawn = []
    for plot in plots_of(records):
        lines = [
            (line, name, colour)
            for (metric, name), colour in zip(plot.lines.items(), _COLOURS, strict=False)
            if (line := thin(records, metric)) is not None  # metrics of other versions may lack it
        ]
        if lines:
            figure, axes = _axes(plot.title, plot.axis)
            for line, name, colour in lines:
                _line(axes, line, colour, name)
            if any(plot.lines.values()):
                axes.legend(labelcolor=_INK, framealpha=0)
            drawn.append((plot.title, _svg(figure)))
    parts = [line for name in TIMES if (line := thin(records, name)) is not None]
    # Stacking needs the same steps in all parts; a record has all three times or none.
    if len(parts) == len(TIMES) and all(line.steps == parts[0].steps for line in parts):
        figure, axes = _axes("Time of a step", "seconds")
        axes.stackplot(parts[0].steps, *(line.mean for line in parts), labels=list(TIMES.values()), colors=_COLOURS)
        # Beside the plot: the areas fill all of it.
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), labelcolor=_INK, framealpha=0)
        drawn.append(("Time of a step", _svg(figure)))
    return drawn


def _axes(title: str, label: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=(9.0, 3.2), layout="constrained", facecolor="none")
    axes = figure.subplots()
    axes.set_facecolor("none")
    axes.set_title(title, loc="left", color=_INK)
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel(label, color=_INK)
    axes.tick_params(colors=_INK)
    axes.spines[:].set_color(_INK)
    axes.ticklabel_format(useOffset=False)
    axes.grid(alpha=0.3)
    return figure, axes


def _line(axes: Any, series: Series, colour: str, label: str) -> None:
    style = {"color": colour, "label": label or None, "linewidth": 1.2}
    has_few, is_constant = len(series.steps) <= _FEW, min(series.low) == max(series.high)
    if has_few or is_constant:
        axes.plot(series.steps, series.mean, marker="o" if has_few else None, markersize=3, **style)
        return
    axes.plot(series.steps, smoothed(series.mean), **style)
    # A smoothed line hides spikes; behind it are the values, or the range within each group of steps.
    axes.plot(series.steps, series.mean, color=colour, alpha=0.3, linewidth=0.7)
    if series.is_thinned:
        axes.fill_between(series.steps, series.low, series.high, color=colour, alpha=0.2, linewidth=0)


def _svg(figure: Any) -> bytes:
    buffer = io.BytesIO()
    # Without these entries the file would name its creator and the time of drawing.
    figure.savefig(buffer, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    return buffer.getvalue()
