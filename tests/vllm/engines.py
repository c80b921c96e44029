"""Actors with real vLLM engines on a CPU, a trainer, and fresh engines to compare with."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path
from typing import Any

import ray
import torch

from raylane import weights

PROMPTS = ([1, 2, 3, 4, 5], [7, 8, 9], [11, 12, 13, 14])
TOKENS = 16
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
INSIDE = {"env_vars": {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}}
"""Runtime environment of an engine whose worker is in its own process."""
OUTSIDE = {"env_vars": {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
}
SMALL: dict[str, Any] = {
    "vocab_size": 500,  # not a multiple of 64: vLLM pads it
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def new_model(kind: str = "llama", **options: Any) -> Any:
    """Return a small model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | options))


def greedy_options(**more: Any) -> Any:
    """Return vLLM's options of greedy answers of a fixed length."""
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, "detokenize": False, "ignore_eos": True, **more})


def prompts() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]


def answers_of(engine: Any) -> list[list[int]]:
    """Return the greedy answers of an `LLM`."""
    outputs = engine.generate(prompts(), greedy_options(), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@ray.remote(runtime_env=INSIDE)
class FreshEngines:
    """A new vLLM for each folder."""

    def answers(self, folder: str) -> list[list[int]]:
        """Return the greedy answers of a vLLM that has loaded a folder."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        from vllm import LLM

        engine = LLM(model=folder, **OPTIONS)
        try:
            return answers_of(engine)
        finally:
            engine = None
            gc.collect()
            cleanup_dist_env_and_memory()


@ray.remote(runtime_env={"env_vars": ENVIRONMENT})
class Trainer:
    """Publishes a model that changes at random, and exports the folder of each version."""

    def __init__(self, folder: str, kind: str = "llama", *, digests: bool = False, **options: Any) -> None:
        self._folder, self._model, self._digests = Path(folder), new_model(kind, **options), digests
        self._publisher: weights.Publisher | None = None

    def export(self, version: int) -> str:
        """Write the present weights as a folder; return it."""
        folder = self._folder / f"version-{version}"
        self._model.save_pretrained(folder)
        return str(folder)

    def publish(self, *, export: bool = True, hold: bool = False) -> tuple[int, str]:
        """Change the weights and publish them; return the version and its folder."""
        if self._publisher is None:
            self._publisher = weights.Publisher("policy", self._model, keep=3, digests=self._digests)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        version = self._publisher.publish(0)
        if hold:
            self._publisher.hold(version)
        return version, self.export(version) if export else ""

    def change(self, version: int, name: str, other: str | None = None) -> None:
        """Change a bit of a tensor in the shared memory of a version, or exchange the halves with another tensor."""
        assert self._publisher is not None
        assert self._publisher._stored is not None
        rooms = self._publisher._stored.tensors
        (slot,) = (each.slot for each in self._publisher._slots.values() if set(each.slot.numbers()) == {version})
        parts = [slot.memory()[rooms[each].boxes[0].offset :] for each in (name, other or name)]
        if other is None:
            parts[0][0] ^= 1
        else:
            nbytes = rooms[name].boxes[0].box.elements * rooms[name].itemsize
            first, second = parts[0][:nbytes].clone(), parts[1][:nbytes].clone()
            parts[0][:nbytes], parts[1][:nbytes] = second, first


@ray.remote
class Engine:
    """An `LLM`; its workers are processes of their own unless `inside`."""

    def __init__(self, folder: str, **options: Any) -> None:
        from vllm import LLM

        self._engine = LLM(model=folder, **OPTIONS | options)

    def attach(self, initial: str = "allow", **options: Any) -> None:
        """Make the engine a reader."""
        self._attachment = weights.attach(self._engine, "policy", initial=initial, **options)

    def update(self, timeout: float = 60, version: int | None = None) -> weights.EngineUpdate:
        """Take the newest version, or this one."""
        update: weights.EngineUpdate = self._attachment.update(version=version, timeout=timeout)
        return update

    def answers(self) -> list[list[int]]:
        """Return the greedy answers."""
        return answers_of(self._engine)

    def join(self) -> None:
        """Join the fleet."""
        self._reader = weights.FleetReader([self._attachment])

    def idle(self, seconds: float) -> dict[str, int]:
        """Wait for a switch; return the versions."""
        return self._reader.idle(seconds)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the `LLM`."""
        return getattr(self._engine, method)(*args)

    def pid(self) -> int:
        """Return the process of this actor."""
        return os.getpid()


@ray.remote(max_concurrency=50, runtime_env={"env_vars": ENVIRONMENT})
class AsyncEngine:
    """An `AsyncLLM`, which answers many requests at once."""

    def __init__(self, folder: str, **options: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, **OPTIONS | options))
        self._number = 0
        self._load: list[asyncio.Task[None]] = []
        self.finished: list[Any] = []

    def attach(self, initial: str = "allow", **options: Any) -> None:
        """Make the engine a reader."""
        self._attachment = weights.attach(self._engine, "policy", initial=initial, **options)

    async def update(self, timeout: float = 60, version: int | None = None) -> weights.EngineUpdate:
        """Take the newest version, or this one."""
        update: weights.EngineUpdate = await self._attachment.update_async(version=version, timeout=timeout)
        return update

    async def answer(self, prompt: list[int], max_tokens: int = TOKENS) -> dict[str, Any]:
        """Return tokens, versions and reason of the end of one greedy answer."""
        self._number += 1
        last: Any = None
        options = greedy_options(max_tokens=max_tokens)
        async for output in self._engine.generate({"prompt_token_ids": list(prompt)}, options, str(self._number)):
            last = output.outputs[0]
        spans = [
            (0 if each.version == "default" else int(each.version), each.start, each.end)
            for each in last.weight_versions or ()
        ]
        return {"tokens": list(last.token_ids), "versions": spans, "reason": last.finish_reason}

    async def answers(self) -> list[list[int]]:
        """Return the greedy answers."""
        return [each["tokens"] for each in await asyncio.gather(*(self.answer(list(each)) for each in PROMPTS))]

    async def begin_load(self, requests: int) -> None:
        """Keep so many requests under way until `end_load`."""
        self._loading = True
        self._load = [asyncio.ensure_future(self._answer_on(number)) for number in range(requests)]

    async def _answer_on(self, number: int) -> None:
        while self._loading:
            self.finished.append(await self.answer([number + 20, 3, 4], 24))

    async def end_load(self) -> list[dict[str, Any]]:
        """Return the answers of the load."""
        self._loading = False
        await asyncio.gather(*self._load)
        return self.finished

    async def join(self) -> None:
        """Join the fleet."""
        self._reader = weights.FleetReader([self._attachment])

    def versions(self) -> dict[str, int]:
        """Return what the fleet serves here."""
        return self._reader.versions

    async def call(self, method: str, *args: Any) -> Any:
        """Call a coroutine method of the engine."""
        return await getattr(self._engine, method)(*args)

    def shut_down(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()
