"""Attachments of vLLM engines to LoRA adapters: each version is an adapter of its own, `policy-lora@7`.

A version gets a new name, so nothing has to pause: requests that are under way keep the version that they name. What
they may name is decided in this process, where requests are accepted, because an adapter that a worker cannot load in a
step ends the engine.
"""

from __future__ import annotations

import itertools
import time
import uuid
from dataclasses import fields
from typing import Any

from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from raylane.core.deadline import Deadline
from raylane.errors import WeightsError, WeightsVersionError
from raylane.weights.engines.attachment import EngineUpdate, WantedVersion
from raylane.weights.engines.vllm_adapters import SCHEME
from raylane.weights.engines.vllm_engine import VllmReaders
from raylane.weights.engines.vllm_errors import AdapterLostError
from raylane.weights.engines.vllm_worker import raise_error

GATE = "_raylane_gate"
"""Attribute of vLLM's output processor with the gate."""
FIRST_ID = 1 << 30
"""First of vLLM's ids of versions. Users count theirs from 1; vLLM keeps ids as int32."""
FEWEST_KEPT = 2
"""Versions that stay usable where vLLM caches one adapter: a caller may have got its request before an update."""
_KINDS: dict[str, tuple[type, ...]] = {
    "r": (int,),
    "lora_alpha": (int, float),
    "target_modules": (str, list, tuple, set),
}
"""Fields of PEFT's configuration that must be there, and their types."""


