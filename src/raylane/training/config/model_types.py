"""Model types that tests compare with transformers, and the ways in which each can be divided.

Other types may be trained as one process, with FSDP2 and with copies, if the checks before the first step pass
(`raylane.sft.run.selfcheck`). Called by `layout` and `build`; docs/reference/model-types.md is written from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Divisions:
    """Ways to divide a model of one type, besides FSDP2 and copies."""

    tensors: bool = False
    """`tensor_parallel_size`. Experts are not divided: every worker computes all of them."""
    sequences: bool = False
    """`sequence_parallel`."""
    context: bool = False
    """`context_parallel_size`."""
    stages: bool = False
    """`pipeline_parallel_size`."""
    experts: bool = False
    """`expert_parallel_size`."""
    reason: str = ""
    """Cause of what is missing, for errors and the documentation."""


EVERY = Divisions(tensors=True, sequences=True, context=True, stages=True)
_AND_EXPERTS = replace(EVERY, experts=True)

DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")
"""Types that can be divided in every way, and whose random weights are made one module at a time."""

_CONVOLUTIONS = "its convolutions need the tokens of a row in one place, and its modules have names of their own"

MODEL_TYPES: dict[str, Divisions] = {
    **dict.fromkeys(DENSE, EVERY),
    "cohere": EVERY,
    "cohere2": EVERY,
    "deepseek_v3": Divisions(
        context=True, stages=True, reason="its attention makes queries, keys and values by products of two matrices"
    ),
    "glm4_moe": EVERY,
    "gpt_oss": Divisions(
        tensors=True, context=True, stages=True, experts=True, reason="its experts return the scores of the router"
    ),
    "granite": EVERY,
    "granitemoe": EVERY,
    "granite_swa": EVERY,
    "lfm2": Divisions(reason=_CONVOLUTIONS),
    "lfm2_moe": Divisions(reason=_CONVOLUTIONS),
    "mixtral": _AND_EXPERTS,
    "nemotron": EVERY,
    "olmoe": EVERY,
    "phi3": Divisions(context=True, stages=True, reason="its attention has one matrix for queries, keys and values"),
    "qwen2_moe": EVERY,
    "qwen3_moe": _AND_EXPERTS,
    "stablelm": Divisions(context=True, stages=True, reason="its attention counts the heads of the whole model"),
}
"""Types by name."""
