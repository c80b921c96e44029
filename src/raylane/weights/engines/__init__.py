"""Inference engines as readers of weights: `weights.attach`."""

from __future__ import annotations

from typing import Any

from torch.nn import Module


def attach(
    engine: Any,
    name: str,
    *,
    pause: str = "keep",
    clear_cache: bool = True,
    detached: bool = False,
    timeout: float | None = None,
) -> Any:
    """Make an inference engine a reader of weights; return its attachment, whose `update` takes the newest version.

    How the engine makes its tensors of the published ones is recorded from its own loader. A version is brought to the
    engine beside its work, and taken between two of its steps.

    Args:
        engine: vLLM's `LLM` or `AsyncLLM`, with tensor parallelism; a Hugging Face model; or another torch module,
            whose tensors have the published names.
        name: Name of the weights.
        pause: What becomes of requests that are under way: `wait` lets them finish, `keep` lets them go on with the new
            weights, `abort` ends them with what they have.
        clear_cache: True to clear the prefix cache, whose entries were computed with the weights before.
        detached: As for `Publisher`.
        timeout: Seconds of each update; None means RAYLANE_TIMEOUT_S (60 s).
    """
    if isinstance(engine, Module):
        from raylane.weights.engines.module import ModuleAttachment

        return ModuleAttachment(engine, name, pause=pause, detached=detached, timeout=timeout)
    if hasattr(engine, "collective_rpc"):
        from raylane.weights.engines.vllm_engine import VllmAttachment

        return VllmAttachment(engine, name, pause=pause, clear_cache=clear_cache, detached=detached, timeout=timeout)
    raise TypeError(
        f"an engine is vLLM's LLM or AsyncLLM, or a torch module, got {type(engine).__name__}. Use weights.Subscriber "
        "for others"
    )
