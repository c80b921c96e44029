"""Configuration of a GRPO run: the sections of every training, and `grpo`, `data` and `rollout`.

`docs/reference/grpo-config.md` is generated from the descriptions below.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from raylane.errors import ConfigError
from raylane.training.config import layout
from raylane.training.config.load import make_config, read_document
from raylane.training.config.policy import NaturalInt, PositiveFloat, PositiveInt, Section
from raylane.training.config.schema import LoopConfig, TrainingConfig

_log = logging.getLogger(__name__)


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, (str, Path, dict)) else value


class RewardConfig(Section):
    """One reward function."""

    function: str = Field(min_length=1)
    """module:function of Python: reward(answer: str, row: dict) -> float, where row is the line of the data file."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of its values in the sum."""


class GrpoConfig(LoopConfig):
    """The loop: how many prompts and samples a step has, how old weights may be, and the loss."""

    max_num_steps: PositiveInt
    """Number of optimizer steps."""
    prompts_per_step: PositiveInt = 64
    """Number of prompts in a step."""
    samples_per_prompt: Annotated[int, Field(ge=2)] = 8
    """Number of answers to each prompt, whose rewards are compared with each other."""
    mode: Literal["sync", "one_step", "async"] = "sync"
    """sync: answers are sampled with the newest weights, so engines and trainer take turns. one_step: with the weights
    of the step before, while that step runs. async: the engines go on with the newest weights that there are, at most
    max_lag steps ahead of the trainer."""
    max_lag: PositiveInt = 4
    """Largest number of steps between the weights that sampled and those that are trained, with mode=async."""
    rewards: Annotated[tuple[str | RewardConfig, ...], BeforeValidator(_one_or_many), Field(min_length=1)]
    """Reward functions: module:function, or a list of these and of {function, weight}. Their weighted sum is the
    reward of an answer."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """Value that is subtracted from the rewards of a prompt: their mean, or for each the mean of the others."""
    scale_advantages: Literal["none", "std"] = "none"
    """std divides the advantages of a prompt by the standard deviation of its rewards."""
    clip_low: PositiveFloat = 0.2
    """The ratio of probabilities is clipped at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The ratio of probabilities is clipped at 1 + clip_high."""
    ratio: Literal["token", "sequence"] = "token"
    """Ratio of the probabilities of each token, or its geometric mean over the answer (GSPO)."""
    average: Literal["token", "sequence"] = "token"
    """token: all tokens of a step weigh the same; sequence: all answers do."""
    importance: Literal["clip", "truncate"] = "clip"
    """clip: the clipped ratio of PPO. truncate: tokens are weighted by the ratio, at most importance_cap, without a
    gradient through it."""
    importance_cap: PositiveFloat = 2.0
    """Largest weight of a token with importance=truncate."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Factor of the divergence from the model that the run began with, which then stays in memory; 0: none."""
    val_period: NaturalInt = 0
    """Number of steps between two validations; 0 means none during training."""
    val_at_start: bool = True
    """Validate before the first step."""
    val_at_end: bool = True
    """Validate after the last step."""
    shown_answers: NaturalInt = 10
    """Number of held-out prompts whose answers are kept at every validation."""

    @property
    def lag(self) -> int:
        """Largest number of steps between the weights that sampled and those that are trained."""
        # The only difference between the modes: see `schedule`.
        return {"sync": 0, "one_step": 1, "async": self.max_lag}[self.mode]

    @property
    def named_rewards(self) -> list[tuple[str, float]]:
        """Reward functions and their weights."""
        return [(one, 1.0) if isinstance(one, str) else (one.function, one.weight) for one in self.rewards]


