"""Kills of ranks, a real vLLM, a plain reader, keepers and the catalogue while versions are published and taken.

Every weight of a version follows from its step. So a mix of versions shows in the plain reader's tensors, and in the
greedy answers of vLLM, which are compared with those of Hugging Face's model with the weights of that step.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
import torch

pytest.importorskip("vllm.version", reason="vLLM has an environment of its own: run `make test-vllm`")

from tests.vllm import engines

from raylane import weights
from raylane.errors import WeightsError
from raylane.weights.service.actors import actor_names

KILLS = int(os.environ.get("RAYLANE_KILLS", "3"))
"""Number of kills: a hundred of them take half an hour."""
KINDS = ("engine", "catalogue", "rank", "keeper", "reader")
SERVICES = "raylane-weights"
"""Ray's namespace of catalogues and keepers."""
FAILURES = (ray.exceptions.RayActorError, WeightsError)
RECOVERY_S = 240


@functools.cache
def shapes() -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in engines.new_model().named_parameters()}


def values_of(step: int) -> dict[str, torch.Tensor]:
    """Return the weights of a step. Step 0 is the folder with which the engine starts."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes().items()}


class Outcome(NamedTuple):
    """Result of an update of the engine, also of one that failed: its weights and what it answers with them."""

    version: int
    step: int
    answers: list[list[int]]
    error: str | None


class Rank:
    """One of two ranks; each has half of every tensor."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.tensors = {name: self.half_of(tensor) for name, tensor in values_of(0).items()}
        self.publisher = weights.Publisher(
            "policy", self.tensors, rank=rank, world=2, places=lambda _, tensor: weights.Part.even(tensor, 0, rank, 2)
        )

    def half_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(2)[self.rank].clone()

    def run(self, step: int) -> int:
        for name, tensor in values_of(step).items():
            self.tensors[name].copy_(self.half_of(tensor))
        return self.publisher.publish(step, timeout=5)

    def pid(self) -> int:
        return os.getpid()


class Reader:
    """A plain reader."""

    def __init__(self) -> None:
        self.tensors, self.step = values_of(0), 0
        self.subscriber = weights.Subscriber("policy", self.tensors, apply="swap")

    def run(self, _: int) -> int:
        """Update, and return the version; also after an error, the tensors hold one version."""
        try:
            update = self.subscriber.update(timeout=5)
        except WeightsError:
            self.check()
            raise
        self.step = update.step
        self.check()
        return update.version

    def check(self) -> None:
        self.subscriber.check()
        expected = values_of(self.step)
        mixed = [name for name, tensor in self.tensors.items() if not torch.equal(tensor, expected[name])]
        assert not mixed, f"not of step {self.step}: {mixed}"

    def pid(self) -> int:
        return os.getpid()


class Engine:
    """A vLLM in the process of its actor."""

    def __init__(self, folder: str) -> None:
        from vllm import LLM

        self.engine = LLM(model=folder, **engines.OPTIONS)
        self.attachment = weights.attach(self.engine, "policy", initial="allow")
        self.step = 0

    def run(self, _: int) -> Outcome:
        """Update and answer."""
        error = None
        try:
            self.step = self.attachment.update(timeout=5).step
        except WeightsError as caught:
            error = f"{type(caught).__name__}: {caught}"
        return Outcome(self.attachment.version, self.step, engines.answers_of(self.engine), error)

    def pid(self) -> int:
        return os.getpid()


class Reference:
    """Hugging Face's model, for greedy answers with the weights of a step."""

    def __init__(self) -> None:
        self.model = engines.new_model()

    def export(self, folder: str) -> None:
        """Write the weights of step 0."""
        self.model.load_state_dict(values_of(0))
        self.model.save_pretrained(folder)

    def answers(self, step: int) -> list[list[int]]:
        self.model.load_state_dict(values_of(step))
        return [self.answer(list(prompt)) for prompt in engines.PROMPTS]

    def answer(self, tokens: list[int]) -> list[int]:
        length = len(tokens)
        with torch.no_grad():
            for _ in range(engines.TOKENS):
                tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[length:]


