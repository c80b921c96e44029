"""Schema of the configuration of a fine-tuning run: one frozen, typed tree, and the only place with default values.

Key names follow NeMo-RL wherever the meaning is the same, so that its command lines and files mostly work unchanged;
descriptions name the NeMo-RL key where the names differ. `config.load_config` builds the tree from a YAML file and
command-line overrides; `layout.py` checks values against each other. All of `raylane.sft` reads the tree and nothing
writes to it. This module does not depend on Ray, torch or data files. `docs/reference/sft-config.md` is generated from
the descriptions below.

B = rows in a batch, T = `policy.max_total_sequence_length` = the fixed length of a row in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from raylane.sft import overrides
from raylane.workers.options import RANK_VARIABLES

__all__ = [
    "CheckpointingConfig",
    "ClusterConfig",
    "CompiledGraphConfig",
    "DataConfig",
    "LoggerConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RunConfig",
    "SchedulerConfig",
    "SftConfig",
    "TokenizerConfig",
]


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

# Arguments of torch.optim.AdamW besides the four declared ones (torch 2.13, torch/optim/adamw.py). They are checked
# here because torch would refuse an unknown argument only later, inside a worker.
ADAMW_EXTRAS = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, (str, Path)) else value


def _null_as_empty(value: Any) -> Any:
    return {} if value is None else value


def _number_as_text(value: Any) -> Any:
    """Return a number as text: YAML reads `NCCL_P2P_DISABLE: 1` as a number, and environment variables are text."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


class Section(BaseModel):
    """Base class of every configuration section: frozen, and an undeclared key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="after")
    def _no_null_characters(self) -> Section:
        for name in type(self).model_fields:
            value = getattr(self, name)
            texts = value if isinstance(value, tuple) else (value,)
            if any(isinstance(text, str) and "\0" in text for text in texts):
                raise ValueError(f"{name} holds a null character, which is not allowed in a path or text; remove it")
        return self


class SftConfig(Section):
    """Length of the training loop, validation, and the way steps are sent to the workers."""

    max_num_steps: PositiveInt | None = Field(
        default=None,
        description="Maximum number of optimizer steps; null means no limit. The run ends at the first of the two "
        "limits, this one and max_num_epochs.",
    )
    max_num_epochs: PositiveInt | None = Field(
        default=1,
        description="Maximum number of passes over the training data; null means no limit. The run ends at the "
        "first of the two limits, this one and max_num_steps.",
    )
    val_period: NaturalInt = Field(
        default=0,
        description="Number of steps between two validations; 0 (the default, because a validation set is "
        "optional) means no validation during training.",
    )
    val_batches: NaturalInt = Field(
        default=0,
        description="Maximum number of batches in one validation; 0 means the whole validation set.",
    )
    val_global_batch_size: PositiveInt = Field(
        default=8, description="Number of rows in one validation batch, summed over all workers."
    )
    val_micro_batch_size: PositiveInt = Field(
        default=8,
        description="Number of validation rows that one worker runs through the model at once.",
    )
    val_at_start: bool = Field(default=False, description="Validate before the first step.")
    val_at_end: bool = Field(default=False, description="Validate after the last step.")
    seed: Annotated[NaturalInt, Field(lt=2**63)] = Field(
        default=42, description="Seed of the random initial weights, of dropout, and of the order of the data."
    )
    feed: Literal["workers", "driver"] = Field(
        default="workers",
        description="Process that reads the training data. workers: the driver sends a step number, and each "
        "worker reads its own rows; driver: the driver reads all rows and sends them. Not in NeMo-RL, "
        "which behaves as driver.",
    )
    steps_in_flight: PositiveInt = Field(
        default=2,
        description="Number of steps that the driver sends before it waits for the metrics of the oldest one. 2 "
        "keeps the workers busy while the driver reads metrics; 1 waits for each step. Not in "
        "NeMo-RL.",
    )
    log_interval: PositiveInt = Field(default=10, description="Number of steps between two progress lines.")
    step_timeout_s: PositiveFloat | None = Field(
        default=None,
        description="Maximum time in seconds that the driver waits for one step, validation or checkpoint; null means "
        "no limit, so a worker may be held in a debugger. After the limit the run ends. Not in NeMo-RL.",
    )
    max_restarts: NaturalInt = Field(
        default=2,
        description="Number of times that a run starts its workers again after it lost one, from the last complete "
        "checkpoint, until a new checkpoint is complete (then counting begins again). 0 ends the run instead. Not in "
        "NeMo-RL.",
    )


class TokenizerConfig(Section):
    """Source of the tokens and the chat template; by default the tokenizer in the folder policy.model_name."""

    name: str | None = Field(
        default=None,
        description="Path of a Hugging Face tokenizer folder; null means the tokenizer in policy.model_name, or "
        "the tokenizer that train_vocab_size trains.",
    )
    train_vocab_size: Annotated[int, Field(ge=300)] | None = Field(
        default=None,
        description="Number of tokens (special tokens included) of a byte-level BPE tokenizer to train on the "
        "training data; null trains none. Not in NeMo-RL.",
    )
    chat_template: str | None = Field(
        default=None,
        description='Chat template. null or "default": the tokenizer\'s own template; "chatml" or "llama3": a '
        "template included in raylane; text that contains {{ or {%: that text as the template; any "
        "other text: path of a Jinja file. The template must mark the assistant's text with {% "
        "generation %} ... {% endgeneration %}.",
    )
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_null_as_empty)] = Field(
        default_factory=dict,
        description="Values for variables of the chat template, e.g. enable_thinking; an open mapping. Pass the same "
        "values when you use the model.",
    )


class AdamWKwargs(Section):
    """Arguments of torch.optim.AdamW; more of its arguments can be added (`+policy.optimizer.kwargs.fused=true`)."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    lr: PositiveFloat = Field(default=5e-5, description="Peak learning rate.")
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.999), description="Decay rates of the running averages of the gradient and of its square."
    )
    eps: PositiveFloat = Field(
        default=1e-8, description="Term added to the denominator of the update for numerical stability."
    )
    weight_decay: NaturalFloat = Field(default=0.01, description="Decoupled weight decay coefficient.")

    @model_validator(mode="after")
    def _known_to_adamw(self) -> AdamWKwargs:
        for key in self.model_extra or {}:
            if key not in ADAMW_EXTRAS:
                known = (*type(self).model_fields, *ADAMW_EXTRAS)
                raise ValueError(f"{key!r} is not an argument of torch.optim.AdamW; {overrides.suggest(key, known)}")
        return self


