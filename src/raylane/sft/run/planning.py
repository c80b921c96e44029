"""Forecast of a run, computed before it starts: mesh, steps, tokens, memory. Nothing is started.

All functions are pure except `plan_run`, which prepares the data and reads the model's configuration. Called by
`raylane plan` and `raylane sft`.
"""

from __future__ import annotations

from dataclasses import dataclass

from raylane.errors import ConfigError
from raylane.sft.config.layout import check_layout
from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data.mixing import open_rows, open_training_rows
from raylane.sft.data.order import steps_per_epoch, total_steps, validation_batches
from raylane.sft.data.prepare import prepare
from raylane.sft.data.prepared import PreparedData
from raylane.training.config.layout import check_model_folder, micro_batches
from raylane.training.model.hf_config import ModelShape, model_config, model_shape
from raylane.training.parallel.mesh import AXES, DATA_AXES, ParallelDims, shards_parameters
from raylane.training.report.metrics import counted
from raylane.training.run.memory import MemoryEstimate, estimate_memory
from raylane.training.run.snapshots import versions_to_keep

GIB = 2**30
STATE_BYTES = 12
"""Bytes of a trained parameter in a snapshot: in float32, with two averages of the optimizer (Muon has one)."""


@dataclass(frozen=True)
class RowCount:
    """Size of one set: rows of T positions, and their content."""

    rows: int
    documents: int
    tokens: int
    supervised: int
    efficiency: float  # fraction of the positions that hold a token


@dataclass(frozen=True)
class RunPlan:
    """Forecast of one run."""

    dims: ParallelDims
    device: str
    micro_batches: int
    steps_per_epoch: int
    total_steps: int
    unused_rows: int  # rows left over in each epoch, less than one global batch
    positions: int  # tokens and padding processed in the whole run, if every row has full length
    supervised: int  # approximate number of tokens with a loss in the whole run
    validations: int  # number of validations in the whole run
    validation_batches: int  # batches in one validation
    saves: int  # number of checkpoints in the whole run
    flops: float  # floating-point operations of matrix products, forward and backward, in the whole run
    memory: MemoryEstimate
    shape: ModelShape
    train: RowCount
    validation: RowCount | None


def plan_run(config: SftRunConfig) -> RunPlan:
    """Return the forecast of a run: prepare its data (or find it in the cache) and count the model's parameters."""
    # Before the data, whose preparation may take long.
    check_model_folder(config)
    prepared = prepare(config)
    hf_config = model_config(config.policy, prepared.vocab_size, prepared.pad_id, min(prepared.end_ids))
    shape = model_shape(hf_config, config.policy.dtensor_cfg.lora_cfg)

    validation = None
    if prepared.validation is not None:
        counts = prepared.report["validation"]
        rows = open_rows(prepared.validation, config.policy, prepared.pad_id)
        validation = RowCount(rows.num_rows, counts.documents, counts.tokens, counts.supervised, rows.efficiency)
    return make_plan(config, shape, count_training_rows(prepared, config), validation)


def count_training_rows(prepared: PreparedData, config: SftRunConfig) -> RowCount:
    """Return the size of one epoch of the training data: each file counts as often as its weight says."""
    rows = open_training_rows(prepared, config)
    files = list(zip(config.data.train_weights, prepared.files, strict=True))
    documents, tokens, supervised = (
        round(sum(weight * getattr(counts, name) for weight, counts in files))
        for name in ("documents", "tokens", "supervised")
    )
    return RowCount(rows.num_rows, documents, tokens, supervised, rows.efficiency)


