"""The rollout actors of a run: started, given work, replaced when they die. Called by `trainer`.

`RolloutProcess` is the class of the actors; `Rollouts` is their driver side, with one thread that waits for their
answers. What is sent when is decided by `schedule`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from raylane import weights
from raylane.core.deadline import Deadline
from raylane.errors import QueueLostError, QueueTimeoutError, RaylaneError, WeightsLostError
from raylane.rl.config import GrpoRunConfig
from raylane.rl.prompts import PromptSet, tokenizer_folder
from raylane.rl.queue.book import ItemTicket
from raylane.rl.queue.handle import TrajectoryQueue
from raylane.rl.rewards import load_rewards
from raylane.rl.rollout import (
    Engine,
    Prompt,
    PromptBatch,
    RolloutActor,
    RolloutReport,
    SamplingOptions,
    TransformersEngine,
)
from raylane.rl.schedule import PromptWork, Schedule, dispatch
from raylane.rl.vllm_engine import VllmEngine
from raylane.training.model.hf_config import model_config
from raylane.training.run.ray_session import Demand
from raylane.training.text.tokenizer import load_tokenizer
from raylane.training.vocabulary import Vocabulary

_log = logging.getLogger(__name__)

_CLOSE_S = 30.0
"""Seconds in which the waiting thread ends; it is a daemon."""
_WORD_S = 60.0
"""Seconds after which a wait for answers logs its state, also without `grpo.step_timeout_s`."""
_LOOK_S = 1.0
"""Seconds after which a wait for groups looks for errors of the actors."""


class RolloutProcess(RolloutActor):
    """Rollout actor that builds its engine, tokenizer and rewards in its own process."""

    def __init__(
        self, config: GrpoRunConfig, vocabulary: Vocabulary, number: int, queue: TrajectoryQueue, folder: str
    ) -> None:
        """Build engine `number`. Reward functions are found in `folder` too, where the driver runs."""
        import torch

        torch.set_num_threads(config.rollout.cpus)
        options = SamplingOptions(
            config.grpo.samples_per_prompt,
            config.rollout.max_new_tokens,
            vocabulary.end_ids,
            vocabulary.pad_id,
            config.rollout.temperature,
            config.grpo.seed,
        )
        super().__init__(
            number,
            make_engine(config, vocabulary),
            load_tokenizer(tokenizer_folder(config)),  # to decode: without the template, whose file may not be here
            load_rewards(config.grpo.named_rewards, folder),
            options,
            queue,
            config.rollout.timeout_s,
        )


def make_engine(config: GrpoRunConfig, vocabulary: Vocabulary) -> Engine:
    """Return the configured engine, which reads the published weights of the run."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    name, folder = config.policy.publish_weights.name, config.policy.model_name
    assert name is not None, "the configuration gives the weights a name"
    assert folder is not None, "the configuration names a model"
    # The precision of the trainer: with another one, log-probabilities would differ from those of the trainer.
    precision = config.policy.precision
    if config.rollout.engine == "vllm":
        # A token more than a row of the trainer: the last one predicts nothing, and is no input there.
        options: dict[str, Any] = {"dtype": precision, "max_model_len": config.policy.max_total_sequence_length + 1}
        overrides = config.policy.hf_config_overrides
        more = {key: value for key, value in overrides.items() if key not in ("attn_implementation", "model_type")}
        options |= {"hf_overrides": more} if more else {}
        return VllmEngine(folder, name, **{**options, **config.rollout.vllm_kwargs})
    hf_logging.disable_progress_bar()  # one for each actor, which would mix with the lines of the run
    dtype = getattr(torch, precision)
    # With the trainer's configuration: overrides change what a model computes.
    hf_config = model_config(config.policy, vocabulary.vocab_size, vocabulary.pad_id, vocabulary.end_id)
    model = AutoModelForCausalLM.from_pretrained(folder, config=hf_config, dtype=dtype, local_files_only=True)
    if config.rollout.gpus:
        model = model.to("cuda")
    return TransformersEngine(model, name)


