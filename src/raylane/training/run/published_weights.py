"""Weights of a run that readers take while it trains (`policy.publish_weights`).

One object for each rank, over the parts of weights that this rank holds. Names are those of the parameters
of transformers' model, so a plain Hugging Face model of the same configuration can subscribe. Called by `worker`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raylane.errors import WeightsTimeoutError
from raylane.training.config.policy import PolicyConfig
from raylane.training.model.lora import adapted, base_parameters, merged_weight
from raylane.training.model.supervised import RunModel, release_gathered
from raylane.training.parallel.sharded import gathered
from raylane.weights.publisher import Publisher


class PublishedWeights:
    """Publisher of this rank. Every rank of the run makes one, and all call `publish` with the same steps."""

    def __init__(self, model: RunModel, policy: PolicyConfig) -> None:
        """Register this rank under `policy.publish_weights.name`. Collective.

        FSDP2 must not have gathered weights: the parameters of the modules are then those that the optimizer updates.
        """
        settings = policy.publish_weights
        assert settings.name is not None, "publish_weights.name=null publishes nothing"
        self.step: int | None = None
        """Number of optimizer steps in the weights that were published last; None if they may have changed since."""
        self._model = model
        self._timeout_s = settings.timeout_s
        self._weights = base_parameters(model.causal_lm)
        self._tensors: dict[str, Tensor] = {**self._weights, **further_names(model)}
        """Tensors by published name, from which the publisher reads."""
        self._publisher = Publisher(
            settings.name,
            self._tensors,
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            dtype=getattr(torch, settings.dtype or policy.precision),
            keep=settings.keep,
            detached=settings.detached,
            timeout=settings.timeout_s,
            # Of this setup of this run: ranks that were started again must not meet those that are still ending.
            trainer=gathered(secrets.token_hex(8))[0],
        )

    def publish(self, step: int, *, again: bool = False) -> None:
        """Publish the present weights, unless those of this step were published already and not `again`. Collective.

        `step` is the number of optimizer steps done. Returns when the weights may change again. WeightsError as
        `Publisher.publish` raises it, perhaps on some ranks only: the run has to end then.
        """
        # Without agreement of the ranks: a failure is rare, and a collective in every publication would cost time.
        if step == self.step and not again:
            return
        release_gathered(self._model)  # adapters are read from the modules
        try:
            self._tensors.update(merged_weights(self._model, self._weights))
            self._publisher.publish(step, timeout=self._timeout_s)
        except WeightsTimeoutError as error:
            raise WeightsTimeoutError(
                f"{error}. The keys are policy.publish_weights.keep and policy.publish_weights.timeout_s",
                **error.fields,
            ) from error
        finally:
            self._tensors.update(self._weights)  # frees the merged weights
        self.step = step

    def close(self) -> None:
        """Close this rank's end; the versions stay. Does not wait for ranks that have died."""
        self._publisher.close(cancel=True)


def merged_weights(model: RunModel, weights: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return those of `base_parameters` that have a LoRA adapter, with it added in; divided as before. Collective."""
    layers, merged = adapted(model.causal_lm), {}
    for owner in layers:
        name = f"{owner}.weight"
        merged[name] = merged_weight(name, weights, layers)
        # The publisher writes the boxes of the frozen weight.
        placements = [getattr(tensor, "placements", None) for tensor in (merged[name], weights[name])]
        assert placements[0] == placements[1], f"adding the adapter has divided {name} anew: {placements}"
    return merged


def further_names(model: RunModel) -> dict[str, Tensor]:
    """Return tied weights by those names that `base_parameters` leaves out, such as lm_head.weight."""
    first_names = dict(model.causal_lm.named_parameters())
    every_name = model.causal_lm.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in every_name if name not in first_names}
