"""Convergence of a run through compiled graphs against the same run by plain Ray calls: losses and a picture.

    python -m benchmarks.studies.convergence CONFIG OUT.svg [override...]

Both runs start from the same configuration and differ only in `policy.compiled_graph.mode` and in their folders, which
are temporary. Exits with an error unless every training and validation loss is the same number, bit for bit.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from raylane.sft.config.load import load_config
from raylane.sft.run import trainer
from raylane.training.report.metrics import METRICS_FILE, read_metrics

MODES = {"plain Ray calls": "off", "compiled graphs": "required"}
LOSSES = {"train:loss": "training", "val:loss": "held out"}


def losses(config: str, overrides: list[str], mode: str, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Run a configuration in one mode; return (step, loss) by metric."""
    words = [
        *overrides,
        f"policy.compiled_graph.mode={mode}",
        f"checkpointing.checkpoint_dir={folder}/saved",
        f"logger.log_dir={folder}/logs",
    ]
    trainer.run(load_config(config, words))
    records = read_metrics(folder / "logs" / METRICS_FILE)
    return {name: [(one["step"], one[name]) for one in records if name in one] for name in LOSSES}


def draw(found: dict[str, dict[str, list[tuple[float, float]]]], out: Path) -> None:
    """Draw the losses of all runs into one picture: wide lines below, narrow dashes above, as they cover each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    colours = {"train:loss": "#3b6fb6", "val:loss": "#c0392b"}
    styles: list[dict[str, Any]] = [{"linewidth": 4.0, "alpha": 0.35}, {"linewidth": 1.2, "linestyle": "--"}]
    for (name, curves), style in zip(found.items(), styles, strict=True):
        for metric, points in curves.items():
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, color=colours[metric], label=f"{LOSSES[metric]}, {name}", **style)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per supervised token")
    axes.legend()
    figure.savefig(out)


def main(config: str, out: str, *overrides: str) -> None:
    """Run both modes, compare their losses and draw them."""
    found = {}
    for name, mode in MODES.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = losses(config, list(overrides), mode, Path(folder))
    draw(found, Path(out))
    plain, compiled = found.values()
    if plain != compiled:
        raise SystemExit(f"the losses differ: {plain} against {compiled}")
    count = sum(len(points) for points in plain.values())
    last = plain["train:loss"][-1]
    print(f"{count} losses are the same bits; the last one: {last[1]:.4f} after step {last[0]:.0f}. Picture: {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