class OptimizerConfig(Section):
    """The optimizer and its arguments."""

    name: Literal["adamw"] = Field(
        default="adamw",
        description="Name of the optimizer. adamw is AdamW with decoupled weight decay; NeMo-RL writes "
        "torch.optim.AdamW, which is accepted too.",
    )
    weight_decay_on: Literal["matrices", "all"] = Field(
        default="matrices",
        description="Parameters that weight decay applies to. matrices: all except norms and biases, which is "
        "common practice for language models; all: every parameter, as in plain torch.optim.AdamW and "
        "NeMo-RL.",
    )
    kwargs: AdamWKwargs = Field(default_factory=AdamWKwargs, description="Keyword arguments of the optimizer.")


class SchedulerConfig(Section):
    """Learning rate over the run: a linear warm-up of w = warmup_steps steps, then the named shape."""

    name: Literal["cosine", "linear", "constant"] = Field(
        default="cosine",
        description="Shape of the learning rate after the warm-up. NeMo-RL has a list of torch schedulers under "
        "policy.scheduler instead, which is accepted too if these keys can express it exactly.",
    )
    warmup_steps: NaturalInt = Field(
        default=0, description="Number of warm-up steps (w), over which the learning rate rises linearly."
    )
    first_step: Literal["1/(w+1)", "1/w", "0"] | Annotated[float, Field(ge=0, le=1)] = Field(
        default="1/(w+1)",
        description="Learning rate of the first warm-up step as a fraction of the peak: 1/(w+1) as in torchtitan, "
        "1/w as in torch's LinearLR(start_factor=1/w), 0 as in transformers (with 0 the first step "
        "changes nothing), or a number as in torch's LinearLR(start_factor=number, total_iters=w).",
    )
    min_lr_at: Literal["last_step", "after_last_step"] = Field(
        default="last_step",
        description="Step at which min_lr_ratio is reached. last_step: the last step of the run (which changes "
        "nothing if min_lr_ratio is 0); after_last_step: the step after it, as in torch and "
        "transformers.",
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="Learning rate at the end as a fraction of the peak; ignored by constant."
    )


