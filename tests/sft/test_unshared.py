"""Training on two Ray nodes that share no folder, with checkpoints on an S3 server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.ray]


def test_training_without_a_shared_folder_saves_and_resumes(hosts: networks.Hosts, tmp_path: Path) -> None:
    pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    head = hosts.net.addresses[0]
    server = hosts.run("head", f"cd {networks.ROOT}; exec {sys.executable} -m tests.s3_server {head}")
    try:
        assert server.stdout is not None
        endpoint = f"http://{head}:{server.stdout.readline().strip()}"
        # The folder of the run is another, empty one on this node, which also holds the node's copies.
        mounted = hosts.run("one", f"mount -t tmpfs raylane {tmp_path}")
        assert mounted.wait(30) == 0
        networks.close_streams(mounted)
        text, _ = hosts.drive("tests.sft.unshared_driver", str(tmp_path), endpoint)
    finally:
        networks.kill_group(server)
        networks.close_streams(server)
    assert "is not shared: files that the driver writes there are not seen on" in text, text
    assert "said: state of 2 workers" in text, text
    assert "said: interrupted with [2]" in text, text
    assert "said: done, 4.0 of 4.0 CPUs are free" in text, text
