"""The training run behind `raylane sft`: set up, loop, step.

The driver only controls the run: it sends step numbers (or, with `sft.feed=driver`, batches) and reads a few metrics
per step. It reads them `sft.steps_in_flight` steps late, so that the workers never wait for the driver:

    driver    send 0  send 1  read 0  send 2  read 1  send 3 ...      (steps_in_flight = 2)
    workers           [-- step 0 --][-- step 1 --][-- step 2 --] ...

Before a validation or a save the driver waits for all steps in flight.
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from raylane.errors import CheckpointError, StepNotFiniteError, WorkerLostError
from raylane.sft.config.schema import SftRunConfig
from raylane.sft.data import order
from raylane.sft.data.mixing import documents_of_step, open_training_rows, rows_of_step
from raylane.sft.data.places import place_of
from raylane.sft.data.prepare import prepare
from raylane.sft.data.prepared import PreparedData
from raylane.sft.data.rows import RowSource, TokenCache
from raylane.sft.run import sample
from raylane.sft.run.places import check_places, fetch_models
from raylane.sft.run.policy import SftPolicy
from raylane.sft.run.sample import Prompts
from raylane.training import storage
from raylane.training.checkpoint import folders, publishing
from raylane.training.checkpoint.folders import Saved
from raylane.training.report.metrics import MetricsLog, counted
from raylane.training.report.page import written_report
from raylane.training.run import ray_session
from raylane.training.run.opening import finished_text, open_folders, restart_text, snapshot_text
from raylane.training.run.record import RunRecord, Sample
from raylane.training.run.restarts import Restarts
from raylane.training.run.skipped_steps import SkippedSteps
from raylane.training.run.snapshots import Snapshot
from raylane.training.run.stopping import StopRequest, block_sigterm
from raylane.training.run.worker import SKIPPED
from raylane.training.storage import Place
from raylane.workers.batch import BatchDict
from raylane.workers.future import GroupFuture

_log = logging.getLogger(__name__)

_MAX_SAMPLE_PARAMETERS = 200_000_000
"""Largest number of parameters for which the driver loads the finished model to print a sample answer."""
_TOKENS_SEEN = "train:tokens_seen"
"""Key in the metrics of a checkpoint, from which a resumed run counts on."""
_PROGRESS_METRICS = {"loss": "loss", "lr": "lr", "grad_norm": "grad_norm", "tokens/s": "tokens_per_s"}
"""Figures of a progress line, by the name shown: few enough for a line of a terminal. metrics.jsonl has all."""


@dataclass(frozen=True)
class RunResult:
    """Result of a training run."""

    steps: int
    """Number of optimizer steps applied to the weights, including steps before the run was resumed."""
    stopped: bool
    """True if SIGTERM ended the run before its last step."""
    train_loss: float | None
    """Training loss of the last step; None if this run made no step."""
    val_loss: float | None
    """Loss of the last validation; None if there was none."""
    checkpoint: Place | None
    """Folder of the last checkpoint; None if none was saved."""
    hf_dir: Place | None
    """Folder of the model in Hugging Face format; None if it was not written."""
    sample: Sample | None
    """A prompt from the data and the model's answer to it; None if no sample was made."""
    report: Path | None = None
    """Page with plots of the run; None if it was not drawn."""


def run(config: SftRunConfig) -> RunResult:
    """Train as configured, from the checkpoint that `checkpointing.resume` names; wait until the run ends.

    Connects to Ray if needed: to the cluster at `cluster.address` or in RAY_ADDRESS, otherwise to a new local Ray that
    ends with the run. SIGTERM ends the run after the steps in flight, with a checkpoint.

    Raises ConfigError (also if another run uses the same folders) and DataError before anything is started. Raises
    WorkerLostError, WorkerCallError, CheckpointError and WeightsError during training; all workers have ended by then.
    """
    check_places(config)
    config = fetch_models(config)
    with RunRecord(config) as record:
        prepared = prepare(config)
        rows = open_training_rows(prepared, config)
        total = order.total_steps(
            rows.num_rows, config.policy.train_global_batch_size, config.sft.max_num_steps, config.sft.max_num_epochs
        )
        with open_folders(config) as (log, resumed):
            publishes = config.policy.publish_weights.name is not None
            limits = "sft.max_num_steps or sft.max_num_epochs"
            done = finished_text(config, resumed, total, limits, publishes=publishes)
            if resumed is not None and done is not None:
                _log.info("%s", done)
                return _finished(resumed, log.run_dir)
            record.open(log.run_dir, resumes=resumed is not None)
            result = _run_locked(config, prepared, rows, total, resumed, log)
            report = record.finish("ended on SIGTERM" if result.stopped else "finished", result.sample, result.hf_dir)
            return replace(result, report=report)


