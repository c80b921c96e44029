"""Checkpoint folders: names, completeness, retention, and the checkpoint to resume from.

    checkpoint_dir/step_120/state/      torch DCP: weights, optimizer, step (written by all workers, `state`)
                   step_120/run.json    step, metrics, configuration, versions
                   step_120/COMPLETE    written last
                   step_120/hf/         the model as a Hugging Face folder, if requested; moved in afterwards
                   step_130.partial/    being written, or left by a killed run; never read
                   step_110.damaged/    found damaged by a run that resumed from an earlier one; never removed

A checkpoint is written under a name that is never read, then marked complete, then renamed:

    workers: step_N.partial/state  ->  driver: run.json, COMPLETE, fsync  ->  rename to step_N

In storage without renames the marker alone decides (`publishing` has both ways). Decisions are plain functions. Only
the driver renames and removes folders, so it must see the same folder as the workers. No torch, no Ray. Called by
`policy` and `trainer`.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from raylane.errors import CheckpointDamagedError, CheckpointError
from raylane.training import storage
from raylane.training.checkpoint import publishing
from raylane.training.checkpoint.publishing import MARKER
from raylane.training.config.keys import value_at
from raylane.training.config.schema import CheckpointingConfig
from raylane.training.storage import Place

_log = logging.getLogger(__name__)

# Keys that the losses of a resumed run depend on in every training, besides the checkpoint itself.
_SAME_FOR_EXACT_RESUME = (
    "policy.train_global_batch_size",
    "policy.train_micro_batch_size",
    "policy.max_total_sequence_length",
    "policy.precision",
    "policy.max_grad_norm",
    "policy.optimizer",
    "policy.scheduler",
    "policy.sequence_packing",
    "policy.dynamic_batching",
    "policy.loss_chunk_tokens",
    "policy.dtensor_cfg.lora_cfg",
    "policy.model_name",
    "policy.hf_config_overrides",
    "cluster.gpus_per_node",
    "cluster.cpus_per_worker",  # the number of threads changes the order of floating-point sums
)


# Keys of the layout. On another one the numbers are the same up to rounding.
_LAYOUT = (
    "cluster.num_workers",
    "policy.dtensor_cfg.dp_replicate_size",
    "policy.dtensor_cfg.tensor_parallel_size",
    "policy.dtensor_cfg.context_parallel_size",
    "policy.dtensor_cfg.expert_parallel_size",
    "policy.dtensor_cfg.pipeline_parallel_size",
    "policy.dtensor_cfg.sequence_parallel",
    "policy.dtensor_cfg.shard_parameters",
    "policy.dtensor_cfg.pipeline_schedule",
    "policy.dtensor_cfg.pipeline_stages_per_worker",
    "policy.megatron_cfg.enabled",
)


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int
    """Number of optimizer steps applied to its weights; also the number of the next step, counted from 0."""
    path: Place
    """Folder of the checkpoint: a local path or a URL."""
    metrics: Mapping[str, float]
    """Metrics at this step, e.g. {"val:loss": 4.5, "train:loss": 4.6}; metrics not measured here are missing."""
    config: Mapping[str, Any]
    """Configuration as plain values, and under "prepared" the hash of the tokenised data."""


def read(path: Place) -> Saved:
    """Return the checkpoint in this folder; CheckpointError if the folder is missing or unfinished.

    CheckpointDamagedError if its description cannot be read, or if a file of its state is missing or has another size
    than when it was written.
    """
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {path}", path=str(path))
    if not (path / MARKER).is_file():
        raise CheckpointError(
            f"{path} is not a complete checkpoint: it has no {MARKER} file. Resume from another one, or remove it",
            path=str(path),
        )
    damage = (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
    try:
        run = json.loads((path / "run.json").read_bytes())
        metrics = {str(name): float(value) for name, value in dict(run["metrics"]).items()}
        saved = Saved(int(run["step"]), path, metrics, dict(run["config"]))
        sizes = {str(name): int(size) for name, size in dict(run.get("files", {})).items()}
    except (*damage, OSError) as error:
        # Permissions or a network file system: the checkpoint itself may be intact.
        kind = CheckpointDamagedError if isinstance(error, damage) else CheckpointError
        raise kind(f"{path}/run.json cannot be read: {error!r}", path=str(path)) from error
    # Sizes, not checksums: reading tens of gigabytes at every start would cost minutes, and a truncated file, the
    # usual damage, has another size.
    actual_sizes = _state_sizes(path)
    wrong = [
        f"{name} has {actual_sizes.get(name, 'no')} bytes, {size} were written"
        for name, size in sizes.items()
        if actual_sizes.get(name) != size
    ]
    if wrong:
        raise CheckpointDamagedError(f"{path} is damaged: {'; '.join(wrong[:3])}", path=str(path))
    return saved


def list_saved(folder: Place) -> list[Saved]:
    """Return the complete checkpoints in a folder by ascending step; other folders are ignored."""
    return sorted((read(path) for path in publishing.complete(folder)), key=lambda saved: saved.step)


def list_whole(folder: Place) -> tuple[list[Saved], list[CheckpointDamagedError]]:
    """Return the complete undamaged checkpoints by ascending step, and the errors of the damaged ones."""
    whole: list[Saved] = []
    damaged: list[CheckpointDamagedError] = []
    for path in publishing.complete(folder):
        try:
            whole.append(read(path))
        except CheckpointDamagedError as error:
            damaged.append(error)
    return sorted(whole, key=lambda saved: saved.step), damaged


def find(settings: CheckpointingConfig) -> Saved | None:
    """Return the checkpoint that `checkpointing.resume` names; None for "never", and for "auto" without a complete one.

    With "auto", damaged checkpoints are renamed (`put_aside`) with a warning, and the newest undamaged one is taken. If
    all are damaged, none is renamed and CheckpointDamagedError is raised.
    """
    if settings.resume == "never":
        return None
    if settings.resume != "auto":
        saved = read(storage.at(settings.resume))
        refuse_other_owner(saved.path, settings)
        return saved
    folder = storage.at(settings.checkpoint_dir)
    for path in publishing.complete(folder):
        refuse_other_owner(path, settings)
    whole, damaged = list_whole(folder)
    # Renaming the only checkpoints would make the next start train from the beginning without a word.
    if damaged and not whole:
        raise _all_damaged(settings, damaged[0])
    for damage in damaged:
        put_aside(storage.at(damage.fields["path"]), damage)
    return whole[-1] if whole else None


def load_whole(saved: Saved, settings: CheckpointingConfig, load: Callable[[Place], object]) -> Saved:
    """Load a checkpoint, or with resume=auto the newest earlier one that is not damaged; return the one loaded."""
    while True:
        try:
            load(saved.path)
            return saved
        except CheckpointDamagedError as damage:
            saved = fall_back(saved, settings, damage)


def fall_back(saved: Saved, settings: CheckpointingConfig, damage: CheckpointDamagedError) -> Saved:
    """Put aside a checkpoint that turned out to be damaged while loading; return the one to resume from instead.

    Only for `checkpointing.resume=auto`. CheckpointDamagedError if there is no earlier one.
    """
    earlier = [other for other in list_whole(storage.at(settings.checkpoint_dir))[0] if other.step < saved.step]
    if settings.resume != "auto":
        raise damage
    if not earlier:
        raise _all_damaged(settings, damage) from damage
    put_aside(saved.path, damage)
    return earlier[-1]


def _all_damaged(settings: CheckpointingConfig, damage: CheckpointDamagedError) -> CheckpointDamagedError:
    """Return the error for a folder that holds damaged checkpoints only."""
    return CheckpointDamagedError(
        f"{settings.checkpoint_dir} holds only damaged checkpoints: {damage}. To start a new run, remove them or set "
        "another checkpointing.checkpoint_dir",
        path=settings.checkpoint_dir,
    )


def put_aside(path: Place, damage: CheckpointDamagedError) -> Place:
    """Make a damaged checkpoint invisible: it is never read or removed; return its new path."""
    aside, done = publishing.put_aside(path, str(damage))
    _log.warning("%s; %s, and the run resumes from an earlier checkpoint", damage, done)
    return aside


def refuse_other_owner(path: Place, settings: CheckpointingConfig) -> None:
    """Raise CheckpointError if a checkpoint has files of another user, unless the configuration allows it.

    Weights are loaded without any examination of what the model does; only the user can decide whom to trust.
    """
    if settings.allow_other_owner:
        return
    state = path / "state"
    files = [*state.iterdir()] if state.is_dir() else []
    for file in (path, path / "run.json", *files):
        owner = publishing.owner(file)
        if owner is not None and owner != os.geteuid():
            raise CheckpointError(
                f"{file} belongs to user {owner}, and this process runs as user {os.geteuid()}. If you trust that "
                "user, set checkpointing.allow_other_owner=true; otherwise set another checkpointing.checkpoint_dir",
                path=str(path),
                owner=owner,
            )


def refuse_later(settings: CheckpointingConfig, start: int) -> None:
    """Raise CheckpointError if the folder holds checkpoints of later steps than the start of this run.

    They belong to another run. Checkpoints of this run would count as older, would be removed first, and would not be
    resumed from.
    """
    later = [saved.path.name for saved in list_saved(storage.at(settings.checkpoint_dir)) if saved.step > start]
    if later:
        raise CheckpointError(
            f"{settings.checkpoint_dir} holds {', '.join(later)}, and this run starts at step {start} "
            f"(checkpointing.resume={settings.resume}). Set another checkpointing.checkpoint_dir, remove them, or "
            "resume from the last one with checkpointing.resume=auto",
            path=settings.checkpoint_dir,
        )


def commit(partial: Place, step: int, metrics: Mapping[str, float], config: Mapping[str, Any]) -> Saved:
    """Complete a written checkpoint: add run.json and publish it. A complete one of the same step is replaced."""
    run = {
        "step": step,
        "metrics": dict(metrics),
        "config": dict(config),
        "versions": {name: version(name) for name in ("raylane", "torch", "transformers", "ray", "numpy")},
        "files": _state_sizes(partial),
    }
    publishing.write(partial / "run.json", json.dumps(run, indent=2))
    return read(publishing.publish(partial, step))


def _state_sizes(path: Place) -> dict[str, int]:
    """Return file name -> size in bytes for all files of the state, with names that start at the checkpoint."""
    sizes = publishing.sizes(path / "state")
    return {f"state/{name}": size for name, size in sorted(sizes.items())}


def keep(saved: Sequence[Saved], settings: CheckpointingConfig) -> tuple[list[Saved], list[Saved]]:
    """Return (checkpoints to keep, checkpoints to remove).

    Kept are the latest `keep_latest_k` and the best `keep_top_k` by `metric_name`. A checkpoint without that metric, or
    with a value that is not finite, is never among the best; among equal values the later checkpoint is better.
    """
    by_step = sorted(saved, key=lambda checkpoint: checkpoint.step)
    name, sign = settings.metric_name, 1 if settings.higher_is_better else -1
    measured = [checkpoint for checkpoint in by_step if math.isfinite(checkpoint.metrics.get(name, math.nan))]
    # Sorting keeps the order of equal values, so the later checkpoint comes last.
    ranked = sorted(measured, key=lambda checkpoint: sign * checkpoint.metrics[name])[::-1]
    chosen = (*by_step[-settings.keep_latest_k :], *ranked[: settings.keep_top_k])
    kept_steps = {checkpoint.step for checkpoint in chosen}
    return (
        [checkpoint for checkpoint in by_step if checkpoint.step in kept_steps],
        [checkpoint for checkpoint in by_step if checkpoint.step not in kept_steps],
    )


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], more_keys: Sequence[str] = ()) -> list[str]:
    """Return the settings that make the losses of a resumed run differ from those of an uninterrupted run.

    `more_keys` are keys of one kind of training.
    """
    changes = []
    for key in (*more_keys, *_SAME_FOR_EXACT_RESUME):
        for leaf, before, after in _changed(key, value_at(saved, key), value_at(now, key)):
            changes.append(f"{leaf}: {before!r} in the checkpoint, {after!r} now")
    return changes


def _changed(key: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key of two values that differs, with both values; of mappings only the keys inside that differ."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in dict.fromkeys([*before, *after]):
            yield from _changed(f"{key}.{name}", before.get(name), after.get(name))
    elif before != after:
        yield key, before, after


def layout_change(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return a sentence about a resume on another layout; None on the same one."""
    changed = [
        (key.rpartition(".")[2] if key != "policy.megatron_cfg.enabled" else "megatron_cfg.enabled", before, after)
        for key in _LAYOUT
        if (before := value_at(saved, key)) != (after := value_at(now, key))
    ]
    if not changed:
        return None
    before, after = (", ".join(f"{entry[0]}={entry[side]}" for entry in changed) for side in (1, 2))
    return f"resuming on another layout, so losses will differ by rounding: {before} in the checkpoint, {after} now"
