"""Driver-side handle on a model in training: starts the workers, sends steps, and keeps checkpoints.

    policy = Policy(TrainingWorker, config, vocabulary, total_steps=100)
    policy.train(batch, loss_fn)

Needs an initialised Ray. The base of the handles of each kind of training (`raylane.sft.run.policy`), and called by
programs that build their own batches.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self

from raylane import weights
from raylane.errors import CheckpointError, ConfigError, RaylaneError, WeightsError, WorkerCallError, WorkerLostError
from raylane.training import storage
from raylane.training.checkpoint import folders, publishing, state
from raylane.training.checkpoint.folders import Saved
from raylane.training.config.layout import check_batch, check_model_folder, micro_batches
from raylane.training.config.load import Config, dump, dump_to_share, make_config
from raylane.training.config.megatron_limits import check_installed
from raylane.training.config.schema import TrainingConfig
from raylane.training.labels import IGNORED
from raylane.training.model.loss import LossFunction
from raylane.training.parallel.mesh import AXES, COPY_AXES, DATA_AXES, ParallelDims
from raylane.training.run import delivery
from raylane.training.run.snapshots import Snapshot, usable
from raylane.training.run.worker import SAVE_ENDED, TrainingWorker
from raylane.training.storage import Place
from raylane.training.vocabulary import Vocabulary
from raylane.weights.service.answers import VersionInfo
from raylane.workers.batch import BatchDict
from raylane.workers.compiled import CompiledWorkerGroup
from raylane.workers.future import GroupFuture
from raylane.workers.options import WorkerOptions

_log = logging.getLogger(__name__)


def worker_options(config: TrainingConfig) -> WorkerOptions:
    """Return the resources that each worker requests from Ray: CPUs (also its threads), a GPU if any, and its node."""
    cluster = config.cluster
    return WorkerOptions(
        num_cpus=cluster.cpus_per_worker,
        num_gpus=1 if cluster.gpus_per_node else 0,
        env_vars={"TOKENIZERS_PARALLELISM": "false", **cluster.env_vars},
        workers_per_node=cluster.num_workers // cluster.num_nodes,
        spares=cluster.spare_workers,
        start_timeout_s=cluster.start_timeout_s,
    )


@dataclass(frozen=True)
class _Unfinished:
    """Checkpoint that is being written."""

    step: int
    folder: Place
    partial: Place
    metrics: Mapping[str, float]


class _Course(NamedTuple):
    """Which snapshots are of the present course of the run: those after a version, and the one that it went back to."""

    after: int
    used: int | None


@contextmanager
def _writing(place: Place | None, failed: str, path: Place) -> Iterator[None]:
    """Discard a place (None: none yet) after an error in a `with` block; an OSError becomes CheckpointError."""
    try:
        yield
    except (OSError, RaylaneError) as error:
        if place is not None:
            publishing.discard(place)  # frees the space again if the disk is full
        if isinstance(error, RaylaneError):
            raise
        text = f"{failed}: {error}. Check its free space and permissions"
        raise CheckpointError(text, path=str(path)) from error


class Policy(Generic[Config]):
    """Workers that hold a model and train it; the constructor waits until they are ready.

    `shutdown`, or the end of a `with` block, ends the workers. Methods wait unless their name ends in `_nowait`. A
    failed worker raises WorkerLostError or WorkerCallError, after which the policy can only be shut down. A
    ConfigError, DataError or CheckpointError inside a worker is raised unchanged.
    """

    more_keys_for_exact_resume: ClassVar[tuple[str, ...]] = ()
    """Keys of the configuration that losses depend on in one kind of training, besides those of `folders`."""

    def __init__(
        self,
        worker: type[TrainingWorker[Config, Any]],
        config: Config,
        vocabulary: Vocabulary,
        total_steps: int,
        *worker_args: Any,
    ) -> None:
        """Start workers of the class `worker` and build the model in them.

        `total_steps` determines the learning rate schedule. `worker_args` are the last arguments of their constructor.
        """
        check_model_folder(config)
        check_installed(config.policy)
        self._config = config
        self._dims = ParallelDims.of(config.policy.dtensor_cfg, config.cluster.num_workers)
        self.next_step = 0
        """Number of the step that `train` runs next, counted from 0."""
        self._saving: _Unfinished | None = None
        """Checkpoint that `save_nowait` has begun; None if there is none."""
        self.save_ended = False
        """True if the workers have written the checkpoint that `save_nowait` began, or failed to."""
        every = config.loop.snapshot_every
        self._snapshot_name = f"raylane snapshots {secrets.token_hex(8)}" if every else None
        """Name of weights under which the workers keep snapshots; None if they take none."""
        self._course = _Course(0, None)
        self._losses: dict[str, LossFunction] = {}
        """Loss functions that the workers have, by name; kept to recognise a function that was sent before."""
        device = "cuda" if config.cluster.gpus_per_node else "cpu"
        policy, graph, sharding = config.policy, config.policy.compiled_graph, config.policy.dtensor_cfg
        self.group = CompiledWorkerGroup(  # public, for direct calls
            worker,
            self._dims.named_sharding,
            init_args=(device, config.cluster.cpus_per_worker, *worker_args),
            options=worker_options(config),
            mode=graph.mode,
            inflight=graph.inflight or config.steps_in_flight,
        )
        # Absolute paths: the working directory of the workers is another one.
        lora = sharding.lora_cfg
        if lora.adapter_path is not None:
            lora = lora.model_copy(update={"adapter_path": str(Path(lora.adapter_path).resolve())})
        name = None if policy.model_name is None else str(Path(policy.model_name).resolve())
        sharding = sharding.model_copy(update={"lora_cfg": lora})
        policy = policy.model_copy(update={"model_name": name, "dtensor_cfg": sharding})
        self._setup = (config.model_copy(update={"policy": policy}), vocabulary, total_steps)
        try:
            self.facts: dict[str, Any] = self._set_up()
            """Facts about the model for the log, as `setup` of the workers returns them."""
        except BaseException:  # also KeyboardInterrupt: workers must not remain without a handle
            self.group.shutdown(timeout=10)
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the workers on all of them, wait, and return the result of one of them."""
        return self._wait_for(self._send(method, *args))[0]

    # Training -------------------------------------------------------------------------------------------------------

    def train_nowait(
        self,
        batch: BatchDict,
        loss_fn: LossFunction | None = None,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> GroupFuture:
        """Send one step on a batch that the driver made, without waiting; `train` describes the arguments."""
        if loss_fn is None:
            # Unshifted labels repeat their own tokens, and the model would learn to copy its input. transformers shifts
            # labels inside its models, so its users have such labels.
            ids, labels = batch["input_ids"], batch["labels"]
            learned = labels != IGNORED
            unshifted = bool((labels == ids)[learned].all())
            shifted = bool((labels[:, :-1] == ids[:, 1:])[learned[:, :-1]].all())
            if bool(learned.any()) and unshifted and not shifted:
                raise ValueError(
                    "labels are not shifted: every label is the token at its own position. Pass labels[:, i] = "
                    "input_ids[:, i + 1], and -100 at positions without a loss"
                )
        if gbs is not None and gbs != batch.size:
            raise ValueError(f"gbs must be the number of rows in the batch ({batch.size}), got {gbs}; leave it out")
        future = self._send_batch(batch, loss_fn, mbs, eval_mode=eval_mode)
        if not eval_mode:
            self.next_step += 1
        return future

    def _send_batch(self, batch: BatchDict, loss_fn: LossFunction | None, mbs: int | None, **how: bool) -> GroupFuture:
        micro_batches(batch.size, mbs or self._config.policy.micro_batch_divisor, self._dims.readers)
        check_batch(self._config, batch, mbs, evaluates=how.get("eval_mode", False))
        parts = batch.shard(self._dims.readers)
        loss_name = None  # cross-entropy
        if loss_fn is not None:
            # Functions are compared by identity and sent once: pickling one again with every step would be slow.
            loss_name = next((name for name, sent in self._losses.items() if sent is loss_fn), None)
            if loss_name is None:
                loss_name = f"loss-{len(self._losses)}"
                self.group.call("add_loss", loss_name, loss_fn).results()
                self._losses[loss_name] = loss_fn
        # The group takes one list per axis, outermost first: parts[replica][shard].
        inner = self._dims.dp_shard
        return self.group.call(
            "train_batch",
            shard=DATA_AXES,
            replicate=COPY_AXES,
            one_result=AXES,
            common={"number": self.next_step, "loss": loss_name, "micro_batch_size": mbs, **how},
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
        """Run one optimizer step on `batch`, the whole global batch; return its metrics.

        `batch`: input_ids, position_ids and labels, int64 [B, T] (labels are shifted, -100 where there is no loss), and
        any other tensors that `loss_fn` reads. `loss_fn(logits, batch)` returns the loss summed over supervised tokens
        (`loss.LossFunction`); None means cross-entropy. With `eval_mode` only the loss is computed, without an
        optimizer step. `mbs`: rows that a worker processes at once (default: as configured). `gbs`, if
        given, must equal the number of rows. Raises ValueError if the rows do not divide among workers and
        micro-batches.
        """
        return self.result(self.train_nowait(batch, loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs))

    def recover(self) -> tuple[int, ...]:
        """Form the group again after a failure, with the initial weights; wait until it is ready. Return the new ranks.

        Processes that live go on. Call `load` next to continue from a checkpoint, or `has_loaded`. Raises the errors
        of the constructor.
        """
        new = self.group.recover()
        self._saving, self.save_ended = None, False
        self._losses.clear()
        self.next_step = 0
        self.facts = self._set_up()
        return new

    def snapshot(self, most_steps: int) -> Snapshot | None:
        """Return the newest snapshot in memory of at most so many steps; None if there is none."""
        return usable(self._snapshot_versions(), most_steps, self._course.after, self._course.used)

    def forget_snapshots(self, used: int | None = None) -> None:
        """Note that the run goes back: earlier snapshots are of steps that are made again, except the one `used`."""
        after = max((each.number for each in self._snapshot_versions()), default=0)
        self._course = _Course(after, used)

    def _snapshot_versions(self) -> list[VersionInfo]:
        if self._snapshot_name is None:
            return []
        try:
            return weights.versions(self._snapshot_name)
        except WeightsError:  # none was taken yet, or they are lost with the actors that keep them
            return []

    def has_loaded(self, snapshot: Snapshot) -> bool:
        """Go back to a snapshot in all workers. Return False if that fails: they are then as after `recover`."""
        try:
            self.next_step = int(self.call("load_snapshot", snapshot.version))
        except (WeightsError, WorkerCallError) as error:
            _log.warning("the snapshot after step %d cannot be loaded: %s", snapshot.step, error)
            self.next_step = 0
            self.facts = self._set_up()  # a part of it may have been copied
            return False
        self.forget_snapshots(snapshot.version)
        return True

    def _set_up(self) -> dict[str, Any]:
        """Build the model in all workers, after their nodes have the files that they need; return facts for the log."""
        config, vocabulary, _ = self._setup
        copies = delivery.provide(config, vocabulary, self.group.node_ids)
        self.call("use_copies", copies)
        if self._snapshot_name is not None:
            self.call("use_snapshots", self._snapshot_name)
        return dict(self.call("setup", *self._setup))

    def result(self, future: GroupFuture, timeout_s: float | None = None) -> dict[str, float]:
        """Wait for a step that was sent and return its metrics, which are the same on all workers.

        Waits at most `timeout_s` seconds (None: `step_timeout_s` of the configuration); after WorkerCallError you may
        wait again.
        """
        metrics: dict[str, float] = self._wait_for(future, timeout_s)[0]
        # Reported with a step, because a call of its own would wait behind the steps in flight.
        self.save_ended = metrics.pop(SAVE_ENDED, 0.0) > 0 or self.save_ended
        return metrics

    def publish_weights(self, *, again: bool = False) -> None:
        """Publish the weights after the last step that was sent, unless that step has published them.

        With `again`, publish them in any case, because the memory that kept them is gone.
        Readers find them under `policy.publish_weights.name`; ConfigError if it is null. WeightsTimeoutError if a
        reader holds the oldest version for longer than `policy.publish_weights.timeout_s`.
        """
        if self._config.policy.publish_weights.name is None:
            raise ConfigError(
                "policy.publish_weights.name=null publishes nothing. Set it to the name under which readers look",
                key="policy.publish_weights.name",
            )
        self.call("publish_weights", self.next_step, again)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def save(self, metrics: Mapping[str, float], *, with_hf: bool = False) -> Saved:
        """Save the state after the last step that was sent, as `checkpointing.checkpoint_dir`/step_N; remove old ones.

        `metrics` decide which checkpoints are the best, e.g. {"val:loss": 4.5}. `with_hf` adds the model as a Hugging
        Face folder after the state is complete: if that export raises CheckpointError, the checkpoint is still there
        and can be resumed from.
        """
        saved = self._complete(self._begin("save_state", metrics))
        if with_hf:
            self.export(saved)
        return saved

    def save_nowait(self, metrics: Mapping[str, float]) -> None:
        """Begin to save the state after the last step that was sent, as `save` does, while further steps run.

        Waits only until all workers have copied their state. Call `finish_save` before the next save; `save_ended` is
        True as soon as it need not wait.
        """
        assert self._saving is None, "finish_save comes first"
        self._saving = self._begin("begin_save", metrics)

    def finish_save(self) -> Saved | None:
        """Wait until what `save_nowait` began is a complete checkpoint; return it, None if nothing was begun.

        After the loss of a worker the checkpoint is still completed if all workers had written their files by then.
        """
        if self._saving is None:
            return None
        unfinished, self._saving, self.save_ended = self._saving, None, False
        try:
            self.call("finish_save")
        except RaylaneError:
            if not state.is_written(unfinished.partial / "state"):
                publishing.discard(unfinished.partial)
                raise
        return self._complete(unfinished)

    def _begin(self, method: str, metrics: Mapping[str, float]) -> _Unfinished:
        """Let the workers write the state of the current step; on failure remove its partial folder."""
        folder = storage.at(self._config.checkpointing.checkpoint_dir)
        failed = f"step {self.next_step} cannot be saved in {folder}"
        with _writing(None, failed, folder):
            partial = publishing.begin(folder, self.next_step)
        with _writing(partial, failed, folder):
            self.call(method, str(partial / "state"), self.next_step)
        return _Unfinished(self.next_step, folder, partial, dict(metrics))

    def _complete(self, written: _Unfinished) -> Saved:
        """Complete a checkpoint whose state is written, then remove old ones."""
        settings, failed = self._config.checkpointing, f"step {written.step} cannot be saved in {written.folder}"
        with _writing(written.partial, failed, written.folder):
            saved = folders.commit(written.partial, written.step, written.metrics, self._description())
        # Old checkpoints are removed only after the new one is complete.
        with _writing(None, failed, written.folder):
            whole, damaged = folders.list_whole(written.folder)
            for damage in damaged:  # never removed: the user may want to examine the files
                _log.warning("%s; this checkpoint counts for neither keep_latest_k nor keep_top_k", damage)
            for old in folders.keep(whole, settings)[1]:
                publishing.remove(old.path)
        return saved

    def export(self, saved: Saved) -> Place:
        """Add the current model to the checkpoint of this step as its folder `hf`; return that folder.

        The folder is written beside the checkpoint and then renamed into it, so it is complete or absent. On failure,
        CheckpointError states that the checkpoint itself is complete.
        """
        partial = publishing.begin_export(saved.path)
        try:
            self.call("save_hf", str(partial))
            return publishing.publish_export(saved.path, partial)
        except (OSError, RaylaneError) as error:
            publishing.discard(partial)
            if isinstance(error, WorkerLostError):  # a trainer starts the workers again
                raise
            raise CheckpointError(
                f"the Hugging Face folder of step {saved.step} could not be written: {error}. The checkpoint "
                f"{saved.path} is complete: correct the cause and run the same command again, or set "
                "checkpointing.save_hf=false",
                path=str(saved.path),
            ) from error

    def save_hf(self, folder: str | Place) -> None:
        """Write the model as a Hugging Face folder at any path or URL, independent of checkpoints.

        A local folder is written beside its place, as FOLDER.partial, and then renamed: it is complete or absent.
        Raises ConfigError if there are files in it already, CheckpointError if it cannot be written.
        """
        target = storage.at(folder).resolve()
        if not isinstance(target, Path):
            self.call("save_hf", str(target))
            return
        if target.exists() and any(target.iterdir()):
            # Weights of two models would lie side by side.
            raise ConfigError(f"{target} holds files already. Name a folder that does not exist, or is empty")
        draft = target.with_name(f"{target.name}.partial")
        publishing.discard(draft)  # of an interrupted export
        with _writing(draft, f"{target} could not be written", target):
            self.call("save_hf", str(draft))
            draft.rename(target)

    def load(self, path: str | Place) -> int:
        """Resume from a checkpoint folder (step_N), saved on this or another layout; return the next step.

        Runs no code from the folder. Raises CheckpointDamagedError if its files are incomplete, CheckpointError if they
        belong to another user (`checkpointing.allow_other_owner`) or to another model.
        """
        saved = folders.read(storage.at(path))
        folders.refuse_other_owner(saved.path, self._config.checkpointing)
        before = saved.config
        facts = self._data_facts()
        # The facts stand beside the sections, and the schema does not have them.
        plain = {key: value for key, value in before.items() if key not in facts}
        with suppress(ConfigError):  # of a key of an older version that no longer exists
            # With defaults for keys that did not exist when the checkpoint was written.
            before = {**dump(make_config(plain, type(self._config))), **{key: before.get(key) for key in facts}}
        now = self._description()
        if (change := folders.layout_change(before, now)) is not None:
            _log.warning("%s", change)
        if changes := folders.differences(before, now, self.more_keys_for_exact_resume):
            _log.warning("resuming with a different configuration, so losses will differ: %s", "; ".join(changes))
        self.next_step = int(self.call("load_state", str((saved.path / "state").resolve())))
        return self.next_step

    def _data_facts(self) -> dict[str, Any]:
        """Return what a checkpoint records of the data, besides the configuration."""
        return {}

    def _description(self) -> dict[str, Any]:
        return {**dump_to_share(self._config), **self._data_facts()}

    def shutdown(self, timeout_s: float = 30.0) -> bool:
        """End the workers within `timeout_s` seconds; return True if all ended cleanly. A second call does nothing."""
        ended = self.group.shutdown(timeout_s, cleanup_method="teardown")
        self._drop_snapshots()
        return ended

    def _drop_snapshots(self) -> None:
        if self._snapshot_name is not None:
            with suppress(RaylaneError):  # the Ray session may have ended
                weights.drop(self._snapshot_name)

    def abandon(self) -> None:
        """Kill the workers at once: after a failure, some may wait forever for workers that have ended."""
        self.group.shutdown(timeout=10)
        self._drop_snapshots()

    def _send(self, method: str, *args: Any) -> GroupFuture:
        """Call a method on all workers with the same arguments; only one worker sends its result back."""
        return self.group.call(method, *args, replicate=AXES, one_result=AXES)

    def _wait_for(self, future: GroupFuture, timeout_s: float | None = None) -> list[Any]:
        limit_s, key = self._config.loop.step_timeout_s, f"{self._config.loop_name}.step_timeout_s"
        try:
            return future.results(limit_s if timeout_s is None else timeout_s)
        except WorkerCallError as error:
            if "timeout_s" in error.fields and timeout_s is None:
                raise WorkerCallError(
                    f"{future.label} took more than {key}={limit_s:g} seconds on ranks {error.fields['ranks']}. Raise "
                    f"{key}, or set it to null for no limit",
                    **error.fields,
                ) from error
            # WorkerCallError <- Ray's error <- the exception that the method raised. A RaylaneError tells the user
            # what to do, so it is raised itself instead of a remote traceback that contains it.
            raised = getattr(error.__cause__, "cause", None)
            if isinstance(raised, RaylaneError):
                raise raised from error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.shutdown()
        else:
            self.abandon()