class DTensorConfig(Section):
    """Distribution of the model over the workers with FSDP2, or with HSDP if dp_replicate_size is above 1."""

    dp_replicate_size: PositiveInt = Field(
        default=1,
        description="Number of copies of the sharded model; each copy is held by cluster.num_workers / "
        "dp_replicate_size workers.",
    )
    shard_parameters: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Division of weights, gradients and optimizer state among the workers by FSDP2. always: divide; "
        "never: each worker holds all of them, and gradients are summed once per step; auto: divide if the state takes "
        "more than 1 GiB (67 million parameters) and there are workers to divide it among, or if precision=bfloat16, "
        "cpu_offload or reduce_every_micro_batch need FSDP2. Not in NeMo-RL.",
    )
    reduce_every_micro_batch: bool = Field(
        default=False,
        description="Time of the gradient reduction. false: once per step, which is fastest; each worker then "
        "keeps complete float32 gradients (4 bytes per parameter) between micro-batches. true: after "
        "each micro-batch; each worker keeps only its shard, with more communication and less memory.",
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Recompute activations in the backward pass: less memory, about one third more computation.",
    )
    cpu_offload: bool = Field(
        default=False,
        description="Keep parameters and optimizer state in host memory instead of GPU memory; needs GPUs.",
    )


class PackingConfig(Section):
    """Packing of several documents into one row of T tokens; attention never crosses from one document to another."""

    enabled: bool = Field(
        default=True,
        description="Pack several documents into one row. false puts one document into each row, padded to T tokens.",
    )
    algorithm: Literal["first_fit_decreasing", "best_fit_decreasing", "concatenate"] = Field(
        default="first_fit_decreasing",
        description="Packing algorithm. first_fit_decreasing and best_fit_decreasing place the longest documents "
        "first; concatenate keeps the order of the data. No algorithm splits a document.",
    )


def _off_as_text(value: Any) -> Any:
    return "off" if value is False else value  # YAML reads a bare `off` as false


class CompiledGraphConfig(Section):
    """Calls of the workers through compiled graphs instead of plain Ray calls."""

    mode: Annotated[Literal["off", "preferred", "required"], BeforeValidator(_off_as_text)] = Field(
        default="preferred",
        description="off: plain Ray calls; preferred: compiled graphs, or plain Ray calls with one warning if graphs "
        "cannot be used; required: compiled graphs, or the run does not start. NeMo-RL's pull request 1612: "
        "policy.ray_compiled_graph.enabled, which is accepted too.",
    )
    warmup_gbs: NaturalInt | None = Field(
        default=None,
        description="Number of rows in the warm-up step, which runs before the first step and leaves no trace in "
        "the model, the optimizer or the random state; null means policy.train_global_batch_size, 0 means no warm-up.",
    )
    warmup_seq_len: PositiveInt | None = Field(
        default=None,
        description="Number of tokens in each row of the warm-up step; null means policy.max_total_sequence_length.",
    )
    inflight: PositiveInt | None = Field(
        default=None,
        description="Maximum number of calls under way in one graph; null means sft.steps_in_flight.",
    )
    overlap_communication: bool = Field(
        default=True,
        description="Send the next step and read the metrics of the last one while the current step computes. false "
        "sends each step after the metrics of the step before were read, as sft.steps_in_flight=1 does.",
    )


class PolicyConfig(Section):
    """The model, its tokenizer, and the optimization settings."""

    model_name: str | None = Field(
        default=None,
        description="Path of a Hugging Face model folder to start from; null starts from random weights, and then "
        "hf_config_overrides.model_type is required.",
    )
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="Tokenizer and chat template.")
    train_global_batch_size: PositiveInt = Field(
        default=8, description="Number of rows in one optimizer step, summed over all workers."
    )
    train_micro_batch_size: PositiveInt = Field(
        default=1,
        description="Number of training rows that one worker runs through the model at once.",
    )
    max_total_sequence_length: Annotated[int, Field(ge=2)] = Field(
        default=1024, description="T, the number of tokens in one row."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="bfloat16",
        description="Data type of the forward and the backward pass. Master weights and gradient reductions are "
        "always float32.",
    )
    max_grad_norm: PositiveFloat | None = Field(
        default=1.0,
        description="Maximum global gradient norm; a larger gradient is scaled down to this norm. null never clips.",
    )
    make_sequence_length_divisible_by: PositiveInt = Field(
        default=1, description="Required divisor of max_total_sequence_length; 1 accepts every length."
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="Optimizer and its arguments.")
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig, description="Learning rate over the run.")
    hf_config_overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="Keys of the model's Hugging Face configuration; an open mapping. With random weights, "
        "vocab_size is taken from the tokenizer.",
    )
    dtensor_cfg: DTensorConfig = Field(
        default_factory=DTensorConfig, description="Distribution of the model over the workers."
    )
    sequence_packing: PackingConfig = Field(
        default_factory=PackingConfig, description="Packing of documents into rows."
    )
    compiled_graph: CompiledGraphConfig = Field(
        default_factory=CompiledGraphConfig, description="Calls of the workers through compiled graphs."
    )
    loss_chunk_tokens: PositiveInt | None = Field(
        default=4096,
        description="Number of tokens for which logits and loss are computed at once, which bounds their memory; "
        "null computes a whole micro-batch at once. Not in NeMo-RL.",
    )

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


