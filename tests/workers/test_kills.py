"""Kills of ranks at random moments of collectives: nothing hangs, and those that live keep their state."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter

import pytest
import ray

from raylane.errors import WorkerCallError, WorkerLostError
from raylane.workers.compiled import CompiledWorkerGroup
from raylane.workers.group import WorkerOptions
from workers import regrouping
from workers.regrouping import Summer

ray.cloudpickle.register_pickle_by_value(regrouping)

KILLS = int(os.environ.get("RAYLANE_KILLS", "4"))
"""Number of kills: hundreds of them are for `make faults`, not for continuous integration."""
RANKS = 4
LATEST_KILL_S = 0.03
"""A call of this group takes about a tenth of it."""


@pytest.mark.faults
@pytest.mark.timeout(60 + 20 * KILLS)
@pytest.mark.claim("worker groups", "a dead rank ends the collectives of the others, and is replaced alone")
def test_groups_go_on_after_kills_at_any_moment(cluster: None) -> None:
    draw, outcomes = random.Random(KILLS), Counter[str]()
    with CompiledWorkerGroup(Summer, RANKS, options=WorkerOptions(num_cpus=0.25)) as group:
        before = group.call("sum", 1.0).results(60)
        for _ in range(KILLS):
            victims = draw.sample(range(RANKS), draw.choice((1, 1, 1, 2)))
            for victim in victims:
                pid, delay_s = before[victim][2], draw.uniform(0, LATEST_KILL_S)
                threading.Timer(delay_s, os.kill, (pid, signal.SIGKILL)).start()
            new: set[int] = set()
            while not new.issuperset(victims):
                try:
                    while True:
                        assert [total for total, *_ in group.call("sum", 1.0).results(60)] == [RANKS] * RANKS
                except (WorkerLostError, WorkerCallError) as error:
                    # The second victim may still be alive: then it dies in a later call.
                    outcomes[type(error).__name__] += 1
                    new.update(group.recover())
            after = group.call("sum", 1.0).results(60)
            assert [total for total, *_ in after] == [RANKS] * RANKS
            for rank in set(range(RANKS)) - new:
                assert after[rank][2] == before[rank][2]
                assert after[rank][1] > before[rank][1], "it has kept its state"
            outcomes["replaced alone"] += new == set(victims)
            before = after
    print(dict(outcomes), "of", KILLS)
    assert outcomes["replaced alone"] == KILLS
