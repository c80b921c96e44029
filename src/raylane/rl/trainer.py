"""The run behind `raylane grpo`: set up, loop, step.

    driver      take tickets of step k ──> send step k ──> read its metrics ──> let the engines begin step k + 1 + lag
    engines     sample, score, put groups into the queue ...
    workers                                [-- payloads from the queue, step k, publish weights k + 1 --]

The driver sees tickets and metrics only. Synchronous and asynchronous modes differ in one number: how many steps the
engines may be ahead (`schedule`).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raylane import weights
from raylane.core import trace_file
from raylane.errors import QueueLostError, WeightsLostError, WorkerLostError
from raylane.rl.config import GrpoRunConfig
from raylane.rl.engines import Rollouts, engine_demand
from raylane.rl.policy import GrpoPolicy
from raylane.rl.prompts import PromptSet, load_tokenizer, stored_vocabulary
from raylane.rl.queue.book import ItemTicket
from raylane.rl.queue.handle import TrajectoryQueue
from raylane.rl.rewards import load_rewards, try_rewards
from raylane.rl.rollout import Prompt, process_memory_bytes
from raylane.rl.timeline import Timeline
from raylane.training import storage
from raylane.training.checkpoint import folders, publishing
from raylane.training.checkpoint.folders import Saved
from raylane.training.report.metrics import MetricsLog
from raylane.training.report.page import written_report
from raylane.training.run import ray_session
from raylane.training.run.opening import finished_text, open_folders, restart_text, snapshot_text
from raylane.training.run.places import check_places, fetch_models
from raylane.training.run.record import RunRecord
from raylane.training.run.restarts import Restarts
from raylane.training.run.skipped_steps import SkippedSteps
from raylane.training.run.snapshots import Snapshot
from raylane.training.run.stopping import StopRequest, block_sigterm
from raylane.training.run.worker import SKIPPED
from raylane.training.storage import Place

_log = logging.getLogger(__name__)

TIMELINE_FILE = "timeline.json"
_PROGRESS_METRICS = ("reward", "length", "entropy", "sampling_kl", "lag", "step_time_s", "trainer_busy", "engines_busy")


@dataclass(frozen=True)
class Accuracy:
    """Result of a validation."""

    greedy: float
    """Mean reward of the most probable answers to held-out prompts."""
    sampled: float
    """Mean reward of sampled answers."""


@dataclass(frozen=True)
class GrpoResult:
    """Result of a run."""

    steps: int
    stopped: bool
    """True if SIGTERM ended the run before its last step."""
    first: Accuracy | None
    """Validation before the first step of this process."""
    last: Accuracy | None
    checkpoint: Place | None
    hf_dir: Place | None
    report: Path | None = None


def run(config: GrpoRunConfig) -> GrpoResult:
    """Train as configured, from the checkpoint that `checkpointing.resume` names; wait until the run ends.

    Connects to Ray as `raylane sft` does. SIGTERM ends the run after the step under way, with a checkpoint. Raises
    ConfigError and DataError before anything is started; WorkerLostError, WeightsError, QueueError and the errors of
    rewards (DataError) during the run; all actors have ended by then.
    """
    check_places(config)
    config = fetch_models(config, config.data.cache_dir)
    # Everything that can be wrong in data and configuration is found before a process is started.
    tokenizer = load_tokenizer(config)
    prompts = PromptSet.read(config.data.train, config, tokenizer)
    held_out: list[Prompt] = []
    if config.data.validation is not None:
        held_out = PromptSet.read(config.data.validation, config, tokenizer).first(config.data.val_prompts)
    # An error of a reward is clearer here than in an actor.
    rewards = load_rewards(config.grpo.named_rewards, os.getcwd())
    try_rewards(rewards, (held_out or prompts.first(1))[0].row, config.grpo.step_timeout_s)
    with RunRecord(config) as record, open_folders(config) as (log, resumed), ExitStack() as stack:
        done = finished_text(config, resumed, config.grpo.max_num_steps, "grpo.max_num_steps")
        if resumed is not None and done is not None:
            _log.info("%s", done)
            model = publishing.exported(resumed.path)
            return GrpoResult(resumed.step, False, None, None, resumed.path, model, written_report(log.run_dir))
        record.open(log.run_dir, resumes=resumed is not None)
        with block_sigterm():
            stack.enter_context(ray_session.connect(config.cluster, {"rollout.engines": engine_demand(config)}))
            stop = stack.enter_context(StopRequest())
        losses = 0
        while True:
            trainer = GrpoTrainer(config, log, stop, held_out)
            try:
                _train(trainer, config, tokenizer, prompts, resumed, anew=losses == 0)
                break
            except QueueLostError as error:
                losses += 1
                if losses > config.grpo.max_restarts or stop.requested:
                    raise
                trainer.note(f"{error}. Starting everything again ({losses} of {config.grpo.max_restarts})")
                resumed = trainer.saved
        stopped = trainer.done < config.grpo.max_num_steps
        trace_file.save(log.run_dir / TIMELINE_FILE, trainer.timeline.trace())
        saved = trainer.saved
        model = None if saved is None else publishing.exported(saved.path)
        report = record.finish("ended on SIGTERM" if stopped else "finished", None, model)
    checkpoint = None if saved is None else saved.path
    return GrpoResult(trainer.done, stopped, trainer.first, trainer.last, checkpoint, model, report)


def _train(
    trainer: GrpoTrainer,
    config: GrpoRunConfig,
    tokenizer: Any,
    prompts: PromptSet,
    resumed: Saved | None,
    *,
    anew: bool,
) -> None:
    """Run all steps with a new queue, new workers and new engines, which have ended when this returns or raises."""
    vocabulary = stored_vocabulary(tokenizer, config)
    with ExitStack() as stack:
        queue = TrajectoryQueue(max_items=1 << 20, max_bytes=config.rollout.queue_bytes)
        # The stack ends what was started last first: engines, then the weights that they read, then the workers.
        trainer.policy = stack.enter_context(GrpoPolicy(config, vocabulary, config.grpo.max_num_steps, queue))
        stack.callback(weights.drop, config.policy.publish_weights.name or "")
        trainer.rollouts = Rollouts(config, vocabulary, prompts, queue, trainer.note, trainer.publish_again)
        stack.callback(trainer.rollouts.close)
        trainer.resume_from(resumed, anew=anew)
        trainer.fit()


class GrpoTrainer:
    """Loop over the steps of one run. Set `policy` and `rollouts`, call `resume_from` once, then `fit` once."""

    policy: GrpoPolicy
    rollouts: Rollouts

    def __init__(self, config: GrpoRunConfig, log: MetricsLog, stop: StopRequest, held_out: Sequence[Prompt]) -> None:
        self._config, self._log, self._stop, self._held_out = config, log, stop, held_out
        self.timeline = Timeline()
        self.saved: Saved | None = None
        """Last checkpoint of this run, or the checkpoint that the run resumed from."""
        self.first: Accuracy | None = None
        self.last: Accuracy | None = None
        self._validated: set[int] = set()
        self._restarts = Restarts(config.grpo.max_restarts)
        self._read = 0
        """Number of steps whose metrics are recorded."""
        self._skipped = SkippedSteps(config.grpo.max_skipped_steps, "grpo.max_skipped_steps")
        self._step_ended_s = time.time()
        self._tickets: list[list[ItemTicket]] = []
        """Answers of the step under way, which the workers read in place."""

    @property
    def done(self) -> int:
        """Number of steps done."""
        return self.policy.next_step

    def note(self, text: str) -> None:
        """Log an event."""
        _log.warning("%s", text)
        self._log.note(self.done, text)

    def publish_again(self) -> None:
        """Publish the newest weights once more, after the process that kept them has died."""
        self.note(f"the weights after step {self.done} were lost and are published again")
        self.policy.publish_weights(again=True)

    def resume_from(self, saved: Saved | None, *, anew: bool) -> None:
        """Load a checkpoint (None: begin with the model's folder), publish its weights, and let the engines begin.

        With `anew`, records of an earlier run in the same folder are moved aside if there is no checkpoint.
        """
        if saved is not None:
            self.saved = saved = folders.load_whole(saved, self._config.checkpointing, self.policy.load)
            _log.info("resuming from %s, step %d of %d", saved.path, self.done, self._config.grpo.max_num_steps)
            self._log.rewind(self.done)
        elif not anew:
            self._log.rewind(0)
        elif (aside := self._log.begin_anew()) is not None:
            _log.info("the metrics of an earlier run were moved to %s", aside)
        self._begin()

    def _begin(self) -> None:
        """Begin with the weights that the workers have now."""
        if self._config.checkpointing.enabled:
            publishing.discard_partial(storage.at(self._config.checkpointing.checkpoint_dir))
        self._read = self.done
        self._restarts.end(self.done)
        # The first weights: those of later steps are published by the steps themselves.
        self.policy.publish_weights()
        self.rollouts.begin_at(self.done)

    def fit(self) -> None:
        """Run all remaining steps.

        After the loss of a worker, of answers or of weights, all workers are started again; the engines go on.
        """
        grpo = self._config.grpo
        lost: WorkerLostError | QueueLostError | WeightsLostError | None = None
        while True:
            try:
                if lost is not None:
                    self._restart(lost)
                    lost = None
                if grpo.val_at_start and self.done == 0:
                    self._validate()
                while self.done < grpo.max_num_steps and not self._stop.requested:
                    self.step()
                if grpo.val_at_end and self.done >= grpo.max_num_steps:
                    self._validate()
                if self._config.checkpointing.enabled:
                    self._save(with_hf=self.done >= grpo.max_num_steps and self._config.checkpointing.save_hf)
                return
            # A worker that misses its answers, or cannot publish, leaves the others in the middle of a step, so all of
            # them start again.
            except (WorkerLostError, QueueLostError, WeightsLostError) as error:
                if isinstance(error, QueueLostError):
                    self.rollouts.queue.stats()  # raises if its actor has died: then `run` makes a new queue
                if not self._restarts.begin(self._usable_snapshot(), is_stopping=self._stop.requested):
                    raise
                lost = error

    def _restart(self, lost: WorkerLostError | QueueLostError | WeightsLostError) -> None:
        """Form the group again, and go back to the newest snapshot or checkpoint, or to the first step."""
        reason, before = str(lost.fields.get("reason", f"{lost}.")), self._read
        _log.warning("%s Starting the workers again", reason)  # which may take long, if a host is cut off
        new = self.policy.recover()
        # A step that has failed is made again with other answers.
        self._end_tickets()
        snapshot = self._usable_snapshot()
        if snapshot is not None:
            self._restarts.loads_snapshots = self.policy.has_loaded(snapshot)
        # A new epoch of the schedule begins: what the engines have made since is not used.
        if snapshot is not None and self._restarts.loads_snapshots:
            self._restarts.note_loaded(self.done)
            self._log.rewind(self.done)
            self.note(snapshot_text(reason, new, self.done, before, self._config))
            self._begin()
        else:
            if self._restarts.is_over_limit:
                raise lost
            self.policy.forget_snapshots()
            self.note(restart_text(reason, self.saved, self._restarts.number, self._config.grpo.max_restarts))
            self.resume_from(self.saved, anew=False)
        self._validated = {step for step in self._validated if step <= self.done}
        self._skipped.end_streak()
        if 0 < self.done < self._config.grpo.max_num_steps:  # the loss may have come before what was due
            self._do_what_is_due()

    def _usable_snapshot(self) -> Snapshot | None:
        """Return the newest snapshot in memory to which the run can go back; None if the checkpoint is newer."""
        snapshot = self.policy.snapshot(self._read) if self._restarts.loads_snapshots else None
        least = 0 if self.saved is None else self.saved.step
        return None if snapshot is None or snapshot.step < least else snapshot

    def step(self) -> None:
        """Run one step on the groups that have come, and validate or save after it if that is due."""
        number = self.done
        tickets = self.rollouts.take(number, lambda: self._stop.requested)
        if len(tickets) < self._config.grpo.prompts_per_step:  # a request to stop
            self.rollouts.queue.give_back(tickets)
            return
        taken_s, self._tickets = time.time(), tickets
        metrics = self.policy.train_groups(number, tickets)
        ended_s = time.time()
        self._end_tickets()
        self.rollouts.stepped(self.done)
        self.timeline.add("trainer", f"step {number + 1}", taken_s, ended_s)
        self._record(metrics, ended_s)
        self._step_ended_s = ended_s
        if self.done == self._config.rollout.kill_after_step:
            self.rollouts.kill_one()
        if self.done < self._config.grpo.max_num_steps:  # else `fit` validates and saves
            self._do_what_is_due()

    def _do_what_is_due(self) -> None:
        """Validate or save, if that is due after the last step."""
        if self._is_due(self._config.grpo.val_period):
            self._validate()
        if self._config.checkpointing.enabled and self._is_due(self._config.checkpointing.save_period):
            self._save(with_hf=False)

    def _end_tickets(self) -> None:
        """Give the memory of the answers back, when no worker reads it any more."""
        tickets, self._tickets = self._tickets, []
        if tickets:
            self.rollouts.queue.acknowledge(tickets)

    def _record(self, metrics: dict[str, float], ended_s: float) -> None:
        """Write the metrics of a step, with those of the engines since the step before."""
        step, grpo = self.done, self._config.grpo
        self._read = step
        if SKIPPED in metrics:
            self._log.note(step, self._skipped.add(step, metrics))
        else:
            self._skipped.end_streak()
        # Of all calls that ended since the step before; those under way are counted with a later step.
        reports = self.rollouts.reports()
        for report in reports:
            name = f"sample with weights {report.step}"
            self.timeline.add(f"engine {report.engine}", name, report.began_s, report.ended_s)
        engines = [f"engine {number}" for number in range(self._config.rollout.engines)]
        since = self._step_ended_s
        seconds = ended_s - since
        busy = [self.timeline.busy(engine, since, ended_s) for engine in engines]
        metrics = {
            **metrics,
            "trainer_busy": self.timeline.busy("trainer", since, ended_s),
            "engines_busy": sum(busy) / len(busy),
            "rollout_tokens_per_s": sum(report.tokens for report in reports) / seconds,
            "engine_pause_s": sum(report.update_s for report in reports) / max(1, len(reports)),
            "stale_groups": self.rollouts.stale,
            "driver_memory_bytes": process_memory_bytes(),
            **({"engine_memory_bytes": max(report.memory_bytes for report in reports)} if reports else {}),
            "loop_time_s": seconds,
        }
        rewards = [report.rewards for report in reports]
        for number, (name, _) in enumerate(grpo.named_rewards if rewards and len(grpo.named_rewards) > 1 else ()):
            metrics[f"reward_{name.rpartition(':')[2]}"] = sum(each[number] for each in rewards) / len(rewards)
        self._log.log(step, metrics, "train")
        shown = {name: metrics[name] for name in _PROGRESS_METRICS}
        self._log.show(step, grpo.max_num_steps, shown, grpo.log_interval)

    def _is_due(self, period: int) -> bool:
        return period > 0 and self.done % period == 0

    def _validate(self) -> None:
        """Answer the held-out prompts with the present weights, once for each step."""
        if not self._held_out or self.done in self._validated:
            return
        began = time.time()
        # The trainer waits here, so the newest weights that the engines can take are those of this step.
        greedy = self.rollouts.answers(self._held_out, self.done, 0.0)
        sampled = self.rollouts.answers(self._held_out, self.done, self._config.rollout.temperature)
        self._validated.add(self.done)
        means = [sum(reward for _, reward in answers) / len(answers) for answers in (greedy, sampled)]
        accuracy = Accuracy(*means)
        self.first, self.last = self.first or accuracy, accuracy
        self.timeline.add("driver", "validation", began, time.time())
        self._log.log(self.done, {"reward_greedy": accuracy.greedy, "reward_sampled": accuracy.sampled}, "val")
        self._log.progress(
            self.done,
            self._config.grpo.max_num_steps,
            {"val_greedy": accuracy.greedy, "val_sampled": accuracy.sampled},
        )
        for prompt, (text, reward) in list(zip(self._held_out, greedy, strict=True))[: self._config.grpo.shown_answers]:
            asked = prompt.row[self._config.data.prompt_key]
            self._log.sample(self.done, asked if isinstance(asked, str) else json.dumps(asked), text, reward)

    def _save(self, *, with_hf: bool) -> None:
        """Save a checkpoint of the present step."""
        if self.saved is not None and self.saved.step == self.done:
            if with_hf and publishing.exported(self.saved.path) is None:
                self.policy.export(self.saved)
            return
        # Of the last validation, which may be that of an earlier step.
        metrics = {} if self.last is None else {"val:reward": self.last.greedy}
        self.saved = self.policy.save(metrics, with_hf=with_hf)
        self._restarts.note_saved()
        _log.info("saved %s", self.saved.path)
