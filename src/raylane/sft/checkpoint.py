"""Checkpoint folders: how they are named, when they are complete, which are kept, and where a run goes on.

    checkpoint_dir/step_120/state/      torch DCP: weights, optimizer, step (written by all workers, `state.py`)
                   step_120/hf/         the model as a Hugging Face folder, if it was asked for
                   step_120/run.json    step, metrics, configuration, versions
                   step_120/COMPLETE    written last
                   step_130.partial/    being written, or left by a run that was killed: never read

A checkpoint is written under a name that nothing reads, marked complete, and renamed. Decisions are plain functions;
files are touched by the driver only, which therefore needs to see the same folder as the workers. No torch, no Ray.
Called by `policy` and `trainer`.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raylane.errors import CheckpointError

if TYPE_CHECKING:
    from raylane.sft.config import CheckpointingConfig

__all__ = [
    "Saved",
    "begin",
    "commit",
    "differences",
    "discard_partial",
    "find",
    "keep",
    "list_saved",
    "read",
    "refuse_later",
    "remove",
]

MARKER = "COMPLETE"
_NAME = re.compile(r"step_(\d+)$")

# What the losses of a resumed run depend on besides the checkpoint itself.
_SAME_FOR_EXACT_RESUME = (
    "sft.seed",
    "sft.max_num_steps",
    "sft.max_num_epochs",
    "policy.train_global_batch_size",
    "policy.train_micro_batch_size",
    "policy.max_total_sequence_length",
    "policy.precision",
    "policy.max_grad_norm",
    "policy.optimizer",
    "policy.scheduler",
    "policy.sequence_packing",
    "policy.loss_chunk_tokens",
    "policy.dtensor_cfg.dp_replicate_size",
    "policy.model_name",
    "policy.hf_config_overrides",
    "prepared",
    "data.shuffle",
    "cluster.num_workers",
    "cluster.gpus_per_node",
    "cluster.cpus_per_worker",  # threads of a worker: sums are made in another order
)


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int
    """Optimizer steps that its weights have seen; the next step to run has this number, counted from 0."""
    path: Path
    metrics: Mapping[str, float]
    """E.g. {"val:loss": 4.5, "train:loss": 4.6}; a key that was not measured at this step is missing."""
    config: Mapping[str, Any]
    """The configuration as plain values, and under "prepared" the hash of the tokenised data."""


def read(path: Path) -> Saved:
    """The checkpoint in this folder; CheckpointError when it is missing, unfinished or damaged."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {path}", path=str(path))
    if not (path / MARKER).is_file():
        raise CheckpointError(
            f"{path} was not finished: it has no {MARKER} file; resume from another one, or remove it", path=str(path)
        )
    try:
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
        return Saved(int(run["step"]), path, dict(run["metrics"]), dict(run["config"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}/run.json cannot be read: {error!r}", path=str(path)) from error


def list_saved(folder: Path) -> list[Saved]:
    """The complete checkpoints in a folder by ascending step; others are passed over."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _NAME.match(path.name) and (path / MARKER).is_file()]
    return sorted((read(path) for path in paths), key=lambda saved: saved.step)


def find(settings: CheckpointingConfig) -> Saved | None:
    """What `checkpointing.resume` names; None for "never", and for "auto" when there is no complete checkpoint."""
    if settings.resume == "never":
        return None
    if settings.resume == "auto":
        saved = list_saved(Path(settings.checkpoint_dir))
        return saved[-1] if saved else None
    return read(Path(settings.resume))


def refuse_later(settings: CheckpointingConfig, start: int) -> None:
    """Raise CheckpointError if the folder holds checkpoints of later steps than the one that a run starts with.

    They are of another run: this one's checkpoints would count as older, be dropped first, and not be resumed from.
    """
    later = [saved.path.name for saved in list_saved(Path(settings.checkpoint_dir)) if saved.step > start]
    if later:
        raise CheckpointError(
            f"{settings.checkpoint_dir} holds {', '.join(later)}, and this run starts at step {start} "
            f"(checkpointing.resume={settings.resume}); choose another checkpointing.checkpoint_dir, remove them, or "
            "go on from the last one with checkpointing.resume=auto",
            path=settings.checkpoint_dir,
        )


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of this step into; what an earlier attempt left there is removed."""
    partial = folder / f"step_{step}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial.resolve()


def commit(partial: Path, step: int, metrics: Mapping[str, float], config: Mapping[str, Any]) -> Saved:
    """Describe, mark and rename what was written; from then on it is the checkpoint of this step.

    A complete checkpoint of the same step is replaced: it is moved away first, so that at no moment a half-written one
    stands under the name.
    """
    final = partial.with_name(f"step_{step}")
    run = {"step": step, "metrics": dict(metrics), "config": dict(config), "versions": _versions()}
    _write_durably(partial / "run.json", json.dumps(run, indent=2))
    _write_durably(partial / MARKER, "")
    if final.exists():
        old = partial.with_name(f"step_{step}.old.partial")
        if old.exists():
            shutil.rmtree(old)
        final.rename(old)
        partial.rename(final)
        shutil.rmtree(old)
    else:
        partial.rename(final)
    return read(final)


def discard_partial(folder: Path) -> list[Path]:
    """Remove what killed runs left behind. Not while another run writes to the same folder."""
    found = sorted(folder.glob("step_*.partial")) if folder.is_dir() else []
    for path in found:
        shutil.rmtree(path)
    return found


def remove(saved: Saved) -> None:
    """Delete a checkpoint: it loses its name first, so that an interrupted removal leaves nothing that looks whole."""
    doomed = saved.path.with_name(f"{saved.path.name}.old.partial")
    saved.path.rename(doomed)
    shutil.rmtree(doomed)


def keep(saved: Sequence[Saved], settings: CheckpointingConfig) -> tuple[list[Saved], list[Saved]]:
    """(those to keep, those to remove): the latest `keep_latest_k` and the `keep_top_k` best by `metric_name`.

    A checkpoint without that metric, or where it is not finite, is never among the best; of equals the later one is.
    """
    by_step = sorted(saved, key=lambda one: one.step)
    measured = [one for one in by_step if math.isfinite(one.metrics.get(settings.metric_name, math.nan))]
    sign = 1 if settings.higher_is_better else -1
    ranked = sorted(measured, key=lambda one: (sign * one.metrics[settings.metric_name], one.step), reverse=True)
    wanted = {one.step for one in (*by_step[-settings.keep_latest_k :], *ranked[: settings.keep_top_k])}
    return [one for one in by_step if one.step in wanted], [one for one in by_step if one.step not in wanted]


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What makes the losses of a resumed run differ from those of an uninterrupted one; empty: they will be equal."""
    found = []
    for key in _SAME_FOR_EXACT_RESUME:
        before, after = _at(saved, key), _at(now, key)
        if before != after:
            found.append(f"{key}: {before!r} then, {after!r} now")
    return found


def _at(tree: Mapping[str, Any], key: str) -> Any:
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _write_durably(path: Path, text: str) -> None:
    """To the disk, not only to its cache: the marker must not outlive a power cut that the rest does not."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("raylane", "torch", "transformers", "ray", "numpy")}
