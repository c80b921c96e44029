"""A model in pipeline stages: runs the micro-batches of a step through them, forward and backward.

torch.distributed.pipelining does the work, with any of its schedules. Made by `build`, called by `step`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from raylane.training.labels import IGNORED
from raylane.training.model.loss import LossFunction
from raylane.training.model.supervised import RunModel, StageModel, stage_tensors
from raylane.training.parallel.mesh import WorkerMesh
from raylane.training.parallel.sharded import own_part
from raylane.training.parallel.stages import merged
from raylane.workers.batch import BatchDict


class PipelinedModel(RunModel):
    """The stages of a model that this worker holds."""

    def __init__(
        self, stages: list[StageModel], count: int, mesh: WorkerMesh, schedule: str, device: torch.device
    ) -> None:
        """Take the stages of this worker, of `count` stages in all."""
        super().__init__()
        self.stages = nn.ModuleList(stages)  # registers their parameters; `own_stages` has their type
        self.own_stages = stages
        """The same stages, in order."""
        self.causal_lm = merged([stage.causal_lm for stage in stages])
        """One tree of all parameters here, under their names in the whole model; not for calls."""
        self.mesh = mesh
        self._count = count
        self._schedule = schedule
        self._device = device
        self._plans: dict[tuple[Any, ...], Any] = {}
        """torch's schedules, by number and shape of the micro-batches."""
        self._scale = 1.0
        self._outputs: list[Tensor] = []
        """Loss and correct tokens [2] of each micro-batch of the last step, if the last stage is here."""

    @property
    def tied_copy(self) -> nn.Parameter | None:
        """Head of the last pipeline stage, if it is a copy of the embedding in the first one."""
        return self.own_stages[-1].tied_copy

    def run(self, batch: BatchDict, rows: int, loss_fn: LossFunction, scale: float | None) -> Tensor:
        """Return loss and number of correct tokens of a batch in CPU memory, both summed, float64 [2]. Collective.

        Both are 0 on workers without the last stage. With `scale`, gradients of scale times the loss are added to
        `.grad`; with None there is no backward pass.
        """
        self._scale = 1.0 if scale is None else scale
        for stage in self.own_stages:
            stage.loss_fn = loss_fn
        if scale is None:
            # torch's schedules want full rounds of micro-batches; a row without labels changes no loss.
            real, missing = batch.size, -batch.size % (rows * self._count)
            batch = batch.select([*range(real), *[real - 1] * missing])
            batch["labels"][real:] = IGNORED
        tensors = stage_tensors(batch, self._device)
        # Later stages get hidden states from the stage before; all stages get the rest.
        first = [tensors["input_ids"]] if self.mesh.stage == 0 else []
        plan = self._plan(batch, rows, scale is not None)
        if scale is None:
            joined = plan.eval(*first, **tensors)
            outputs = [] if joined is None else [*joined.view(-1, 2)]
        else:
            self._outputs = []
            # Outputs that torch returns would keep their graphs until the next step.
            plan.step(*first, target=tensors["labels"], return_outputs=False, **tensors)
            # Without those that torch made to find shapes, which come first.
            outputs = self._outputs[-(batch.size // rows) :]
        return sum((output.double() for output in outputs), torch.zeros(2, dtype=torch.float64, device=self._device))

    def _loss(self, output: Tensor, _: Tensor) -> Tensor:
        """Return the loss for the backward pass. Called by torch on the last stage, also to find shapes."""
        self._outputs.append(output.detach())
        return output[0] * self._scale

    def swap_plans(self, plans: dict[tuple[Any, ...], Any]) -> dict[tuple[Any, ...], Any]:
        """Use other schedules from now on, for stages that compute with other shapes; return those used before."""
        before, self._plans = self._plans, plans
        return before

    def _plan(self, batch: BatchDict, rows: int, backward: bool) -> Any:
        """Return torch's schedule for batches of this shape."""
        # The caller has padded or checked the batch.
        count, remainder = divmod(batch.size, rows)
        assert not remainder, "the caller checked that the rows divide into micro-batches"
        key = (count, rows, batch["input_ids"].shape[1], backward)
        if key not in self._plans:
            # A schedule keeps buffers of one shape; gloo ends the process if a message of another size arrives.
            stages = [
                PipelineStage(stage, stage.number, self._count, self._device, group=self.mesh.pp_group)
                for stage in self.own_stages
            ]
            several = len(stages) > 1
            make: Any = get_schedule_class(self._schedule.replace("_", ""))
            # The loss is a sum that is scaled already, so torch must not divide by the number of micro-batches.
            self._plans[key] = make(
                stages if several else stages[0], count, loss_fn=self._loss if backward else None, scale_grads=False
            )
        return self._plans[key]

    def sum_tied_gradients(self) -> None:
        """Give embedding and head, which are one parameter on two workers, the sum of both gradients. Collective."""
        if self.mesh.tied_group is None:
            return
        parameter = self.tied_copy
        if parameter is None and self.mesh.stage == 0 and self.causal_lm.config.tie_word_embeddings:
            parameter = self.causal_lm.get_input_embeddings().weight
        if parameter is not None and parameter.requires_grad:  # LoRA freezes both copies
            # Both copies are divided in the same way, so the parts of a worker belong together.
            gradient = parameter.grad
            assert gradient is not None, "every step uses embedding and head"
            dist.all_reduce(own_part(gradient), group=self.mesh.tied_group)
