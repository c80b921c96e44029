"""The order of things in the loop over steps, on a policy that only writes down what it is asked."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raylane.errors import CheckpointDamagedError, WorkerLostError
from raylane.sft.config.load import build_config
from raylane.sft.data import order
from raylane.sft.run import trainer as loop
from raylane.sft.run.trainer import Trainer
from raylane.training.checkpoint import folders, publishing
from raylane.training.checkpoint.folders import Saved
from raylane.training.run.opening import finished_text
from raylane.training.run.snapshots import Snapshot, usable, versions_to_keep
from raylane.training.run.stopping import StopRequest, block_sigterm
from raylane.weights.service.answers import VersionInfo
from sft.conversations import config, question, write_jsonl

FIGURES = (
    "perplexity",
    "token_accuracy",
    "tokens",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "step_time_s",
    "data_time_s",
    "dispatch_time_s",
    "compute_time_s",
)


class RecordingPolicy:
    """In-memory stand-in: a step's future is its number, and its loss too."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.next_step = 0
        self.saving: Saved | None = None

    def train_step_nowait(self, number):
        self.events.append(f"send {number}")
        self.next_step = number + 1
        return number

    def train_nowait(self, batch):
        self.events.append(f"train {batch['input_ids'][:, 0].tolist()}")
        self.next_step += 1
        return self.next_step - 1

    def result(self, future):
        self.events.append(f"read {future}")
        return {**dict.fromkeys(FIGURES, 0.0), "loss": float(future), "tokens": 100.0 + future}

    def warm_up(self, rows):
        self.events.append(f"warm up after {self.next_step}")

    def recover(self):
        self.events.append("recover")
        self.next_step = 0
        return (1,)

    snapshot_every = 0
    snapshot_fails = False

    def snapshot(self, most_steps):
        version = most_steps // self.snapshot_every if self.snapshot_every else 0
        return Snapshot(version, version * self.snapshot_every) if version else None

    def forget_snapshots(self):
        self.events.append("forget snapshots")

    def has_loaded(self, snapshot):
        if not self.snapshot_fails:
            self.events.append(f"snapshot {snapshot.version}")
            self.next_step = snapshot.step
        return not self.snapshot_fails

    def validate(self):
        self.events.append(f"validate after {self.next_step}")
        return {"loss": 10.0 + self.next_step, "perplexity": 1.0, "token_accuracy": 0.5}

    def save(self, metrics, *, with_hf):
        self.events.append(f"save {self.next_step}{' hf' if with_hf else ''} {sorted(metrics)}")
        return Saved(self.next_step, Path(f"nowhere/step_{self.next_step}"), metrics, {})

    save_ended = False

    def save_nowait(self, metrics):
        self.events.append(f"begin to save {self.next_step}")
        self.saving = Saved(self.next_step, Path(f"nowhere/step_{self.next_step}"), metrics, {})

    def finish_save(self):
        if self.saving is not None:
            self.events.append(f"finish {self.saving.step}")
        saved, self.saving, self.save_ended = self.saving, None, False
        return saved

    def publish_weights(self):
        self.events.append(f"publish {self.next_step}")

    def load(self, path):
        self.next_step = int(path.name.removeprefix("step_"))
        return self.next_step


class CountedRows:
    """24 rows whose only token is their number."""

    num_rows = 24

    def step_rows(self, *args, group_by_length):
        assert not group_by_length
        return order.batch_rows(self.num_rows, *args)

    def rows(self, indices):
        return {"input_ids": np.asarray(indices)[:, None]}


class NoLog:
    """Takes figures and forgets them."""

    def log(self, *_):
        pass

    progress = live = show = rewind = begin_anew = note = log


