"""Inference engines as readers of weights: `weights.attach`."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from raylane.weights.layout.mapping import Mapping
from raylane.weights.state.options import VerifySchedule

_HINTS = {
    "mapping": ": vLLM's own loader says it",
    "subset": ": vLLM's own loader says it",
    "lora": ": the adapters of a PeftModel are tensors of it. Pass a mapping and subset=True",
    "keep": " without lora: it has one version of its weights",
}
"""Reasons for which `attach` refuses an option."""


def attach(
    engine: Any,
    name: str,
    *,
    pause: str = "keep",
    clear_cache: bool = True,
    mapping: Mapping | None = None,
    subset: bool = False,
    lora: Any = None,
    keep: int | None = None,
    initial: str = "refuse",
    verify: str | int | None = None,
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
        mapping: For torch modules: how their tensors are made of published ones of other names or shapes.
        subset: For torch modules: True if only some of the published tensors are taken, or only some of the module's
            are published, as the adapters of a `PeftModel`; the others stay.
        lora: For vLLM: the configuration of PEFT (a dict or `LoraConfig`) of LoRA adapters, which are what is
            published. Each version becomes an adapter of its own beside the weights of the engine, without a pause;
            `attachment.request()` is what vLLM's `generate` takes as `lora_request`. `pause` and `clear_cache` have no
            effect.
        keep: With `lora`: number of the newest versions that requests may name; None means vLLM's max_cpu_loras, and
            at least 2.
        initial: What the engine does before the first update: `refuse` refuses requests with WeightsInvalidError, so
            that nobody gets answers of its initial weights; `allow` accepts them. With `lora` it has no effect, as
            requests name their version.
        verify: Updates that verify what they load, as for `Subscriber`: `each`, `first`, or a number. The version is
            compared before the engine uses it. After WeightsMismatchError the engine keeps the version before, and
            refuses requests until an update has succeeded (with `lora` it does not: requests name their version). For
            vLLM, what is compared is what its loader has written; how vLLM packs this is not verified.
        detached: As for `Publisher`.
        timeout: Seconds of each update; None means RAYLANE_TIMEOUT_S (60 s).

    Raises:
        TypeError: The engine is none of these.
        ValueError: An option does not fit the engine.
        WeightsError: The engine cannot take versions, as it was started; or this process is not connected to Ray.
    """
    VerifySchedule(verify)  # refuses other values here, not in a worker
    is_module = isinstance(engine, Module)
    for option, is_set, is_known in (
        ("mapping", mapping is not None, is_module),
        ("subset", subset, is_module),
        ("lora", lora is not None, not is_module),
        ("keep", keep is not None, lora is not None),
    ):
        if is_set and not is_known:
            raise ValueError(f"{option} cannot be used for {type(engine).__name__}{_HINTS[option]}")
    shared: dict[str, Any] = {"verify": verify, "detached": detached, "timeout": timeout}
    options: dict[str, Any] = {"pause": pause, "initial": initial, **shared}
    if isinstance(engine, Module):
        from raylane.weights.engines.module import ModuleAttachment

        return ModuleAttachment(engine, name, mapping=mapping, subset=subset, **options)
    if hasattr(engine, "collective_rpc") and lora is not None:
        from raylane.weights.engines.vllm_lora import LoraAttachment

        return LoraAttachment(engine, name, lora=lora, keep=keep, **shared)
    if hasattr(engine, "collective_rpc"):
        from raylane.weights.engines.vllm_engine import VllmAttachment

        return VllmAttachment(engine, name, clear_cache=clear_cache, **options)
    raise TypeError(
        f"an engine is vLLM's LLM or AsyncLLM, or a torch module, got {type(engine).__name__}. Use weights.Subscriber "
        "for others"
    )
