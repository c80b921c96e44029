from __future__ import annotations

import os
import resource
import subprocess

import msgspec
import pytest

from raylane.core.process import place


@pytest.mark.claim("security", "a listener without descriptors goes on later, and no process counts as dead meanwhile")
def test_process_is_alive_where_no_descriptor_is_left_to_look() -> None:
    here = place.here()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        found = place.alive(here), place.known_dead(here, here)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == (True, False)


@pytest.mark.processes
def test_ended_process_and_its_zombie_are_dead() -> None:
    child = subprocess.Popen(["sleep", "60"])
    ticks = place.start_ticks(child.pid)
    assert ticks is not None
    there = msgspec.structs.replace(place.here(), pid=child.pid, start_ticks=ticks)
    assert place.alive(there)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not place.alive(there)
    child.wait()
    assert place.known_dead(there, place.here())
