"""Schema of the section `policy`: model, tokenizer, optimization, adapters and distribution.

Also the types and the base class of all sections. A part of the tree in `schema`, whose rules hold here too.
T = `policy.max_total_sequence_length` = the fixed length of a row in tokens.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from raylane.training.config.keys import suggest


def _no_boolean(value: Any) -> Any:
    # pydantic would accept true as the integer 1.
    if isinstance(value, bool):
        raise ValueError(f"must be an integer, got {str(value).lower()}")
    return value


PositiveInt = Annotated[int, BeforeValidator(_no_boolean), Field(gt=0)]
NaturalInt = Annotated[int, BeforeValidator(_no_boolean), Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NaturalFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class Section(BaseModel):
    """Base class of every configuration section: frozen, and an undeclared key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _no_null_characters(self) -> Section:
        for name in type(self).model_fields:
            value = getattr(self, name)
            texts = value if isinstance(value, tuple) else (value,)
            if any(isinstance(text, str) and "\0" in text for text in texts):
                raise ValueError(f"{name} holds a null character, which is not allowed in a path or text; remove it")
        return self


def _null_as_empty(value: Any) -> Any:
    return {} if value is None else value


class TokenizerConfig(Section):
    """Source of the tokens and the chat template; by default the tokenizer in the folder policy.model_name."""

    name: str | None = None
    """Path or URL of a Hugging Face tokenizer folder; null means the tokenizer in policy.model_name, or the tokenizer
    that train_vocab_size trains."""
    train_vocab_size: Annotated[int, Field(ge=259)] | None = None
    """Number of tokens (special tokens included) of a byte-level BPE tokenizer to train on the training data; null
    trains none; 259 are the bytes and special tokens alone. Not in NeMo-RL."""
    chat_template: str | None = None
    """Chat template. null or "default": the tokenizer's own template; "chatml" or "llama3": a template included in
    raylane; text that contains {{ or {%: that text as the template; any other text: path of a Jinja file. For
    fine-tuning it marks the assistant's text with {% generation %} ... {% endgeneration %}, or has a generation
    prompt."""
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_null_as_empty)] = Field(default_factory=dict)
    """Values for variables of the chat template, e.g. enable_thinking; an open mapping. Pass the same values when you
    use the model."""


class SchedulerConfig(Section):
    """Learning rate over the run: a linear warm-up of w = warmup_steps steps, then the named shape."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up. NeMo-RL has a list of torch schedulers under policy.scheduler
    instead, which is accepted too if these keys can express it exactly."""
    warmup_steps: NaturalInt = 0
    """Number of warm-up steps (w), over which the learning rate rises linearly."""
    first_step: Literal["1/(w+1)", "1/w", "0"] | Annotated[float, Field(ge=0, le=1)] = "1/(w+1)"
    """Learning rate of the first warm-up step as a fraction of the peak: 1/(w+1) as in torchtitan, 1/w as in torch's
    LinearLR(start_factor=1/w), 0 as in transformers (with 0 the first step changes nothing), or a number as in torch's
    LinearLR(start_factor=number, total_iters=w)."""
    min_lr_at: Literal["last_step", "after_last_step"] = "last_step"
    """Step at which min_lr_ratio is reached. last_step: the last step of the run (which changes nothing if min_lr_ratio
    is 0); after_last_step: the step after it, as in torch and transformers."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the end as a fraction of the peak; ignored by constant."""


# Arguments of torch.optim.AdamW besides the four declared ones (torch 2.13, torch/optim/adamw.py). They are checked
# here because torch would refuse an unknown argument only later, inside a worker.
ADAMW_EXTRAS = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")


class AdamWKwargs(Section):
    """Arguments of torch.optim.AdamW; more of its arguments can be added (`+policy.optimizer.kwargs.fused=true`)."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=(), use_attribute_docstrings=True)

    lr: PositiveFloat = 5e-5
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of the running averages of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Term added to the denominator of the update for numerical stability."""
    weight_decay: NaturalFloat = 0.01
    """Decoupled weight decay coefficient."""

    @model_validator(mode="after")
    def _known_to_adamw(self) -> AdamWKwargs:
        for key in self.model_extra or {}:
            if key not in ADAMW_EXTRAS:
                known = (*type(self).model_fields, *ADAMW_EXTRAS)
                raise ValueError(f"{key!r} is not an argument of torch.optim.AdamW; {suggest(key, known)}")
        return self


