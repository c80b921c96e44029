"""Mixed traffic while actors are killed: no hang, no leak, every error typed.

It takes twenty seconds with kills, or RAYLANE_SOAK_S seconds: an hour with `make faults SOAK=1`.
"""

from __future__ import annotations

import os
import time

import pytest
from tests.graph.soak import LIMIT_S, Soak

from raylane.testing.leaks import leaks, snapshot

SECONDS = float(os.environ.get("RAYLANE_SOAK_S", "20"))
KILL_EVERY_S = min(SECONDS / 3, 20.0)
pytestmark = [pytest.mark.faults, pytest.mark.slow]


@pytest.mark.timeout(SECONDS + 4 * LIMIT_S)
def test_mixed_traffic_with_kills_stays_right(ray_session: None) -> None:
    seed = int(os.environ.get("RAYLANE_SOAK_SEED", time.time_ns() % 10**6))
    before, open_before = snapshot(), len(os.listdir("/proc/self/fd"))
    soak = Soak(4, seed)
    soak.run(SECONDS, KILL_EVERY_S)
    print(f"seed {seed}: {dict(soak.done)}; errors {dict(soak.errors)}")
    wrong, left = soak.wrong, soak.close()
    assert not wrong, f"seed {seed}: " + "\n".join(wrong)
    assert not left, left
    assert sum(soak.done.values()) > SECONDS
    del soak
    found = leaks(before, within_s=30)
    assert not found, found
    # Ray keeps some connections to actors for a while, but not as many as there were calls.
    assert len(os.listdir("/proc/self/fd")) < open_before + 100