def _finished(saved: Saved, run_dir: Path) -> RunResult:
    """Return the result of a run that had nothing left to do; its report is that of the run that made the steps."""
    losses = saved.metrics.get("train:loss"), saved.metrics.get("val:loss")
    return RunResult(
        saved.step, False, *losses, saved.path, publishing.exported(saved.path), None, written_report(run_dir)
    )


def resume_advice(config: SftRunConfig) -> str:
    """Return a sentence that tells what the same command would do after this run. Reads the checkpoint folder."""
    settings = config.checkpointing
    try:
        whole = folders.list_whole(storage.at(settings.checkpoint_dir))[0] if settings.enabled else []
    except CheckpointError as error:
        return f"The checkpoint to resume from is not known: {error}"
    if not whole:
        return (
            "No checkpoint was saved, so the same command starts a new run. Set checkpointing.save_period to save "
            "during the run"
        )
    again = "Run the same command again" if settings.resume == "auto" else "Run it again with checkpointing.resume=auto"
    return f"{again}: it resumes from {whole[-1].path}, after step {whole[-1].step}; the steps after it are lost"


def _run_locked(
    config: SftRunConfig, prepared: PreparedData, rows: RowSource, total: int, resumed: Saved | None, log: MetricsLog
) -> RunResult:
    """Train with the folders already locked; return the result after all workers have ended."""
    with ExitStack() as stack:
        # A SIGTERM during this block is delivered at its end, when StopRequest handles it.
        with block_sigterm():
            stack.enter_context(ray_session.connect(config.cluster))
            stop = stack.enter_context(StopRequest())
        prompts = Prompts(config, prepared)
        try:
            with SftPolicy(config, prepared, total) as policy:
                way = "compiled graphs" if policy.group.compiled else "plain Ray calls"
                workers, steps = counted(policy.group.size, "worker"), counted(total, "step")
                facts = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in policy.facts.items())
                _log.info("%s ready (%s): %s; a run of %s", workers, way, facts, steps)
                trainer = Trainer(config, policy, rows, log, total, stop, prompts)
                trainer.resume_from(resumed)
                if (reason := policy.group.fallback_reason) is not None:
                    log.note(trainer.done, f"plain Ray calls instead of compiled graphs: {reason}")
                trainer.warm_up()
                trainer.fit()
                parameters = int(policy.facts["parameters"])
        except WorkerLostError as error:
            # The group's advice is for programs that call a group directly.
            cause = str(error.fields.get("reason", error))
            raise WorkerLostError(f"{cause} The run has ended. {resume_advice(config)}", **error.fields) from error
        return _result(prepared, trainer, parameters)


class Recorded(NamedTuple):
    """Tokens, seconds and loss of a run after a step."""

    tokens: float
    """Tokens of documents so far."""
    seconds: float
    """Seconds of steps so far."""
    loss: float
    """Loss of the step."""


