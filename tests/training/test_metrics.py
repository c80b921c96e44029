"""Figures of a run: metrics.jsonl, lines for people, and optional sinks."""

from __future__ import annotations

import builtins
import io
import math
import os
import pty
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from raylane.errors import ConfigError, DataError
from raylane.training.config.schema import LoggerConfig
from raylane.training.report.metrics import MetricsLog, counted, figure, progress_bar, progress_line, read_metrics


def test_every_record_is_on_disk_at_once(tmp_path: Path) -> None:
    with MetricsLog(LoggerConfig(), tmp_path / "run") as log:
        log.log(1, {"loss": 2.5, "grad_norm": 1}, "train")
        log.log(1, {"loss": math.nan}, "val")
        records = read_metrics(log.path)
    assert [(one["step"], sorted(set(one) - {"step", "time_s"})) for one in records] == [
        (1, ["train:grad_norm", "train:loss"]),
        (1, ["val:loss"]),
    ]
    assert records[0]["train:loss"] == 2.5
    assert math.isnan(records[1]["val:loss"])
    assert "NaN" not in log.path.read_text()  # JSON has none


def test_a_second_log_appends_and_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    with MetricsLog(LoggerConfig(), tmp_path) as log:
        log.log(1, {"loss": 2.0})
    with log.path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert len(read_metrics(log.path)) == 1
    with MetricsLog(LoggerConfig(), tmp_path) as log:
        log.log(2, {"loss": 1.0})
    assert [one["step"] for one in read_metrics(log.path)] == [1, 2]


def test_a_spoilt_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nwhat\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2 is no line of metrics"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_rewind_takes_away_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    with MetricsLog(LoggerConfig(), tmp_path) as log:
        for step in range(1, 6):
            log.log(step, {"loss": step})
        log.rewind(3)
        log.log(4, {"loss": 40.0})
        assert [(one["step"], one["loss"]) for one in read_metrics(log.path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_metrics_that_are_no_numbers_stay_text_after_rewind(tmp_path: Path) -> None:
    with MetricsLog(LoggerConfig(), tmp_path) as log:
        log.log(1, {"loss": float("nan")})
        before = log.path.read_text()
        log.rewind(1)
        assert log.path.read_text() == before
        assert '"loss": "nan"' in before


def test_a_run_that_begins_anew_puts_the_earlier_figures_aside(tmp_path: Path) -> None:
    for run in range(3):
        with MetricsLog(LoggerConfig(), tmp_path) as log:
            aside = log.begin_anew()
            log.log(1, {"loss": run})
        assert aside == (None if run == 0 else tmp_path / f"metrics.{run}.jsonl")
    names = ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]
    assert [[one["loss"] for one in read_metrics(tmp_path / name)] for name in names] == [[0.0], [1.0], [2.0]]


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    log = MetricsLog(LoggerConfig(), tmp_path)
    log.close()
    log.close()


def test_progress_is_one_plain_line_where_there_is_no_terminal(tmp_path: Path) -> None:
    stream = io.StringIO()
    with MetricsLog(LoggerConfig(), tmp_path, stream) as log:
        log.live(1, 20, {"loss": 5.5})
        log.progress(2, 20, {"loss": 5.25, "tokens_per_s": 12345.6})
    assert stream.getvalue() == "step  2/20  loss 5.2500  tokens_per_s 12,346\n"


def test_on_a_terminal_a_bar_is_redrawn_and_gives_way_to_lines(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as stream, MetricsLog(LoggerConfig(), tmp_path, stream) as log:
        log.live(5, 20, {"loss": 5.5})
        log.progress(6, 20, {"loss": 5.0})
        stream.flush()
        shown = ""
        while "6/20" not in shown or not shown.endswith("\n"):  # a terminal hands over what it has, in pieces
            shown += os.read(leader, 4096).decode()
    os.close(leader)
    assert "\rstep" not in shown.split("\n")[0].split("\r")[1]
    assert "5/20" in shown
    assert re.search(r"step  6/20  left \d+:\d\d:\d\d  loss 5$", shown.rstrip())


def test_lines_and_bars_are_pure() -> None:
    assert progress_line(7, 107, {}) == "step   7/107"
    assert progress_line(7, 107, {"loss": 2}, 3723.4) == "step   7/107  left 1:02:03  loss 2"
    assert progress_bar(7, 107, {"loss": 2}, 28, 90_000) == " step   7/107  left 1 day, 1"
    bar = progress_bar(50, 100, {"loss": 1.0}, 60)
    assert len(bar) <= 60
    assert bar.count("#") == bar.count(".")
    assert progress_bar(1, 2, {"loss": 1.0}, 8) == " step 1/"


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (12345.6, "12,346"), (0.00025, "0.00025"), (4.51239, "4.5124"), (123.45, "123.5"), (math.inf, "inf")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert figure(value) == text


def test_counted_word_is_in_the_plural_but_for_one() -> None:
    assert [counted(number, "worker") for number in (0, 1, 2000)] == ["0 workers", "1 worker", "2,000 workers"]


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_an_enabled_sink_whose_package_is_missing_is_named(
    tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(f"No module named {package!r}")
        return really(name, *rest, **more)

    for name in [name for name in sys.modules if name.startswith((package, "torch.utils.tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setitem(sys.modules, package, None)
    settings = LoggerConfig.model_validate({f"{package}_enabled": True})
    with pytest.raises(ConfigError, match=rf"logger\.{package}_enabled=true needs the package {package}.*pip install"):
        MetricsLog(settings, tmp_path)


def test_nothing_optional_is_imported_unless_enabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it would fail
    MetricsLog(LoggerConfig(), tmp_path).close()


def test_enabled_sinks_get_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In-memory packages in the place of the real ones, which are optional and talk to files and servers."""
    heard: list[Any] = []

    class Writer:
        def __init__(self, log_dir: str) -> None:
            heard.append(("tensorboard", log_dir))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            heard.append((name, value, step))

        def close(self) -> None:
            heard.append("closed")

    class Run:
        def log(self, figures: dict[str, float], step: int) -> None:
            heard.append((figures, step))

        def finish(self) -> None:
            heard.append("finished")

    board = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(
        sys.modules, "wandb", types.SimpleNamespace(init=lambda **settings: heard.append(settings) or Run())
    )
    settings = LoggerConfig.model_validate(
        {"tensorboard_enabled": True, "wandb_enabled": True, "wandb": {"project": "p", "name": "n"}}
    )
    with MetricsLog(settings, tmp_path) as log:
        log.log(3, {"loss": 1.5}, "train")
    assert heard == [
        ("tensorboard", str(tmp_path / "tensorboard")),
        {"project": "p", "name": "n", "dir": str(tmp_path)},
        ("train/loss", 1.5, 3),
        ({"train/loss": 1.5}, 3),
        "closed",
        "finished",
    ]


@pytest.mark.parametrize("line", ["{}", '{"step": "soon"}', '{"step": null}', "[1]", "[" * 100_000])
def test_a_line_without_a_step_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:2 is no line of metrics"):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.claim("security", "symbolic links in folders of a run are neither written through nor exported")
@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.draft"])
def test_log_that_is_a_link_leaves_its_target_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "precious").write_text("no line feed")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="is a symbolic link; remove it"):
        MetricsLog(LoggerConfig(), tmp_path / "logs")
    assert (tmp_path / "precious").read_text() == "no line feed"
