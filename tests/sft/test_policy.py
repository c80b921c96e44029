"""Several workers on a real Ray against one plain model: layouts, both ways to feed, checkpoints across layouts."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import contextmanager

import pytest
import ray
import torch
from safetensors.torch import load_file

from raylane.errors import CheckpointError, ConfigError, StepNotFiniteError, WorkerCallError
from raylane.sft.run.policy import SftPolicy
from raylane.training.checkpoint import folders, publishing
from raylane.training.run.delivery import FolderCopies
from raylane.training.run.worker import step_seed
from sft import tiny_run
from sft.worker_run import WorkerRun

# The workers' processes do not have the tests on their path; loss functions travel with the calls instead.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def twice_the_loss(logits, batch):
    labels = batch["labels"].flatten()
    return 2 * torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")


class Run(WorkerRun):
    """Workers of one layout."""

    def __init__(self, folder, workers, changes):
        self.changes = {"cluster.num_workers": workers, **changes}
        super().__init__(folder, workers, changes)

    def again(self):
        self.policy.call("setup", self.config, self.prepared, 8)
        self.policy.next_step = 0

    def own_losses(self):
        """Of a plain model's start weights, on the global batch of step 0."""
        return tiny_run.reference_gradients(tiny_run.reference_model(self.config, self.prepared), self.batch())


@pytest.fixture(scope="module")
def fsdp2(ray_session, folder):
    run = Run(folder, 2, {"policy.dtensor_cfg.shard_parameters": "always"})
    yield run
    assert run.policy.shutdown()


@pytest.fixture(scope="module")
def hsdp4(ray_session, folder):
    sharding = {"policy.dtensor_cfg.dp_replicate_size": 2, "policy.dtensor_cfg.shard_parameters": "always"}
    run = Run(folder, 4, sharding)
    yield run
    assert run.policy.shutdown()


@pytest.mark.ray  # through the fixture that the parameter names
@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("hsdp4", marks=pytest.mark.slow)])
def test_gradients_of_several_workers_equal_one_model(layout, request):
    run = request.getfixturevalue(layout)
    run.again()
    for rows in (1, 2):
        tiny_run.assert_same(run.gradients(rows=rows), run.own_losses())


@pytest.mark.slow
def test_four_shards_without_replicas_too(hsdp4, folder):
    flat = tiny_run.config_of(folder, {"cluster.num_workers": 4, "policy.dtensor_cfg.shard_parameters": "always"})
    hsdp4.policy.call("setup", flat, hsdp4.prepared, 8)
    tiny_run.assert_same(hsdp4.gradients(), hsdp4.own_losses())


@contextmanager
def without_shards(run):
    """Set up the workers of `run` anew so that each holds the whole model, and in the old way after the block."""
    sharded = run.config
    run.config = tiny_run.config_of(run.folder, {**run.changes, "policy.dtensor_cfg.shard_parameters": "auto"})
    try:
        run.again()
        yield
    finally:
        run.config = sharded


def test_gradients_of_whole_models_equal_one_model(fsdp2):
    with without_shards(fsdp2):
        for rows in (1, 2):
            tiny_run.assert_same(fsdp2.gradients(rows=rows), fsdp2.own_losses())


def test_checkpoint_and_export_of_whole_models_load_sharded(fsdp2, tmp_path):
    """The same numbers in both directions: a checkpoint does not depend on where the parameters were."""
    with without_shards(fsdp2):
        fsdp2.losses(range(3))
        saved = fsdp2.policy.save({})
        wanted = fsdp2.losses(range(3, 6))
        fsdp2.again()
        assert fsdp2.policy.load(saved.path) == 3
        assert fsdp2.losses(range(3, 6)) == wanted, "on the same layout bit for bit"
        fsdp2.policy.save_hf(tmp_path / "whole")
    fsdp2.again()
    assert fsdp2.policy.load(saved.path) == 3
    again = fsdp2.policy.save({})
    assert fsdp2.losses(range(3, 6)) == pytest.approx(wanted, abs=1e-5)
    fsdp2.policy.save_hf(tmp_path / "sharded")
    whole, sharded = (load_file(tmp_path / name / "model-00001-of-00001.safetensors") for name in ("whole", "sharded"))
    for name, tensor in whole.items():
        torch.testing.assert_close(sharded[name], tensor, atol=1e-4, rtol=0)
    with without_shards(fsdp2):
        assert fsdp2.policy.load(again.path) == 3
        assert fsdp2.losses(range(3, 6)) == wanted, "the sharded workers changed no bit of the state that they saved"


