"""The text of `raylane memory`, without Ray, and the command on a real cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raylane.cli import main
from raylane.cli.memory import as_plain, render, render_weights
from raylane.transport.link import wire
from raylane.transport.link.memory_report import Report


def held(nbytes: int, age_s: float, origin: str, *, snapshot: bool = False) -> wire.Held:
    return wire.Held(nbytes, 2, age_s, origin, "auto", 3, snapshot, result=True)


def report(process: str, values: list[wire.Held], **more: object) -> Report:
    names = ("waiting", "pool_idle_bytes", "pool_used_bytes", "shared_bytes", "shared_idle_bytes")
    plain = {"budget": None, **dict.fromkeys(names, 0), "kept_actors": []}
    nbytes = sum(one.nbytes for one in values)
    holdings = wire.Holdings(**{"entries": len(values), "nbytes": nbytes, "values": values} | plain | more)
    return Report(process, 7, "h", "10.0.0.1", holdings)


def test_render_lists_large_and_old_values_by_process() -> None:
    small = [held(1000 + i, 9000.0 if i == 4 else 1.0, f"W.small{i}") for i in range(5)]
    values = [held(3_000_000_000, 2.0, "W.weights", snapshot=True), *sorted(small, key=lambda one: -one.nbytes)]
    text = render([report("Actor(A, aa)", []), report("Actor(W, bb)", values, entries=9, nbytes=3_000_009_000)], 2)
    lines = text.splitlines()
    assert lines[0] == ("2 processes of this cluster hold 3 GB in 9 published values, and 0 B of idle memory.")
    assert text.index("Actor(W, bb), pid 7 on h (10.0.0.1)") < text.index("Actor(A, aa)")
    rows = [line.split() for line in lines if "W." in line and "Actor" not in line]
    assert [row[-2 if row[-1] == "(snapshot)" else -1] for row in rows] == ["W.weights", "W.small4"]
    assert rows[1][3:5] == ["2.5", "h"]
    assert "6 other values" not in text
    assert "7 other values" in text


def test_render_lists_weights_by_node() -> None:
    assert render_weights([]) == []
    lines = render_weights([("n1", "policy", 2_000_000_000), ("n2", "policy", 5_000_000)])
    assert lines[1:] == [
        "Weights take 2 GB of shared memory; `raylane weights` lists their versions:",
        "       2 GB  'policy' on node n1",
        "       5 MB  'policy' on node n2",
    ]


def test_render_names_budget_kept_actors_and_silent_processes() -> None:
    kept = [wire.Kept("bb", [("weights", 2)], 0), wire.Kept("cc", [], 1)]
    text = render(
        [
            report("the driver", [], kept_actors=kept, budget=1_000_000, waiting=1),
            report("Actor(C, cc2)", [], shared_bytes=3_000_000, shared_idle_bytes=1_000_000),
            report("Actor(W, bb)", [], region_bytes=4_000_000, region_read_bytes=2_000_000, mapped_bytes=7_000_000),
            Report("Actor(S, dd)", 9, "h", "10.0.0.1", None, "no answer within 5 s"),
        ],
        5,
    )
    assert "published: 0 B of a budget of 1 MB in 0 values" in text
    assert "1 publication waiting for room in the budget" in text
    assert "copies for readers: 3 MB, of which 1 MB idle" in text
    assert "memory of raylane.empty: 4 MB, of which other processes read 2 MB and 0 B is idle" in text
    assert "mapped from other processes: 7 MB in use, 0 B idle" in text
    assert "keeps Actor(W, bb) alive: 2 refs to results of weights" in text
    assert "keeps Actor cc alive: 1 ref gone whose values others may still need" in text
    assert "Actor(S, dd), pid 9 on h (10.0.0.1): no answer within 5 s" in text


def test_as_plain_names_all_fields() -> None:
    found = json.loads(json.dumps(as_plain([report("x", [held(5, 1.0, "f")]), Report("y", 1, "h", "a", None, "dead")])))
    assert found[0]["values"][0]["origin"] == "f"
    assert found[0]["nbytes"] == 5
    assert found[1]["why_not"] == "dead"


def test_memory_without_a_cluster_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: object) -> None:
        raise ConnectionError("no cluster")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert main(["memory"]) == 1
    assert "could not connect to a Ray cluster at auto: no cluster. Name" in capsys.readouterr().err
    # Ray itself would try for minutes where nothing listens.
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("ray.init was called"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    for command in (["memory", "--address", "127.0.0.1:1"], ["weights"], ["doctor"]):
        assert main(command) == 1
        assert "127.0.0.1:1: [Errno 111] Connection refused. Name" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="--limit must be greater than 0, got 0"):
        main(["memory", "--limit", "0"])


@pytest.mark.usefixtures("cluster")
def test_memory_command_reports_a_running_cluster(tmp_path: Path) -> None:
    import ray
    import torch

    import raylane

    kept = raylane.put(torch.ones(50_000))
    out = tmp_path / "memory.json"
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "raylane", "memory", "--address", address, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [one for one in json.loads(out.read_text()) if one["process"] == "the driver"]
    origins = [value["origin"] for one in found for value in one["values"]]
    assert any(origin.startswith(f"put at {__file__}") for origin in origins)
    assert "200 kB" in done.stdout
    del kept
