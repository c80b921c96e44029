"""Names and forms of weights in Hugging Face folders, by transformers' own conversions for each model type.

transformers 5 keeps the experts of a layer stacked in one weight, and published folders hold a weight for each expert;
other types have other names in their folders. The tables of both directions are transformers' own
(`conversion_mapping`, 5.23); nothing here knows a model type.

    folder                                        model
    mlp.experts.0.gate_proj.weight [I, H]  --+
    mlp.experts.0.up_proj.weight   [I, H]  --+->  mlp.experts.gate_up_proj [E, 2 I, H]
    mlp.experts.1.gate_proj.weight ...     --+

`read_sources` finds where each weight of a model comes from, `WeightSources.convert` computes it, and `stored` is the
inverse. Called by `hf_reader` and `export`. E = experts, I, H = sizes of an expert's matrices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from raylane.errors import ConfigError


@dataclass
class WeightSources:
    """Weights of a folder that one weight of a model is computed from."""

    target: str
    """Name of the weight in the model."""
    converter: Any = None
    """transformers' conversion; None if the weight of the folder is that of the model, perhaps under another name."""
    names: dict[str, list[str]] = field(default_factory=dict)
    """Names in the folder by the pattern that they match, each list in the order of the experts."""

    @property
    def stacks_experts(self) -> bool:
        """True if each name is the part of one expert, along the first dimension of the result."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        if self.converter is None:
            return False
        first, *others = self.converter.operations
        inside = all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in others)
        return isinstance(first, MergeModulelist) and first.dim == 0 and inside

    def convert(self, causal_lm: Any, read: Callable[[str], Tensor], experts: slice) -> Tensor:
        """Return the weight of the model; of a weight that stacks experts, the part of these experts only.

        `read` returns a weight of the folder. Raises what transformers' operations raise, of many classes.
        """
        if self.converter is None:
            ((name,),) = self.names.values()
            return read(name)
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.names.items():
            for name in names[experts] if self.stacks_experts else names:
                # Read when the conversion needs it.
                converter.add_tensor(self.target, name, pattern, lambda name=name: read(name))
        values: Tensor = converter.convert(self.target, model=causal_lm, config=causal_lm.config)[self.target]
        return values


def read_sources(causal_lm: Any, weights: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, WeightSources]:
    """Return where each of `weights`, by its name in the model, comes from in a folder with these names.

    Weights that the folder lacks are missing in the result. Names that belong to no weight are ignored.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(causal_lm)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = getattr(causal_lm, "base_model_prefix", None)
    sources: dict[str, WeightSources] = {}
    # In the order of the experts' numbers, in which transformers stacks them.
    for name in sorted(names, key=dot_natural_key):
        # A name of the model itself is taken as it is: raylane and older programs have saved stacked experts too.
        target, pattern = (
            (name, None) if name in weights else rename_source_key(name, renamings, converters, prefix, weights)
        )
        if target in weights:
            converter = None if pattern is None else by_pattern[pattern]
            source = sources.setdefault(target, WeightSources(target, converter))
            source.names.setdefault(pattern or name, []).append(name)
    return sources


def stored(causal_lm: Any, name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the weights of a folder that hold one whole weight of a model, by name; they may be views of it.

    With a weight on the meta device the result has names and shapes only. ConfigError for a type whose folders join
    several weights of the model in one.
    """
    from transformers.core_model_loading import revert_weight_conversion

    conversions = _published_conversions(causal_lm)
    if not conversions:
        return {name: weight}
    for conversion in conversions:
        if len(conversion.target_patterns) > 1 and conversion.reverse_transform().rename_source_key(name)[1]:
            raise ConfigError(
                f"{type(causal_lm).__name__} cannot be exported: its folders join {name} with other weights, which "
                "raylane cannot do. Use an architecture that can be exported: llama, qwen3, mixtral, qwen3_moe"
            )
    with torch.no_grad():
        result: dict[str, Tensor] = revert_weight_conversion(causal_lm, {name: weight})
    return result


def _published_conversions(causal_lm: Any) -> list[Any]:
    """Return transformers' conversions for this model, as `revert_weight_conversion` takes them from the model."""
    if not hasattr(causal_lm, "_weight_conversions"):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        # Kept on the model, where transformers' own loading keeps it: otherwise each weight would search all modules.
        # Renamings of old names are not undone, nor are prefixes that only some folders have.
        causal_lm._weight_conversions = [
            conversion
            for conversion in get_model_conversion_mapping(causal_lm, add_legacy=False)
            if not isinstance(conversion, PrefixChange)
        ]
    conversions: list[Any] = causal_lm._weight_conversions
    return conversions
