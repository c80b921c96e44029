"""Construction of the model of a run, divided over the workers.

The order matters: keep the layers of a pipeline stage, choose the activations that layers keep for the backward pass,
divide matrices (tensor parallelism), shard with FSDP2, read the weights, compile. Called by `worker`; collective.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from raylane.errors import ConfigError
from raylane.training.config.model_types import DENSE
from raylane.training.config.policy import Checkpointing, PolicyConfig
from raylane.training.model import attention, lora
from raylane.training.model.hf_config import attention_implementation
from raylane.training.model.hf_reader import read_weights, warn_of_unused, weight_files
from raylane.training.model.initial import fill_random
from raylane.training.model.megatron import MegatronModel
from raylane.training.model.packed_layers import complete_layers
from raylane.training.model.pipeline import PipelinedModel
from raylane.training.model.supervised import RunModel, StageModel, SupervisedModel
from raylane.training.parallel import expert_parallel, tensor_parallel
from raylane.training.parallel.gradients import GradientSum
from raylane.training.parallel.mesh import WorkerMesh, keeps_gathered, shards_parameters
from raylane.training.parallel.stages import keep_stage, own_stages


def build_model(hf_config: Any, policy: PolicyConfig, mesh: WorkerMesh, device: torch.device, seed: int) -> RunModel:
    """Return the model, divided as `policy.dtensor_cfg` says, float32 masters, in training mode. Collective.

    No process holds the whole model, unless `mesh.shards_parameters` says so: weights from `policy.model_name` are
    read part by part, and random ones of `model_types.DENSE` are made one module at a time (`initial`); those of
    other models are made whole. Random weights depend on `seed` alone, not on the layout. Raises CheckpointError if the
    folder's safetensors do not fit, ConfigError if this model cannot be trained with raylane.
    """
    settings = policy.dtensor_cfg
    if mesh.dims.pp == 1:
        return _build(hf_config, policy, mesh, device, seed, None)
    # A worker with several stages holds a model for each of them, without layers in common.
    per_worker = settings.stages_per_worker
    count = mesh.dims.pp * per_worker
    numbers = own_stages(mesh.stage, mesh.dims.pp, per_worker)
    stages = [_build(hf_config, policy, mesh, device, seed, (number, count)) for number in numbers]
    of_pipeline = [stage for stage in stages if isinstance(stage, StageModel)]
    return PipelinedModel(of_pipeline, count, mesh, settings.pipeline_schedule, device)


def _build(
    hf_config: Any,
    policy: PolicyConfig,
    mesh: WorkerMesh,
    device: torch.device,
    seed: int,
    stage: tuple[int, int] | None,
) -> SupervisedModel:
    """Return the model, or stage (number, number of stages) of it. Collective over the workers of the same stage."""
    name, settings = policy.model_name, policy.dtensor_cfg
    # Other models may have rules for weights of inner modules (gpt2), so they are made whole, as transformers does.
    made_whole = name is None and hf_config.model_type not in DENSE
    torch.manual_seed(seed)
    # On the meta device no weights are allocated; after sharding each worker allocates its own shard only.
    with torch.device("cpu" if made_whole else "meta"):
        causal_lm = _causal_lm(hf_config, attention_implementation(policy))
    # On the whole model: patterns may choose layers of other stages, and files hold the adapters of all of them.
    lora.adapt(causal_lm, settings.lora_cfg)
    in_files = set(lora.adapter_names(causal_lm))
    files = {} if name is None else weight_files(Path(name))
    if name is not None and mesh.rank == 0 and (stage is None or stage[0] == 0):
        warn_of_unused(causal_lm, Path(name), files)
    if stage is not None:
        lora.check_stages(causal_lm, stage[1])
        keep_stage(causal_lm, *stage)
    model = SupervisedModel(causal_lm, mesh) if stage is None else StageModel(causal_lm, mesh, *stage)
    tied = hf_config.tie_word_embeddings and model.has_head
    _prepare(model, policy)
    if mesh.tp is not None:
        # With sequence parallelism layers get a part of the tokens, and transformers would make masks of that length.
        model.has_reference = tensor_parallel.apply(causal_lm, mesh.tp, settings.sequence_parallel)
        lora.divide_dropout(causal_lm, mesh.tp, settings.sequence_parallel)
        lora.freeze(causal_lm)  # dividing made new parameters, which all want gradients
    # FSDP2 would gather experts that have their place.
    placed = expert_parallel.apply(causal_lm, mesh.fsdp) if settings.expert_parallel_size > 1 else set()
    if not policy.megatron_cfg.enabled:
        _shard(model, policy, mesh, placed)
    if made_whole:
        if not settings.cpu_offload:
            model.to(device)
    else:
        model.to_empty(device=torch.device("cpu") if settings.cpu_offload else device)
        if tied:
            # `to_empty` gives each name a tensor of its own. Without the tie the head would be trained separately.
            causal_lm.get_output_embeddings().weight = causal_lm.get_input_embeddings().weight
        _restore_buffers(model, hf_config, device)
        if name is None:
            fill_random(causal_lm, seed)
        else:
            read_weights(causal_lm, Path(name), files)
    lora.initialise(causal_lm, seed)
    if settings.lora_cfg.enabled and settings.lora_cfg.adapter_path is not None:
        lora.read_adapter(causal_lm, Path(settings.lora_cfg.adapter_path), in_files)
    if settings.compile_layers:
        compile_layers(causal_lm, device)
    return MegatronModel(causal_lm, mesh, policy, device) if policy.megatron_cfg.enabled else model


def _causal_lm(hf_config: Any, implementation: str) -> Any:
    """Return transformers' model of a configuration, with new weights in float32."""
    from transformers import AutoModelForCausalLM

    attention.register()
    try:
        return AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, attn_implementation=implementation, trust_remote_code=False
        )
    except ImportError as error:
        raise ConfigError(
            f"policy.hf_config_overrides.attn_implementation={implementation!r} cannot be used here: {error}"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"transformers has no causal language model for model_type {hf_config.model_type!r} with "
            f"attn_implementation={implementation!r}: {error}. Change one of the two in policy.hf_config_overrides"
        ) from error