class DataConfig(Section):
    """The conversations to train on: JSON Lines with OpenAI-style messages. Paths start at the working directory."""

    train: Annotated[tuple[str, ...], BeforeValidator(_one_or_many), Field(min_length=1)] = Field(
        description="Path of a JSONL file, or a list of paths that are read one after the other. NeMo-RL: "
        "data.train.data_path, which is accepted too."
    )
    validation: str | None = Field(
        default=None,
        description="Path of a JSONL file that is used for validation only; null means none. NeMo-RL: "
        "data.validation.data_path, which is accepted too.",
    )
    validation_fraction: Fraction = Field(
        default=0.0,
        description="Fraction of the training data to hold out for validation. The choice depends only on a hash "
        "of each conversation, so duplicates stay on one side and the seed does not matter. NeMo-RL: "
        "data.train.split_validation_size.",
    )
    shuffle: bool = Field(
        default=True,
        description="Read the rows in a new order in each epoch; the order depends on sft.seed and the epoch.",
    )
    overlong: Literal["truncate", "drop", "split", "error"] = Field(
        default="truncate",
        description="Treatment of a conversation of more than T tokens. truncate: the tail is cut off; drop: the "
        "conversation is left out; split: the conversation becomes pieces of T tokens that overlap by "
        "one token; error: the run is refused. Affected conversations are always counted and "
        "reported.",
    )
    cache_dir: str = Field(default="runs/cache", description="Folder of token caches and trained tokenizers.")
    allow_unsupervised: bool = Field(
        default=False,
        description="Leave out (and count) conversations without any supervised token. false refuses such data, "
        "because they usually mean a wrong chat template.",
    )
    check_masks: bool = Field(
        default=True,
        description="Compare the supervised text with the assistant's messages in the first 1,000 conversations, "
        "and refuse data where the two disagree. Read the output of `raylane inspect-data` before "
        "setting this key to false.",
    )
    messages_key: str = Field(
        default="messages", description="Key of the list of messages in each line. NeMo-RL: chat_key."
    )
    input_key: str | None = Field(
        default=None,
        description="Key of the user's text in lines without messages_key, which hold one question and one answer; "
        "null means that every line has messages. Needs output_key.",
    )
    output_key: str | None = Field(
        default=None, description="Key of the assistant's text in lines without messages_key. Needs input_key."
    )

    @model_validator(mode="after")
    def _keys_that_fit(self) -> DataConfig:
        if self.validation is not None and self.validation_fraction:
            raise ValueError(
                f"validation={self.validation!r} and validation_fraction={self.validation_fraction} are both set; "
                "remove one"
            )
        if (self.input_key is None) != (self.output_key is None):
            raise ValueError(
                f"input_key={self.input_key!r} and output_key={self.output_key!r} must both be set, or both be null"
            )
        return self

    @property
    def has_validation(self) -> bool:
        """True if a validation set is configured."""
        return self.validation is not None or self.validation_fraction > 0