class AdapterGate:
    """Versions that requests may name, of all adapters of an engine. Refuses the others before the engine has them.

    It takes the place of `add_request` of the engine's output processor, through which each request passes right before
    it is counted as under way.
    """

    def __init__(self, processor: Any) -> None:
        self.usable: dict[str, str] = {}
        """Names of the versions, by path."""
        self.attached: set[str] = set()
        """Names of the weights that are attached."""
        self.ids = itertools.count(FIRST_ID)
        """vLLM's ids of versions."""
        self._processor = processor
        self._add_request = processor.add_request
        processor.add_request = self._check_and_add

    @classmethod
    def of_engine(cls, engine: Any) -> AdapterGate:
        """Return the gate of an `LLM` or `AsyncLLM`; made at the first call."""
        processor = getattr(engine, "llm_engine", engine).output_processor
        gate: AdapterGate | None = processor.__dict__.get(GATE)
        if gate is None:
            gate = processor.__dict__[GATE] = cls(processor)
        return gate

    def paths_under_way(self) -> set[str]:
        """Return the paths of adapters that unfinished requests name."""
        requests = [state.lora_request for state in self._processor.request_states.values()]
        return {request.lora_path for request in requests if request is not None}

    def _check_and_add(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        lora = request.lora_request
        if lora is not None and lora.lora_path.startswith(SCHEME) and lora.lora_path not in self.usable:
            raise AdapterLostError(
                f"the engine does not have {lora.lora_name}: it has {', '.join(self.usable.values()) or 'none'}. Use "
                "the attachment's request(), or attach with a larger keep"
            )
        return self._add_request(request, *args, **kwargs)


class LoraAttachment(VllmReaders):
    """A vLLM engine that reads LoRA adapters. Made by `weights.attach` with `lora`.

    Attributes:
        version: Number of the newest version in the engine; 0 before the first update.
    """

    def __init__(self, engine: Any, name: str, *, lora: Any, keep: int | None = None, **options: Any) -> None:
        """Let the workers register.

        Args:
            engine: `LLM` or `AsyncLLM` with enable_lora=True.
            name: Name of the weights; their tensors have the names of PEFT's files.
            lora: PEFT's configuration of the adapters, as a dict or a `LoraConfig`.
            keep: Number of versions that requests may name; None: vLLM's max_cpu_loras, and at least 2.
            options: `detached` and `timeout` of `VllmReaders`.
        """
        lora_config = getattr(engine, "llm_engine", engine).vllm_config.lora_config
        if lora_config is None:
            raise WeightsError("this vLLM engine takes no adapters. Start it with enable_lora=True")
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        config = checked_config(lora, lora_config)
        self._keep = keep or max(FEWEST_KEPT, lora_config.max_cpu_loras)
        self._gate = AdapterGate.of_engine(engine)
        self._requests: dict[int, LoRARequest] = {}
        """Requests of the usable versions, by number, the oldest first."""
        self._needed: set[str] = set()
        """Paths that were needed at the last update. Kept for one more: vLLM's engine may compute a step of a request
        that has ended here."""
        # Part of each path: vLLM's prefix cache tells adapters by name and path, and a name may be dropped and
        # published again with the same numbers.
        self._mark = uuid.uuid4().hex[:8]
        if name in self._gate.attached:
            raise WeightsError(f"this engine is attached to {name!r} already. Close that attachment first")
        super().__init__(engine, name, reader=f"adapters of {name}", lora=config, **options)
        self._gate.attached.add(name)

    @property
    def usable_versions(self) -> tuple[int, ...]:
        """Numbers of the versions that requests may name, the oldest first."""
        return tuple(self._requests)

    def request(self, version: int | None = None) -> LoRARequest:
        """Return vLLM's request of a version, for `generate(..., lora_request=...)`; None: the newest one.

        Its `lora_name` has the version: `policy-lora@7`. AdapterLostError (a WeightsLostError) if the engine does not
        have the version; before the first update it has none.
        """
        number = self.version if version is None else version
        if number not in self._requests:
            known = ", ".join(map(str, self._requests)) or "none"
            raise AdapterLostError(
                f"the engine does not have version {number} of {self.name!r}: it has {known}. Update, or attach with a "
                "larger keep"
            )
        return self._requests[number]

    async def _take(self, wanted: WantedVersion, deadline: Deadline, began_s: float) -> EngineUpdate:
        # After each error the engine has the versions that it had.
        if wanted.exact and wanted.number < self.version:
            known = ", ".join(map(str, self._requests))
            raise WeightsVersionError(
                f"the engine has version {self.version} of {self.name!r}, and takes no earlier one such as "
                f"{wanted.number}. Requests may name those that it has: {known}"
            )
        life = self._pending_life
        number = await self._prepared_version(wanted, deadline)
        if number < self.version or (self._pending_life != life and number in self._requests):
            raise WeightsError(
                f"{self.name!r} was dropped: its versions have begun anew with {number}, and the engine has "
                f"{self.version}. Close this attachment, and attach again"
            )
        changed, loading_s = number != self.version, time.perf_counter()
        # The mark tells this attachment's versions from those of an earlier one under the same name.
        path = f"{SCHEME}{self.name}/{number}#{self._mark}"
        request = self._requests.get(number)
        request = request or LoRARequest(f"{self.name}@{number}", next(self._gate.ids), path)
        answers = await self._call_workers("exchange", {"request": _fields(request)})
        ended_s = time.perf_counter()
        if any(each.get("version") != number for each in answers):
            await self._forget_old()  # also the new one, where workers have loaded it
            raise_error(answers)
            raise WeightsError(f"the workers of vLLM have not all loaded {request.lora_name}. Update again")
        self.version, self._requests[number] = number, request
        self._gate.usable[request.lora_path] = request.lora_name
        await self._forget_old()
        nbytes = sum(each["nbytes"] for each in answers)
        return EngineUpdate(number, answers[0]["step"], changed, nbytes, ended_s - loading_s, ended_s - began_s)

    async def _forget_old(self) -> None:
        """Let no further request name old versions, and the workers forget those that none under way needs."""
        for number in list(itertools.islice(self._requests, max(0, len(self._requests) - self._keep))):
            del self._gate.usable[self._requests.pop(number).lora_path]
        needed = {request.lora_path for request in self._requests.values()} | self._own_paths_under_way()
        paths, self._needed = needed | self._needed, needed
        raise_error(await self._call_workers("keep", {"paths": sorted(paths)}))

    def _own_paths_under_way(self) -> set[str]:
        return {path for path in self._gate.paths_under_way() if path.endswith(self._mark)}

    async def close_async(self) -> None:
        """Leave. No further request may name a version. WeightsError while requests do."""
        in_use = self._own_paths_under_way()
        if in_use:
            raise WeightsError(f"requests under way use {len(in_use)} versions of {self.name!r}. Let them finish first")
        for request in self._requests.values():
            self._gate.usable.pop(request.lora_path, None)
        self._requests.clear()
        self._gate.attached.discard(self.name)
        await super().close_async()


def checked_config(lora: Any, lora_config: Any) -> dict[str, Any]:
    """Return the fields of PEFT's configuration that vLLM uses. TypeError or ValueError if it cannot be used.

    `lora_config` is vLLM's own configuration.
    """
    peft_config = lora.to_dict() if hasattr(lora, "to_dict") else lora
    if not isinstance(peft_config, dict):
        raise TypeError(f"lora must be PEFT's configuration as a dict, got {type(lora).__name__}")
    missing = [name for name in ("r", "lora_alpha", "target_modules") if peft_config.get(name) is None]
    if missing:
        raise ValueError(
            f"lora has no {', '.join(missing)}. Pass the configuration with which the adapters are trained"
        )
    for name, kinds in _KINDS.items():
        if not isinstance(peft_config[name], kinds) or isinstance(peft_config[name], bool):
            raise TypeError(f"lora[{name!r}] cannot be {peft_config[name]!r}")
    if peft_config["r"] < 1:
        raise ValueError(f"lora['r'] must be at least 1, got {peft_config['r']}")
    known = {each.name for each in fields(PEFTHelper) if not each.name.startswith("vllm_")}
    config = {name: value for name, value in peft_config.items() if name in known}
    if not isinstance(config["target_modules"], str):
        config["target_modules"] = sorted(config["target_modules"])
    try:
        PEFTHelper.from_dict(config).validate_legal(lora_config)
    except ValueError as error:
        raise ValueError(f"vLLM cannot use these adapters: {error}") from error
    return config


def _fields(request: LoRARequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in ("lora_name", "lora_int_id", "lora_path")}