def _prepare(model: SupervisedModel, policy: PolicyConfig) -> None:
    """Complete layers, add activation checkpointing, and enter training mode."""
    causal_lm = model.causal_lm
    complete_layers(causal_lm.config.model_type, lambda: decoder_layers(causal_lm))
    apply_checkpointing(causal_lm, policy.dtensor_cfg.activation_checkpointing)
    model.train()


def _shard(model: SupervisedModel, policy: PolicyConfig, mesh: WorkerMesh, placed: set[nn.Parameter]) -> None:
    """Apply FSDP2: one group per decoder layer, and one for the rest; float32 masters and float32 reduction.

    Parameters that are `placed` on workers already are left as they are.
    A model that `mesh.shards_parameters` leaves whole is not changed: its parameters stay plain tensors.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters() if parameter not in placed)
    device_type = mesh.fsdp.device_type
    if not shards_parameters(policy, mesh.fsdp.size(-1), num_parameters):
        trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        model.gradient_sum = GradientSum(sum(trained), len(trained), torch.device(device_type))
        return
    model.keeps_gathered = keeps_gathered(policy, num_parameters)
    half = policy.precision == "bfloat16"
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32)
    pin = device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pin) if policy.dtensor_cfg.cpu_offload else OffloadPolicy()
    # FSDP2 wants the layers first: each call takes only parameters that belong to no group yet.
    for layer in decoder_layers(model.causal_lm):
        fully_shard(
            layer,
            mesh=mesh.fsdp,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=not model.keeps_gathered,
            ignored_params=placed,
        )
    # The batch is no input of the network alone: a loss function gets its tensors as the caller made them.
    outermost = dataclasses.replace(precision, cast_forward_inputs=False)
    fully_shard(model, mesh=mesh.fsdp, mp_policy=outermost, offload_policy=offload, ignored_params=placed)


def _restore_buffers(model: SupervisedModel, hf_config: Any, device: torch.device) -> None:
    """Create again the buffers that are not in checkpoints (rotary frequencies): `to_empty` leaves them undefined.

    Buffers that are in checkpoints get their values when those are read.
    """
    for name, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            setattr(module, key, buffer.to(device))  # beside the layers, also where their weights are offloaded
        lost = [key for key in dict(module.named_buffers(recurse=False)) if key in module._non_persistent_buffers_set]
        if not lost:
            continue
        if lost == ["embed_scale"]:  # Gemma's embedding, which cannot be made from the configuration alone
            module.embed_scale = torch.tensor(module.scalar_embed_scale, device=device)
            continue
        try:
            fresh = type(module)(config=hf_config)
        except TypeError as error:
            raise ConfigError(
                f"cannot create the buffers {lost} of {name} ({type(module).__name__}) again: {error}. Use an "
                "architecture that can be trained: llama, qwen2, qwen3, gemma, mistral"
            ) from error
        for key in lost:
            setattr(module, key, getattr(fresh, key).to(device))


# Results that "selective" keeps: they cost the most to compute again, and memory proportional to the row length only.
# Batched products (bmm) are not kept, because eager attention makes its T x T scores with them.
_KEPT = (
    "mm",
    "addmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def decoder_layers(causal_lm: Any) -> Any:
    """Return the decoder layers of a model; ConfigError for a class that has them elsewhere (Llama 4, GPT-2)."""
    layers = getattr(causal_lm.get_decoder(), "layers", None)
    if layers is None:
        raise ConfigError(
            f"{type(causal_lm).__name__} keeps its decoder layers where raylane does not look, so they can be "
            "neither sharded nor compiled. Use an architecture that can be trained: llama, qwen2, qwen3, gemma, mistral"
        )
    return layers


def apply_checkpointing(causal_lm: Any, choice: Checkpointing | Literal[False]) -> None:
    """Make the layers compute activations again in the backward pass, as `choice` says; False keeps all of them."""
    if choice is False:
        return
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if choice == "selective":
        operations = [getattr(torch.ops.aten, name).default for name in _KEPT]
        if importlib.util.find_spec("torch.nn.attention.varlen") is not None:  # raylane's attention on GPUs
            importlib.import_module("torch.nn.attention.varlen")
            operations.append(torch.ops.torch_attn._varlen_attn.default)
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, operations)
    # transformers 5.x renamed the method, and the old name warns if both exist.
    enable = getattr(causal_lm, "activation_checkpointing_enable", None) or causal_lm.gradient_checkpointing_enable
    enable(kwargs)
    if choice == "every_other_layer":
        for number, layer in enumerate(decoder_layers(causal_lm)):
            layer.gradient_checkpointing = number % 2 == 0


def compile_layers(causal_lm: Any, device: torch.device) -> None:
    """Compile the forward pass of each decoder layer with torch's inductor. Call it after sharding.

    Compilation itself happens in the first passes. ConfigError if no compiler is installed.
    """
    from transformers import AttentionInterface

    missing = None
    compilers = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        missing = "the package triton"
    elif not any(shutil.which(name) for name in compilers):
        missing = f"a C++ compiler ({' or '.join(compilers)})"
    if missing is not None:
        raise ConfigError(
            f"policy.dtensor_cfg.compile_layers=true needs {missing} on every worker. Install it, or set "
            "compile_layers to false",
            key="policy.dtensor_cfg.compile_layers",
        )
    # The plan of a micro-batch consists of numbers, for each of which the compiler would make new code.
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.attend))  # type: ignore[no-untyped-call]
    for layer in decoder_layers(causal_lm):
        # The bound method alone: FSDP2's hooks, which run around it, cannot be compiled, and names stay the same.
        layer.forward = torch.compile(layer.forward)