def make_plan(config: SftRunConfig, shape: ModelShape, train: RowCount, validation: RowCount | None) -> RunPlan:
    """Return the forecast for data and a model of these sizes; ConfigError or DataError if the run is impossible."""
    check_layout(config)
    length = config.policy.max_total_sequence_length
    if shape.max_positions is not None and length > shape.max_positions:
        raise ConfigError(
            f"policy.max_total_sequence_length={length} is more than the model's max_position_embeddings="
            f"{shape.max_positions}; use rows of at most {shape.max_positions} tokens"
        )
    policy, sft = config.policy, config.sft
    dims = ParallelDims.of(config.policy.dtensor_cfg, config.cluster.num_workers)
    batch = policy.train_global_batch_size
    steps = total_steps(train.rows, batch, sft.max_num_steps, sft.max_num_epochs)
    positions = steps * batch * policy.max_total_sequence_length
    num_validation_batches = (
        len(validation_batches(validation.rows, sft.val_global_batch_size, sft.val_batches)) if validation else 0
    )
    return RunPlan(
        dims=dims,
        device="cuda" if config.cluster.gpus_per_node else "cpu",
        micro_batches=micro_batches(batch, policy.micro_batch_divisor, dims.readers),
        steps_per_epoch=steps_per_epoch(train.rows, batch),
        total_steps=steps,
        unused_rows=train.rows % batch,
        positions=positions,
        supervised=round(steps * batch / train.rows * train.supervised),
        validations=num_validations(config, steps) if validation else 0,
        validation_batches=num_validation_batches,
        saves=num_saves(config, steps),
        flops=training_flops(config, shape, positions),
        memory=estimate_memory(config, shape),
        shape=shape,
        train=train,
        validation=validation,
    )


def num_validations(config: SftRunConfig, steps: int) -> int:
    """Return the number of validations in a run of `steps` steps; a validation at the end is counted once."""
    period = config.sft.val_period
    at = set(range(period, steps + 1, period)) if period else set()
    if config.sft.val_at_end:
        at.add(steps)
    return len(at) + config.sft.val_at_start


def num_saves(config: SftRunConfig, steps: int) -> int:
    """Return the number of checkpoints in a run of `steps` steps."""
    if not config.checkpointing.enabled:
        return 0
    period = config.checkpointing.save_period
    return len({*(range(period, steps + 1, period) if period else ()), steps})


def training_flops(config: SftRunConfig, shape: ModelShape, positions: int) -> float:
    """Return the floating-point operations of training on `positions` positions.

    6 per parameter and token, and 12 L n_heads head_dim T for attention (PaLM, arXiv:2204.02311, appendix B).
    Activation checkpointing adds a forward pass, which is a third of that, or half of it with every_other_layer;
    selective checkpointing repeats no matrix product.
    """
    attention = 12 * shape.num_layers * shape.num_attention_heads * shape.head_dim
    per_token = 6 * shape.num_parameters + attention * config.policy.max_total_sequence_length
    again = {"full": 4 / 3, "every_other_layer": 7 / 6}.get(str(config.policy.dtensor_cfg.activation_checkpointing), 1)
    return positions * per_token * again


# ------------------------------------------------------------------------------------------------------ as text


def render(plan: RunPlan, config: SftRunConfig) -> str:
    """Return the forecast as plain text, several lines."""
    policy, offloads = config.policy, config.policy.dtensor_cfg.cpu_offload
    batch = policy.train_global_batch_size
    micro = f"{counted(plan.micro_batches, 'micro-batch', 'es')} x {counted(policy.train_micro_batch_size, 'row')}"
    if policy.dynamic_batching.enabled:
        share = batch // plan.dims.readers
        micro = f"{share} rows in micro-batches of at most {policy.micro_batch_tokens:,} tokens"
    # Rows that are not packed end with the longest row of their micro-batch.
    most = "" if policy.sequence_packing.enabled else "at most "
    positions = f"{most}{batch * policy.max_total_sequence_length:,} positions a step"
    validations = "never"
    if plan.validations:
        each = counted(plan.validation_batches, "batch", "es")
        validations = f"{counted(plan.validations, 'time')}, {each} each"
    lines = [
        ("mesh", _mesh(plan, config)),
        ("model", _model(plan, config)),
        ("train", _set(plan.train, config)),
        *([("validation", _set(plan.validation, config))] if plan.validation else []),
        ("batch", f"{batch} rows = {_readers(plan.dims)} x {micro}; {positions}"),
        ("steps", _steps(plan, config)),
        ("tokens", f"{most}{plan.positions:,} positions, about {plan.supervised:,} of them supervised"),
        ("validate", validations),
        ("save", _save(plan, config)),
        *([("snapshots", _snapshots(plan, config))] if config.sft.snapshot_every else []),
        ("compute", f"{plan.flops:.2e} floating-point operations in all, {plan.flops / plan.total_steps:.2e} a step"),
        ("memory", _memory(plan.memory) + (" (master weights in host memory)" if offloads else "")),
    ]
    return "\n".join(f"{name:<11}{text}" for name, text in lines)


