"""Schema of the configuration of a fine-tuning run: one frozen, typed tree, and the only place with default values.

Key names follow NeMo-RL wherever the meaning is the same, so that its command lines and files mostly work unchanged;
descriptions name the NeMo-RL key where the names differ. `load.load_config` builds the tree from a YAML file and
command-line overrides; `layout` checks values against each other. All of `raylane.sft` reads the tree and nothing
writes to it. Neither this module nor `policy` (the section `policy`) depends on Ray, torch or data files.
`docs/reference/sft-config.md` is generated from the descriptions below.

B = rows in a batch, T = `policy.max_total_sequence_length` = the fixed length of a row in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from raylane.sft.config.policy import Fraction, NaturalInt, PolicyConfig, PositiveFloat, PositiveInt, Section
from raylane.workers.options import RANK_VARIABLES


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, (str, Path)) else value


class SftConfig(Section):
    """Length of the training loop, validation, and the way steps are sent to the workers."""

    max_num_steps: PositiveInt | None = None
    """Maximum number of optimizer steps; null means no limit. The run ends at the first of the two limits, this one and
    max_num_epochs."""
    max_num_epochs: PositiveInt | None = 1
    """Maximum number of passes over the training data; null means no limit. The run ends at the first of the two
    limits, this one and max_num_steps."""
    val_period: NaturalInt = 0
    """Number of steps between two validations; 0 (the default, because a validation set is optional) means no
    validation during training."""
    val_batches: NaturalInt = 0
    """Maximum number of batches in one validation; 0 means the whole validation set."""
    val_global_batch_size: PositiveInt = 8
    """Number of rows in one validation batch, summed over all workers."""
    val_micro_batch_size: PositiveInt = 8
    """Number of validation rows that one worker runs through the model at once."""
    val_at_start: bool = False
    """Validate before the first step."""
    val_at_end: bool = False
    """Validate after the last step."""
    seed: Annotated[NaturalInt, Field(lt=2**63)] = 42
    """Seed of the random initial weights, of dropout, and of the order of the data."""
    feed: Literal["workers", "driver"] = "workers"
    """Process that reads the training data. workers: the driver sends a step number, and each worker reads its own
    rows; driver: the driver reads all rows and sends them. Not in NeMo-RL, which behaves as driver."""
    steps_in_flight: PositiveInt = 2
    """Number of steps that the driver sends before it waits for the metrics of the oldest one. 2 keeps the workers busy
    while the driver reads metrics; 1 waits for each step. Not in NeMo-RL."""
    sample_prompts: Annotated[tuple[str, ...], BeforeValidator(_one_or_many)] = ()
    """Questions that the model answers at every validation; the answers are in metrics.jsonl and in the report. Not in
    NeMo-RL."""
    sample_tokens: PositiveInt = 32
    """Maximum number of tokens in each of these answers. Each token takes one forward pass. Not in NeMo-RL."""
    skip_nan_grad: bool = False
    """Leave out steps whose loss or gradient norm is NaN or infinite: weights, optimizer state and learning rate go on
    as if the step had no gradients. false ends the run at such a step. NeMo has the same key, NeMo-RL has none."""
    max_skipped_steps: PositiveInt = 10
    """Number of successive steps that skip_nan_grad may leave out; one more ends the run. Not in NeMo-RL."""
    log_interval: PositiveInt = 10
    """Number of steps between two progress lines."""
    step_timeout_s: PositiveFloat | None = None
    """Maximum time in seconds that the driver waits for one step, validation or checkpoint; null means no limit, so a
    worker may be held in a debugger. After the limit the run ends. Not in NeMo-RL."""
    max_restarts: NaturalInt = 2
    """Number of times that a run starts its workers again after it lost one, from the last complete checkpoint, until a
    new checkpoint is complete (then counting begins again). 0 ends the run instead. Not in NeMo-RL."""


class TrainFile(Section):
    """One file of training data and its weight."""

    path: str = Field(min_length=1)
    """Path of a JSONL file."""
    weight: PositiveFloat = 1.0
    """Number of times that its rows are used in an epoch."""


class DataConfig(Section):
    """The conversations to train on: JSON Lines with OpenAI-style messages. Paths start at the working directory."""

    train: Annotated[tuple[str | TrainFile, ...], BeforeValidator(_one_or_many), Field(min_length=1)]
    """Path or URL (e.g. s3://bucket/file.jsonl) of a JSONL file, or a list of such places and of {path, weight}. weight
    is the number of times that the rows of a file are used in an epoch: 2 uses each row twice, 0.5 uses one half of the
    rows in an epoch and the other half in the next one; a path alone has weight 1. If a weight is not 1, each file is
    packed by itself. NeMo-RL: data.train.data_path, which is accepted too."""
    validation: str | None = None
    """Path or URL of a JSONL file that is used for validation only; null means none. NeMo-RL:
    data.validation.data_path, which is accepted too."""
    validation_fraction: Fraction = 0.0
    """Fraction of the training data to hold out for validation. The choice depends only on a hash of each conversation,
    so duplicates stay on one side and the seed does not matter. NeMo-RL: data.train.split_validation_size."""
    shuffle: bool = True
    """Read the rows in a new order in each epoch; the order depends on sft.seed and the epoch."""
    overlong: Literal["truncate", "drop", "split", "error"] = "truncate"
    """Treatment of a conversation of more than T tokens. truncate: the tail is cut off; drop: the conversation is left
    out; split: the conversation becomes pieces of T tokens that overlap by one token; error: the run is refused.
    Affected conversations are always counted and reported."""
    cache_dir: str = "runs/cache"
    """Folder of token caches and trained tokenizers."""
    allow_unsupervised: bool = False
    """Leave out (and count) conversations without any supervised token. false refuses such data, because they usually
    mean a wrong chat template."""
    check_masks: bool = True
    """Compare the supervised text with the assistant's messages in the first 1,000 conversations, and refuse data where
    the two disagree. Read the output of `raylane inspect-data` before setting this key to false."""
    messages_key: str = "messages"
    """Key of the list of messages in each line. NeMo-RL: chat_key."""
    input_key: str | None = None
    """Key of the user's text in lines without messages_key, which hold one question and one answer; null means that
    every line has messages. Needs output_key."""
    output_key: str | None = None
    """Key of the assistant's text in lines without messages_key. Needs input_key."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of lines whose text may be left out. Without them a line is refused if it holds a text that no message has,
    e.g. the input of Alpaca's instruction, input and output. Not in NeMo-RL."""

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
    def train_paths(self) -> tuple[str, ...]:
        """Paths of the files of training data."""
        return tuple(file if isinstance(file, str) else file.path for file in self.train)

    @property
    def train_weights(self) -> tuple[float, ...]:
        """Weights of the files of training data."""
        return tuple(1.0 if isinstance(file, str) else file.weight for file in self.train)

    @property
    def has_validation(self) -> bool:
        """True if a validation set is configured."""
        return self.validation is not None or self.validation_fraction > 0


class CheckpointingConfig(Section):
    """Checkpoints: contents, retention, and the checkpoint to resume from."""

    enabled: bool = True
    """Save checkpoints."""
    checkpoint_dir: str = "runs/checkpoints"
    """Folder that holds the checkpoints, one folder step_N each. A local path (with several nodes on storage that they
    share), or a URL of storage: file://, s3:// (needs raylane[s3]), or another one that fsspec knows. Nothing prevents
    two runs from writing to one URL."""
    metric_name: Literal["val:loss", "train:loss"] = "val:loss"
    """Metric that keep_top_k compares. NeMo-RL writes val_loss and train_loss, which are accepted too."""
    higher_is_better: bool = False
    """Treat a higher value of metric_name as better; false fits a loss."""
    keep_top_k: NaturalInt = 0
    """Number of best checkpoints to keep, in addition to the latest ones."""
    keep_latest_k: PositiveInt = 2
    """Number of latest checkpoints to keep. 2 leaves an earlier one to resume from if the latest is damaged."""
    save_period: NaturalInt = 0
    """Number of steps between two checkpoints; 0 saves only at the end of the run and on SIGTERM."""
    is_async: bool = False
    """Write checkpoints while the next steps run. Each worker first copies its weights and optimizer state to CPU
    memory (12 bytes per parameter that it holds). The last checkpoint of a run, and the one on SIGTERM, are waited for.
    """
    save_optimizer: bool = True
    """Save the optimizer state too. false saves weights only, about one third of the size; the losses of a run resumed
    from them differ."""
    save_hf: bool = True
    """Write the model as a Hugging Face folder at the end of the run. NeMo-RL: save_consolidated."""
    hf_dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the weights in the Hugging Face folder; null means that of policy.precision. float32 keeps all bits
    of the master weights. Not in NeMo-RL."""
    resume: str = "auto"
    """Checkpoint to resume from. "auto": the newest complete checkpoint in checkpoint_dir, or a new run if there is
    none; "never": a new run; any other text: path or URL of a checkpoint folder."""
    allow_other_owner: bool = False
    """Resume also from checkpoints whose files belong to another user of the machine. false refuses them, because
    weights are loaded unseen."""


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = "raylane"
    """Name of the project."""
    name: str | None = None
    """Name of the run; null lets wandb choose one."""


class LoggerConfig(Section):
    """Destinations of the metrics, in addition to metrics.jsonl, which is always written."""

    log_dir: str = "runs/logs"
    """Folder of metrics.jsonl, report.html and the TensorBoard files."""
    tensorboard_enabled: bool = False
    """Write TensorBoard files too; needs the package tensorboard."""
    wandb_enabled: bool = False
    """Send metrics to Weights & Biases too; needs the package wandb."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Settings of Weights & Biases, used if wandb_enabled is true."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of the raylane log messages that are shown."""


class ClusterConfig(Section):
    """The workers: one process each, with one GPU or none."""

    address: str | None = Field(default=None, min_length=1)
    """Ray cluster to run on. "auto": the cluster that this machine is a node of; host:port: the cluster whose head
    listens there; "local": a new Ray on this machine that ends with the run; null: the cluster in the environment
    variable RAY_ADDRESS, or as local if that is not set. Not in NeMo-RL, which has the last behaviour."""
    num_workers: PositiveInt = 1
    """Total number of workers. Unset or null: one for each GPU (gpus_per_node x num_nodes), or one for each node
    without GPUs. Not in NeMo-RL, which always uses one worker for each GPU."""
    gpus_per_node: NaturalInt = 0
    """Number of GPUs to use on each node; 0 trains on CPUs."""
    num_nodes: PositiveInt = 1
    """Number of nodes to use; each node gets num_workers / num_nodes workers with consecutive ranks."""
    cpus_per_worker: PositiveInt = 1
    """Number of logical CPUs that each worker requests from Ray, and number of its torch threads."""
    start_timeout_s: PositiveFloat = 120.0
    """Maximum time in seconds for placing and starting all workers."""
    # YAML reads `NCCL_P2P_DISABLE: 1` as a number, and environment variables are text.
    env_vars: dict[str, Annotated[str, Field(coerce_numbers_to_str=True)]] = Field(default_factory=dict)
    """Environment variables to set before Python starts in the workers, e.g. NCCL_DEBUG; an open mapping of text to
    text. NeMo-RL: policy.dtensor_cfg.env_vars."""

    @model_validator(mode="before")
    @classmethod
    def _one_worker_for_each_gpu(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or values.get("num_workers") is not None:
            return values
        gpus, nodes = values.get("gpus_per_node", 0), values.get("num_nodes", 1)
        if not all(isinstance(count, int) and not isinstance(count, bool) for count in (gpus, nodes)):
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

    sft: SftConfig = Field(default_factory=SftConfig)
    """Training loop."""
    policy: PolicyConfig
    """Model, tokenizer and optimization settings."""
    data: DataConfig
    """Conversations to train on."""
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig)
    """Checkpoints."""
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    """Metrics and logs."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Workers."""
