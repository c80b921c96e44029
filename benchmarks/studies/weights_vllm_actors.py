"""Actors of `benchmarks.studies.weights_vllm`: a trainer, vLLM engines under load, backends of vLLM."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import psutil
import ray
import torch
from tests.vllm import engines

from benchmarks import measure
from raylane import weights

ATTACHED, FACTORY = "bench-attached", "bench-factory"
"""Names of the weights of the two ways of raylane."""
ENVIRONMENT = {
    **engines.ENVIRONMENT,
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # lets vLLM send tensors with a call of its workers
}
OPTIONS: dict[str, Any] = {
    **engines.OPTIONS,
    "distributed_executor_backend": "uni",  # the worker lives in the process of the engine core
}
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 8000}
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 500}
BACKENDS = ("nccl", "ipc", "sparse_nccl", "sharded_rdt", "nccl_m2n", "modelexpress")
BACKEND_LIMIT_S = 20.0
"""Time after which the start of a backend counts as one that never ends."""


class Times(NamedTuple):
    """Seconds of one update of an engine."""

    pause_s: float
    seconds: float


def new_model(sizes: dict[str, int]) -> Any:
    """Return a model of the Llama family with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.05}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=512))


def reload_pickled(worker: Any, data: bytes) -> None:
    """Load tensors that were sent with a call; vLLM does not bring them over as tensors."""
    worker.reload_weights(weights_iterator=[(name, torch.from_numpy(array)) for name, array in pickle.loads(data)])


class Trainer:
    """A trainer of one rank, which offers its weights in every way that is measured."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.model = new_model(sizes)
        self.publisher: Any = None
        self.sender: Any = None

    def nbytes(self) -> int:
        """Return the size of the weights."""
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def train(self) -> None:
        """Change all weights: rows trade places."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.roll(1, 0))

    def write(self, folder: str) -> float:
        """Write the weights as a folder; return the seconds."""
        began_s = time.perf_counter()
        self.model.save_pretrained(folder)
        return time.perf_counter() - began_s

    def publish(self) -> float:
        """Publish for attached engines; return the seconds."""
        if self.publisher is None:
            self.publisher = weights.Publisher(ATTACHED, self.model, keep=3)
        began_s = time.perf_counter()
        self.publisher.publish(0)
        return time.perf_counter() - began_s

    def connect(self, engine: Any) -> None:
        """Let an engine become a receiver, through vLLM's own interface."""
        from vllm.distributed.weight_transfer import (
            ModuleSource,
            RayVLLMWeightSyncClient,
            WeightTransferTrainerFactory,
        )

        from raylane.weights.engines import vllm_plugin
        from raylane.weights.engines.vllm_transfer import RaylaneTrainerInitInfo

        vllm_plugin.register()
        self.sender = WeightTransferTrainerFactory.trainer_init(
            RaylaneTrainerInitInfo(rank=0, name=FACTORY),
            client=RayVLLMWeightSyncClient(engine),
            source=ModuleSource(self.model),
        )

    def send(self) -> float:
        """Send through vLLM's own interface; return the seconds until the engine has resumed."""
        began_s = time.perf_counter()
        self.sender.send_weights()
        return time.perf_counter() - began_s

    def tensors(self) -> list[tuple[str, np.ndarray[Any, Any]]]:
        """Return the weights for a call of vLLM's workers."""
        return [(name, parameter.detach().numpy()) for name, parameter in self.model.named_parameters()]


