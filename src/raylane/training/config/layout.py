"""Checks that the sizes of model, batches and workers fit together, made before any process starts.

Pure functions on the configuration, except `check_model_folder`, which reads a file; called by the check of each kind
of training (`raylane.sft.config.layout`) and by `run.policy`. Every message names the two values that disagree and how
to change them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raylane.errors import ConfigError
from raylane.training.config.megatron_limits import megatron_problems
from raylane.training.config.model_types import MODEL_TYPES, Divisions
from raylane.training.config.policy import INTERLEAVED, PolicyConfig
from raylane.training.config.schema import TrainingConfig

_SIZES = ("pipeline_parallel_size", "dp_replicate_size", "context_parallel_size", "tensor_parallel_size")
"""Keys of `policy.dtensor_cfg` whose product divides the number of workers."""


def layout_problems(config: TrainingConfig) -> list[str]:
    """Return all values of policy, cluster and loop that do not fit together."""
    policy = config.policy
    return [
        *worker_problems(config),
        *division_problems(config),
        *pipeline_problems(config),
        *megatron_problems(policy),
        *expert_problems(config),
        *dynamic_problems(policy),
        *batch_problems(config, "policy.train_", policy.train_global_batch_size, policy.micro_batch_divisor),
        *length_problems(policy),
        *graph_problems(config),
        *model_problems(policy.hf_config_overrides),
        *shape_problems(policy, policy.hf_config_overrides),
    ]


def check_model_folder(config: TrainingConfig) -> None:
    """Raise ConfigError if the model in the folder `policy.model_name` cannot be divided as asked."""
    settings, name = config.policy.dtensor_cfg, config.policy.model_name
    sizes = (
        settings.tensor_parallel_size,
        settings.context_parallel_size,
        settings.pipeline_parallel_size,
        settings.expert_parallel_size,
    )
    if name is None or max(sizes) == 1:
        return
    path = Path(name) / "config.json"
    try:
        # Overrides of the run win, as in `model.hf_config`.
        shape = {**json.loads(path.read_text(encoding="utf-8")), **config.policy.hf_config_overrides}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Set policy.model_name to a Hugging Face folder") from error
    if problems := list(shape_problems(config.policy, shape)):
        raise ConfigError("; ".join(problems), problems=problems)


def check_batch(config: TrainingConfig, batch: Mapping[str, Any], micro: int | None, *, evaluates: bool) -> None:
    """Raise ValueError for a batch of the driver that the layout cannot divide; `micro` is its micro-batch size."""
    settings = config.policy.dtensor_cfg
    rows, tokens = batch["input_ids"].shape
    if tokens % (divisor := settings.row_divisor):
        raise ValueError(
            f"rows of {tokens} tokens do not divide by {divisor}, as the context_parallel_size, tensor_parallel_size "
            f"and sequence_parallel of policy.dtensor_cfg need; pad them to {_nearest(tokens, divisor)}"
        )
    if settings.pipeline_parallel_size == 1:
        return
    if lists := sorted(key for key, value in batch.items() if isinstance(value, list)):
        raise ValueError(f"a pipeline takes tensors only, and the batch holds lists: {', '.join(lists)}; remove them")
    size = micro or config.policy.train_micro_batch_size
    if not evaluates and (problem := _pipeline_problem(config, rows, size)):
        raise ValueError(f"a batch of {rows} rows {problem}, or a smaller mbs")


def _pipeline_problem(config: TrainingConfig, rows: int, micro: int) -> str | None:
    """Return what a pipeline lacks for a batch of so many rows, or None; `micro` rows are one micro-batch."""
    settings, per_round = config.policy.dtensor_cfg, micro * readers(config)
    pp, schedule = settings.pipeline_parallel_size, settings.pipeline_schedule
    # What torch's schedules require (torch 2.13, torch/distributed/pipelining/schedules.py).
    step = pp if schedule in INTERLEAVED else 1
    least = pp if schedule != "gpipe" else 1
    number = rows // per_round
    if rows % per_round or (number >= least and number % step == 0):
        return None
    needed = f"a multiple of {pp}" if step > 1 else f"at least {least}"
    fitting = max(least, -(-number // step) * step) * per_round
    return (
        f"makes {number} micro-batches, but policy.dtensor_cfg.pipeline_schedule={schedule} on {pp} workers needs "
        f"{needed}; use {fitting} rows"
    )


def micro_batches(global_batch_size: int, micro_batch_size: int, num_readers: int) -> int:
    """Return the number of micro-batches per worker in one global batch; ValueError if the sizes do not divide."""
    per_round = micro_batch_size * num_readers
    if global_batch_size % per_round:
        raise ValueError(
            f"global batch of {global_batch_size} rows is no multiple of micro batch {micro_batch_size} x "
            f"{num_readers} workers = {per_round}; use {_nearest(global_batch_size, per_round)} rows"
        )
    return global_batch_size // per_round


def _nearest(value: int, multiple: int) -> str:
    below = value // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"


def listed(problems: Mapping[str, object]) -> list[str]:
    """Return the texts of a table from text to condition whose condition is true."""
    return [text for text, is_present in problems.items() if is_present]


def _no_multiple(name: str, value: int, divisor_name: str, divisor: int, remedy: str = "") -> dict[str, object]:
    """Return the problem of a value that is no multiple of a divisor; `remedy` goes on after the nearest multiples."""
    return {f"{name}={value} is no multiple of {divisor_name}; use {_nearest(value, divisor)}{remedy}": value % divisor}


def worker_problems(config: TrainingConfig) -> list[str]:
    """Return problems in the number of workers (replicas, nodes and GPUs), and settings that need FSDP2."""
    cluster, settings, precision = config.cluster, config.policy.dtensor_cfg, config.policy.precision
    # All four sizes together: the number of readers is what remains.
    world, group, nodes = cluster.num_workers, _group(config), cluster.num_nodes
    above = [f"{name}={size}" for name in _SIZES if (size := getattr(settings, name)) > 1]
    total = f" = {group}" if len(above) > 1 else ""
    gpus = cluster.gpus_per_node * nodes
    needs_fsdp = {
        f"policy.precision={precision}": precision != "float32",
        "policy.dtensor_cfg.cpu_offload=true": settings.cpu_offload,
        "policy.dtensor_cfg.reduce_every_micro_batch=true": settings.reduce_every_micro_batch,
    }
    return listed(
        {
            f"cluster.num_workers={world} is no multiple of policy.dtensor_cfg.{' x '.join(above)}{total}; use "
            f"{_nearest(world, group)} workers, or sizes whose product divides {world}": world % group,
            **_no_multiple("cluster.num_workers", world, f"cluster.num_nodes={nodes}", nodes, " workers"),
            f"cluster.num_workers={world} is more than cluster.gpus_per_node={cluster.gpus_per_node} x "
            f"cluster.num_nodes={nodes} = {gpus} GPUs; use at most {gpus} workers, or gpus_per_node=0": 0
            < gpus
            < world,
            "policy.dtensor_cfg.cpu_offload=true needs GPUs, but cluster.gpus_per_node=0; set cpu_offload to false": (
                settings.cpu_offload and not cluster.gpus_per_node
            ),
            **{
                f"{setting} needs FSDP2, but policy.dtensor_cfg.shard_parameters=never; set shard_parameters to auto "
                f"or always, or change {setting.split('=')[0]}": is_needed and settings.shard_parameters == "never"
                for setting, is_needed in needs_fsdp.items()
            },
        }
    )


def _group(config: TrainingConfig) -> int:
    """Return the smallest number of workers that the parallel sizes allow."""
    return math.prod(getattr(config.policy.dtensor_cfg, name) for name in _SIZES)


def readers(config: TrainingConfig) -> int:
    """Return the number of workers that read different rows; at least 1, also if the sizes do not fit together."""
    return max(1, config.cluster.num_workers * config.policy.dtensor_cfg.dp_replicate_size // _group(config))


def _reader_words(config: TrainingConfig) -> str:
    """Return the number of readers in words, with how it comes about."""
    number, world = readers(config), config.cluster.num_workers
    return f"cluster.num_workers={world}" if number == world else f"{number} readers (of cluster.num_workers={world})"


def division_problems(config: TrainingConfig) -> list[str]:
    """Return problems of tensor and context parallelism with the length of rows and with other settings."""
    policy, settings = config.policy, config.policy.dtensor_cfg
    tp, cp, divisor = settings.tensor_parallel_size, settings.context_parallel_size, settings.row_divisor
    lengths = {"policy.max_total_sequence_length": policy.max_total_sequence_length}
    if policy.compiled_graph.mode != "off" and policy.compiled_graph.warmup_seq_len is not None:
        lengths["policy.compiled_graph.warmup_seq_len"] = policy.compiled_graph.warmup_seq_len
    cause = f"context_parallel_size={cp}"
    if settings.sequence_parallel:
        cause += f" x tensor_parallel_size={tp} with sequence_parallel"
    attention = policy.hf_config_overrides.get("attn_implementation") or "raylane"
    return listed(
        {
            **{
                f"{name}={tokens} does not divide by {divisor}, as policy.dtensor_cfg.{cause} needs; use "
                f"{_nearest(tokens, divisor)}": tokens % divisor
                for name, tokens in lengths.items()
            },
            f"policy.dtensor_cfg.context_parallel_size={cp} works with raylane's attention only, but "
            f"policy.hf_config_overrides.attn_implementation={attention!r}; remove the latter": (
                cp > 1 and attention != "raylane"
            ),
            "policy.dtensor_cfg.sequence_parallel=true divides activations among tensor-parallel workers, but "
            "tensor_parallel_size=1; set tensor_parallel_size above 1, or sequence_parallel to false": (
                settings.sequence_parallel and tp == 1
            ),
        }
    )


def pipeline_problems(config: TrainingConfig) -> list[str]:
    """Return problems of the pipeline with its schedule and the number of micro-batches."""
    policy, settings, graph = config.policy, config.policy.dtensor_cfg, config.policy.compiled_graph
    schedule, per_worker = settings.pipeline_schedule, settings.stages_per_worker
    if settings.pipeline_parallel_size == 1:
        return []
    need = "2 or more stages" if schedule in INTERLEAVED else "1 stage"
    counts = {"policy.train_global_batch_size": policy.train_global_batch_size}
    if graph.mode != "off" and graph.warmup_gbs:
        counts["policy.compiled_graph.warmup_gbs"] = graph.warmup_gbs
    problems = {name: _pipeline_problem(config, rows, policy.train_micro_batch_size) for name, rows in counts.items()}
    return listed(
        {
            f"policy.dtensor_cfg.pipeline_schedule={schedule} needs {need} on each worker, but "
            f"pipeline_stages_per_worker={per_worker}; remove the latter, or choose another schedule": (
                (per_worker > 1) is not (schedule in INTERLEAVED)
            ),
            "policy.dtensor_cfg.reduce_every_micro_batch=true does not work in a pipeline, which reduces once per "
            "step; set it to false, or pipeline_parallel_size to 1": settings.reduce_every_micro_batch,
            **{
                f"{name}={counts[name]} {problem}, or a smaller policy.train_micro_batch_size": problem
                for name, problem in problems.items()
            },
        }
    )


def expert_problems(config: TrainingConfig) -> list[str]:
    """Return settings that do not fit the division of experts over the workers that share the weights."""
    settings = config.policy.dtensor_cfg
    size, copies = settings.expert_parallel_size, settings.dp_replicate_size
    world = config.cluster.num_workers
    if size == 1:
        return []
    key = f"policy.dtensor_cfg.expert_parallel_size={size}"
    alone = {
        "tensor_parallel_size": settings.tensor_parallel_size > 1,
        "context_parallel_size": settings.context_parallel_size > 1,
        "pipeline_parallel_size": settings.pipeline_parallel_size > 1,
    }
    return listed(
        {
            f"{key} must be 1 or the number of workers that share the weights, cluster.num_workers={world} / "
            f"dp_replicate_size={copies}; set it to one of the two": size * copies != world,
            **{
                f"{key} does not work with policy.dtensor_cfg.{name} above 1; set one of the two to 1": is_used
                for name, is_used in alone.items()
            },
            f"{key} needs FSDP2, but policy.dtensor_cfg.shard_parameters=never; set it to auto": (
                settings.shard_parameters == "never"
            ),
            f"{key} does not work with policy.dtensor_cfg.cpu_offload=true; set one of the two off": (
                settings.cpu_offload
            ),
            f"{key} does not work with policy.dtensor_cfg.compile_layers=true; set one of the two off": (
                settings.compile_layers
            ),
        }
    )


def dynamic_problems(policy: PolicyConfig) -> list[str]:
    """Return settings that do not fit micro-batches with a token budget."""
    settings, length = policy.dynamic_batching, policy.max_total_sequence_length
    if not settings.enabled:
        return []
    pp, round_to = policy.dtensor_cfg.pipeline_parallel_size, settings.sequence_length_round
    needed = -(-length // round_to) * round_to
    return listed(
        {
            "policy.dynamic_batching.enabled=true and policy.sequence_packing.enabled=true exclude each other: packed "
            "rows all have the same length; set one of the two to false": policy.sequence_packing.enabled,
            "policy.dynamic_batching.enabled=true does not work in a pipeline, whose micro-batches all have the same "
            f"shape; set it to false, or policy.dtensor_cfg.pipeline_parallel_size={pp} to 1": pp > 1,
            f"policy.dynamic_batching.train_mb_tokens={policy.micro_batch_tokens} has no room for a row of "
            f"policy.max_total_sequence_length={length} tokens, rounded up to {needed} by sequence_length_round="
            f"{round_to}; use at least {needed}": policy.micro_batch_tokens < needed,
        }
    )


def batch_problems(config: TrainingConfig, prefix: str, size: int, micro: int) -> list[str]:
    """Return the problem of a batch of `size` rows that does not divide into micro-batches for all workers.

    `prefix` is the beginning of the keys of both sizes, e.g. "policy.train_".
    """
    per_round = micro * readers(config)
    return listed(
        {
            f"{prefix}global_batch_size={size} is no multiple of {prefix}micro_batch_size={micro} x "
            f"{_reader_words(config)} = {per_round}; use a global batch size of {_nearest(size, per_round)}, or "
            "another micro batch size": size % per_round
        }
    )


def length_problems(policy: PolicyConfig) -> list[str]:
    """Return problems in the row length."""
    length, divisor = policy.max_total_sequence_length, policy.make_sequence_length_divisible_by
    setting = f"policy.make_sequence_length_divisible_by={divisor}"
    positions = policy.hf_config_overrides.get("max_position_embeddings")
    return listed(
        {
            **_no_multiple("policy.max_total_sequence_length", length, setting, divisor),
            f"policy.max_total_sequence_length={length} is more than policy.hf_config_overrides."
            f"max_position_embeddings={positions}; raise the latter or shorten the former": (
                isinstance(positions, int) and length > positions
            ),
        }
    )


def graph_problems(config: TrainingConfig) -> list[str]:
    """Return warm-up sizes that no real step has, and a graph with too few slots for the steps in flight."""
    graph, policy, in_flight = config.policy.compiled_graph, config.policy, config.steps_in_flight
    if graph.mode == "off":
        return []
    per_round = policy.micro_batch_divisor * readers(config)
    rows = f"policy.train_micro_batch_size={policy.train_micro_batch_size} x {_reader_words(config)} = {per_round}"
    length, longest = graph.warmup_seq_len or 0, policy.max_total_sequence_length
    divisor = policy.make_sequence_length_divisible_by
    setting = f"policy.make_sequence_length_divisible_by={divisor}"
    return listed(
        {
            **_no_multiple(
                "policy.compiled_graph.warmup_gbs", graph.warmup_gbs or 0, rows, per_round, ", or 0 for no warm-up"
            ),
            f"policy.compiled_graph.warmup_seq_len={length} is more than policy.max_total_sequence_length={longest}, "
            f"so no real row has this length; use at most {longest}, or null": length > longest,
            **_no_multiple("policy.compiled_graph.warmup_seq_len", length, setting, divisor),
            f"policy.compiled_graph.inflight={graph.inflight} is less than {config.loop_name}.steps_in_flight="
            f"{in_flight}; raise the former or lower the latter": graph.inflight is not None
            and graph.inflight < in_flight,
        }
    )


def model_problems(shape: Mapping[str, Any]) -> list[str]:
    """Return problems in the sizes of a model with random weights, as far as the configuration names these sizes."""
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: size for name in names if type(size := shape.get(name)) is int and size > 0}
    problems: dict[str, object] = {}
    key = "policy.hf_config_overrides"
    # These architectures compute head_dim as hidden_size / num_attention_heads (configuration classes of
    # transformers 5). Qwen3 and others have an independent head_dim, so the two sizes need not divide.
    computes_head_dim = shape.get("model_type") in ("llama", "mistral", "qwen2") and "head_dim" not in sizes
    if computes_head_dim and {"hidden_size", "num_attention_heads"} <= sizes.keys():
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        other = f"num_attention_heads={heads}"
        problems |= _no_multiple(f"{key}.hidden_size", hidden, other, heads, ", or set head_dim")
    if {"num_attention_heads", "num_key_value_heads"} <= sizes.keys():
        heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        other, remedy = f"num_key_value_heads={kv_heads}", " heads, or fewer key-value heads"
        problems |= _no_multiple(f"{key}.num_attention_heads", heads, other, kv_heads, remedy)
    return listed(problems)


def shape_problems(policy: PolicyConfig, shape: Mapping[str, Any]) -> Iterator[str]:
    """Yield sizes of the model that cannot be divided as asked; `shape` has the keys of a Hugging Face configuration.

    Checked on the configuration of the run, and again on the complete configuration of a model folder.
    """
    settings = policy.dtensor_cfg
    tp, pp = settings.tensor_parallel_size, settings.pipeline_parallel_size
    model_type = shape.get("model_type")
    divisions = MODEL_TYPES.get(str(model_type), Divisions())
    used = {
        "tensor_parallel_size": (settings.tensor_parallel_size, "tensors"),
        "sequence_parallel": (settings.sequence_parallel, "sequences"),
        "context_parallel_size": (settings.context_parallel_size, "context"),
        "pipeline_parallel_size": (settings.pipeline_parallel_size, "stages"),
        "expert_parallel_size": (settings.expert_parallel_size, "experts"),
    }
    for key, (value, way) in used.items():
        # The type of a model folder is checked later.
        if model_type is not None and (value > 1 or value is True) and not getattr(divisions, way):
            able = [name for name, of_type in MODEL_TYPES.items() if getattr(of_type, way)]
            cause = f" ({divisions.reason})" if divisions.reason and way != "experts" else ""
            yield (
                f"a model of type {model_type!r} cannot be divided by policy.dtensor_cfg.{key}{cause}; set it to "
                f"{'false' if value is True else 1}, or use a model of type {', '.join(able)}"
            )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = shape.get(key)
        if isinstance(size, int) and size % tp:
            # Few numbers, so that the message stays readable.
            fitting = [n for n in range(1, size + 1) if size % n == 0]
            yield (
                f"the model's {key}={size} does not divide by policy.dtensor_cfg.tensor_parallel_size={tp}; use "
                f"{', '.join(map(str, fitting[:6]))}"
            )
    for key in ("num_experts", "num_local_experts"):
        experts = shape.get(key)
        if isinstance(experts, int) and experts % settings.expert_parallel_size:
            yield (
                f"the model's {key}={experts} does not divide by policy.dtensor_cfg.expert_parallel_size="
                f"{settings.expert_parallel_size}; use another number of workers"
            )
    layers = shape.get("num_hidden_layers")
    # Every stage needs a layer of its own.
    stages = pp * settings.stages_per_worker
    if pp > 1 and isinstance(layers, int) and layers < stages:
        yield (
            f"the model's num_hidden_layers={layers} is less than the {stages} stages of policy.dtensor_cfg."
            f"pipeline_parallel_size={pp} with pipeline_schedule={settings.pipeline_schedule}; use at most "
            f"{max(1, layers * pp // stages)} workers per pipeline"
        )
