"""The reader of adapters in a vLLM worker, and the versions from which vLLM's LoRA manager loads.

vLLM loads an adapter with the first request that names it, and again after its cache has evicted it, from the folder in
the request. The paths of versions begin with SCHEME instead, and what they name lies in the memory of the worker:

    Subscriber --new memory--> AdapterStore --a copy for each load--> vLLM's cache --> slots of the layers
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from raylane.core.listing import listed
from raylane.errors import WeightsError, WeightsLayoutError
from raylane.weights.engines.vllm_worker import WorkerReader, worker_subscriber
from raylane.weights.layout.mapping import Mapping
from raylane.weights.memory.tensors import PublishedTensors

SCHEME = "raylane://"
"""Beginning of the path in a request for a version."""
STORE = "_raylane_store"
"""Attribute of vLLM's LoRA manager with the store."""


class StoredAdapter(NamedTuple):
    """One version of adapters, with PEFT's names, and their configuration."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]


class AdapterStore:
    """Versions of adapters of all names in a worker, by path.

    It takes the place of `_load_adapter` of one LoRA manager. vLLM offers no other way to load from memory: its public
    `add_lora` loads from a folder too, and what is put into its cache directly would be lost with an eviction.
    """

    def __init__(self, manager: Any) -> None:
        self.adapters: dict[str, StoredAdapter] = {}
        self._manager = manager
        self._load_folder = manager._load_adapter
        manager._load_adapter = self._load

    @classmethod
    def of_worker(cls, worker: Any) -> AdapterStore:
        """Return the store of a vLLM worker; made at the first call. WeightsError without LoRA."""
        manager = getattr(worker.model_runner, "lora_manager", None)
        if manager is None:
            raise WeightsError("this worker has no adapters. Start vLLM with enable_lora=True")
        store: AdapterStore | None = manager.__dict__.get(STORE)
        if store is None:
            store = manager.__dict__[STORE] = cls(manager)
        return store

    def _load(self, request: Any) -> Any:
        """Return vLLM's model of the adapters of a request."""
        if not request.lora_path.startswith(SCHEME):
            return self._load_folder(request)
        stored = self.adapters.get(request.lora_path)
        if stored is None:  # the attachment refuses such requests before they come here
            raise WeightsError(f"{request.lora_name} is not in this worker. Ask the attachment for its request")
        manager, adapter_manager = self._manager, self._manager._adapter_manager
        if adapter_manager.moe_ep_load_spec is not None:
            raise WeightsError("adapters of experts cannot be loaded with expert parallelism. Start vLLM without it")
        helper = PEFTHelper.from_dict(
            {**stored.config, "vllm_max_position_embeddings": manager.max_position_embeddings}
        )
        helper.validate_legal(manager.lora_config)
        mapper = getattr(adapter_manager.model, "hf_to_vllm_mapper", None)
        lora = manager._lora_model_cls.from_lora_tensors(
            request.lora_int_id,
            {name: tensor.clone() for name, tensor in stored.tensors.items()},  # vLLM scales them in place
            helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
            skip_prefixes=getattr(adapter_manager.model, "lora_skip_prefixes", None),
        )
        _check_layers(lora.loras, adapter_manager)
        lora.is_3d_lora_weight = request.is_3d_lora_weight
        adapter_manager._validate_modules_to_save(lora)
        adapter_manager._validate_token_classification_lora(lora)
        return lora


def _check_layers(layers: dict[str, Any], adapter_manager: Any) -> None:
    """Raise WeightsLayoutError for layers that vLLM would leave out or scale wrongly."""
    packed = adapter_manager.packed_modules_mapping
    known = {"experts"}.intersection(adapter_manager.supported_lora_modules)
    known = known.union(*(packed.get(module) or (module,) for module in adapter_manager.supported_lora_modules))
    unknown = [name for name in layers if not known.intersection((name.rpartition(".")[2], _name_of_experts(name)))]
    if unknown:
        raise WeightsLayoutError(
            f"the model takes no adapters for {listed(unknown)}: it takes them for {listed(sorted(known))}. Publish "
            "adapters of these modules only"
        )
    for name, layer in layers.items():
        if layer.lora_a is None or layer.lora_b is None:
            raise WeightsLayoutError(f"of the adapter of {name!r} only one of lora_A and lora_B is published")
        if not _name_of_experts(name) and layer.lora_a.shape[0] != layer.rank:
            raise WeightsLayoutError(
                f"the adapter of {name!r} has the rank {layer.lora_a.shape[0]}, and the configuration says "
                f"{layer.rank}. Attach with the trainer's r and rank_pattern"
            )


def _name_of_experts(name: str) -> str:
    """Return the part of a layer's name from `experts` on; empty if it has none."""
    _, separator, rest = name.partition(".experts")
    return separator[1:] + rest


class AdapterReader(WorkerReader):
    """Reader of adapters in a worker. Versions are brought here on a thread beside the engine's steps."""

    def __init__(self, worker: Any, options: dict[str, Any]) -> None:
        """Register. `options`: those of `worker_subscriber`, and `lora` with PEFT's configuration."""
        self._worker, self._config = worker, options["lora"]
        self._store = AdapterStore.of_worker(worker)
        self._tensors = PublishedTensors()
        self._ids: dict[str, int] = {}
        """vLLM's ids of the versions in the store, by path."""
        super().__init__(worker_subscriber(self._tensors, Mapping(), options))

    def exchange(self, options: dict[str, Any]) -> dict[str, Any]:
        """Let vLLM load the version that is ready. Called between two steps.

        `options` has the fields of the LoRARequest. vLLM loads it here, and not with the first request, because an
        error of a request's step would end the engine.
        """
        result, request = super().exchange(options), LoRARequest(**options["request"])
        is_new = request.lora_path not in self._ids
        self._store.adapters[request.lora_path] = StoredAdapter(self._tensors.version, self._config)
        self._ids[request.lora_path] = request.lora_int_id
        try:
            self._worker.add_lora(request)
        except Exception:
            if is_new:
                self._forget(request.lora_path)
            raise
        return result

    def keep(self, options: dict[str, Any]) -> None:
        """Forget all versions but those of the paths in `options`."""
        for path in self._ids.keys() - options["paths"]:
            self._forget(path)

    def close(self, options: dict[str, Any]) -> None:
        """Leave, and forget all versions."""
        self.keep({"paths": []})
        super().close(options)

    def _forget(self, path: str) -> None:
        del self._store.adapters[path]
        self._worker.remove_lora(self._ids.pop(path))
