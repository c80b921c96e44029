"""Picture of held-out rewards of several GRPO runs, from the metrics that they wrote.

python -m benchmarks.studies.grpo_curves OUT.svg "seed 0=runs/logs" "seed 1=runs/other-logs" ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from raylane.training.report.metrics import METRICS_FILE, read_metrics

PANELS = {"val:reward_greedy": "most probable answers", "val:reward_sampled": "sampled answers"}


def points(folder: Path, metric: str) -> tuple[list[float], list[float]]:
    """Return the steps and values of a metric in a folder of logs."""
    records = [record for record in read_metrics(folder / METRICS_FILE) if metric in record]
    return [record["step"] for record in records], [record[metric] for record in records]


def main(out: str, *runs: str) -> None:
    """Draw one curve for each run, in a panel for each metric."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharex=True)
    for panel, (metric, title) in zip(axes, PANELS.items(), strict=True):
        for run in runs:
            label, _, folder = run.partition("=")
            # Runs with other weights than those of the step before are dashed.
            panel.plot(*points(Path(folder), metric), marker=".", label=label, ls="-" if "seed" in label else "--")
        panel.set_title(title)
        panel.set_xlabel("step")
    axes[0].set_ylabel("mean reward of 500 held-out prompts")
    axes[0].legend()
    figure.savefig(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
