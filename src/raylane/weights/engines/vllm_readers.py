"""Calls of the readers in a vLLM worker, which are made by attachments."""

from __future__ import annotations

from typing import Any

from raylane.errors import WeightsError
from raylane.weights.engines.vllm_adapters import AdapterReader
from raylane.weights.engines.vllm_worker import WorkerReader, loading_subscriber

READERS = "_raylane_readers"
"""Attribute of a worker with its readers, by key: one of the model's weights, and one for each name of adapters."""


def answer(worker: Any, method: str, options: dict[str, Any]) -> dict[str, Any]:
    """Call a method of a reader of the worker; `attach` makes it. Errors are part of the answer.

    vLLM would pass them on as text only, and end some engines.

    Args:
        worker: vLLM's worker.
        method: Name of the method.
        options: `reader` has the key of the reader; the rest is for the method.
    """
    readers, key = worker.__dict__.setdefault(READERS, {}), options["reader"]
    try:
        if method == "attach":
            # An attachment that nobody has closed, as that of a driver that has died, gives way to the new one.
            attached = readers.pop(key, None)
            if attached is not None:
                attached.close({})
            # Adapters lie beside the model's weights, so both may be read by one engine.
            model = None if "lora" in options else worker.model_runner.get_model()
            readers[key] = (
                AdapterReader(worker, options)
                if model is None
                else WorkerReader(loading_subscriber(worker.vllm_config, model, options))
            )
            return {}
        reader = readers.get(key)
        if reader is None:
            raise WeightsError("this worker was started again and has no reader. Attach the engine again")
        return getattr(reader, method)(options) or {}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
