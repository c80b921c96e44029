"""The driver's handle on a model in training: starts the workers, sends steps, and keeps checkpoints.

    policy = Policy(config, prepare(config), total_steps=100)
    policy.train_step(0)                    # the workers read their own rows; a step number is all that is sent
    policy.train(batch, loss_fn)            # or the driver hands out a batch

Needs an initialised Ray. Called by `trainer`, and by programs that bring their own batches.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from raylane.errors import CheckpointError, ConfigError, RaylaneError, WorkerCallError
from raylane.sft import checkpoint
from raylane.sft.config import RunConfig, build_config, dump
from raylane.sft.layout import micro_batches
from raylane.sft.loss import IGNORED
from raylane.sft.parallel import ParallelDims
from raylane.sft.worker import SftWorker
from raylane.workers.batch import BatchDict
from raylane.workers.group import WorkerGroup, WorkerOptions

if TYPE_CHECKING:
    from raylane.sft.checkpoint import Saved
    from raylane.sft.data import PreparedData
    from raylane.sft.loss import LossFunction
    from raylane.workers.future import GroupFuture

__all__ = ["Policy", "worker_options"]

_log = logging.getLogger(__name__)


def worker_options(config: RunConfig) -> WorkerOptions:
    """Return what each worker requests from Ray: CPUs (as threads too), a GPU if the nodes lend any, and its node."""
    cluster = config.cluster
    return WorkerOptions(
        num_cpus=cluster.cpus_per_worker,
        num_gpus=1 if cluster.gpus_per_node else 0,
        env_vars={"TOKENIZERS_PARALLELISM": "false", **cluster.env_vars},
        workers_per_node=cluster.num_workers // cluster.num_nodes,
        start_timeout_s=cluster.start_timeout_s,
    )


def _with_defaults(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved description, with the defaults of keys that did not exist when it was written."""
    plain = {key: value for key, value in saved.items() if key != "prepared"}
    try:
        return {**dump(build_config(plain)), "prepared": saved.get("prepared")}
    except ConfigError:  # a key that is no longer there
        return saved


