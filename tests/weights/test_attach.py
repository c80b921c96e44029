"""Torch modules and Hugging Face models as engines that take versions while they answer."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.weights.small_models import SMALL
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteriaList

from raylane import weights
from raylane.errors import (
    WeightsError,
    WeightsInvalidError,
    WeightsLayoutError,
    WeightsTimeoutError,
    WeightsVersionError,
)

pytestmark = pytest.mark.usefixtures("ray_session", "weights_service")
PROMPT = torch.tensor([[1, 2, 3]])
WAIT_S = 60


@pytest.fixture(autouse=True)
def dropped() -> Iterator[None]:
    yield
    weights.drop("policy")


def new_model(kind: str = "mixtral", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    options = {**SMALL, "initializer_range": 0.3, "eos_token_id": None}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).eval()


def answer(model: Any, tokens: int = 8, **options: Any) -> Any:
    return model.generate(PROMPT, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **options)


class Gate:
    """Stopping criterion that holds a generation after one of its tokens until the test lets it go on."""

    def __init__(self, after: int) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._after = after

    def __call__(self, tokens: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if tokens.shape[1] == PROMPT.shape[1] + self._after:
            self.reached.set()
            assert self.opened.wait(WAIT_S)
        return torch.zeros(len(tokens), dtype=torch.bool)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_hugging_face_model_answers_like_a_folder(kind: str, tmp_path: Path) -> None:
    reader = new_model(kind)
    attachment = weights.attach(reader, "policy")
    for version in (1, 2):
        trained = new_model(kind, seed=version)
        trained.save_pretrained(tmp_path)  # experts lie there one by one, and stacked in the model
        folder = load_file(tmp_path / "model.safetensors")
        weights.Publisher("policy", folder).publish(version)
        update = attachment.update()
        assert (update.version, update.step, update.changed) == (version, version, True)
        tokens = answer(reader)
        fresh = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(tokens, answer(fresh))
        assert tokens.weight_versions == [(version, 0, 8)]
    attachment.close()
    assert not hasattr(answer(reader), "weight_versions")


def test_a_models_own_tensors_are_published_and_taken() -> None:
    trained, reader = new_model(seed=1), new_model()
    module = torch.nn.Module()
    module.inner = trained  # a module of one's own has the published names
    copy = torch.nn.Module()
    copy.inner = reader
    weights.Publisher("policy", module).publish(0)
    attachment = weights.attach(copy, "policy")
    attachment.update()
    assert torch.equal(answer(reader), answer(trained))
    attachment.close()


@pytest.mark.claim("weights", "requests under way finish, go on or end as asked, and know the versions of their tokens")
@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_answers_under_way_end_as_asked(pause: str, tmp_path: Path) -> None:
    reader = new_model("llama")
    attachment = weights.attach(reader, "policy", pause=pause)
    publisher = weights.Publisher("policy", trained := new_model("llama", seed=1))
    publisher.publish(1)
    attachment.update()
    gate = Gate(after=2)
    with ThreadPoolExecutor(2) as threads:
        under_way = threads.submit(answer, reader, 6, stopping_criteria=StoppingCriteriaList([gate]))
        assert gate.reached.wait(WAIT_S)
        with torch.no_grad():
            trained.lm_head.weight.neg_()
        publisher.publish(2)
        update = threads.submit(attachment.update)
        if pause == "keep":
            assert update.result(WAIT_S).version == 2  # beside the answer
        deadline = time.monotonic() + WAIT_S
        while pause == "abort" and not all(each.aborted for each in attachment._answers):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        gate.opened.set()
        tokens, version = under_way.result(WAIT_S), update.result(WAIT_S).version
    expected = {"keep": [(1, 0, 2), (2, 2, 6)], "wait": [(1, 0, 6)], "abort": [(1, 0, 3)]}[pause]
    if pause == "abort":  # it ends after the token that is under way
        assert tokens.weight_versions[-1].end <= 4
    else:
        assert tokens.weight_versions == expected
    assert tokens.shape[1] == PROMPT.shape[1] + tokens.weight_versions[-1].end
    assert version == 2
    assert answer(reader).weight_versions == [(2, 0, 8)]
    attachment.close()


def test_an_update_does_not_wait_forever_for_answers() -> None:
    reader = torch.nn.Linear(2, 2)
    attachment = weights.attach(reader, "policy", pause="wait", initial="allow")
    weights.Publisher("policy", torch.nn.Linear(2, 2)).publish(0)
    with attachment.answer() as under_way:
        with pytest.raises(WeightsTimeoutError, match="1 answers did not end within"):
            attachment.update(timeout=0.2)
        assert not under_way.aborted
        reader(torch.ones(2))
        under_way.note_token()
        assert under_way.weight_versions == [(0, 0, 1)]
    assert attachment.update().version == attachment.version == 1
    attachment.close()


class Failing(torch.nn.Module):
    """Module whose pass ends with an error."""

    def __init__(self, error: type[BaseException] = KeyboardInterrupt) -> None:
        super().__init__()
        self.weight, self.error = torch.nn.Parameter(torch.zeros(2)), error

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if value.dim() == 0:
            raise self.error
        return value * self.weight


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_a_pass_lets_updates_go_on(error: type[BaseException]) -> None:
    reader = Failing(error)
    attachment = weights.attach(reader, "policy", initial="allow")
    weights.Publisher("policy", Failing()).publish(0)
    with pytest.raises(error):
        reader(torch.tensor(1.0))
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(attachment.update).result(WAIT_S).version == 1
    attachment.close()


def test_a_model_without_a_version_computes_nothing() -> None:
    reader = Failing()
    attachment = weights.attach(reader, "policy")
    publisher = weights.Publisher("policy", {"weight": torch.ones(2)})
    with pytest.raises(WeightsInvalidError, match=r"no version of 'policy' yet. .* initial='allow'"):
        reader(torch.ones(2))
    publisher.publish(0)
    publisher.hold(1)
    attachment.update()
    assert reader(torch.ones(2)).tolist() == [1, 1]
    publisher.publish(1)
    with torch.no_grad():
        reader.weight.zero_()  # as a sleep that drops memory
    attachment.invalidate()
    with pytest.raises(WeightsInvalidError, match="no whole version of 'policy'"):
        reader(torch.ones(2))
    again = attachment.reload()
    assert (again.version, again.changed, reader(torch.ones(2)).tolist()) == (1, True, [1, 1])
    publisher.release(1)
    for step in (2, 3):
        publisher.publish(step)
    with pytest.raises(WeightsVersionError, match="version 1 of 'policy' cannot be taken: there are 3, 4"):
        attachment.reload()
    with pytest.raises(WeightsInvalidError):
        reader(torch.ones(2))
    assert attachment.update().version == 4
    with pytest.raises(ValueError, match="initial must be 'refuse' or 'allow', got 'both'"):
        weights.attach(Failing(), "policy", initial="both")
    attachment.close()


# torch.compile warns about this version of CPython.
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
def test_passes_of_compiled_modules_are_seen_and_copies_refused() -> None:
    reader = Failing()
    compiled = torch.compile(reader, backend="eager")
    attachment = weights.attach(compiled, "policy")
    weights.Publisher("policy", Failing()).publish(0)
    attachment.update()
    with attachment.answer() as under_way:
        compiled(torch.ones(2))
        under_way.note_token()
    assert under_way.weight_versions == [(1, 0, 1)]
    with pytest.raises(WeightsError, match=r"Copy it before weights.attach, or after close\(\)"):
        copy.deepcopy(reader)
    attachment.close()
    assert copy.deepcopy(reader)(torch.ones(2)).eq(0).all()


def test_unusable_engines_say_why() -> None:
    with pytest.raises(TypeError, match=r"an engine is vLLM's LLM or AsyncLLM, or a torch module, got dict"):
        weights.attach({}, "policy")
    with pytest.raises(ValueError, match="pause must be one of wait, keep, abort, got 'stop'"):
        weights.attach(torch.nn.Linear(2, 2), "policy", pause="stop")
    weights.Publisher("policy", torch.nn.Linear(2, 2)).publish(0)
    with pytest.raises(WeightsLayoutError, match="the loader writes nothing into"):
        weights.attach(new_model(), "policy")
