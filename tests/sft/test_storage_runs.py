"""Training runs whose data and checkpoints are behind URLs, on an S3 server in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
import torch
import yaml
from safetensors.torch import load_file
from tests.s3_server import Server, s3_server
from tests.sft import tiny_run

from raylane.errors import ConfigError
from raylane.sft.data.prepare import prepare
from raylane.sft.run import trainer
from raylane.sft.run.export import export_checkpoint
from raylane.sft.run.places import check_places, fetch_models
from raylane.training import storage
from raylane.training.checkpoint import folders
from raylane.training.config.load import dump
from raylane.training.report.metrics import read_metrics
from raylane.training.storage import Url

pytestmark = [pytest.mark.slow]

BUCKET = Url("s3://bucket")
STEPS = 30


@pytest.fixture(scope="module")
def server():
    s3fs = pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    with s3_server() as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.variables.items():
            patch.setenv(name, value)
        storage._filesystem.cache_clear()
        s3fs.S3FileSystem.clear_instance_cache()
        yield made
    storage._filesystem.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, server):
    """A folder for the files of runs; the data are on the server only."""
    path = tmp_path_factory.mktemp("runs")
    tiny_run.write_data(path)
    for name in ("train.jsonl", "validation.jsonl"):
        (BUCKET / "data" / name).write_bytes((path / name).read_bytes())
        (path / name).unlink()
    return path


def config_in(folder: Path, server: Server, name: str, **changes):
    return tiny_run.config_of(
        folder,
        {
            "data.train": str(BUCKET / "data/train.jsonl"),
            "data.validation": str(BUCKET / "data/validation.jsonl"),
            "cluster.num_workers": 2,
            # The workers belong to a Ray that was started without these variables.
            "cluster.env_vars": server.variables,
            "sft.max_num_steps": STEPS,
            "checkpointing.save_period": 5,
            "checkpointing.keep_latest_k": 2,
            "checkpointing.checkpoint_dir": str(BUCKET / name),
            "logger.log_dir": str(folder / name),
            **changes,
        },
    )


def losses(config) -> dict[int, float]:
    lines = read_metrics(f"{config.logger.log_dir}/metrics.jsonl")
    return {line["step"]: line["train:loss"] for line in lines if "train:loss" in line}


@pytest.fixture(scope="module")
def whole(ray_session, folder, server):
    """Configuration and result of a run that nothing disturbs."""
    config = config_in(folder, server, "whole")
    return config, trainer.run(config)


def start_and_wait(folder: Path, config, steps: int) -> subprocess.Popen[bytes]:
    """Start the command, and return its process as soon as the log holds so many steps."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(dump(config)))
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-c", "import sys; from raylane.cli import main; sys.exit(main())", "sft", str(path)]
    with (folder / "command.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    deadline = time.monotonic() + 120
    metrics = Path(config.logger.log_dir) / "metrics.jsonl"
    while not metrics.exists() or max([0, *losses(config)]) < steps:
        assert process.poll() is None, (folder / "command.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.005)  # there is no event for a line in a file
    return process


def kill_after(folder: Path, config, steps: int) -> None:
    """Run the command, and kill it as soon as the log holds so many steps."""
    process = start_and_wait(folder, config, steps)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.faults
def test_killed_run_resumes_from_storage_with_equal_losses(whole, folder, server):
    undisturbed, result = whole
    assert result.checkpoint == BUCKET / "whole/step_30"
    assert result.hf_dir == BUCKET / "whole/step_30/hf"
    assert [one.step for one in folders.list_saved(BUCKET / "whole")] == [25, 30]
    assert result.sample is not None
    again = export_checkpoint(result.checkpoint, folder / "exported")
    with storage.local_copy(result.hf_dir) as written:
        kept, read = (load_file(one / "model-00001-of-00001.safetensors") for one in (written, again))
    assert all(torch.equal(read[name], tensor) for name, tensor in kept.items())
    config = config_in(folder, server, "killed")
    kill_after(folder, config, 12)
    # A run that is killed while it saves leaves such files.
    (BUCKET / "killed/step_15/state/__0_0.distcp").write_bytes(b"half")
    assert trainer.run(config).steps == STEPS
    assert losses(config) == losses(undisturbed), "bit for bit"
    assert sorted(place.name for place in (BUCKET / "killed").iterdir()) == ["step_25", "step_30"]
    assert server.variables["AWS_SECRET_ACCESS_KEY"] not in (result.checkpoint / "run.json").read_text()


@pytest.mark.claim("fine-tuning", "an asynchronous checkpoint that is killed half way leaves no checkpoint behind")
@pytest.mark.faults
def test_async_save_killed_half_way_leaves_no_checkpoint(whole, folder, server):
    """The steps go on while a save is held up; a kill leaves it incomplete, and the next run starts before it."""
    config = config_in(folder, server, "async", **{"checkpointing.is_async": True})
    server.hold("async/step_10/state/__1")  # the file of rank 1
    try:
        process = start_and_wait(folder, config, 14)
        assert [one.step for one in folders.list_saved(BUCKET / "async")] == [5]
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    finally:
        server.release()
    assert folders.find(config.checkpointing).step == 5
    assert trainer.run(config).steps == STEPS
    assert sorted(place.name for place in (BUCKET / "async").iterdir()) == ["step_25", "step_30"]
    assert losses(config) == losses(whole[0]), "bit for bit, and as with saves that are waited for"


@pytest.mark.faults
def test_sigterm_waits_for_the_async_save(ray_session, folder, server):
    config = config_in(folder, server, "stopped", **{"checkpointing.is_async": True})
    server.hold("stopped/step_10/state/__0")
    try:
        process = start_and_wait(folder, config, 12)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        assert [one.step for one in folders.list_saved(BUCKET / "stopped")] == [5]
    finally:
        server.release()
    assert process.wait(100) == 0, (folder / "command.log").read_text()
    saved = [one.step for one in folders.list_saved(BUCKET / "stopped")]
    assert saved[0] == 10
    assert 12 <= saved[1] < STEPS


def test_model_behind_a_url_is_fetched_once(whole, folder, server):
    made, exported = whole[0], whole[1].hf_dir
    changes = {"policy.model_name": str(exported), "policy.hf_config_overrides": {}, "policy.tokenizer": {}}
    config = fetch_models(config_in(folder, server, "tuned", **changes))
    model = Path(config.policy.model_name)
    assert sorted(path.name for path in model.iterdir()) == sorted(exported.sizes())
    before = model.stat().st_mtime_ns
    assert fetch_models(config_in(folder, server, "tuned", **changes)) == config
    assert model.stat().st_mtime_ns == before
    assert prepare(config).vocab_size == prepare(made).vocab_size
    with pytest.raises(ConfigError, match=r"policy\.model_name=s3://bucket/nothing cannot be copied"):
        fetch_models(config_in(folder, server, "tuned", **{**changes, "policy.model_name": "s3://bucket/nothing"}))


def test_places_that_must_be_local_are_refused(folder, server):
    with pytest.raises(ConfigError, match=r"logger\.log_dir=s3://bucket/logs must be a local folder: a line is app"):
        check_places(config_in(folder, server, "x", **{"logger.log_dir": "s3://bucket/logs"}))
    with pytest.raises(ConfigError, match=r"data\.cache_dir=memory://cache must be a local folder"):
        check_places(config_in(folder, server, "x", **{"data.cache_dir": "memory://cache"}))
