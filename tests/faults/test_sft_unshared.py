"""Training on two Ray nodes that share no folder, with checkpoints on an S3 server."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from tests.faults import networks

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def test_training_without_a_shared_folder_saves_and_resumes(tmp_path: Path) -> None:
    s3fs = pytest.importorskip("s3fs", reason="the extra s3 is not installed")
    why = networks.refused()
    if why is not None:
        pytest.skip(f"namespaces cannot be made here: {why}")
    root = Path(__file__).parents[2]
    paths = ":".join([f"{root}/src", str(root), str(Path(s3fs.__file__).parents[1])])
    with networks.network(2) as net:
        head, one = net.addresses
        server = net.start(0, f"cd {root}; exec {sys.executable} -m tests.s3_server {head}")
        assert server.stdout is not None
        endpoint = f"http://{head}:{server.stdout.readline().strip()}"
        driver = net.start(
            0,
            f"export PYTHONPATH={paths}; {networks.ray_node(head, None, 'head')}; cd {root}; "
            f"exec {sys.executable} -m tests.faults.sft_unshared_driver {head} {tmp_path} {endpoint}",
        )
        start = networks.ray_node(one, head, "one")
        # The folder of the run is another, empty one on this node, which also holds the node's copies.
        net.start(
            1,
            f"mount -t tmpfs raylane {tmp_path}; cd {root}; export TMPDIR={tmp_path} PYTHONPATH={paths}; "
            f"until {start} >/dev/null 2>&1; do sleep 0.2; done; cat",
        )
        timer = threading.Timer(280, driver.kill)
        timer.start()
        assert driver.stdout is not None
        heard = []
        for line in driver.stdout:
            heard.append(line.rstrip())
            if "said: done" in line:
                break
        timer.cancel()
    text = "\n".join(heard)
    assert "is not shared: files that the driver writes there are not seen on" in text, text
    assert "said: state of 2 workers" in text, text
    assert "said: interrupted with [2]" in text, text
    assert "said: done, 4.0 of 4.0 CPUs are free" in text, text