def trainer_of(tmp_path, total, stop=None, **changes):
    overlap = changes.pop("overlap", True)
    is_async = changes.pop("is_async", False)
    publish_weights = changes.pop("publish_weights", None)
    sft = {"max_num_steps": total, **{key: value for key, value in changes.items() if key != "save_period"}}
    config = build_config(
        {
            "sft": sft,
            "policy": {
                "hf_config_overrides": {"model_type": "llama"},
                "tokenizer": {"train_vocab_size": 300},
                "compiled_graph": {"overlap_communication": overlap},
                "publish_weights": publish_weights,
            },
            "data": {"train": "x.jsonl", "validation_fraction": 0.1},
            "checkpointing": {
                "checkpoint_dir": str(tmp_path),
                "save_period": changes.get("save_period", 0),
                "is_async": is_async,
            },
        }
    )
    policy = RecordingPolicy()
    return Trainer(config, policy, CountedRows(), NoLog(), total, stop or StopRequest()), policy.events


def test_steps_are_sent_ahead_of_the_results_that_were_read(tmp_path):
    trainer, events = trainer_of(tmp_path, 4, steps_in_flight=2)
    trainer.fit()
    assert events[:6] == ["send 0", "send 1", "read 0", "send 2", "read 1", "send 3"]
    assert events[6:] == ["read 2", "read 3", "save 4 hf ['train:loss', 'train:tokens_seen']"]


def test_driver_feed_sends_the_rows_workers_would_read(tmp_path):
    trainer, events = trainer_of(tmp_path, 4, feed="driver", seed=5)
    trainer.fit()
    wanted = [order.batch_rows(24, 8, 5, step).tolist() for step in range(4)]
    assert [event for event in events if event.startswith("train")] == [f"train {rows}" for rows in wanted]


def test_steps_without_overlap_wait_for_each_other(tmp_path):
    trainer, events = trainer_of(tmp_path, 2, overlap=False)
    trainer.fit()
    assert events[:4] == ["send 0", "read 0", "send 1", "read 1"]


@pytest.mark.parametrize("stopped", [False, True])
def test_last_weights_are_published_after_the_checkpoint(tmp_path, stopped):
    stop = StopRequest()
    trainer, events = trainer_of(tmp_path, 3, stop, publish_weights={"name": "policy", "every": 2})
    if stopped:
        send = trainer.policy.train_step_nowait
        trainer.policy.train_step_nowait = lambda number: (stop.ask(), send(number))[1]
    trainer.fit()
    last = 1 if stopped else 3
    assert events[-2:] == [
        f"save {last}{'' if stopped else ' hf'} ['train:loss', 'train:tokens_seen']",
        f"publish {last}",
    ]


def losing(policy, at):
    """Make the policy lose its workers when the result of these steps is read, once each."""
    read, left = policy.result, list(at)

    def result(future):
        if left and future == left[0]:
            left.pop(0)
            raise WorkerLostError("rank 1 died.", reason="rank 1 died.")
        return read(future)

    policy.result = result


def test_lost_worker_goes_back_to_the_last_checkpoint(tmp_path):
    trainer, events = trainer_of(tmp_path, 6, save_period=2)
    losing(trainer.policy, [4])
    trainer.fit()
    lost = events.index("recover")
    assert events[lost - 3 : lost] == ["save 4 ['train:loss', 'train:tokens_seen']", "send 4", "send 5"]
    assert events[lost:][:5] == ["recover", "forget snapshots", "warm up after 4", "send 4", "send 5"]
    assert events[-1] == "save 6 hf ['train:loss', 'train:tokens_seen']"


def test_lost_worker_before_a_checkpoint_starts_anew(tmp_path):
    trainer, events = trainer_of(tmp_path, 2)
    losing(trainer.policy, [1])
    trainer.fit()
    assert events[events.index("recover") :][:4] == ["recover", "forget snapshots", "warm up after 0", "send 0"]


def test_restarts_are_bounded_between_checkpoints(tmp_path):
    trainer, events = trainer_of(tmp_path, 8, save_period=2, max_restarts=1)
    losing(trainer.policy, [2, 4, 7, 7])
    with pytest.raises(WorkerLostError):
        trainer.fit()
    assert events.count("recover") == 3, "one for each checkpoint; the second loss at step 7 ended the run"


