"""Estimate of the memory of each worker of a run, by formula. Called by `planning`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from raylane.sft.layout import micro_batches
from raylane.sft.parallel import ParallelDims, keeps_gathered, shards_parameters

if TYPE_CHECKING:
    from raylane.sft.config import RunConfig
    from raylane.sft.model_config import ModelShape

__all__ = ["Memory", "estimate_memory"]


@dataclass(frozen=True)
class Memory:
    """Estimated bytes on each worker during training; `estimate_memory` describes each part."""

    parameters: int
    gradients: int
    unreduced: int
    optimizer: int
    gathered: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of all parts, without the overhead of allocators and libraries."""
        return sum(getattr(self, field.name) for field in fields(self))


def estimate_memory(config: RunConfig, shape: ModelShape) -> Memory:
    """Return the estimated bytes on each worker.

    - parameters, gradients, optimizer: float32 master weights, gradients and the two averages of AdamW, sharded.
    - unreduced: float32 gradients before reduction; of the whole model between micro-batches, or of one unit if each
      micro-batch is reduced.
    - gathered: two gathered units in the computing precision, the current one and the prefetched one; or all of a small
      model (`parallel.keeps_gathered`).
    - With Megatron-core, `gathered` is its copy of the weights.
    - Without FSDP2 (`parallel.shards_parameters`), everything is whole, nothing is gathered, and `unreduced` is the
      copy of all gradients that is summed over the workers.
    - activations: tensors of one micro-batch that the backward pass needs.
    - logits: logits of one loss chunk and their gradient, in float32.

    Tensor parallelism divides weights, heads, inner MLP units and vocabulary, with sequence parallelism all
    activations. Context parallelism divides tokens. A pipeline divides layers (stages count as equally large), and its
    first stage keeps the activations of as many micro-batches as there are stages, with gpipe of all.
    """
    policy = config.policy
    dims = ParallelDims.of(config)
    rounds = micro_batches(policy.train_global_batch_size, policy.micro_batch_divisor, dims.readers)
    keeps_whole = rounds > 1 and not policy.dtensor_cfg.reduce_every_micro_batch
    shard = dims.dp_shard * dims.cp
    shards = shards_parameters(policy, shard, shape.num_parameters)
    # Tensor and pipeline parallelism divide before FSDP2 does.
    held = -(-shape.num_parameters // (dims.tp * dims.pp))
    unit = -(-shape.largest_unit // dims.tp)
    own = -(-held // shard) if shards else held
    # Only trained parameters have gradients and optimizer state. LoRA leaves few of them.
    trained = held if shape.num_trained is None else -(-shape.num_trained // (dims.tp * dims.pp))
    own_trained = -(-trained // shard) if shards else trained
    unreduced = trained if keeps_whole else min(trained, unit)
    gathered = held if keeps_gathered(policy, shape.num_parameters) else 2 * unit
    if policy.megatron_cfg.enabled:
        gathered = held  # Megatron's copy of the weights
    if not shards:
        unreduced = trained if config.cluster.num_workers > 1 else 0
    size = 2 if policy.precision == "bfloat16" else 4
    tokens = policy.micro_batch_tokens // dims.cp
    # Kept per token and layer: inputs of both norms and both blocks, q, k, v, the attention output, and gate, up and
    # their product. With checkpointing only the input of each layer is kept, and all tensors of one layer at a time.
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    # Only sequence parallelism divides the stream between the blocks.
    between = shape.hidden_size // (dims.tp if policy.dtensor_cfg.sequence_parallel else 1)
    inner = (heads + shape.num_attention_heads) * shape.head_dim // dims.tp
    mlp = shape.intermediate_size // dims.tp
    layers = -(-shape.num_layers // dims.pp)
    whole = 6 * between + inner + 4 * mlp
    checkpointing = policy.dtensor_cfg.activation_checkpointing
    kept = whole * layers
    if checkpointing == "full":
        kept = between * layers + whole
    elif checkpointing == "every_other_layer":
        kept = (between + whole) * -(-layers // 2)
    elif checkpointing == "selective":  # the results of the seven projections and of attention
        kept = (3 * between + inner + 2 * mlp) * layers + whole
    if dims.pp > 1:
        # A micro-batch waits for its backward pass until it has been through all later stages.
        kept *= rounds if policy.dtensor_cfg.pipeline_schedule == "gpipe" else min(rounds, dims.pp)
    chunk = min(policy.loss_chunk_tokens or tokens, tokens)
    offloaded = policy.dtensor_cfg.cpu_offload
    return Memory(
        parameters=0 if offloaded else 4 * own,
        gradients=0 if offloaded else 4 * own_trained,
        unreduced=4 * unreduced,
        optimizer=0 if offloaded else 8 * own_trained,
        gathered=size * gathered if shards or policy.megatron_cfg.enabled else 0,
        activations=size * tokens * kept,
        logits=2 * 4 * chunk * -(-shape.vocab_size // dims.tp),
    )