class Engine:
    """An `AsyncLLM` with a load of requests. Its workers are a process of their own."""

    def __init__(self, folder: str, requests: int, backend: str | None = None) -> None:
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        options = {} if backend is None else {"weight_transfer_config": WeightTransferConfig(backend=backend)}
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=folder, **OPTIONS, **options))
        self.requests, self.number, self.tokens = requests, 0, 0
        self.load: list[asyncio.Task[None]] = []
        self.attachment: Any = None
        self.paused_s = self.pause_s = 0.0
        self.bare: tuple[Any, Any] | None = None

    def pids(self) -> list[int]:
        """Return the processes of this engine."""
        return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]

    # Requests

    async def answer(self, prompt: list[int], max_tokens: int = 16) -> tuple[list[int], str]:
        """Return the tokens of a greedy answer, and the version of the first one."""
        from vllm import SamplingParams

        options = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)
        self.number += 1
        last: Any = None
        seen = 0
        async for output in self.engine.generate({"prompt_token_ids": prompt}, options, str(self.number)):
            last = output.outputs[0]
            self.tokens += len(last.token_ids) - seen
            seen = len(last.token_ids)
        spans = last.weight_versions or ()
        return list(last.token_ids), str(spans[0].version) if spans else ""

    async def answers(self) -> list[list[int]]:
        """Return greedy answers."""
        return [tokens for tokens, _ in await asyncio.gather(*(self.answer(list(each)) for each in engines.PROMPTS))]

    async def begin_load(self) -> None:
        """Keep requests under way; return when each has got some tokens."""

        async def answer_on(number: int) -> None:
            while True:
                await self.answer([number + 20, 3, 4], 128)

        self.load = [asyncio.ensure_future(answer_on(number)) for number in range(self.requests)]
        began = self.tokens
        while self.tokens < began + 4 * self.requests:
            for task in self.load:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)

    async def end_load(self) -> None:
        """End all requests."""
        for task in self.load:
            task.cancel()
        await asyncio.gather(*self.load, return_exceptions=True)

    def count(self) -> tuple[float, int]:
        """Return the time and the number of tokens so far."""
        return time.perf_counter(), self.tokens

    # Updates

    async def attach(self) -> None:
        """Make the engine a reader."""
        self.attachment = weights.attach(self.engine, ATTACHED, pause="keep")

    async def update(self) -> Times:
        """Take the newest version through the attachment."""
        update = await self.attachment.update_async(timeout=120)
        return Times(update.pause_s, update.seconds)

    async def reload(self, folder: str) -> Times:
        """Load a folder, as vLLM offers it for updates."""
        return await self._reload("reload_weights", {"weights_path": folder})

    async def reload_tensors(self, tensors: list[tuple[str, Any]]) -> Times:
        """Load tensors that are sent with a call of the workers."""
        return await self._reload(reload_pickled, {"data": pickle.dumps(tensors, 5)})

    async def _reload(self, method: Any, options: dict[str, Any]) -> Times:
        began_s = time.perf_counter()
        await self.engine.pause_generation(mode="keep", clear_cache=True)
        try:
            await self.engine.collective_rpc(method, kwargs=options)
            await self.engine.update_weight_version(str(self.number))
        finally:
            await self.engine.resume_generation()
        seconds = time.perf_counter() - began_s
        return Times(seconds, seconds)

    # What vLLM's client calls

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Pass it on."""
        await self.engine.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        """Pause, and pass it on."""
        self.paused_s = time.perf_counter()
        await self.engine.pause_generation(mode="keep", clear_cache=True)
        await self.engine.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        """Pass it on."""
        await self.engine.update_weights(request)

    async def finish_weight_update(self) -> None:
        """Pass it on."""
        await self.engine.finish_weight_update()

    async def update_weight_version(self, version: str) -> None:
        """Note the version, and resume."""
        await self.engine.update_weight_version(version)
        await self.engine.resume_generation()
        self.pause_s = time.perf_counter() - self.paused_s

    def last_pause(self) -> float:
        """Return the pause of the last update by vLLM's client."""
        return self.pause_s

    # Other

    def memcpy(self, nbytes: int) -> float:
        """Return the seconds of one copy of so many bytes."""
        if self.bare is None:
            self.bare = np.zeros(nbytes, dtype=np.uint8), np.ones(nbytes, dtype=np.uint8)
            np.copyto(*self.bare)
        return measure.timed(lambda: np.copyto(*self.bare)) / 1e6  # type: ignore[misc]

    def shut_down(self) -> None:
        """End the engine's processes."""
        self.engine.shutdown()


@ray.remote(runtime_env={"env_vars": {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}})
class Backends:
    """A vLLM in this process, for each of whose backends it is asked what comes of it on a CPU."""

    def __init__(self, folder: str) -> None:
        from vllm import LLM

        self.engine = LLM(model=folder, **OPTIONS)

    def outcome(self, backend: str) -> str:
        """Return the error of a backend's engine in the worker, or that it starts."""
        worker = self.engine.llm_engine.model_executor.driver_worker
        worker = getattr(worker, "worker", worker)
        answers: list[str] = []

        def run() -> None:
            try:
                answers.append(start_backend(backend, worker))
            except BaseException as error:
                text = " ".join(str(error).split())
                answers.append(f"{type(error).__name__}: {text[:300]}")

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(BACKEND_LIMIT_S)
        return answers[0] if answers else f"no end within {BACKEND_LIMIT_S:g} s"


def start_backend(backend: str, worker: Any) -> str:
    """Start the worker's end of one of vLLM's backends, and let it receive where that needs no trainer."""
    from vllm.config import WeightTransferConfig
    from vllm.config import set_current_vllm_config as configured
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    model = worker.model_runner.get_model()
    config = WeightTransferConfig(backend=backend)
    with configured(worker.vllm_config):
        engine = WeightTransferEngineFactory.create_engine(config, worker.vllm_config, worker.device, model)
        two_ranks = {"master_address": "127.0.0.1", "master_port": 0, "rank_offset": 1, "world_size": 2}
        name, parameter = next(iter(model.named_parameters()))
        tensor = {"names": [name], "dtype_names": ["float32"], "shapes": [list(parameter.shape)]}
        if backend == "ipc":
            from torch.multiprocessing.reductions import reduce_tensor

            engine.init_transfer_engine(engine.parse_init_info({}))
            handle = reduce_tensor(torch.zeros(parameter.shape))  # type: ignore[no-untyped-call]
            handles = {"ipc_handles": [{"cpu": handle}]}
            engine.receive_weights(engine.parse_update_info(tensor | handles))
            return "receives"
        meshes = {"src_mesh_dims": [1, 1], "dst_mesh_dims": [1, 1], "src_placements": [None]}
        by_backend: dict[str, dict[str, Any]] = {
            "nccl": two_ranks,
            "sparse_nccl": two_ranks,
            "nccl_m2n": two_ranks | tensor | meshes,
            "sharded_rdt": {"trainer_actor_names": ["no trainer"], **tensor},
        }
        options = by_backend[backend]
        if "master_port" in options:
            options["master_port"] = _listen(options["master_address"])
        engine.init_transfer_engine(engine.parse_init_info(options))
        return "starts"


def _listen(address: str) -> int:
    """Open the trainer's end of a rendezvous of two on a thread; return its port."""
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.utils.network_utils import get_open_port

    port = int(get_open_port())
    arguments = {"host": address, "port": port, "rank": 0, "world_size": 2}
    threading.Thread(target=StatelessProcessGroup.create, kwargs=arguments, daemon=True).start()
    return port
