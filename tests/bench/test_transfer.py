from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raylane.bench import transfer

FIELDS = {"case", "contender", "n", "p50_us", "p90_us", "p99_us", "min_us", "first_us", "cpu_s"}


def test_cases() -> None:
    names = [case.name for case in transfer.cases(large=False, only=None)]
    assert names[:2] == ["4B", "4B-new"]
    assert names[2:6] == ["80KB", "80KB-new", "96KB", "96KB-new"]
    assert names[6:] == ["150KB", "150KB-new", "1MB", "1MB-new", "100MB", "100MB-new"]
    assert [case.name for case in transfer.cases(large=True, only="1GB,4B")] == ["1GB", "4B"]
    with pytest.raises(ValueError, match="unknown cases 2GB; the cases are 4B"):
        transfer.cases(large=False, only="2GB")


@pytest.mark.slow
@pytest.mark.processes
def test_a_quick_run_writes_what_it_should(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "bench.json"
    command = [
        sys.executable,
        "-m",
        "raylane",
        "bench",
        "transfer",
        "--quick",
        "--only",
        "4B,1MB",
        "--json",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["machine"]["cores"] > 0
    assert report["versions"]["ray"]
    contenders = {record["contender"] for record in report["records"]}
    assert contenders >= {"raylane:auto", "raylane:host", "raylane:tcp", "ray:object_store", "ray:rdt-gloo"}
    for record in report["records"]:
        assert set(record) == FIELDS
        assert 0 < record["min_us"] <= record["p50_us"] <= record["p90_us"] <= record["p99_us"]
    assert {record["case"] for record in report["records"]} == {"4B", "1MB"}
    assert "x faster" in done.stdout