@pytest.mark.claim("fine-tuning", "workers read their own data, with the losses of data from the driver")
def test_both_ways_to_feed_give_the_same_losses(fsdp2):
    fsdp2.again()
    by_workers = fsdp2.losses(range(4))
    fsdp2.again()
    batches = [tiny_run.global_batch(fsdp2.config, fsdp2.prepared, step) for step in range(4)]
    by_driver = [fsdp2.policy.train(batch, gbs=8, mbs=2)["loss"] for batch in batches]
    assert by_driver == by_workers
    assert fsdp2.policy.next_step == 4


def test_a_loss_function_of_ones_own_is_sent_once_and_used(fsdp2):
    fsdp2.again()
    batch = tiny_run.global_batch(fsdp2.config, fsdp2.prepared)
    plain = fsdp2.policy.train(batch, eval_mode=True)
    twice = fsdp2.policy.train(batch, twice_the_loss, eval_mode=True)
    assert twice["loss"] == pytest.approx(2 * plain["loss"], rel=1e-6)
    assert fsdp2.policy.next_step == 0, "eval_mode is no step"
    fsdp2.policy.train(batch, twice_the_loss)
    assert list(fsdp2.policy._losses.values()) == [twice_the_loss]
    assert fsdp2.policy.train(batch, eval_mode=True)["loss"] < plain["loss"]


def test_train_refuses_batches_that_do_not_divide(fsdp2):
    fsdp2.again()
    batch = tiny_run.global_batch(fsdp2.config, fsdp2.prepared)
    with pytest.raises(ValueError, match="no multiple of micro batch 3 x 2 workers"):
        fsdp2.policy.train(batch, mbs=3)
    with pytest.raises(ValueError, match=r"gbs must be the number of rows in the batch \(8\), got 16"):
        fsdp2.policy.train(batch, gbs=16)
    assert fsdp2.policy.next_step == 0


def test_labels_that_are_not_shifted_are_refused(fsdp2):
    """transformers' users have them so; the loss would fall, and the model learn to copy."""
    fsdp2.again()
    batch = tiny_run.global_batch(fsdp2.config, fsdp2.prepared)
    copied = torch.where(batch["labels"] == -100, -100, batch["input_ids"])
    with pytest.raises(ValueError, match="labels are not shifted"):
        fsdp2.policy.train(tiny_run.BatchDict({**batch, "labels": copied}))
    assert fsdp2.policy.next_step == 0


@pytest.mark.slow
def test_validation_does_not_depend_on_the_number_of_workers(fsdp2, hsdp4):
    fsdp2.again()
    hsdp4.again()
    two, four = fsdp2.policy.validate(), hsdp4.policy.validate()
    assert two["supervised_tokens"] == four["supervised_tokens"]
    assert two["loss"] == pytest.approx(four["loss"], abs=1e-6)


@pytest.mark.slow
def test_checkpoint_of_two_workers_resumes_on_four(fsdp2, hsdp4):
    fsdp2.again()
    fsdp2.losses(range(3))
    saved = fsdp2.policy.save({"train:loss": 1.0})
    wanted = fsdp2.losses(range(3, 6))
    fsdp2.again()
    assert fsdp2.policy.load(saved.path) == 3
    assert fsdp2.losses(range(3, 6)) == wanted, "on the same layout bit for bit"
    hsdp4.again()
    assert hsdp4.policy.load(saved.path) == 3
    assert hsdp4.losses(range(3, 6)) == pytest.approx(wanted, abs=1e-5)