class RolloutConfig(Section):
    """The engines that sample answers."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """transformers: the model of transformers with a key-value cache. vllm: vLLM, which has to be installed."""
    engines: PositiveInt = 1
    """Number of rollout actors."""
    max_new_tokens: PositiveInt = 32
    """Largest number of tokens of an answer."""
    temperature: PositiveFloat = 1.0
    """Temperature of sampling."""
    cpus: PositiveInt = 1
    """Logical CPUs that each engine requests from Ray, and the number of its torch threads."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs that each engine requests from Ray."""
    vllm_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of vLLM's LLM, for example {tensor_parallel_size: 2, gpu_memory_utilization: 0.5}."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the engines' processes, for example {VLLM_CPU_KVCACHE_SPACE: "4"}."""
    queue_bytes: PositiveInt = 1 << 30
    """Largest size of the answers that wait for the trainer, in bytes of shared memory."""
    timeout_s: PositiveFloat = 600.0
    """Maximum time in seconds that an engine waits for weights, or for room in the queue, and in which all engines must
    have started."""
    max_restarts: NaturalInt = 10
    """Number of rollout actors that may die during a run; each is replaced."""
    kill_after_step: PositiveInt | None = None
    """Kill a rollout actor after this step, in the middle of its work, to show that the run goes on; null: none."""


class PromptsConfig(Section):
    """The prompts: JSON Lines. Paths start at the working directory."""

    train: str = Field(min_length=1)
    """Path of a JSONL file. A line has `prompt` (text, or OpenAI-style messages) and all that rewards need."""
    validation: str | None = None
    """Path of a JSONL file of held-out prompts; null means none."""
    prompt_key: str = "prompt"
    """Key of the prompt in each line."""
    val_prompts: NaturalInt = 500
    """Number of held-out prompts in a validation, from the first one on; 0 means all."""
    shuffle: bool = True
    """Use the prompts in a new order in each epoch; the order depends on grpo.seed and the epoch."""
    cache_dir: str = "runs/cache"
    """Folder of models that were fetched from a URL."""


class GrpoRunConfig(TrainingConfig):
    """The complete configuration of a GRPO run."""

    loop_name: ClassVar[str] = "grpo"
    order: ClassVar[tuple[str, ...]] = ("grpo", "rollout", "policy", "data", "checkpointing", "logger", "cluster")
    """Order of the sections on the page of the reference."""

    grpo: GrpoConfig
    """Loop and loss."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Engines."""
    data: PromptsConfig
    """Prompts."""

    @property
    def loop(self) -> LoopConfig:
        """Settings of the training loop."""
        return self.grpo

    @model_validator(mode="after")
    def _weights_have_a_name(self) -> GrpoRunConfig:
        # Engines read the weights by their name; every step publishes.
        # Set here and not by the trainer, so that every process that reads this configuration finds the same name.
        published = self.policy.publish_weights
        if published.name is None:
            update = {"publish_weights": published.model_copy(update={"name": "policy"})}
            policy = self.policy.model_copy(update=update)
            object.__setattr__(self, "policy", policy)
        return self


def load_config(path: str | Path, override_words: Sequence[str] = ()) -> GrpoRunConfig:
    """Return the configuration of a YAML file with overrides applied, fully checked. ConfigError as in fine-tuning."""
    config = make_config(read_document(path, GrpoRunConfig, override_words), GrpoRunConfig, source=str(path))
    check_config(config)
    return config


def check_config(config: GrpoRunConfig) -> None:
    """Raise ConfigError for a configuration that cannot be used, or with a key that would change nothing."""
    if problems := [*layout.layout_problems(config), *_problems(config), *_unused(config)]:
        raise ConfigError("; ".join(problems), problems=problems)


