"""Reinforcement learning of language models with answers that can be checked.

queue       `TrajectoryQueue`: rollouts on their way from engines to trainers
"""

from raylane.rl.queue.handle import Batch, TrajectoryQueue

__all__ = ["Batch", "TrajectoryQueue"]