class Trainer:
    """Loop over the steps of one run with the workers of `policy`. Call `resume_from` once, then `fit` once."""

    def __init__(
        self,
        config: SftRunConfig,
        policy: SftPolicy,
        rows: RowSource,
        log: MetricsLog,
        total_steps: int,
        stop: StopRequest,
        prompts: Prompts | None = None,
    ) -> None:
        self._config, self.policy, self._rows, self._log, self._stop = config, policy, rows, log, stop
        self._prompts = prompts
        self.total_steps = total_steps
        self.saved: Saved | None = None
        """Last checkpoint of this run, or the checkpoint that the run resumed from."""
        self.losses: dict[str, float] = {}
        """Latest values of "train:loss" and "val:loss"."""
        self._tokens_seen = 0.0
        """Number of tokens of documents in all steps whose metrics were read, also those before a resume."""
        self._validations: dict[int, float] = {}
        """Loss of each validation of this run, by the number of steps done."""
        self._in_flight: deque[tuple[int, GroupFuture]] = deque()
        """Steps sent to the workers whose metrics were not read yet, as (number, future), oldest first."""
        self._restarts = Restarts(config.sft.max_restarts)
        self._read = 0
        """Number of steps whose metrics were read."""
        self._recorded: dict[int, Recorded] = {}
        """Tokens, seconds and loss by number of steps whose metrics were read: those to which the run may go back."""
        self._seconds = 0.0
        """Seconds of all steps whose metrics were read."""
        overlaps = config.policy.compiled_graph.overlap_communication
        self._skipped = SkippedSteps(config.sft.max_skipped_steps, "sft.max_skipped_steps")
        self._max_in_flight = config.sft.steps_in_flight if overlaps else 1

    @property
    def done(self) -> int:
        """Number of steps sent; equal to the number of steps done whenever nothing is in flight."""
        return self.policy.next_step

    def resume_from(self, saved: Saved | None) -> None:
        """Load a checkpoint (None starts a new run); remove metrics and leftover files of steps that will run again."""
        if saved is not None:
            self.saved = saved = folders.load_whole(saved, self._config.checkpointing, self.policy.load)
            _log.info("resuming from %s, step %d of %d", saved.path, self.done, self.total_steps)
            # The steps after the checkpoint run again; metrics.jsonl must not hold two records of them.
            self._log.rewind(self.done)
            self._tokens_seen = saved.metrics.get(_TOKENS_SEEN, 0.0)
        elif (aside := self._log.begin_anew()) is not None:
            _log.info("the metrics of an earlier run were moved to %s", aside)
        self._discard_partial()

    def _discard_partial(self) -> None:
        """Remove checkpoints that were being written when a run or its workers ended."""
        if self._config.checkpointing.enabled:
            for path in publishing.discard_partial(storage.at(self._config.checkpointing.checkpoint_dir)):
                _log.warning("removed %s: it was incomplete", path)

    def warm_up(self) -> None:
        """Run the configured warm-up step, which changes nothing; call it after `resume_from`."""
        metrics = self.policy.warm_up(self._rows)
        if metrics is not None:
            _log.info("a warm-up step took %.3f s in the workers", metrics["compute_time_s"])

    def fit(self) -> None:
        """Run all remaining steps, with the configured validations and checkpoints.

        After the loss of a worker all workers are started again, at most `sft.max_restarts` times without a new
        checkpoint in between.
        """
        lost: WorkerLostError | None = None
        while True:
            try:
                if lost is not None:
                    self._restart(lost)
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
                # After the checkpoint, which must not be lost if a reader makes this fail.
                if self._config.policy.publish_weights.name is not None:
                    self.policy.publish_weights()
                return
            except WorkerLostError as error:
                self._finish_last_save()
                if not self._restarts.begin(self._usable_snapshot(), is_stopping=self._stop.requested):
                    raise
                lost = error
            except BaseException:
                self._finish_last_save()
                raise

    def _finish_last_save(self) -> None:
        """Wait for a checkpoint that is being written when the steps end by an error; a second error is only logged."""
        try:
            self._finish_save()
        except Exception as error:
            _log.warning("the checkpoint that was being written is lost: %s", error)

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        saved = self.policy.finish_save()
        if saved is not None:
            self._note_saved(saved)

    def _note_saved(self, saved: Saved) -> None:
        self.saved = saved
        self._restarts.note_saved()
        _log.info("saved %s", saved.path)

    def _restart(self, lost: WorkerLostError) -> None:
        """Form the group again, and go back to the newest snapshot or checkpoint of this run, or else to its start."""
        reason = str(lost.fields.get("reason", lost))
        self._in_flight.clear()
        self.losses.clear()
        before, seconds = self._read, self._seconds
        _log.warning("%s Starting the workers again", reason)  # which may take long, if a host is cut off
        new = self.policy.recover()
        if self._go_back():
            self._restarts.note_loaded(self.done)
            self._note(snapshot_text(reason, new, self.done, before, self._config, seconds - self._seconds))
        else:
            if self._restarts.is_over_limit:
                raise lost
            self.policy.forget_snapshots()
            self._note(restart_text(reason, self.saved, self._restarts.number, self._config.sft.max_restarts))
            if self.saved is not None:
                self.resume_from(self.saved)
            else:
                self._tokens_seen = 0.0
                self._log.rewind(0)
        self._read = self.done
        self._restarts.end(self.done)
        self._recorded = {step: each for step, each in self._recorded.items() if step <= self.done}
        self._discard_partial()
        self._validations = {step: loss for step, loss in self._validations.items() if step <= self.done}
        self._skipped.end_streak()
        self.warm_up()
        if self.done:  # the loss may have come between a step and what was due after it
            self._do_what_is_due()

    def _note(self, text: str) -> None:
        _log.warning("%s", text)
        self._log.note(self.done, text)

    def _go_back(self) -> bool:
        """Go back to the newest snapshot; return False if none can be used."""
        snapshot = self._usable_snapshot()
        if snapshot is None:
            return False
        self._restarts.loads_snapshots = self.policy.has_loaded(snapshot)
        if not self._restarts.loads_snapshots:
            return False
        self._log.rewind(self.done)
        self._tokens_seen, self._seconds, self.losses["train:loss"] = self._recorded[self.done]
        return True

    def _usable_snapshot(self) -> Snapshot | None:
        """Return the newest snapshot in memory whose steps are recorded; None if the checkpoint is newer."""
        snapshot = self.policy.snapshot(self._read) if self._restarts.loads_snapshots else None
        least = 0 if self.saved is None else self.saved.step
        is_usable = snapshot is not None and snapshot.step >= least and snapshot.step in self._recorded
        return snapshot if is_usable else None

    def _step(self) -> None:
        """Send one step, and validate or save after it if that is due."""
        # Read before sending, so that at most steps_in_flight steps are queued in the workers.
        while len(self._in_flight) >= self._max_in_flight:
            self._read_oldest()
        self._in_flight.append((self.done, self._send()))
        self._do_what_is_due()

    def _do_what_is_due(self) -> None:
        """Validate or save, if that is due after the last step that was sent."""
        if self._is_due(self._config.sft.val_period):
            self._wait_for_steps()
            self._validate()
        # After the validation, because the checkpoint records the validation loss of its own step.
        if self._config.checkpointing.enabled and self._is_due(self._config.checkpointing.save_period):
            self._wait_for_steps()
            # `fit` saves the last step, together with the final validation loss and the Hugging Face folder.
            if self.done < self.total_steps:
                self._save(with_hf=False)

    def _send(self) -> GroupFuture:
        """Send the step with the next number: only the number, or with `sft.feed=driver` the rows."""
        if self._config.sft.feed == "workers":
            return self.policy.train_step_nowait(self.done)
        rows = rows_of_step(self._rows, self._config, self.done)
        return self.policy.train_nowait(BatchDict.from_arrays(self._rows.rows(rows)))

    def _is_due(self, period: int) -> bool:
        return period > 0 and self.done % period == 0

    def _wait_for_steps(self) -> None:
        """Wait for all steps in flight."""
        while self._in_flight:
            self._read_oldest()

    def _read_oldest(self) -> None:
        """Wait for the oldest step in flight, record its metrics and show the progress."""
        number, future = self._in_flight.popleft()
        step = number + 1  # the log and the checkpoints count finished steps
        try:
            metrics = self.policy.result(future)
        except StepNotFiniteError as error:
            raise with_rows(error, self._config, self._rows) from error
        if self.policy.save_ended:
            self._finish_save()
        if SKIPPED in metrics:
            self._log.note(step, self._skipped.add(step, metrics))
        else:
            self._skipped.end_streak()
            self.losses["train:loss"] = metrics["loss"]
        # With the tokens of skipped steps, which the run does not see again.
        self._tokens_seen += metrics["tokens"]
        metrics = {**metrics, "tokens_seen": self._tokens_seen}
        self._read, self._seconds = step, self._seconds + metrics["step_time_s"]
        every = self._config.sft.snapshot_every
        if every and step % every == 0:
            self._recorded[step] = Recorded(self._tokens_seen, self._seconds, metrics["loss"])
        # Every step is recorded in metrics.jsonl; only every log_interval-th one is printed as a line.
        self._log.log(step, metrics, "train")
        shown = {name: metrics[key] for name, key in _PROGRESS_METRICS.items()}
        self._log.show(step, self.total_steps, shown, self._config.sft.log_interval)

    def _validate(self) -> None:
        """Validate and record the loss, unless that was already done after the same step."""
        if self.done in self._validations:
            return
        metrics = self.policy.validate()
        self._validations[self.done] = metrics["loss"]
        self.losses["val:loss"] = metrics["loss"]
        self._log.log(self.done, metrics, "val")
        shown = {f"val_{name}": metrics[name] for name in ("loss", "perplexity", "token_accuracy")}
        self._log.progress(self.done, self.total_steps, shown)
        for prompt, answer in [] if self._prompts is None else self._prompts.answers(self.policy.answer):
            self._log.sample(self.done, prompt, answer)

    def _save(self, *, with_hf: bool) -> None:
        """Save a checkpoint of the current step, or add to an existing one what is missing from it.

        With `checkpointing.is_async` only the last checkpoint of a run is waited for.
        """
        self._finish_save()
        if (
            self.saved is not None
            and self.saved.step == self.done
            and (not with_hf or publishing.exported(self.saved.path) is not None)
        ):
            return
        metrics = {name: loss for name, loss in self.losses.items() if name == "train:loss"}
        if self.done in self._validations:
            metrics["val:loss"] = self._validations[self.done]
        if self.saved is not None and self.saved.step == self.done:
            # The state of this step is saved already. If no metric is new, only the Hugging Face folder is missing.
            if not set(metrics) - set(self.saved.metrics):
                self.policy.export(self.saved)
                return
            metrics = {**self.saved.metrics, **metrics}
        metrics[_TOKENS_SEEN] = self._tokens_seen
        if self._config.checkpointing.is_async and self.done < self.total_steps and not self._stop.requested:
            self.policy.save_nowait(metrics)
        else:
            self._note_saved(self.policy.save(metrics, with_hf=with_hf))