_PACKS = "answers are not packed"
_FIXED = "micro-batches have a fixed number of rows"
_NO_WARM_UP = "it has no warm-up step"
_ONE_STEP = "the answers of a step depend on the step before"
UNUSED_KEYS = {
    "policy.make_sequence_length_divisible_by": _FIXED,
    "policy.sequence_packing.algorithm": _PACKS,
    "policy.dynamic_batching.train_mb_tokens": _FIXED,
    "policy.dynamic_batching.sequence_length_round": _FIXED,
    "policy.compiled_graph.warmup_gbs": _NO_WARM_UP,
    "policy.compiled_graph.warmup_seq_len": _NO_WARM_UP,
    "policy.compiled_graph.overlap_communication": _ONE_STEP,
    "policy.publish_weights.every": "every step publishes",
    "policy.loss_chunk_tokens": "its loss needs the logits of all sampled tokens",
    "checkpointing.is_async": "checkpoints are written between two steps",
}
"""Keys of the shared sections that other kinds of training read and this one does not, and why."""


def _unused(config: GrpoRunConfig) -> Iterator[str]:
    for key, reason in UNUSED_KEYS.items():
        *parents, name = key.split(".")
        section: Any = config
        for parent in parents:
            section = getattr(section, parent)
        value = getattr(section, name)
        if value != type(section).model_fields[name].get_default(call_default_factory=True):
            yield f"{key}={value} has no effect in GRPO: {reason}. Leave it out"
    rows = config.grpo.prompts_per_step * config.grpo.samples_per_prompt
    if "train_global_batch_size" in config.policy.model_fields_set and config.policy.train_global_batch_size != rows:
        _log.warning(
            "policy.train_global_batch_size=%d has no effect in GRPO: a step has grpo.prompts_per_step x "
            "grpo.samples_per_prompt = %d rows. Leave it out, or set it to %d",
            config.policy.train_global_batch_size,
            rows,
            rows,
        )


_NO_DROPOUT = "GRPO computes without dropout, which would make the ratios of probabilities noise. Set it to 0"


def _problems(config: GrpoRunConfig) -> Iterator[str]:
    policy = config.policy
    if policy.model_name is None:
        yield "policy.model_name=null: GRPO begins with a model that can answer already. Name its Hugging Face folder"
    if policy.sequence_packing.enabled:
        yield "policy.sequence_packing.enabled=true: answers are not packed. Set it to false"
    if policy.dtensor_cfg.lora_cfg.enabled and policy.dtensor_cfg.lora_cfg.dropout:
        yield f"policy.dtensor_cfg.lora_cfg.dropout={policy.dtensor_cfg.lora_cfg.dropout}: {_NO_DROPOUT}"
    for key, value in policy.hf_config_overrides.items():
        if "dropout" in key and value:
            yield f"policy.hf_config_overrides.{key}={value}: {_NO_DROPOUT}"
    if policy.dynamic_batching.enabled:
        yield "policy.dynamic_batching.enabled=true: micro-batches of GRPO have a fixed number of rows. Set it to false"
    if config.rollout.max_new_tokens >= policy.max_total_sequence_length:
        yield (
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} leaves no room for a prompt in "
            f"policy.max_total_sequence_length={policy.max_total_sequence_length}. Lower it, or raise the length"
        )
    if config.rollout.vllm_kwargs and config.rollout.engine != "vllm":
        yield (
            f"rollout.vllm_kwargs={config.rollout.vllm_kwargs} has no effect with rollout.engine="
            f"{config.rollout.engine}. Set rollout.engine=vllm, or leave it out"
        )
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        yield (
            "rollout.engine=vllm: vLLM is not installed. Install it beside raylane, or set rollout.engine=transformers"
        )
    if config.grpo.ratio == "sequence" and policy.dtensor_cfg.context_parallel_size > 1:
        yield (
            f"grpo.ratio=sequence with context_parallel_size={policy.dtensor_cfg.context_parallel_size}: the answer "
            "of a row lies on several workers. Use grpo.ratio=token"
        )
    readers = layout.readers(config)
    if config.grpo.prompts_per_step % readers:
        yield (
            f"grpo.prompts_per_step={config.grpo.prompts_per_step} does not divide by the {readers} workers that read "
            "different rows. Change one of them"
        )
