"""Estimate of the memory of each worker of a run, by formula. Called by `planning`.

A step has moments at which it may need the most memory. The estimate adds up what exists at each of them, and returns
the largest sum (docs/reference/memory.md has the formulas and how they were checked):

    loss          all activations, the logits of one chunk, copies of the head's gradient
    first layer   the backward pass enters the last layer: all activations, and temporary tensors of that layer
    second layer  the same one layer later: the gradients of the layer before are being reduced
    last layer    activations of one layer, and all gradients
    reduction     all gradients, and the buffer that sums those of embedding and head over the workers
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from raylane.training.config.layout import micro_batches
from raylane.training.config.schema import TrainingConfig
from raylane.training.model.attention import varlen_kernel
from raylane.training.model.hf_config import ModelShape
from raylane.training.parallel.mesh import ParallelDims, keeps_gathered, shards_parameters, shares_gradients

_MASTER = 4
"""Bytes of a weight, a gradient, or an average of AdamW: all are float32."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated bytes on the worker that needs the most, at the moment at which it needs the most."""

    parameters: int
    """float32 weights that the worker holds."""
    gradients: int
    """Reduced gradients."""
    unreduced: int
    """Gradients that are not summed over the workers yet, and the buffer for their sum."""
    optimizer: int
    """The two averages of AdamW."""
    gathered: int
    """Weights of whole layers in the computing precision, gathered by FSDP2."""
    activations: int
    """Tensors that the backward pass needs, and its temporary ones."""
    logits: int
    """Logits of one loss chunk with their gradient, and copies of the head's gradient."""
    shared: int = 0
    """Memory that CPU workers of one host share to sum gradients (`gradients.GradientSum`)."""
    moment: str = ""
    """Moment of the step, as in the docstring of the module."""

    @property
    def total(self) -> int:
        """Sum of all parts, without the overhead of allocators and libraries."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by the name of the part."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "moment"}


def estimate_memory(config: TrainingConfig, shape: ModelShape) -> MemoryEstimate:
    """Return the estimated memory of the worker that needs the most."""
    moments = [moment for stage in _stages(config, shape) for moment in _Worker(config, shape, stage).moments()]
    return max(moments, key=lambda moment: moment.total)


@dataclass(frozen=True)
class _StageContents:
    """Contents of a pipeline stage; without a pipeline, of the whole model."""

    layers: int
    root: int  # parameters of embedding, last norm and head
    has_head: bool
    waiting: int  # micro-batches that may wait for their backward pass


def _rounds(config: TrainingConfig) -> int:
    policy = config.policy
    readers = ParallelDims.of(config.policy.dtensor_cfg, config.cluster.num_workers).readers
    return micro_batches(policy.train_global_batch_size, policy.micro_batch_divisor, readers)


def _stages(config: TrainingConfig, shape: ModelShape) -> list[_StageContents]:
    """Return the stages with the most to hold: the first one, and the last one, which has the head."""
    settings = config.policy.dtensor_cfg
    pp = settings.pipeline_parallel_size
    if pp == 1:
        return [_StageContents(shape.num_layers, shape.num_root, True, 1)]
    rounds, words = _rounds(config), shape.vocab_size * shape.hidden_size
    keeps_all = settings.pipeline_schedule == "gpipe"
    # The first stages get one more layer if the numbers do not divide. A tied head is a copy of the embedding.
    most, least = -(-shape.num_layers // pp), shape.num_layers // pp
    last_root = shape.num_root if shape.num_root < 2 * words else shape.num_root - words
    return [
        _StageContents(most, words, False, rounds if keeps_all else min(rounds, pp)),
        _StageContents(least, last_root, True, rounds if keeps_all else 1),
    ]


class _Worker:
    """Sizes of one worker, in elements unless the name says bytes; `moments` adds them up."""

    def __init__(self, config: TrainingConfig, shape: ModelShape, stage: _StageContents) -> None:
        policy, settings = config.policy, config.policy.dtensor_cfg
        dims = ParallelDims.of(config.policy.dtensor_cfg, config.cluster.num_workers)
        self.stage = stage
        self.size = 2 if policy.precision == "bfloat16" else 4  # bytes of the computing precision
        self.rounds = _rounds(config)
        self.shard = dims.dp_shard * dims.cp
        self.shards = shards_parameters(policy, self.shard, shape.num_parameters)
        self.replicas = config.cluster.num_workers if not self.shards else 1
        self.offloaded = settings.cpu_offload
        # Tensor parallelism divides every matrix before FSDP2 does.
        self.layer, self.root = -(-shape.num_layer // dims.tp), -(-stage.root // dims.tp)
        whole = (shape.num_parameters - shape.num_root) * stage.layers // shape.num_layers + stage.root
        self.held = -(-whole // dims.tp)
        # With LoRA only adapters are trained, which are in the layers.
        all_trained = shape.num_trained in (None, shape.num_parameters)
        adapters = -(-(shape.num_trained or 0) * stage.layers // (shape.num_layers * dims.tp))
        self.trained = self.held if all_trained else adapters
        self.trained_root = self.root if all_trained else 0
        self.trained_layer = self.layer if all_trained else -(-adapters // stage.layers)
        self.flat_bytes = _MASTER * self.trained_layer if self.shards else 0
        """Gradients of a layer, joined for one reduction."""
        self.head = -(-shape.vocab_size // dims.tp) * shape.hidden_size if all_trained and stage.has_head else 0
        self.accumulates = self.rounds > 1 and not settings.reduce_every_micro_batch
        self.piped = dims.pp > 1
        # Torch's pipeline schedules gather and reduce once in a step.
        keeps = self.piped or keeps_gathered(policy, whole)
        # FSDP2 gathers the next unit, or releases the one before, while a unit computes.
        ahead = self.layer if self.shard > 1 else 0
        self.after_forward = self.held if keeps else self.root + ahead
        self.in_backward = self.held if keeps else min(self.held, self.root + self.layer + ahead)
        self.copied = policy.megatron_cfg.enabled
        """True if Megatron keeps a copy of the weights all the time."""
        # Memory shared with other CPU workers: own slot, a part of the other slots, and the result.
        alone = self.shards or config.cluster.gpus_per_node or not shares_gradients(self.trained, self.replicas)
        shared = 0 if alone else 2 * self.trained + self.trained * (self.replicas - 1) // self.replicas
        self.shared_bytes = _MASTER * shared
        self.tokens = policy.micro_batch_tokens // dims.cp
        self._measure_activations(config, shape, all_trained)

    def _measure_activations(self, config: TrainingConfig, shape: ModelShape, all_trained: bool) -> None:
        """Set the bytes of activations.

        One token keeps `inner` of a layer, `until_backward` of the whole stage, and others. The loss needs
        `logits_bytes` at once, for the logits or for the head's gradient.
        """
        settings = config.policy.dtensor_cfg
        tp, cp = settings.tensor_parallel_size, settings.context_parallel_size
        size, hidden = self.size, shape.hidden_size
        # Only sequence parallelism divides the stream between the blocks; the matrices take whole rows.
        stream = hidden // tp if settings.sequence_parallel else hidden
        # A norm computes in float32: it keeps its input, the normalised values for the gradient of its weight, and its
        # output, which is the input of the matrices behind it.
        norm = 4 * stream + size * (stream if all_trained else 0) + size * hidden
        queries = shape.num_attention_heads * shape.head_dim // tp
        # With context parallelism every worker has the keys of whole rows.
        keys = shape.num_key_value_heads * shape.head_dim * cp // tp
        # torch's varlen kernel writes its result where the projection reads it; the other kernels need one more copy.
        on_gpu = config.cluster.gpus_per_node > 0
        varlen = on_gpu and size == 2 and varlen_kernel() is not None
        # The other kernels of CUDA take as many key heads as query heads.
        attended_keys = queries * cp if on_gpu and not varlen else keys
        attention = size * ((2 if varlen else 3) * queries + 2 * attended_keys) + 4 * shape.num_attention_heads // tp
        if shape.has_head_norms:
            attention += (4 + size) * (queries + keys // cp)
        mlp = shape.intermediate_size // tp
        # Of the MLP: gate, its activation, up, and their product.
        inner = 2 * norm + attention + 4 * size * mlp
        layers = self.stage.layers
        choice = settings.activation_checkpointing
        of_layer, self.again = inner, 0
        if choice == "full":
            of_layer, self.again = size * stream, inner - size * stream
        elif choice == "selective":  # the results of the seven projections and of attention
            of_layer = size * (stream + 2 * hidden + 2 * queries + 2 * keys + 2 * mlp)
            self.again = max(0, inner - of_layer)
        of_stage = of_layer * layers
        if choice == "every_other_layer":
            of_stage = size * stream * -(-layers // 2) + inner * (layers // 2)
            self.again = inner if layers % 2 else 0
        self.inner, self.until_backward = inner, of_stage
        # One layer later a layer is freed; with every_other_layer the next one is computed again in its place.
        self.freed = 0 if choice == "every_other_layer" else of_layer
        # In the MLP: gradients of the product, of gate and up, and of the stream.
        self.temporary = size * (3 * mlp + hidden)
        self.last_norm = norm + size * hidden if self.stage.has_head else 0
        chunk = min(config.policy.loss_chunk_tokens or self.tokens, self.tokens)
        several = chunk < self.tokens
        words = -(-shape.vocab_size // tp)
        # Softmax, its gradient and the gradient of the logits; the loss over a divided vocabulary has one more.
        logits = (4 if tp > 1 else 3) * 4 * chunk * words
        # autograd adds the gradients of the chunks out of place: old sum, new part, new sum.
        parts = (3 if several else 1) * size * self.head + size * chunk * words
        self.logits_bytes = max(logits + (size * self.head if several else 0), parts)

    def _memory(
        self, moment: str, reduced: int, unreduced_bytes: int, gathered: int, token_bytes: int, logits_bytes: int = 0
    ) -> MemoryEstimate:
        """Return the sum at one moment.

        `reduced` counts trained parameters whose gradients were reduced, `gathered` parameters that FSDP2 has gathered.
        """
        held = self.held if not self.shards else -(-self.held // self.shard)
        trained = self.trained if not self.shards else -(-self.trained // self.shard)
        reduced = reduced if not self.shards else -(-reduced // self.shard)
        on_device = 0 if self.offloaded else 1
        return MemoryEstimate(
            parameters=on_device * _MASTER * held,
            gradients=on_device * _MASTER * reduced,
            unreduced=unreduced_bytes,
            optimizer=on_device * 2 * _MASTER * trained,
            gathered=self.size * (self.held if self.copied else gathered if self.shards else 0),
            activations=self.tokens * token_bytes,
            logits=logits_bytes,
            shared=self.shared_bytes,
            moment=moment,
        )

    def moments(self) -> Iterator[MemoryEstimate]:
        """Yield the memory at each moment that may be the peak."""
        yield from self._with_waiting(self.stage.waiting)
        if self.stage.waiting > 1:
            # The second backward pass: one micro-batch less, but the gradients of the first one.
            yield from self._with_waiting(self.stage.waiting - 1)
        # The gradients of layers are reduced one after the other, unless they are summed over micro-batches first.
        by_layer = self.trained - self.trained_root if self._earlier_bytes(0) == 0 else 0
        unreduced = self._earlier_bytes(0) + self.size * self.head + self.flat_bytes
        yield self._memory("last layer", by_layer, unreduced, self.in_backward, self.inner + self.temporary)
        # The last gradients are summed over the workers.
        if not self.shards:
            copied = _MASTER * self.trained if self.replicas > 1 else 0
            yield self._memory("reduction", self.trained, copied, 0, 0)
        elif self.piped:
            # All units are reduced after the last micro-batch, each from a copy.
            largest = max(self.trained_layer, self.trained_root)
            whole = _MASTER * (self.trained + largest)
            yield self._memory("reduction", 0, whole, self.held, 0)
        else:
            # Embedding and head come last, and FSDP2 sums them from a copy.
            root = (self.size + _MASTER) * self.trained_root
            yield self._memory("reduction", self.trained, root, 0, 0)

    def _earlier_bytes(self, waiting: int) -> int:
        """Return the bytes of whole gradients of earlier micro-batches while so many wait for their backward pass."""
        return _MASTER * self.trained if self.shards and self.accumulates and self.rounds > waiting else 0

    def _with_waiting(self, waiting: int) -> Iterator[MemoryEstimate]:
        """Yield the moments around the beginning of a backward pass."""
        earlier = self._earlier_bytes(waiting)
        # Without FSDP2, and if every micro-batch is reduced, gradients of earlier micro-batches are in `.grad`.
        reduced = self.trained if self.rounds > 1 and earlier == 0 and self.stage.waiting == 1 else 0
        waiting_bytes, head = self.until_backward * waiting, self.size * self.head
        if self.stage.has_head:
            at_loss = waiting_bytes + self.last_norm
            yield self._memory("loss", reduced, earlier, self.after_forward, at_loss, self.logits_bytes)
        at_layer = waiting_bytes + self.again + self.temporary
        yield self._memory("first layer", reduced, earlier + head, self.in_backward, at_layer)
        reduced = max(reduced, 0 if earlier else self.trained_layer)
        unreduced = earlier + head + self.flat_bytes
        yield self._memory("second layer", reduced, unreduced, self.in_backward, at_layer - self.freed)
