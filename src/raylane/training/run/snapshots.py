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
import math
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

WAIT_S = 10.0
"""Seconds that a snapshot waits for other ranks before it is given up; the run goes on without it."""
LOAD_S = 600.0
"""Seconds in which a snapshot must have been copied from another host."""
HELD_SNAPSHOTS = 2
"""Number of new snapshots until the one to which the run went back is let go."""


@dataclass(frozen=True)
class Snapshot:
    """A whole snapshot."""

    version: int
    step: int
    """Number of the optimizer steps in it."""


def usable(versions: Iterable[VersionInfo], most_steps: int, after: int, used: int | None) -> Snapshot | None:
    """Return the newest whole snapshot of at most so many steps; None if there is none. Pure.

    Versions up to `after` are of steps that the run has gone back from, except the one that it went back to (`used`).
    """
    whole = [Snapshot(each.number, each.step) for each in versions if each.state == "committed"]
    present = [each for each in whole if each.step <= most_steps and (each.version > after or each.version == used)]
    return max(present, key=lambda each: (each.step, each.version), default=None)


def versions_to_keep(steps_in_flight: int, every: int) -> int:
    """Return the number of versions: one being written, those whose metrics are not read yet, and one before. Pure."""
    return 2 + math.ceil(steps_in_flight / every)


class Snapshots:
    """Snapshots of one rank. Every rank of the run makes one, and all call it with the same steps."""

    def __init__(self, name: str, keep: int, model: RunModel, optimizer: torch.optim.Optimizer) -> None:
        """Use the name of the run, and keep so many versions."""
        self._name, self._keep, self._model, self._optimizer = name, keep, model, optimizer
        self._tensors: dict[str, Tensor] = {}
        self._is_off = False
        """True after the first snapshot that can never be made."""
        self._held: int | None = None
        """Version to which the run went back: it is held until there are newer ones."""
        self._taken = 0
        self._publisher: Publisher | None = None
        """Made with the first snapshot: before its first step the optimizer has no state."""
        self._under_way: Future[int] | None = None

    def take(self, step: int) -> None:
        """Begin to copy the state after so many steps. `finish` before it changes."""
        if self._is_off:
            return
        release_gathered(self._model)
        try:
            publisher = self._publisher_of(state_tensors(self._model, self._optimizer))
            self._hold_or_release(publisher)
            self._under_way = publisher.publish_async(step, timeout=WAIT_S)
        except WeightsError as error:
            _warn(step, error)
        except (TypeError, ValueError) as error:
            self._is_off = True
            _log.warning("no snapshots are taken: %s", error)

    def _publisher_of(self, tensors: dict[str, Tensor]) -> Publisher:
        """Return the publisher of these tensors: a new one if the optimizer has state of further weights by now."""
        if self._publisher is not None and self._tensors.keys() != tensors.keys():
            self._publisher.close()
            self._publisher = None
        self._tensors.clear()
        self._tensors.update(tensors)
        if self._publisher is None:
            rank, world = dist.get_rank(), dist.get_world_size()
            self._publisher = Publisher(
                self._name, self._tensors, rank=rank, world=world, keep=self._keep, delta="never", timeout=WAIT_S
            )
        return self._publisher

    def _hold_or_release(self, publisher: Publisher) -> None:
        """Hold the version to which the run went back, as long as newer ones may not be usable yet."""
        self._taken += 1
        if self._held is None or dist.get_rank() != 0:
            return
        if self._taken == 1:
            publisher.hold(self._held, timeout=WAIT_S)
        elif self._taken > HELD_SNAPSHOTS:
            publisher.release(self._held, timeout=WAIT_S)
            self._held = None

    def finish(self) -> None:
        """Wait until what `take` has begun is copied. A snapshot that has failed is logged: the run goes on."""
        copying, self._under_way = self._under_way, None
        if copying is not None:
            try:
                copying.result()
            except WeightsError as error:
                _warn(None, error)

    def load(self, version: int) -> int:
        """Copy a snapshot into the model and the optimizer; return the step to go on with. Collective.

        After WeightsError both may have changed.
        """
        self.finish()
        release_gathered(self._model)
        state.collect(self._model, self._optimizer, 0)  # lets torch make the optimizer's state, for all weights
        trained = trained_weights(self._model)
        subscriber = Subscriber(self._name, trained, subset=True, timeout=LOAD_S)
        stored = subscriber.plan.stored
        subscriber.close()
        tensors = {
            name: tensor
            for name, tensor in state_tensors(self._model, self._optimizer).items()
            if stored.name_of(name) in stored.tensors
        }
        for name, weight in trained.items():
            if not any(state_name(name, key) in tensors for key in self._optimizer.state.get(weight, {})):
                self._optimizer.state.pop(weight, None)  # it had none: no step has changed it
        subscriber = Subscriber(self._name, tensors, subset=True, timeout=LOAD_S)
        try:
            step = subscriber.update(version=version, timeout=LOAD_S).step
        finally:
            subscriber.close()
        self._held, self._taken = version, 0
        return step

    def close(self) -> None:
        """Close this rank's end; the versions stay. Does not wait for ranks that have died."""
        if self._publisher is not None:
            self._publisher.close(cancel=True)


def _warn(step: int | None, error: Exception) -> None:
    which = "a snapshot" if step is None else f"the snapshot after step {step}"
    _log.warning("%s in memory was not made, and the run goes on: %s", which, error)


def trained_weights(model: RunModel) -> dict[str, Tensor]:
    """Return the weights that training changes, by name."""
    return {name: weight for name, weight in model.causal_lm.named_parameters() if weight.requires_grad}


def state_name(weight: str, key: str) -> str:
    """Return the name under which the optimizer's state of a weight is published."""
    return f"{weight} {key}"


def state_tensors(model: RunModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors that training changes: trained weights, buffers, and the optimizer's state of each weight.

    TypeError if the optimizer has a state that is no tensor.
    """
    tensors: dict[str, Tensor] = {**trained_weights(model), **saved_buffers(model.causal_lm)}
    for name, weight in trained_weights(model).items():
        for key, value in optimizer.state.get(weight, {}).items():
            if not isinstance(value, Tensor):
                raise TypeError(f"snapshots cannot keep {key}={value!r}, which the optimizer has of {name}")
            tensors[state_name(name, key)] = value
    return tensors
