"""Division of a model into pipeline stages: the layers of each, its modules, and one tree of several stages.

    4 stages on 2 workers   stage 0, layers 0-1, worker 0      stage 1, layers 2-3, worker 1
                            stage 2, layers 4-5, worker 0      stage 3, layers 6-7, worker 1

The first stage has the embedding, the last one the norm and the head. Parameters keep the names that they have in the
whole model, so checkpoints do not depend on the division. Called by `build`, `lora` and `pipeline`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, overload

from torch import nn


def own_stages(worker: int, workers: int, per_worker: int) -> list[int]:
    """Return the numbers of the stages of a worker: every `workers`-th one."""
    return [worker + i * workers for i in range(per_worker)]


def layer_ranges(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage; the first stages get one more layer if the numbers do not divide."""
    share, more = divmod(layers, stages)
    ends = [share * (i + 1) + min(i + 1, more) for i in range(stages)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


class Layers(nn.ModuleList):
    """Some layers of a model under their numbers in the whole model, in a form that transformers' models accept."""

    def __init__(self, layers: dict[int, nn.Module]) -> None:
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    @overload
    def __getitem__(self, index: slice) -> Layers: ...
    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    def __getitem__(self, index: slice | int) -> nn.Module:
        """Return the layers at these places among the ones that are here."""
        numbered = list(self._modules.items())
        if isinstance(index, slice):
            return Layers({int(number): layer for number, layer in numbered[index]})
        layer = numbered[index][1]
        assert layer is not None
        return layer

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())


def keep_stage(causal_lm: Any, number: int, count: int) -> None:
    """Remove everything from a model that stage `number` of `count` stages does not need."""
    decoder = causal_lm.get_decoder()
    numbers = layer_ranges(len(decoder.layers), count)[number]
    decoder.layers = Layers({i: decoder.layers[i] for i in numbers})
    # The decoder looks up the type of a layer by its place among the layers that it has.
    config = copy.copy(decoder.config)
    # transformers slices the layers with this number.
    config.num_hidden_layers = len(numbers)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[i] for i in numbers]
    decoder.config = config
    if number > 0 and hasattr(decoder, "embedding_multiplier"):
        # Granite multiplies whatever it gets instead of tokens, and the stage before sends no embedding.
        decoder.embedding_multiplier = 1.0
    last = number == count - 1
    # A tied head needs the embedding: the last stage then has a copy of it under the same name.
    if number > 0 and not (last and config.tie_word_embeddings):
        decoder.embed_tokens = None
    if not last:
        decoder.norm = nn.Identity()
        causal_lm.lm_head = None


def merged(models: list[Any]) -> Any:
    """Return one model with the modules of several stages of it, which share no module; the stages stay as they are."""
    # Shallow copies with dictionaries of their own: the stages keep their modules, and share them with this tree.
    whole = copy.copy(models[0])
    whole._modules = dict(whole._modules)
    decoder = copy.copy(whole.get_decoder())
    decoder._modules = dict(decoder._modules)
    decoder.layers = Layers(
        {int(number): layer for model in models for number, layer in model.get_decoder().layers.named_children()}
    )
    for model in models[1:]:
        if model.get_decoder().embed_tokens is not None:
            decoder.embed_tokens = model.get_decoder().embed_tokens
    decoder.norm = models[-1].get_decoder().norm
    whole.lm_head = models[-1].lm_head
    setattr(whole, whole.base_model_prefix, decoder)
    return whole
