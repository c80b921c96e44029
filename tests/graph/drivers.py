"""Driver in a process of its own, for tests that kill it: a graph over two named actors and one execution."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import ray

PROGRAM = """
    import time
    import ray
    ray.init(address={address!r}, namespace={namespace!r}, log_to_driver=False, logging_level="error")
    import raylane
    import numpy as np
    one, two = ray.get_actor("one"), ray.get_actor("two")
    with raylane.InputNode() as x:
        node = raylane.bind(two.{second}, raylane.bind(one.{first}, x))
    g = raylane.compile(node)
    result = g.execute(np.ones(100_000))
    {check}
    print("running", flush=True)
    {end}
"""


def start_driver(
    namespace: str, first: str, second: str, *, check: str = "", end: str = "", **env: str
) -> subprocess.Popen[str]:
    """Returns when it says that it runs. `check` is what it does with the result before, `end` what it does then."""
    code = textwrap.dedent(PROGRAM).format(
        address=ray.get_runtime_context().gcs_address,
        namespace=namespace,
        first=first,
        second=second,
        check=check,
        end=end,
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
    )
    assert driver.stdout is not None
    said = driver.stdout.readline()
    while said and "running" not in said:
        said = driver.stdout.readline()
    assert said, driver.communicate()
    return driver