def test_lost_worker_goes_back_to_the_newest_snapshot(tmp_path, caplog):
    trainer, events = trainer_of(tmp_path, 9, save_period=4, snapshot_every=2, max_restarts=1)
    trainer.policy.snapshot_every = 2
    losing(trainer.policy, [3, 5, 8, 8])
    with pytest.raises(WorkerLostError):
        trainer.fit()
    back = [events[at + 1] for at, event in enumerate(events) if event == "recover"]
    assert back == ["snapshot 1", "snapshot 2", "snapshot 4"]
    assert "goes on from step 2 in memory: 1 recorded steps (" in caplog.text


def test_snapshot_that_is_lost_gives_way_to_the_checkpoint(tmp_path):
    trainer, events = trainer_of(tmp_path, 6, save_period=2, snapshot_every=3)
    trainer.policy.snapshot_every, trainer.policy.snapshot_fails = 3, True
    losing(trainer.policy, [4])
    trainer.fit()
    assert events[events.index("recover") :][:3] == ["recover", "forget snapshots", "warm up after 4"]


def test_snapshots_that_cannot_be_loaded_bound_the_restarts(tmp_path):
    trainer, events = trainer_of(tmp_path, 9, save_period=4, snapshot_every=2, max_restarts=1)
    trainer.policy.snapshot_every, trainer.policy.snapshot_fails = 2, True
    losing(trainer.policy, [7] * 9)
    with pytest.raises(WorkerLostError):
        trainer.fit()
    assert events.count("recover") <= 2


def test_work_due_at_the_step_of_a_snapshot_follows_a_loss(tmp_path):
    trainer, events = trainer_of(tmp_path, 8, save_period=4, snapshot_every=2, val_period=4)
    trainer.policy.snapshot_every = 2
    validate, left = trainer.policy.validate, [4]

    def lose_once():
        if left and trainer.policy.next_step == left[0]:
            left.pop()
            raise WorkerLostError("rank 1 died.", reason="rank 1 died.")
        return validate()

    trainer.policy.validate = lose_once
    trainer.fit()
    after = events[events.index("recover") :]
    assert after[1:4] == ["snapshot 2", "warm up after 4", "validate after 4"]
    assert after[4] == "save 4 ['train:loss', 'train:tokens_seen', 'val:loss']"
    assert not left


def test_only_snapshots_of_the_present_course_are_usable():
    def version(number, step, state="committed"):
        return VersionInfo("run", number, step, state, 0, (), (), 0.0, None, ())

    versions = [version(2, 6), version(3, 9), version(4, 9), version(5, 12, "open")]
    assert usable(versions, 20, after=0, used=None) == Snapshot(4, 9)
    assert usable(versions, 8, after=0, used=None) == Snapshot(2, 6)
    assert usable(versions, 20, after=3, used=2) == Snapshot(4, 9)
    assert usable(versions[:2], 20, after=3, used=2) == Snapshot(2, 6), "the third is of steps that are made again"
    assert usable(versions[:2], 20, after=3, used=None) is None
    assert [versions_to_keep(*each) for each in ((2, 10), (4, 1), (1, 1))] == [3, 6, 3]


def test_request_to_stop_ends_a_run_that_loses_a_worker(tmp_path):
    stop = StopRequest()
    trainer, events = trainer_of(tmp_path, 4, stop)
    losing(trainer.policy, [0])
    policy = trainer.policy
    send = policy.train_step_nowait
    policy.train_step_nowait = lambda number: (stop.ask(), send(number))[1]
    with pytest.raises(WorkerLostError):
        trainer.fit()
    assert "recover" not in events


def test_one_step_in_flight_waits_for_each(tmp_path):
    trainer, events = trainer_of(tmp_path, 2, steps_in_flight=1)
    trainer.fit()
    assert events[:4] == ["send 0", "read 0", "send 1", "read 1"]


