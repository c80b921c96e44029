"""Whether the sizes of a run fit together, decided before any process starts.

Pure functions on the configuration; called by `config.load_config` and by `planning`. Every complaint names the two
values that disagree and what to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raylane.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from raylane.sft.config import RunConfig

__all__ = ["check_layout", "micro_batches"]


def check_layout(config: RunConfig) -> None:
    """Raise one ConfigError that lists everything that does not fit; see the functions below for what is compared."""
    problems = [
        *_workers(config),
        *_batches(config),
        *_lengths(config),
        *_steps(config),
        *_validation(config),
        *_best(config),
        *_model_shape(config.policy.hf_config_overrides),
    ]
    if problems:
        raise ConfigError("; ".join(problems), problems=problems)


def micro_batches(global_batch_size: int, micro_batch_size: int, num_workers: int) -> int:
    """Micro-batches that each worker runs for one global batch; ValueError when they do not divide."""
    per_round = micro_batch_size * num_workers
    if global_batch_size % per_round:
        raise ValueError(
            f"global batch of {global_batch_size} rows is no multiple of micro batch {micro_batch_size} x "
            f"{num_workers} workers = {per_round}"
        )
    return global_batch_size // per_round


def _nearest(value: int, multiple: int) -> str:
    below = value // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"


def _workers(config: RunConfig) -> Iterator[str]:
    cluster, replicas = config.cluster, config.policy.dtensor_cfg.dp_replicate_size
    world = cluster.num_workers
    if world % replicas:
        yield (
            f"cluster.num_workers={world} is no multiple of policy.dtensor_cfg.dp_replicate_size={replicas}; "
            f"use {_nearest(world, replicas)} workers, or a dp_replicate_size that divides {world}"
        )
    if world % cluster.num_nodes:
        yield (
            f"cluster.num_workers={world} is no multiple of cluster.num_nodes={cluster.num_nodes}; "
            f"use {_nearest(world, cluster.num_nodes)} workers"
        )
    gpus = cluster.gpus_per_node * cluster.num_nodes
    if gpus and world > gpus:
        yield (
            f"cluster.num_workers={world} is more than cluster.gpus_per_node={cluster.gpus_per_node} x "
            f"cluster.num_nodes={cluster.num_nodes} = {gpus} GPUs; use at most {gpus} workers, or gpus_per_node=0"
        )
    if config.policy.dtensor_cfg.cpu_offload and not cluster.gpus_per_node:
        yield (
            "policy.dtensor_cfg.cpu_offload=true has nothing to offload with cluster.gpus_per_node=0; set it to false"
        )


def _batches(config: RunConfig) -> Iterator[str]:
    world = config.cluster.num_workers
    train = (config.policy.train_global_batch_size, config.policy.train_micro_batch_size)
    val = (config.sft.val_global_batch_size, config.sft.val_micro_batch_size)
    names = (("policy.train_", train, True), ("sft.val_", val, _validates(config)))
    for prefix, (global_size, micro_size), used in names:
        per_round = micro_size * world
        if used and global_size % per_round:
            yield (
                f"{prefix}global_batch_size={global_size} is no multiple of {prefix}micro_batch_size={micro_size} x "
                f"cluster.num_workers={world} = {per_round}; use a global batch size of "
                f"{_nearest(global_size, per_round)}, or another micro batch size"
            )


def _lengths(config: RunConfig) -> Iterator[str]:
    length, divisor = config.policy.max_total_sequence_length, config.policy.make_sequence_length_divisible_by
    if length % divisor:
        yield (
            f"policy.max_total_sequence_length={length} is no multiple of "
            f"policy.make_sequence_length_divisible_by={divisor}; use {_nearest(length, divisor)}"
        )
    positions = config.policy.hf_config_overrides.get("max_position_embeddings")
    if isinstance(positions, int) and length > positions:
        yield (
            f"policy.max_total_sequence_length={length} is more than policy.hf_config_overrides."
            f"max_position_embeddings={positions}; raise the latter or shorten the former"
        )


def _steps(config: RunConfig) -> Iterator[str]:
    steps, epochs = config.sft.max_num_steps, config.sft.max_num_epochs
    if steps is None and epochs is None:
        yield "sft.max_num_steps and sft.max_num_epochs are both null, so the run would never end; set one of them"


def _validates(config: RunConfig) -> bool:
    return config.sft.val_period > 0 or config.sft.val_at_start or config.sft.val_at_end


def _validation(config: RunConfig) -> Iterator[str]:
    if _validates(config) and not config.data.has_validation:
        asked = next(
            f"sft.{name}={value}"
            for name in ("val_period", "val_at_start", "val_at_end")
            if (value := getattr(config.sft, name))
        )
        yield (
            f"{asked} asks for validation, but data.validation=null and data.validation_fraction=0.0 leave nothing to "
            "validate on; set one of the two"
        )
    saving = config.checkpointing
    if saving.enabled and saving.keep_top_k and saving.metric_name == "val:loss" and not _validates(config):
        yield (
            f"checkpointing.keep_top_k={saving.keep_top_k} compares checkpointing.metric_name='val:loss', but nothing "
            "validates; set sft.val_period, or checkpointing.metric_name=train:loss"
        )


def _best(config: RunConfig) -> Iterator[str]:
    """keep_top_k compares figures that belong to the checkpoints: those of their own steps."""
    saving, val = config.checkpointing, config.sft.val_period
    compares = saving.enabled and saving.keep_top_k and saving.metric_name == "val:loss" and _validates(config)
    if compares and saving.save_period and (not val or saving.save_period % val):
        yield (
            f"checkpointing.keep_top_k={saving.keep_top_k} compares checkpointing.metric_name='val:loss', but "
            f"checkpointing.save_period={saving.save_period} saves at steps that sft.val_period={val} does not "
            "validate at; make save_period a multiple of val_period, or set checkpointing.metric_name=train:loss"
        )


def _model_shape(shape: Mapping[str, Any]) -> Iterator[str]:
    """Sizes of a model from random weights, as far as the configuration itself names them."""

    def size(key: str) -> int | None:
        value = shape.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    hidden, heads, kv_heads = size("hidden_size"), size("num_attention_heads"), size("num_key_value_heads")
    # Qwen3 and others have a head_dim of their own; these derive it (their configuration classes in transformers 5).
    derives = shape.get("model_type") in ("llama", "mistral", "qwen2")
    if derives and hidden and heads and size("head_dim") is None and hidden % heads:
        yield (
            f"policy.hf_config_overrides.hidden_size={hidden} is no multiple of num_attention_heads={heads}; "
            f"use {_nearest(hidden, heads)}, or set head_dim"
        )
    if heads and kv_heads and heads % kv_heads:
        yield (
            f"policy.hf_config_overrides.num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}; "
            f"use {_nearest(heads, kv_heads)} heads, or fewer key-value heads"
        )
