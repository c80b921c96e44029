"""A fine-tuning run: set up, loop, step. What `raylane sft` calls.

The driver only steers: it sends step numbers (or, with `sft.feed=driver`, batches) and reads a few figures per step,
`sft.steps_in_flight` steps late, so that the workers never wait for it. Before a validation or a save it waits for all
steps that are under way.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import torch

from raylane.errors import CheckpointDamagedError, CheckpointError, ConfigError, WorkerLostError
from raylane.sft import checkpoint, order, sample
from raylane.sft.cache import TokenCache
from raylane.sft.checkpoint import Saved
from raylane.sft.config import CheckpointingConfig, RunConfig
from raylane.sft.curve import loss_curve
from raylane.sft.data import PreparedData, prepare
from raylane.sft.folders import held
from raylane.sft.metrics import MetricsLog
from raylane.sft.policy import Policy
from raylane.sft.rows import RowSource, open_rows
from raylane.workers.batch import BatchDict
from raylane.workers.future import GroupFuture

__all__ = ["RunResult", "StopRequest", "Trainer", "how_to_go_on", "run"]

_log = logging.getLogger(__name__)

_SAMPLE_LIMIT = 200_000_000
"""Parameters up to which the driver loads the finished model to show an answer."""
_REACHED_S = 15.0
"""Seconds in which a Ray cluster must accept a connection."""
_SHOWN = ("loss", "grad_norm", "lr", "tokens_per_s", "step_time_s", "data_time_s", "dispatch_time_s", "compute_time_s")


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    steps: int
    """Optimizer steps that the weights have seen, earlier runs included."""
    stopped: bool
    """Whether SIGTERM ended it before its last step."""
    train_loss: float | None
    """Of the last step; None if this run made none."""
    val_loss: float | None
    """Of the last validation; None if there was none."""
    checkpoint: Path | None
    """Where the state was saved last."""
    hf_dir: Path | None
    """The model as a Hugging Face folder."""
    curve: Path | None
    """Picture of the losses."""
    sample: sample.Sample | None
    """A question of the data, and what the model answers."""


def run(config: RunConfig) -> RunResult:
    """Train as configured, from the checkpoint that `checkpointing.resume` names; waits until the end.

    Connects to Ray when that has not been done (RAY_ADDRESS, else a Ray of its own on this machine). SIGTERM ends the
    run after the steps under way, with a checkpoint. Raises ConfigError (also when another run uses the same folders)
    and DataError before anything is started; WorkerLostError, WorkerCallError and CheckpointError later, after the
    workers have been ended.
    """
    prepared = prepare(config)
    rows = open_rows(prepared.train, config.policy, prepared.pad_id)
    total = order.total_steps(
        rows.num_rows, config.policy.train_global_batch_size, config.sft.max_num_steps, config.sft.max_num_epochs
    )
    with held(_folders(config)), MetricsLog(config.logger, config.logger.log_dir) as log:
        resumed = _start_point(config.checkpointing) if config.checkpointing.enabled else None
        return _run_from(config, prepared, rows, total, resumed, log)


def _start_point(settings: CheckpointingConfig) -> Saved | None:
    for path in checkpoint.recover(Path(settings.checkpoint_dir)):
        _log.warning("recovered %s: a run ended while it replaced this checkpoint", path)
    resumed = checkpoint.find(settings)
    checkpoint.refuse_later(settings, resumed.step if resumed else 0)
    return resumed


@contextmanager
def _lost_workers_told(config: RunConfig) -> Iterator[None]:
    """Say what the user of a run can do about a lost worker; the group's own advice is for those who drive a group."""
    try:
        yield
    except WorkerLostError as error:
        reason = str(error.fields.get("reason", error))
        raise WorkerLostError(f"{reason} The run has ended. {how_to_go_on(config)}", **error.fields) from error


def how_to_go_on(config: RunConfig) -> str:
    """Return a sentence on what the same command does after this run ended early. Reads the checkpoint folder."""
    settings = config.checkpointing
    try:
        whole = checkpoint.list_whole(Path(settings.checkpoint_dir))[0] if settings.enabled else []
    except CheckpointError as error:
        return f"Which checkpoint the same command would resume from cannot be told: {error}"
    if not whole:
        return "No checkpoint was saved, so the same command begins anew; checkpointing.save_period saves on the way"
    again = "Run the same command again" if settings.resume == "auto" else "Run it again with checkpointing.resume=auto"
    return f"{again}: it resumes from {whole[-1].path}, after step {whole[-1].step}"