class CheckpointingConfig(Section):
    """Checkpoints: contents, retention, and the checkpoint to resume from."""

    enabled: bool = Field(default=True, description="Save checkpoints.")
    checkpoint_dir: str = Field(
        default="runs/checkpoints", description="Folder that holds the checkpoints, one folder step_N each."
    )
    metric_name: Literal["val:loss", "train:loss"] = Field(
        default="val:loss",
        description="Metric that keep_top_k compares. NeMo-RL writes val_loss and train_loss, which are accepted too.",
    )
    higher_is_better: bool = Field(
        default=False, description="Treat a higher value of metric_name as better; false fits a loss."
    )
    keep_top_k: NaturalInt = Field(
        default=0,
        description="Number of best checkpoints to keep, in addition to the latest ones.",
    )
    keep_latest_k: PositiveInt = Field(
        default=2,
        description="Number of latest checkpoints to keep. 2 leaves an earlier one to resume from if the latest "
        "is damaged.",
    )
    save_period: NaturalInt = Field(
        default=0,
        description="Number of steps between two checkpoints; 0 saves only at the end of the run and on SIGTERM.",
    )
    save_optimizer: bool = Field(
        default=True,
        description="Save the optimizer state too. false saves weights only, about one third of the size; the "
        "losses of a run resumed from them differ.",
    )
    save_hf: bool = Field(
        default=True,
        description="Write the model as a Hugging Face folder at the end of the run. NeMo-RL: save_consolidated.",
    )
    resume: str = Field(
        default="auto",
        description='Checkpoint to resume from. "auto": the newest complete checkpoint in checkpoint_dir, or a '
        'new run if there is none; "never": a new run; any other text: path of a checkpoint folder.',
    )
    allow_other_owner: bool = Field(
        default=False,
        description="Resume also from checkpoints whose files belong to another user of the machine. false "
        "refuses them, because weights are loaded unseen.",
    )


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = Field(default="raylane", description="Name of the project.")
    name: str | None = Field(default=None, description="Name of the run; null lets wandb choose one.")


class LoggerConfig(Section):
    """Destinations of the metrics, in addition to metrics.jsonl, which is always written."""

    log_dir: str = Field(
        default="runs/logs",
        description="Folder of metrics.jsonl, report.html and the TensorBoard files.",
    )
    tensorboard_enabled: bool = Field(
        default=False, description="Write TensorBoard files too; needs the package tensorboard."
    )
    wandb_enabled: bool = Field(
        default=False, description="Send metrics to Weights & Biases too; needs the package wandb."
    )
    wandb: WandbConfig = Field(
        default_factory=WandbConfig, description="Settings of Weights & Biases, used if wandb_enabled is true."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level of the raylane log messages that are shown."
    )


class ClusterConfig(Section):
    """The workers: one process each, with one GPU or none."""

    num_workers: PositiveInt = Field(
        default=1,
        description="Total number of workers. Unset or null: one for each GPU (gpus_per_node x num_nodes), or one "
        "for each node without GPUs. Not in NeMo-RL, which always uses one worker for each GPU.",
    )
    gpus_per_node: NaturalInt = Field(default=0, description="Number of GPUs to use on each node; 0 trains on CPUs.")
    num_nodes: PositiveInt = Field(
        default=1,
        description="Number of nodes to use; each node gets num_workers / num_nodes workers with consecutive ranks.",
    )
    cpus_per_worker: PositiveInt = Field(
        default=1,
        description="Number of logical CPUs that each worker requests from Ray, and number of its torch threads.",
    )
    start_timeout_s: PositiveFloat = Field(
        default=120.0, description="Maximum time in seconds for placing and starting all workers."
    )
    env_vars: dict[str, Annotated[str, BeforeValidator(_number_as_text)]] = Field(
        default_factory=dict,
        description="Environment variables to set before Python starts in the workers, e.g. NCCL_DEBUG; an open "
        "mapping of text to text. NeMo-RL: policy.dtensor_cfg.env_vars.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_worker_for_each_gpu(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("num_workers") is not None:
            return values
        gpus, nodes = values.get("gpus_per_node", 0), values.get("num_nodes", 1)
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in (gpus, nodes)):
            return {**values, "num_workers": 1}  # pydantic reports the wrong type at gpus_per_node or num_nodes
        return {**values, "num_workers": max(1, gpus) * max(1, nodes)}

    @model_validator(mode="after")
    def _no_rank_variables(self) -> ClusterConfig:
        if reserved := sorted(set(self.env_vars) & set(RANK_VARIABLES)):
            raise ValueError(
                f"env_vars names {', '.join(reserved)}, which raylane sets for each worker; remove them from env_vars"
            )
        return self


class RunConfig(Section):
    """The complete configuration of a fine-tuning run."""

    sft: SftConfig = Field(default_factory=SftConfig, description="Training loop.")
    policy: PolicyConfig = Field(description="Model, tokenizer and optimization settings.")
    data: DataConfig = Field(description="Conversations to train on.")
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig, description="Checkpoints.")
    logger: LoggerConfig = Field(default_factory=LoggerConfig, description="Metrics and logs.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="Workers.")