def _snapshots(plan: RunPlan, config: SftRunConfig) -> str:
    every = config.sft.snapshot_every
    trained = plan.shape.num_parameters if plan.shape.num_trained is None else plan.shape.num_trained
    versions = versions_to_keep(config.steps_in_flight, every)
    nbytes = versions * STATE_BYTES * trained
    memory = f"{nbytes / GIB:.2f} GiB of shared memory on all hosts together ({versions} versions)"
    return f"every {counted(every, 'step')}, {memory}"


def _mesh(plan: RunPlan, config: SftRunConfig) -> str:
    dims = plan.dims
    world = dims.world
    kind = "HSDP" if dims.dp_replicate > 1 else "FSDP"
    if not shards_parameters(config.policy, dims.dp_shard * dims.cp, plan.shape.num_parameters):
        kind = "Megatron-core," if config.policy.megatron_cfg.enabled else "the whole model on each,"
    workers = counted(world, "worker")
    over = "gloo on CPUs" if plan.device == "cpu" else "nccl on GPUs"
    gpus = config.cluster.gpus_per_node * config.cluster.num_nodes
    unused = gpus - config.cluster.num_workers
    note = f"; {unused} of {gpus} GPUs are not used" if unused > 0 else ""
    named = zip(AXES, dims.sizes, strict=True)
    sizes = " x ".join(f"{axis}={size}" for axis, size in named if size > 1 or axis in DATA_AXES)
    return f"{sizes}: {workers}, {kind} over {over}{note}"


def _model(plan: RunPlan, config: SftRunConfig) -> str:
    source = "random weights" if config.policy.model_name is None else config.policy.model_name
    shape = plan.shape
    adapters = "" if shape.num_trained in (None, shape.num_parameters) else f" ({shape.num_trained:,} trained)"
    return (
        f"{shape.model_type}, {shape.num_parameters:,} parameters{adapters}, {shape.num_layers} layers, "
        f"vocabulary {shape.vocab_size:,}, from {source}, {config.policy.precision}"
    )


def _set(count: RowCount, config: SftRunConfig) -> str:
    length = config.policy.max_total_sequence_length
    return (
        f"{count.documents:,} documents, {count.tokens:,} tokens ({100 * count.supervised / count.tokens:.1f}% "
        f"supervised) in {count.rows:,} rows of {length} ({100 * count.efficiency:.1f}% full)"
    )


def _readers(dims: ParallelDims) -> str:
    if dims.copies == 1:
        return counted(dims.readers, "worker")
    return f"{counted(dims.readers, 'group')} of {dims.copies} workers"


def _steps(plan: RunPlan, config: SftRunConfig) -> str:
    unused = f" (rows left over in each: {plan.unused_rows})" if plan.unused_rows else ""
    epochs = f"{plan.total_steps / plan.steps_per_epoch:.4g} epochs of {plan.steps_per_epoch:,}{unused}"
    schedule = config.policy.scheduler
    never = ", which is longer than this run" if schedule.warmup_steps > plan.total_steps else ""
    return f"{plan.total_steps:,} = {epochs}; {schedule.warmup_steps} of warm-up{never}, then {schedule.name}"


def _save(plan: RunPlan, config: SftRunConfig) -> str:
    if not plan.saves:
        return "never"
    shape = plan.shape
    trained = shape.num_parameters if shape.num_trained is None else shape.num_trained
    state = 4 * (shape.num_parameters + (2 * trained if config.checkpointing.save_optimizer else 0))
    return f"{counted(plan.saves, 'time')} to {config.checkpointing.checkpoint_dir}, {_size(state)} each"


def _memory(memory: MemoryEstimate) -> str:
    words = {"unreduced": "gradients not reduced yet", "shared": "memory shared by CPU workers"}
    used = {name: part for name, part in memory.parts.items() if part}
    parts = ", ".join(f"{words.get(name, name)} {_size(part)}" for name, part in used.items())
    return f"at most about {_size(memory.total)} on each worker ({memory.moment}): {parts}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