def _folders(config: RunConfig) -> dict[str, str]:
    folders = {"logger.log_dir": config.logger.log_dir}
    if config.checkpointing.enabled:
        folders["checkpointing.checkpoint_dir"] = config.checkpointing.checkpoint_dir
    return folders


def _run_from(
    config: RunConfig, prepared: PreparedData, rows: RowSource, total: int, resumed: Saved | None, log: MetricsLog
) -> RunResult:
    with ExitStack() as stack:
        with _sigterm_held_back():
            stack.enter_context(_connected(config))
            stop = stack.enter_context(StopRequest())
        with _lost_workers_told(config), Policy(config, prepared, total) as policy:
            _log.info("%s workers ready: %s; a run of %d steps", config.cluster.num_workers, policy.facts, total)
            trainer = Trainer(config, policy, rows, log, total, stop)
            trainer.go_on_from(resumed)
            trainer.fit()
            parameters = int(policy.facts["parameters"])
        return _result(config, prepared, trainer, log, parameters)


class Trainer:
    """The loop over steps. One use: `go_on_from`, then `fit`."""

    def __init__(
        self, config: RunConfig, policy: Policy, rows: RowSource, log: MetricsLog, total_steps: int, stop: StopRequest
    ) -> None:
        self._config, self._policy, self._rows, self._log, self._stop = config, policy, rows, log, stop
        self.total_steps = total_steps
        self.saved: Saved | None = None
        """The last checkpoint of this run, or the one that it goes on from."""
        self.losses: dict[str, float] = {}
        """Latest "train:loss" and "val:loss"."""
        self._measured: tuple[int, float] | None = None
        """(steps done, loss) of the last validation."""
        self._in_flight: deque[tuple[int, GroupFuture]] = deque()
        """Steps that were sent and whose figures were not read yet, oldest first."""

    @property
    def done(self) -> int:
        """Steps that were sent, which is all that are done whenever nothing is in flight."""
        return self._policy.next_step

    def go_on_from(self, saved: Saved | None) -> None:
        """Load a checkpoint (None: begin anew), and forget figures and leftovers of steps that will be run again."""
        if saved is not None:
            saved, step = self._load(saved)
            self.saved = saved
            _log.info("going on from %s, step %d of %d", saved.path, step, self.total_steps)
            self._log.rewind(self.done)
        elif (aside := self._log.begin_anew()) is not None:
            _log.info("the figures of an earlier run are now in %s", aside)
        if self._config.checkpointing.enabled:
            for path in checkpoint.discard_partial(Path(self._config.checkpointing.checkpoint_dir)):
                _log.warning("removed %s: it was never finished", path)

    def _load(self, saved: Saved) -> tuple[Saved, int]:
        """Load a checkpoint, or under resume=auto the newest earlier one that is not damaged."""
        while True:
            try:
                return saved, self._policy.load(saved.path)
            except CheckpointDamagedError as damage:
                saved = checkpoint.fall_back(saved, self._config.checkpointing, damage)

    def fit(self) -> None:
        """All steps that are left."""
        if self._config.sft.val_at_start and self.done == 0:
            self._validate()
        while self.done < self.total_steps and not self._stop.requested:
            self._step()
        self._wait_for_steps()
        finished = self.done >= self.total_steps
        if finished and self._config.sft.val_at_end:
            self._validate()
        if self._config.checkpointing.enabled:
            self._save(with_hf=finished and self._config.checkpointing.save_hf)

    def _step(self) -> None:
        while len(self._in_flight) >= self._config.sft.steps_in_flight:
            self._read_oldest()
        self._in_flight.append((self.done, self._send()))
        if self._is_due(self._config.sft.val_period):
            self._wait_for_steps()
            self._validate()
        if self._config.checkpointing.enabled and self._is_due(self._config.checkpointing.save_period):
            self._wait_for_steps()
            if self.done < self.total_steps:  # the last one is saved by `fit`, with everything that belongs to it
                self._save(with_hf=False)

    def _send(self) -> GroupFuture:
        if self._config.sft.feed == "workers":
            return self._policy.train_step_nowait(self.done)
        rows = order.batch_rows(
            self._rows.num_rows,
            self._config.policy.train_global_batch_size,
            self._config.sft.seed,
            self.done,
            self._config.data.shuffle,
        )
        arrays = self._rows.rows(rows)
        return self._policy.train_nowait(BatchDict({name: torch.from_numpy(array) for name, array in arrays.items()}))

    def _is_due(self, period: int) -> bool:
        return period > 0 and self.done % period == 0

    def _wait_for_steps(self) -> None:
        while self._in_flight:
            self._read_oldest()

    def _read_oldest(self) -> None:
        number, future = self._in_flight.popleft()
        metrics = self._policy.result(future)
        step = number + 1  # people, and checkpoints, count the steps that are done
        self.losses["train:loss"] = metrics["loss"]
        self._log.log(step, metrics, "train")
        shown = {name: metrics[name] for name in _SHOWN}
        if step % self._config.sft.log_interval == 0 or step == self.total_steps:
            self._log.progress(step, self.total_steps, shown)
        else:
            self._log.live(step, self.total_steps, shown)

    def _validate(self) -> None:
        if self._measured is not None and self._measured[0] == self.done:
            return
        metrics = self._policy.validate()
        self._measured = (self.done, metrics["loss"])
        self.losses["val:loss"] = metrics["loss"]
        self._log.log(self.done, metrics, "val")
        self._log.progress(self.done, self.total_steps, {"val_loss": metrics["loss"]})

    def _save(self, *, with_hf: bool) -> None:
        if self.saved is not None and self.saved.step == self.done and (not with_hf or hf_dir(self.saved) is not None):
            return
        metrics = {name: loss for name, loss in self.losses.items() if name == "train:loss"}
        if self._measured is not None and self._measured[0] == self.done:
            metrics["val:loss"] = self._measured[1]
        if self.saved is not None and self.saved.step == self.done:  # written again, e.g. with the model beside it
            if not set(metrics) - set(self.saved.metrics):
                self._policy.export(self.saved)
                return
            metrics = {**self.saved.metrics, **metrics}
        self.saved = self._policy.save(metrics, with_hf=with_hf)
        _log.info("saved %s", self.saved.path)