class MuonConfig(Section):
    """Muon: orthogonal updates for the matrices of the decoder layers. Used if policy.optimizer.name is muon."""

    lr_scale: PositiveFloat = 1.0
    """Learning rate of Muon as a multiple of the scheduled one, which AdamW uses."""
    nesterov: bool = True
    """Add the current gradient to the average once more (Nesterov)."""
    ns_precision: Literal["float32", "bfloat16"] = "float32"
    """Data type of the iterations that make an update orthogonal. bfloat16 is faster on GPUs, as in
    torch.optim.Muon; its rounding makes losses depend on the number of workers."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Size of the updates of a matrix [a, b]. match_rms_adamw: 0.2 sqrt(max(a, b)), so that a learning rate and weight
    decay of AdamW fit; original: sqrt(max(1, a / b)), for learning rates of about 0.02."""


class OptimizerGroup(Section):
    """Parameters with a learning rate or weight decay of their own."""

    pattern: str = Field(min_length=1)
    """Regular expression that is searched for in the name of a parameter, e.g. embed_tokens."""
    lr_scale: NaturalFloat = 1.0
    """Factor of the learning rate."""
    weight_decay: NaturalFloat | None = None
    """Weight decay; null leaves it as it is."""

    @field_validator("pattern")
    @classmethod
    def _regular_expression(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from error
        return value


class OptimizerConfig(Section):
    """The optimizer and its arguments."""

    name: Literal["adamw", "muon"] = "adamw"
    """Name of the optimizer. adamw is AdamW with decoupled weight decay; NeMo-RL writes torch.optim.AdamW, which is
    accepted too. muon is Muon for the matrices of the decoder layers and AdamW for embeddings, output head, norms and
    biases."""
    weight_decay_on: Literal["matrices", "all"] = "matrices"
    """Parameters that weight decay applies to. matrices: all except norms and biases, which is common practice for
    language models; all: every parameter, as in plain torch.optim.AdamW and NeMo-RL."""
    kwargs: AdamWKwargs = Field(default_factory=AdamWKwargs)
    """Keyword arguments of AdamW."""
    muon: MuonConfig = Field(default_factory=MuonConfig)
    """Settings of Muon. Not in NeMo-RL."""
    groups: tuple[OptimizerGroup, ...] = ()
    """Parameters with a learning rate or weight decay of their own: a list of {pattern, lr_scale, weight_decay}.
    pattern is a regular expression that is searched for in the names of parameters; the first entry that matches a
    parameter counts; lr_scale (default 1) is a factor of the learning rate; weight_decay (default null) replaces the
    weight decay. A pattern that no parameter needs is an error. Not in NeMo-RL."""


def _names(value: Any) -> Any:
    return () if value is None else (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class LoraConfig(Section):
    """LoRA: the weights stay frozen, and a product of two small matrices is trained beside each chosen projection."""

    enabled: bool = False
    """Train adapters only. false trains all weights."""
    dim: PositiveInt = 8
    """Rank r of the adapters: the inner size of the two matrices."""
    alpha: PositiveFloat = 32
    """Scale of the adapters: their product is multiplied by alpha / dim."""
    dropout: Fraction = 0.0
    """Probability of dropout in the adapters while training."""
    dropout_position: Literal["pre", "post"] = "pre"
    """Place of the dropout. pre: on the input of the adapter, as in PEFT; post: on its output, which is NeMo-RL's
    default."""
    lora_A_init: Literal["kaiming", "xavier"] = "kaiming"
    """Initial values of the first matrix. kaiming: uniform, as in PEFT; xavier: normal, which is NeMo-RL's default. The
    second matrix starts at zero, so that the model starts unchanged."""
    match_all_linear: bool = True
    """Adapt every linear layer except the output head, less exclude_modules; only used if target_modules is empty."""
    target_modules: Names = ()
    """Names of the linear layers to adapt: the last part of a name (q_proj) or a whole name, with * for any text
    (*.mlp.*). Empty: match_all_linear decides."""
    exclude_modules: Names = ()
    """Names of linear layers to leave as they are, written as in target_modules."""
    adapter_path: str | None = None
    """Path of a folder in PEFT's format (adapter_config.json, adapter_model.safetensors) with the adapters to start
    from; null starts from new ones. Not in NeMo-RL."""

    @model_validator(mode="after")
    def _something_to_train(self) -> LoraConfig:
        if self.enabled and not self.match_all_linear and not self.target_modules:
            raise ValueError(
                "match_all_linear is false and target_modules is empty, so nothing would be trained; name linear "
                "layers in target_modules, e.g. [q_proj, v_proj], or set match_all_linear=true"
            )
        return self


INTERLEAVED = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Schedules with several pipeline stages on each worker."""

Checkpointing = Literal["full", "selective", "every_other_layer"]


def _full_if_true(value: Any) -> Any:
    return "full" if value is True else value


class DTensorConfig(Section):
    """Distribution of the model and of the rows over the workers.

    The workers that tensor, context and pipeline parallelism leave over read different rows. The weights are divided
    among them with FSDP2, or with HSDP if dp_replicate_size is above 1.
    """

    tensor_parallel_size: PositiveInt = 1
    """Number of workers that divide each weight matrix among them (attention heads, hidden units of the MLP, words of
    the vocabulary). For the types in docs/reference/model-types.md; experts are not divided."""
    sequence_parallel: bool = False
    """Divide also the activations between the matrices among the tensor-parallel workers: less memory and less
    computation in norms, with the same traffic."""
    context_parallel_size: PositiveInt = 1
    """Number of workers that divide each row among them; T must be a multiple of twice this number. Works with packed
    rows."""
    expert_parallel_size: PositiveInt = 1
    """Number of workers that divide the experts of each layer among them, 1 or all workers that share the weights.
    Tokens travel to their experts, and FSDP2 divides and gathers all other weights. For the types in
    docs/reference/model-types.md."""
    pipeline_parallel_size: PositiveInt = 1
    """Number of workers that divide the layers among them. Not in NeMo-RL's dtensor_cfg."""
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved_1f1b", "interleaved_zero_bubble"] = "1f1b"
    """Order in which a pipeline works. gpipe: all forward passes, then all backward passes; 1f1b: alternating, which
    needs less memory; interleaved_1f1b: several stages per worker, which idles less; interleaved_zero_bubble: gradients
    of the weights are computed later, which idles least. Not in NeMo-RL."""
    pipeline_stages_per_worker: PositiveInt | None = None
    """Number of pipeline stages of each worker; null means 2 with an interleaved schedule and 1 otherwise. Not in
    NeMo-RL."""
    dp_replicate_size: PositiveInt = 1
    """Number of copies of the sharded model; each copy is held by the same number of workers."""
    shard_parameters: Literal["auto", "always", "never"] = "auto"
    """Division of weights, gradients and optimizer state among the workers by FSDP2. always: divide; never: each worker
    holds all of them, and gradients are summed once per step; auto: divide if the state takes more than 1 GiB (67
    million parameters) and there are workers to divide it among, or if precision=bfloat16, cpu_offload or
    reduce_every_micro_batch need FSDP2. Not in NeMo-RL."""
    reduce_every_micro_batch: bool = False
    """Time of the gradient reduction. false: once per step, which is fastest; each worker then keeps complete float32
    gradients (4 bytes per parameter) between micro-batches. true: after each micro-batch; each worker keeps only its
    shard, with more communication and less memory."""
    activation_checkpointing: Annotated[Literal[False] | Checkpointing, BeforeValidator(_full_if_true)] = False
    """Recompute activations in the backward pass, which takes less memory. full (or true): all of them, for about one
    third more computation; selective: all except the results of matrix products and attention, for little more
    computation; every_other_layer: all of every other layer."""
    compile_layers: bool = False
    """Compile the forward and the backward pass of the decoder layers with torch.compile, which is faster after the
    first steps; needs a C++ compiler (and triton on GPUs). Not in NeMo-RL."""
    cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory instead of GPU memory; needs GPUs."""
    lora_cfg: Annotated[LoraConfig, BeforeValidator(_null_as_empty)] = Field(default_factory=LoraConfig)
    """Training of adapters only."""

    @property
    def stages_per_worker(self) -> int:
        """Number of pipeline stages that each worker holds."""
        return self.pipeline_stages_per_worker or (2 if self.pipeline_schedule in INTERLEAVED else 1)

    @property
    def row_divisor(self) -> int:
        """Number that must divide the length of rows.

        A context-parallel worker has two chunks of a row (`mesh.local_chunks`), and sequence parallelism divides what
        a worker has among the tensor-parallel ones.
        """
        cp, tp = self.context_parallel_size, self.tensor_parallel_size
        return (2 * cp if cp > 1 else 1) * (tp if self.sequence_parallel else 1)


class MegatronConfig(Section):
    """Computation with the layers of Megatron-core instead of transformers'. Its sizes are those of dtensor_cfg."""

    enabled: bool = False
    """Compute with Megatron-core (pip install 'raylane[megatron]'), for llama, qwen2 and qwen3; data and tensor
    parallelism only. NeMo-RL's other keys of this section are accepted in files and on the command line, and become the
    keys of raylane that mean the same, e.g. tensor_model_parallel_size becomes policy.dtensor_cfg.tensor_parallel_size.
    """


class DynamicBatchingConfig(Section):
    """Micro-batches with a limit of tokens instead of a number of rows; for rows of one conversation each."""

    enabled: bool = False
    """Put rows of about the same length into a micro-batch, as many as train_mb_tokens allows, and cut off the padding
    that all of them have. Needs policy.sequence_packing.enabled=false."""
    train_mb_tokens: PositiveInt | None = None
    """Maximum number of tokens in a micro-batch, padding included; null means policy.max_total_sequence_length x
    policy.train_micro_batch_size."""
    sequence_length_round: PositiveInt = 64
    """Divisor of the lengths that rows are cut to; few different lengths run faster."""


class PackingConfig(Section):
    """Packing of several documents into one row of T tokens; attention never crosses from one document to another."""

    enabled: bool = True
    """Pack several documents into one row. false puts one document into each row, padded to the longest row of its
    micro-batch."""
    algorithm: Literal["first_fit_decreasing", "best_fit_decreasing", "concatenate"] = "first_fit_decreasing"
    """Packing algorithm. first_fit_decreasing and best_fit_decreasing place the longest documents first; concatenate
    keeps the order of the data. No algorithm splits a document."""


def _off_as_text(value: Any) -> Any:
    return "off" if value is False else value  # YAML reads a bare `off` as false


class CompiledGraphConfig(Section):
    """Calls of the workers through compiled graphs instead of plain Ray calls."""

    mode: Annotated[Literal["off", "preferred", "required"], BeforeValidator(_off_as_text)] = "preferred"
    """off: plain Ray calls; preferred: compiled graphs, or plain Ray calls with one warning if graphs cannot be used;
    required: compiled graphs, or the run does not start. NeMo-RL's pull request 1612:
    policy.ray_compiled_graph.enabled, which is accepted too."""
    warmup_gbs: NaturalInt | None = None
    """Number of rows in the warm-up step, which runs before the first step and leaves no trace in the model, the
    optimizer or the random state; null means policy.train_global_batch_size, 0 means no warm-up."""
    warmup_seq_len: PositiveInt | None = None
    """Number of tokens in each row of the warm-up step; null means policy.max_total_sequence_length."""
    inflight: PositiveInt | None = None
    """Maximum number of calls under way in one graph; null means sft.steps_in_flight."""
    overlap_communication: bool = True
    """Send the next step and read the metrics of the last one while the current step computes. false sends each step
    after the metrics of the step before were read, as sft.steps_in_flight=1 does."""


class PublishWeightsConfig(Section):
    """Publication of the weights during the run, for readers with `raylane.weights.Subscriber`."""

    name: str | None = Field(default=None, min_length=1)
    """Name under which readers find the weights; null publishes nothing. Tensors have the names of the Hugging Face
    folder, and LoRA adapters are added into the weights. Not in NeMo-RL."""
    every: PositiveInt = 1
    """Number of steps between two versions. The weights after the last step of the run are always published."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the published weights; null means that of policy.precision. float32 keeps all bits of the master
    weights."""
    keep: Annotated[int, BeforeValidator(_no_boolean), Field(ge=2)] = 2
    """Number of versions in the memory of the node, the one being written included; 3 if readers map the weights."""
    detached: bool = False
    """Keep the versions when the Ray job ends, until `raylane.weights.drop`. Readers pass detached=True too. Needed for
    readers that are not started by the program of the run, as with the command `raylane sft`."""
    timeout_s: PositiveFloat = 60.0
    """Maximum time in seconds that a step waits for a reader that holds the oldest version; then the run ends."""

    @model_validator(mode="after")
    def _settings_of_a_name(self) -> PublishWeightsConfig:
        fields = type(self).model_fields
        changed = [key for key in fields if getattr(self, key) != fields[key].default]
        if self.name is None and changed:
            raise ValueError(
                f"{changed[0]}={getattr(self, changed[0])!r} is set, but name is null, so nothing would be published; "
                "set name, or set publish_weights to null"
            )
        return self


class PolicyConfig(Section):
    """The model, its tokenizer, and the optimization settings."""

    model_name: str | None = None
    """Path or URL of a Hugging Face model folder to start from; null starts from random weights, and then
    hf_config_overrides.model_type is required."""
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig)
    """Tokenizer and chat template."""
    train_global_batch_size: PositiveInt = 8
    """Number of rows in one optimizer step, summed over all workers."""
    train_micro_batch_size: PositiveInt = 1
    """Number of training rows that one worker runs through the model at once."""
    max_total_sequence_length: Annotated[int, Field(ge=2)] = 1024
    """T, the number of tokens in one row."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the forward and the backward pass. Master weights and gradient reductions are always float32."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Maximum global gradient norm; a larger gradient is scaled down to this norm. null never clips."""
    make_sequence_length_divisible_by: PositiveInt = 1
    """Required divisor of max_total_sequence_length, and of the length of unpacked rows, which end with the longest row
    of their micro-batch; 1 accepts every length."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """Optimizer and its arguments."""
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig)
    """Learning rate over the run."""
    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of the model's Hugging Face configuration; an open mapping. With random weights, vocab_size is taken from
    the tokenizer."""
    dtensor_cfg: DTensorConfig = Field(default_factory=DTensorConfig)
    """Distribution of the model over the workers."""
    megatron_cfg: Annotated[MegatronConfig, BeforeValidator(_null_as_empty)] = Field(default_factory=MegatronConfig)
    """Computation with Megatron-core."""
    sequence_packing: PackingConfig = Field(default_factory=PackingConfig)
    """Packing of documents into rows."""
    dynamic_batching: Annotated[DynamicBatchingConfig, BeforeValidator(_null_as_empty)] = Field(
        default_factory=DynamicBatchingConfig
    )
    """Micro-batches by number of tokens."""
    compiled_graph: CompiledGraphConfig = Field(default_factory=CompiledGraphConfig)
    """Calls of the workers through compiled graphs."""
    publish_weights: Annotated[PublishWeightsConfig, BeforeValidator(_null_as_empty)] = Field(
        default_factory=PublishWeightsConfig
    )
    """Publication of the weights for readers."""
    loss_chunk_tokens: PositiveInt | None = 4096
    """Number of tokens for which logits and loss are computed at once, which bounds their memory; null computes a whole
    micro-batch at once. Not in NeMo-RL."""

    @property
    def micro_batch_tokens(self) -> int:
        """Largest number of tokens in a micro-batch."""
        budget = self.dynamic_batching.train_mb_tokens if self.dynamic_batching.enabled else None
        return budget or self.max_total_sequence_length * self.train_micro_batch_size

    @property
    def micro_batch_divisor(self) -> int:
        """Number that the rows of a worker in each step must divide by."""
        return 1 if self.dynamic_batching.enabled else self.train_micro_batch_size

    @model_validator(mode="after")
    def _tokenizer_from_one_place(self) -> PolicyConfig:
        name, size = self.tokenizer.name, self.tokenizer.train_vocab_size
        if name is not None and size is not None:
            raise ValueError(f"tokenizer.name={name!r} and tokenizer.train_vocab_size={size} are both set; remove one")
        if self.model_name is None and name is None and size is None:
            raise ValueError(
                "model_name is null, so the tokenizer must come from tokenizer.name (a folder) "
                "or tokenizer.train_vocab_size (train one on the data)"
            )
        if self.model_name is not None and size is not None:
            raise ValueError(
                f"tokenizer.train_vocab_size={size} would train a tokenizer that does not match the weights of "
                f"model_name={self.model_name!r}; remove it, or set model_name=null to start from random weights"
            )
        if self.model_name is None and not isinstance(self.hf_config_overrides.get("model_type"), str):
            raise ValueError(
                "model_name is null, so hf_config_overrides.model_type must name the architecture to build (llama, "
                "qwen2, qwen3 or another one of transformers)"
            )
        return self
