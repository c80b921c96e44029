"""torch's defaults of the calling program change nothing in a fine-tuning step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

from raylane.sft.data.prepare import prepare
from sft import tiny_run


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS = {
    "device context": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "default dtype": lambda: default_dtype(torch.float64),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
}


def everything(worker, config, prepared, folder):
    """Return what a run computes: facts, a gradient, losses of steps, a validation, an answer, a resumed step."""
    facts = worker.setup(config, prepared, 8)
    loss, gradients = worker.gradients(worker.own_rows(0), None)
    losses = [worker.train_step(number)["loss"] for number in range(2)]
    worker.save_state(str(folder / "state"), 2)
    losses.append(worker.evaluate()["loss"])
    answers = worker.answer([[3, 4, 5]])
    worker.save_hf(str(folder / "hf"))
    worker.setup(config, prepared, 8)
    losses.append(worker.load_state(str(folder / "state")))
    losses.append(worker.train_step(2)["loss"])
    return facts, loss, gradients, losses, answers


@pytest.mark.parametrize("sharding", ["auto", pytest.param("always", marks=pytest.mark.slow)])
def test_defaults_of_the_caller_change_no_number(worker, folder, tmp_path, sharding):
    changes = {"policy.dtensor_cfg.shard_parameters": sharding, "policy.sequence_packing.enabled": sharding == "auto"}
    config = tiny_run.config_of(folder, changes)
    prepared = prepare(config)
    (tmp_path / "plain").mkdir()
    facts, loss, gradients, losses, answers = everything(worker, config, prepared, tmp_path / "plain")
    weights = load_file(tmp_path / "plain/hf/model-00001-of-00001.safetensors")
    for name, setting in SETTINGS.items():
        place = tmp_path / name.replace(" ", "-")
        place.mkdir()
        with setting():
            found = everything(worker, config, prepared, place)
        assert (found[0], found[1], found[3], found[4]) == (facts, loss, losses, answers), name
        assert all(torch.equal(found[2][key], value) for key, value in gradients.items()), name
        exported = load_file(place / "hf/model-00001-of-00001.safetensors")
        assert all(torch.equal(exported[key], value) for key, value in weights.items()), name
    assert torch.get_default_dtype() == torch.float32
