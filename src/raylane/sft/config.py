"""The configuration of a fine-tuning run: one frozen, typed tree, and the only place where defaults live.

Key names follow NeMo-RL wherever the same thing is meant, so that its command lines and files mostly carry over. The
tree is built by `load_config` from a YAML file and command-line overrides (`overrides.py`), its cross-checks are in
`layout.py`. Everything in `raylane.sft` reads it and nothing writes to it. It knows nothing of Ray, torch or files of
data. `docs/reference/sft-config.md` is generated from the descriptions below.

B = rows in a batch, T = `policy.max_total_sequence_length` = the fixed length of a row in tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from raylane.errors import ConfigError
from raylane.sft import layout, nemo_rl, overrides
from raylane.workers.options import RANK_VARIABLES

__all__ = [
    "CheckpointingConfig",
    "ClusterConfig",
    "DataConfig",
    "LoggerConfig",
    "PolicyConfig",
    "RunConfig",
    "SftConfig",
    "build_config",
    "dump",
    "load_config",
]

_log = logging.getLogger(__name__)


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"must be an integer, got {str(value).lower()}")
    return value


PositiveInt = Annotated[int, BeforeValidator(_no_boolean), Field(gt=0)]
NaturalInt = Annotated[int, BeforeValidator(_no_boolean), Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NaturalFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]

# torch.optim.AdamW takes these besides the declared four (torch 2.13, torch/optim/adamw.py); others it would refuse
# only inside a worker.
ADAMW_EXTRAS = ("amsgrad", "capturable", "differentiable", "foreach", "fused", "maximize")


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, (str, Path)) else value


def _number_as_text(value: Any) -> Any:
    """Return the text of a number: YAML makes a number of NCCL_P2P_DISABLE: 1, and environment variables are text."""
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


class Section(BaseModel):
    """A part of the tree: frozen, and a key that it does not declare is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="after")
    def _no_null_characters(self) -> Section:
        for name in type(self).model_fields:
            value = getattr(self, name)
            texts = value if isinstance(value, tuple) else (value,)
            if any(isinstance(text, str) and "\0" in text for text in texts):
                raise ValueError(f"{name} holds a null character, which no path or text here can have")
        return self


class SftConfig(Section):
    """How long to train, when to validate, and how steps are sent to the workers."""

    max_num_steps: PositiveInt | None = Field(
        default=None,
        description="Stop after this many optimizer steps; null: no limit.",
    )
    max_num_epochs: PositiveInt | None = Field(
        default=1,
        description="Stop after this many passes over the data; null: no limit. The sooner of the two limits ends it.",
    )
    val_period: NaturalInt = Field(default=0, description="Validate every so many steps; 0: never in between.")
    val_batches: NaturalInt = Field(
        default=0,
        description="Use at most this many batches per validation; 0: all of them.",
    )
    val_global_batch_size: PositiveInt = Field(default=8, description="Rows per validation batch, over all workers.")
    val_micro_batch_size: PositiveInt = Field(
        default=8,
        description="Rows that one worker runs through the model at once.",
    )
    val_at_start: bool = Field(default=False, description="Validate before the first step.")
    val_at_end: bool = Field(default=False, description="Validate after the last step.")
    seed: Annotated[NaturalInt, Field(lt=2**63)] = Field(
        default=42, description="Seeds the random weights and the order of the data."
    )
    feed: Literal["workers", "driver"] = Field(
        default="workers",
        description="Who reads the data: each worker its own rows, given a step number, or the driver for all of them.",
    )
    steps_in_flight: PositiveInt = Field(
        default=2, description="Steps sent ahead of the last one whose result was read; 1: wait for each."
    )
    log_interval: PositiveInt = Field(default=10, description="Print a progress line every so many steps.")


class TokenizerConfig(Section):
    """Where tokens and the chat template come from. With neither name nor train_vocab_size: the model's own folder."""

    name: str | None = Field(default=None, description="Folder of a Hugging Face tokenizer.")
    train_vocab_size: Annotated[int, Field(ge=300)] | None = Field(
        default=None,
        description="Train a byte-level BPE of this many tokens (special ones included) on the training data.",
    )
    chat_template: str | None = Field(
        default=None,
        description='null or "default": the tokenizer\'s own; "chatml" or "llama3": one that comes with raylane; '
        "text with {{ or {% in it: that template; otherwise a Jinja file. "
        "It must mark what the assistant wrote with {% generation %} ... {% endgeneration %}.",
    )


