"""Worker of a training run: one process of the group, which holds a shard of the model.

A plain class, and the base of the workers of each kind of training, which add where their rows come from
(`raylane.sft.run.worker`). `WorkerGroup` builds it in an actor; it can also be built in any process that has the rank
variables set. Every method is collective unless its docstring says otherwise: the driver calls it on all workers with
the same arguments, in the same order. Called by `policy`.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Generic

import torch
import torch.distributed as dist

from raylane.errors import StepNotFiniteError, WorkerCallError
from raylane.training import storage
from raylane.training.checkpoint import export, state
from raylane.training.checkpoint.state import BackgroundSave
from raylane.training.config.load import Config
from raylane.training.model.build import build_model
from raylane.training.model.defaults import with_own_defaults_in_methods
from raylane.training.model.hf_config import model_config
from raylane.training.model.loss import CrossEntropy, LossFunction
from raylane.training.model.optim import learning_rate, make_optimizer, set_learning_rate
from raylane.training.model.supervised import RunModel, release_gathered
from raylane.training.parallel.mesh import ParallelDims, WorkerMesh
from raylane.training.parallel.sharded import gathered, own_part, whole
from raylane.training.run import step
from raylane.training.run.delivery import FolderCopies
from raylane.training.run.generate import generate
from raylane.training.run.micro_batches import Division, FixedRows, division
from raylane.training.run.published_weights import PublishedWeights
from raylane.training.run.snapshots import Snapshots, versions_to_keep
from raylane.training.run.step import state_kept
from raylane.training.vocabulary import AnyVocabulary
from raylane.workers.batch import BatchDict

SKIPPED = "skipped"
"""Key in the metrics of a step that was left out because loss or gradients were not finite; its value is 1."""
SAVE_ENDED = "save_ended"
"""Key in the metrics of a step after which `finish_save` need not wait."""

_log = logging.getLogger(__name__)


@with_own_defaults_in_methods
class TrainingWorker(Generic[Config, AnyVocabulary]):
    """Model and optimizer of one rank: construct, `setup`, run steps, and `teardown` before the process ends.

    torch's defaults of the process (device, data type, `no_grad`) do not matter. Step numbers count from 0. The
    randomness of a step (dropout, if the model has any) is seeded by run seed, step and rank, so no random state needs
    to be saved and a resumed run continues exactly.

    Attributes: `device`; and after `setup` `config`, `vocabulary`, `mesh`, `model` and `optimizer`.
    """

    def __init__(self, device_type: str = "cpu", num_threads: int = 1) -> None:
        """Join the process group: gloo, and for device_type "cuda" also nccl on the first visible GPU."""
        self.device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
        if device_type == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(num_threads)
        self._join_group()
        # torch warns whenever a tensor on two mesh axes is gathered, which is what norms and exports do.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self._losses: dict[str, LossFunction] = {}
        """Loss functions that the driver sent, by name."""
        self._idle_since: float | None = None
        """Time when the last step ended (`time.perf_counter` seconds); None if the worker did other work since."""
        self._copies = FolderCopies()
        self._holds_gradients = False
        """True from the beginning of a step to its update, and after an error in between: gradients of it remain."""
        self._background: BackgroundSave | None = None
        """Writer of checkpoints beside the training; None before the first such checkpoint."""
        self._published: PublishedWeights | None = None
        """Weights for readers; None before `setup`, and if the configuration publishes nothing."""
        self._snapshots: Snapshots | None = None
        """Snapshots in memory; None before `setup`, and if the configuration takes none."""
        self._snapshot_name: str | None = None

    def _join_group(self) -> None:
        # gloo in a GPU run too: object broadcasts use CPU tensors.
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        self._rank = dist.get_rank()

    def on_regroup(self, rank: int, world: int) -> None:
        """Join the process group that is formed again after the loss of other ranks. `setup` comes next."""
        del rank, world
        self._close_published()
        # Before the next model is built: there may be no memory for two.
        self.__dict__.pop("model", None)
        self.__dict__.pop("optimizer", None)
        self._background, self._idle_since, self._holds_gradients = None, None, False
        self._join_group()

    def use_snapshots(self, name: str) -> None:
        """Keep snapshots under this name from the next `setup` on. Not collective."""
        self._snapshot_name = name

    def use_copies(self, copies: FolderCopies) -> None:
        """Read data and model from these folders in the next `setup`."""
        self._copies = copies

    def setup(self, config: Config, vocabulary: AnyVocabulary, total_steps: int) -> dict[str, Any]:
        """Build model and optimizer. Replaces an earlier setup.

        Returns facts for the log: the number of parameters, of those that are trained (fewer with LoRA), and of
        parameters held by this worker.
        """
        torch.manual_seed(config.loop.seed)
        self._holds_gradients = False
        config, vocabulary = self._copies.on_this_node(config, vocabulary)
        self.config, self.vocabulary, self._total_steps = config, vocabulary, total_steps
        policy = config.policy
        on_avx2 = self.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
        if self._rank == 0 and on_avx2 and policy.precision == "bfloat16":
            _log.warning(
                "this CPU has no AVX-512: torch multiplies bfloat16 matrices up to 60 times slower on it than those of "
                "float32; set policy.precision=float32"
            )
        self.mesh = WorkerMesh.make(
            ParallelDims.of(config.policy.dtensor_cfg, config.cluster.num_workers), self._rank, self.device.type
        )
        self.model: RunModel = self.new_model()
        self.optimizer = make_optimizer(self.model, policy.optimizer)
        self._close_published()  # of an earlier setup
        if policy.publish_weights.name is not None:
            self._published = PublishedWeights(self.model, policy)
        if self._snapshot_name is not None:
            keep = versions_to_keep(config.steps_in_flight, config.loop.snapshot_every)
            self._snapshots = Snapshots(self._snapshot_name, keep, self.model, self.optimizer)
        self._loss: LossFunction = self.make_loss()
        parameters = list(self.model.parameters())
        local_parts = [own_part(parameter) for parameter in parameters]
        # The copy of a tied weight in the last pipeline stage is not a second parameter.
        counted = [p for p in parameters if p is not self.model.tied_copy]
        numbers = torch.tensor([sum(p.numel() for p in counted), sum(p.numel() for p in counted if p.requires_grad)])
        if self.mesh.pp_group is not None:
            dist.all_reduce(numbers, group=self.mesh.pp_group)
        return {
            "parameters": int(numbers[0]),
            "parameters_trained": int(numbers[1]),
            "parameters_held": sum(part.numel() for part in local_parts),
        }

    def new_model(self) -> RunModel:
        """Return a further model as `setup` builds it, with the initial weights. Collective."""
        policy, vocabulary = self.config.policy, self.vocabulary
        hf_config = model_config(policy, vocabulary.vocab_size, vocabulary.pad_id, vocabulary.end_id)
        return build_model(hf_config, policy, self.mesh, self.device, self.config.loop.seed)

    def make_loss(self) -> LossFunction:
        """Return the loss of `setup`'s configuration; other kinds of training have others."""
        return CrossEntropy(self.config.policy.loss_chunk_tokens)

    # Steps ----------------------------------------------------------------------------------------------------------

    def train_batch(
        self,
        data: BatchDict,
        number: int,
        loss: str | None,
        micro_batch_size: int | None,
        eval_mode: bool = False,
        warm_up: bool = False,
    ) -> dict[str, float]:
        """Run one step on this worker's part of a batch that the driver sent; return its metrics.

        With `eval_mode` compute only the loss; with `warm_up` undo the step.

        Metrics: loss, and of cross-entropy also perplexity (its exponential) and token_accuracy (share of supervised
        tokens whose label has the highest logit); grad_norm (before clipping), lr, supervised_tokens, tokens,
        tokens_per_s, and times in seconds: step_time_s = data_time_s (reading rows) + compute_time_s + dispatch_time_s
        (idle since the last step) + publish_time_s (publishing the weights; only in steps that do). All except the
        times are equal on all workers.

        `data` has input_ids, position_ids and labels, int64 [B, T], and any other tensors that the loss function reads.
        `loss` names a function sent with `add_loss`; None means cross-entropy. `micro_batch_size` None means as
        configured.
        """
        started = time.perf_counter()
        loss_fn = self._loss if loss is None else self._losses[loss]
        how = division(self.config.policy, micro_batch_size)
        if not isinstance(loss_fn, CrossEntropy) and isinstance(how, FixedRows):
            how = FixedRows(how.rows)  # the tensors of another loss may depend on the length of rows
        if not eval_mode:
            return self._step(data, number, loss_fn, how, started, undone=warm_up)
        counts = step.count(data, self.device, self.mesh.dims)
        if not isinstance(how, FixedRows):
            how = FixedRows(1)  # of a token budget
        total = step.forward_only(self.model, data, how, loss_fn, self.device)
        means = step.means_of(total, counts, self.mesh.dims)
        self._end_other_work()
        return {**means.metrics, "supervised_tokens": counts.supervised}

    def add_loss(self, name: str, loss_fn: LossFunction) -> None:
        """Store a loss function under a name, so that it is sent once instead of with every step. Not collective."""
        self._losses[name] = loss_fn

    def _step(
        self, batch: BatchDict, number: int, loss_fn: LossFunction, how: Division, started: float, undone: bool = False
    ) -> dict[str, float]:
        """Run one optimizer step on this worker's rows and return its metrics; with `undone` undo all that it did.

        `started` is the time at which the call came, before the rows were read (`time.perf_counter` seconds).
        StepNotFiniteError if loss or gradient norm is not finite, unless such steps are skipped.
        """
        if self._holds_gradients:
            raise WorkerCallError(
                f"step {number} cannot run: an earlier step failed on rank {self._rank}, and its gradients would be "
                "added to those of this step. Call recover() and load the last checkpoint, or start again",
                rank=self._rank,
            )
        ready = time.perf_counter()
        policy, model = self.config.policy, self.model
        lr = learning_rate(number, policy.optimizer.kwargs.lr, policy.scheduler, self._total_steps)
        self._holds_gradients = True
        with state_kept(model, self.optimizer) if undone else nullcontext():
            self._seed(number)
            set_learning_rate(self.optimizer, lr)
            counts = step.count(batch, self.device, self.mesh.dims)
            each = policy.dtensor_cfg.reduce_every_micro_batch
            means = step.backward(model, batch, how, loss_fn, counts, self.device, each)
            if self._snapshots is not None:
                self._snapshots.finish()  # it reads what the update changes
            norm, finite = step.update(model, self.optimizer, means.loss, policy.max_grad_norm, self.device)
            self._holds_gradients = False  # whether finite or not
            if not finite and self.config.loop.on_nan == "stop":
                raise StepNotFiniteError(
                    f"step {number + 1} failed: loss {means.loss}, gradient norm {norm}. The weights are unchanged. "
                    "Lower policy.optimizer.kwargs.lr, check the data of this step, or set "
                    f"{self.config.loop_name}.on_nan=skip to leave out such steps",
                    step=number + 1,
                    loss=means.loss,
                    grad_norm=norm,
                )
            computed = done = time.perf_counter()
            publishes = self._published is not None and not undone and (number + 1) % policy.publish_weights.every == 0
            if publishes:
                self.publish_weights(number + 1)
                done = time.perf_counter()
            every = self.config.loop.snapshot_every
            if self._snapshots is not None and not undone and (number + 1) % every == 0:
                self._snapshots.take(number + 1)
                done = time.perf_counter()
            # Time between two steps in which the worker had nothing to do: if it grows, the driver is too slow.
            waited = 0.0 if self._idle_since is None else started - self._idle_since
            self._idle_since = done
            if undone:
                self._end_other_work()
            total = waited + done - started
            return {
                **({} if finite else {SKIPPED: 1.0}),
                **({SAVE_ENDED: 1.0} if self._background is not None and self._background.ended else {}),
                **means.metrics,
                "grad_norm": norm,
                "lr": lr,
                "supervised_tokens": counts.supervised,
                "tokens": counts.tokens,
                "tokens_per_s": counts.tokens / total,
                "step_time_s": total,
                "data_time_s": ready - started,
                "dispatch_time_s": waited,
                "compute_time_s": computed - ready,
                **({"publish_time_s": done - computed} if publishes else {}),
            }

    def _seed(self, number: int) -> None:
        """Seed the random generator of a step."""
        seed = step_seed(self.config.loop.seed, number, self.mesh.random_stream)
        if self.device.type == "cpu":
            # `torch.manual_seed` also keeps a formatted traceback for each GPU backend, which takes 0.1 to 0.4 ms.
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def publish_weights(self, steps: int, again: bool = False) -> None:
        """Publish the weights after so many steps, unless that was done and not `again`. WeightsError on failure."""
        assert self._published is not None, "the driver asks for it only if publish_weights.name is set"
        self._published.publish(steps, again=again)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Return the most probable answers to tokenised prompts, at most `new_tokens` tokens each."""
        vocabulary = self.vocabulary
        answers = generate(self.model, prompts, new_tokens, vocabulary.end_ids, vocabulary.pad_id, self.device)
        self._end_other_work()
        return answers

    def gradients(self, data: BatchDict, micro_batch_size: int | None) -> tuple[float, dict[str, torch.Tensor]]:
        """Return (loss, gradient of every parameter by name, float32 on the CPU) of a batch, without changing weights.

        For tests and inspection; gathers one parameter after the other, so that no GPU holds the whole model.
        """
        counts = step.count(data, self.device, self.mesh.dims)
        reduce_each = self.config.policy.dtensor_cfg.reduce_every_micro_batch
        how = division(self.config.policy, micro_batch_size)
        means = step.backward(self.model, data, how, self._loss, counts, self.device, reduce_each)
        by_name = {}
        for name, parameter in self.model.causal_lm.named_parameters():
            if (gradient := parameter.grad) is not None:
                by_name[name] = whole(gradient).detach().float().cpu()
        if self.mesh.pp_group is not None:
            of_stages = reversed(gathered(by_name, self.mesh.pp_group))
            by_name = {name: gradient for stage in of_stages for name, gradient in stage.items()}
        self.optimizer.zero_grad(set_to_none=True)
        self._end_other_work()
        return means.loss, by_name

    # State ----------------------------------------------------------------------------------------------------------

    def save_state(self, folder: str, next_step: int) -> None:
        """Write the state of this run to a folder; `next_step` is the first step of a resumed run."""
        optimizer = self.optimizer if self.config.checkpointing.save_optimizer else None
        state.save_state(storage.at(folder), self.model, optimizer, next_step)
        self._end_other_work()

    def begin_save(self, folder: str, next_step: int) -> None:
        """Copy the state and write it to a folder while training continues; call `finish_save` afterwards."""
        if self._background is None:
            self._background = BackgroundSave()
        optimizer = self.optimizer if self.config.checkpointing.save_optimizer else None
        self._background.start(storage.at(folder), self.model, optimizer, next_step)
        self._end_other_work()

    def finish_save(self) -> None:
        """Wait until all ranks have written what `begin_save` began."""
        assert self._background is not None
        self._background.finish()
        self._idle_since = None

    def load_state(self, folder: str) -> int:
        """Read the state back, on any layout; return the step to start with."""
        path = storage.at(folder)
        optimizer = self.optimizer if state.has_optimizer(path) else None
        if optimizer is None and self._rank == 0:
            _log.warning("%s holds no optimizer state: the optimizer starts fresh, and losses will differ", folder)
        if self._snapshots is not None:
            self._snapshots.finish()
        release_gathered(self.model)
        next_step = state.load_state(path, self.model, optimizer)
        if self._published is not None:
            self._published.step = None
        self._end_other_work()
        return next_step

    def load_snapshot(self, version: int) -> int:
        """Go back to a snapshot in memory; return the step to go on with."""
        assert self._snapshots is not None, "the driver asks for it only if there are snapshots"
        next_step = self._snapshots.load(version)
        if self._published is not None:
            self._published.step = None
        self._end_other_work()
        return next_step

    def save_hf(self, folder: str) -> None:
        """Write the model as a Hugging Face folder."""
        policy, vocabulary = self.config.policy, self.vocabulary
        start = None if policy.model_name is None else Path(policy.model_name)
        dtype = getattr(torch, self.config.checkpointing.hf_dtype or policy.precision)
        companions = export.Companions(vocabulary.tokenizer_dir, vocabulary.end_ids, start, dtype)
        export.save_hf(storage.at(folder), self.model, companions)
        self._end_other_work()

    def process_id(self) -> int:
        """Return the process ID of this worker. Not collective."""
        return os.getpid()

    def teardown(self) -> None:
        """Leave the process group.

        A barrier comes first: a process that leaves early can abort collectives of the others.
        """
        self._close_published()
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()

    def _close_published(self) -> None:
        for each in (self._published, self._snapshots):
            if each is not None:
                each.close()
        self._published = self._snapshots = None

    def _end_other_work(self) -> None:
        """Release gathered weights and forget the time of the last step after other work."""
        # A forward pass without a backward pass leaves the weights of the last FSDP group gathered, and they would be
        # out of date after the next optimizer step.
        release_gathered(self.model)
        self._idle_since = None


def step_seed(seed: int, number: int, rank: int) -> int:
    """Return a seed that is distinct for every (step, rank) of a run and equal on every machine."""
    return (seed * 1_000_003 + number * 65_537 + rank) % 2**63
