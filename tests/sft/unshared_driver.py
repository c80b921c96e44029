"""The driver of `test_unshared`, which runs on the head of `tests.networks.Hosts`: a node sees no files of the run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray
from tests.network_drivers import connect, occupy, say
from tests.s3_server import variables
from tests.sft import tiny_run

from raylane.errors import ConfigError
from raylane.sft.run import trainer
from raylane.training.checkpoint import folders, publishing
from raylane.training.report.metrics import read_metrics
from raylane.training.storage import Url

STEPS = 6


def train(folder: Path, name: str, environment: dict[str, str], **changes: object) -> dict[int, float]:
    config = tiny_run.config_of(
        folder,
        {
            "cluster.num_workers": 2,
            "cluster.num_nodes": 2,
            # The name of this machine stands for an address that the namespaces do not have.
            "cluster.env_vars": {"GLOO_SOCKET_IFNAME": "eth0", **environment},
            "sft.max_num_steps": STEPS,
            "checkpointing.save_period": 2,
            "checkpointing.checkpoint_dir": f"s3://bucket/{name}",
            "logger.log_dir": str(folder / name),
            **changes,
        },
    )
    trainer.run(config)
    lines = read_metrics(f"{config.logger.log_dir}/metrics.jsonl")
    return {line["step"]: line["train:loss"] for line in lines if "train:loss" in line}


def interrupt_after(step: int) -> None:
    read = trainer.Trainer._read_oldest

    def read_and_stop(self: trainer.Trainer) -> None:
        read(self)
        if self.done >= step:
            trainer.Trainer._read_oldest = read  # type: ignore[method-assign]
            raise KeyboardInterrupt

    trainer.Trainer._read_oldest = read_and_stop  # type: ignore[method-assign]


def main(address: str, folder: Path, endpoint: str) -> None:
    environment = {**variables(endpoint), "TMPDIR": str(folder)}
    os.environ.update(environment)
    os.environ["TMPDIR"] = str(folder)
    connect(address)
    placeholders = occupy("two", "three")
    tiny_run.write_data(folder)
    try:
        train(folder, "local", environment, **{"checkpointing.checkpoint_dir": str(folder / "local/saved")})
    except ConfigError as error:
        say(f"refused: {error}")
    whole = train(folder, "whole", environment)
    saved = folders.list_saved(Url("s3://bucket/whole"))[-1]
    say(f"state of {len([name for name in (saved.path / 'state').sizes() if name.endswith('.distcp')])} workers")
    exported = publishing.exported(saved.path)
    assert exported is not None
    # The model of one run is the start of the next: a local folder of the driver that the other node does not see.
    base = folder / "base"
    for name in exported.sizes():
        base.mkdir(exist_ok=True)
        (base / name).write_bytes((exported / name).read_bytes())
    changes = {
        "policy.model_name": str(base),
        "policy.hf_config_overrides": {},
        "policy.tokenizer": {},
        "sft.max_num_steps": 1,
    }
    tuned = train(folder, "tuned", environment, **changes)
    assert max(tuned.values()) < whole[1], "the other node started from random weights"
    interrupt_after(3)
    try:
        train(folder, "broken", environment)
    except KeyboardInterrupt:
        say(f"interrupted with {[one.step for one in folders.list_saved(Url('s3://bucket/broken'))]}")
    assert train(folder, "broken", environment) == whole, "bit for bit"
    # Two CPUs on each of two nodes; the placeholders have all others.
    say(f"done, {ray.available_resources().get('CPU')} of 4.0 CPUs are free")
    del placeholders


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