def test_validation_then_save_wait_for_all_steps(tmp_path):
    trainer, events = trainer_of(tmp_path, 4, steps_in_flight=3, val_period=2, val_at_start=True, save_period=2)
    trainer.fit()
    assert events[:6] == ["validate after 0", "send 0", "send 1", "read 0", "read 1", "validate after 2"]
    assert events[6] == "save 2 ['train:loss', 'train:tokens_seen', 'val:loss']"
    assert events[-2:] == ["validate after 4", "save 4 hf ['train:loss', 'train:tokens_seen', 'val:loss']"]
    assert sum(event.startswith(("validate", "save")) for event in events) == 5, "the last step's are not done twice"


def test_a_metric_of_an_earlier_step_is_not_the_checkpoints(tmp_path):
    trainer, events = trainer_of(tmp_path, 3, val_period=2)
    trainer.fit()
    assert events[-1] == "save 3 hf ['train:loss', 'train:tokens_seen']"


def test_stop_request_finishes_steps_and_saves(tmp_path):
    stop = StopRequest()
    trainer, events = trainer_of(tmp_path, 9, stop, steps_in_flight=2, val_at_end=True)
    send = trainer.policy.train_step_nowait

    def stop_at_3(number):
        if number == 3:
            stop.ask()
        return send(number)

    trainer.policy.train_step_nowait = stop_at_3
    trainer.fit()
    assert events[-2:] == ["read 3", "save 4 ['train:loss', 'train:tokens_seen']"]


def test_async_save_ends_between_steps_and_before_the_next(tmp_path):
    trainer, events = trainer_of(tmp_path, 6, save_period=2, steps_in_flight=1, is_async=True)
    read = trainer.policy.result

    def end_with_step_2(future):
        trainer.policy.save_ended = future == 2
        return read(future)

    trainer.policy.result = end_with_step_2
    trainer.fit()
    saves = [event for event in events if not event.startswith("send")]
    assert saves == [
        "read 0",
        "read 1",
        "begin to save 2",
        "read 2",
        "finish 2",
        "read 3",
        "begin to save 4",
        "read 4",
        "read 5",
        "finish 4",
        "save 6 hf ['train:loss', 'train:tokens_seen']",
    ]
    assert trainer.saved.step == 6


@pytest.mark.parametrize("error", [WorkerLostError("rank 1 died", rank=1), KeyboardInterrupt(), ValueError("bug")])
def test_failed_step_waits_for_the_async_save(tmp_path, error):
    trainer, events = trainer_of(tmp_path, 6, save_period=2, is_async=True, max_restarts=0)
    send = trainer.policy.train_step_nowait

    def fail_at_step_3(number):
        if number == 3:
            raise error
        return send(number)

    trainer.policy.train_step_nowait = fail_at_step_3
    with pytest.raises(type(error)):
        trainer.fit()
    assert events[-1] == "finish 2"
    assert trainer.saved.step == 2


@pytest.mark.parametrize("saved_at", [4, 7])
def test_a_run_that_is_at_its_end_already_trains_no_more(tmp_path, saved_at):
    trainer, events = trainer_of(tmp_path, 4, val_at_end=True)
    path = tmp_path / f"step_{saved_at}"
    (path / "hf").mkdir(parents=True)
    trainer.resume_from(Saved(saved_at, path, {}, {}))
    trainer.fit()
    assert events == [f"validate after {saved_at}"]


