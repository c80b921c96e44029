from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raylane import _ray_names
from raylane.cli import doctor
from raylane.cli.doctor import Finding, healthy, report
from raylane.errors import RaylaneError
from raylane.transport.backends.base import NO_DEVICE
from raylane.transport.backends.registry import backends


@pytest.mark.processes
@pytest.mark.tour
def test_the_doctor_tries_everything_between_all_places(tmp_path: Path) -> None:
    out = tmp_path / "doctor.json"
    command = [sys.executable, "-m", "raylane", "doctor", "--json", str(out)]
    # Else it would connect to a Ray of another test, which may end meanwhile.
    own = {**os.environ, "RAY_ADDRESS": "local"}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = [Finding(**finding) for finding in json.loads(out.read_text())["findings"]]
    between = [f for f in findings if f.reader != "itself"]
    assert len({(f.source, f.reader) for f in findings}) == 9
    assert all(not f.why_not for f in between if f.transport in ("tcp", "object_store"))
    assert all("another process" in f.why_not for f in between if f.transport == "local")
    assert all(not f.why_not for f in findings if f.reader == "itself" and f.transport == "local")
    assert "nixl" in done.stdout
    assert "run at niceness" not in done.stdout
    assert done.stdout.startswith("This machine")


@pytest.mark.parametrize(("why_not", "status"), [("", 0), ("blocked", 1)])
def test_status_of_the_command_says_whether_all_is_healthy(
    monkeypatch: pytest.MonkeyPatch, why_not: str, status: int
) -> None:
    monkeypatch.setattr(doctor.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(doctor, "examine", lambda: ([Finding("a", "b", "tcp", why_not)], {}))
    assert doctor.run(argparse.Namespace(json=None)) == status


def test_doctor_shows_missing_names_of_ray_and_starts_no_ray(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use = _ray_names.Use("nosuch", "count refs", "raylane.put")
    monkeypatch.setitem(_ray_names.private_names(), "ray.actor:ActorMethod", [use])
    monkeypatch.setattr(doctor.ray, "init", lambda **_: pytest.fail("started Ray"))
    with pytest.raises(RaylaneError, match=r"ray\.actor\.ActorMethod\.nosuch: needed by raylane\.put, to count refs"):
        doctor.run(argparse.Namespace(json=None))
    line = next(line for line in capsys.readouterr().out.splitlines() if "private names" in line)
    assert line.startswith("  private names  Ray lacks ray.actor.ActorMethod.nosuch; raylane was run with Ray ")


def test_one_pair_without_a_direct_way_is_unhealthy() -> None:
    good = Finding("a", "b", "tcp", "")
    bad = [Finding("b", "a", "tcp", "blocked"), Finding("b", "a", "object_store", "")]
    assert healthy([good])
    assert not healthy([good, *bad])
    assert "NOT healthy" in report([good, *bad], {})
    assert "tcp            from b to a: blocked" in report(bad, {})
    assert "What to do: allow TCP connections between these hosts" in report(bad, {})


def test_every_transport_has_advice_of_its_own() -> None:
    text = report([Finding("a", "b", name, "broken") for name in backends()], {})
    assert "(num_gpus=1)" in text
    assert "the documentation of the package" not in text


def test_report_separates_failures_from_unsupported_pairs() -> None:
    findings = [
        Finding("a", "itself", "local", ""),
        Finding("a", "itself", "host", "not needed within one process"),
        Finding("a", "b", "local", "the value is in another process"),
        Finding("a", "b", "host", ""),
        Finding("a", "b", "cuda_ipc", NO_DEVICE),
    ]
    text = report(findings, {"h (10.0.0.1)": 15, "i (10.0.0.2)": 0})
    assert "local          1 of 1 tests passed" in text
    assert "host           1 of 1 tests passed" in text
    assert "nothing: all tests passed" in text
    assert "another process" not in text
    assert [line for line in text.splitlines() if "cuda_ipc" in line] == [
        "  cuda_ipc       not tested, because this process has no CUDA device"
    ]
    assert "workers on h (10.0.0.1) run at niceness 15" in text
    assert "i (10.0.0.2)" not in text
    assert "Healthy" in text
