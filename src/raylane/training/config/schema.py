"""Schema of the sections that every training run has: checkpoints, metrics, workers, and the settings of its loop.

One frozen, typed tree, and the only place with default values. `TrainingConfig` is the base of the configuration of
each kind of training (`raylane.sft.config.schema.SftRunConfig`). Key names follow NeMo-RL wherever the meaning is the
same, so that its command lines and files mostly work unchanged; descriptions name the NeMo-RL key where names differ.
`load` builds the tree from a YAML file and command-line overrides; `layout` checks values against each other. All of
`raylane.training` reads the tree and nothing writes to it. Neither this module nor `policy` (the section `policy`)
depends on Ray, torch or data files.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from raylane.core.deadline import START_S
from raylane.training.config.policy import NaturalInt, PolicyConfig, PositiveFloat, PositiveInt, Section
from raylane.workers.options import RANK_VARIABLES


class LoopConfig(Section):
    """Settings that the loop of any training has."""

    seed: Annotated[NaturalInt, Field(lt=2**63)] = 42
    """Seed of the random initial weights, of dropout, and of the order of the data."""
    on_nan: Literal["stop", "skip"] = "stop"
    """Treatment of a step whose loss or gradient norm is NaN or infinite, of which no weight and no optimizer state
    changes. stop: the run ends, and saves no checkpoint; skip: the run goes on with the next step. NeMo has
    skip_nan_grad=true for skip, NeMo-RL has no key."""
    max_skipped_steps: PositiveInt = 10
    """Number of successive steps that on_nan=skip may leave out; one more ends the run. Not in NeMo-RL."""
    log_interval: PositiveInt = 10
    """Number of steps between two progress lines."""
    step_timeout_s: PositiveFloat | None = None
    """Maximum time in seconds that the driver waits for one step, validation or checkpoint; null means no limit, so a
    worker may be held in a debugger. After the limit the run ends. Not in NeMo-RL."""
    max_restarts: NaturalInt = 2
    """Number of times that a run starts its workers again after it lost one, from the last complete checkpoint, until a
    new checkpoint is complete, or a newer snapshot was needed (then counting begins again). 0 ends the run instead. Not
    in NeMo-RL."""
    snapshot_every: NaturalInt = 0
    """Number of steps between two snapshots in shared memory: copies of trained weights and optimizer state beside the
    next step. After the loss of a worker the run goes back to the newest one instead of an older checkpoint. Takes that
    state in memory three times, more often if steps in flight outnumber this. 0 takes none. Not in NeMo-RL."""

    @model_validator(mode="after")
    def _snapshots_are_used(self) -> LoopConfig:
        if self.snapshot_every and not self.max_restarts:
            raise ValueError(f"snapshot_every={self.snapshot_every} needs more than max_restarts=0: change one of them")
        return self


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
    spare_workers: NaturalInt = 0
    """Number of processes, spread over the nodes, that wait to take the place of a worker that dies. Each takes the
    memory of a Python with torch. Only without GPUs. Not in NeMo-RL."""
    start_timeout_s: PositiveFloat = START_S
    """Maximum time in seconds for placing and starting all workers; every 30 s the log says what is awaited."""
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
    def _no_spares_with_gpus(self) -> ClusterConfig:
        if self.spare_workers and self.gpus_per_node:
            raise ValueError(f"spare_workers={self.spare_workers} needs gpus_per_node=0, got {self.gpus_per_node}")
        return self

    @model_validator(mode="after")
    def _no_rank_variables(self) -> ClusterConfig:
        if reserved := sorted(set(self.env_vars) & set(RANK_VARIABLES)):
            raise ValueError(
                f"env_vars names {', '.join(reserved)}, which raylane sets for each worker; remove them from env_vars"
            )
        return self


class TrainingConfig(Section):
    """The configuration of a training run, without the sections that only one kind of training has."""

    loop_name: ClassVar[str]
    """Name of the section that `loop` returns, for messages that name its keys."""

    policy: PolicyConfig
    """Model, tokenizer and optimization settings."""
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig)
    """Checkpoints."""
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    """Metrics and logs."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Workers."""

    @property
    def steps_in_flight(self) -> int:
        """Number of steps that the driver sends before it waits for the metrics of the oldest one."""
        return 1

    @property
    @abstractmethod
    def loop(self) -> LoopConfig:
        """Settings of the training loop."""
