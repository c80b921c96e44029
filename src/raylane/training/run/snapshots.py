"""State of a run in shared memory, to which it goes back after the loss of a worker (`snapshot_every`).

Each rank publishes its parts of the trained weights and of the optimizer's state, as weights of a name of the run: the
keeper of its host has them, so they outlive its process. A version is whole when all ranks have written theirs.

    step 10   rank 0 ──copy──┐ version 1 of the run's name        rank 1 dies at step 14
              rank 1 ──copy──┘   (keeper, beside step 11)         all ranks ──copy── version 1: on from step 10

The ranks may be others than those that wrote a version, as with checkpoints. Frozen weights are not in it: they come
from the model's folder. Random numbers and data follow from the number of the step. Called by `worker` and `policy`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from raylane.errors import WeightsError
from raylane.training.checkpoint import state
from raylane.training.model.lora import saved_buffers
from raylane.training.model.supervised import RunModel, release_gathered
from raylane.weights.publisher import Publisher
from raylane.weights.service.answers import VersionInfo
from raylane.weights.subscriber import Subscriber

_log = logging.getLogger(__name__)

KEEP = 3
"""Versions in memory: one that is being written, and two, as the metrics of the newest may not have been read yet."""
WAIT_S = 10.0
"""Seconds that a snapshot waits for other ranks before it is given up; the run goes on without it."""


@dataclass(frozen=True)
class Snapshot:
    """A whole snapshot."""

    version: int
    step: int
    """Number of the optimizer steps in it."""


def usable(versions: Iterable[VersionInfo], most_steps: int) -> Snapshot | None:
    """Return the newest whole snapshot of at most so many steps; None if there is none. Pure."""
    whole = [Snapshot(each.number, each.step) for each in versions if each.state == "committed"]
    return max((each for each in whole if each.step <= most_steps), key=lambda each: each.step, default=None)


class Snapshots:
    """Snapshots of one rank. Every rank of the run makes one, and all call it with the same steps."""

    def __init__(self, name: str, model: RunModel, optimizer: torch.optim.Optimizer) -> None:
        """Use the name of the run."""
        self._name, self._model, self._optimizer = name, model, optimizer
        self._tensors: dict[str, Tensor] = {}
        self._publisher: Publisher | None = None
        """Made with the first snapshot: before its first step the optimizer has no state."""
        self._under_way: Future[int] | None = None

    def take(self, step: int) -> None:
        """Begin to copy the state after so many steps. `finish` before it changes."""
        release_gathered(self._model)
        self._tensors.update(state_tensors(self._model, self._optimizer))
        try:
            if self._publisher is None:
                rank, world = dist.get_rank(), dist.get_world_size()
                self._publisher = Publisher(
                    self._name, self._tensors, rank=rank, world=world, keep=KEEP, delta="never", timeout=WAIT_S
                )
            self._under_way = self._publisher.publish_async(step, timeout=WAIT_S)
        except WeightsError as error:
            _warn(step, error)

    def finish(self) -> None:
        """Wait until what `take` has begun is copied. A snapshot that has failed is logged: the run goes on."""
        copying, self._under_way = self._under_way, None
        if copying is not None:
            try:
                copying.result(2 * WAIT_S)
            except (WeightsError, TimeoutError) as error:
                _warn(None, error)

    def load(self, version: int) -> int:
        """Copy a snapshot into the model and the optimizer; return the step to go on with. Collective."""
        release_gathered(self._model)
        state.collect(self._model, self._optimizer, 0)  # lets torch make the optimizer's state
        tensors = state_tensors(self._model, self._optimizer)
        subscriber = Subscriber(self._name, tensors, subset=True)
        try:
            return subscriber.update(version=version).step
        finally:
            subscriber.close()

    def close(self) -> None:
        """Close this rank's end; the versions stay."""
        if self._publisher is not None:
            self._publisher.close()


def _warn(step: int | None, error: Exception) -> None:
    which = "a snapshot" if step is None else f"the snapshot after step {step}"
    _log.warning("%s in memory was not made, and the run goes on: %s", which, error)


def state_tensors(model: RunModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors that training changes: trained weights, buffers, and the optimizer's state of each weight.

    TypeError if the optimizer has a state that is no tensor.
    """
    trained = {name: weight for name, weight in model.causal_lm.named_parameters() if weight.requires_grad}
    tensors: dict[str, Tensor] = {**trained, **saved_buffers(model.causal_lm)}
    for name, weight in trained.items():
        for key, value in optimizer.state.get(weight, {}).items():
            if not isinstance(value, Tensor):
                raise TypeError(f"snapshots cannot keep {key}={value!r}, which the optimizer has of {name}")
            tensors[f"{name} {key}"] = value
    return tensors