def hf_dir(saved: Saved | None) -> Path | None:
    """The Hugging Face folder of a checkpoint, if it has one."""
    folder = saved.path / "hf" if saved is not None else None
    return folder if folder is not None and folder.is_dir() else None


class StopRequest:
    """Set by SIGTERM while the `with` block runs (in the main thread; elsewhere only by `ask`)."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._before: Any = None

    @property
    def requested(self) -> bool:
        """Whether the run should end soon."""
        return self._asked.is_set()

    def ask(self) -> None:
        """What SIGTERM does."""
        self._asked.set()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.ask()


@contextmanager
def _sigterm_held_back() -> Iterator[None]:
    """A SIGTERM that comes now is delivered at the end of the block, and processes started within it never get one.

    Batch systems and shells send it to all processes of a job: Ray's would be gone before the checkpoint is saved. (Ray
    keeps SIGINT from them in the same way.) They end with the driver, by the kernel's parent-death signal if need be.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _connected(config: RunConfig) -> Iterator[None]:
    """An initialised Ray: the caller's, the one that RAY_ADDRESS names, or one of our own that ends with the run."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # its default warns at every start
    level = logging.WARNING
    if address := os.environ.get("RAY_ADDRESS"):
        _refuse_unreachable(address)
        ray.init(logging_level=level)
    else:
        wanted = config.cluster.num_workers * config.cluster.cpus_per_worker
        cpus = max(wanted, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level=level)
    try:
        yield
    finally:
        ray.shutdown()


def _refuse_unreachable(address: str) -> None:
    """Raise ConfigError if nothing accepts connections at RAY_ADDRESS=host:port; Ray itself tries for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():  # e.g. "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHED_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"the Ray cluster at RAY_ADDRESS={address} cannot be reached: {error}. Start it, correct RAY_ADDRESS, or "
            "unset it to run on this machine alone"
        ) from error


def _result(config: RunConfig, prepared: PreparedData, trainer: Trainer, log: MetricsLog, parameters: int) -> RunResult:
    folder = hf_dir(trainer.saved)
    shown = None
    if folder is not None and parameters <= _SAMPLE_LIMIT:
        held_out = prepared.validation or prepared.train
        try:
            shown = sample.answer(folder, sample.first_prompt(TokenCache.open(held_out)), prepared.end_ids)
        except Exception as error:  # the run is complete and saved; a model that cannot answer must not end it so
            _log.warning("the model in %s was saved, but gave no sample answer: %r", folder, error)
    return RunResult(
        steps=trainer.done,
        stopped=trainer.done < trainer.total_steps,
        train_loss=trainer.losses.get("train:loss"),
        val_loss=trainer.losses.get("val:loss"),
        checkpoint=trainer.saved.path if trainer.saved else None,
        hf_dir=folder,
        curve=_curve(log) if trainer.losses else None,
        sample=shown,
    )


def _curve(log: MetricsLog) -> Path | None:
    try:
        return loss_curve(log.run_dir)
    except Exception as error:  # the run is complete and saved
        _log.warning("the loss curve could not be drawn: %r", error)
        return None
