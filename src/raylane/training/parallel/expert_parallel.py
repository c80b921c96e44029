"""Expert parallelism: each worker holds some of the experts, and tokens travel to the experts that they chose.

The workers that share the weights of the model (FSDP2) divide the experts of every layer among them. FSDP2 gathers all
other weights; experts stay where they are (GShard, arXiv 2006.16668):

    worker 0    tokens 0..3  - all-to-all ->  experts 0, 1 on the tokens of all workers  - all-to-all ->  tokens 0..3
    worker 1    tokens 4..7  - all-to-all ->  experts 2, 3 on the tokens of all workers  - all-to-all ->  tokens 4..7

With copies of the model (HSDP) each copy divides its experts so, and gradients are summed over the copies. Experts are
computed by transformers' own module, which gets its worker's experts and a choice of one expert for each
arrived token. Called by `build`. N = tokens, K = experts of a token, H = hidden size, E = experts, e = E / workers, M =
tokens that arrive at a worker (one counts K times if it chose K experts there).
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from raylane.training.parallel.sharded import own_part
from raylane.training.parallel.tensor_parallel import expert_block


def apply(causal_lm: Any, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Divide the experts of all layers in place; return their parameters, which FSDP2 must not take.

    `mesh` is that of FSDP2: the workers that share the weights, and before them the copies, if there are several.
    """
    divided: set[nn.Parameter] = set()
    placements: list[Placement] = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    groups = _Groups(mesh.get_group(-1), mesh.get_group(0) if mesh.ndim > 1 else None, mesh.size())
    for layer in causal_lm.get_decoder().layers:
        if (block := expert_block(name for name, _ in layer.named_modules())) is None:
            continue
        experts = layer.get_submodule(f"{block}.experts")
        for name, parameter in list(experts.named_parameters(recurse=False)):
            # Every worker made the same values, or none yet.
            values = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(values, requires_grad=parameter.requires_grad))
        divided |= set(experts.parameters())
        experts.forward = partial(_computed_by_owners, experts, groups)
    return divided


class _Groups(NamedTuple):
    """Workers that a layer's experts have to do with."""

    owners: Any
    """Process group that divides the experts."""
    copies: Any
    """Process group of the workers with the same experts; None if there are no copies."""
    workers: int
    """Number of workers in all."""


def _computed_by_owners(experts: Any, groups: _Groups, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the sum [N, H] of the outputs of the chosen experts [N, K] of hidden states [N, H], times their weights.

    Takes the arguments of transformers' modules (5.23). Collective, in the backward pass too.
    """
    group, tokens = groups.owners, torch.arange(hidden.shape[0], device=hidden.device)
    workers = dist.get_world_size(group)
    # In the order of the experts, and so of the workers that hold them.
    order = torch.argsort(chosen.reshape(-1), stable=True)
    tokens = tokens.repeat_interleave(chosen.shape[1])[order]
    sent = torch.bincount(chosen.reshape(-1), minlength=experts.num_experts).view(workers, -1)
    arriving = torch.empty_like(sent)
    dist.all_to_all_single(arriving, sent, group=group)
    sizes = (sent.sum(dim=1).tolist(), arriving.sum(dim=1).tolist())
    arrived: Tensor = _Exchange.apply(hidden[tokens], *sizes, group)  # type: ignore[no-untyped-call]
    of_arrived = torch.arange(arriving.shape[1], device=hidden.device).repeat(workers)
    output = _own_experts(experts, groups, arrived, of_arrived.repeat_interleave(arriving.view(-1)))
    returned: Tensor = _Exchange.apply(output, *reversed(sizes), group)  # type: ignore[no-untyped-call]
    weighted = returned * weights.reshape(-1)[order][:, None]
    return torch.zeros_like(hidden).index_add(0, tokens, weighted.to(hidden.dtype))


def _own_experts(experts: Any, groups: _Groups, arrived: Tensor, chosen: Tensor) -> Tensor:
    """Return the outputs [M, H] of this worker's experts, each for the arrived tokens [M, H] that chose it."""
    # The step multiplies losses by the number of workers, because FSDP2 takes means of gradients. Gradients of experts
    # are sums over the tokens of all workers of a copy already.
    parameters = dict(experts.named_parameters(recurse=False))
    summed = _SummedGradients.apply(groups, *map(own_part, parameters.values()))  # type: ignore[no-untyped-call]
    local_parameters = {name: values.to(arrived.dtype) for name, values in zip(parameters, summed, strict=True)}
    if not len(arrived):
        # Every worker needs a gradient of every parameter: the norm of all gradients is computed together.
        return arrived + torch.stack([values.sum() for values in local_parameters.values()]).sum() * 0.0
    # A copy that has this worker's experts, and shares everything else with the module.
    stand_in = copy.copy(experts)
    stand_in.__dict__.pop("forward")
    stand_in._parameters = local_parameters
    stand_in.num_experts = next(iter(local_parameters.values())).shape[0]
    output: Tensor = stand_in.forward(arrived, chosen[:, None], arrived.new_ones(len(arrived), 1))
    return output


class _SummedGradients(torch.autograd.Function):
    """The same tensors, with gradients that are summed over the copies and divided by the number of workers.

    One function for all parameters of a layer, so that all copies sum them in the same order.
    """

    @staticmethod
    def forward(ctx: Any, groups: _Groups, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.groups = groups
        return tuple(values.view_as(values) for values in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        groups: _Groups = ctx.groups
        results = [gradient / groups.workers for gradient in gradients]
        if groups.copies is not None:
            for gradient in results:
                dist.all_reduce(gradient, group=groups.copies)
        return None, *results


class _Exchange(torch.autograd.Function):
    """All-to-all of rows [., H]: `sent` rows to each worker, `arriving` rows from each; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], arriving: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.arriving, ctx.group = sent, arriving, group
        return _exchanged(rows, sent, arriving, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.arriving, ctx.sent, ctx.group), None, None, None


def _exchanged(rows: Tensor, sent: list[int], arriving: list[int], group: Any) -> Tensor:
    result = rows.new_empty(sum(arriving), *rows.shape[1:])
    dist.all_to_all_single(result, rows.contiguous(), arriving, sent, group=group)
    return result