class Trial:
    """Two ranks, a reader and a vLLM of one job, which come back when they are killed."""

    def __init__(self, folder: Path) -> None:
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "runtime_env": engines.INSIDE}
        start = ray.remote(**options)
        self.reference = start(Reference).remote()
        ray.get(self.reference.export.remote(str(folder)), timeout=RECOVERY_S)
        self.ranks = [start(Rank).remote(rank) for rank in range(2)]
        self.reader, self.engine = start(Reader).remote(), start(Engine).remote(str(folder))
        self.step, self.compared = 0, 0
        self.pids: dict[Any, int] = {}
        self.all_pids: set[int] = set()

    @property
    def actors(self) -> list[Any]:
        return [*self.ranks, self.reader, self.engine]

    def look_up(self) -> None:
        """Note the process of each actor before the kill: a call of a busy actor would wait."""
        pids = ray.get([actor.pid.remote() for actor in self.actors], timeout=RECOVERY_S)
        self.pids = dict(zip(self.actors, pids, strict=True))
        self.all_pids |= {*pids}

    def begin(self) -> list[Any]:
        """Let all ranks publish, and the reader and the engine update, at the same time."""
        self.step += 1
        return [actor.run.remote(self.step) for actor in self.actors]

    def compare(self, outcome: Outcome) -> None:
        """Compare the answers of the engine with those of the reference for the same step."""
        expected = ray.get(self.reference.answers.remote(outcome.step), timeout=RECOVERY_S)
        assert outcome.answers == expected, f"not the answers of step {outcome.step}: {outcome}"
        self.compared += 1

    def recover(self) -> None:
        """Publish and update until the reader and the engine have the version that was published last."""
        deadline, error = time.monotonic() + RECOVERY_S, "none"
        while time.monotonic() < deadline:
            self.step += 1
            try:
                numbers = {*ray.get([rank.run.remote(self.step) for rank in self.ranks], timeout=RECOVERY_S)}
                taken = self.reader.run.remote(self.step), self.engine.run.remote(self.step)
                number, outcome = ray.get([*taken], timeout=RECOVERY_S)
                self.compare(outcome)
                if {number, outcome.version} == numbers and outcome.error is None:
                    return
            except FAILURES as caught:
                error = str(caught)
        pytest.fail(f"no update works any more: {error}")

    def kill(self, kind: str, chance: random.Random) -> None:
        if kind in ("keeper", "catalogue"):
            for name in actor_names(kind):
                with contextlib.suppress(ValueError):  # it has ended meanwhile
                    ray.kill(ray.get_actor(name, SERVICES))
            return
        victim = {"rank": chance.choice(self.ranks), "engine": self.engine, "reader": self.reader}[kind]
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[victim], signal.SIGKILL)


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.claim("weights", "no death beside a vLLM, or of the vLLM, mixes versions or makes others wait without end")
@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.timeout(300 + 60 * KILLS)
def test_kills_beside_vllm_mix_no_versions(cluster: None, eventually: Callable[..., None], tmp_path: Path) -> None:
    chance, trial, counts = random.Random(0), Trial(tmp_path), Counter[str]()
    trial.recover()
    for number in range(KILLS):
        kind = KINDS[number % len(KINDS)]
        trial.look_up()
        calls = trial.begin()
        time.sleep(chance.random() * 0.2)  # the moment of the kill, not a wait
        trial.kill(kind, chance)
        for call in calls:
            try:
                result = ray.get(call, timeout=RECOVERY_S)
            except FAILURES as error:
                counts[f"{type(error).__name__.split('(')[0]} after the kill of a {kind}"] += 1
                continue
            if isinstance(result, Outcome):
                trial.compare(result)
        trial.recover()
        counts[f"kills of a {kind}"] += 1
        print(f"{number + 1} of {KILLS}: {kind}, step {trial.step}", flush=True)
    trial.look_up()
    for actor in (*trial.actors, trial.reference):
        ray.kill(actor)
    weights.drop("policy")
    eventually(lambda: not actor_names(""), within_s=60)
    eventually(lambda: all(map(gone, trial.all_pids)), within_s=60)
    print(f"\n{KILLS} kills, {trial.step} publications, {trial.compared} comparisons of vLLM's answers:")
    print("\n".join(f"{count:6d} {what}" for what, count in sorted(counts.items())))
