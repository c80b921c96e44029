"""Checks that the values of a fine-tuning configuration fit together, made before any process starts.

Pure functions. Checks that every training shares are in `raylane.training.config.layout`. Called by
`load.build_config` and `planning`.
"""

from __future__ import annotations

from typing import Any

from raylane.errors import ConfigError
from raylane.sft.config.schema import SftRunConfig
from raylane.training.config.layout import batch_problems, layout_problems, listed


def check_layout(config: SftRunConfig) -> None:
    """Raise one ConfigError that lists all values of the configuration that do not fit together."""
    problems = [*layout_problems(config), *validation_problems(config), *run_problems(config)]
    # All problems at once: a user who mends one by one starts the program as often.
    if problems:
        raise ConfigError("; ".join(problems), problems=problems)


def without_validation(config: SftRunConfig) -> tuple[SftRunConfig, str]:
    """Return the configuration of a run whose data has nothing to validate on, and the sentence that tells the user.

    The settings of validation have no effect there. Other configurations are returned as they are, with an empty text.
    """
    if config.data.has_validation or not _validates(config):
        return config, ""
    sft, saving = config.sft, config.checkpointing
    off = {"val_period": 0, "val_at_start": False, "val_at_end": False, "sample_prompts": ()}
    set_keys = [f"sft.{name}" for name in off if getattr(sft, name)]
    changes: dict[str, Any] = {"sft": sft.model_copy(update=off)}
    text = f"data.validation is null and data.validation_fraction is 0: {', '.join(set_keys)} have no effect"
    if saving.keep_top_k and saving.metric_name == "val:loss":
        changes["checkpointing"] = saving.model_copy(update={"metric_name": "train:loss"})
        text += f", and train:loss tells the best {saving.keep_top_k} checkpoints"
    return config.model_copy(update=changes), f"nothing is validated: {text}. Set one of the two to validate"


def room_for_prompts(config: SftRunConfig) -> int:
    """Return the largest number of tokens in a prompt that leaves room for an answer of `sft.sample_tokens`."""
    return config.policy.max_total_sequence_length - config.sft.sample_tokens


def validation_problems(config: SftRunConfig) -> list[str]:
    """Return the problem of a validation batch that does not divide into micro-batches for all workers."""
    sft = config.sft
    if not _validates(config):
        return []
    return batch_problems(config, "sft.val_", sft.val_global_batch_size, sft.val_micro_batch_size)


def _validates(config: SftRunConfig) -> bool:
    return config.sft.val_period > 0 or config.sft.val_at_start or config.sft.val_at_end


def run_problems(config: SftRunConfig) -> list[str]:
    """Return problems of the run as a whole: no end, validation without data, a metric that nothing measures."""
    sft, saving, validates = config.sft, config.checkpointing, _validates(config)
    # Losses that were not measured at the steps of the checkpoints cannot be compared.
    compares = saving.enabled and saving.keep_top_k and saving.metric_name == "val:loss"
    best = f"checkpointing.keep_top_k={saving.keep_top_k} compares checkpointing.metric_name='val:loss', but"
    uneven = saving.save_period and (not sft.val_period or saving.save_period % sft.val_period)
    periods = ("val_period", "val_at_start", "val_at_end")
    asked = next((f"sft.{name}={value}" for name in periods if (value := getattr(sft, name))), "")
    return listed(
        {
            "sft.max_num_steps and sft.max_num_epochs are both null, so the run would never end; set one of them": (
                sft.max_num_steps is None and sft.max_num_epochs is None
            ),
            "data.group_by_length=true needs rows of different lengths, but policy.sequence_packing.enabled=true fills "
            "all of them; set one of the two to false": (
                config.data.group_by_length and config.policy.sequence_packing.enabled
            ),
            f"{asked} asks for validation, but data.validation=null and data.validation_fraction=0.0 "
            "leave nothing to validate on; set one of the two": validates and not config.data.has_validation,
            f"sft.sample_prompts holds {len(sft.sample_prompts)} questions for every validation, but nothing "
            "validates; set sft.val_period and data.validation, or remove the questions": sft.sample_prompts
            and not validates,
            f"{best} nothing validates; set sft.val_period and data.validation, or "
            "checkpointing.metric_name=train:loss": compares and not validates,
            f"{best} checkpointing.save_period={saving.save_period} saves at steps that sft.val_period="
            f"{sft.val_period} does not validate at; make save_period a multiple of val_period, or set "
            "checkpointing.metric_name=train:loss": compares and validates and uneven,
        }
    )