@pytest.mark.processes
def test_sigterm_reaches_the_run_but_not_its_processes(tmp_path):
    """Batch systems send SIGTERM to every process of a job: Ray's must outlive the last checkpoint."""
    show = [sys.executable, "-c", "print(open('/proc/self/status').read())"]
    with StopRequest() as stop:
        with block_sigterm():
            status = subprocess.run(show, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
            # To this thread: one sent to the process may go to a thread of another test, which holds nothing back.
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            assert not stop.requested
        assert stop.requested
    blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
    assert blocked >> (signal.SIGTERM - 1) & 1
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_damaged_checkpoint_falls_back_to_the_previous(tmp_path):
    trainer, _ = trainer_of(tmp_path, 9)
    saved = [folders.commit(publishing.begin(tmp_path, step), step, {}, {}) for step in (4, 6)]
    load = trainer.policy.load

    def load_unless_damaged(path):
        if path == saved[-1].path:
            raise CheckpointDamagedError("a file is damaged", path=str(path))
        return load(path)

    trainer.policy.load = load_unless_damaged
    trainer.resume_from(folders.find(trainer._config.checkpointing))
    assert (trainer.done, trainer.saved.step) == (4, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_4", "step_6.damaged"]


def test_failed_export_is_repeated_without_a_second_save(tmp_path):
    trainer, events = trainer_of(tmp_path, 4)
    trainer.policy.export = lambda saved: events.append(f"export {saved.step}")
    trainer.resume_from(folders.commit(publishing.begin(tmp_path, 4), 4, {"train:loss": 1.0}, {}))
    trainer.fit()
    assert events == ["export 4"]


def test_tokens_seen_go_on_after_a_resume(tmp_path, monkeypatch):
    logged = {}
    monkeypatch.setattr(NoLog, "log", lambda _, step, metrics, prefix: logged.update({step: metrics["tokens_seen"]}))
    trainer, _ = trainer_of(tmp_path, 3)
    trainer.fit()
    assert logged == {1: 100, 2: 201, 3: 303}
    saved = trainer.saved
    resumed, _ = trainer_of(tmp_path, 5)
    monkeypatch.setattr(RecordingPolicy, "load", lambda policy, path: setattr(policy, "next_step", 3), raising=False)
    resumed.resume_from(saved)
    resumed.fit()
    assert logged == {1: 100, 2: 201, 3: 303, 4: 406, 5: 510}
    assert resumed.saved.metrics["train:tokens_seen"] == 510


@pytest.mark.parametrize(
    ("step", "sections", "words"),
    [
        (5, {}, "has all 5 steps, so nothing is trained. To train on, raise sft.max_num_steps"),
        (8, {}, "has 8 steps, and 5 are configured"),
        (4, {}, None),
        (None, {}, None),
        (5, {"checkpointing": {"save_hf": True}}, None),
        (5, {"policy": {"publish_weights": {"name": "w"}}}, None),
    ],
)
def test_finished_run_is_told_from_one_with_work_left(
    tmp_path: Path, step: int | None, sections: dict[str, Any], words: str | None
) -> None:
    run = config(tmp_path, **{"checkpointing": {"save_hf": False}, **sections})
    resumed = None if step is None else folders.Saved(step, tmp_path / "step", {}, {})
    publishes = run.policy.publish_weights.name is not None
    text = finished_text(run, resumed, 5, "sft.max_num_steps", publishes=publishes)
    assert text is None if words is None else words in (text or "")


def test_finished_run_started_again_ends_before_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It took as long as a start, and printed the summary of a run that had trained."""
    write_jsonl(tmp_path / "train.jsonl", [question(seed) for seed in range(4)])
    saving = {"checkpoint_dir": str(tmp_path / "c"), "save_hf": False}
    places = {"checkpointing": saving, "logger": {"log_dir": str(tmp_path / "logs")}}
    run = config(tmp_path, sft={"max_num_steps": 2}, **places)
    partial = publishing.begin(tmp_path / "c", 2)
    folders.commit(partial, 2, {"train:loss": 1.5}, {})
    monkeypatch.setattr(loop.ray_session, "connect", None)
    caplog.set_level(logging.INFO, "raylane")
    result = loop.run(run)
    assert (result.steps, result.stopped, result.train_loss, result.checkpoint) == (
        2,
        False,
        1.5,
        tmp_path / "c/step_2",
    )
    assert any("this run is finished" in line for line in caplog.messages)
