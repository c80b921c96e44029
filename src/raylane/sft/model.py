"""Model of a run: a Hugging Face class with the loss inside its forward, sharded by FSDP2 over a device mesh.

Called by `worker`. Knows nothing of Ray, data files or optimizers. B, T, V, H as in `loss`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from raylane.errors import CheckpointError, ConfigError
from raylane.sft import lora
from raylane.sft.adapter_files import read_adapter
from raylane.sft.gradients import GradientSum
from raylane.sft.layers import apply_checkpointing, compile_layers
from raylane.sft.loss import CrossEntropy, LossFunction
from raylane.sft.model_config import attention_implementation
from raylane.sft.parallel import keeps_gathered, shards_parameters
from raylane.workers.batch import BatchDict

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from raylane.sft.config import PolicyConfig

__all__ = ["SupervisedModel", "build_model", "fsdp", "release_gathered"]


class SupervisedModel(nn.Module):
    """Causal language model whose forward returns the loss.

    FSDP2 gathers the embedding, the last norm and the head only during the forward of the module that it was applied to
    last. Code outside that forward would see only a shard of the head, so the loss is computed inside this wrapper.
    """

    def __init__(self, causal_lm: Any) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.gradient_sum: GradientSum | None = None
        """Sum of the gradients over all workers, if every worker holds the whole model; None with FSDP2."""
        self.keeps_gathered = False
        """True if FSDP2 keeps the weights gathered until the last backward pass of a step."""

    def forward(self, batch: BatchDict, loss_fn: LossFunction | None, *, hidden_only: bool = False) -> Tensor:
        """Return the summed loss of `input_ids`, `position_ids` and `labels`, int64 [B, T].

        Without `loss_fn` the result is the logits [B, T, V]; with `hidden_only`, the hidden states [B, T, H] before the
        output head.

        No attention mask is passed. transformers then separates documents where `position_ids` restart
        (masking_utils.find_packed_sequence_indices, 5.23), while any mask, even one of only ones, would connect them.
        """
        if hidden_only:
            return self.hidden(batch)
        if isinstance(loss_fn, CrossEntropy):
            return loss_fn.from_hidden(self.hidden(batch), batch["labels"], self.causal_lm.get_output_embeddings())
        logits: Tensor = self.causal_lm(**_inputs(batch)).logits
        return logits if loss_fn is None else loss_fn(logits.float(), batch)

    def hidden(self, batch: BatchDict) -> Tensor:
        """Return the hidden states [B, T, H] before the output head. Call it only within forward."""
        hidden: Tensor = self.causal_lm.base_model(**_inputs(batch)).last_hidden_state
        return hidden


def _inputs(batch: BatchDict) -> dict[str, Any]:
    # With a key-value cache transformers does not look for restarting positions, and documents would be connected.
    return {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}


def build_model(
    hf_config: Any, policy: PolicyConfig, mesh: DeviceMesh, device: torch.device, seed: int
) -> SupervisedModel:
    """Return the sharded model with its initial weights, float32 masters, in training mode. Collective.

    Random weights depend on `seed` alone, not on the mesh: every worker creates all of them and keeps its shard.
    Weights from `policy.model_name` are read shard by shard; no process holds the whole model. Raises CheckpointError
    if the folder's safetensors do not fit, ConfigError if this model cannot be trained with raylane.
    """
    if policy.model_name is None:
        torch.manual_seed(seed)
        model = SupervisedModel(_causal_lm(hf_config, attention_implementation(policy)))
        _prepare(model, policy)
        _shard(model, policy, mesh)
        _finish(model, policy, device, seed)
        return model
    # On the meta device no weights are allocated; after sharding each worker allocates its own shard only.
    with torch.device("meta"):
        model = SupervisedModel(_causal_lm(hf_config, attention_implementation(policy)))
    _prepare(model, policy)
    _shard(model, policy, mesh)
    model.to_empty(device=torch.device("cpu") if policy.dtensor_cfg.cpu_offload else device)
    if model.causal_lm.config.tie_word_embeddings:
        # `to_empty` gives each name a tensor of its own. Without the tie the head would be trained separately.
        model.causal_lm.get_output_embeddings().weight = model.causal_lm.get_input_embeddings().weight
    _restore_buffers(model, hf_config, device)
    read_weights(model.causal_lm, Path(policy.model_name))
    _finish(model, policy, device, seed)
    return model


def _causal_lm(hf_config: Any, attention: str) -> Any:
    """Return transformers' model of a configuration, with new weights in float32."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
        )
    except ImportError as error:
        raise ConfigError(
            f"policy.hf_config_overrides.attn_implementation={attention!r} cannot be used here: {error}"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"transformers has no causal language model for model_type {hf_config.model_type!r} with "
            f"attn_implementation={attention!r}: {error}. Change one of the two in policy.hf_config_overrides"
        ) from error


