"""The reader in a vLLM worker: brings versions into a model that vLLM has packed for its kernels.

vLLM loads tensors into parameters, and then makes what its kernels use of them: on CPUs it packs the weights of linear
layers and drops the parameters. So a version is loaded into new parameters of shadows of the layers, packed there with
vLLM's own methods while the model answers requests, and exchanged between two steps of the engine.

    loader's parameters (new memory)  --vLLM's own packing-->  shadow layer  ==exchange==>  layer
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection
from typing import Any

import ray
import torch
from torch.nn import Module, Parameter

from raylane import errors
from raylane.errors import WeightsError, WeightsLayoutError
from raylane.weights.layout.mapping import Mapping
from raylane.weights.memory.tensors import NamedTensors, new_memory_like
from raylane.weights.subscriber import Subscriber

NOT_EXCHANGED = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that are exchanged entry by entry, or not at all."""


class LoaderTensors(NamedTensors):
    """Tensors of a vLLM model as its loader sees them: without memory, in a second model that is never run."""

    keep_values = False

    def __init__(self, vllm_config: Any, model: Module) -> None:
        """Make the second model. WeightsError if versions cannot be brought into the model safely."""
        _check(vllm_config, model)
        self.model = model
        self.blank = _blank_model(vllm_config)
        super().__init__(self.blank)

    def new(self, names: Collection[str], take: Callable[[int], Any]) -> dict[str, torch.Tensor]:
        """Return new memory for tensors of the loader, on the device of the model."""
        tensors = self.distinct()
        device = next(self.model.parameters()).device
        return {name: new_memory_like(tensors[name], take, device) for name in names}

    def prepare(self, memory: dict[str, torch.Tensor]) -> list[tuple[Module, Module]]:
        """Return the layers of the model with shadows that have the new weights, as vLLM's kernels use them."""
        tied = {name: memory[first] for name, first in self.same.items() if first in memory}
        by_layer: dict[Module, tuple[Module, dict[str, torch.Tensor]]] = {}
        for name, tensor in {**memory, **tied}.items():  # each layer packs tied weights for itself
            path, _, key = name.rpartition(".")
            _, tensors = by_layer.setdefault(_layer(self.model, path), (self.blank.get_submodule(path), {}))
            tensors[key] = tensor
        return [(live, self._shadow(live, blank, tensors)) for live, (blank, tensors) in by_layer.items()]

    def _shadow(self, live: Module, blank: Module, tensors: dict[str, torch.Tensor]) -> Module:
        """Return a layer with new weights beside a living one; `blank` is that of the second model."""
        # Everything but weights is shared with the living layer, so a shadow takes no further memory.
        shadow = live.__class__.__new__(live.__class__)
        shadow.__dict__.update(live.__dict__)
        shadow._parameters, shadow._buffers = dict(live._parameters), dict(live._buffers)
        for key, tensor in tensors.items():
            if key in blank._buffers:
                shadow._buffers[key] = tensor
                continue
            known = blank._parameters[key]
            parameter = Parameter(tensor, requires_grad=False)
            parameter.__class__ = known.__class__  # type: ignore[assignment]
            parameter.__dict__.update(known.__dict__)
            shadow._parameters[key] = parameter
        if hasattr(getattr(live, "quant_method", None), "process_weights_after_loading"):
            method: Any = copy.copy(live.quant_method)  # it may keep what it makes of the weights
            shadow.quant_method = method
            with torch.no_grad():
                method.process_weights_after_loading(shadow)
        return shadow

    def exchange(self, prepared: list[tuple[Module, Module]]) -> None:
        """Give the layers of the model what their shadows have."""
        with torch.no_grad():
            for live, shadow in prepared:
                for own, new in ((live._parameters, shadow._parameters), (live._buffers, shadow._buffers)):
                    for key, tensor in new.items():
                        _exchange_tensor(own, key, tensor)
                # What vLLM has made of the weights: packed ones, and the functions that use them.
                for key, value in shadow.__dict__.items():
                    if key not in NOT_EXCHANGED and live.__dict__.get(key) is not value:
                        live.__dict__[key] = value


def _exchange_tensor(own: dict[str, Any], key: str, new: Any) -> None:
    present = own.get(key)
    if present is new or new is None or present is None or (present.shape, present.dtype) != (new.shape, new.dtype):
        own[key] = new
    elif present.is_cpu:
        # The parameter itself stays: other layers may have it too.
        present.data = new.data
    else:
        present.data.copy_(new)  # graphs of CUDA have the address


def _layer(model: Module, path: str) -> Module:
    """Return the layer of a model; that inside, where vLLM has wrapped it for adapters."""
    layer = model
    for part in filter(None, path.split(".")):
        layer = getattr(layer, "base_layer", layer)
        layer = layer.get_submodule(part)
    inner: Module = getattr(layer, "base_layer", layer)
    return inner