def _result(prepared: PreparedData, trainer: Trainer, parameters: int) -> RunResult:
    """Return the result of a finished run; ask the model for a sample answer."""
    folder = None if trainer.saved is None else publishing.exported(trainer.saved.path)
    shown = None
    if folder is not None and parameters <= _MAX_SAMPLE_PARAMETERS:
        held_out = prepared.validation or prepared.train
        try:
            prompt = sample.first_prompt(TokenCache(held_out))
            with storage.local_copy(folder) as hf_dir:
                shown = sample.answer(hf_dir, prompt, prepared.end_ids)
        except Exception as error:  # the run is complete and saved, so this must not turn it into a failure
            _log.warning("the model in %s was saved, but no sample answer could be made: %r", folder, error)
    return RunResult(
        steps=trainer.done,
        stopped=trainer.done < trainer.total_steps,
        train_loss=trainer.losses.get("train:loss"),
        val_loss=trainer.losses.get("val:loss"),
        checkpoint=trainer.saved.path if trainer.saved else None,
        hf_dir=folder,
        sample=shown,
    )


_NAMED_LINES = 8
"""Number of lines of data files that an error names."""


def with_rows(error: StepNotFiniteError, config: SftRunConfig, rows: RowSource) -> StepNotFiniteError:
    """Return the error of a step with the lines of the data files that are in its rows."""
    number = int(error.fields["step"]) - 1
    numbers = sorted({int(rows.cache.origin[document]) for document in documents_of_step(rows, config, number)})
    places = [place_of(rows.places, number) for number in numbers[:_NAMED_LINES]]
    more = f" and {len(numbers) - len(places)} more" if len(numbers) > len(places) else ""
    text = f"{error}. The step has the data of {', '.join(places)}{more}"
    return StepNotFiniteError(text, **error.fields, data=places)