def test_resume_from_before_a_key_existed_warns_of_nothing(fsdp2, caplog):
    fsdp2.again()
    saved = fsdp2.policy.save({})
    path = saved.path / "run.json"
    run = json.loads(path.read_text())
    del run["config"]["policy"]["optimizer"]["weight_decay_on"]
    del run["config"]["policy"]["scheduler"]["first_step"]
    path.write_text(json.dumps(run))
    fsdp2.policy.load(saved.path)
    assert "losses will differ" not in caplog.text
    run["config"]["policy"]["scheduler"]["first_step"] = "0"
    path.write_text(json.dumps(run))
    fsdp2.policy.load(saved.path)
    assert "losses will differ: policy.scheduler" in caplog.text


def test_load_of_an_unfit_checkpoint_has_a_short_error(fsdp2, folder):
    fsdp2.again()
    saved = fsdp2.policy.save({})
    other = tiny_run.config_of(folder, {**fsdp2.changes, "policy.hf_config_overrides.intermediate_size": 64})
    fsdp2.policy.call("setup", other, fsdp2.prepared, 8)
    with pytest.raises(CheckpointError, match="does not fit this model") as caught:
        fsdp2.policy.load(saved.path)
    assert "Traceback" not in str(caught.value)
    assert isinstance(caught.value.__cause__, WorkerCallError), "which rank it was, and the remote traceback"


@pytest.mark.faults
def test_failed_save_leaves_no_partial_checkpoint(fsdp2, tmp_path, monkeypatch):
    """A folder stands where rank 0 writes a file last; a full disk shows at the same place."""
    fsdp2.again()
    settings = fsdp2.config.checkpointing.model_copy(update={"checkpoint_dir": str(tmp_path)})
    monkeypatch.setattr(fsdp2.policy, "_config", fsdp2.config.model_copy(update={"checkpointing": settings}))
    begin = publishing.begin

    def begin_with_obstacle(folder, step):
        partial = begin(folder, step)
        (partial / "state" / "optimizer.json").mkdir(parents=True)
        return partial

    monkeypatch.setattr(publishing, "begin", begin_with_obstacle)
    with pytest.raises(CheckpointError, match=r"could not be written to .*Is a directory"):
        fsdp2.policy.save({})
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert fsdp2.policy.validate()["loss"] > 0, "no worker is left waiting for another"


def base_model(run, folder):
    """A Hugging Face folder of the tiny model, and a configuration of a run that starts from it."""
    run.again()
    run.policy.save_hf(folder)
    changes = {"policy.model_name": str(folder), "policy.hf_config_overrides": {}, "policy.tokenizer": {}}
    places = {"checkpointing.checkpoint_dir": str(folder.parent / "saved")}
    return tiny_run.config_of(run.folder, {**run.changes, **changes, **places})


