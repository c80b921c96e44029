"""State of training kept over a warm-up step: weights, optimizer and random generators are the same bits afterwards.

Called by `worker`. A warm-up step is a real step: forward, backward, gradient reduction and optimizer. It allocates
what the largest step needs, opens the connections of the process group, and shows a lack of memory before the first
real step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raylane.sft.parallel.sharded import own_part


@contextmanager
def state_kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Undo, at the end of a `with` block, all that the block did to model, optimizer and random generators.

    Keeps a copy of this worker's weights and optimizer state in host memory during the block. Tensors stay the same
    objects; gradients are dropped. Works after an exception too.
    """
    # Frozen weights do not change, and may be most of the model.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tensors = [own_part(tensor) for tensor in (*trained, *model.buffers())]
    copies = [_copy(tensor) for tensor in tensors]
    state = {parameter: _copies(values) for parameter, values in optimizer.state.items()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    cpu, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
            _restore_optimizer(optimizer, state)
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(python)
        np.random.set_state(numpy)


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[Any, dict[str, Any]]) -> None:
    for parameter in list(optimizer.state):
        # Before its first step an optimizer has no state, and creates it in the step.
        if parameter not in state:
            del optimizer.state[parameter]
            continue
        values = optimizer.state[parameter]
        for key, before in state[parameter].items():
            if isinstance(before, Tensor):
                own_part(values[key]).copy_(before)
            else:
                values[key] = before


def _copies(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(own_part(value)) if isinstance(value, Tensor) else value for key, value in values.items()}


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy in host memory: the device may have no room for a second model."""
    return tensor.detach().to("cpu", copy=True)