def _check(vllm_config: Any, model: Module) -> None:
    """Refuse models whose runtime state is more than their layers make of their own weights."""
    cause = None
    if vllm_config.quant_config is not None:
        cause = f"it is quantized ({vllm_config.model_config.quantization}). Start it without quantization"
    elif hasattr(model, "process_weights_after_loading"):
        cause = f"{type(model).__name__} computes state of its own from the weights after loading"
    elif any(hasattr(module, "kv_b_proj") and hasattr(module, "mla_attn") for module in model.modules()):
        cause = f"the attention of {type(model).__name__} keeps products of weights (MLA)"
    elif str(vllm_config.device_config.device_type) == "cpu" and int(vllm_config.compilation_config.mode or 0) > 0:
        cause = "its compiled code refers to packed weights. Start it with enforce_eager=True"
    if cause is not None:
        raise WeightsError(f"weights cannot be brought into this vLLM engine while it runs: {cause}")


def _blank_model(vllm_config: Any) -> Module:
    """Return a second model on the meta device, whose parameters are as vLLM's loader finds them."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    # Shallow copies: only what the layers write to while they are made must not be shared.
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}  # its layers register themselves there
    config.compilation_config.static_all_moe_layers = []
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"), set_current_vllm_config(config):
        model: Module = initialize_model(config)
    return model


def loading_subscriber(vllm_config: Any, model: Module, options: dict[str, Any]) -> Subscriber:
    """Return the subscriber of a worker's model. `options` as for `worker_subscriber`."""
    tensors = LoaderTensors(vllm_config, model)
    load: Any = tensors.blank.load_weights
    return worker_subscriber(tensors, Mapping.record(load), options)


def worker_subscriber(tensors: NamedTensors, mapping: Mapping, options: dict[str, Any]) -> Subscriber:
    """Return the subscriber of a worker. `options`: name, address, job, detached, timeout, and perhaps verify.

    A version is verified when the loader has written it into new memory, before that is packed for vLLM's kernels.
    """
    if not ray.is_initialized():  # the engine runs in a process of its own
        ray.init(address=options["address"], log_to_driver=False, configure_logging=False)
    return Subscriber(
        options["name"],
        tensors,
        apply="swap",
        mapping=mapping,
        verify=options.get("verify"),
        detached=options["detached"],
        job=options["job"],
        timeout=options["timeout"],
    )


class _Preparation:
    """Preparation of one version on a thread, after the one before: of this one the attachment waits for no more."""

    def __init__(self, subscriber: Subscriber, options: dict[str, Any], before: threading.Thread | None) -> None:
        self.version: int | None = None
        """Number of the version that is ready; None until then."""
        self.error: Exception | None = None

        def run() -> None:
            try:
                if before is not None:
                    before.join()
                number, exact, timeout = options["version"], options["exact"], options["timeout"]
                self.version = subscriber.prefetch(number, exact=exact, timeout=timeout)
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=run, name="raylane-weights-prepare", daemon=True)
        self.thread.start()


class WorkerReader:
    """Reader of a worker. Versions are prepared on a thread beside the engine's steps."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self._preparation: _Preparation | None = None
        self._step = 0
        """Step of the version in the model."""

    def prepare(self, options: dict[str, Any]) -> None:
        """Begin to bring a version from number `version` on to this worker, beside the engine's steps."""
        before = None if self._preparation is None else self._preparation.thread
        self._preparation = _Preparation(self._subscriber, options, before)

    def prepared(self, _: dict[str, Any]) -> dict[str, Any]:
        """Return the number of the version that is ready; None if it is not."""
        assert self._preparation is not None
        if self._preparation.error is not None:
            raise self._preparation.error
        pending = self._subscriber.pending
        return {"version": self._preparation.version, "life": None if pending is None else pending.life}

    def exchange(self, _: dict[str, Any]) -> dict[str, Any]:
        """Let the model use the version that is ready, and no later one. Called between two steps."""
        assert self._preparation is not None
        number = self._preparation.version
        if self._subscriber.pending is None:  # nothing was prepared, and an update would take what came since
            return {"version": number, "step": self._step, "changed": False, "nbytes": 0}
        update = self._subscriber.update(timeout=0)
        self._step = update.step
        return {"version": update.version, "step": update.step, "changed": update.changed, "nbytes": update.nbytes}

    def invalidate(self, _: dict[str, Any]) -> None:
        """Note that the model lost its weights: the next version is loaded, also if it is the same one."""
        self._subscriber.invalidate()

    def forget(self, _: dict[str, Any]) -> None:
        """Let go what was prepared and not exchanged."""
        self._subscriber.forget_prefetched()

    def close(self, _: dict[str, Any]) -> None:
        """Leave; the model keeps its weights."""
        self._subscriber.close()


def raise_error(answers: list[dict[str, Any]]) -> None:
    """Raise the first error in the answers of the workers, with its type if it is one of raylane's."""
    for rank, each in enumerate(answers):
        if "error" in each:
            kind = getattr(errors, each["error"], None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                raise kind(f"worker {rank}: {each['message']}")
            raise WeightsLayoutError(f"worker {rank} of vLLM: {each['error']}: {each['message']}")