def _finish(model: SupervisedModel, policy: PolicyConfig, device: torch.device, seed: int) -> None:
    """Fill the LoRA adapters, if any, with their first values; compile the layers if configured."""
    lora.initialise(model.causal_lm, seed)
    settings = policy.dtensor_cfg.lora_cfg
    if settings.enabled and settings.adapter_path is not None:
        read_adapter(model.causal_lm, Path(settings.adapter_path))
    if policy.dtensor_cfg.compile_layers:
        compile_layers(model.causal_lm, device)


def _prepare(model: SupervisedModel, policy: PolicyConfig) -> None:
    """Refuse models with state in buffers, add adapters and activation checkpointing, and enter training mode."""
    kept = [
        f"{name}.{key}"
        for name, module in model.causal_lm.named_modules()
        for key in dict(module.named_buffers(recurse=False))
        if key not in module._non_persistent_buffers_set
    ]
    if kept:
        raise ConfigError(
            f"{type(model.causal_lm).__name__} keeps state in buffers ({kept[0]} and {len(kept) - 1} more), which "
            "raylane neither reads nor saves. Use an architecture that can be trained: llama, qwen2, qwen3"
        )
    lora.adapt(model.causal_lm, policy.dtensor_cfg.lora_cfg)
    apply_checkpointing(model.causal_lm, policy.dtensor_cfg.activation_checkpointing)
    model.train()


def _shard(model: SupervisedModel, policy: PolicyConfig, mesh: DeviceMesh) -> None:
    """Apply FSDP2: one group per decoder layer, and one for the rest; float32 masters and float32 reduction.

    A model that `parallel.shards_parameters` leaves whole is not changed: its parameters stay plain tensors.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if not shards_parameters(policy, mesh.size(-1), num_parameters):
        trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        model.gradient_sum = GradientSum(sum(trained), len(trained), torch.device(mesh.device_type))
        return
    model.keeps_gathered = keeps_gathered(policy, num_parameters)
    half = policy.precision == "bfloat16"
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32)
    pin = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pin) if policy.dtensor_cfg.cpu_offload else OffloadPolicy()
    # FSDP2 wants the layers first: each call takes only parameters that belong to no group yet.
    for layer in model.causal_lm.get_decoder().layers:
        fully_shard(
            layer,
            mesh=mesh,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=not model.keeps_gathered,
        )
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)


def _restore_buffers(model: SupervisedModel, hf_config: Any, device: torch.device) -> None:
    """Create again the buffers that are not in checkpoints (rotary frequencies): `to_empty` leaves them undefined."""
    for name, module in model.named_modules():
        lost = [key for key in dict(module.named_buffers(recurse=False)) if key in module._non_persistent_buffers_set]
        if not lost:
            continue
        try:
            fresh = type(module)(config=hf_config)
        except TypeError as error:
            raise ConfigError(
                f"cannot create the buffers {lost} of {name} ({type(module).__name__}) again: {error}. Use an "
                "architecture that can be trained: llama, qwen2, qwen3"
            ) from error
        for key in lost:
            setattr(module, key, getattr(fresh, key).to(device))


def read_weights(causal_lm: Any, folder: Path) -> None:
    """Fill the parameters in place from the safetensors of a Hugging Face folder, converting dtypes. Collective."""
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} holds no .safetensors file, and other weight files are not read. Convert the model first",
            path=str(folder),
        )
    parameters: dict[str, Any] = lora.base_parameters(causal_lm)  # has a tied weight only once
    reader = HuggingFaceStorageReader(str(folder))
    try:
        found = reader.read_metadata().state_dict_metadata
    except Exception as error:  # safetensors' own error class and, for damaged headers, others
        raise CheckpointError(
            f"the .safetensors files of {folder} cannot be read: {error}. Copy or download the folder again",
            path=str(folder),
        ) from error
    stored = set(found)
    missing = sorted(set(parameters) - stored)
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(parameters)} weights of {type(causal_lm).__name__}, "
            f"e.g. {missing[:3]}; it holds e.g. {sorted(stored)[:3]}. Set policy.model_name to a folder of this model",
            path=str(folder),
        )
    _refuse_quantised({name: found[name] for name in parameters}, folder)
    try:
        load(parameters, storage_reader=reader)
    except CheckpointException as error:
        reason = "; ".join(sorted({str(failure[0]) for failure in error.failures.values()}))
        raise CheckpointError(f"the weights in {folder} do not fit this model: {reason}", path=str(folder)) from error


def _refuse_quantised(stored: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError for quantised weights: their numbers need scales, which are not read."""
    for name, one in stored.items():
        dtype = one.properties.dtype
        if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise CheckpointError(
                f"{folder} holds a quantised model ({name} is {dtype}). Use a model in bfloat16, float16 or float32",
                path=str(folder),
            )


def fsdp(model: SupervisedModel) -> FSDPModule | None:
    """Return the same object with the type that `fully_shard` gave it; None if every worker holds the whole model."""
    return cast("FSDPModule", model) if isinstance(model, FSDPModule) else None


def release_gathered(model: SupervisedModel) -> None:
    """Release the weights that FSDP2 gathered for a forward pass and that no backward pass released."""
    for module in model.modules():
        if isinstance(module, FSDPModule):  # `reshard` does not descend into the groups of the layers
            module.reshard()