def engine_demand(config: GrpoRunConfig) -> Demand:
    """Return what the rollout actors request from Ray."""
    return Demand(config.rollout.engines, config.rollout.cpus, config.rollout.gpus)


class Rollouts:
    """The rollout actors. Thread-safe; `close` ends them."""

    def __init__(
        self,
        config: GrpoRunConfig,
        vocabulary: Vocabulary,
        prompts: PromptSet,
        queue: TrajectoryQueue,
        note: Callable[[str], None],
        publish_again: Callable[[], None],
    ) -> None:
        """Start the actors.

        `note` is called with a sentence about each death; `publish_again` if the newest weights are lost, on the thread
        that waits for groups or answers.
        """
        self._config, self._vocabulary, self._prompts, self.queue = config, vocabulary, prompts, queue
        self._note, self._publish_again = note, publish_again
        grpo = config.grpo
        self._schedule = Schedule(grpo.prompts_per_step, grpo.max_num_steps, grpo.lag, config.rollout.engines)
        self._lock = threading.Condition()  # guards all below
        self._actors = [self._start(number) for number in range(config.rollout.engines)]
        try:
            # An actor that cannot be built, for example for lack of memory, could not be replaced either.
            self._wait_for_start()
        except BaseException:
            for actor in self._actors:
                ray.kill(actor)
            raise
        self._calls: dict[Any, tuple[int, PromptWork]] = {}
        """Actor and work of each call under way, by its ref."""
        self._reports: list[RolloutReport] = []
        self._deaths = 0
        self._error: Exception | None = None
        self._closed = False
        self._next_word = 0.0
        """Time of the monotonic clock at which a wait logs its state next."""
        self.stale = 0
        """Number of groups that were too old, and made again."""
        self._thread = threading.Thread(target=self._wait_for_calls, name="raylane-rollouts", daemon=True)
        self._thread.start()

    def begin_at(self, step: int) -> None:
        """Begin to sample for a step, whose weights are published; groups that were made before count no more."""
        with self._lock:
            self._schedule.begin_at(step)
            self._calls.clear()
            self._dispatch()

    def stepped(self, steps: int) -> None:
        """Note that the weights after so many steps are published."""
        self.queue.set_version(steps)
        with self._lock:
            self._schedule.stepped(steps)
            self._dispatch()

    def take(self, step: int, should_stop: Callable[[], bool]) -> list[list[ItemTicket]]:
        """Wait for the groups of a step, in the order of their prompts; return fewer after a request to stop.

        RaylaneError if they have not come after `grpo.step_timeout_s` seconds.
        """
        count = self._config.grpo.prompts_per_step
        taken: list[list[ItemTicket]] = []
        deadline = self._begin_wait()
        try:
            while len(taken) < count and not should_stop():
                self._raise_errors(deadline, f"step {step + 1} has {len(taken)} of {count} groups of answers")
                taken += self._take_some(step, count - len(taken))
        except BaseException:
            # The step begins again with other groups, if at all.
            self.queue.acknowledge(taken)
            raise
        # By prompt, not by arrival: with lag 0 a run is exact.
        return sorted(taken, key=lambda group: group[0].group)

    def _take_some(self, step: int, count: int) -> list[list[ItemTicket]]:
        """Wait a moment for groups of a step; return up to `count` that are trained on."""
        try:
            # A short wait, again and again: an error of the actors must end it.
            groups = self.queue.take_tickets(count, at_least=1, timeout=_LOOK_S)
        except QueueTimeoutError:
            self._look_for_weights()
            return []
        accepted, refused = [], []
        with self._lock:
            for group in groups:
                # All answers to a prompt are one item, made by one version of the weights.
                (ticket,) = group
                ((weights_step, _),) = ticket.versions
                if not self._schedule.accepts(ticket.group):
                    refused.append(group)
                elif step - weights_step > self._config.grpo.lag:
                    refused.append(group)
                    self.stale += 1
                    self._schedule.make_again(ticket.group[1])
                else:
                    accepted.append(group)
            self._dispatch()
        # Their memory is free again; nobody will ask for them.
        self.queue.acknowledge(refused)
        return accepted

    def answers(self, prompts: Sequence[Prompt], step: int, temperature: float) -> list[tuple[str, float]]:
        """Return text and reward of an answer to each prompt, with the weights after so many steps. Waits."""
        deadline = self._begin_wait()
        while True:
            with self._lock:
                actors = list(self._actors)
            # Each actor answers a part of them; the order stays that of the prompts.
            share = -(-len(prompts) // len(actors))
            parts = [prompts[i : i + share] for i in range(0, len(prompts), share)]
            refs = [actor.answer.remote(part, step, temperature) for actor, part in zip(actors, parts, strict=False)]
            try:
                while (count := len(ray.wait(refs, num_returns=len(refs), timeout=_LOOK_S)[0])) < len(refs):
                    self._raise_errors(deadline, f"validation has answers of {count} of {len(refs)} rollout actors")
                    self._look_for_weights()
                return [answer for some in ray.get(refs) for answer in some]
            except ray.exceptions.RayActorError:
                # The thread notices deaths by calls of `make` only, and there may be none.
                self._find_dead()

    def reports(self) -> list[RolloutReport]:
        """Return the reports that have come since the last call."""
        with self._lock:
            reports, self._reports = self._reports, []
            return reports

    def kill_one(self) -> None:
        """Kill an actor, to show that the run goes on."""
        with self._lock:
            actor = self._actors[0]
        ray.kill(actor)

    def close(self) -> None:
        """End the actors. A second call does nothing."""
        with self._lock:
            self._closed = True
            actors, self._actors = self._actors, []
            self._calls.clear()
            self._lock.notify_all()
        for actor in actors:
            ray.kill(actor)
        # It may be in `ray.wait`, which ends with the calls of the dead actors, or after a second.
        self._thread.join(_CLOSE_S)

    # Parts of the above

    def _wait_for_start(self) -> None:
        """Wait until all actors have loaded their model; RaylaneError after `rollout.timeout_s`."""
        refs, limit_s = [actor.__ray_ready__.remote() for actor in self._actors], self._config.rollout.timeout_s
        ready = set[Any]()
        for wait_s in Deadline(limit_s).rounds(lambda: f"{len(ready)} of {len(refs)} rollout actors have started"):
            ready.update(ray.wait(refs, num_returns=len(refs), timeout=wait_s)[0])
            if len(ready) == len(refs):
                break
        # First the errors of constructors, which say more. No limit: these calls have ended.
        ray.get(list(ready))
        if len(ready) < len(refs):
            free = ray.available_resources()
            raise RaylaneError(
                f"{len(ready)} of {len(refs)} rollout actors have started within rollout.timeout_s={limit_s:g} s: each "
                f"needs {self._config.rollout.cpus} CPUs and {self._config.rollout.gpus:g} GPUs, and the cluster has "
                f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free. Wait for other jobs, or raise it"
            )

    def _begin_wait(self) -> Deadline:
        self._next_word = time.monotonic() + _WORD_S
        return Deadline(self._config.grpo.step_timeout_s)

    def _raise_errors(self, deadline: Deadline, state: str) -> None:
        """Raise the error of an actor, or that of a wait that has passed its deadline."""
        with self._lock:
            if self._error is not None:
                raise self._error
        if time.monotonic() >= self._next_word:
            _log.warning("%s, and waits", state)
            self._next_word = time.monotonic() + _WORD_S
        if deadline.left_s() == 0:
            names = ", ".join(name for name, _ in self._config.grpo.named_rewards)
            raise RaylaneError(
                f"{state} after grpo.step_timeout_s={deadline.timeout_s:g} s: sampling, or one of the rewards {names}, "
                "takes longer. Give rewards a limit of their own, or raise grpo.step_timeout_s"
            )

    def _look_for_weights(self) -> None:
        """Let the trainer publish its weights again if the memory that kept them is gone.

        Engines would wait for ever: the trainer publishes after its next step only, which waits for them.
        """
        name = self._config.policy.publish_weights.name
        try:
            newest = max(
                (version.step for version in weights.versions(name) if version.state == "committed"), default=-1
            )
        except WeightsLostError:  # of a catalogue that was started again
            newest = -1
        if newest < self._schedule.done:
            self._publish_again()

    def _start(self, number: int) -> Any:
        rollout = self._config.rollout
        actor = ray.remote(RolloutProcess).options(
            num_cpus=rollout.cpus, num_gpus=rollout.gpus, runtime_env={"env_vars": rollout.env_vars}
        )
        return actor.remote(self._config, self._vocabulary, number, self.queue, os.getcwd())

    def _dispatch(self) -> None:
        # After an error no new work: the main thread raises it at its next call.
        if self._closed or self._error is not None:
            return
        if dispatch(self._schedule, self._send):
            self._lock.notify_all()

    def _send(self, engine: int, work: PromptWork) -> None:
        prompts = [self._prompts.prompt(number) for number in work.prompts]
        batch = PromptBatch(self._schedule.epoch, prompts, work.at_least)
        self._calls[self._actors[engine].make.remote(batch)] = engine, work

    def _wait_for_calls(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._calls or self._closed)  # no limit: `close` ends it
                if self._closed:
                    return
                refs = list(self._calls)
            # Calls that are sent meanwhile are seen in the next round.
            ended, _ = ray.wait(refs, timeout=_LOOK_S, fetch_local=False)
            for ref in ended:
                self._end_call(ref)

    def _end_call(self, ref: Any) -> None:
        try:
            report: RolloutReport | None = ray.get(ref)
            error: Exception | None = None
        except Exception as failure:
            report, error = None, failure
        with self._lock:
            call = self._calls.pop(ref, None)
            if call is None or self._closed:  # of an earlier epoch, or at the end
                return
            engine, work = call
            if report is not None:
                self._schedule.made(work.number)
                self._reports.append(report)
            elif isinstance(error, ray.exceptions.RayActorError):
                self._replace(engine, error)
            elif isinstance(getattr(error, "cause", None), QueueLostError):
                self._schedule.failed(work.number)
            else:
                # Raised in the thread that takes groups: this one must not end the run by itself.
                cause = getattr(error, "cause", None)
                self._error = cause if isinstance(cause, RaylaneError) else error
                return
            self._dispatch()

    def _find_dead(self) -> None:
        """Replace actors that have died while they had no call of `make`."""
        with self._lock:
            actors = list(enumerate(self._actors))
        for engine, actor in actors:
            try:
                # An actor that is at work answers later, and is alive.
                ray.get(actor.__ray_ready__.remote(), timeout=_LOOK_S)
            except ray.exceptions.GetTimeoutError:
                continue
            except ray.exceptions.RayActorError as error:
                with self._lock:
                    if self._actors[engine] is actor:
                        self._replace(engine, error)
                        self._dispatch()

    def _replace(self, engine: int, error: ray.exceptions.RayActorError) -> None:
        """Start an actor in the place of one that has died; its prompts are made again."""
        # All of its calls fail; the first one that is noticed counts for all.
        again = self._schedule.actor_died(engine)
        self._calls = {ref: call for ref, call in self._calls.items() if call[0] != engine}
        self._deaths += 1
        # A reward that ends its process would otherwise be called for ever.
        if self._deaths > self._config.rollout.max_restarts:
            self._error = RaylaneError(
                f"rollout actor {engine} died: {error}. {self._deaths} have died in this run "
                f"(rollout.max_restarts={self._config.rollout.max_restarts})"
            )
            return
        self._actors[engine] = self._start(engine)
        self._note(f"rollout actor {engine} died and is replaced; {len(again)} prompts are made again")
