"""The driver of `tests/sft/test_networks.py`; it runs on the head of `tests.networks.Hosts`.

It trains twice, and prints what happens.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

from tests.network_drivers import ask, connect, occupy, say
from tests.sft import tiny_run

from raylane.sft.run import trainer
from raylane.training.report.metrics import read_metrics

STEPS = 24
TIMEOUT = {"RAYLANE_TIMEOUT_S": "3"}


class Cable:
    """The cable of node "one": out for a while at step 6, and from step 14 until the workers are started again."""

    def __init__(self) -> None:
        self.acts = ["short", "long"]

    def at_step(self, step: int) -> None:
        if step >= 6 and "short" in self.acts:
            self.acts.remove("short")
            ask("cut")
            time.sleep(0.7)
            ask("restore")
            say("pulled for a while")
        if step >= 14 and "long" in self.acts:
            self.acts.remove("long")
            ask("cut")


class Restorer(logging.Handler):
    """Puts the cable in again where the run says that it starts its workers again."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"log, {record.getMessage()}")
        if "Starting the workers again" in record.getMessage():
            ask("restore")


def train(folder: Path, name: str, mode: str) -> list[tuple[float, float]]:
    changes = {
        "cluster.num_workers": 2,
        "cluster.num_nodes": 2,
        # The name of this machine stands for an address that the namespaces do not have.
        "cluster.env_vars": {"GLOO_SOCKET_IFNAME": "eth0", **TIMEOUT},
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
    os.environ.update(TIMEOUT)
    connect(address)
    placeholders = occupy("two", "three")
    tiny_run.write_data(folder)
    unbroken = train(folder, "unbroken", "off")
    logging.getLogger("raylane").addHandler(Restorer())
    cable = Cable()
    read = trainer.Trainer._read_oldest

    def read_and_say(self: trainer.Trainer) -> None:
        read(self)
        cable.at_step(self._in_flight[0][0] if self._in_flight else self.done)

    trainer.Trainer._read_oldest = read_and_say  # type: ignore[method-assign]
    assert train(folder, "pulled", "required") == unbroken, "bit for bit"
    del placeholders
    say("done")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
