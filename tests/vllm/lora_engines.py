"""Actors with vLLM engines that take LoRA adapters, a trainer of adapters, and fresh engines to compare with."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from tests.vllm import engines

from raylane import weights

NAME = "policy-lora"
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"]}
OPTIONS: dict[str, Any] = {**engines.OPTIONS, "enable_lora": True, "max_lora_rank": 8}
SHAPES = {  # output and input of each layer of `engines.SMALL`
    "self_attn.q_proj": (128, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.up_proj": (256, 128),
}
IN_MEMORY = ("/dev/shm", "/proc", "/dev/null", "/dev/tty")


def new_adapters(*, rank: int = 4, module: str = "") -> dict[str, torch.Tensor]:
    """Return adapters with the names of PEFT's files; those of one more `module` too."""
    tensors = {}
    for layer in range(2):
        for path, (outputs, inputs) in {**SHAPES, **({module: (128, 128)} if module else {})}.items():
            name = f"base_model.model.model.layers.{layer}.{path}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, inputs)
            tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, rank)
    return tensors


@ray.remote(runtime_env={"env_vars": engines.ENVIRONMENT})
class AdapterTrainer:
    """Publishes adapters that change at random, and exports each version as PEFT does."""

    def __init__(self, folder: str, **options: Any) -> None:
        torch.manual_seed(1)
        self._folder, self._tensors = Path(folder), new_adapters(**options)
        self._publisher = weights.Publisher(NAME, self._tensors, keep=3)

    def publish(self) -> tuple[int, str]:
        """Change the adapters and publish them; return the version and its folder."""
        from safetensors.torch import save_file

        for tensor in self._tensors.values():
            tensor.copy_(torch.randn_like(tensor) * 0.3)
        version = self._publisher.publish(0)
        folder = self._folder / f"adapters-{version}"
        folder.mkdir()
        save_file(self._tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({**LORA, "peft_type": "LORA", "bias": "none"}))
        return version, str(folder)


@ray.remote(runtime_env=engines.INSIDE)
class FreshEngines:
    """A new vLLM for each folder of adapters."""

    def answers(self, model: str, folder: str) -> list[list[int]]:
        """Return the greedy answers of a vLLM that has loaded a model and adapters from folders."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
        from vllm.lora.request import LoRARequest

        from vllm import LLM

        engine = LLM(model=model, **OPTIONS)
        try:
            return tokens_of(engine, [LoRARequest("fresh", 1, folder)] * len(engines.PROMPTS))
        finally:
            engine = None
            gc.collect()
            cleanup_dist_env_and_memory()


def tokens_of(engine: Any, requests: list[Any]) -> list[list[int]]:
    """Return the greedy answers of an `LLM`, each prompt with an adapter (None: the base model)."""
    prompts = engines.prompts()
    outputs = engine.generate(prompts, engines.greedy_options(), lora_request=requests, use_tqdm=False)
    for output, request in zip(outputs, requests, strict=True):
        assert output.lora_request == request  # the answer has the name, and so the version
    return [list(output.outputs[0].token_ids) for output in outputs]


@ray.remote
class LoraEngine:
    """An `LLM` that reads adapters."""

    def __init__(self, folder: str, **options: Any) -> None:
        from vllm import LLM

        self._engine = LLM(model=folder, **OPTIONS | options)
        self._stored: dict[int, Any] = {}
        self._written: list[str] = []

    def attach(self, lora: Any = None, **options: Any) -> None:
        """Make the engine a reader."""
        self._attachment = weights.attach(self._engine, NAME, lora=lora or LORA, **options)

    def attach_weights(self) -> None:
        """Make the engine a reader of the weights of its model too."""
        self._weights = weights.attach(self._engine, "policy", initial="allow")

    def update(self, timeout: float = 60) -> weights.EngineUpdate:
        """Take the newest version of the adapters."""
        update: weights.EngineUpdate = self._attachment.update(timeout=timeout)
        self._stored[update.version] = self._attachment.request()
        return update

    def update_weights(self) -> weights.EngineUpdate:
        """Take the newest version of the model."""
        return self._weights.update()

    def names(self) -> tuple[list[str], tuple[int, ...]]:
        """Return the names of all requests so far, and the versions that may be used."""
        return [request.lora_name for request in self._stored.values()], self._attachment.usable_versions

    def answers(self, *versions: int | None, old: bool = False) -> list[list[int]]:
        """Return the greedy answers with a version for each prompt (0: the base model); `old`: of a stored request."""

        def request_of(version: int | None) -> Any:
            if version == 0:
                return None
            return self._stored[version] if old and version else self._attachment.request(version)

        chosen = versions if len(versions) > 1 else versions * len(engines.PROMPTS)
        return tokens_of(self._engine, [request_of(version) for version in chosen])

    def loaded(self) -> int:
        """Return how many adapters vLLM has in its own cache."""
        return len(self._engine.llm_engine.list_loras())

    def watch_files(self) -> None:
        """Note from now on which files this process opens to write."""

        def note(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self._written.append(str(arguments[0]))

        sys.addaudithook(note)

    def written(self) -> list[str]:
        """Return the files on disks that were opened to write."""
        return [path for path in self._written if not path.startswith(IN_MEMORY)]

    def close(self) -> None:
        """End the attachment."""
        self._attachment.close()


@ray.remote(max_concurrency=50, runtime_env={"env_vars": engines.ENVIRONMENT})
class AsyncLoraEngine:
    """An `AsyncLLM` that reads adapters."""

    def __init__(self, folder: str, **options: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, **OPTIONS | options))
        self._stored: dict[int, Any] = {}
        self._begun: dict[str, asyncio.Event] = {}

    def attach(self, **options: Any) -> None:
        """Make the engine a reader."""
        self._attachment = weights.attach(self._engine, NAME, lora=LORA, **options)

    async def update(self) -> weights.EngineUpdate:
        """Take the newest version of the adapters."""
        update: weights.EngineUpdate = await self._attachment.update_async(timeout=60)
        self._stored[update.version] = self._attachment.request()
        return update

    async def answer(self, key: str, prompt: list[int], version: int, max_tokens: int) -> list[int]:
        """Return one greedy answer with a version, which may be an old one."""
        options = engines.greedy_options(max_tokens=max_tokens)
        request = self._stored[version] if version else None
        last: Any = None
        async for output in self._engine.generate({"prompt_token_ids": prompt}, options, key, lora_request=request):
            self._begun.setdefault(key, asyncio.Event()).set()
            last = output.outputs[0]
        return list(last.token_ids)

    async def begun(self, key: str) -> None:
        """Wait until an answer has its first token."""
        await asyncio.wait_for(self._begun.setdefault(key, asyncio.Event()).wait(), 60)

    async def close(self) -> None:
        """End the attachment."""
        await self._attachment.close_async()

    def shut_down(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()