def _refuse_unshifted(batch: BatchDict) -> None:
    """Raise ValueError for labels that repeat their own tokens: training would teach the model to copy its input.

    transformers shifts labels within its models, so its users have them unshifted.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    learned = labels != IGNORED
    unshifted = bool((labels == ids)[learned].all())
    shifted = bool((labels[:, :-1] == ids[:, 1:])[learned[:, :-1]].all())
    if bool(learned.any()) and unshifted and not shifted:
        raise ValueError(
            "labels are not shifted: every label is the token of its own position. Give labels[:, i] = "
            "input_ids[:, i + 1], and -100 where nothing is learned"
        )


def _for_workers(config: RunConfig) -> RunConfig:
    """Return the configuration with an absolute `policy.model_name`: workers have a working directory of their own."""
    name = config.policy.model_name
    if name is None:
        return config
    return config.model_copy(
        update={"policy": config.policy.model_copy(update={"model_name": str(Path(name).resolve())})}
    )


class Policy:
    """Workers with a model, ready to train. Waits until they are; `shutdown` (or a `with` block) ends them.

    Methods wait unless their name ends in `_nowait`. Failures of workers are WorkerLostError and WorkerCallError (after
    one the policy can only be shut down); a ConfigError, DataError or CheckpointError of a worker is raised as such.
    """

    def __init__(self, config: RunConfig, prepared: PreparedData, total_steps: int) -> None:
        """`total_steps` shapes the learning rate's schedule."""
        self._config = config
        self._dims = ParallelDims.of(config)
        self._data_key = prepared.train.parent.name
        """Hash of data, tokenizer and template, from the name of the cache folder."""
        self._next = 0
        """Step that `train` runs next."""
        self._losses: dict[str, LossFunction] = {}
        """Loss functions that the workers have; kept here so that identity can be compared."""
        device = "cuda" if config.cluster.gpus_per_node else "cpu"
        self._group = WorkerGroup(
            SftWorker,
            self._dims.named_sharding(),
            init_args=(device, config.cluster.cpus_per_worker),
            options=worker_options(config),
        )
        try:
            self.facts: dict[str, Any] = self._one("setup", _for_workers(config), prepared, total_steps)
        except BaseException:
            self._group.shutdown(timeout_s=10)
            raise

    @property
    def group(self) -> WorkerGroup:
        """The workers, for calls of one's own."""
        return self._group

    @property
    def next_step(self) -> int:
        """The step that `train` would run, counted from 0."""
        return self._next

    # Training -------------------------------------------------------------------------------------------------------

    def train_step_nowait(self, number: int) -> GroupFuture:
        """Send step `number`, for which each worker reads its own rows. Steps run in the order of sending."""
        self._next = number + 1
        return self._send("train_step", number)

    def train_step(self, number: int) -> dict[str, float]:
        """Run step `number`; returns its metrics (see `SftWorker.train_step`)."""
        return self.result(self.train_step_nowait(number))

    def train_nowait(
        self,
        batch: BatchDict,
        loss_fn: LossFunction | None = None,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> GroupFuture:
        """Send one step on a batch that the driver made: see `train`."""
        size = batch.size
        if loss_fn is None:
            _refuse_unshifted(batch)
        if gbs is not None and gbs != size:
            raise ValueError(f"gbs={gbs}, but the batch has {size} rows; one call is one step on one global batch")
        rows = mbs or self._config.policy.train_micro_batch_size
        micro_batches(size, rows, self._dims.world)
        parts = batch.shard(self._dims.world)
        inner = self._dims.dp_shard
        number = self._next
        if not eval_mode:
            self._next += 1
        return self._group.run_all_workers_sharded_data(
            "train_batch",
            in_sharded_axes=self._dims.axes,
            output_is_replicated=self._dims.axes,
            common_kwargs={
                "number": number,
                "loss": self._loss_name(loss_fn),
                "micro_batch_size": rows,
                "eval_mode": eval_mode,
            },
            data=[parts[i : i + inner] for i in range(0, len(parts), inner)],
        )

    def train(
        self,
        batch: BatchDict,
        loss_fn: LossFunction | None = None,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, float]:
        """One optimizer step on `batch`, the whole global batch; returns its metrics.

        `batch`: input_ids, position_ids and labels, int64 [B, T] (labels shifted, -100 where nothing is learned), and
        whatever `loss_fn` reads besides. `loss_fn(logits, batch)` returns the loss summed over supervised tokens (see
        `loss.LossFunction`); None is cross-entropy. `eval_mode`: only the loss, no step. `mbs`: rows that a worker runs
        at once (default policy.train_micro_batch_size). Raises ValueError when the rows do not divide.
        """
        return self.result(self.train_nowait(batch, loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs))

    def validate(self) -> dict[str, float]:
        """Loss on the validation set, and over how many tokens."""
        return dict(self._one("evaluate"))

    def result(self, future: GroupFuture, timeout_s: float | None = None) -> dict[str, float]:
        """The metrics of a step that was sent. All workers agree on them; one sends them."""
        metrics: dict[str, float] = self._results(future, timeout_s)[0]
        return metrics

    def _loss_name(self, loss_fn: LossFunction | None) -> str | None:
        if loss_fn is None:
            return None
        for name, known in self._losses.items():
            if known is loss_fn:
                return name
        name = f"loss-{len(self._losses)}"
        self._group.get_all_worker_results(self._group.run_all_workers_single_data("add_loss", name, loss_fn))
        self._losses[name] = loss_fn
        return name

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def save(self, metrics: Mapping[str, float], *, with_hf: bool = False) -> Saved:
        """Save the state after the last step that was sent, as `checkpointing.checkpoint_dir`/step_N; drop old ones.

        `metrics` decide which are the best, e.g. {"val:loss": 4.5}. `with_hf` adds the model as a Hugging Face folder,
        after the state is complete: CheckpointError of the export leaves the checkpoint there, ready to resume from.
        """
        settings = self._config.checkpointing
        folder = Path(settings.checkpoint_dir)
        try:
            saved = self._write(folder, metrics)
            whole, damaged = checkpoint.list_whole(folder)
            for damage in damaged:  # not removed: somebody may want to look at it
                _log.warning("%s; it counts for neither keep_latest_k nor keep_top_k", damage)
            _, removable = checkpoint.keep(whole, settings)
            for old in removable:
                checkpoint.remove(old)
        except OSError as error:
            raise CheckpointError(
                f"step {self._next} cannot be saved in {folder}: {error}", path=str(folder)
            ) from error
        if with_hf:
            self.export(saved)
        return saved

    def _write(self, folder: Path, metrics: Mapping[str, float]) -> Saved:
        partial = checkpoint.begin(folder, self._next)
        try:
            self._one("save_state", str(partial / "state"), self._next)
            return checkpoint.commit(partial, self._next, metrics, self._description())
        except (OSError, RaylaneError):
            shutil.rmtree(partial, ignore_errors=True)  # what is half written would only keep a full disk full
            raise

    def export(self, saved: Saved) -> Path:
        """Add the model as it is now to a checkpoint of this step as its folder `hf`; returns that folder.

        Written beside the checkpoint and renamed into it, so the folder is whole or absent. On failure, CheckpointError
        says that the checkpoint itself is complete.
        """
        partial = checkpoint.begin_export(saved)
        try:
            self._one("save_hf", str(partial))
            return checkpoint.commit_export(saved, partial)
        except (OSError, RaylaneError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"the Hugging Face folder of step {saved.step} could not be made: {error}. The checkpoint {saved.path} "
                "is complete: correct the cause and run the same command again, or set checkpointing.save_hf=false",
                path=str(saved.path),
            ) from error

    def save_hf(self, folder: str | Path) -> None:
        """Write the model as a Hugging Face folder anywhere, e.g. without any checkpoint."""
        self._one("save_hf", str(Path(folder).resolve()))

    def load(self, path: str | Path) -> int:
        """Go on from a checkpoint folder (step_N), saved on this or another layout; returns the next step.

        Runs no code from the folder. CheckpointDamagedError when its files are not whole, CheckpointError when they
        belong to another user (see `checkpointing.allow_other_owner`) or to another model.
        """
        saved = checkpoint.read(Path(path))
        checkpoint.refuse_other_owner(saved.path, self._config.checkpointing)
        for difference in checkpoint.differences(_with_defaults(saved.config), self._description()):
            _log.warning("resuming with another configuration, losses will differ: %s", difference)
        self._next = int(self._one("load_state", str((saved.path / "state").resolve())))
        return self._next

    def _description(self) -> dict[str, Any]:
        return {**dump(self._config), "prepared": self._data_key}

    def shutdown(self, timeout_s: float = 30.0) -> bool:
        """End the workers; bounded, and harmless the second time. Returns whether they ended in good order."""
        return self._group.shutdown(timeout_s, cleanup_method="teardown")

    def abandon(self) -> None:
        """End the workers at once, without asking them: after a failure some may wait for ones that are gone."""
        self._group.shutdown(timeout_s=10)

    def _send(self, method: str, *args: Any) -> GroupFuture:
        axes = self._dims.axes
        return self._group.run_all_workers_sharded_data(
            method, *args, replicate_on_axes=axes, output_is_replicated=axes
        )

    def _one(self, method: str, *args: Any) -> Any:
        return self._results(self._send(method, *args))[0]

    def _results(self, future: GroupFuture, timeout_s: float | None = None) -> list[Any]:
        try:
            return self._group.get_all_worker_results(future, timeout_s)
        except WorkerCallError as error:
            said = getattr(error.__cause__, "cause", None)  # what the method raised, within Ray's error
            if isinstance(said, RaylaneError):  # it says what to do, which a remote traceback would bury
                raise said from error
            raise

    def __enter__(self) -> Policy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.shutdown()
        else:
            self.abandon()
