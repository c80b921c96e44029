"""Driver-side handle on a model in a GRPO run. Called by `trainer`, and by programs with a loop of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from raylane.rl.config import GrpoRunConfig
from raylane.rl.queue.book import ItemTicket
from raylane.rl.queue.handle import TrajectoryQueue
from raylane.rl.worker import GrpoWorker
from raylane.training.run.policy import Policy
from raylane.training.vocabulary import Vocabulary
from raylane.workers.future import GroupFuture


class GrpoPolicy(Policy[GrpoRunConfig]):
    """Workers that hold a model and train it on groups of answers; the constructor waits until they are ready."""

    more_keys_for_exact_resume: ClassVar[tuple[str, ...]] = ("grpo", "rollout.temperature", "data.shuffle")

    def __init__(self, config: GrpoRunConfig, vocabulary: Vocabulary, total_steps: int, queue: TrajectoryQueue) -> None:
        """Start the workers, which take payloads from `queue`."""
        super().__init__(GrpoWorker, config, vocabulary, total_steps, queue)

    def train_groups_nowait(self, number: int, tickets: Sequence[Sequence[ItemTicket]]) -> GroupFuture:
        """Send step `number` on groups of answers: only their tickets. Acknowledge them after the step has ended."""
        # Tickets only: the payloads lie in shared memory, and each worker reads its part of them.
        self.next_step = number + 1
        return self._send("train_groups", number, [list(group) for group in tickets])

    def train_groups(self, number: int, tickets: Sequence[Sequence[ItemTicket]]) -> dict[str, float]:
        """Run step `number` and return its metrics (listed at `GrpoWorker.train_groups`)."""
        return self.result(self.train_groups_nowait(number, tickets))
