"""The driver of `test_sft_networks`, run inside the head's namespace: trains twice, and prints what happens."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import ray
from tests.sft import tiny_run

from raylane.sft.run import trainer
from raylane.training.report.metrics import read_metrics

STEPS = 24


def say(text: str) -> None:
    print(f"said: {text}", flush=True)


class Sayer(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"log, {record.getMessage()}")


def train(folder: Path, name: str, mode: str) -> list[tuple[float, float]]:
    changes = {
        "cluster.num_workers": 2,
        "cluster.num_nodes": 2,
        # The name of this machine stands for an address that the namespaces do not have.
        "cluster.env_vars": {"GLOO_SOCKET_IFNAME": "eth0"},
        "sft.max_num_steps": STEPS,
        "checkpointing.save_period": 4,
        "policy.compiled_graph.mode": mode,
        "checkpointing.checkpoint_dir": str(folder / name / "saved"),
        "logger.log_dir": str(folder / name),
    }
    config = tiny_run.config_of(folder, changes)
    trainer.run(config)
    lines = read_metrics(f"{config.logger.log_dir}/metrics.jsonl")
    return [(line["step"], line["train:loss"]) for line in lines if "train:loss" in line]


def main(address: str, folder: Path) -> None:
    ray.init(address=f"{address}:6399", log_to_driver=False, logging_level="error")
    deadline = time.monotonic() + 60
    while sum(node["Alive"] for node in ray.nodes()) < 2:
        assert time.monotonic() < deadline, "the other node did not come"
        time.sleep(0.1)
    tiny_run.write_data(folder)
    unbroken = train(folder, "unbroken", "off")
    logging.getLogger("raylane").addHandler(Sayer())
    read = trainer.Trainer._read_oldest

    def read_and_say(self: trainer.Trainer) -> None:
        read(self)
        say(f"step {self._in_flight[0][0] if self._in_flight else self.done}")

    trainer.Trainer._read_oldest = read_and_say  # type: ignore[method-assign]
    assert train(folder, "pulled", "required") == unbroken, "bit for bit"
    say("done")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