class AdamWKwargs(Section):
    """Keywords of torch.optim.AdamW; further ones of its own may be added (`+policy.optimizer.kwargs.fused=true`)."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    lr: PositiveFloat = Field(default=5e-5, description="Peak learning rate.")
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.999), description="Decay of the two running averages.")
    eps: PositiveFloat = Field(default=1e-8, description="Added to the denominator.")
    weight_decay: NaturalFloat = Field(default=0.01, description="Decoupled weight decay.")

    @model_validator(mode="after")
    def _known_to_adamw(self) -> AdamWKwargs:
        for key in self.model_extra or {}:
            if key not in ADAMW_EXTRAS:
                known = (*type(self).model_fields, *ADAMW_EXTRAS)
                raise ValueError(f"{key!r} is no keyword of AdamW; {overrides.suggest(key, known)}")
        return self


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["adamw"] = Field(default="adamw", description="AdamW with decoupled weight decay.")
    weight_decay_on: Literal["matrices", "all"] = Field(
        default="matrices",
        description="matrices: norms and biases are not decayed; all: they are, as plain AdamW does.",
    )
    kwargs: AdamWKwargs = Field(default_factory=AdamWKwargs, description="Its keywords.")


class SchedulerConfig(Section):
    """Learning rate over the run: a linear rise over warmup_steps (w), then the named shape."""

    name: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="Shape after the warm-up.")
    warmup_steps: NaturalInt = Field(default=0, description="Steps of linear rise.")
    first_step: Literal["1/(w+1)", "1/w", "0"] = Field(
        default="1/(w+1)",
        description="Part of the peak that the first of the w warm-up steps has: 1/(w+1) as in torchtitan, 1/w as with "
        "torch's LinearLR(start_factor=1/w), 0 as in transformers (that step changes nothing).",
    )
    min_lr_at: Literal["last_step", "after_last_step"] = Field(
        default="last_step",
        description="When min_lr_ratio is reached: by the last step (which changes nothing if that is 0), or by the "
        "step that would follow, as in torch and transformers.",
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="Learning rate at the end, as a part of the peak; constant ignores it."
    )


class DTensorConfig(Section):
    """How the model is spread over the workers (FSDP2; HSDP when dp_replicate_size is above 1)."""

    dp_replicate_size: PositiveInt = Field(
        default=1, description="Copies of the sharded model; the workers of one copy are cluster.num_workers / this."
    )
    reduce_every_micro_batch: bool = Field(
        default=False,
        description="false: reduce gradients once a step; every worker then keeps whole float32 gradients, 4 bytes a "
        "parameter, between micro-batches. true: reduce after each micro-batch and keep a shard only: more "
        "communication, less memory.",
    )
    activation_checkpointing: bool = Field(default=False, description="Recompute activations in the backward pass.")
    cpu_offload: bool = Field(
        default=False,
        description="Keep parameters and optimizer state in host memory (GPUs only).",
    )


class PackingConfig(Section):
    """Several documents in one row of T tokens; they cannot see one another."""

    enabled: bool = Field(default=True, description="false: one document a row, padded to T.")
    algorithm: Literal["first_fit_decreasing", "best_fit_decreasing", "concatenate"] = Field(
        default="first_fit_decreasing",
        description="concatenate keeps the order of the data and never splits a document.",
    )


class PolicyConfig(Section):
    """The model, its tokenizer, and how it is trained."""

    model_name: str | None = Field(
        default=None,
        description="Hugging Face folder to start from; null: random weights, shaped by hf_config_overrides "
        "(whose model_type is then required).",
    )
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="Tokens and chat template.")
    train_global_batch_size: PositiveInt = Field(default=8, description="Rows per optimizer step, over all workers.")
    train_micro_batch_size: PositiveInt = Field(
        default=1,
        description="Rows that one worker runs through the model at once.",
    )
    max_total_sequence_length: Annotated[int, Field(ge=2)] = Field(default=1024, description="T: tokens in a row.")
    precision: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="Of the forward and backward pass; master weights and reductions are float32."
    )
    max_grad_norm: PositiveFloat | None = Field(
        default=1.0,
        description="Clip the global gradient norm here; null: never.",
    )
    make_sequence_length_divisible_by: PositiveInt = Field(default=1, description="T must be a multiple of this.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The optimizer.")
    scheduler: SchedulerConfig = Field(default_factory=SchedulerConfig, description="Learning rate over the run.")
    hf_config_overrides: dict[str, Any] = Field(
        default_factory=dict,
        description="Keys of the model's Hugging Face configuration; an open mapping. "
        "vocab_size comes from the tokenizer when the weights are random.",
    )
    dtensor_cfg: DTensorConfig = Field(default_factory=DTensorConfig, description="Spreading over the workers.")
    sequence_packing: PackingConfig = Field(default_factory=PackingConfig, description="Documents per row.")
    loss_chunk_tokens: PositiveInt | None = Field(
        default=4096,
        description="Compute logits and loss for this many tokens at a time; null: a whole micro-batch at once.",
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
                f"tokenizer.train_vocab_size={size} would give tokens that the weights of model_name="
                f"{self.model_name!r} do not know; remove it, or set model_name=null to start from random weights"
            )
        if self.model_name is None and not isinstance(self.hf_config_overrides.get("model_type"), str):
            raise ValueError(
                "model_name is null, so hf_config_overrides.model_type must say what to build (llama, qwen2, qwen3 ...)"
            )
        return self


class DataConfig(Section):
    """The conversations to train on: JSON Lines with OpenAI-style messages. Paths start at the working directory."""

    train: Annotated[tuple[str, ...], BeforeValidator(_one_or_many), Field(min_length=1)] = Field(
        description="A JSONL file, or a list of them (read one after the other)."
    )
    validation: str | None = Field(default=None, description="A JSONL file that is only validated on.")
    validation_fraction: Fraction = Field(
        default=0.0,
        description="Hold out this part of the training data instead, chosen by a hash of each conversation: "
        "duplicates stay on one side, and the choice does not depend on the seed.",
    )
    shuffle: bool = Field(
        default=True,
        description="A new order of the rows in each epoch, given by sft.seed and the epoch.",
    )
    overlong: Literal["truncate", "drop", "split", "error"] = Field(
        default="truncate",
        description="What happens to a conversation of more than T tokens. truncate: the tail is cut; drop: it is left "
        "out; split: pieces of T tokens that overlap by one; error: refuse. Always counted and reported.",
    )
    cache_dir: str = Field(default="runs/cache", description="Folder of token caches and trained tokenizers.")
    allow_unsupervised: bool = Field(
        default=False,
        description="Leave out (and count) conversations in which nothing is supervised instead of refusing them.",
    )
    check_masks: bool = Field(
        default=True,
        description="Compare what is supervised with what the assistant wrote, for the first 1,000 conversations, and "
        "refuse data where they disagree. Look at `raylane inspect-data` before you set it to false.",
    )
    messages_key: str = Field(default="messages", description="Key of the list of messages in each line.")

    @model_validator(mode="after")
    def _one_validation_set(self) -> DataConfig:
        if self.validation is not None and self.validation_fraction:
            raise ValueError(
                f"validation={self.validation!r} and validation_fraction={self.validation_fraction} are both set; "
                "remove one"
            )
        return self

    @property
    def has_validation(self) -> bool:
        """Is there anything to validate on?"""
        return self.validation is not None or self.validation_fraction > 0


class CheckpointingConfig(Section):
    """What is saved, how much of it is kept, and where a run goes on."""

    enabled: bool = Field(default=True, description="Save checkpoints at all.")
    checkpoint_dir: str = Field(default="runs/checkpoints", description="Folder of step_N folders.")
    metric_name: Literal["val:loss", "train:loss"] = Field(default="val:loss", description="What keep_top_k compares.")
    higher_is_better: bool = Field(default=False, description="Of metric_name.")
    keep_top_k: NaturalInt = Field(
        default=0,
        description="Keep this many of the best checkpoints, besides the latest ones.",
    )
    keep_latest_k: PositiveInt = Field(default=2, description="Keep this many of the latest checkpoints.")
    save_period: NaturalInt = Field(
        default=0,
        description="Save every so many steps; 0: only at the end (and on SIGTERM).",
    )
    save_optimizer: bool = Field(
        default=True,
        description="false: weights only; such a checkpoint cannot be resumed exactly.",
    )
    save_hf: bool = Field(default=True, description="Also write the model as a Hugging Face folder at the end.")
    resume: str = Field(
        default="auto",
        description='"auto": go on from the newest whole checkpoint if there is one; "never": start anew; '
        "otherwise the checkpoint folder to go on from.",
    )
    allow_other_owner: bool = Field(
        default=False,
        description="Also resume from checkpoints whose files belong to another user of the machine.",
    )


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = Field(default="raylane", description="Project.")
    name: str | None = Field(default=None, description="Name of the run; null: chosen by wandb.")


class LoggerConfig(Section):
    """Where figures go, besides metrics.jsonl, which is always written."""

    log_dir: str = Field(
        default="runs/logs",
        description="Folder of metrics.jsonl, the loss curve and TensorBoard files.",
    )
    tensorboard_enabled: bool = Field(default=False, description="Also write TensorBoard files (package tensorboard).")
    wandb_enabled: bool = Field(default=False, description="Also send to Weights & Biases (package wandb).")
    wandb: WandbConfig = Field(default_factory=WandbConfig, description="Used when wandb_enabled.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Of raylane's own log.")


class ClusterConfig(Section):
    """The workers: one process, and one GPU or none, each."""

    num_workers: PositiveInt = Field(
        default=1,
        description="Workers in all. Unset or null: one for each GPU (gpus_per_node x num_nodes), without GPUs one for "
        "each node.",
    )
    gpus_per_node: NaturalInt = Field(default=0, description="GPUs that each node lends; 0: train on the CPU.")
    num_nodes: PositiveInt = Field(
        default=1,
        description="Nodes to use: each gets num_workers / num_nodes workers, with consecutive ranks.",
    )
    cpus_per_worker: PositiveInt = Field(
        default=1,
        description="Logical CPUs that each worker asks Ray for, and its threads.",
    )
    start_timeout_s: PositiveFloat = Field(
        default=120.0, description="Seconds that placing and starting all workers may take."
    )
    env_vars: dict[str, Annotated[str, BeforeValidator(_number_as_text)]] = Field(
        default_factory=dict,
        description="Environment variables that are set before the workers' Python starts, e.g. NCCL_DEBUG; an open "
        "mapping of text to text.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_worker_for_each_gpu(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("num_workers") is not None:
            return values
        gpus, nodes = values.get("gpus_per_node", 0), values.get("num_nodes", 1)
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in (gpus, nodes)):
            return {**values, "num_workers": 1}  # the wrong type is told for the key that has it
        return {**values, "num_workers": max(1, gpus) * max(1, nodes)}

    @model_validator(mode="after")
    def _no_rank_variables(self) -> ClusterConfig:
        if reserved := sorted(set(self.env_vars) & set(RANK_VARIABLES)):
            raise ValueError(f"env_vars names {', '.join(reserved)}, which are set for each worker; remove them")
        return self


class RunConfig(Section):
    """A whole run."""

    sft: SftConfig = Field(default_factory=SftConfig, description="The training loop.")
    policy: PolicyConfig = Field(description="The model, its tokenizer, and how it is trained.")
    data: DataConfig = Field(description="The conversations to train on.")
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig, description="Checkpoints.")
    logger: LoggerConfig = Field(default_factory=LoggerConfig, description="Figures and logs.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="The workers.")


def load_config(path: str | Path, override_words: Sequence[str] = ()) -> RunConfig:
    """The configuration in a YAML file (and those its `defaults:` name), with overrides applied, fully checked.

    `${a.b}` stands for another key's value; spellings of NeMo-RL are understood (`nemo_rl`).

    Raises ConfigError: file missing or not YAML, unknown key (with the nearest known one), value of a wrong kind, or
    sizes that do not divide (`layout.check_layout`).
    """
    document = overrides.apply_overrides(overrides.read_yaml(Path(path)), override_words, RunConfig)
    document, left_out = nemo_rl.understand(nemo_rl.interpolate(document, str(path)))
    if left_out:
        _log.info("%s: without effect here, and left out: %s", path, ", ".join(left_out))
    return build_config(document, source=str(path))


def build_config(document: Mapping[str, Any], source: str = "configuration") -> RunConfig:
    """The configuration from plain nested values, checked as `load_config` does; `source` names it in errors."""
    overrides.refuse_unknown(document, RunConfig, source=source)
    try:
        config = RunConfig.model_validate(dict(document))
    except ValidationError as error:
        raise ConfigError(overrides.explain(error, source)) from error
    layout.check_layout(config)
    return config


def dump(config: RunConfig) -> dict[str, Any]:
    """Plain nested values (JSON types only, a copy), from which `build_config` makes an equal configuration."""
    return config.model_dump(mode="json")