@pytest.mark.slow
def test_export_that_fails_leaves_nothing_behind(fsdp2, tmp_path):
    """A folder with a part of the weights would look like a model."""
    fsdp2.again()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"kept holds files already\. Name a folder that does not exist"):
        fsdp2.policy.save_hf(tmp_path / "kept")
    fsdp2.policy.call("setup", *fsdp2.policy._setup)
    fsdp2.policy.group.call("use_copies", Unwritable()).results(60)
    fsdp2.policy.call("setup", *fsdp2.policy._setup)
    with pytest.raises(CheckpointError, match="no tokenizer"):
        fsdp2.policy.save_hf(tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    fsdp2.policy.group.call("use_copies", FolderCopies()).results(60)
    fsdp2.policy.call("setup", *fsdp2.policy._setup)
    fsdp2.policy.save_hf(tmp_path / "model")
    assert (tmp_path / "model/model.safetensors.index.json").is_file()


class Unwritable(FolderCopies):
    """Gives the workers a tokenizer folder that does not exist, which fails after the weights are written."""

    def on_this_node(self, config, prepared):
        return config, dataclasses.replace(prepared, tokenizer_dir=prepared.tokenizer_dir / "no tokenizer")


def test_export_of_a_base_with_odd_generation_settings_works(fsdp2, tmp_path, monkeypatch):
    """transformers loads temperature without do_sample, and refuses to save it once anything was changed."""
    config = base_model(fsdp2, tmp_path / "base")
    (tmp_path / "base/generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 0}')
    fsdp2.policy.call("setup", config, fsdp2.prepared, 8)
    monkeypatch.setattr(fsdp2.policy, "_config", config)
    saved = fsdp2.policy.save({}, with_hf=True)
    written = json.loads((saved.path / "hf/generation_config.json").read_text())
    assert written == {"temperature": 0.6, "eos_token_id": [*fsdp2.prepared.end_ids, 0]}


@pytest.mark.slow
def test_model_folder_may_be_relative_to_the_driver(fsdp2, tmp_path, monkeypatch):
    """Workers have a working directory of their own, e.g. where somebody started Ray."""
    config = base_model(fsdp2, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    relative = config.model_copy(update={"policy": config.policy.model_copy(update={"model_name": "base"})})
    with SftPolicy(relative, fsdp2.prepared, 8) as policy:
        assert policy.facts["parameters"] == fsdp2.policy.facts["parameters"]


@pytest.mark.faults
def test_export_that_fails_leaves_the_checkpoint_complete(fsdp2, tmp_path, monkeypatch):
    """The state is worth more than the model folder made from it: a failed export must not take it away."""
    config = base_model(fsdp2, tmp_path / "base")
    fsdp2.policy.call("setup", config, fsdp2.prepared, 8)
    monkeypatch.setattr(fsdp2.policy, "_config", config)
    fsdp2.policy.train_step(0)
    (tmp_path / "base/generation_config.json").write_text("{ not JSON")
    with pytest.raises(CheckpointError, match=r"JSONDecodeError.*step_1 is complete: correct the cause and run"):
        fsdp2.policy.save({"train:loss": 1.0}, with_hf=True)
    (saved,) = folders.list_saved(tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step_1"]
    assert not (saved.path / "hf").exists()
    assert fsdp2.policy.load(saved.path) == 1

    (tmp_path / "base/generation_config.json").write_text("{}")
    assert sorted(path.name for path in fsdp2.policy.export(saved).iterdir())[:2] == [
        "chat_template.jinja",
        "config.json",
    ]


@pytest.mark.faults
def test_checkpoint_that_one_worker_cannot_read_is_not_damaged(fsdp2, monkeypatch):
    """A node without the shared storage: were it called damage, resume=auto would put good checkpoints aside."""
    fsdp2.again()
    saved = fsdp2.policy.save({})
    for name in ("optimizer.json", ".metadata"):
        hidden = fsdp2.policy.group.call("add_loss", "hide", HideOnce(name), ranks=[1])
        hidden.results(60)
        with pytest.raises(CheckpointError, match=r"cannot be read by|can read") as caught:
            fsdp2.policy.load(saved.path)
        assert type(caught.value) is CheckpointError
        assert fsdp2.policy.load(saved.path) == saved.step, "no worker waits in a call that the other did not join"


class HideOnce:
    """Makes the next opening of a file of this name fail in the process that it is unpickled in."""

    def __init__(self, name):
        self.name = name

    def __setstate__(self, state):
        import pathlib

        plain, name = pathlib.Path.open, state["name"]

        def opened(path, *args, **kwargs):
            if path.name == name:
                pathlib.Path.open = plain
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return plain(path, *args, **kwargs)

        pathlib.Path.open = opened


def test_every_worker_holds_its_share_only(fsdp2):
    facts = fsdp2.policy.facts
    assert facts["parameters_held"] <= facts["parameters"] / 2 + 64


def test_step_that_is_not_finite_is_named_and_the_group_lives(fsdp2):
    fsdp2.again()
    broken = fsdp2.policy.train_nowait(tiny_run.global_batch(fsdp2.config, fsdp2.prepared), not_finite)
    with pytest.raises(StepNotFiniteError, match=r"^step 1 failed: loss nan, gradient norm nan\. The weights are unch"):
        fsdp2.policy.result(broken, timeout_s=60)
    assert fsdp2.policy.train_step(1)["loss"] > 0


def not_finite(logits, batch):
    return logits.sum() * float("nan")


def test_step_seeds_differ_between_steps_and_ranks():
    seeds = {step_seed(7, step, rank) for step in range(100) for rank in range(8)}
    assert len(seeds) == 800
