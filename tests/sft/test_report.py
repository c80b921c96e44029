"""Report of a run: complete with and without matplotlib, bounded, and harmless whatever the texts in it are."""

from __future__ import annotations

import base64
import json
import logging
import math
import re
import threading
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from raylane.cli import main
from raylane.errors import DataError
from raylane.training.report.page import MAX_POINTS, escape, read_facts, smoothed, thin, write_report
from raylane.training.run.record import RunRecord, Sample
from sft.conversations import config

EVIL = "</pre><script>alert(1)</script>\x1b[31m‮"


def step(number: int, loss: float = 2.0) -> dict[str, Any]:
    times = {"train:step_time_s": 1.0, "train:data_time_s": 0.1, "train:dispatch_time_s": 0.2}
    more = {"train:compute_time_s": 0.7, "train:lr": 1e-4, "train:grad_norm": 0.5, "train:tokens_per_s": 1234.0}
    return {"step": number, "time_s": 1.0 * number, "train:loss": loss, **times, **more}


def log(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return folder


@pytest.fixture(autouse=True)
def tables_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests do without matplotlib, whose first import starts fc-list, unless they are marked `processes`."""
    if request.node.get_closest_marker("processes") is None:
        monkeypatch.setattr("raylane.training.report.page.importlib.util.find_spec", lambda name: None)


def recorded(tmp_path: Path, **sections: Any) -> RunRecord:
    return RunRecord(config(tmp_path, **sections))


def drawings(page: str) -> list[bytes]:
    return [base64.b64decode(data) for data in re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', page)]


def titles(page: str) -> list[str]:
    return re.findall(r'<img alt="([^"]*)"', page)


# ------------------------------------------------------------------------------------------------- the page


def test_report_without_matplotlib_has_tables_and_advice(tmp_path: Path) -> None:
    trained = {"train:perplexity": 1408.1, "train:token_accuracy": 0.25, "train:tokens_seen": 5000.0}
    held_out = {"val:loss": 7.6, "val:perplexity": 1998.2, "val:token_accuracy": 0.125}
    records = step(1, 8.5), {"step": 1, "val:loss": 7.5}, {**step(2, 7.25), **trained}, {"step": 2, **held_out}
    folder = log(tmp_path, *records)
    page = write_report(folder).read_text()
    assert page.count("pip install &#x27;raylane[report]&#x27;") == 1
    for words in ("8.5000 to 7.2500", "7.5000 after step 1", "1,234 (median)", "10.0% reading rows", "70.0% computing"):
        assert words in page
    cells = "7.2500", "7.6000", "0.2500", "0.1250", "0.0001", "0.5000", "1,234"
    assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    text = re.sub(r"<[^>]*>|\s+", " ", page)
    for words in ("tokens seen 5,000", "training perplexity 1,408", "held-out perplexity 1,998"):
        assert words in " ".join(text.split())
    assert not drawings(page)


@pytest.mark.processes
def test_report_with_matplotlib_has_all_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    common = ["Learning rate", "Gradient norm", "Speed", "Time of a step"]
    page = write_report(log(tmp_path, step(1), step(2), {"step": 2, "val:loss": 3.0})).read_text()
    assert titles(page) == ["Loss", *common]
    rewarded = [{**step(number), "train:reward": number / 90, "train:entropy": 0.5} for number in range(1, 91)]
    page = write_report(log(tmp_path, {"step": 0, "val:reward_greedy": 0.25}, *rewarded)).read_text()
    assert titles(page) == ["Reward", "Entropy of the policy", "Loss of the policy", *common]
    for drawing in drawings(page):
        ET.fromstring(drawing)
        assert b"<script" not in drawing
        assert not re.findall(rb"(?:href|src)=\"(?!#)", drawing), "everything is inside the drawing"


def test_report_of_a_run_with_rewards_begins_with_them(tmp_path: Path) -> None:
    answers = [("1 2", 1.0), ("2 1", 0.0), ("2 1", 0.0), ("1 2", 1.0)]
    samples = [
        {"step": number * 10, "prompt": f"sort {prompt}", "answer": answer, "answer_reward": reward}
        for number, (answer, reward) in enumerate(answers)
        for prompt in "ab"
    ]
    records = [{"step": 0, "val:reward_greedy": 0.25, "val:reward_sampled": 0.125}, {**step(1), "train:reward": 0.5}]
    with recorded(tmp_path) as record:
        record.open(log(tmp_path, *records, {"step": 30, "val:reward_greedy": 0.75}, *samples), resumes=False)
        path = record.finish("ended on SIGTERM", None, tmp_path / "hf")
    assert path is not None
    text = " ".join(re.sub(r"<[^>]*>", " ", path.read_text()).split())
    assert f"model {tmp_path}/hf" in text
    assert "begins at the last step in" in text
    assert "most probable answers 0.2500 after step 0, 0.7500 after the last one" in text
    assert text.count("step answer reward 0 1 2 1 10 to 20 2 1 0 30 1 2 1") == 2
    assert "reward held-out reward training loss" in text, "columns without a value are left out"


def test_smoothed_lines_do_not_lag() -> None:
    rising = [0.5 * number for number in range(50)]
    assert smoothed(rising) == pytest.approx(rising)
    noisy = [number % 2 for number in range(100)]
    assert max(abs(value - 0.5) for value in smoothed(noisy, over=10)[10:90]) < 0.05
    assert smoothed([7.0]) == [7.0]


def test_plots_that_fail_become_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylane.training.report.page.importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    page = write_report(log(tmp_path, step(1))).read_text()
    assert "matplotlib could not draw the plots" in page
    assert "<td>2</td>" in page


def test_page_loads_nothing_and_escapes_all_text(tmp_path: Path) -> None:
    folder = log(tmp_path / "<b>run", step(1), {"step": 1, "time_s": 0, "note": EVIL})
    with recorded(tmp_path, logger={"wandb": {"name": "</pre><script>"}}) as record:
        record.open(folder, resumes=False)
        logging.getLogger("raylane.test").warning("%s", EVIL)
        path = record.finish(EVIL, Sample(EVIL, EVIL))
    assert path is not None
    page = path.read_text()
    assert "<script" not in page
    assert "<b>" not in page
    assert "\x1b" not in page
    assert page.count("alert(1)") == 5  # status, event, warning, question, answer
    assert "default-src &#x27;none&#x27;" in page.replace("'", "&#x27;")
    assert not re.findall(r'(?:href|src)="(?!data:)', page)


@pytest.mark.processes
def test_report_of_many_steps_is_small(tmp_path: Path) -> None:
    lines = [json.dumps(step(number, 2 + math.sin(number))) for number in range(1, 100_001)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    path = write_report(tmp_path)
    assert path.stat().st_size < 1_000_000
    assert "100,000 (last one logged)" in path.read_text()


def test_report_of_a_folder_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*metrics\.jsonl: No such file.*logger\.log_dir of a run"):
        write_report(tmp_path)
    with pytest.raises(DataError, match=r"holds no train:loss and no val:loss"):
        write_report(log(tmp_path, {"step": 1, "train:tokens": 3.0}))
    assert not (tmp_path / "report.html").exists()


def test_losses_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    page = write_report(log(tmp_path, step(1), {**step(2), "train:loss": "nan"})).read_text()
    assert "<td>steps without a finite loss</td><td>1</td>" in page
    assert write_report(log(tmp_path, {"step": 1, "train:loss": "nan"})).exists()


def test_report_replaces_a_link_and_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "report.html").symlink_to(tmp_path / "precious")
    write_report(log(tmp_path, step(1)))
    assert (tmp_path / "precious").read_text() == "kept"
    assert not (tmp_path / "report.html").is_symlink()


def test_thin_keeps_means_and_ranges() -> None:
    records = [{"step": float(number), "x": float(number)} for number in range(1, 11)]
    series = thin([*records, {"step": 11.0, "x": math.nan}, {"step": 12.0}], "x", 5)
    assert series is not None
    assert series.steps == [2, 4, 6, 8, 10]
    assert (series.mean[0], series.low[0], series.high[0], series.is_thinned) == (1.5, 1.0, 2.0, True)
    few = thin(records, "x")
    assert few is not None
    assert (few.mean, few.is_thinned) == ([one["x"] for one in records], False)
    assert thin(records, "y") is None
    many = thin([{"step": float(n), "x": 0.0} for n in range(12_345)], "x")
    assert many is not None
    assert len(many.steps) == MAX_POINTS
    assert many.steps[-1] == 12_344


def test_escape_replaces_control_characters() -> None:
    assert escape("a<\x00\x9b\ud800\n") == "a&lt;���\n"


# ------------------------------------------------------------------------------------------------- the record


def test_record_keeps_configuration_without_secrets(tmp_path: Path) -> None:
    folder = log(tmp_path / "logs", step(1))
    with recorded(tmp_path, cluster={"env_vars": {"TOKEN": "hunter2"}}, sft={"seed": 7}) as record:
        record.open(folder, resumes=False)
        path = record.finish("finished", None)
    assert path is not None
    text = path.read_text() + (folder / "report.json").read_text()
    assert "hunter2" not in text
    assert "TOKEN" in text
    changed = path.read_text().partition("Keys that differ")[2].partition("</pre>")[0]
    assert "seed: 7" in changed
    assert "val_period" not in changed


def test_record_keeps_warnings_from_before_the_folder(tmp_path: Path) -> None:
    folder = log(tmp_path, step(1))
    with recorded(tmp_path) as record:
        logging.getLogger("raylane.sft.data.prepare").warning("%d conversations are cut", 3)
        logging.getLogger("raylane").info("not kept")
        record.open(folder, resumes=False)
        logging.getLogger("raylane.sft").error("a later one")
        texts = [one["text"] for one in read_facts(folder)["warnings"]]
        assert texts == ["3 conversations are cut", "a later one"]
    assert not any(isinstance(one, RunRecord) for one in logging.getLogger("raylane").handlers)
    with recorded(tmp_path) as record:  # a resumed run adds to them, a new run begins again
        record.open(folder, resumes=True)
        logging.getLogger("raylane").warning("third")
        assert len(read_facts(folder)["warnings"]) == 3
    with recorded(tmp_path) as record:
        record.open(folder, resumes=False)
        assert read_facts(folder)["warnings"] == []


def test_record_bounds_the_warnings(tmp_path: Path) -> None:
    folder = log(tmp_path, step(1))
    with recorded(tmp_path) as record:
        record.open(folder, resumes=False)

        def warn() -> None:
            for number in range(120):
                logging.getLogger("raylane").warning("%s", f"{number} " + "x" * 10_000)

        threads = [threading.Thread(target=warn) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        path = record.finish("finished", None)
    facts = read_facts(folder)
    assert (len(facts["warnings"]), facts["more_warnings"]) == (200, 40)
    assert max(len(one["text"]) for one in facts["warnings"]) == 2000
    assert path is not None
    assert "40 more warnings are not shown" in path.read_text()


def fail_after(tmp_path: Path, *steps: dict[str, Any], resumes: bool = False) -> None:
    with recorded(tmp_path) as record:
        record.open(tmp_path, resumes=resumes)
        if steps:
            log(tmp_path, *steps)
        raise RuntimeError("worker 1 is lost")


def test_run_that_fails_has_a_report_too(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="worker 1 is lost"):
        fail_after(tmp_path, step(1))
    assert "ended by RuntimeError: worker 1 is lost" in (tmp_path / "report.html").read_text()


def test_run_that_fails_before_a_step_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="worker 1 is lost"):
        fail_after(tmp_path)
    log(tmp_path, step(1))  # as left by an earlier run
    with pytest.raises(RuntimeError, match="worker 1 is lost"):
        fail_after(tmp_path)
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(RuntimeError, match="worker 1 is lost"):
        fail_after(tmp_path, resumes=True)
    assert (tmp_path / "report.html").exists()


def test_report_that_cannot_be_drawn_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = log(tmp_path / "logs", step(1))
    with recorded(tmp_path) as record:
        record.open(folder, resumes=False)
        (folder / "report.html").mkdir()
        assert record.finish("finished", None) is None
    assert "the report of the run in" in caplog.text


@pytest.mark.parametrize(
    "damage", ["", "[]", "{", '{"warnings": 3}', '{"warnings": [{"a": 1}]}', '{"more_warnings": []}']
)
def test_damaged_facts_count_as_none(tmp_path: Path, damage: str) -> None:
    folder = log(tmp_path, step(1))
    (folder / "report.json").write_text(damage)
    assert read_facts(folder)["status"] == "not known"
    assert write_report(folder).exists()


# ------------------------------------------------------------------------------------------------- the command


def test_report_command_draws_any_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = log(tmp_path / "logs", step(1))
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    assert main(["report", str(folder), "-o", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").exists()
    assert main(["report", str(tmp_path)]) == 1
    assert "metrics.jsonl: No such file" in capsys.readouterr().err
    assert main(["report", str(folder), "-o", str(tmp_path / "no/folder.html")]) == 1
    assert "Name another file with --out" in capsys.readouterr().err
