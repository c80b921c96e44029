"""Plugin of raylane that vLLM loads in each of its processes (group `vllm.general_plugins`).

It registers raylane's engine and trainer under the name `raylane`, and gives workers the method that attachments call.
"""

from __future__ import annotations

from typing import Any

WORKER_METHOD = "raylane_weights"
"""Name of the method of vLLM's workers."""
BACKEND = "raylane"
"""Name in vLLM's factories, for `WeightTransferConfig(backend=...)`."""
FOLDER = "raylane.weights.engines."


def register() -> None:
    """Register with vLLM. May be called several times in a process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
    from vllm.v1.worker.worker_base import WorkerBase

    # Engine and workers load plugins each for themselves, and may share a process.
    if not hasattr(WorkerBase, WORKER_METHOD):
        setattr(WorkerBase, WORKER_METHOD, _call)
        module = FOLDER + "vllm_transfer"
        WeightTransferEngineFactory.register_engine(BACKEND, module, "RaylaneTransferEngine")
        WeightTransferTrainerFactory.register_engine(BACKEND, module, "RaylaneTrainerEngine")


def _call(worker: Any, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Call a method of the reader of a worker; see `vllm_readers.answer`."""
    from raylane.weights.engines.vllm_readers import answer

    return answer(worker, method, options)
